"""The scheduler's half of a memory tier, and the slots that it shares with the file tier.

Proves: capacity is dealt out to ranks and never exceeded; too little is refused at start; what is pinned is not
evicted; a retired place is given to nobody again. ``tests/model/test_chain_model`` has all of it in any order.
"""

from __future__ import annotations

from typing import Any

import pytest

from nixl_offload.config import MemoryConfig, parse_config
from nixl_offload.errors import ConfigError, IndexStateError
from nixl_offload.index import State
from nixl_offload.tiers.slot_tier import MemoryTier, rank_memory_bytes
from nixl_offload.types import Key, Location
from nixl_offload.units import parse_size
from tests.contexts import context_of
from tests.unit.shared_rig import key_of, keys_of, namespace_of

SLOT = 64 << 10
SMALL, LARGE = 4096, 12288


def config_of(capacity: int | str, **options: object) -> MemoryConfig:
    tier: dict[str, Any] = {"kind": "memory", "capacity": capacity, **options}
    (config,) = parse_config({"tiers": [tier]}).tiers
    assert isinstance(config, MemoryConfig)
    return config


def open_tier(
    slots: int = 8, slot_classes: tuple[int, ...] = (SLOT,), *, world_size: int = 1, dp_size: int = 1, **options: object
) -> MemoryTier:
    """Open a tier with room for ``slots`` of the largest class on each rank."""
    context = context_of(namespace_of(world_size), slot_classes, world_size=world_size, dp_engines=range(dp_size))
    return MemoryTier.open(config_of(slots * max(slot_classes) * world_size * dp_size, **options), context)


def store(tier: MemoryTier, key: Key, slot_bytes: int = SLOT) -> tuple[Location | None, list[Key]]:
    """Store a chunk if there is room; return where, and what was evicted for it."""
    evicted: list[Key] = []
    location = tier.reserve(key, slot_bytes, evicted)
    if location is not None:
        assert tier.commit(key)
    return location, evicted


# Capacity


def test_capacity_is_dealt_out_to_ranks_of_all_engines() -> None:
    """Every rank gets the same whole pages, and the sum never exceeds what the config allows."""
    assert rank_memory_bytes(1 << 30, 1, 1) == 1 << 30
    assert rank_memory_bytes(1 << 30, 4, 2) == 1 << 27
    for world_size in range(1, 9):
        share = rank_memory_bytes(10_000_000, world_size, 3)
        assert share % 4096 == 0
        assert share * world_size * 3 <= 10_000_000 < (share + 4096) * world_size * 3
    tier = open_tier(16, world_size=2, dp_size=2)
    namespace = namespace_of(2)
    assert tier.place.rank_bytes == 16 * SLOT
    assert tier.place.rank_namespaces == (namespace.rank_digest(0), namespace.rank_digest(1))


@pytest.mark.parametrize(
    ("slot_classes", "world_size", "dp_size"),
    [((SLOT,), 1, 1), ((SLOT,), 3, 2), ((SMALL, LARGE), 2, 1), ((SMALL, LARGE, (2 << 20) + 4096), 1, 1)],
)
def test_too_small_a_capacity_is_refused_with_the_least_that_does(
    slot_classes: tuple[int, ...], world_size: int, dp_size: int
) -> None:
    """The capacity that the message names is enough: four chunks of the largest size for each size."""

    def open_with(capacity: int | str) -> MemoryTier:
        context = context_of(namespace_of(world_size), slot_classes, world_size=world_size, dp_engines=range(dp_size))
        return MemoryTier.open(config_of(capacity), context)

    least_bytes = 4 * len(slot_classes) * max(slot_classes) * world_size * dp_size
    with pytest.raises(ConfigError, match="of the memory tier is too small for this model") as refused:
        open_with(least_bytes - 1)
    named = str(refused.value).rpartition(" at least ")[2]
    assert least_bytes <= parse_size(named) < least_bytes + (1 << 20)
    for tier in (open_with(named), open_with(least_bytes)):
        for number, slot_bytes in enumerate(slot_classes):
            for key in keys_of(4, group=number):
                assert store(tier, key, slot_bytes)[0] is not None


# The life of a chunk


def test_what_is_pinned_keeps_its_slot_though_another_size_needs_the_extent() -> None:
    """A chunk that waits for a farther tier is not lost to another group of the model, which gets room when it goes."""
    tier = open_tier(64, (SMALL, LARGE))
    evicted: list[Key] = []
    small: list[Key] = []
    while not evicted:  # until all extents are lent to the small size
        small.append(key_of(len(small)))
        assert tier.reserve(small[-1], SMALL, evicted) is not None
        tier.commit(small[-1])
    held = [key for key in small if tier.state(key) is State.READY]
    for key in held:
        tier.pin(key)
    assert store(tier, key_of(0, group=1), LARGE) == (None, [])
    assert {tier.state(key) for key in held} == {State.READY}
    for key in held:
        tier.unpin(key)
    location, given_up = store(tier, key_of(0, group=1), LARGE)
    assert location is not None
    assert given_up
    assert {tier.state(key) for key in given_up} == {None}


def test_a_retired_place_is_lost_for_good_and_its_chunk_is_stored_anew_elsewhere() -> None:
    """Also when it is retired after a reset, or one follows: a late write then hits a place that belongs to nobody."""
    tier = open_tier(6)
    spoilt = []
    for number in range(2):
        location = tier.reserve(key_of(number), SLOT, [])
        assert location is not None
        spoilt.append(location)
    tier.retire(key_of(0))
    tier.clear()
    tier.retire(key_of(1))
    tier.clear()
    assert tier.statistics().retired_bytes == 2 * SLOT
    assert [tier.state(key_of(number)) for number in range(2)] == [None, None]
    for key in keys_of(40):
        location, _ = store(tier, key)
        assert location is not None
        assert location not in spoilt
    assert len(tier) == 4, "the rest of the tier is in use"
    with pytest.raises(IndexStateError):
        tier.retire(key_of(39))
    assert tier.state(key_of(39)) is State.READY
