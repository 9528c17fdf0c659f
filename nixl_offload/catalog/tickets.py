"""What the catalog tells: tickets to the ranks, and what has ended, what has changed, and figures for metrics.

Threading: the scheduler's thread alone. All but ``OpenTicket`` is immutable; tickets travel to the ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from nixl_offload.catalog.moves import Move
from nixl_offload.types import Key, Location, LookupContext, Outcome, worst

NOWHERE: Final = Location(tier=-1, offset=-1, slot_bytes=0)
"""Stands for a chunk that is gone; a rank answers it with FAILED and the request recomputes."""

NOBODY: Final = LookupContext("")

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
    moves: tuple[Move, ...] = ()
    """Of a write-through and of a prefetch, by position."""
    doubtful: tuple[int, ...] = ()
    """Of a store: tiers that may have the chunks already."""
    failures: dict[int, Outcome] = field(default_factory=dict)
    """By position: the worst that any rank has said."""

    def take(self, ranks: int, failures: Mapping[int, Outcome]) -> bool:
        """Take the word of ``ranks`` ranks. True: it was the last."""
        for position, outcome in failures.items():
            if 0 <= position < len(self.keys) and outcome is not Outcome.OK:
                self.failures[position] = worst(outcome, self.failures.get(position, Outcome.OK))
        self.ranks_left -= ranks
        return self.ranks_left <= 0


@dataclass(frozen=True, slots=True)
class Settled:
    """How a ticket ended."""

    kind: Kind
    keys: tuple[Key, ...]
    failed: Mapping[Key, Outcome]
    """The worst outcome that any rank reported."""
    tiers: tuple[int, ...]
    """By position: the tier that was written to, or, of a load, read from; -1 for a chunk that was gone."""


class Change(NamedTuple):
    """Chunks that became loadable from a tier, or ceased to be: the source of vLLM's events."""

    tier: int
    keys: tuple[Key, ...]
    removed: bool


@dataclass(frozen=True, slots=True)
class Counts:
    """What a catalog holds and has done; for metrics. Bytes are per rank."""

    storing_bytes: tuple[int, ...]
    """Being stored from KV blocks, by tier."""
    write_through_bytes: tuple[int, ...]
    """Being moved, by target."""
    unsaved_bytes: int
    """Pinned in memory for farther tiers."""
    pending_writes: tuple[int, ...]
    """Chunks that wait to be moved, by target."""
    write_throughs: Mapping[tuple[int, str], int]
    """Chunks by target and what became of them. ``gone``: evicted or reset before their turn. ``refused``: their tier
    took nothing for too long. ``overflow``: too many waited. Of write-throughs outcomes as well."""
    not_admitted: int
    """Offers of chunks that were not asked for often enough yet."""
    no_room: int
    """Offers of chunks that no tier took: full, disabled, or too slow."""
    unanswered: int
    """The same, for lookups that left out a tier which had not answered and may have the chunks."""
    retained_bytes: tuple[int, ...]
    """Not to be evicted before a time, by tier."""
    prefetches_given_up: Mapping[str, int]
    """By why their lookups ended early: see ``Moves.given_up``."""
