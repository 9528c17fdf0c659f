"""Which node rests at which offset, per size class: finds overlaps on insertion and the nodes of an extent.

Threading: none; owned by one index. Costs about 5 bytes per slot.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

_PAGE_SLOTS = 1024


class SlotMap:
    """Offset -> node for slots of one size.

    Two slots of one size that do not overlap differ in ``offset // slot_bytes``, wherever they start: so that quotient
    addresses them, in pages of 1024 made on demand, and each quotient names at most one slot.
    """

    __slots__ = ("_pages", "slot_bytes")

    def __init__(self, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self._pages: dict[int, array[int]] = {}

    def set(self, offset: int, node: int) -> None:
        """Record ``node`` (not 0) at ``offset``; the caller made sure that nothing overlaps."""
        number, place = divmod(offset // self.slot_bytes, _PAGE_SLOTS)
        page = self._pages.get(number)
        if page is None:
            page = self._pages[number] = array("I", bytes(4 * _PAGE_SLOTS))
        page[place] = node

    def clear(self, offset: int) -> None:
        """Forget what rests at ``offset``."""
        number, place = divmod(offset // self.slot_bytes, _PAGE_SLOTS)
        self._pages[number][place] = 0

    def clash(self, offset: int, offsets: array[int]) -> int:
        """Return a node whose slot overlaps one of this size at ``offset``, 0 if none. ``offsets`` is by node."""
        slot_bytes = self.slot_bytes
        number, place = divmod(offset // slot_bytes, _PAGE_SLOTS)
        page = self._pages.get(number)
        if page is None or not 0 < place < _PAGE_SLOTS - 1:
            for node in self.near(offset - slot_bytes + 1, offset + slot_bytes):
                if abs(offsets[node] - offset) < slot_bytes:
                    return node
            return 0
        if node := page[place]:
            return node
        if (node := page[place - 1]) and offset - offsets[node] < slot_bytes:
            return node
        if (node := page[place + 1]) and offsets[node] - offset < slot_bytes:
            return node
        return 0

    def near(self, start_offset: int, end_offset: int) -> Iterator[int]:
        """Yield the nodes whose offset lies in ``[start_offset, end_offset)``, and perhaps some of a slot around it."""
        if end_offset <= start_offset:
            return
        first = max(start_offset, 0) // self.slot_bytes
        last = max(end_offset - 1, 0) // self.slot_bytes
        first_page, last_page = first // _PAGE_SLOTS, last // _PAGE_SLOTS
        numbers: Iterator[int]
        if last_page - first_page < len(self._pages):
            numbers = iter(range(first_page, last_page + 1))
        else:
            numbers = iter(sorted(n for n in self._pages if first_page <= n <= last_page))
        for number in numbers:
            page = self._pages.get(number)
            if page is None:
                continue
            begin = max(first - number * _PAGE_SLOTS, 0)
            end = min(last - number * _PAGE_SLOTS + 1, _PAGE_SLOTS)
            yield from filter(None, page[begin:end])
