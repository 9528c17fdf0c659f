"""Command line of the demo: ``python -m examples.demo [--s3]``. Exit code 0 only if everything was as it should be.

Threading: one thread. Progress and sentences go to stderr; stdout gets the table or, with ``--json``, one JSON object.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from examples.demo import terminal
from examples.demo.handover import problems
from examples.demo.model import DEMO
from examples.demo.report import as_json, as_table
from examples.demo.run import run


def main(arguments: list[str] | None = None) -> int:
    """Run the demo. Returns 0, or 1 with a sentence for each thing that is not as it should be; 2 for wrong usage."""
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--json", action="store_true", help="print one JSON object instead of a table")
    add("--prompts", type=int, default=4, help="how many prompts (default: 4)")
    add("--tokens", type=int, default=16, help="tokens to generate for each, 1 to 128 (default: 16)")
    add("--s3", action="store_true", help="two engines and a bucket of a local S3 server, instead of files")
    add("--mover", choices=("auto", "obj", "obstore"), default="auto", help="how bytes travel to S3 (default: auto)")
    add("--dir", type=Path, help="directory for the files, new or empty; it is kept (default: a temporary one)")
    chosen = parser.parse_args(arguments)
    if chosen.prompts < 1 or not 1 <= chosen.tokens <= 128:
        parser.error("--prompts must be at least 1 and --tokens 1 to 128")
    if chosen.dir is not None and chosen.dir.exists() and any(chosen.dir.iterdir()):
        parser.error(f"{chosen.dir} is not empty: the first run must be cold")
    progress = terminal.start()
    directory = chosen.dir and chosen.dir.resolve()
    if not directory and not chosen.s3:
        directory = Path(tempfile.mkdtemp(prefix="nixl-offload-kv-"))
    options = {"mover": chosen.mover, "prompts": chosen.prompts, "tokens": chosen.tokens, "progress": progress}
    try:
        result = terminal.attempt(lambda: run(DEMO, None if chosen.s3 else directory, **options), errors=RuntimeError)
    finally:
        if directory and not chosen.dir:
            shutil.rmtree(directory, ignore_errors=True)
    if chosen.json:
        print(json.dumps(as_json(result), indent=2))
    else:
        Console(width=None if sys.stdout.isatty() else 120).print(as_table(result))
    found = problems(result.handover)
    for sentence in found:
        print(f"NOT AS IT SHOULD BE: {sentence}", file=sys.stderr)
    progress("something is wrong" if found else "all is as it should be")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
