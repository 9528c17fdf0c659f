"""What the commands share: sizes and times for people, progress, arguments that carry units.

Threading: one thread.
"""

from __future__ import annotations

import argparse
import time
from datetime import datetime, timezone
from typing import Final, TextIO

from nixl_offload.units import parse_duration, parse_size

_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_EACH_S: Final = 0.2
_EACH_LOG_LINE_S: Final = 10.0


def about_size(size_bytes: int) -> str:
    """Render a size to three digits or so: ``3.14GiB``."""
    number, unit = float(size_bytes), 0
    while number >= 1023.5 and unit < len(_UNITS) - 1:
        number, unit = number / 1024, unit + 1
    decimals = 0 if unit == 0 or number >= 99.95 else 1 if number >= 9.995 else 2
    return f"{number:.{decimals}f}{_UNITS[unit]}"


def moment(seconds: float) -> str:
    """Render a time since the epoch in UTC: ``2026-11-21 14:03:13Z``. What no calendar has is a dash."""
    try:
        return f"{datetime.fromtimestamp(seconds, timezone.utc):%Y-%m-%d %H:%M:%S}Z"
    except (ValueError, OverflowError, OSError):
        return "-"


def size_argument(text: str) -> int:
    """Read a size given on the command line."""
    try:
        return parse_size(int(text) if text.isascii() and text.isdigit() else text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(f"{text!r} {exc}") from None


def duration_argument(text: str) -> float:
    """Read a duration given on the command line."""
    try:
        return parse_duration(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(f"{text!r} {exc}") from None


def rate_argument(text: str) -> int:
    """Read bytes per second given on the command line, such as 500MB/s."""
    per_second = text.removesuffix("/s")
    if per_second == text:
        raise argparse.ArgumentTypeError(f"{text!r} is no rate; allowed: a size and /s, such as 500MB/s")
    rate = size_argument(per_second)
    if not rate:
        raise argparse.ArgumentTypeError(f"{text!r} would never end")
    return rate


def plural(count: int, noun: str) -> str:
    """Return ``1 object`` or ``1,234 objects``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


class Progress:
    """One line that is written over on a terminal; a line every ten seconds in a log. Erased by ``clear``."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._terminal = stream.isatty()
        self._next_s = time.monotonic() + (_EACH_S if self._terminal else _EACH_LOG_LINE_S)
        self._shown = False

    def __call__(self, done: str, objects: int) -> None:
        """Show ``1,234 objects counted``, unless something was shown just now."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        text = f"{plural(objects, 'object')} {done} so far"
        if self._terminal:
            self._stream.write(f"\r\x1b[K{text}")
            self._shown = True
        else:
            self._stream.write(f"nixl-offload: {text}\n")
        self._stream.flush()
        self._next_s = now_s + (_EACH_S if self._terminal else _EACH_LOG_LINE_S)

    def clear(self) -> None:
        """Leave no half line behind."""
        if self._shown:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._shown = False
