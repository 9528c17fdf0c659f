"""Which new chunks are stored, and where: those offered often enough, in the nearest tier that takes them, and only as
much at a time as storage keeps up with.

Threading: the scheduler's thread alone. No I/O, no clock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Final

from nixl_offload.index import State
from nixl_offload.types import Key, Location

if TYPE_CHECKING:
    from nixl_offload.catalog.catalog import Catalog

TRIAL_S: Final = 10.0
"""A disabled tier gets one chunk in this time all the same: ranks look at their storage again when they store."""
MAX_OFFERED: Final = 1 << 18
"""Chunks whose offers are counted, some 150 bytes each; what was not offered for longest is forgotten first."""


class Placing:
    """Reserves room for stores, and remembers what is being stored.

    A tier that has ``backlog_bytes`` (per rank) being stored is busy: what comes on top is shed, never queued. When no
    store to it has ended for ``stuck_after_s`` it is passed over instead, as is one that has no room. So is one that a
    rank has disabled, if there is another behind it.
    """

    def __init__(self, catalog: Catalog, *, backlog_bytes: int, stuck_after_s: float, store_after: int) -> None:
        """``store_after``: a chunk is stored when it is offered for the N-th time. Raises ValueError below 1."""
        if store_after < 1:
            raise ValueError(f"store_after must be 1 or more, not {store_after}")
        self._catalog = catalog
        self._tiers = catalog.tiers
        self._backlog_bytes = backlog_bytes
        self._stuck_after_s = stuck_after_s
        self._store_after = store_after
        self._offers: OrderedDict[int, int] = OrderedDict()
        """By the hash of a key, the latest offer last. Two keys with one hash share a count, which does no harm."""
        self._keys: set[Key] = set()
        self._bytes = [0] * len(self._tiers)
        self._ended_s = [0.0] * len(self._tiers)
        """By tier: when a store was settled last, or begun while there was none."""
        self._next_trial_s: dict[int, float] = {}
        """Of the tiers that are disabled."""

    def __contains__(self, key: Key) -> bool:
        """Whether ``key`` is being stored."""
        return key in self._keys

    @property
    def bytes_by_tier(self) -> tuple[int, ...]:
        """Bytes per rank that are being stored."""
        return tuple(self._bytes)

    def disable(self, positions: Collection[int], now_s: float) -> None:
        """Pass over these tiers, and no others, from now on."""
        self._next_trial_s = {at: self._next_trial_s.get(at, now_s + TRIAL_S) for at in positions}

    def admits(self, key: Key) -> bool:
        """Count an offer of ``key``, and say whether it is to be stored."""
        if self._store_after == 1:
            return True
        offers = self._offers.pop(hash(key), 0) + 1
        self._offers[hash(key)] = offers
        if len(self._offers) > MAX_OFFERED:
            self._offers.popitem(last=False)
        return offers >= self._store_after

    def place(
        self, key: Key, states: Sequence[State | None], refused: set[tuple[int, int]], now_s: float
    ) -> Location | None:
        """Make ``key`` WRITING in the nearest tier that takes it. None: none does. ``states``: of the key, by tier.

        ``refused``: (tier, slot size) without room; the caller's, until one is freed.
        """
        needed = self._catalog.slot_bytes(key)
        for position, tier in enumerate(self._tiers):
            # A tier that still holds the key, EVICTING or WRITING, cannot take it a second time.
            if states[position] is not None or (position, needed) in refused:
                continue
            if position in self._next_trial_s and position + 1 < len(self._tiers):
                if now_s < self._next_trial_s[position]:
                    continue
                self._next_trial_s[position] = now_s + TRIAL_S
            storing_bytes = self._bytes[position]
            if storing_bytes and storing_bytes + needed > self._backlog_bytes:
                if now_s - self._ended_s[position] <= self._stuck_after_s:
                    return None
                continue
            evicted: list[Key] = []
            location = tier.reserve(key, needed, evicted)
            self._catalog.removed(position, evicted)
            if location is None:
                refused.add((position, needed))
                continue
            if not storing_bytes:
                self._ended_s[position] = now_s
            self._bytes[position] += needed
            self._keys.add(key)
            return location
        return None

    def ended(self, key: Key, location: Location, now_s: float) -> None:
        """A store is settled, however it ended."""
        self._keys.discard(key)
        self._bytes[location.tier] -= location.slot_bytes
        self._ended_s[location.tier] = now_s

    def clear(self) -> None:
        """Forget the offers of all chunks. What is being stored goes on, until ``ended``."""
        self._offers.clear()
