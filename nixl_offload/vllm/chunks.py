"""Turns a ticket into one rank's chunks: for each chunk, the shards that the rank holds.

Each shard is a group of its own in the rank's layout, with a header, an outcome and a transfer. In slots, shards lie
one after the other. In shared tiers each has a name, and one of the ranks that hold it writes it.

Threading: called by the worker's main thread.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from nixl_offload.catalog.catalog import LoadTicket, MoveTicket, StoreTicket
from nixl_offload.chunk.layout import KVLayout, split_job
from nixl_offload.chunk.shards import ShardPlan
from nixl_offload.engine import Chunk, make_move
from nixl_offload.tiers.slots import SlotPlaces
from nixl_offload.types import Key, Location, key_group

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import GPULoadStoreSpec


class _Part(NamedTuple):
    """A shard that this rank holds."""

    shard: int
    """Position in ``KVLayout.groups``, which has a group for each shard."""
    offset: int
    """Bytes from the start of the chunk's slot."""
    slot_bytes: int

    def of(self, location: Location) -> Location:
        return Location(location.tier, location.offset + self.offset, self.slot_bytes)


class RankChunks:
    """Cuts tickets into this rank's chunks. Leaves out chunks of which it holds, or writes, nothing."""

    def __init__(
        self,
        layout: KVLayout,
        group_ids: Sequence[int],
        plan: ShardPlan,
        rank: int,
        *,
        memory: int | None,
        shared: Collection[int] = (),
    ) -> None:
        """``group_ids``: ids of vLLM's groups, by position. ``memory``: the position of the memory tier. ``shared``:
        positions of the tiers that all ranks reach.
        """
        self._blocks_per_chunk = layout.blocks_per_chunk
        self._group_ids = group_ids
        self._group_at = {group: at for at, group in enumerate(group_ids)}
        self._memory = memory
        self._rank = rank
        self._plan = plan
        self._shared = frozenset(shared)
        self._places: dict[int, SlotPlaces] = {}
        """By tier: where this rank finds slots that lie in slabs of other ranks."""
        self._parts: list[list[_Part]] = [[] for _ in plan.groups]
        for at, (group, _) in enumerate(plan.shards_of(rank)):
            if size_bytes := layout.slot_bytes(at):
                offset = sum(part.slot_bytes for part in self._parts[group])
                self._parts[group].append(_Part(at, offset, size_bytes))

    def take_places(self, tier: int, places: SlotPlaces | None) -> None:
        """Translate a tier's locations by ``places`` from now on; None: use them unchanged."""
        self._places.pop(tier, None)
        if places is not None and places.together > 1:
            self._places[tier] = places

    def of_job(self, ticket: StoreTicket | LoadTicket, blocks: GPULoadStoreSpec) -> list[Chunk]:
        """Return the chunks of a job, each with its blocks. Raises LayoutError if the numbers do not fit."""
        is_store = isinstance(ticket, StoreTicket)
        slots = ticket.promotion_slots if isinstance(ticket, LoadTicket) else ()
        found = split_job(
            [key_group(key) for key in ticket.keys],
            np.asarray(blocks.block_ids),
            blocks.group_sizes,
            blocks.block_indices,
            self._group_ids,
            blocks_per_chunk=self._blocks_per_chunk,
            require_full_tail=is_store,
        )
        chunks = []
        for at, group, ids, first in found:
            key, location = ticket.keys[at], ticket.locations[at]
            slot = slots[at] if slots else None
            if is_store and not self.writes(key, group, location):
                continue
            here = self._here(location)
            for part in self._parts[group]:
                offset = None if slot is None else slot.offset + part.offset
                chunks.append(Chunk(key, part.of(here), part.shard, ids, first, offset, position=at))
        return chunks

    def of_moves(self, ticket: MoveTicket) -> list[Chunk]:
        """Return the moves of a ticket."""
        chunks = []
        places = zip(ticket.keys, ticket.sources, ticket.targets, strict=True)
        for position, (key, source, target) in enumerate(places):
            group = self._group_at.get(key_group(key), -1)
            if not self.writes(key, group, target):
                continue
            here, there = self._here(source), self._here(target)
            for part in self._parts[group] if group >= 0 else [_Part(-1, 0, target.slot_bytes)]:
                chunk = make_move(key, part.shard, part.of(here), part.of(there), memory=self._memory)
                chunk.position = position
                chunks.append(chunk)
        return chunks

    def writes(self, key: Key, group: int, target: Location) -> bool:
        """Whether this rank writes a chunk to ``target``. One of the ranks that hold the same shards does. In a shared
        tier the key decides which; if ranks share one copy in a slab, it is the rank in whose slab the slot lies.
        """
        places = self._places.get(target.tier)
        if places is not None:
            return places.seen_from(self._rank, target.offset, target.slot_bytes) < places.rank_bytes
        if target.tier not in self._shared or group < 0:
            return True
        return self._plan.groups[group].writes(self._rank, key)

    def _here(self, location: Location) -> Location:
        """Return a location as this rank finds it."""
        places = self._places.get(location.tier)
        if places is None:
            return location
        offset = places.seen_from(self._rank, location.offset, location.slot_bytes)
        return Location(location.tier, offset, location.slot_bytes)


def of_no_blocks(ticket: StoreTicket | LoadTicket, block_ids: Iterable[int]) -> list[Chunk]:
    """Return the chunks of a job whose numbers do not fit. Each has all blocks, for none can be assigned."""
    ids = np.asarray(block_ids, dtype=np.int32)
    places = zip(ticket.keys, ticket.locations, strict=True)
    return [Chunk(key, location, 0, ids, position=at) for at, (key, location) in enumerate(places)]
