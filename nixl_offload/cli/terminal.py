"""What commands share at the terminal: sizes and times for people, progress, arguments that carry units.

Threading: one thread.
"""

from __future__ import annotations

import argparse
import time
from datetime import UTC, datetime
from typing import Final, TextIO

from nixl_offload.units import parse_duration, parse_size

_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def about_size(size_bytes: int) -> str:
    """Render a size to three digits or so: ``3.14GiB``."""
    number, unit = float(size_bytes), 0
    while number >= 1023.5 and unit < len(_UNITS) - 1:
        number, unit = number / 1024, unit + 1
    decimals = 0 if unit == 0 or number >= 99.95 else 1 if number >= 9.995 else 2
    return f"{number:.{decimals}f}{_UNITS[unit]}"


def moment(seconds: float | None) -> str:
    """Render a time since the epoch in UTC: ``2026-11-21 14:03:13Z``; ``-`` for none, and for what no calendar has."""
    if seconds is None:
        return "-"
    try:
        return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S}Z"
    except (ValueError, OverflowError, OSError):
        return "-"


def plural(count: int, noun: str) -> str:
    """Return ``1 object`` or ``1,234 objects``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


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


class Progress:
    """One line that is overwritten on a terminal; a line every ten seconds in a log."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._terminal = stream.isatty()
        self._each_s = 0.2 if self._terminal else 10.0
        self._next_s = time.monotonic() + self._each_s
        self._shown = False

    def __call__(self, text: str) -> None:
        """Show ``text``, unless something was shown just now."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + self._each_s
        self._stream.write(f"\r\x1b[K{text}" if self._terminal else f"nixl-offload: {text}\n")
        self._stream.flush()
        self._shown = self._terminal

    def clear(self) -> None:
        """Erase the line."""
        if self._shown:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._shown = False
