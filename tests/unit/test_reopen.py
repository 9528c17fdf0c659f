"""A start finds again what a slab's journal remembers, though some of its rows are damaged."""

from __future__ import annotations

import random

import pytest

from nixl_offload.index import Index
from nixl_offload.index.database import Row
from nixl_offload.tiers.slab.tier import adopt_rows
from nixl_offload.tiers.slot_allocator import SlotAllocator
from nixl_offload.types import Key

CLASSES = (4096, 12288, 65536)
EXTENT = 1 << 20
RANK_BYTES = 64 * EXTENT


def sound_rows(chance: random.Random) -> list[Row]:
    """Return a full slab: every extent of one class, in any order."""
    rows = []
    for extent in range(RANK_BYTES // EXTENT):
        size = chance.choice(CLASSES)
        slots = chance.sample(range(EXTENT // size), chance.randrange(1, EXTENT // size + 1))
        rows += [(Key(chance.randbytes(32) + bytes(4)), extent * EXTENT + slot * size, size) for slot in slots]
    chance.shuffle(rows)
    return rows


def spoil(row: Row, rows: list[Row], chance: random.Random) -> Row:
    """Return what damage makes of a row."""
    key, offset, size = row
    other = chance.choice(rows)
    return chance.choice(
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


@pytest.mark.parametrize("seed", range(12))
def test_sound_rows_are_found_again_and_damaged_ones_left_out(seed: int) -> None:
    """Each chunk has a slot of its own, in the index as in the allocator; the oldest row is evicted first."""
    chance = random.Random(seed)
    rows = sound_rows(chance)
    sound = set(rows)
    for at in chance.sample(range(len(rows)), (0, 0, 3, 300)[seed % 4]):
        rows[at] = spoil(rows[at], rows, chance)
    piece = chance.choice((1, 50, 1000, 100_000))
    index, allocator = Index(), SlotAllocator(RANK_BYTES, CLASSES, EXTENT)
    stale = adopt_rows((rows[at : at + piece] for at in range(0, len(rows), piece)), 3, index, allocator)
    index.check()
    assert len(index) + len(stale) == len(rows)
    found = {(key, index.location(key).offset, index.location(key).slot_bytes) for key in index}
    assert found <= set(rows)
    if sound == set(rows):
        assert found == sound
    for size in CLASSES:
        here = [key for key, _, slot_bytes in rows if (key, _, slot_bytes) in found and slot_bytes == size]
        assert allocator.used_slots(size) == len(here)
        victims = [index.evict(size) for _ in here]
        assert [victim[0] for victim in victims if victim] == list(dict.fromkeys(here))
