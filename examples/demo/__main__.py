"""Command line of the demo: ``python -m examples.demo``. Exit code 0 only if everything was as it should be.

Threading: one thread. Progress and sentences go to stderr; stdout gets the table or, with ``--json``, one JSON object.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from examples.demo import terminal
from examples.demo.handover import problems
from examples.demo.model import DEMO
from examples.demo.report import as_json, as_table
from examples.demo.run import run


def main(arguments: list[str] | None = None) -> int:
    """Run the demo. Returns 0, or 1 with a sentence for each thing that is not as it should be; 2 for wrong usage."""
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__.splitlines()[0])
    terminal.add_options(parser, prompts=4)
    parser.add_argument("--dir", type=Path, help="directory for the KV files, new or empty (default: a temporary one)")
    parser.add_argument("--keep", action="store_true", help="keep the KV files")
    chosen = terminal.parse(parser, arguments)
    if chosen.dir is not None and chosen.dir.exists() and any(chosen.dir.iterdir()):
        parser.error(f"{chosen.dir} is not empty: the first run must be cold")

    progress = terminal.start()
    created = chosen.dir is None or not chosen.dir.exists()
    directory = Path(tempfile.mkdtemp(prefix="nixl-offload-kv-")) if chosen.dir is None else chosen.dir.resolve()
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        result = terminal.attempt(
            lambda: run(DEMO, directory, prompts=chosen.prompts, tokens=chosen.tokens, progress=progress)
        )
    finally:
        if chosen.keep:
            progress(f"the KV files are in {directory}")
        else:
            _empty(directory, remove=created)
    return terminal.show(
        problems(result.handover), as_table(result), as_json(result) if chosen.json else None, progress
    )


def _empty(directory: Path, *, remove: bool) -> None:
    """Remove what the demo wrote; the directory itself only if the demo made it."""
    if remove:
        shutil.rmtree(directory, ignore_errors=True)
        return
    for path in directory.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
