"""Gives the chunks that an earlier engine left in a slab back to an index and its allocator.

Threading: the thread that opens the tier.
A row is a hint: one that does not fit is left out, and no row is believed before the header in its slot agrees.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from nixl_offload.errors import IndexStateError
from nixl_offload.index import Index
from nixl_offload.index.database import Row
from nixl_offload.tiers.slot_allocator import SlabAllocator
from nixl_offload.types import Key, Location


def adopt_rows(pieces: Iterable[Sequence[Row]], position: int, index: Index, allocator: SlabAllocator) -> list[Key]:
    """Make rows READY in ``index`` and taken in ``allocator``, where the first of those that conflict wins.

    Returns the keys of the rows that were left out.
    """
    stale: list[Key] = []
    for rows in pieces:
        for key, offset, slot_bytes in rows:
            if not allocator.adopt(offset, slot_bytes):
                stale.append(key)
                continue
            try:
                index.insert_ready(key, Location(position, offset, slot_bytes))
            except IndexStateError:
                allocator.free(offset, slot_bytes)
                stale.append(key)
    return stale
