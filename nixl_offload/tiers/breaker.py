"""A circuit breaker: after failures in a row a tier is disabled, tried again by itself, used again when it answers.

Threading: no lock, no clock, no I/O; one owner, who passes the time in (monotonic seconds).
"""

from __future__ import annotations

import logging
import math
from enum import Enum

logger = logging.getLogger(__name__)


class BreakerState(Enum):
    """CLOSED is the good state: everything passes."""

    CLOSED = "closed"
    OPEN = "open"
    """Nothing passes until the pause is over."""
    HALF_OPEN = "half_open"
    """One trial is out; nothing else passes until it is back."""


class Breaker:
    """Opens after ``threshold`` failures in a row; pauses double from ``first_pause_s`` to ``longest_pause_s``.

    A caller that is let through reports its outcome by ``succeeded`` or ``failed``. A trial without one within
    ``trial_limit_s`` is lost; the next caller is the trial. Trouble that returns within ``flap_window_s`` of a recovery
    doubles the pause and is not logged, so that a disk that comes and goes does not flood the log. Else each cause of
    an outage is logged once, and its end.
    """

    def __init__(
        self,
        name: str,
        *,
        threshold: int = 3,
        first_pause_s: float = 1.0,
        longest_pause_s: float = 30.0,
        trial_limit_s: float = 30.0,
        flap_window_s: float = 0.0,
        effect: str = "disabled",
    ) -> None:
        """Start closed. ``name`` opens each message, such as "S3 tier s3://bucket/prefix"; ``effect`` says what being
        open means.
        """
        self._name = name
        self._threshold = threshold
        self._first_pause_s = first_pause_s
        self._longest_pause_s = longest_pause_s
        self._trial_limit_s = trial_limit_s
        self._flap_window_s = flap_window_s
        self._effect = effect
        self._logged: set[str] = set()
        """Causes that were logged in this outage."""
        self._is_silent = False
        """Whether nothing was logged since it was closed last."""
        self._pause_s = first_pause_s
        self._failures = 0
        self._opened_s = 0.0
        self.until_s = 0.0
        """While it is OPEN: when the next trial may begin."""
        self.state = BreakerState.CLOSED
        self.cause = ""
        """Why it is open, in a word; empty while closed."""
        self.closed_s = -math.inf
        """Since when it is closed, while it is: what was asked earlier says nothing of how things are now."""
        self.openings = 0
        """How often it has opened; for metrics."""

    @property
    def closed(self) -> bool:
        """Whether everything passes."""
        return self.state is BreakerState.CLOSED

    def allows(self, now_s: float) -> bool:
        """Say whether one may go now. When a pause is over the first to ask is the trial: True for it alone."""
        if self.state is BreakerState.CLOSED:
            return True
        if now_s < self.until_s:
            return False
        self.state = BreakerState.HALF_OPEN
        self.until_s = now_s + self._trial_limit_s
        return True

    def succeeded(self, now_s: float) -> None:
        """Take note of a success. Closes the breaker if a trial was out; a straggler's success does not."""
        self._failures = 0
        if self.state is not BreakerState.HALF_OPEN:
            return
        level = logging.DEBUG if self._is_silent else logging.INFO
        logger.log(level, "%s: in use again after %.0f s (was: %s)", self._name, now_s - self._opened_s, self.cause)
        self.state, self.cause = BreakerState.CLOSED, ""
        self.closed_s = now_s
        self._is_silent = True

    def failed(self, cause: str, message: str, now_s: float, trace: BaseException | None = None) -> None:
        """Take note of a failure: opens after ``threshold`` in a row, and again, for twice as long, after a trial's.

        ``trace``: logged with the warning.
        """
        self._failures += 1
        if self.state is BreakerState.HALF_OPEN:
            self._pause_s = min(2 * self._pause_s, self._longest_pause_s)
        elif self.state is BreakerState.CLOSED and self._failures >= self._threshold:
            flaps = now_s - self.closed_s < self._flap_window_s
            self._pause_s = min(2 * self._pause_s, self._longest_pause_s) if flaps else self._first_pause_s
            if not flaps:
                self._logged.clear()
            self._opened_s = now_s
            self.openings += 1
        else:
            return
        self.state, self.cause, self.until_s = BreakerState.OPEN, cause, now_s + self._pause_s
        if cause in self._logged:
            logger.debug("%s: still %s: %s", self._name, self._effect, message)
            return
        self._logged.add(cause)
        self._is_silent = False
        logger.warning(
            "%s: %s (%s): %s. Requests go on and compute what they need; trying again in %.0f s, then every %.0f s at "
            "most.",
            self._name,
            self._effect,
            cause,
            message,
            self._pause_s,
            self._longest_pause_s,
            exc_info=trace,
        )
