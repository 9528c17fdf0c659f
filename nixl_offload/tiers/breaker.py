"""A circuit breaker: failures in a row disable a tier; after a pause one trial decides whether it is used again.

Threading: no lock, no clock, no I/O; one owner, which passes the time in (monotonic seconds).
"""

from __future__ import annotations

import logging
import math
from enum import Enum

logger = logging.getLogger(__name__)


class BreakerState(Enum):
    """The state of a breaker. CLOSED is the good one: everything passes."""

    CLOSED = "closed"
    OPEN = "open"
    """Nothing passes until the pause is over."""
    HALF_OPEN = "half_open"
    """One trial is out; nothing else passes until it is back."""


class Breaker:
    """Opens after ``threshold`` failures in a row; pauses double from ``first_pause_s`` to ``longest_pause_s``.

    A caller that was let through reports its outcome by ``succeeded`` or ``failed``. If a trial reports nothing within
    ``trial_limit_s``, the next caller is the trial. Each cause of an outage is logged once, and its end. Failures that
    return within ``flap_window_s`` of a recovery double the pause and are not logged again: an unstable disk must not
    flood the log.
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
        """Start closed. ``name`` begins each message, such as "S3 tier s3://bucket/prefix"; ``effect`` is what the
        message calls the open state.
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
        """Whether nothing was logged since it last closed."""
        self._pause_s = first_pause_s
        self._failures = 0
        self._opened_s = 0.0
        self.until_s = 0.0
        """When the next trial may begin, unless CLOSED."""
        self.state = BreakerState.CLOSED
        self.cause = ""
        """Why it is open, in a word; empty while closed."""
        self.closed_s = -math.inf
        """When it last closed. Questions asked before that time say nothing about the storage now."""

    @property
    def closed(self) -> bool:
        """Whether everything passes."""
        return self.state is BreakerState.CLOSED

    def allows(self, now_s: float) -> bool:
        """Return whether a caller may pass now. After a pause, the first caller is the trial: True for it alone."""
        if self.state is BreakerState.CLOSED:
            return True
        if now_s < self.until_s:
            return False
        self.state = BreakerState.HALF_OPEN
        self.until_s = now_s + self._trial_limit_s
        return True

    def succeeded(self, now_s: float) -> None:
        """Record a success. Closes the breaker if a trial is out; a late success from before the outage does not."""
        self._failures = 0
        if self.state is not BreakerState.HALF_OPEN:
            return
        level = logging.DEBUG if self._is_silent else logging.INFO
        logger.log(level, "%s: in use again after %.0f s (was: %s)", self._name, now_s - self._opened_s, self.cause)
        self.state, self.cause = BreakerState.CLOSED, ""
        self.closed_s = now_s
        self._is_silent = True

    def failed(self, cause: str, message: str, now_s: float, trace: BaseException | None = None) -> None:
        """Record a failure. Opens after ``threshold`` in a row; after a failed trial it opens again, for twice as long.

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
