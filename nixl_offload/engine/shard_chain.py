"""A rank's tiers where chunks are cut into shards: callers speak of chunks, the tiers' engines move shards.

To an engine each shard that this rank holds is a group of its own, with a header, an outcome and a transfer. In a slot
of a slab or of memory they lie one after the other; elsewhere each is a thing of its own, and where several ranks hold
the same one, the one that has its turn by the key writes it for all.

Threading: as ``chain.ChainEngine``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from nixl_offload.chunk.shards import ShardPlan
from nixl_offload.engine.chain import ChainEngine
from nixl_offload.engine.moves import MoveIO, RelayHost
from nixl_offload.engine.records import ChunkIO, Completion
from nixl_offload.engine.streams import Fence
from nixl_offload.engine.tier_engine import TierEngine
from nixl_offload.tiers.slot_places import SlotPlaces
from nixl_offload.types import Key, Location, Outcome, worst

_Counts = Sequence[int]
"""Into how many shards each chunk of a job, or of a ticket, was cut."""


class ShardChain(ChainEngine):
    """A chunk has the gravest outcome of its shards. One of which this rank writes nothing is OK at once.

    ``ChunkIO.group`` and ``MoveIO.group`` are the caller's: positions among the groups of the plan.
    """

    def __init__(
        self,
        engines: Sequence[TierEngine | None],
        host: RelayHost | None = None,
        *,
        plan: ShardPlan,
        rank: int,
        slot_bytes: Sequence[int],
        shared: Collection[int],
        memory: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``slot_bytes``: of a shard, by position in the rank's ``KVLayout.groups``. ``shared``: positions of the tiers
        that all ranks reach. The rest as for ``ChainEngine``.
        """
        super().__init__(engines, host, memory=memory, clock=clock)
        self._plan = plan
        self._rank = rank
        self._shared = frozenset(shared)
        self._parts = [_parts(plan.layout_groups(rank, group), slot_bytes) for group in range(len(plan.groups))]
        """By group of the plan: what this rank holds of a chunk. A stage may hold nothing."""
        self._places: dict[int, SlotPlaces] = {}
        """By tier, where this rank reads slots of others."""
        self._of_jobs: dict[int, _Counts] = {}
        self._of_tickets: dict[int, _Counts] = {}

    def take_places(self, tier: int, places: SlotPlaces | None) -> None:
        """From now on read the locations of a tier by ``places``; None: as they are."""
        self._places.pop(tier, None)
        if places is not None and places.together > 1:
            self._places[tier] = places

    def submit_store(self, job_id: int, chunks: Sequence[ChunkIO]) -> None:
        if job_id in self._of_jobs:
            self._refuse_twice(job_id)
            return
        parts = [self._chunk(chunk) if self._writes(chunk.key, chunk.group, chunk.location) else [] for chunk in chunks]
        self._of_jobs[job_id] = [len(cut) for cut in parts]
        super().submit_store(job_id, _flat(parts))

    def submit_load(
        self,
        job_id: int,
        chunks: Sequence[ChunkIO],
        *,
        expedited: bool = False,
        promotion_ticket: int = 0,
        fence: Fence | None = None,
    ) -> None:
        parts = [self._chunk(chunk) for chunk in chunks]
        if promotion_ticket:
            promoted = zip(chunks, parts, strict=True)
            self._of_tickets[promotion_ticket] = [len(cut) for chunk, cut in promoted if chunk.host_offset is not None]
        # A second one is refused while the first one goes on.
        self._of_jobs.setdefault(job_id, [len(cut) for cut in parts])
        super().submit_load(job_id, _flat(parts), expedited=expedited, promotion_ticket=promotion_ticket, fence=fence)

    def submit_moves(self, ticket: int, moves: Sequence[MoveIO]) -> None:
        parts = [self._move(move) if self._writes(move.key, move.group, move.target) else [] for move in moves]
        self._of_tickets[ticket] = [len(cut) for cut in parts]
        super().submit_moves(ticket, [each for cut in parts for each in cut])

    def finished(self) -> list[Completion]:
        return [_folded(done, self._of_jobs) for done in super().finished()]

    def settled(self) -> list[Completion]:
        return [_folded(done, self._of_tickets) for done in super().settled()]

    def _writes(self, key: Key, group: int, target: Location) -> bool:
        """Whether this rank writes a chunk to ``target``: in a shared tier one of those that hold the same does, and in
        slots that have one copy for several ranks the one in whose slab it lies.
        """
        places = self._places.get(target.tier)
        if places is not None:
            return places.seen_from(self._rank, target.offset, target.slot_bytes) < places.rank_bytes
        if target.tier not in self._shared or not 0 <= group < len(self._parts):
            return True
        return self._plan.groups[group].writes(self._rank, key)

    def _here(self, location: Location) -> Location:
        """Return where this rank finds a slot."""
        places = self._places.get(location.tier)
        if places is None:
            return location
        offset = places.seen_from(self._rank, location.offset, location.slot_bytes)
        return Location(location.tier, offset, location.slot_bytes)

    def _chunk(self, chunk: ChunkIO) -> list[ChunkIO]:
        location = self._here(chunk.location)
        return [
            ChunkIO(
                chunk.key,
                part.of(location),
                part.group,
                chunk.block_ids,
                chunk.first_block,
                None if chunk.host_offset is None else chunk.host_offset + part.offset,
            )
            for part in self._cut(chunk.group)
        ]

    def _move(self, move: MoveIO) -> list[MoveIO]:
        source, target = self._here(move.source), self._here(move.target)
        return [MoveIO(move.key, part.group, part.of(source), part.of(target)) for part in self._cut(move.group)]

    def _cut(self, group: int) -> Sequence[_Part]:
        """Return what this rank holds of a chunk. A group that there is not stays as it is: the engines refuse it."""
        return self._parts[group] if 0 <= group < len(self._parts) else [_Part(-1, 0, 0)]


class _Part(NamedTuple):
    """A shard that this rank holds."""

    group: int
    """Of the engines."""
    offset: int
    """Bytes from the begin of the chunk's slot."""
    slot_bytes: int

    def of(self, location: Location) -> Location:
        return Location(location.tier, location.offset + self.offset, self.slot_bytes)


def _parts(groups: Iterable[int], slot_bytes: Sequence[int]) -> list[_Part]:
    parts, offset = [], 0
    for group in groups:
        parts.append(_Part(group, offset, slot_bytes[group]))
        offset += slot_bytes[group]
    return parts


def _flat(parts: Iterable[Sequence[ChunkIO]]) -> list[ChunkIO]:
    return [chunk for cut in parts for chunk in cut]


def _folded(done: Completion, counts: dict[int, _Counts]) -> Completion:
    """Put the outcomes of shards together to those of chunks."""
    cut = counts.pop(done.job_id)
    outcomes, begin = [], 0
    for count in cut:
        outcomes.append(worst(Outcome.OK, *done.outcomes[begin : begin + count]))
        begin += count
    return replace(done, outcomes=tuple(outcomes))
