"""Log lines that cannot flood: one per cause and interval, the next one telling how many were held back.

Threading: belongs to one thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

INTERVAL_S = 30.0


@dataclass(slots=True)
class _Cause:
    next_s: float
    held_back: int = 0


class RateLog:
    """Wraps a logger. ``cause`` is a short word that groups lines."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float], interval_s: float = INTERVAL_S) -> None:
        self._logger = logger
        self._clock = clock
        self._interval_s = interval_s
        self._causes: dict[str, _Cause] = {}

    def warning(self, cause: str, message: str, *args: object) -> None:
        """Log at WARNING, unless this cause was logged within the interval."""
        self._log(logging.WARNING, cause, message, args, None)

    def error(self, cause: str, message: str, *args: object, exc_info: BaseException | None = None) -> None:
        """Log at ERROR, with a traceback if ``exc_info`` is given, unless this cause was logged within the interval."""
        self._log(logging.ERROR, cause, message, args, exc_info)

    def _log(
        self, level: int, cause: str, message: str, args: tuple[object, ...], exc_info: BaseException | None
    ) -> None:
        now_s = self._clock()
        state = self._causes.get(cause)
        if state is not None and now_s < state.next_s:
            state.held_back += 1
            return
        if state is not None and state.held_back:
            message += " (%d more like this since the last line)"
            args = (*args, state.held_back)
        self._causes[cause] = _Cause(now_s + self._interval_s)
        self._logger.log(level, message, *args, exc_info=exc_info)
