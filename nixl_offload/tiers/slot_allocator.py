"""Which slots of a slab are taken: extents of one size, each lent to one size class at a time, slots inside.

Threading: no I/O, no lock, no clock; called by the scheduler's thread alone. Every rank's slab has this geometry.
Ownership: a slot belongs to the caller from ``allocate`` or ``adopt`` until ``free``; nobody else gets it meanwhile.
One that was retired is nobody's for good.
Memory: one byte per slot of the extents in use, nothing per slot elsewhere; ten million slots cost ten megabytes.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from heapq import heappop, heappush

from nixl_offload.errors import IndexStateError
from nixl_offload.tiers.slot_places import SlotPlaces
from nixl_offload.types import align_up

EXTENTS_WANTED = 256
"""A slab is cut into about this many: fine enough to share among classes, coarse enough to preallocate quickly."""
SLOTS_PER_EXTENT_MIN = 4
EXTENT_MAX_BYTES = 1 << 30
_POOL = -1
_TAKEN = 1
_RETIRED = 2


def choose_extent_bytes(rank_bytes: int, slot_classes: Sequence[int]) -> int:
    """Return the extent size for a fresh slab: a multiple of the largest class, so that that class wastes nothing.

    About ``rank_bytes / EXTENTS_WANTED``, at least four slots of the largest class, at most 1 GiB (four slots win).
    A slab so small that not every class could have an extent gets smaller extents, down to one slot.
    """
    largest = max(slot_classes)
    smallest_extent = SLOTS_PER_EXTENT_MIN * largest
    wanted = max(smallest_extent, min(EXTENT_MAX_BYTES, rank_bytes // EXTENTS_WANTED))
    extent = align_up(wanted, largest)
    if rank_bytes // extent < len(slot_classes):
        extent = max(largest, rank_bytes // len(slot_classes) // largest * largest)
    return extent


class SlotAllocator:
    """Hands out and takes back slots of a few sizes in ``[0, rank_bytes)``.

    An extent is lent to a class when the class needs it and returns to the pool as soon as its last slot is free. The
    lowest free slot of the lowest extent goes first, so what is in use stays together at the front of the file.
    """

    def __init__(
        self,
        rank_bytes: int,
        slot_classes: Sequence[int],
        extent_bytes: int | None = None,
        replicas: Mapping[int, int] | None = None,
    ) -> None:
        """Start empty. ``rank_bytes`` is rounded down to whole extents (attribute ``rank_bytes``).

        ``slot_classes`` are slot sizes in bytes, each a positive multiple of ``PAGE_BYTES``; duplicates count once.
        ``extent_bytes``: a multiple of it, which holds a slot of the largest class; None: ``choose_extent_bytes``.
        ``replicas``: as ``SlotPlaces.replicas``; offsets are those of ``SlotPlaces`` (attribute ``places``).
        """
        classes = sorted(set(slot_classes))
        extent = choose_extent_bytes(rank_bytes, classes) if extent_bytes is None else extent_bytes
        self.extent_bytes = extent
        self.extent_count = max(0, rank_bytes) // extent
        self.rank_bytes = self.extent_count * extent
        self.limit = self.extent_count
        """No extent from this one on is lent: the drive may have no room for it now."""
        self.slot_classes = tuple(classes)
        self._number = {size: number for number, size in enumerate(classes)}
        self.places = SlotPlaces(self.rank_bytes, extent, dict(replicas or {}))
        self._stride = self.places.stride_bytes
        self._slots = [self.places.slots_per_extent(size) for size in classes]
        self._retired: dict[int, int] = {}
        """Offset -> size of what is never given away again."""
        self._start_empty()

    def _start_empty(self) -> None:
        classes = self.slot_classes
        self._held = [0] * len(classes)
        """Per class: how many extents it has."""
        self._taken_slots = [0] * len(classes)
        self._owner = array("i", [_POOL]) * self.extent_count
        self._used = array("q", [0]) * self.extent_count
        self._lowest_free = array("q", [0]) * self.extent_count
        """No slot below this one is free."""
        self._taken: list[bytearray | None] = [None] * self.extent_count
        # Heaps. One that has a free slot, or is in the pool, is in the heap; what else is there is weeded out on top.
        self._roomy: list[list[int]] = [[] for _ in classes]
        self._pool = list(range(self.extent_count))
        self._draining: int | None = None

    @property
    def used_bytes(self) -> int:
        """Bytes of all slots taken, per rank."""
        return sum(
            -(-taken * size // self.places.replicas.get(size, 1))
            for taken, size in zip(self._taken_slots, self.slot_classes, strict=True)
        )

    @property
    def retired_bytes(self) -> int:
        """Bytes of the slots that were retired, per rank; ``used_bytes`` counts them too."""
        return sum(-(-size // self.places.replicas.get(size, 1)) for size in self._retired.values())

    def used_slots(self, slot_bytes: int) -> int:
        """Slots of this class that are taken."""
        return self._taken_slots[self._number[slot_bytes]]

    def allocate(self, slot_bytes: int) -> int | None:
        """Take a free slot and return its byte offset; None when the class has no room and the pool is empty.

        Raises KeyError for a size that is not a class.
        """
        number = self._number[slot_bytes]
        extent = self._extent_with_room(number)
        if extent is None:
            return None
        if extent == self._draining:  # its class has no other
            self._draining = None
            heappush(self._roomy[number], extent)
        elif self._owner[extent] == _POOL:
            heappop(self._pool)
            self._lend(extent, number)
        taken = self._map(extent)
        slot = taken.find(0, self._lowest_free[extent])
        taken[slot] = _TAKEN
        self._lowest_free[extent] = slot + 1
        self._used[extent] += 1
        self._taken_slots[number] += 1
        if self._used[extent] == self._slots[number]:
            heappop(self._roomy[number])  # it was on top, or the only one
        return extent * self._stride + slot * slot_bytes

    def free(self, offset: int, slot_bytes: int) -> None:
        """Give a slot back. Raises IndexStateError, changing nothing, when it is not a taken slot of this class."""
        number, extent, slot, taken = self._find_taken(offset, slot_bytes, "freed")
        taken[slot] = 0
        self._used[extent] -= 1
        self._taken_slots[number] -= 1
        self._lowest_free[extent] = min(self._lowest_free[extent], slot)
        if not self._used[extent]:
            if self._draining == extent:
                self._draining = None
            self._owner[extent], self._taken[extent] = _POOL, None
            self._held[number] -= 1
            heappush(self._pool, extent)
        elif self._used[extent] == self._slots[number] - 1 and extent != self._draining:
            heappush(self._roomy[number], extent)

    def retire(self, offset: int, slot_bytes: int) -> None:
        """Never give a taken slot away again, not even after ``clear``: something may still write to it.

        Raises IndexStateError, changing nothing, when it is not a taken slot of this class.
        """
        number, extent, slot, taken = self._find_taken(offset, slot_bytes, "retired")
        taken[slot] = _RETIRED
        self._retired[offset] = slot_bytes
        if extent == self._draining:  # it will never be empty
            self._draining = None
            heappush(self._roomy[number], extent)

    def clear(self, held: Iterable[tuple[int, int]]) -> None:
        """Take back every slot but ``held``, as (offset, slot_bytes), and what was retired. Costs per extent and slot.

        Raises IndexStateError, with the slots before it kept, for one that cannot be.
        """
        self._start_empty()
        for offset, slot_bytes in self._retired.items():
            self.adopt(offset, slot_bytes)
            self._map(offset // self._stride)[offset % self._stride // slot_bytes] = _RETIRED
        for offset, slot_bytes in held:
            if not self.adopt(offset, slot_bytes):
                raise IndexStateError(f"slot of {slot_bytes} bytes at {offset} cannot be kept")

    def adopt(self, offset: int, slot_bytes: int) -> bool:
        """Mark a slot that an earlier run filled as taken.

        False, changing nothing, when it does not fit: unknown size, misaligned, beyond ``rank_bytes``, in an extent of
        another class, or taken already.
        """
        number = self._number.get(slot_bytes)
        if number is None:
            return False
        extent, slot = self._locate(offset, slot_bytes)
        if not 0 <= extent < self.extent_count or not 0 <= slot < self._slots[number]:
            return False
        if self._owner[extent] == _POOL:
            self._lend(extent, number)
        elif self._owner[extent] != number:
            return False
        taken = self._map(extent)
        if taken[slot]:
            return False
        taken[slot] = _TAKEN
        self._used[extent] += 1
        self._taken_slots[number] += 1
        return True

    def reclaimable(self, slot_bytes: int) -> tuple[int, int] | None:
        """Propose the byte range of an extent to be emptied for a class that has no room, or None.

        Answers only when the class has no free slot, the pool is empty, and the class holds less than
        1 / (2 * classes) of the extents. The range is the least used extent of the class that holds most, of those
        without a retired slot. Until it is empty no new slot is taken from it, unless its own class has no other.
        """
        number = self._number[slot_bytes]
        if self._extent_with_room(number) is not None:
            return None
        if self._held[number] * 2 * len(self.slot_classes) >= self.extent_count:
            return None
        if self._draining is None:
            richest = max(range(len(self.slot_classes)), key=self._held.__getitem__)
            if self._held[richest] < 2 or self._held[richest] <= self._held[number]:
                return None
            never_empty = {offset // self._stride for offset in self._retired}
            self._draining = min(
                (each for each, owner in enumerate(self._owner) if owner == richest and each not in never_empty),
                key=self._used.__getitem__,
                default=None,
            )
        if self._draining is None or self._owner[self._draining] == number:
            return None
        return self._draining * self._stride, (self._draining + 1) * self._stride

    def _find_taken(self, offset: int, slot_bytes: int, to_be: str) -> tuple[int, int, int, bytearray]:
        """Return class, extent, slot and the extent's map of a slot that is taken; else raise IndexStateError."""
        number = self._number.get(slot_bytes)
        extent, slot = self._locate(offset, slot_bytes)
        taken = self._taken[extent] if 0 <= extent < self.extent_count and self._owner[extent] == number else None
        if number is None or taken is None or not 0 <= slot < len(taken) or taken[slot] != _TAKEN:
            raise IndexStateError(f"slot of {slot_bytes} bytes at {offset} is not taken, so it cannot be {to_be}")
        return number, extent, slot, taken

    def _locate(self, offset: int, slot_bytes: int) -> tuple[int, int]:
        """Return (extent, slot); slot is -1 when ``offset`` is not where a slot begins."""
        if slot_bytes <= 0:
            return -1, -1
        extent, inside = divmod(offset, self._stride)
        slot, rest = divmod(inside, slot_bytes)
        return extent, -1 if rest else slot

    def _map(self, extent: int) -> bytearray:
        taken = self._taken[extent]
        if taken is None:
            raise IndexStateError(f"extent {extent} is lent to no class")
        return taken

    def _extent_with_room(self, number: int) -> int | None:
        """Return an extent of this class with a free slot, else one of the pool, else the one that is being emptied."""
        roomy, draining = self._roomy[number], self._draining
        while roomy:
            if self._has_room(roomy[0], number) and roomy[0] != draining:
                return roomy[0]
            heappop(roomy)
        while self._pool and self._pool[0] < self.limit:
            if self._owner[self._pool[0]] == _POOL:
                return self._pool[0]
            heappop(self._pool)
        return draining if draining is not None and self._has_room(draining, number) else None

    def _has_room(self, extent: int, number: int) -> bool:
        return self._owner[extent] == number and self._used[extent] < self._slots[number]

    def _lend(self, extent: int, number: int) -> None:
        self._owner[extent] = number
        self._used[extent] = self._lowest_free[extent] = 0
        self._taken[extent] = bytearray(self._slots[number])
        self._held[number] += 1
        heappush(self._roomy[number], extent)
