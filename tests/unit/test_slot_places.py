"""Where slots lie that ranks have one copy of: no two in one place, all of a slab in use, never across machines."""

from __future__ import annotations

import numpy as np
import pytest

from nixl_offload.tiers.slot_allocator import SlotAllocator
from nixl_offload.tiers.slot_places import ranks_together, replicas_of_slots

PAGE, EXTENT, EXTENTS = 4096, 12 * 4096, 5


@pytest.mark.parametrize("replicas", [{}, {PAGE: 2}, {2 * PAGE: 4}, {PAGE: 4, 5 * PAGE: 2}, {PAGE: 1, 2 * PAGE: 4}])
@pytest.mark.parametrize("size", [PAGE, 2 * PAGE, 5 * PAGE])
def test_every_slot_has_a_place_of_its_own(replicas: dict[int, int], size: int) -> None:
    """Other sizes have extents meanwhile; what is left is full when the places of each rank are."""
    sizes = [PAGE, 2 * PAGE, 5 * PAGE]
    allocator = SlotAllocator(EXTENTS * EXTENT, sizes, EXTENT, replicas)
    places = allocator.places
    held = [(allocator.allocate(other), other) for other in sizes if other != size]
    while (offset := allocator.allocate(size)) is not None:
        held.append((offset, size))
    copies = places.replicas.get(size, 1)
    assert sum(each == size for _, each in held) == (EXTENTS - 2) * (EXTENT // size) * copies
    taken = np.zeros((8, EXTENTS * EXTENT // PAGE), dtype=int)
    for offset, each in held:
        assert offset is not None
        found = {places.find(rank, offset, each) for rank in range(8)}
        assert len(found) == 8 // places.replicas.get(each, 1), "one place for those that have one copy"
        for holder, begin in found:
            assert begin + each <= EXTENTS * EXTENT
            taken[holder, begin // PAGE : (begin + each) // PAGE] += 1
    assert taken.max() == 1
    again = SlotAllocator(EXTENTS * EXTENT, sizes, EXTENT, replicas)
    for offset, each in held:
        assert offset is not None
        assert not again.adopt(offset + EXTENTS * places.stride_bytes, each)
        assert again.adopt(offset, each)
    assert again.used_bytes == allocator.used_bytes <= EXTENTS * EXTENT
    for offset, each in held:
        assert offset is not None
        again.free(offset, each)


@pytest.mark.parametrize(
    ("machines", "replicas", "together"),
    [
        ("aaaaaaaa", 8, 8),
        ("aaaabbbb", 8, 4),
        ("aaaaaaaa", 2, 2),
        ("aabbccdd", 8, 2),
        ("abababab", 8, 1),
        ("aaab", 4, 1),
        ("aaaaaa", 3, 3),
    ],
)
def test_one_copy_never_crosses_machines(machines: str, replicas: int, together: int) -> None:
    assert ranks_together(list(machines), replicas) == together


def test_slots_of_one_size_are_shared_alike() -> None:
    assert replicas_of_slots([(PAGE, 8), (2 * PAGE, 1)]) == {PAGE: 8, 2 * PAGE: 1}
    assert replicas_of_slots([(PAGE, 8), (PAGE, 2)]) == {PAGE: 2}
    assert replicas_of_slots([(PAGE, 3), (2 * PAGE, 2)]) == {PAGE: 3, 2 * PAGE: 1}
    assert replicas_of_slots([(PAGE, 1)]) == {}
