"""Gives the chunks that an earlier engine left in a slab back to an index and its allocator.

Threading: the thread that opens the tier. Numpy and SQLite do nearly all of it, so other threads can run beside it.
A row is a hint: one that does not fit is left out, and no row is believed before the header in its slot agrees.
"""

from __future__ import annotations

from collections.abc import Iterable

from nixl_offload.errors import IndexStateError
from nixl_offload.index import Index
from nixl_offload.index.rows import Rows
from nixl_offload.tiers.slot_allocator import SlabAllocator
from nixl_offload.types import Key, Location


def adopt_rows(pieces: Iterable[Rows], position: int, index: Index, allocator: SlabAllocator) -> list[Key]:
    """Make rows READY in ``index`` and taken in ``allocator``, where the first of those that conflict wins.

    Returns the keys of the rows that were left out.
    """
    stale: list[Key] = []
    for rows in pieces:
        fits = allocator.fits(rows.offsets, rows.slot_bytes)
        stale += rows.where(~fits).keys
        some = rows.where(fits)
        if not _adopt_all(some, position, index, allocator):
            stale += _adopt_singly(some, position, index, allocator)
    return stale


def _adopt_all(rows: Rows, position: int, index: Index, allocator: SlabAllocator) -> bool:
    """Return whether all could be taken; else none is."""
    if not allocator.adopt_many(rows.offsets, rows.slot_bytes):
        return False
    try:
        index.insert_many(position, rows)
    except IndexStateError:
        for _, offset, slot_bytes in rows.singly():
            allocator.free(offset, slot_bytes)
        return False
    return True


def _adopt_singly(rows: Rows, position: int, index: Index, allocator: SlabAllocator) -> list[Key]:
    stale = []
    for key, offset, slot_bytes in rows.singly():
        if not allocator.adopt(offset, slot_bytes):
            stale.append(key)
            continue
        try:
            index.insert_ready(key, Location(position, offset, slot_bytes))
        except IndexStateError:
            allocator.free(offset, slot_bytes)
            stale.append(key)
    return stale
