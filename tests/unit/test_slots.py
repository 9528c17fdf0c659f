"""Slots, and the memory tier that is made of them: a starved size gets an extent, a wrong slot is refused, damaged rows
are left out, no two chunks lie in one place. ``tests/model/test_chain_model`` has all of it in any order.
"""

from __future__ import annotations

import gc
import random
from itertools import count

import numpy as np
import pytest

from nixl_offload.config import MemoryConfig
from nixl_offload.errors import ConfigError, IndexStateError
from nixl_offload.index import State
from nixl_offload.index.durable import Row
from nixl_offload.tiers.base import Place
from nixl_offload.tiers.slot_tier import MemoryTier, SlotTier
from nixl_offload.tiers.slots import SlotAllocator, choose_extent_bytes, ranks_together, replicas_of_slots
from nixl_offload.types import Key, Location
from nixl_offload.units import parse_size
from tests.contexts import context_of
from tests.invariants import check_slots, taken
from tests.unit.shared_rig import key_of, keys_of, namespace_of

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
PAGE, SMALL, LARGE, EXTENT = 4 * KIB, 4 * KIB, 20 * KIB, 64 * KIB
_numbers = count()


def take(slots: SlotAllocator, slot_bytes: int) -> int | None:
    return slots.allocate(Key(b"%d" % next(_numbers)), slot_bytes)


def take_all(slots: SlotAllocator, slot_bytes: int) -> list[int]:
    """Take until there is no room."""
    offsets = []
    while (offset := take(slots, slot_bytes)) is not None:
        offsets.append(offset)
    return offsets


def starving(slots: SlotAllocator, slot_bytes: int) -> set[int]:
    """Return the locations of the chunks to give up for a size."""
    named = slots.to_give_up(slot_bytes)
    return {offset for key, offset, _ in taken(slots) if key in named}


def test_what_is_not_taken_is_not_taken_back() -> None:
    """Double free, a wrong size, a wrong offset and a place outside are bugs of the caller and change nothing."""
    slots = SlotAllocator(4 * EXTENT, [SMALL, LARGE], EXTENT)
    offset, other = take(slots, SMALL), take(slots, LARGE)
    assert offset is not None
    assert other is not None
    wrong = [
        *((offset, LARGE), (other, SMALL), (offset + 1, SMALL), (-SMALL, SMALL), (4 * EXTENT, SMALL), (offset, 0)),
        *((offset + SMALL, SMALL), (2 * EXTENT, SMALL), (offset, 8 * KIB), (EXTENT + 3 * LARGE, LARGE)),
    ]
    slots.free(offset, SMALL)
    for place, size in [*wrong, (offset, SMALL)]:
        with pytest.raises(IndexStateError):
            slots.free(place, size)
    assert [(at, size) for _, at, size in taken(slots)] == [(other, LARGE)]


def test_an_extent_with_a_retired_slot_is_not_emptied_for_another_size() -> None:
    """It would never be empty, and the starved size would wait for ever."""
    slots = SlotAllocator(4 * EXTENT, [SMALL, LARGE], EXTENT)
    offsets = take_all(slots, SMALL)
    assert starving(slots, LARGE) == set(range(0, EXTENT, SMALL))
    slots.retire(offsets[3], SMALL)
    slots.free(offsets[4], SMALL)
    assert take(slots, SMALL) == offsets[4], "its own size uses it again"
    assert starving(slots, LARGE) == set(range(EXTENT, 2 * EXTENT, SMALL))
    for extent in range(1, 4):
        slots.retire(extent * EXTENT, SMALL)
    assert not starving(slots, LARGE)


def test_a_starved_size_gets_the_cheapest_extent_of_the_richest() -> None:
    slots = SlotAllocator(8 * EXTENT, [SMALL, LARGE], EXTENT)
    offsets = take_all(slots, SMALL)
    cheap = [offset for offset in offsets if 3 * EXTENT <= offset < 4 * EXTENT]
    for offset in cheap[2:]:
        slots.free(offset, SMALL)
    assert starving(slots, LARGE) == set(cheap[:2])
    slots.free(cheap[0], SMALL)
    assert take(slots, LARGE) is None, "one slot is still in use"
    assert starving(slots, LARGE) == {cheap[1]}, "the same extent until it is empty"
    slots.free(cheap[1], SMALL)
    assert take(slots, LARGE) == 3 * EXTENT


def test_a_draining_extent_takes_no_new_slots_unless_its_size_has_no_other() -> None:
    """The rich size does not refill it while it has room elsewhere, but is never blocked for good."""
    slots = SlotAllocator(8 * EXTENT, [SMALL, LARGE], EXTENT)
    offsets = take_all(slots, SMALL)
    inside = starving(slots, LARGE)
    outside = [offset for offset in offsets if offset not in inside]
    slots.free(min(inside), SMALL)
    slots.free(outside[-1], SMALL)
    assert take(slots, SMALL) == outside[-1]
    assert take(slots, SMALL) == min(inside)
    assert take(slots, SMALL) is None


def test_the_garbage_collector_visits_no_slot() -> None:
    """Otherwise each full collection would stop vLLM's scheduler for a time that grows with the chunks."""

    def visits() -> int:
        return sum(len(gc.get_referents(each)) for each in gc.get_objects())

    slots = SlotAllocator(10_000 * SMALL, [SMALL])
    before = visits()
    for number in range(5_000, 10_000):
        assert slots.adopt(Key(b"%d" % number), number * SMALL, SMALL)
    for number in range(6_000, 9_000):
        slots.free(number * SMALL, SMALL)
    assert take(slots, SMALL) is not None
    assert visits() - before < 1_000


@pytest.mark.parametrize("rank_bytes", [300 * KIB, 10 * MIB, GIB, 100 * GIB, 4000 * GIB])
@pytest.mark.parametrize("classes", [[68 * KIB], [2 * MIB + 4 * KIB, 64 * KIB], [36 * KIB, 4 * KIB, 32 * MIB]])
def test_extent_size(rank_bytes: int, classes: list[int]) -> None:
    """Extents hold whole slots of the largest size, are page multiples and lie within their bounds."""
    extent = choose_extent_bytes(rank_bytes, classes)
    assert extent % PAGE == extent % max(classes) == 0
    assert extent <= GIB + max(classes)
    if rank_bytes >= len(classes) * 4 * max(classes):
        assert extent >= 4 * max(classes)
        assert rank_bytes // extent >= len(classes), "every size can have an extent"


# A start adopts the rows of a slab's index, although some of them are damaged.

CLASSES = (4096, 12288, 65536)
RANK_BYTES = 64 * MIB


def sound_rows(chance: random.Random) -> list[Row]:
    """Return a full slab: every extent of one size, in any order."""
    rows = []
    for extent in range(RANK_BYTES // MIB):
        size = chance.choice(CLASSES)
        slots = chance.sample(range(MIB // size), chance.randrange(1, MIB // size + 1))
        rows += [Row(Key(chance.randbytes(32) + bytes(4)), extent * MIB + slot * size, size, 0) for slot in slots]
    chance.shuffle(rows)
    return rows


def spoil(row: Row, rows: list[Row], chance: random.Random) -> Row:
    """Return a damaged row."""
    key, offset, size, _ = row
    other = chance.choice(rows)
    key, offset, size = chance.choice(
        [
            (other[0], offset, size),
            (key, other[1], other[2]),
            (key, other[1], size),
            (key, offset, chance.choice(CLASSES)),
            (key, offset ^ 1 << chance.randrange(63), size),
            (key, -offset - 1, size),
            (key, offset, chance.choice((0, -4096, 1, 4097, 2**62, -(2**63), 2**63 - 1))),
            (key, chance.choice((2**63 - 1, -(2**63), RANK_BYTES, RANK_BYTES - 4096)), size),
            (Key(key[:-4] + b"\1"), offset, size),
            (Key(key[: chance.randrange(37)]), offset, size),
            (Key(key + bytes(28)), offset, size),
        ]
    )
    return Row(key, offset, size, 0)


@pytest.mark.parametrize("seed", range(12))
def test_sound_rows_are_found_again_and_damaged_ones_left_out(seed: int) -> None:
    """Each chunk has a slot of its own; the oldest row of a size is evicted first."""
    chance = random.Random(seed)
    rows = sound_rows(chance)
    sound = set(rows)
    for at in chance.sample(range(len(rows)), (0, 0, 3, 300)[seed % 4]):
        rows[at] = spoil(rows[at], rows, chance)
    tier = SlotTier(3, Place(bytes(32)), SlotAllocator(RANK_BYTES, CLASSES, MIB))
    stale = tier.adopt(rows)
    check_slots(tier)
    assert len(tier) + len(stale) == len(rows)
    index = tier._index
    found = {Row(key, *index.location(key)[1:], 0) for key in index}
    assert found <= set(rows)
    if sound == set(rows):
        assert found == sound
    for size in CLASSES:
        here = [row[0] for row in rows if row in found and row[2] == size]
        victims = [index.evict(size) for _ in here]
        assert [victim[0] for victim in victims if victim] == list(dict.fromkeys(here))


# The places of slots that ranks share.


@pytest.mark.parametrize("replicas", [{}, {PAGE: 2}, {2 * PAGE: 4}, {PAGE: 4, 5 * PAGE: 2}, {PAGE: 1, 2 * PAGE: 4}])
@pytest.mark.parametrize("size", [PAGE, 2 * PAGE, 5 * PAGE])
def test_every_slot_has_a_place_of_its_own(replicas: dict[int, int], size: int) -> None:
    """Other sizes have extents meanwhile. The allocator is full exactly when every place on each rank is taken."""
    sizes, extent, rank_bytes = [PAGE, 2 * PAGE, 5 * PAGE], 12 * PAGE, 5 * 12 * PAGE
    slots = SlotAllocator(rank_bytes, sizes, extent, replicas)
    places = slots.places
    for other in sizes:
        if other != size:
            take(slots, other)
    assert len(take_all(slots, size)) == 3 * (extent // size) * places.replicas.get(size, 1)
    pages = np.zeros((8, rank_bytes // PAGE), dtype=int)
    again = SlotAllocator(rank_bytes, sizes, extent, replicas)
    for key, offset, each in taken(slots):
        found = {places.find(rank, offset, each) for rank in range(8)}
        assert len(found) == 8 // places.replicas.get(each, 1), "one place for those that have one copy"
        for holder, begin in found:
            assert begin + each <= rank_bytes
            pages[holder, begin // PAGE : (begin + each) // PAGE] += 1
        assert not again.adopt(key, offset + 5 * places.stride_bytes, each)
        assert again.adopt(key, offset, each)
    assert pages.max() == 1
    assert again.used_bytes == slots.used_bytes <= rank_bytes
    for _, offset, each in taken(slots):
        again.free(offset, each)


@pytest.mark.parametrize(
    ("machines", "replicas", "together"),
    [
        *(("aaaaaaaa", 8, 8), ("aaaabbbb", 8, 4), ("aaaaaaaa", 2, 2), ("aabbccdd", 8, 2)),
        *(("abababab", 8, 1), ("aaab", 4, 1), ("aaaaaa", 3, 3)),
    ],
)
def test_one_copy_never_crosses_machines(machines: str, replicas: int, together: int) -> None:
    assert ranks_together(list(machines), replicas) == together


def test_slots_of_one_size_are_shared_alike() -> None:
    assert replicas_of_slots([(PAGE, 8), (2 * PAGE, 1)]) == {PAGE: 8, 2 * PAGE: 1}
    assert replicas_of_slots([(PAGE, 8), (PAGE, 2)]) == {PAGE: 2}
    assert replicas_of_slots([(PAGE, 3), (2 * PAGE, 2)]) == {PAGE: 3, 2 * PAGE: 1}
    assert replicas_of_slots([(PAGE, 1)]) == {}


# The memory tier: capacity is divided among ranks and never exceeded; pinned chunks are not evicted.

SLOT = 64 << 10


def open_tier(capacity: int | str, slot_classes: tuple[int, ...], world_size: int = 1, dp_size: int = 1) -> MemoryTier:
    context = context_of(namespace_of(world_size), slot_classes, world_size=world_size, dp_engines=range(dp_size))
    return MemoryTier.open(MemoryConfig.model_validate({"kind": "memory", "capacity": capacity}), context)


def store(tier: MemoryTier, key: Key, slot_bytes: int = SLOT) -> tuple[Location | None, list[Key]]:
    """Store a chunk if there is room; return where, and what was evicted for it."""
    evicted: list[Key] = []
    location = tier.reserve(key, slot_bytes, evicted)
    if location is not None:
        assert tier.commit((key,))
    return location, evicted


@pytest.mark.parametrize(
    ("slot_classes", "world_size", "dp_size"),
    [((SLOT,), 1, 1), ((SLOT,), 3, 2), ((PAGE, 3 * PAGE), 2, 1), ((PAGE, 3 * PAGE, (2 << 20) + 4096), 1, 1)],
)
def test_too_small_a_capacity_is_refused_with_the_least_that_does(
    slot_classes: tuple[int, ...], world_size: int, dp_size: int
) -> None:
    """The capacity in the message is enough: four chunks of the largest size for each size."""
    sizes = slot_classes, world_size, dp_size
    least_bytes = 4 * len(slot_classes) * max(slot_classes) * world_size * dp_size
    with pytest.raises(ConfigError, match="of the memory tier is too small for this model") as refused:
        open_tier(least_bytes - 1, *sizes)
    named = str(refused.value).rpartition(" at least ")[2]
    assert least_bytes <= parse_size(named) < least_bytes + (1 << 20)
    for tier in (open_tier(named, *sizes), open_tier(least_bytes, *sizes)):
        for number, slot_bytes in enumerate(slot_classes):
            for key in keys_of(4, group=number):
                assert store(tier, key, slot_bytes)[0] is not None


def test_what_is_pinned_keeps_its_slot_though_another_size_needs_the_extent() -> None:
    """A chunk that waits for a farther tier is not lost to another group of the model, which gets room when it goes."""
    tier = open_tier(64 * 3 * PAGE, (PAGE, 3 * PAGE))
    evicted, small = list[Key](), list[Key]()
    while not evicted:  # until all extents are lent to the small size
        small.append(key_of(len(small)))
        assert tier.reserve(small[-1], PAGE, evicted) is not None
        tier.commit(small[-1:])
    held = [key for key in small if tier.state(key) is State.READY]
    tier.pin(held)
    assert store(tier, key_of(0, group=1), 3 * PAGE) == (None, [])
    assert {tier.state(key) for key in held} == {State.READY}
    tier.unpin(held)
    location, given_up = store(tier, key_of(0, group=1), 3 * PAGE)
    assert location is not None
    assert given_up
    assert {tier.state(key) for key in given_up} == {None}
