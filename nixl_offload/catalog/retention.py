"""Chunks that are not evicted before a time, as far as there is room for that.

Threading: the scheduler's thread alone. No I/O; time is passed in.
Ownership: one pin per retained chunk and tier with slots. Taken back when the time has come, when the chunk is dropped
there, and at a reset. Shared tiers evict nothing, so nothing is pinned there.
Failure: what does not fit within a tier's share, or among ``MAX_RETAINED``, is kept as any other chunk. A restart ends
all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from heapq import heapify, heappop, heappush
from typing import Final

from nixl_offload.index import State
from nixl_offload.tiers.base import Tier
from nixl_offload.tiers.slot_tier import SlotTier
from nixl_offload.types import Key

MAX_RETAINED: Final = 65_536
"""Chunks whose time is remembered."""
MAX_EXPIRED: Final = 256
"""Chunks whose time ends in one call: about a millisecond of a step."""
TIER_SHARE: Final = 0.5
"""Of a tier's slots, the most that is retained: the rest is left for everybody else."""


class Retention:
    """Until when chunks are retained, and where they are pinned for that."""

    def __init__(self, tiers: Sequence[Tier], slot_bytes: Callable[[Key], int]) -> None:
        """``tiers`` may be replaced in place, as long as nothing is pinned there."""
        self._tiers = tiers
        self._slot_bytes = slot_bytes
        self._until_s: dict[Key, float] = {}
        self._pinned: dict[Key, set[int]] = {}
        """The tiers in which a chunk is pinned; those with none are left out."""
        self._bytes = [0] * len(tiers)
        self._ends: dict[float, dict[Key, None]] = {}
        """By time: the chunks that are retained until then, in the order in which they were named. None is empty."""
        self._times: list[float] = []
        """A heap of the times in ``_ends``, and of some that are not there any more."""
        self.next_end_s = float("inf")
        """When ``expire`` has something to do next, or earlier."""

    def __contains__(self, key: Key) -> bool:
        """Whether ``key`` is to be retained."""
        return key in self._until_s

    @property
    def bytes_by_tier(self) -> tuple[int, ...]:
        """Bytes per rank that are retained."""
        return tuple(self._bytes)

    def retain(self, keys: Iterable[Key], until_s: float, now_s: float) -> None:
        """Retain chunks until then, where they are now and where they are stored later; the last word counts.

        A time that is over ends it.
        """
        limits = [self._limit_bytes(position) for position in range(len(self._tiers))]
        for key in keys:
            if until_s <= now_s:
                self.end(key)
            elif key in self._until_s or len(self._until_s) < MAX_RETAINED:
                self._remember(key, until_s)
                for position, limit_bytes in enumerate(limits):
                    self._pin(position, key, limit_bytes)
        if len(self._times) > 2 * len(self._ends) + 1024:
            self._times = list(self._ends)
            heapify(self._times)
        self.next_end_s = self._times[0] if self._times else float("inf")

    def stored(self, position: int, key: Key) -> None:
        """Pin a chunk that is to be retained and has come to a tier."""
        self._pin(position, key, self._limit_bytes(position))

    def dropped(self, position: int, keys: Iterable[Key]) -> None:
        """Let go of chunks that a tier has dropped: nothing is left there to retain."""
        for key in keys if self._pinned else ():
            if position in self._pinned.get(key, ()):
                self._unpin(position, key)

    def expire(self, now_s: float) -> None:
        """End what has had its time: ``MAX_EXPIRED`` chunks at most. Of a prefix its end goes first."""
        left = MAX_EXPIRED
        while left and self._times and self._times[0] <= now_s:
            ending = self._ends.get(self._times[0])
            if ending is None:
                heappop(self._times)
                continue
            key, _ = ending.popitem()
            if not ending:
                del self._ends[self._times[0]]
            del self._until_s[key]
            self._unpin_all(key)
            left -= 1
        self.next_end_s = self._times[0] if self._times else float("inf")

    def clear(self) -> None:
        """End all of it."""
        for key in list(self._until_s):
            self.end(key)
        self._times = []
        self.next_end_s = float("inf")

    def end(self, key: Key) -> None:
        """Retain a chunk no longer."""
        self._forget(key)
        self._unpin_all(key)

    def _remember(self, key: Key, until_s: float) -> None:
        self._forget(key)
        self._until_s[key] = until_s
        ending = self._ends.get(until_s)
        if ending is None:
            ending = self._ends[until_s] = {}
            heappush(self._times, until_s)
        ending[key] = None

    def _forget(self, key: Key) -> None:
        until_s = self._until_s.pop(key, None)
        if until_s is not None:
            ending = self._ends[until_s]
            del ending[key]
            if not ending:
                del self._ends[until_s]

    def _limit_bytes(self, position: int) -> float:
        tier = self._tiers[position]
        return tier.capacity_bytes * TIER_SHARE if isinstance(tier, SlotTier) else 0.0

    def _pin(self, position: int, key: Key, limit_bytes: float) -> None:
        slot_bytes = self._slot_bytes(key)
        if self._bytes[position] + slot_bytes > limit_bytes or position in self._pinned.get(key, ()):
            return
        if self._tiers[position].state(key) is State.READY:
            self._tiers[position].pin(key)
            self._bytes[position] += slot_bytes
            self._pinned.setdefault(key, set()).add(position)

    def _unpin_all(self, key: Key) -> None:
        for position in tuple(self._pinned.get(key, ())):
            self._unpin(position, key)

    def _unpin(self, position: int, key: Key) -> None:
        places = self._pinned[key]
        places.remove(position)
        if not places:
            del self._pinned[key]
        self._bytes[position] -= self._slot_bytes(key)
        self._tiers[position].unpin(key)
