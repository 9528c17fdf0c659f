"""The clocks of a cell's process: real time, and how far the cell has set it ahead, if it has installed this clock.

``install`` comes before the product is imported, for that takes ``time.monotonic`` as a default argument.
"""

from __future__ import annotations

import time
from typing import Final

real_s: Final = time.monotonic
"""Real time, for limits on how long a cell waits."""
_real_time: Final = time.time


class Clock:
    """``ahead_s`` of the monotonic clock only grows; ``wall_ahead_s`` of the time of day goes either way."""

    ahead_s = 0.0
    wall_ahead_s = 0.0

    def install(self) -> None:
        """Have the process go by this clock."""
        time.monotonic = lambda: real_s() + self.ahead_s
        time.time = lambda: _real_time() + self.ahead_s + self.wall_ahead_s


CLOCK: Final = Clock()
"""The process's."""
