"""What holds of an index and of a tier's slots after each operation."""

from __future__ import annotations

from nixl_offload.index.index import Index
from nixl_offload.tiers.shared.presence import MAX_ABSENT, Presence
from nixl_offload.tiers.slot_tier import SlotTier


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


def check_slots(tier: SlotTier) -> None:
    """Each chunk has one slot, and each taken slot one chunk."""
    index, slots = tier._index, tier._allocator
    check_index(index)
    assert sorted(slots) == sorted((key, *index.location(key)[1:]) for key in index), "index and slots disagree"
    assert slots.used_bytes + slots.retired_bytes <= tier.capacity_bytes
