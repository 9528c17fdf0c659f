"""Reopening in bulk gives what reopening row by row gives, whatever the rows are."""

from __future__ import annotations

import random

import numpy as np
import pytest

from nixl_offload.errors import IndexStateError
from nixl_offload.index import Index, State
from nixl_offload.index.rows import Row, Rows
from nixl_offload.tiers.slab.reopen import adopt_rows
from nixl_offload.tiers.slot_allocator import SlabAllocator
from nixl_offload.types import Key, Location

CLASSES = (4096, 12288, 65536)
EXTENT = 1 << 20
RANK_BYTES = 64 * EXTENT


def columns(rows: list[Row]) -> Rows:
    keys, offsets, slot_bytes = zip(*rows, strict=True)
    return Rows(keys, np.array(offsets, dtype=np.int64), np.array(slot_bytes, dtype=np.int64))


def row_by_row(rows: list[Row], index: Index, allocator: SlabAllocator) -> list[Key]:
    """What a slab did before rows came in columns."""
    stale = []
    for key, offset, slot_bytes in rows:
        if not allocator.adopt(offset, slot_bytes):
            stale.append(key)
            continue
        try:
            index.insert_ready(key, Location(3, offset, slot_bytes))
        except IndexStateError:
            allocator.free(offset, slot_bytes)
            stale.append(key)
    return stale


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


@pytest.mark.parametrize("policy", ["lru", "s3fifo"])
@pytest.mark.parametrize("seed", range(12))
def test_bulk_and_single_insertion_agree(seed: int, policy: str) -> None:
    """Chunks found, places, what is left out, free slots, and the order of eviction; sound and damaged rows."""
    chance = random.Random(seed)
    rows = sound_rows(chance)
    damaged = (0, 0, 3, 300)[seed % 4]
    for at in chance.sample(range(len(rows)), damaged):
        rows[at] = spoil(rows[at], rows, chance)
    piece = chance.choice((1, 50, 1000, 100_000))
    made = []
    for bulk in (True, False):
        index, allocator = Index(policy), SlabAllocator(RANK_BYTES, CLASSES, EXTENT)
        some = rows if piece > 1 else rows[:500]
        if bulk:
            pieces = (columns(some[at : at + piece]) for at in range(0, len(some), piece))
            stale = adopt_rows(pieces, 3, index, allocator)
        else:
            stale = row_by_row(some, index, allocator)
        index.check()
        used = [allocator.used_slots(size) for size in CLASSES]
        places = {key: index.location(key) for key in index}
        assert all(index.state(key) is State.READY for key in places)
        free = [[allocator.allocate(size) for _ in range(20)] for size in CLASSES]
        extents = allocator.extents_in_use
        victims = [[index.evict(size) for _ in range(len(rows))] for size in CLASSES]
        made.append((sorted(stale), used, places, free, extents, victims))
    assert made[0] == made[1]
    assert bool(made[0][0]) <= bool(damaged)


def test_a_bulk_that_is_refused_changes_nothing() -> None:
    """A key that is here, an overlap with another slot size across pages, an overlap among the rows themselves."""
    index = Index()
    keys = [Key(bytes([number]) * 36) for number in range(9)]
    index.insert_many(0, columns([(keys[0], 0, 12288), (keys[1], 4096 * 1024 - 4096, 8192)]))
    index.insert_writing(keys[2], Location(0, 1 << 30, 4096))
    before = index.occupancy()
    for refused in (
        [(keys[3], 1 << 40, 4096), (keys[1], 1 << 20, 4096)],
        [(keys[3], 1 << 40, 4096), (keys[3], 1 << 41, 4096)],
        [(keys[3], 8192, 4096)],
        [(keys[3], 4096 * 1024, 4096)],
        [(keys[3], 4096 * 1000, 1 << 20)],
        [(keys[3], 0, 1 << 40)],
        [(keys[3], (1 << 30) - 4096, 8192)],
        [(keys[3], 1 << 20, 8192), (keys[4], (1 << 20) + 4096, 4096)],
        [(keys[3], -4096, 4096)],
        [(keys[3], 1 << 20, 0)],
        [(keys[3], 1 << 62, 4096)],
        [(keys[3], 1 << 20, 4096), (Key(b"short"), 1 << 21, 4096)],
    ):
        with pytest.raises(IndexStateError):
            index.insert_many(0, columns(refused))
        assert index.state(keys[3]) is None
        assert (len(index), index.occupancy()) == (3, before)
        index.check()
    with pytest.raises(IndexStateError):
        index.insert_many(1, columns([(keys[3], 1 << 20, 4096)]))
    index.insert_many(0, columns([(keys[3], 12288, 4096), (keys[4], 4096 * 1024 + 4096, 4096)]))
    assert index.drop(keys[3]) == Location(0, 12288, 4096)
    index.insert_many(0, columns([(keys[5], 12288, 4096)]))
    index.check()


def test_an_index_grows_while_somebody_keeps_the_refusal() -> None:
    """Whose frames must hold no view of a column."""
    index = Index()
    keys = [Key(number.to_bytes(36, "big")) for number in range(200)]
    index.insert_many(0, columns([(keys[0], 0, 4096)]))
    for offset in (0, 4096):  # an overlap, and a key that is here
        with pytest.raises(IndexStateError) as refusal:
            index.insert_many(0, columns([(keys[0], offset, 4096)]))
        first = len(index)
        for number in range(first, first + 99):
            index.insert_ready(keys[number], Location(0, number * 4096, 4096))
        assert refusal.tb is not None
    index.check()
