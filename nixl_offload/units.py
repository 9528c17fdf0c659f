"""Readable sizes and durations: "500GiB" and "7d" to numbers and back, exactly.

Threading: pure functions, safe anywhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Final

_SIZE_UNITS: Final[dict[str, int]] = {
    "B": 1,
    **{f"{prefix}iB": 2 ** (10 * power) for power, prefix in enumerate("KMGTP", start=1)},
    **{f"{prefix}B": 10 ** (3 * power) for power, prefix in ((1, "k"), *enumerate("KMGTP", start=1))},
}
_DURATION_UNITS: Final[dict[str, Decimal]] = {
    "ms": Decimal("0.001"),
    "s": Decimal(1),
    "m": Decimal(60),
    "h": Decimal(3600),
    "d": Decimal(86400),
}
_QUANTITY: Final = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)\s*")

SIZE_HELP: Final = "a number of bytes, or a number with a unit: B, kB, MB, GB, TB, PB, KiB, MiB, GiB, TiB, PiB"
DURATION_HELP: Final = "a number with a unit: ms, s, m (minutes), h, d"

_NUMBER_PATTERN: Final = r"[0-9]+(\.[0-9]+)?"
SIZE_PATTERN: Final = rf"^\s*{_NUMBER_PATTERN}\s*({'|'.join(_SIZE_UNITS)})\s*$"
"""A regular expression for sizes, for the JSON schema. ``parse_size`` is stricter: it refuses fractions of a byte."""
DURATION_PATTERN: Final = rf"^\s*(?=[0-9.]*[1-9]){_NUMBER_PATTERN}\s*({'|'.join(_DURATION_UNITS)})\s*$"
"""A regular expression for durations greater than zero."""


def parse_size(value: object) -> int:
    """Return ``value`` in bytes: an int is bytes, text carries a unit ("500GiB", "1.5GB").

    Raises ValueError: no number, no or unknown unit, negative, too large, or not a whole number of bytes.
    """
    is_number = isinstance(value, int) and not isinstance(value, bool)
    size_bytes = Decimal(str(value)) if is_number else _read(value, "size", _SIZE_UNITS, SIZE_HELP)
    if size_bytes < 0:
        raise ValueError(f"is negative; allowed: {SIZE_HELP}")
    if size_bytes != int(size_bytes):
        raise ValueError(f"is not a whole number of bytes; allowed: {SIZE_HELP}")
    if size_bytes >= 2**63:
        raise ValueError("is more than a file offset can say; allowed: less than 8192PiB")
    return int(size_bytes)


def _read(value: object, noun: str, units: Mapping[str, int | Decimal], allowed: str) -> Decimal:
    match = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"is not a {noun}; allowed: {allowed}")
    number, unit = match.groups()
    if unit not in units:
        # "500G", "500Gi", "500gb" and "500gib" are the usual slips.
        meant = (each for each in units if unit.lower() in (each.lower(), each[0].lower(), each[:-1].lower()))
        guess = next(meant, None) if noun == "size" else None
        hint = f" (did you mean {number}{guess}?)" if guess else ""
        raise ValueError(f"has the unknown unit {unit!r}{hint}; allowed: {allowed}")
    return Decimal(number) * units[unit]


def format_size(size_bytes: int) -> str:
    """Render ``size_bytes`` in the largest unit that is exact with at most two decimals; ``parse_size`` undoes it."""
    for name in ("PiB", "PB", "TiB", "TB", "GiB", "GB", "MiB", "MB", "KiB", "kB"):
        unit_bytes = _SIZE_UNITS[name]
        if size_bytes >= unit_bytes and size_bytes * 100 % unit_bytes == 0:
            return f"{_plain(Decimal(size_bytes) / unit_bytes)}{name}"
    return f"{size_bytes}B"


def short_size(size_bytes: int) -> str:
    """Render ``size_bytes`` for people, with at most two decimals, rounded down."""
    for name in ("GiB", "MiB", "KiB"):
        if size_bytes >= _SIZE_UNITS[name]:
            return f"{size_bytes * 100 // _SIZE_UNITS[name] / 100:g}{name}"
    return f"{size_bytes}B"


def parse_duration(value: object) -> float:
    """Return text such as "7d", "12h" or "1.5s" in seconds. Raises ValueError for anything else.

    A bare number is refused: it could mean seconds or days.
    """
    return float(_read(value, "duration", _DURATION_UNITS, DURATION_HELP))


def format_duration(duration_s: float) -> str:
    """Render ``duration_s`` in the largest unit that is whole; ``parse_duration`` undoes it."""
    exact_s = Decimal(repr(duration_s))
    for name in ("d", "h", "m", "s", "ms"):
        amount = exact_s / _DURATION_UNITS[name]
        if amount >= 1 and amount == int(amount):
            return f"{int(amount)}{name}"
    return f"{_plain(exact_s)}s"


def _plain(number: Decimal) -> str:
    """Format without exponent and without trailing zeros."""
    text = format(number, "f")
    return text.rstrip("0").rstrip(".") if "." in text else text
