"""Chunks that are not evicted before a time, as far as there is room for that.

Threading: the scheduler's thread alone. No I/O; time is passed in.
Ownership: one pin per retained chunk and tier with slots. It is taken back when the time has come, when the chunk is
dropped there, and at a reset. Shared tiers evict nothing here, so nothing is pinned there.
Failure: what does not fit within a tier's share, or among ``MAX_RETAINED``, is kept as any other chunk.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, Final

from nixl_offload.index import State
from nixl_offload.tiers.slot_tier import SlotTier
from nixl_offload.types import Key

if TYPE_CHECKING:
    from nixl_offload.catalog.catalog import Catalog

MAX_RETAINED: Final = 65_536
"""Chunks whose time is remembered."""
MAX_EXPIRED: Final = 256
"""Most chunks whose retention ends in one step; they take about a millisecond of it."""
TIER_SHARE: Final = 0.5
"""Of a tier's slots, the most that is retained: the rest is left for everybody else."""


class Retention:
    """Until when chunks are retained, and where they are pinned for that."""

    def __init__(self, catalog: Catalog) -> None:
        self._tiers = catalog.tiers
        self._slot_bytes = catalog.slot_bytes
        self._until_s: dict[Key, float] = {}
        self._ends: list[tuple[float, int, Key]] = []
        """A heap of end times. Of chunks with the same time, the one retained last comes first. An entry is stale if
        ``_until_s`` has another time, or none, for its chunk."""
        self._numbers = count(0, -1)
        self._pinned: tuple[set[Key], ...] = tuple(set() for _ in self._tiers)
        self._bytes = [0] * len(self._tiers)

    @property
    def bytes_by_tier(self) -> tuple[int, ...]:
        """Bytes per rank that are retained."""
        return tuple(self._bytes)

    def retain(self, keys: Iterable[Key], until_s: float, now_s: float) -> None:
        """Retain chunks until then, where they are now and where they are stored later; the last word counts.

        A time that is over ends it.
        """
        for key in keys:
            if until_s <= now_s:
                self.end(key)
            elif key in self._until_s or len(self._until_s) < MAX_RETAINED:
                if self._until_s.get(key) != until_s:
                    self._until_s[key] = until_s
                    heappush(self._ends, (until_s, next(self._numbers), key))
                for position in range(len(self._tiers)):
                    self.stored(position, key)
        if len(self._ends) > 2 * len(self._until_s) + 1024:
            self._ends = [end for end in self._ends if self._until_s.get(end[2]) == end[0]]
            heapify(self._ends)

    def stored(self, position: int, key: Key) -> None:
        """A chunk may have come to a tier: pin it if it is to be retained."""
        if key not in self._until_s or key in self._pinned[position]:
            return
        tier, slot_bytes = self._tiers[position], self._slot_bytes(key)
        if not isinstance(tier, SlotTier) or tier.state(key) is not State.READY:
            return
        if self._bytes[position] + slot_bytes <= tier.capacity_bytes * TIER_SHARE:
            tier.pin(key)
            self._pinned[position].add(key)
            self._bytes[position] += slot_bytes

    def dropped(self, position: int, keys: Iterable[Key]) -> None:
        """A tier has dropped chunks: nothing is left there to retain."""
        for key in keys:
            if key in self._pinned[position]:
                self._pinned[position].remove(key)
                self._bytes[position] -= self._slot_bytes(key)
                self._tiers[position].unpin(key)

    def expire(self, now_s: float) -> None:
        """End the retention of chunks whose time has passed, ``MAX_EXPIRED`` at most. A prefix loses its end first."""
        left = MAX_EXPIRED
        while left and self._ends and self._ends[0][0] <= now_s:
            until_s, _, key = heappop(self._ends)
            if self._until_s.get(key) == until_s:
                self.end(key)
                left -= 1

    def clear(self) -> None:
        """End all of it."""
        for key in list(self._until_s):
            self.end(key)
        self._ends.clear()

    def end(self, key: Key) -> None:
        """Retain a chunk no longer."""
        self._until_s.pop(key, None)
        for position in range(len(self._tiers)):
            self.dropped(position, (key,))
