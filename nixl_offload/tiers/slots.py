"""Slots of a few sizes in a tier: where each slot lies, on which rank, and which chunk has it. Slots lie in extents;
each extent is lent to one slot size at a time.

Replicas on one machine share one copy of a chunk, so an extent's slots are spread over them: slot ``s`` lies on replica
``s % replicas``, where slot ``s // replicas`` lies on a rank without replicas. All ranks have the same geometry.

Threading: no I/O, no lock, no clock. ``SlotPlaces`` is an immutable value; a ``SlotAllocator`` is the scheduler
thread's alone.
Ownership: a slot belongs to its chunk from ``allocate`` or ``adopt`` until ``free``; no other chunk gets it meanwhile.
A retired slot is never used again.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd

from nixl_offload.errors import IndexStateError
from nixl_offload.types import Key, Location, align_up

EXTENTS_WANTED = 256
"""A slab has about this many extents: enough to share among slot sizes, few enough to preallocate quickly."""
SLOTS_PER_EXTENT_MIN = 4
EXTENT_MAX_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class SlotPlaces:
    """Translates the offsets of a ``SlotAllocator`` to offsets on a rank."""

    rank_bytes: int
    """Bytes of each rank, in whole extents."""
    extent_bytes: int
    """An extent's bytes on one rank."""
    replicas: Mapping[int, int] = field(default_factory=dict)
    """By slot size: how many consecutive ranks share one copy; 1 if the size is not listed. Each value divides the
    largest value.
    """

    @property
    def together(self) -> int:
        """The largest number of consecutive ranks that read each other's slots."""
        return max(self.replicas.values(), default=1)

    @property
    def stride_bytes(self) -> int:
        """The distance between the offsets of two neighbouring extents."""
        return self.extent_bytes * self.together

    def slots_per_extent(self, slot_bytes: int) -> int:
        """Return how many slots of this size an extent has, on all replicas together."""
        return self.extent_bytes // slot_bytes * self.replicas.get(slot_bytes, 1)

    def find(self, rank: int, offset: int, slot_bytes: int) -> tuple[int, int]:
        """Return which rank has the slot that is at ``offset`` for ``rank``, and its byte offset there."""
        copies = self.replicas.get(slot_bytes, 1)
        extent, inside = divmod(offset, self.stride_bytes)
        row, replica = divmod(inside // slot_bytes, copies)
        return rank // copies * copies + replica, extent * self.extent_bytes + row * slot_bytes

    def seen_from(self, rank: int, offset: int, slot_bytes: int) -> int:
        """Return where ``rank`` finds the slot. Offsets below ``rank_bytes`` are its own; those of its ``neighbours``
        follow, ``rank_bytes`` each.
        """
        holder, inside = self.find(rank, offset, slot_bytes)
        return (holder - rank) % self.together * self.rank_bytes + inside

    def neighbours(self, rank: int) -> list[int]:
        """Return the other ranks that may have slots of this rank's chunks, in the order of ``seen_from``."""
        together = self.together
        first = rank // together * together
        return [first + (rank - first + step) % together for step in range(1, together)]


def ranks_together(machines: Sequence[str], replicas: int) -> int:
    """Return how many consecutive ranks can share one copy: the largest divisor of ``replicas`` that keeps them on one
    machine. ``machines``: by rank, a name that ranks share if they see the same files at the same paths; "": unknown.
    """
    for size in range(replicas, 1, -1):
        if replicas % size or len(machines) % size:
            continue
        rows = [machines[first : first + size] for first in range(0, len(machines), size)]
        if all(row[0] and len(set(row)) == 1 for row in rows):
            return size
    return 1


def replicas_of_slots(groups: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Return ``SlotPlaces.replicas``. ``groups``: slot size, and how many consecutive ranks share one copy.

    Groups with the same slot size share slots, so that size gets the gcd of their rank counts. It then gets the gcd of
    its count and the largest.
    """
    found: dict[int, int] = {}
    for slot_bytes, replicas in groups:
        found[slot_bytes] = gcd(replicas, found.get(slot_bytes, replicas))
    most = max(found.values(), default=1)
    return {size: gcd(number, most) for size, number in found.items()} if most > 1 else {}


def choose_extent_bytes(rank_bytes: int, slot_classes: Sequence[int]) -> int:
    """Return the extent size for a new slab: a multiple of the largest class, so that class wastes no space.

    It is about ``rank_bytes / EXTENTS_WANTED``, at most 1 GiB, but at least four slots of the largest class. If the
    slab is too small for one extent per class, extents are smaller, down to one slot.
    """
    largest = max(slot_classes)
    smallest_extent = SLOTS_PER_EXTENT_MIN * largest
    wanted = max(smallest_extent, min(EXTENT_MAX_BYTES, rank_bytes // EXTENTS_WANTED))
    extent = align_up(wanted, largest)
    if rank_bytes // extent < len(slot_classes):
        extent = max(largest, rank_bytes // len(slot_classes) // largest * largest)
    return extent


@dataclass(slots=True)
class _Extent:
    """The slots of an extent that is lent to a slot size."""

    # Dicts, not a list and a set: Python's garbage collector visits each entry of a list or set, but skips a dict that
    # holds only bytes, ints and None. A full collection stops vLLM's scheduler.
    keys: dict[int, Key] = field(default_factory=dict)
    """By slot; free and retired slots have no key."""
    free: dict[int, None] = field(default_factory=dict)
    """The free slots below ``end``, as a dict's keys."""
    end: int = 0
    """Slots from this number on were never taken."""

    @property
    def taken(self) -> int:
        """How many slots hold a chunk or are retired."""
        return self.end - len(self.free)

    def take(self, slot: int, key: Key) -> bool:
        """Take this slot. False if it is already taken."""
        if slot >= self.end:
            for missing in range(self.end, slot):
                self.free[missing] = None
            self.end = slot + 1
        elif slot in self.free:
            del self.free[slot]
        else:
            return False
        self.keys[slot] = key
        return True


@dataclass(slots=True)
class _SizeClass:
    """The slots of one size."""

    slots: int
    """Slots in each extent."""
    extents: dict[int, _Extent] = field(default_factory=dict)
    """The extents lent to this size, by number."""
    roomy: list[int] = field(default_factory=list)
    """Numbers of the extents with a free slot, sorted."""
    chunks: int = 0
    """Chunks in slots of this size."""


class SlotAllocator:
    """Gives slots of a few sizes in ``[0, rank_bytes)`` to chunks, and takes them back.

    An extent is lent to a size that needs it and returns to the pool as soon as its last slot is free. The lowest
    extent with room is used first, so used slots stay together at the front of the file.
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
        ``extent_bytes``: a multiple of ``PAGE_BYTES``, at least the largest size; None: ``choose_extent_bytes``.
        ``replicas``: as ``SlotPlaces.replicas``. The attribute ``places`` translates offsets.
        """
        self.slot_classes = tuple(sorted(set(slot_classes)))
        extent = choose_extent_bytes(rank_bytes, self.slot_classes) if extent_bytes is None else extent_bytes
        self.extent_bytes = extent
        self.extent_count = max(0, rank_bytes) // extent
        self.rank_bytes = self.extent_count * extent
        self.limit = self.extent_count
        """Extents from this number on are not lent for now: the drive may have no room for them."""
        self.places = SlotPlaces(self.rank_bytes, extent, dict(replicas or {}))
        self._stride = self.places.stride_bytes
        self._retired: dict[int, int] = {}
        """Offset -> size of retired slots."""
        self._start_empty()

    def _start_empty(self) -> None:
        self._classes = {size: _SizeClass(self.places.slots_per_extent(size)) for size in self.slot_classes}
        self._pool = list(range(self.extent_count))
        """Numbers of the extents that are not lent, sorted."""
        self._draining: int | None = None
        """The extent that is being emptied for a size that has too few."""

    @property
    def used_bytes(self) -> int:
        """Bytes of taken slots, per rank."""
        replicas = self.places.replicas
        return sum(each.chunks * size // replicas.get(size, 1) for size, each in self._classes.items())

    @property
    def retired_bytes(self) -> int:
        """Bytes of retired slots, per rank."""
        return sum(-(-size // self.places.replicas.get(size, 1)) for size in self._retired.values())

    def allocate(self, key: Key, slot_bytes: int) -> int | None:
        """Give a free slot to ``key`` and return its byte offset; None when the size has no room and the pool is empty.

        Raises KeyError for a size that is not among ``slot_classes``.
        """
        wanted = self._classes[slot_bytes]
        number = self._extent_with_room(wanted)
        if number is None:
            return None
        if number == self._draining:  # this size has no other extent with room, so stop draining
            self._draining = None
        extent = wanted.extents.get(number) or self._lend(number, wanted)
        assert extent is not None, "it is in the pool"
        if extent.free:
            slot, _ = extent.free.popitem()
        else:
            slot = extent.end
            extent.end += 1
        extent.keys[slot] = key
        self._took(wanted, number, extent)
        return number * self._stride + slot * slot_bytes

    def adopt(self, key: Key, offset: int, slot_bytes: int) -> bool:
        """Give ``key`` the slot that an earlier run filled.

        Returns False and changes nothing if the slot does not fit: unknown size, misaligned, beyond ``rank_bytes``, in
        an extent of another size, or already taken.
        """
        wanted = self._classes.get(slot_bytes)
        if wanted is None:
            return False
        number, slot = self._locate(offset, slot_bytes)
        if not 0 <= number < self.extent_count or not 0 <= slot < wanted.slots:
            return False
        extent = wanted.extents.get(number) or self._lend(number, wanted)
        if extent is None or not extent.take(slot, key):
            return False
        self._took(wanted, number, extent)
        return True

    def pass_on(self, key: Key, offset: int, slot_bytes: int) -> None:
        """Give a taken slot to another chunk. Raises as ``free``."""
        owner, number, slot = self._find(offset, slot_bytes, "passed on")
        owner.extents[number].keys[slot] = key
        if number == self._draining:  # this size has no other extent with room, so stop draining
            self._draining = None

    def free(self, offset: int, slot_bytes: int) -> None:
        """Take a slot back. Raises IndexStateError, changing nothing, if it is not taken or has another size."""
        owner, number, slot = self._find(offset, slot_bytes, "freed")
        extent = owner.extents[number]
        if extent.taken == owner.slots:
            insort(owner.roomy, number)
        del extent.keys[slot]
        extent.free[slot] = None
        owner.chunks -= 1
        if not extent.taken:
            del owner.extents[number]
            _remove(owner.roomy, number)
            insort(self._pool, number)
            if number == self._draining:
                self._draining = None

    def retire(self, offset: int, slot_bytes: int) -> None:
        """Retire a taken slot: it is never used again, not even after ``clear``, as late I/O may still write to it.

        Raises IndexStateError, changing nothing, if it is not taken or has another size.
        """
        owner, number, slot = self._find(offset, slot_bytes, "retired")
        del owner.extents[number].keys[slot]
        owner.chunks -= 1
        self._retired[offset] = slot_bytes
        if number == self._draining:  # it can never be empty now
            self._draining = None

    def clear(self, held: Iterable[tuple[Key, Location]]) -> None:
        """Take back all slots except those in ``held`` and retired ones. Costs time per extent and per kept slot."""
        self._start_empty()
        retired, self._retired = self._retired, {}
        for offset, slot_bytes in retired.items():
            self.adopt(Key(b""), offset, slot_bytes)
            self.retire(offset, slot_bytes)
        for key, (_, offset, slot_bytes) in held:
            self.adopt(key, offset, slot_bytes)

    def to_give_up(self, slot_bytes: int) -> list[Key]:
        """Choose an extent to empty for a size that has no room, and return the extent's chunks.

        Returns none unless the size has less than 1 / (2 * sizes) of the extents. The choice is the least used extent,
        without a retired slot, of the size with the most extents. Until it is empty, a new slot is taken from it only
        if its own size has no other extent with room.
        """
        starved = self._classes[slot_bytes]
        if 2 * len(starved.extents) * len(self._classes) >= self.extent_count:
            return []
        if self._draining is None:
            richest = max(self._classes.values(), key=lambda each: len(each.extents))
            never_empty = {offset // self._stride for offset in self._retired}
            candidates = [number for number in richest.extents if number not in never_empty]
            if len(richest.extents) < 2 or len(richest.extents) <= len(starved.extents) or not candidates:
                return []
            self._draining = min(candidates, key=lambda number: richest.extents[number].taken)
        for owner in self._classes.values():
            if owner is not starved and self._draining in owner.extents:
                return list(owner.extents[self._draining].keys.values())
        return []

    def _find(self, offset: int, slot_bytes: int, to_be: str) -> tuple[_SizeClass, int, int]:
        """Return size class, extent number and slot number of a taken slot; raise IndexStateError if not taken."""
        owner = self._classes.get(slot_bytes)
        if owner is not None:
            number, slot = self._locate(offset, slot_bytes)
            extent = owner.extents.get(number)
            if extent is not None and slot in extent.keys:
                return owner, number, slot
        raise IndexStateError(f"slot of {slot_bytes} bytes at {offset} is not taken, so it cannot be {to_be}")

    def _locate(self, offset: int, slot_bytes: int) -> tuple[int, int]:
        """Return extent and slot number; the slot is -1 if no slot begins at ``offset``."""
        number, inside = divmod(offset, self._stride)
        slot, rest = divmod(inside, slot_bytes)
        return number, -1 if rest else slot

    def _extent_with_room(self, wanted: _SizeClass) -> int | None:
        """Return an extent of this size with a free slot, else one from the pool, else the one being emptied."""
        for number in wanted.roomy[:2]:
            if number != self._draining:
                return number
        if self._pool and self._pool[0] < self.limit:
            return self._pool[0]
        return wanted.roomy[0] if wanted.roomy else None

    def _lend(self, number: int, wanted: _SizeClass) -> _Extent | None:
        """Lend an extent from the pool. None if it is not in the pool."""
        if not _remove(self._pool, number):
            return None
        insort(wanted.roomy, number)
        extent = wanted.extents[number] = _Extent()
        return extent

    def _took(self, wanted: _SizeClass, number: int, extent: _Extent) -> None:
        wanted.chunks += 1
        if extent.taken == wanted.slots:
            _remove(wanted.roomy, number)


def _remove(numbers: list[int], number: int) -> bool:
    """Remove a number from a sorted list. False if it is not in the list."""
    at = bisect_left(numbers, number)
    is_there = at < len(numbers) and numbers[at] == number
    if is_there:
        del numbers[at]
    return is_there
