"""Which node rests at which offset, per size class: finds overlaps on insertion and the nodes of an extent.

Threading: none; owned by one index. Costs about 4 bytes per slot.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import numpy as np

from nixl_offload.index.links import Nodes, Numbers

_PAGE_SLOTS = 1024


class SlotMap:
    """Offset -> node for slots of one size.

    Two slots of one size that do not overlap differ in ``offset // slot_bytes``, wherever they start: so that quotient
    addresses them, in pages of 1024 made on demand, and each quotient names at most one slot.
    """

    __slots__ = ("_cells", "_pages", "slot_bytes")

    def __init__(self, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self._pages: dict[int, int] = {}
        """Page number -> where in ``_cells`` it starts."""
        self._cells = array("I")

    def set(self, offset: int, node: int) -> None:
        """Record ``node`` (not 0) at ``offset``; the caller made sure that nothing overlaps."""
        number, place = divmod(offset // self.slot_bytes, _PAGE_SLOTS)
        start = self._pages.get(number)
        if start is None:
            start = self._new_page(number)
        self._cells[start + place] = node

    def set_many(self, offsets: Numbers, nodes: Nodes) -> None:
        """``set`` each."""
        numbers, places = np.divmod(offsets // self.slot_bytes, _PAGE_SLOTS)
        for number in np.unique(numbers).tolist():
            if number not in self._pages:
                self._new_page(number)
        np.frombuffer(self._cells, dtype=np.uint32)[self._starts(numbers) + places] = nodes

    def clear(self, offset: int) -> None:
        """Forget what rests at ``offset``."""
        number, place = divmod(offset // self.slot_bytes, _PAGE_SLOTS)
        self._cells[self._pages[number] + place] = 0

    def clash(self, offset: int, offsets: array[int]) -> int:
        """Return a node whose slot overlaps one of this size at ``offset``, 0 if none. ``offsets`` is by node."""
        slot_bytes, cells = self.slot_bytes, self._cells
        number, place = divmod(offset // slot_bytes, _PAGE_SLOTS)
        start = self._pages.get(number)
        if start is None or not 0 < place < _PAGE_SLOTS - 1:
            for node in self.near(offset - slot_bytes + 1, offset + slot_bytes):
                if abs(offsets[node] - offset) < slot_bytes:
                    return node
            return 0
        at = start + place
        if node := cells[at]:
            return node
        if (node := cells[at - 1]) and offset - offsets[node] < slot_bytes:
            return node
        if (node := cells[at + 1]) and offsets[node] - offset < slot_bytes:
            return node
        return 0

    def clashes(self, starts: Numbers, ends: Numbers, offsets: Numbers) -> bool:
        """Whether a slot here overlaps any range ``[start, end)``. ``offsets`` is by node."""
        if not self._pages:
            return False
        slot_bytes = self.slot_bytes
        first = (starts - slot_bytes + 1) // slot_bytes
        last = (ends - 1) // slot_bytes
        # Most ranges of another size class lie where this one has no page at all.
        pages = np.array(sorted(self._pages), dtype=np.int64)
        page_of_last = np.searchsorted(pages, last // _PAGE_SLOTS, side="right")
        near = np.searchsorted(pages, first // _PAGE_SLOTS) < page_of_last
        starts, ends, first, last = starts[near], ends[near], first[near], last[near]
        cells = np.frombuffer(self._cells, dtype=np.uint32)
        while len(first):
            numbers, places = np.divmod(first, _PAGE_SLOTS)
            nodes = cells[self._starts(numbers) + places]
            there = offsets[nodes]
            if ((nodes != 0) & (there < ends) & (starts < there + slot_bytes)).any():
                return True
            more = first < last
            starts, ends, first, last = starts[more], ends[more], first[more] + 1, last[more]
        return False

    def near(self, start_offset: int, end_offset: int) -> Iterator[int]:
        """Yield the nodes whose offset lies in ``[start_offset, end_offset)``, and perhaps some of a slot around it."""
        first = start_offset // self.slot_bytes
        last = (end_offset - 1) // self.slot_bytes
        first_page, last_page = first // _PAGE_SLOTS, last // _PAGE_SLOTS
        numbers: Iterator[int]
        if last_page - first_page < len(self._pages):
            numbers = iter(range(first_page, last_page + 1))
        else:
            numbers = iter(sorted(n for n in self._pages if first_page <= n <= last_page))
        for number in numbers:
            start = self._pages.get(number)
            if start is None:
                continue
            begin = start + max(first - number * _PAGE_SLOTS, 0)
            end = start + min(last - number * _PAGE_SLOTS + 1, _PAGE_SLOTS)
            yield from filter(None, self._cells[begin:end])

    def _new_page(self, number: int) -> int:
        start = self._pages[number] = len(self._cells)
        self._cells.frombytes(bytes(4 * _PAGE_SLOTS))
        return start

    def _starts(self, numbers: Numbers) -> Numbers:
        """Return where each page starts; of one that does not exist, where another does."""
        unique, inverse = np.unique(numbers, return_inverse=True)
        known = [self._pages.get(number, 0) for number in unique.tolist()]
        return np.array(known, dtype=np.int64)[inverse]
