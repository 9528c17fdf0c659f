"""Tiers whose slots one engine fills: which chunk rests in which slot, and which chunks are evicted to make room.
``MemoryTier`` keeps its slots in host memory, until the engine ends; ``slab.tier`` keeps them on a drive.

Threading: called by the scheduler's thread alone. No I/O, no clock.
Ownership: the index and the slot allocator. The bytes belong to the ranks, whose slots all have the same geometry. Each
rank allocates its part of a memory tier at start.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from nixl_offload.config import MemoryConfig
from nixl_offload.errors import ConfigError
from nixl_offload.index import DurableIndex, Index, State
from nixl_offload.index.durable import Row
from nixl_offload.tiers.base import Place, SlotStatistics, Tier, TierContext, not_arrived
from nixl_offload.tiers.slots import SLOTS_PER_EXTENT_MIN, SlotAllocator, choose_extent_bytes
from nixl_offload.types import PAGE_BYTES, Key, Location, Lookup, LookupContext, Outcome, align_up
from nixl_offload.units import format_size

logger = logging.getLogger(__name__)

NEARLY_FULL: Final = 0.875
"""Of a memory tier's slots."""


class SlotTier(Tier):
    """A tier made of an index and slots in this machine's memory or on its drive.

    A call that does not fit the chunk's state, such as ``commit`` of a chunk that is not being written, raises
    IndexStateError and changes nothing.
    """

    is_local = True

    def __init__(
        self, position: int, place: Place, allocator: SlotAllocator, durable: DurableIndex | None = None
    ) -> None:
        """Start empty; ``open`` of a subclass is the usual way. ``durable`` records each chunk that is committed or
        dropped.
        """
        self._position = position
        self.place = place
        super().__init__(Index(position))
        self._allocator = allocator
        self._durable = durable
        self._evictions = 0

    def __len__(self) -> int:
        return len(self._index)

    @property
    def capacity_bytes(self) -> int:
        """Bytes of all slots per rank, retired ones included."""
        return self._allocator.rank_bytes

    def statistics(self) -> SlotStatistics:
        slots = self._allocator
        return SlotStatistics(slots.used_bytes, slots.rank_bytes, slots.retired_bytes, self._evictions)

    @property
    def in_use(self) -> bool:
        """Always true: only a failing load shows that storage is gone."""
        return True

    def lookup(self, key: Key, context: LookupContext, now_s: float) -> Lookup:
        """Return whether ``key`` can be loaded. Nobody else writes here, so the index knows."""
        state = self._index.state(key)
        if state is State.READY:
            return Lookup.HIT
        return Lookup.PENDING if state is State.WRITING else Lookup.MISS

    def adopt(self, rows: Iterable[Row]) -> list[Location]:
        """Make the chunks in the durable index's rows READY. If rows conflict, the first wins.

        A row is a hint: a load still checks the header in the slot. Returns the places of rows that do not fit; they
        were left out.
        """
        stale: list[Location] = []
        for key, offset, slot_bytes, _ in rows:
            location = Location(self._position, offset, slot_bytes)
            if key and self._index.state(key) is None and self._allocator.adopt(key, offset, slot_bytes):
                self._index.insert_ready(key, location)
            else:
                stale.append(location)
        return stale

    def reserve(self, key: Key, slot_bytes: int, evicted: list[Key]) -> Location | None:
        offset = self._allocator.allocate(key, slot_bytes)
        if offset is None:
            before = len(evicted)
            offset = self._make_room(key, slot_bytes, evicted)
            self._evictions += len(evicted) - before
        if offset is None:
            return None
        location = Location(self._position, offset, slot_bytes)
        self._index.insert_writing(key, location)
        return location

    def commit(self, keys: Iterable[Key]) -> list[Key]:
        ready = []
        for key in keys:
            location, is_ready = self._index.commit(key)
            if not is_ready:
                self._free(location)
                continue
            ready.append(key)
            if self._durable is not None:
                self._durable.put(key, location)
        return ready

    def abort(self, key: Key) -> None:
        self._free(self._index.abort(key))

    def retire(self, key: Key) -> None:
        """Forget a WRITING chunk, and never use its slot again: late I/O may still write there.

        The slot is lost until the engine restarts; a reset does not free it. The chunk may be stored in another slot.
        """
        location = self._index.abort(key)
        self._allocator.retire(location.offset, location.slot_bytes)

    def unpin(self, keys: Iterable[Key]) -> None:
        """Take one pin of each chunk back. Frees the slots of those that were dropped meanwhile."""
        for location in self._index.unpin(keys):
            self._free(location)

    def drop(self, key: Key) -> None:
        """Never serve this chunk again."""
        if self._durable is not None and self._index.state(key) is not None:
            self._durable.delete(self._index.location(key))
        self._free(self._index.drop(key))

    def after_load(self, keys: Sequence[Key], failed: Mapping[Key, Outcome], now_s: float) -> list[Key]:
        """Drop the chunks of a load that did not arrive or are damaged. Returns the dropped ones."""
        dropped = [key for key in not_arrived(keys, failed) if self.state(key) is State.READY]
        for key in dropped:
            self.drop(key)
        return dropped

    def clear(self) -> None:
        """Drop everything, in the durable index too. The cost grows with the chunks in use, not with all chunks."""
        if self._durable is not None:
            self._durable.clear()
        self._index.clear()
        self._allocator.clear((key, self._index.location(key)) for key in self._index)

    def _gives_way(self, key: Key) -> bool:
        """Whether ``key`` may be dropped to empty its extent for slots of another size."""
        return self._index.state(key) is State.READY

    def _make_room(self, key: Key, slot_bytes: int, evicted: list[Key]) -> int | None:
        given_up = [other for other in self._allocator.to_give_up(slot_bytes) if self._gives_way(other)]
        for other in given_up:
            self.drop(other)
        evicted += given_up
        offset = self._allocator.allocate(key, slot_bytes) if given_up else None
        if offset is None and (victim := self._index.evict(slot_bytes)) is not None:
            if self._durable is not None:
                self._durable.delete(victim[1])
            evicted.append(victim[0])
            offset = victim[1].offset
            self._allocator.pass_on(key, offset, slot_bytes)
        return offset

    def _free(self, location: Location | None) -> None:
        if location is not None:
            self._allocator.free(location.offset, location.slot_bytes)


def rank_memory_bytes(capacity_bytes: int, world_size: int, dp_size: int) -> int:
    """Return each rank's share of a memory tier's capacity, in bytes, rounded down to whole pages.

    ``capacity_bytes`` is shared by ``world_size`` ranks of each of ``dp_size`` data-parallel engines. The scheduler and
    the ranks both call this, so no slot can lie outside a rank's memory.
    """
    return capacity_bytes // (world_size * dp_size) // PAGE_BYTES * PAGE_BYTES


class MemoryTier(SlotTier):
    """Slots of host memory, one index for all ranks. A pinned chunk keeps its slot."""

    is_exclusive = False
    """Whether it takes chunks when they leave the GPU, and ``give_up`` drops what the GPU has."""

    @classmethod
    def open(cls, config: MemoryConfig, context: TierContext) -> MemoryTier:
        """Divide the capacity among ranks and return the empty tier.

        Raises ConfigError if the capacity is too small for this model; the message names the minimum.
        """
        classes, world_size, dp_size = context.slot_classes, context.world_size, len(context.dp_engines)
        available_bytes = rank_memory_bytes(config.capacity_bytes, world_size, dp_size)
        least_rank_bytes = len(classes) * SLOTS_PER_EXTENT_MIN * classes[-1]
        if available_bytes < least_rank_bytes:
            least_bytes = align_up(least_rank_bytes * world_size * dp_size, 1 << 20)
            raise ConfigError(
                f"capacity {format_size(config.capacity_bytes)} of the memory tier is too small for this model: slots "
                f"of {classes[-1]} bytes on {world_size} ranks and {dp_size} data-parallel engines need at least "
                f"{format_size(least_bytes)}"
            )
        extent_bytes = choose_extent_bytes(available_bytes, classes)
        if len(classes) == 1:  # one extent, so that no memory is left over
            extent_bytes = available_bytes // classes[0] * classes[0]
        allocator = SlotAllocator(available_bytes, classes, extent_bytes)
        logger.info(
            "Memory tier: room for %.1f GiB per rank (%d ranks of each of %d engines), up to %d chunks",
            allocator.rank_bytes / 2**30,
            world_size,
            dp_size,
            allocator.rank_bytes // classes[0],
        )
        return cls(context.position, Place(context.namespace.digest), allocator)

    def give_up(self, keys: Sequence[Key], is_needed: Callable[[Key], bool]) -> list[Key]:
        """Drop chunks that the GPU has, but those for which ``is_needed``, if memory is nearly full. Returns them."""
        if not self.is_exclusive or self._allocator.used_bytes <= NEARLY_FULL * self._allocator.rank_bytes:
            return []
        ready = [key for key, state in zip(keys, self.states(keys), strict=True) if state is State.READY]
        given_up = [key for key in ready if self._gives_way(key) and not is_needed(key)]
        for key in given_up:
            self.drop(key)
        return given_up

    def _gives_way(self, key: Key) -> bool:
        # A pinned chunk may be on its way to a farther tier, and exist nowhere else yet.
        return self._index.state(key) is State.READY and not self._index.pins(key)
