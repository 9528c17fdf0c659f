"""Proves of the chain: every chunk is served by the tier of its location, a job has one result with each tier's share
in it, moves of all three kinds bring the image unchanged, and every ticket is settled once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nixl_offload.movers.base import Mover
from nixl_offload.types import Outcome
from tests.unit.chain_rig import BUCKET, FILE, MEMORY, ChainRig

OK, FAILED, CORRUPT, DROPPED = Outcome.OK, Outcome.FAILED, Outcome.CORRUPT, Outcome.DROPPED
Make = Callable[..., ChainRig]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    rigs: list[ChainRig] = []

    def build(*movers: Mover, **options: Any) -> ChainRig:
        rigs.append(ChainRig.make(tmp_path, *movers, **options))
        return rigs[-1]

    yield build
    for rig in rigs:
        rig.close()


def blocks_of(number: int) -> range:
    return range(4 * number, 4 * number + 4)


def test_a_job_is_dealt_out_by_location_and_put_together_again(make: Make) -> None:
    """All three tiers take part, interleaved; shares add up to the whole."""
    rig = make()
    tiers = [FILE, MEMORY, BUCKET, FILE, MEMORY]
    chunks = [rig.chunk(number, tier, blocks_of(number)) for number, tier in enumerate(tiers)]
    wanted = rig.blocks(range(20))
    assert rig.store(1, chunks) == (OK,) * 5
    chunk_bytes = 4 * rig.layout.groups[0].block_bytes
    for job_id in (1, 2):
        if job_id == 2:
            for rows in rig.kv:
                rows[:] = 0
            assert rig.load(2, chunks) == (OK,) * 5
        result = rig.results[job_id]
        assert result.bytes_moved == 5 * chunk_bytes
        assert [(share.tier, share.bytes_moved) for share in result.shares] == [
            (MEMORY, 2 * chunk_bytes),
            (FILE, 2 * chunk_bytes),
            (BUCKET, chunk_bytes),
        ]
        assert 0 < max(share.seconds for share in result.shares) <= result.seconds
    assert np.array_equal(rig.blocks(range(20)), wanted)
    assert rig.chain.idle()


@pytest.mark.parametrize("shape", ["per_layer", "two_groups", "direct_blocks"])
def test_moves_of_all_kinds_bring_the_image_unchanged(make: Make, shape: str) -> None:
    """Out of memory, on from file to bucket and back by relay slots, and into memory again: one ticket each."""
    rig = make(shape=shape)
    for group in range(len(rig.layout.groups)):
        numbers = range(10 * group, 10 * group + 6)
        for number in numbers:
            rig.fill_host(number, group)
        ticket = itertools.count(100 * group + 1)
        for source, target in [(MEMORY, FILE), (FILE, BUCKET), (BUCKET, MEMORY), (MEMORY, BUCKET), (BUCKET, FILE)]:
            this = next(ticket)
            if target == MEMORY:
                for number in numbers:
                    rig.host_bytes(number, group)[:] = 0xEE
            else:
                for number in numbers:
                    rig.put(target, number, np.full(rig.slot_bytes, 0xEE, dtype=np.uint8))
            assert rig.moves(this, [rig.move(number, source, target, group) for number in numbers]) == (OK,) * 6

            for number in numbers:
                there = rig.host_bytes(number, group) if target == MEMORY else rig.stored(target, number, group)
                assert np.array_equal(there, rig.image(number, group))
        for slot in range(16):
            rig.host_bytes(slot)[:] = 0
    assert rig.chain.idle()


def test_promotions_of_a_load_are_told_under_its_ticket(make: Make) -> None:
    """In the order of the chunks that had a slot, from two tiers; the load itself is told of apart."""
    rig = make()
    for tier, number in [(FILE, 0), (BUCKET, 1), (FILE, 2), (BUCKET, 3)]:
        rig.put(tier, number)
    chunks = [
        rig.chunk(1, BUCKET, blocks_of(1), host=1),
        rig.chunk(0, FILE, blocks_of(0), host=0),
        rig.chunk(2, FILE, blocks_of(2)),
        rig.chunk(5, FILE, blocks_of(5), host=5),
        rig.chunk(3, BUCKET, [33], first=3, host=3),
    ]
    assert rig.load(1, chunks, ticket=7) == (OK, OK, OK, CORRUPT, OK)
    settled = rig.settle(7)
    assert settled.outcomes == (OK, OK, CORRUPT, OK)
    for number in (0, 1, 3):
        assert np.array_equal(rig.host_bytes(number), rig.image(number))
    # What has been promoted serves the next load, and goes on to the next tier, as if it had been stored there.
    assert rig.load(2, [rig.chunk(number, MEMORY, blocks_of(number)) for number in (0, 1, 3)]) == (OK,) * 3
    assert np.array_equal(rig.blocks(blocks_of(3)), rig.payload(3))
    assert rig.moves(8, [rig.move(3, MEMORY, FILE)]) == (OK,)
    assert np.array_equal(rig.stored(FILE, 3), rig.image(3))


@pytest.mark.parametrize("shape", ["per_layer", "two_groups", "padded", "direct_per_layer"])
def test_what_is_stored_once_is_served_by_every_tier(make: Make, shape: str) -> None:
    """KV to memory, from there to file and bucket; the same KV from each, and into memory again by a promotion."""
    rig = make(shape=shape)
    groups = range(len(rig.layout.groups))
    wanted = [rig.blocks(blocks_of(1 + group), group) for group in groups]
    for tier in (MEMORY, FILE, BUCKET):
        chunks = [rig.chunk(1 + group, tier, blocks_of(1 + group), group=group) for group in groups]
        if tier == MEMORY:
            assert set(rig.store(1, chunks)) == {OK}
            moves = [rig.move(1 + group, MEMORY, FILE, group) for group in groups]
            assert set(rig.moves(2, moves)) == {OK}
            assert set(rig.moves(3, [rig.move(1 + group, FILE, BUCKET, group) for group in groups])) == {OK}
        for rows in rig.kv:
            rows[:] = 0
        assert set(rig.load(10 + tier, chunks)) == {OK}
        assert all(np.array_equal(rig.blocks(blocks_of(1 + group), group), wanted[group]) for group in groups)
    promotion = [rig.chunk(1 + group, BUCKET, blocks_of(1 + group), group=group, host=10 + group) for group in groups]
    assert set(rig.load(20, promotion, ticket=20)) == {OK}
    assert set(rig.settle(20).outcomes) == {OK}
    for group in groups:
        assert np.array_equal(rig.host_bytes(10 + group, group), rig.host_bytes(1 + group, group))


def test_close_drains_moves_and_stores(make: Make) -> None:
    """Relays too, which need a step of this side in between; everything is told afterwards."""
    rig = make(relay_slots=1)
    for number in range(6):
        rig.put(FILE, number)
        rig.fill_host(10 + number)
    rig.chain.submit_moves(1, [rig.move(number, FILE, BUCKET) for number in range(6)])
    rig.chain.submit_moves(2, [rig.move(10 + number, MEMORY, FILE) for number in range(6)])
    rig.chain.submit_store(3, [rig.chunk(20, FILE, blocks_of(0)), rig.chunk(21, BUCKET, blocks_of(1))])
    rig.chain.close(20.0)
    rig.poll()
    assert rig.settled[1].outcomes == (OK,) * 6
    assert rig.settled[2].outcomes == (OK,) * 6
    assert rig.results[3].outcomes == (OK, OK)
    assert rig.chain.idle()
    # And what comes later fails at once.
    assert rig.load(4, [rig.chunk(0, FILE, blocks_of(0), host=0)], ticket=4) == (FAILED,)
    assert rig.settle(4).outcomes == (FAILED,)
    assert rig.moves(5, [rig.move(0, FILE, BUCKET), rig.move(10, MEMORY, FILE)]) == (FAILED, FAILED)
