"""Command line of the demo: ``python -m examples.demo``. Exit code 0 only if everything was as it should be.

Threading: one thread. Progress and sentences go to stderr; stdout gets the table or, with ``--json``, one JSON object.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from examples.demo.engine import EngineError
from examples.demo.model import DEMO
from examples.demo.report import as_json, as_table
from examples.demo.run import problems, run


def main(arguments: list[str] | None = None) -> int:
    """Run the demo. Returns 0, or 1 with a sentence for each thing that is not as it should be; 2 for wrong usage."""
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--dir", type=Path, help="directory for the KV files, new or empty (default: a temporary one)")
    parser.add_argument("--keep", action="store_true", help="keep the KV files")
    parser.add_argument("--prompts", type=int, default=4, help="how many prompts (default: 4)")
    parser.add_argument("--tokens", type=int, default=16, help="tokens to generate for each, 1 to 128 (default: 16)")
    chosen = parser.parse_args(arguments)
    if chosen.prompts < 1 or not 1 <= chosen.tokens <= 128:
        parser.error("--prompts must be at least 1 and --tokens 1 to 128")
    if chosen.dir is not None and chosen.dir.exists() and any(chosen.dir.iterdir()):
        parser.error(f"{chosen.dir} is not empty: the first run must be cold")

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything is cleaned up
    begin = time.monotonic()

    def progress(line: str) -> None:
        print(f"[{time.monotonic() - begin:5.1f} s] {line}", file=sys.stderr, flush=True)

    created = chosen.dir is None or not chosen.dir.exists()
    directory = Path(tempfile.mkdtemp(prefix="nixl-offload-kv-")) if chosen.dir is None else chosen.dir.resolve()
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        result = run(DEMO, directory, prompts=chosen.prompts, tokens=chosen.tokens, progress=progress)
    except EngineError as error:
        print(f"The demo failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return 130
    finally:
        if chosen.keep:
            progress(f"the KV files are in {directory}")
        else:
            _empty(directory, remove=created)

    found = problems(result)
    if chosen.json:
        print(json.dumps(as_json(result), indent=2))
    else:
        Console(width=None if sys.stdout.isatty() else 120).print(as_table(result))
    for sentence in found:
        print(f"NOT AS IT SHOULD BE: {sentence}", file=sys.stderr)
    progress("something is wrong" if found else "all is as it should be")
    return 1 if found else 0


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
