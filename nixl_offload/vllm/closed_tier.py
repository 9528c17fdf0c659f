"""Holds a tier's position in the catalog until the scheduler's half and every rank have opened it.

Threading: the scheduler's thread. Reads no clock: time is passed in.
"""

from __future__ import annotations

from nixl_offload.tiers.base import Tier
from nixl_offload.types import Key, Lookup, LookupContext

RANKS_WAIT_S = 5.0
"""Requests wait so long at most, from the first that would hit, for the ranks to open a tier."""


class ClosedTier(Tier):
    """Has nothing and takes nothing.

    ``opened``: the tier that serves here as soon as the ranks have opened theirs. What it has is worth a moment's
    wait, and lookups say RETRY for that; what it has not is a MISS at once. None: nobody waits.
    """

    def __init__(self, opened: Tier | None = None) -> None:
        self._opened = opened
        self._held_since_s: float | None = None
        self.is_local = opened is not None and opened.is_local

    def give_up(self) -> None:
        """Have nobody wait any more."""
        self._opened = None

    @property
    def is_looking(self) -> bool:
        return self._opened is not None and self._opened.is_looking

    def lookup(self, key: Key, context: LookupContext, now_s: float) -> Lookup:
        """Say RETRY for what will be found here in a moment, for ``RANKS_WAIT_S`` at most."""
        if self._opened is None:
            return Lookup.MISS
        answer = self._opened.lookup(key, context, now_s)
        if answer is not Lookup.HIT:
            return answer
        if self._held_since_s is None:
            self._held_since_s = now_s
        return Lookup.RETRY if now_s - self._held_since_s < RANKS_WAIT_S else Lookup.MISS

    def flush(self, now_s: float) -> None:
        if self._opened is not None:
            self._opened.flush(now_s)

    def forget_request(self, request_id: str) -> None:
        if self._opened is not None:
            self._opened.forget_request(request_id)
