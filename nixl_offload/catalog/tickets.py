"""Tickets: what a job may touch until every rank has reported it, and how it ended.

Threading: the scheduler's thread alone. Tickets and ``Settled`` are immutable; tickets travel to the ranks.
Ownership: a ticket holds its locations. They go back to their tiers only when it is settled, so nothing can be written
over while a rank may still touch it, resets and aborts included.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from nixl_offload.catalog.write_through import WriteThrough
from nixl_offload.types import Key, Location, LookupContext, Outcome, worst

NOWHERE = Location(tier=-1, offset=-1, slot_bytes=0)
"""Stands for a chunk that is gone; a rank answers it with FAILED and the request recomputes."""

NOBODY = LookupContext("")

Kind = Literal["store", "load", "promotion", "write_through", "prefetch"]
"""store: KV blocks to a tier. load: a tier to KV blocks. promotion: what a load from a farther tier leaves in memory.
write_through: a tier to a farther one. prefetch: a farther tier to memory, before a load."""


@dataclass(frozen=True, slots=True)
class StoreTicket:
    """Chunks to store: ``keys[i]`` goes to ``locations[i]``."""

    ticket: int
    """Its number; 0: the catalog does not know it, and nothing is to be reported."""
    keys: tuple[Key, ...]
    locations: tuple[Location, ...]


@dataclass(frozen=True, slots=True)
class LoadTicket:
    """Chunks to load, ``keys[i]`` from ``locations[i]``, and where in memory to keep what comes from farther tiers."""

    ticket: int
    keys: tuple[Key, ...]
    locations: tuple[Location, ...]
    promotion_ticket: int = 0
    """Of those chunks that have a promotion slot, in their order; 0: none has."""
    promotion_slots: tuple[Location | None, ...] = ()
    """By position in ``keys``; empty when none has one."""


@dataclass(frozen=True, slots=True)
class MoveTicket:
    """Chunks that go from tier to tier: ``keys[i]`` from ``sources[i]`` to ``targets[i]``, all of one tier.

    That is a farther one, or, of a prefetch, memory.
    """

    ticket: int
    keys: tuple[Key, ...]
    sources: tuple[Location, ...]
    targets: tuple[Location, ...]


@dataclass(slots=True)
class OpenTicket:
    """The catalog's record of a ticket that some rank has not reported yet."""

    kind: Kind
    keys: tuple[Key, ...]
    locations: tuple[Location, ...]
    """What is written; of a load, what is read."""
    ranks_left: int
    failures: dict[int, Outcome] = field(default_factory=dict)
    """By position: the worst that any rank has said."""
    writes: tuple[WriteThrough, ...] = ()
    """Of a write-through, by position."""
    sources: tuple[Location, ...] = ()
    """Of a prefetch, by position; pinned."""
    doubtful: tuple[int, ...] = ()
    """Of a store: tiers that may have the chunks already."""

    def take(self, ranks: int, failures: Mapping[int, Outcome]) -> bool:
        """Take the word of ``ranks`` ranks. True: it was the last."""
        for position, outcome in failures.items():
            if 0 <= position < len(self.keys) and outcome is not Outcome.OK:
                self.failures[position] = worst(outcome, self.failures.get(position, Outcome.OK))
        self.ranks_left -= ranks
        return self.ranks_left <= 0

    def keys_by_tier(self) -> dict[int, list[Key]]:
        """Return the keys by the tier of their location; those that are nowhere are left out."""
        keys: dict[int, list[Key]] = {}
        for key, location in zip(self.keys, self.locations, strict=True):
            if location.tier >= 0:
                keys.setdefault(location.tier, []).append(key)
        return keys


@dataclass(frozen=True, slots=True)
class Settled:
    """How a ticket ended."""

    kind: Kind
    keys: tuple[Key, ...]
    failed: Mapping[Key, Outcome]
    """The worst outcome that any rank reported."""
    tiers: tuple[int, ...]
    """By position: the tier that was written to, or, of a load, read from; -1 for a chunk that was gone."""
