"""A rank that has no layer of a KV group, or of any, as a pipeline stage may: its part of whatever is to be done with
such a chunk is done at once, and nothing is read or written for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from nixl_offload.engine.chain import ChainEngine, MoveIO
from nixl_offload.engine.records import ChunkIO
from nixl_offload.types import Key, Location, Outcome
from tests.unit.chain_rig import BUCKET, FILE, MEMORY, ChainRig
from tests.unit.device_rig import ThreadedStreams, emulated
from tests.unit.engine_rig import Rig, Shape, whole

OK, FAILED = Outcome.OK, Outcome.FAILED
STAGE: Final = Shape(((4096, 4096),) * 2, (whole((0, 4096), (1, 4096)), whole()))
"""Two layers of group 0, and none of group 1."""


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[ChainRig]:
    made = ChainRig.make(tmp_path, shape=STAGE)
    yield made
    made.close()


def mixed(rig: ChainRig, tier: int, first: int = 0, *, landing: bool = False) -> list[ChunkIO]:
    """Four chunks, from number ``first`` on, of both groups in turn; with ``landing`` memory keeps them."""
    return [
        rig.chunk(first + at, tier, range(4 * at + 4, 4 * at + 8), group=at % 2, host=first + at if landing else None)
        for at in range(4)
    ]


def test_stores_and_loads_of_both_groups_move_the_bytes_of_one(rig: ChainRig) -> None:
    """Outcomes keep the order of the job, and slots of the other group stay as they were."""
    for tier in (MEMORY, FILE, BUCKET):
        chunks = mixed(rig, tier)
        wanted = rig.blocks(range(4, 20))
        assert rig.store(10 * tier + 1, chunks) == (OK,) * 4
        if tier == MEMORY:
            assert not rig.host.slot(rig.slot_bytes, rig.slot_bytes).memory.any()
        else:
            assert not np.frombuffer(rig.path(tier).read_bytes(), np.uint8)[rig.slot_bytes : 2 * rig.slot_bytes].any()
        for rows in rig.kv:
            rows[4:20] = 0
        assert rig.load(10 * tier + 2, chunks) == (OK,) * 4
        read = rig.blocks(range(4, 20))
        own = [row for at in (0, 2) for row in range(4 * at, 4 * at + 4)]
        assert (read[own] == wanted[own]).all()
        assert not read[[row for row in range(16) if row not in own]].any(), "no block of the other group is touched"
        result = rig.results[10 * tier + 2]
        assert result.bytes_moved == 8 * rig.layout.groups[0].block_bytes
        assert [share.tier for share in result.shares] == [tier]
        for tensor, rows in enumerate(rig.kv):
            rows[4:20] = wanted[:, 4096 * tensor : 4096 * (tensor + 1)]


def test_landings_and_moves_of_both_groups_end_well_and_touch_one(rig: ChainRig) -> None:
    """What a load leaves in memory, and what goes from tier to tier, each way."""
    assert rig.store(1, mixed(rig, FILE, 8)) == (OK,) * 4
    assert rig.load(2, mixed(rig, FILE, 8, landing=True), ticket=5) == (OK,) * 4
    assert rig.settle(5).outcomes == (OK,) * 4
    assert rig.host_bytes(8).any()
    assert not rig.host.slot(9 * rig.slot_bytes, rig.slot_bytes).memory.any()
    for ticket, source, target in ((6, MEMORY, BUCKET), (7, BUCKET, MEMORY), (8, FILE, BUCKET)):
        moves = [rig.move(number, source, target, group) for group, number in ((0, 8), (1, 9), (0, 10), (1, 11))]
        assert rig.moves(ticket, moves) == (OK,) * 4
    assert (rig.stored(BUCKET, 8) == rig.host_bytes(8)).all()


def test_a_job_of_the_other_group_alone_ends_at_once_even_where_no_tier_is_left(tmp_path: Path) -> None:
    rig = ChainRig.make(tmp_path, shape=STAGE, present=(False, False))
    chunks = [rig.chunk(0, FILE, range(4), group=1), rig.chunk(1, FILE, range(4, 8), group=0)]
    rig.chain.submit_store(1, chunks[:1])
    rig.chain.submit_load(2, chunks[:1])
    rig.chain.submit_moves(3, [rig.move(0, FILE, BUCKET, group=1)])
    assert [result.outcomes for result in rig.chain.finished()] == [(OK,), (OK,)]
    assert [result.outcomes for result in rig.chain.settled()] == [(OK,)]
    assert rig.store(4, chunks) == (OK, FAILED), "the tier is missed where this rank has something to store"
    rig.close()


def test_a_rank_without_any_layer_needs_no_engine() -> None:
    chain = ChainEngine((), empty_groups=(0, 1))
    ids = np.arange(4, dtype=np.int32)
    key, place = Key(bytes(32) + bytes(4)), Location(1, 0, 8192)
    chunks = [ChunkIO(key, place, group, ids, 0, host_offset=8192 * group) for group in range(2)]
    chain.submit_store(1, chunks)
    chain.submit_load(2, chunks, promotion_ticket=5)
    chain.submit_moves(6, [MoveIO(key, 1, place, Location(0, 0, 8192))])
    assert [(result.job_id, result.outcomes) for result in chain.finished()] == [(1, (OK, OK)), (2, (OK, OK))]
    assert sorted((result.job_id, result.outcomes) for result in chain.settled()) == [(5, (OK, OK)), (6, (OK,))]
    assert (chain.statuses(), chain.take_work(), chain.idle()) == ((), None, True)
    chain.wait([1, 2])
    chain.close()


@pytest.mark.parametrize("staging", ["host", "device"])
def test_an_engine_on_a_device_leaves_the_group_out(tmp_path: Path, staging: str) -> None:
    """It has no kernels, takes no staging, and a chunk of it that comes all the same fails, before any header."""
    with ThreadedStreams() as streams:
        rig = Rig.make(tmp_path, shape=STAGE, device=emulated(streams), staging=staging)
        wanted = rig.bytes_of(range(4))
        assert rig.store(1, [rig.chunk(0, range(4))]) == (OK,)
        rig.wipe()
        assert rig.load(2, [rig.chunk(0, range(4)), rig.chunk(1, range(4, 8), group=1)]) == (OK, FAILED)
        assert rig.bytes_of(range(4)) == wanted
        assert rig.collect(2).errors == ("this rank has no layer of group 1",)
        rig.close()
