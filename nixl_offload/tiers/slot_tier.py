"""Chunks in slots that one engine alone fills: which chunk rests in which slot, and what goes when room is needed.

Threading: called by the scheduler's thread alone. No I/O, no clock.
Ownership: the index and the slot allocator. The bytes belong to the ranks, whose slots all have this one geometry.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from nixl_offload.errors import IndexStateError
from nixl_offload.index import DurableIndex, Index, State
from nixl_offload.tiers.base import SlotStatistics, Tier, not_arrived
from nixl_offload.tiers.slots import SlotAllocator
from nixl_offload.types import Key, Location, Lookup, LookupContext, Outcome


class SlotTier(Tier):
    """A tier over an index and slots of this machine's memory or drive.

    A call that the index's table does not have, such as ``commit`` of a chunk that is not being written, raises
    IndexStateError and changes nothing.
    """

    is_local = True

    def __init__(self, position: int, allocator: SlotAllocator, journal: DurableIndex | None = None) -> None:
        """Begin with no chunk. ``journal`` learns of every one that comes and goes."""
        self._position = position
        self._index = Index(position)
        self._allocator = allocator
        self._journal = journal
        self._evictions = 0

    def __len__(self) -> int:
        return len(self._index)

    @property
    def capacity_bytes(self) -> int:
        """Bytes per rank that slots can take, retired ones included."""
        return self._allocator.rank_bytes

    def statistics(self) -> SlotStatistics:
        slots = self._allocator
        return SlotStatistics(slots.used_bytes, slots.rank_bytes, slots.retired_bytes, self._evictions)

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

    def adopt(self, pieces: Iterable[Sequence[tuple[Key, int, int]]]) -> list[Key]:
        """Make READY what a journal remembers: rows of key, offset and slot size. Of two that conflict the first wins.

        A row is a hint: none is believed before the header in its slot agrees. Returns the keys of the rows that do not
        fit, and were left out.
        """
        stale: list[Key] = []
        for rows in pieces:
            for key, offset, slot_bytes in rows:
                if not self._allocator.adopt(key, offset, slot_bytes):
                    stale.append(key)
                    continue
                try:
                    self._index.insert_ready(key, Location(self._position, offset, slot_bytes))
                except IndexStateError:
                    self._allocator.free(offset, slot_bytes)
                    stale.append(key)
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
        self._free(self._index.unpin(key))

    def touch(self, key: Key) -> None:
        self._index.touch(key)

    def drop(self, key: Key) -> bool:
        """Never serve this chunk again. True: it could be loaded until now."""
        was_ready = self._index.state(key) is State.READY
        if self._journal is not None:
            self._journal.delete(key)
        self._free(self._index.drop(key))
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
        self._index.clear()
        self._allocator.clear((key, self._index.location(key)) for key in self._index)

    def check(self) -> None:
        """Assert every invariant: each chunk has its slot, and nobody else has one. For tests."""
        self._index.check()
        held = [(key, *self._index.location(key)[1:]) for key in self._index]
        assert sorted(self._allocator) == sorted(held), "index and slots disagree"
        assert self._allocator.used_bytes + self._allocator.retired_bytes <= self.capacity_bytes

    def _gives_way(self, key: Key) -> bool:
        """Whether ``key`` may be dropped so that its extent can go to slots of another size."""
        return self._index.state(key) is State.READY

    def _make_room(self, key: Key, slot_bytes: int, evicted: list[Key]) -> int | None:
        for other in self._allocator.to_give_up(slot_bytes):
            if self._gives_way(other):
                self.drop(other)
                evicted.append(other)
        offset = self._allocator.allocate(key, slot_bytes)
        if offset is None and (victim := self._index.evict(slot_bytes)) is not None:
            if self._journal is not None:
                self._journal.delete(victim[0])
            self._free(victim[1])
            evicted.append(victim[0])
            offset = self._allocator.allocate(key, slot_bytes)
        return offset

    def _free(self, location: Location | None) -> None:
        if location is not None:
            self._allocator.free(location.offset, location.slot_bytes)
