"""The clocks of a cell's process: real time, and how far the cell has set it ahead.

``install`` comes before the product is imported, for that takes ``time.monotonic`` as a default argument.
"""

from __future__ import annotations

import time
from typing import Final

_real_monotonic: Final = time.monotonic
_real_time: Final = time.time


class Clock:
    """``ahead_s`` of the monotonic clock only grows; ``wall_ahead_s`` of the time of day goes either way."""

    def __init__(self) -> None:
        self.ahead_s = 0.0
        self.wall_ahead_s = 0.0

    def monotonic(self) -> float:
        """As ``time.monotonic``."""
        return _real_monotonic() + self.ahead_s

    def time(self) -> float:
        """As ``time.time``."""
        return _real_time() + self.ahead_s + self.wall_ahead_s

    def install(self) -> None:
        """Have the process go by this clock."""
        time.monotonic = self.monotonic
        time.time = self.time


CLOCK: Final = Clock()
"""The process's."""


def real_s() -> float:
    """Real time, for limits on how long a cell waits."""
    return _real_monotonic()
