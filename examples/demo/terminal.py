"""Progress at the terminal, and an end without a traceback, for the demo and benchmarks.

Threading: one thread.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from typing import TypeVar

from examples.demo.engine import EngineError

Progress = Callable[[str], None]
Result = TypeVar("Result")


def start() -> Progress:
    """Let SIGTERM clean up as any exit does. Returns a function that prints the time since now and a line to stderr."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    begin = time.monotonic()

    def progress(line: str) -> None:
        print(f"[{time.monotonic() - begin:5.1f} s] {line}", file=sys.stderr, flush=True)

    return progress


def attempt(run: Callable[[], Result], *, errors: type[Exception] = EngineError) -> Result:
    """Return what ``run`` does. SystemExit with a sentence (1: EngineError, or one of ``errors``; 130: interrupted)."""
    try:
        return run()
    except (EngineError, errors) as error:
        print(f"Failed: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        raise SystemExit(130) from None
