"""Command line of the demo: ``python -m examples.demo_s3``. Exit code 0 only if everything was as it should be.

Threading: one thread. Progress and sentences go to stderr; stdout gets the table or, with ``--json``, one JSON object.
"""

from __future__ import annotations

import argparse
import sys

from examples.demo import terminal
from examples.demo.model import DEMO
from examples.demo_s3.report import as_json, as_table
from examples.demo_s3.run import problems, run


def main(arguments: list[str] | None = None) -> int:
    """Run the demo. Returns 0, or 1 with a sentence for each thing that is not as it should be; 2 for wrong usage."""
    parser = argparse.ArgumentParser(prog="python -m examples.demo_s3", description=__doc__.splitlines()[0])
    terminal.add_options(parser, prompts=3)
    parser.add_argument(
        "--mover", choices=("auto", "obj", "obstore"), default="auto", help="how bytes travel (default: auto)"
    )
    chosen = terminal.parse(parser, arguments)
    progress = terminal.start()
    result = terminal.attempt(
        lambda: run(DEMO, prompts=chosen.prompts, tokens=chosen.tokens, mover=chosen.mover, progress=progress),
        errors=RuntimeError,
    )
    return terminal.show(problems(result), as_table(result), as_json(result) if chosen.json else None, progress)


if __name__ == "__main__":
    sys.exit(main())
