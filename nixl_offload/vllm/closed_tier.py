"""Holds a tier's position in the catalog until the scheduler's half and every rank have opened it.

Threading: the scheduler's thread. Reads no clock: time is passed in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from nixl_offload.index import State
from nixl_offload.tiers.base import Place, Tier, TierStatistics
from nixl_offload.types import Key, Location, Lookup, LookupContext, Outcome

RANKS_WAIT_S = 5.0
"""Requests wait so long at most, from the first that would hit, for the ranks to open a tier."""


class ClosedTier:
    """Has nothing and takes nothing: implements ``tiers.base.Tier``.

    ``opened``: the tier that serves here as soon as the ranks have opened theirs. What it has is worth a moment's
    wait, and lookups say RETRY for that; what it has not is a MISS at once. None: nobody waits.
    """

    def __init__(self, opened: Tier | None = None) -> None:
        self._opened = opened
        self._held_since_s: float | None = None

    def give_up(self) -> None:
        """Have nobody wait any more."""
        self._opened = None

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

    @property
    def place(self) -> Place:
        """Nobody is sent here."""
        raise AssertionError("nobody is sent to a closed tier")

    @property
    def is_looking(self) -> bool:
        """Whether some request waits for an answer of the storage."""
        return self._opened is not None and self._opened.is_looking

    @property
    def is_local(self) -> bool:
        """As the tier that will serve here."""
        return self._opened is not None and self._opened.is_local

    @property
    def in_use(self) -> bool:
        """Never."""
        return False

    def statistics(self) -> TierStatistics:
        """There is nothing to count."""
        return TierStatistics()

    def close(self, pending: Iterable[Key] = ()) -> None:
        """Nothing is open."""

    def state(self, key: Key) -> State | None:
        """It knows no key."""
        return None

    def reserve(self, key: Key, slot_bytes: int, evicted: list[Key]) -> Location | None:
        """There is no room."""
        return None

    def commit(self, key: Key) -> bool:
        """Nothing was reserved."""
        return False

    def abort(self, key: Key) -> None:
        """Nothing was reserved."""

    def retire(self, key: Key) -> None:
        """Nothing was reserved."""

    def pin(self, key: Key) -> Location:
        """Nothing is READY."""
        raise AssertionError("a closed tier has no chunk")

    def unpin(self, key: Key) -> None:
        """Nothing was pinned."""

    def touch(self, key: Key) -> None:
        """It knows no key."""

    def flush(self, now_s: float) -> None:
        """The scheduler's step is over: begin what lookups have asked for."""
        if self._opened is not None:
            self._opened.flush(now_s)

    def forget_request(self, request_id: str) -> None:
        """No more lookups will come for this request."""
        if self._opened is not None:
            self._opened.forget_request(request_id)

    def doubts(self, request_id: str) -> bool:
        """It takes nothing either."""
        return False

    def stored(self, keys: Sequence[Key], failed: Mapping[Key, Outcome], now_s: float) -> None:
        """Nothing was stored."""

    def loaded(self, keys: Sequence[Key], failed: Mapping[Key, Outcome], now_s: float) -> list[Key]:
        """Nothing was loaded."""
        return []

    def drop(self, key: Key) -> bool:
        """There is nothing to drop."""
        return False

    def clear(self) -> None:
        """There is nothing to drop."""
