"""The slot allocator: a starved size gets an extent, and a wrong slot is refused.

That no slot is given twice, lost or out of bounds is shown by ``tests/model/test_chain_model``.
"""

from __future__ import annotations

import pytest

from nixl_offload.errors import IndexStateError
from nixl_offload.tiers.slot_allocator import SlotAllocator, choose_extent_bytes

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SMALL, LARGE = 4 * KIB, 20 * KIB
EXTENT = 64 * KIB


def take_all(slab: SlotAllocator, slot_bytes: int) -> list[int]:
    """Allocate until there is no room."""
    offsets = []
    while (offset := slab.allocate(slot_bytes)) is not None:
        offsets.append(offset)
    return offsets


def test_free_refuses_what_is_not_taken() -> None:
    """Double free, a wrong class, a wrong offset and a place outside are bugs of the caller and change nothing."""
    slab = SlotAllocator(4 * EXTENT, [SMALL, LARGE], EXTENT)
    offset = slab.allocate(SMALL)
    other = slab.allocate(LARGE)
    assert offset is not None
    assert other is not None
    wrong = [
        (offset, LARGE),
        (other, SMALL),
        (offset + 1, SMALL),
        (-SMALL, SMALL),
        (4 * EXTENT, SMALL),
        (offset, 0),
        (offset + SMALL, SMALL),
        (2 * EXTENT, SMALL),
        (offset, 8 * KIB),
        (EXTENT + 3 * LARGE, LARGE),
    ]
    for place, size in wrong:
        with pytest.raises(IndexStateError):
            slab.free(place, size)
    slab.free(offset, SMALL)
    with pytest.raises(IndexStateError):
        slab.free(offset, SMALL)
    assert slab.used_slots(SMALL) == 0
    assert slab.used_slots(LARGE) == 1


def test_an_extent_with_a_retired_slot_is_not_emptied_for_another_class() -> None:
    """It never would be empty, and the starved class would wait for it for ever."""
    slab = SlotAllocator(4 * EXTENT, [SMALL, LARGE], EXTENT)
    offsets = take_all(slab, SMALL)
    first = slab.reclaimable(LARGE)
    assert first == (0, EXTENT)
    slab.retire(offsets[3], SMALL)
    slab.free(offsets[4], SMALL)
    assert slab.allocate(SMALL) == offsets[4], "its own class uses it again"
    assert slab.reclaimable(LARGE) == (EXTENT, 2 * EXTENT)
    for extent in range(1, 4):
        slab.retire(extent * EXTENT, SMALL)
    assert slab.reclaimable(LARGE) is None


def test_a_starved_class_gets_the_cheapest_extent_of_the_richest() -> None:
    """With the pool empty, the class without extents is offered the least used extent of the richest, and gets it."""
    slab = SlotAllocator(8 * EXTENT, [SMALL, LARGE], EXTENT)
    offsets = take_all(slab, SMALL)
    cheap = [offset for offset in offsets if 3 * EXTENT <= offset < 4 * EXTENT]
    for offset in cheap[2:]:
        slab.free(offset, SMALL)
    assert slab.reclaimable(SMALL) is None, "the rich class has room, nothing is to be emptied for it"
    assert slab.reclaimable(LARGE) == (3 * EXTENT, 4 * EXTENT)
    slab.free(cheap[0], SMALL)
    assert slab.allocate(LARGE) is None, "one slot is still in use"
    assert slab.reclaimable(LARGE) == (3 * EXTENT, 4 * EXTENT), "the same extent until it is empty"
    slab.free(cheap[1], SMALL)
    assert slab.allocate(LARGE) == 3 * EXTENT
    assert slab.reclaimable(LARGE) is None


def test_a_draining_extent_takes_no_new_slots_unless_its_class_has_no_other() -> None:
    """Emptying is not undone by the rich class as long as that one has room elsewhere, and never blocks it for good."""
    slab = SlotAllocator(8 * EXTENT, [SMALL, LARGE], EXTENT)
    offsets = take_all(slab, SMALL)
    start, end = slab.reclaimable(LARGE) or (-1, -1)
    inside = [offset for offset in offsets if start <= offset < end]
    outside = [offset for offset in offsets if not start <= offset < end]
    slab.free(inside[0], SMALL)
    slab.free(outside[-1], SMALL)
    assert slab.allocate(SMALL) == outside[-1]
    assert slab.allocate(SMALL) == inside[0]
    assert slab.allocate(SMALL) is None


@pytest.mark.parametrize("rank_bytes", [300 * KIB, 10 * MIB, GIB, 100 * GIB, 4000 * GIB])
@pytest.mark.parametrize(
    "classes", [[64 * KIB + 4 * KIB], [2 * MIB + 4 * KIB, 64 * KIB], [36 * KIB, 4 * KIB, 32 * MIB]]
)
def test_extent_size(rank_bytes: int, classes: list[int]) -> None:
    """Extents hold whole slots of the largest class, are page multiples and lie within their bounds."""
    extent = choose_extent_bytes(rank_bytes, classes)
    assert extent % 4096 == 0
    assert extent % max(classes) == 0
    assert extent <= GIB + max(classes)
    if rank_bytes >= len(classes) * 4 * max(classes):
        assert extent >= 4 * max(classes)
        assert rank_bytes // extent >= len(classes), "every class can have an extent"
