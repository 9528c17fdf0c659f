"""What both demos do at the terminal: progress and sentences to stderr, the result to stdout, and an exit code.

Threading: one thread.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from examples.demo.engine import EngineError

Progress = Callable[[str], None]
Result = TypeVar("Result")


def add_options(parser: argparse.ArgumentParser, *, prompts: int) -> None:
    """Add the options of both demos. ``prompts`` is the default."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--prompts", type=int, default=prompts, help=f"how many prompts (default: {prompts})")
    parser.add_argument("--tokens", type=int, default=16, help="tokens to generate for each, 1 to 128 (default: 16)")


def parse(parser: argparse.ArgumentParser, arguments: list[str] | None) -> argparse.Namespace:
    """Parse and check the options. SystemExit(2) for wrong usage."""
    chosen = parser.parse_args(arguments)
    if chosen.prompts < 1 or not 1 <= chosen.tokens <= 128:
        parser.error("--prompts must be at least 1 and --tokens 1 to 128")
    return chosen


def start() -> Progress:
    """Let a SIGTERM clean up as any exit does. Returns what prints a line of progress, with the time since now."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    begin = time.monotonic()

    def progress(line: str) -> None:
        print(f"[{time.monotonic() - begin:5.1f} s] {line}", file=sys.stderr, flush=True)

    return progress


def attempt(run: Callable[[], Result], *, errors: type[Exception] = EngineError) -> Result:
    """Run the demo. SystemExit with a sentence (1: EngineError, or one of ``errors``; 130: interrupted)."""
    try:
        return run()
    except (EngineError, errors) as error:
        print(f"The demo failed: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        raise SystemExit(130) from None


def show(found: list[str], table: Table, as_json: dict[str, Any] | None, progress: Progress) -> int:
    """Print the result, as JSON if that is given, and what is wrong. Returns the exit code."""
    if as_json is not None:
        print(json.dumps(as_json, indent=2))
    else:
        Console(width=None if sys.stdout.isatty() else 120).print(table)
    for sentence in found:
        print(f"NOT AS IT SHOULD BE: {sentence}", file=sys.stderr)
    progress("something is wrong" if found else "all is as it should be")
    return 1 if found else 0
