"""Whether a tier is being used, and when to try it again: one warning when trouble begins, one line when it ends.

Threading: no lock, no clock, no I/O; one owner, who passes the time in.
"""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)


class Health:
    """Remembers why a tier is out of use and when the next probe is due.

    Pauses between probes double from ``first_pause_s`` to ``longest_pause_s``. Trouble that comes back within
    ``longest_pause_s`` of the recovery goes on with the pause it had, so a flapping disk cannot flood the log.
    """

    def __init__(self, name: str, *, first_pause_s: float = 1.0, longest_pause_s: float = 60.0) -> None:
        """Start healthy. ``name`` opens each message, such as "Slab tier /mnt/kv"."""
        self._name = name
        self._first_pause_s = first_pause_s
        self._longest_pause_s = longest_pause_s
        self._pause_s = first_pause_s
        self._cause: str | None = None
        self._told: set[str] = set()
        self._began_s = 0.0
        self._next_try_s = 0.0
        self._recovered_s: float | None = None

    @property
    def cause(self) -> str | None:
        """Why the tier is out of use (a ``TierError.cause``), None while it works."""
        return self._cause

    @property
    def next_try_s(self) -> float:
        """When the next probe is due, on the caller's clock; meaningless while the tier works."""
        return self._next_try_s

    def failed(self, cause: str, message: str, now_s: float) -> None:
        """Take note of a failure: warns once per cause and outage, and doubles the pause when a probe failed.

        Stragglers that fail before the next probe is due prolong nothing.
        """
        if self._cause is None:
            self._begin(now_s)
        elif now_s >= self._next_try_s:
            self._pause_s = min(2 * self._pause_s, self._longest_pause_s)
            self._next_try_s = now_s + self._pause_s
        self._cause = cause
        if cause not in self._told:
            self._told.add(cause)
            logger.warning(
                "%s: nothing is stored until this is over (%s): %s. Requests go on and recompute what is missing; "
                "trying again in %.0f s, then every %.0f s at most.",
                self._name,
                cause,
                message,
                self._next_try_s - now_s,
                self._longest_pause_s,
            )

    def may_try(self, now_s: float) -> bool:
        """Say whether to use the tier now: it works, or a probe is due."""
        return self._cause is None or now_s >= self._next_try_s

    def succeeded(self, now_s: float) -> None:
        """Take note that a *probe* succeeded (not a straggler begun before the trouble). No-op while healthy."""
        if self._cause is None:
            return
        logger.info("%s: storing again after %.0f s (was: %s)", self._name, now_s - self._began_s, self._cause)
        self._cause = None
        self._told.clear()
        self._recovered_s = now_s

    def _begin(self, now_s: float) -> None:
        if self._recovered_s is not None and now_s - self._recovered_s < self._longest_pause_s:
            self._pause_s = min(2 * self._pause_s, self._longest_pause_s)
        else:
            self._pause_s = self._first_pause_s
        self._began_s = now_s
        self._next_try_s = now_s + self._pause_s
