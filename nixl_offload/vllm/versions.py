"""Which vLLM versions this package knows. Imports nothing, so that commands can ask without a vLLM at hand.

Threading: a constant and a pure function.
"""

from __future__ import annotations

import re
from typing import Final

SUPPORTED: Final = ((0, 32), (0, 33))
"""Minor versions that are accepted. Tests have run on 0.32 alone."""


def minor_version(text: str) -> tuple[int, int] | None:
    """Return (major, minor) of a version; None when it says none."""
    match = re.match(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else None


def supported_range() -> str:
    """Return ``0.32 to 0.33``."""
    low, high = (".".join(map(str, item)) for item in (SUPPORTED[0], SUPPORTED[-1]))
    return f"{low} to {high}"
