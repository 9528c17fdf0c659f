"""What holds of an index and of a tier's slots after each operation."""

from __future__ import annotations

from nixl_offload.index.index import Index
from nixl_offload.tiers.shared.presence import MAX_ABSENT, Presence
from nixl_offload.tiers.slot_tier import SlotTier
from nixl_offload.tiers.slots import SlotAllocator
from nixl_offload.types import Key


def check_index(index: Index) -> None:
    assert len(set(index)) == len(index), "a key is in two states"
    for queue in index._queues.values():
        for number, keys in enumerate(queue.dicts):
            assert all(key[0] == number for key in keys), "a key is astray"
            assert sorted(keys.values()) == list(keys.values()), "a key was used and not moved"


def check_presence(presence: Presence) -> None:
    check_index(presence)
    assert len(presence) <= presence._max_keys, "more keys than allowed"
    assert len(presence._absent) <= MAX_ABSENT, "more absences than allowed"


def taken(slots: SlotAllocator) -> list[tuple[Key, int, int]]:
    """Return the chunks that have slots, each with offset and slot size."""
    return [
        (key, number * slots._stride + slot * size, size)
        for size, each in slots._classes.items()
        for number, extent in each.extents.items()
        for slot, key in extent.keys.items()
    ]


def check_slots(tier: SlotTier) -> None:
    """Each chunk has one slot, and each taken slot one chunk."""
    index, slots = tier._index, tier._allocator
    check_index(index)
    assert sorted(taken(slots)) == sorted((key, *index.location(key)[1:]) for key in index), "index and slots disagree"
    assert slots.used_bytes + slots.retired_bytes <= tier.capacity_bytes
