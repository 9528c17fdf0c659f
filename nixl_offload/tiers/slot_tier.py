"""Chunks in slots that one engine alone fills: which chunk rests in which slot, and what goes when room is needed.

Threading: called by the scheduler's thread alone. No I/O, no clock.
Ownership: the index and the slot allocator. The bytes belong to the ranks, whose slots all have this one geometry.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nixl_offload.index import DurableIndex, Index, Occupancy, State
from nixl_offload.tiers.base import SlotStatistics, Tier, not_arrived
from nixl_offload.tiers.slot_allocator import SlotAllocator
from nixl_offload.types import Key, Location, Lookup, LookupContext, Outcome


class SlotTier(Tier):
    """A tier over an index and slots of this machine's memory or drive.

    A call that the index's table does not have, such as ``commit`` of a chunk that is not being written, raises
    IndexStateError and changes nothing.
    """

    is_local = True

    def __init__(
        self, position: int, index: Index, allocator: SlotAllocator, journal: DurableIndex | None = None
    ) -> None:
        """Take over ``index`` and ``allocator``, which agree. ``journal`` learns of every chunk that comes and goes."""
        self._position = position
        self._index = index
        self._allocator = allocator
        self._journal = journal
        self.evictions = 0
        """Chunks that made room for others, since the start."""

    def __len__(self) -> int:
        return len(self._index)

    @property
    def capacity_bytes(self) -> int:
        """Bytes per rank that slots can take, retired ones included."""
        return self._allocator.rank_bytes

    @property
    def retired_bytes(self) -> int:
        """Bytes per rank that ``retire`` has taken out of use for good."""
        return self._allocator.retired_bytes

    def occupancy(self) -> dict[int, Occupancy]:
        """Slot size -> what is taken of it, by what; for metrics. Costs nothing per chunk."""
        return self._index.occupancy()

    def statistics(self) -> SlotStatistics:
        places = self._allocator.places
        used_bytes = sum(taken.bytes_total // places.replicas.get(size, 1) for size, taken in self.occupancy().items())
        return SlotStatistics(used_bytes, self.capacity_bytes, self.retired_bytes, self.evictions)

    @property
    def in_use(self) -> bool:
        """Always: nothing here learns that storage is gone but by a load that fails."""
        return True

    def state(self, key: Key) -> State | None:
        return self._index.state(key)

    def lookup(self, key: Key, context: LookupContext, now_s: float) -> Lookup:
        """Say whether ``key`` can be loaded: nobody else writes here, so the index knows."""
        state = self._index.state(key)
        if state is State.READY:
            return Lookup.HIT
        return Lookup.PENDING if state is State.WRITING else Lookup.MISS

    def reserve(self, key: Key, slot_bytes: int, evicted: list[Key]) -> Location | None:
        offset = self._allocator.allocate(slot_bytes)
        if offset is None:
            before = len(evicted)
            offset = self._make_room(slot_bytes, evicted)
            self.evictions += len(evicted) - before
        if offset is None:
            return None
        location = Location(self._position, offset, slot_bytes)
        self._index.insert_writing(key, location)
        return location

    def commit(self, key: Key) -> bool:
        freed = self._index.commit(key)
        if freed is not None:
            self._free(freed)
            return False
        if self._journal is not None:
            self._journal.put(key, self._index.location(key))
        return True

    def abort(self, key: Key) -> None:
        self._free(self._index.abort(key))

    def retire(self, key: Key) -> None:
        """Forget a WRITING chunk, and never give its slot away again, for something may still write there.

        The slot stays lost until the engine restarts, resets included; the chunk may be stored anew, in another.
        """
        location = self._index.abort(key)
        self._allocator.retire(location.offset, location.slot_bytes)

    def pin(self, key: Key) -> Location:
        return self._index.pin(key)

    def unpin(self, key: Key) -> None:
        """Take one pin back; frees the slot of a chunk that was dropped meanwhile."""
        freed = self._index.unpin(key)
        if freed is not None:
            self._free(freed)

    def touch(self, key: Key) -> None:
        self._index.touch(key)

    def drop(self, key: Key) -> bool:
        """Never serve this chunk again. True: it could be loaded until now."""
        was_ready = self._index.state(key) is State.READY
        if self._journal is not None:
            self._journal.delete(key)
        freed = self._index.drop(key)
        if freed is not None:
            self._free(freed)
        return was_ready

    def loaded(self, keys: Sequence[Key], failed: Mapping[Key, Outcome], now_s: float) -> list[Key]:
        """A load is over: drop what did not arrive, or not as it was stored. Returns what was dropped."""
        dropped = [key for key in not_arrived(keys, failed) if self.state(key) is State.READY]
        for key in dropped:
            self.drop(key)
        return dropped

    def clear(self) -> None:
        """Drop everything, in the journal too. Costs per chunk in use, not per chunk."""
        if self._journal is not None:
            self._journal.clear()
        held = self._index.clear()
        self._allocator.clear((location.offset, location.slot_bytes) for location in held)

    def _gives_way(self, key: Key) -> bool:
        """Whether ``key`` may be dropped so that its extent can go to another class of slots."""
        return self._index.state(key) is State.READY

    def _make_room(self, slot_bytes: int, evicted: list[Key]) -> int | None:
        starved = self._allocator.reclaimable(slot_bytes)
        if starved is not None:
            for key in self._index.keys_between(*starved):
                if self._gives_way(key):
                    self.drop(key)
                    evicted.append(key)
            offset = self._allocator.allocate(slot_bytes)
            if offset is not None:
                return offset
        victim = self._index.evict(slot_bytes)
        if victim is None:
            return None
        key, location = victim
        if self._journal is not None:
            self._journal.delete(key)
        self._free(location)
        evicted.append(key)
        return self._allocator.allocate(slot_bytes)

    def _free(self, location: Location) -> None:
        self._allocator.free(location.offset, location.slot_bytes)
