"""Where each node rests: offset and size class by node, and the check that no two nodes share a byte.

Threading: none; owned by one index. Failure: a method that raises has changed nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator

import numpy as np

from nixl_offload.errors import IndexStateError
from nixl_offload.index.links import Nodes, Numbers
from nixl_offload.index.policy import Policy
from nixl_offload.index.rows import Rows
from nixl_offload.index.size_class import SizeClass
from nixl_offload.types import Location

_FAR = 1 << 60
"""Offsets and sizes beyond it are not inserted in bulk: their sums might not fit a column."""


class Places:
    """Locations by node, of one tier: that of the first."""

    __slots__ = ("_class_of_node", "_make_policy", "_numbers", "classes", "offsets", "tier")

    def __init__(self, make_policy: Callable[[int], Policy], tier: int | None = None) -> None:
        self.tier = tier
        self.classes: list[SizeClass] = []
        self._numbers: dict[int, int] = {}
        """Slot size -> place in ``classes``."""
        self._make_policy = make_policy
        self.offsets = array("q", [0])
        self._class_of_node = array("H", [0])

    def grow(self, missing: int) -> None:
        """Give the columns entries for so many more nodes."""
        self.offsets.frombytes(bytes(missing * self.offsets.itemsize))
        self._class_of_node.frombytes(bytes(missing * self._class_of_node.itemsize))

    def size_class(self, node: int) -> SizeClass:
        """Return the size class of a node in use."""
        return self.classes[self._class_of_node[node]]

    def class_of_size(self, slot_bytes: int) -> SizeClass | None:
        """Return the size class for slots of this size, if there is one yet."""
        number = self._numbers.get(slot_bytes)
        return None if number is None else self.classes[number]

    def location(self, node: int) -> Location:
        """Return where a node in use rests."""
        assert self.tier is not None, "a node has a tier"
        return Location(self.tier, self.offsets[node], self.size_class(node).slots.slot_bytes)

    def between(self, start_offset: int, end_offset: int) -> Iterator[int]:
        """Yield the nodes whose slot starts in ``[start_offset, end_offset)``."""
        for size_class in self.classes:
            for node in size_class.slots.near(start_offset, end_offset):
                if start_offset <= self.offsets[node] < end_offset:
                    yield node

    def refuse(self, location: Location) -> None:
        """Raise IndexStateError where nothing can rest: no such place, another tier, or an overlap."""
        tier, offset, slot_bytes = location
        if offset < 0 or slot_bytes <= 0:
            raise IndexStateError(f"no such place: {location}")
        if self.tier is not None and tier != self.tier:
            raise IndexStateError(f"{location} in the index of tier {self.tier}")
        offsets = self.offsets
        for size_class in self.classes:
            other_bytes = size_class.slots.slot_bytes
            if other_bytes == slot_bytes:
                clash = size_class.slots.clash(offset, offsets)
            else:
                clash = next(
                    (
                        node
                        for node in size_class.slots.near(offset - other_bytes + 1, offset + slot_bytes)
                        if offsets[node] < offset + slot_bytes and offset < offsets[node] + other_bytes
                    ),
                    0,
                )
            if clash:
                raise IndexStateError(f"{location} overlaps {self.location(clash)}, which is in use")

    def refuse_many(self, tier: int, rows: Rows) -> None:
        """``refuse`` the rows if any of them cannot rest where it says, beside the others too."""
        starts, ends = rows.offsets, rows.offsets + rows.slot_bytes
        high = max(starts.max(), rows.slot_bytes.max())
        if starts.min() < 0 or rows.slot_bytes.min() <= 0 or high > _FAR or self.tier not in (None, tier):
            raise IndexStateError(f"no such places, or not of tier {self.tier}")
        if self._overlaps(starts, ends):
            raise IndexStateError("a location overlaps one that is in use")

    def put(self, node: int, location: Location) -> SizeClass:
        """Rest a node at a location that ``refuse`` lets pass. Returns its size class."""
        number = self._number(location.slot_bytes)
        self.tier = location.tier
        self.offsets[node] = location.offset
        self._class_of_node[node] = number
        size_class = self.classes[number]
        size_class.slots.set(location.offset, node)
        return size_class

    def put_many(self, nodes: Nodes, tier: int, rows: Rows) -> Iterator[tuple[SizeClass, Nodes]]:
        """Rest nodes where ``refuse_many`` lets them. Yields each size class with its nodes, in their order."""
        self.tier = tier
        np.frombuffer(self.offsets, dtype=np.int64)[nodes] = rows.offsets
        for slot_bytes in np.unique(rows.slot_bytes).tolist():
            number = self._number(slot_bytes)
            wanted = rows.slot_bytes == slot_bytes
            np.frombuffer(self._class_of_node, dtype=np.uint16)[nodes[wanted]] = number
            self.classes[number].slots.set_many(rows.offsets[wanted], nodes[wanted])
            yield self.classes[number], nodes[wanted]

    def _overlaps(self, starts: Numbers, ends: Numbers) -> bool:
        """Whether one of these ranges overlaps another, or a slot in use."""
        # Here, not where it is raised: as long as an exception keeps its frame, no column of that frame can grow.
        order = np.argsort(starts)
        offsets = np.frombuffer(self.offsets, dtype=np.int64)
        return bool((ends[order][:-1] > starts[order][1:]).any()) or any(
            size_class.slots.clashes(starts, ends, offsets) for size_class in self.classes
        )

    def _number(self, slot_bytes: int) -> int:
        number = self._numbers.get(slot_bytes)
        if number is None:
            number = self._numbers[slot_bytes] = len(self.classes)
            self.classes.append(SizeClass(slot_bytes, self._make_policy(slot_bytes)))
        return number
