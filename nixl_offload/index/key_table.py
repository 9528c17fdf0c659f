"""Key -> node: open addressing over columns of bytes and numbers, without a Python object per key.

Threading: none; owned by one index and called by its thread.
Memory: the key's bytes, 4 bytes of its hash, and 10 to 20 bytes of cells. The garbage collector sees none of it.
Cost: cells come in segments of 32 KiB. A full one is split in two, so growing costs a fraction of a millisecond at a
time however many keys there are. Keys that are asked for in the order of their nodes, up or down, as a chain is, are
found without a hash: after node n the table first compares the key with that of its neighbour.

Keys have one length, that of most. Others, which only a damaged database has, are set aside in a dict.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

import numpy as np

from nixl_offload.index.links import Nodes, Numbers
from nixl_offload.types import Key

_SEGMENT_BITS = 13
_SEGMENT = 1 << _SEGMENT_BITS
"""Cells of a segment."""
_LAST = _SEGMENT - 1
_SPLIT_AT = _SEGMENT * 2 // 5
"""Keys in a segment: more make lookups of absent keys slow."""
_FULL_AT = _SEGMENT * 3 // 4
"""Keys in a segment that cannot be split any more."""
_DEPTH_MAX = 31 - _SEGMENT_BITS
"""Bits of the hash that choose a segment; the bits above choose a cell in it. Enough for 800 million keys."""
_IN_USE = 1 << 31
"""Marks a node's hash as one of a key in the table; 31 bits of the hash lie below."""


class KeyTable:
    """Keys by node and nodes by key. Node 0 means "none". The caller hands out nodes, and calls ``grow`` for them."""

    __slots__ = (
        "_aside",
        "_aside_keys",
        "_cells",
        "_counts",
        "_depths",
        "_guess",
        "_hashes",
        "_length",
        "_mask",
        "_rows",
        "_starts",
        "_step",
        "_width",
    )

    def __init__(self) -> None:
        self._width = 0
        """Bytes of a key; 0 until there is one."""
        self._rows = bytearray()
        """By node: the key."""
        self._hashes = array("I", [0])
        """By node: the hash, with ``_IN_USE``; 0: no key, or one that was set aside."""
        self._cells = array("I", bytes(4 * _SEGMENT))
        self._starts = [0]
        """By the lowest bits of a hash: where in ``_cells`` its segment starts."""
        self._mask = 0
        self._counts = [0]
        """Per segment: keys."""
        self._depths = [0]
        """Per segment: how many bits of the hash its keys have in common."""
        self._length = 0
        self._guess = 0
        """The node to compare with first, of which hash and row always exist."""
        self._step = 1
        self._aside: dict[bytes, int] = {}
        self._aside_keys: dict[int, Key] = {}

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Key]:
        """All keys, in no promised order. The table must not change meanwhile."""
        for node in np.flatnonzero(np.array(self._hashes)).tolist():
            yield self.key(node)
        yield from map(Key, self._aside)

    def find(self, key: bytes) -> int:
        """Return the node of ``key``, 0 if there is none."""
        node, width = self._guess, self._width
        at = node * width
        if self._rows[at : at + width] == key and self._hashes[node]:
            self._guess = node + self._step
            return node
        cells, rows = self._cells, self._rows
        number = hash(key)
        start = self._starts[number & self._mask]
        cell = number >> _DEPTH_MAX & _LAST
        while node := cells[start + cell]:
            at = node * width
            if rows[at : at + width] == key:
                moved = node - self._guess + self._step
                if moved in (1, -1):
                    self._step = moved
                self._guess = node + self._step
                return node
            cell = cell + 1 & _LAST
        return self._aside.get(key, 0) if self._aside else 0

    def key(self, node: int) -> Key:
        """Return the key of a node in use."""
        if not self._hashes[node]:
            return self._aside_keys[node]
        at = node * self._width
        return Key(bytes(self._rows[at : at + self._width]))

    def grow(self, nodes: int) -> None:
        """Make room for node numbers up to ``nodes``, and one more, which may be guessed."""
        missing = nodes + 2 - len(self._hashes)
        if missing > 0:
            self._hashes.frombytes(bytes(4 * missing))
            self._rows.extend(bytes(self._width * len(self._hashes) - len(self._rows)))

    def add(self, key: Key, node: int) -> None:
        """Add an absent key under a node that has none."""
        if not self._width:
            self._set_width(len(key))
        elif 2 * len(self._aside) > self._length and not self._length & self._length - 1:
            self._mend_width()
        self._enter(key, node)

    def _enter(self, key: Key, node: int) -> None:
        number = hash(key)
        start = self._starts[number & self._mask]
        if self._counts[start >> _SEGMENT_BITS] >= _SPLIT_AT:
            start = self._make_room(number)
        width = self._width
        self._length += 1
        if len(key) != width or not key or self._counts[start >> _SEGMENT_BITS] >= _FULL_AT:
            self._aside[key] = node
            self._aside_keys[node] = key
            return
        self._rows[node * width : node * width + width] = key
        self._hashes[node] = number & _IN_USE - 1 | _IN_USE
        cells, cell = self._cells, number >> _DEPTH_MAX & _LAST
        while cells[start + cell]:
            cell = cell + 1 & _LAST
        cells[start + cell] = node
        self._counts[start >> _SEGMENT_BITS] += 1
        self._guess = node  # what was stored is committed next

    def add_many(self, keys: Sequence[Key], first: int) -> bool:
        """Add keys under the unused nodes from ``first`` on.

        False, adding none: a key is here already, or is among them twice, or is of another length than the others.
        """
        lengths = list(map(len, keys))
        if not self._width:
            self._set_width(sorted(lengths)[len(lengths) // 2])  # not that of a damaged row
        width, count = self._width, len(keys)
        if not width or lengths.count(width) < count:
            return False
        numbers = np.fromiter(map(hash, keys), dtype=np.int64, count=count)
        segments = self._make_room_for_many(numbers)
        if segments is None:
            return False
        self._rows[first * width : (first + count) * width] = b"".join(keys)
        hashes = np.frombuffer(self._hashes, dtype=np.uint32)
        hashes[first : first + count] = numbers & _IN_USE - 1 | _IN_USE
        nodes = np.arange(first, first + count, dtype=np.uint32)
        if not self._place(nodes, (segments << _SEGMENT_BITS) + (numbers >> _DEPTH_MAX & _LAST)):
            hashes[first : first + count] = 0
            cells = np.frombuffer(self._cells, dtype=np.uint32)
            cells[(cells >= first) & (cells < first + count)] = 0
            return False
        for segment, added in enumerate(np.bincount(segments).tolist()):
            self._counts[segment] += added
        self._length += count
        return True

    def remove(self, node: int) -> None:
        """Forget the key of a node in use."""
        self._length -= 1
        number = self._hashes[node]
        if not number:
            del self._aside[self._aside_keys.pop(node)]
            return
        cells, hashes = self._cells, self._hashes
        hashes[node] = 0
        start = self._starts[number & self._mask]
        cell = number >> _DEPTH_MAX & _LAST
        self._counts[start >> _SEGMENT_BITS] -= 1
        while cells[start + cell] != node:
            cell = cell + 1 & _LAST
        # Keys behind it that passed its cell on their way move up, so that no search ends too early.
        hole = cell
        while follower := cells[start + (cell := cell + 1 & _LAST)]:
            home = hashes[follower] >> _DEPTH_MAX & _LAST
            if cell - home & _LAST >= cell - hole & _LAST:
                cells[start + hole] = follower
                hole = cell
        cells[start + hole] = 0

    def _set_width(self, width: int) -> None:
        self._width = width
        self._rows.extend(bytes(width * len(self._hashes)))

    def _mend_width(self) -> None:
        """Most keys were set aside: the first was a damaged one. Asked at powers of two, so it costs little in all."""
        keys = [
            (self.key(node), node) for node in [*np.flatnonzero(np.array(self._hashes)).tolist(), *self._aside_keys]
        ]
        width = sorted(len(key) for key, _ in keys)[len(keys) // 2]
        if width == self._width:
            return
        nodes = len(self._hashes)
        self.__init__()  # type: ignore[misc]
        self.grow(nodes - 2)
        self._set_width(width)
        for key, node in keys:
            self._enter(key, node)

    def _make_room(self, number: int) -> int:
        """Split the segment of this hash while it is too full; return where it starts now."""
        while True:
            start = self._starts[number & self._mask]
            segment = start >> _SEGMENT_BITS
            if self._counts[segment] < _SPLIT_AT or self._depths[segment] == _DEPTH_MAX:
                return start
            self._split(number & self._mask)

    def _make_room_for_many(self, numbers: Numbers) -> Numbers | None:
        """Split segments until these hashes have room; return the segment of each. None: they cannot have it."""
        while True:
            # Splitting moves hashes between segments, but never makes a segment of one hash fuller.
            starts = np.array(self._starts, dtype=np.int64)
            segments: Numbers = starts[numbers & self._mask] >> _SEGMENT_BITS
            filled = np.bincount(segments, minlength=len(self._counts)) + np.array(self._counts)
            crowded = np.flatnonzero(filled >= _SPLIT_AT)
            if not len(crowded):
                return segments
            if any(self._depths[segment] == _DEPTH_MAX for segment in crowded.tolist()):
                return None
            ours, where = np.unique(segments, return_index=True)
            number_of = dict(zip(ours.tolist(), numbers[where].tolist(), strict=True))
            crowded_ours = [segment for segment in crowded.tolist() if segment in number_of]
            if not crowded_ours:
                return segments
            for segment in crowded_ours:
                self._split(number_of[segment] & self._mask)

    def _split(self, entry: int) -> None:
        """Part the segment of this entry of ``_starts`` in two, by the next bit of its hashes."""
        old_start = self._starts[entry]
        segment = old_start >> _SEGMENT_BITS
        depth = self._depths[segment]
        if 1 << depth > self._mask:
            self._starts *= 2
            self._mask = 2 * self._mask + 1
        new_start = len(self._cells)
        self._cells.frombytes(bytes(4 * _SEGMENT))
        prefix = entry & (1 << depth) - 1
        entries = range(prefix | 1 << depth, len(self._starts), 1 << depth + 1)
        self._starts[entries.start :: entries.step] = [new_start] * len(entries)
        cells = np.frombuffer(self._cells, dtype=np.uint32)
        old = cells[old_start : old_start + _SEGMENT]
        nodes = old[old != 0]
        old[:] = 0
        numbers = np.frombuffer(self._hashes, dtype=np.uint32)[nodes].astype(np.int64)
        moves = numbers >> depth & 1 == 1
        self._place(nodes, np.where(moves, new_start, old_start) + (numbers >> _DEPTH_MAX & _LAST))
        moved = int(np.count_nonzero(moves))
        self._counts[segment] -= moved
        self._counts.append(moved)
        self._depths[segment] = depth + 1
        self._depths.append(depth + 1)

    def _place(self, nodes: Nodes, places: Numbers) -> bool:
        """Enter nodes at the first free cells from ``places`` on. False, half done: two nodes have one key."""
        cells = np.frombuffer(self._cells, dtype=np.uint32)
        hashes = np.frombuffer(self._hashes, dtype=np.uint32)
        rows = np.frombuffer(self._rows, dtype=np.uint8).reshape(-1, self._width)
        while len(nodes):
            there = cells[places]
            alike = np.flatnonzero(hashes[there] == hashes[nodes])
            if (rows[there[alike]] == rows[nodes[alike]]).all(axis=1).any():
                return False
            free = there == 0
            cells[places[free]] = nodes[free]
            # Of several that want one cell one has it; the others meet it there in the next round.
            waiting = cells[places] != nodes
            nodes, places, free = nodes[waiting], places[waiting], free[waiting]
            places = np.where(free, places, places & ~_LAST | places + 1 & _LAST)
        return True

    # For tests

    def check(self) -> None:
        """Assert every invariant."""
        found = 0
        for key in self:
            node = self.find(key)
            assert node, "a key is not found"
            assert self.key(node) == key, "a node names another key"
            found += 1
        assert found == self._length == sum(self._counts) + len(self._aside), "a key was lost"
        assert len(self._cells) - self._cells.count(0) == sum(self._counts), "a cell was not given back"
        assert {node: key for key, node in self._aside.items()} == self._aside_keys
