"""A rank without a layer of some or all KV groups, as a pipeline stage may be. Its part of each job with such chunks is
done at once, and nothing is read or written for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Final

import numpy as np
import pytest

from nixl_offload.catalog.catalog import LoadTicket, MoveTicket, StoreTicket
from nixl_offload.chunk.shards import uncut_plan
from nixl_offload.engine import Completion
from nixl_offload.types import Key, Location, Outcome
from nixl_offload.vllm.chunks import RankChunks
from tests.unit.chain_rig import BUCKET, FILE, MEMORY, ChainRig
from tests.unit.device_rig import ThreadedDevice
from tests.unit.engine_rig import Rig, Shape, whole

OK, FAILED = Outcome.OK, Outcome.FAILED
STAGE: Final = Shape(((4096, 4096),) * 2, (whole((0, 4096), (1, 4096)), whole()))
"""Two layers of group 0, and none of group 1."""


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[ChainRig]:
    made = ChainRig(tmp_path, shape=STAGE)
    yield made
    made.close()


class Stage:
    """A rank with jobs of four chunks, from both groups in turn."""

    def __init__(self, rig: ChainRig) -> None:
        self.rig, self.numbers = rig, count(1)
        self.chunks = RankChunks(rig.layout, [0, 1], uncut_plan(1, 2), 0, memory=MEMORY)

    def keys(self, first: int) -> tuple[Key, ...]:
        return tuple(self.rig.key(first + at, at % 2) for at in range(4))

    def places(self, tier: int, first: int) -> tuple[Location, ...]:
        return tuple(self.rig.at(tier, first + at) for at in range(4))

    def job(self, ticket: StoreTicket | LoadTicket) -> Completion:
        """Its blocks are 4 to 19: those of group 0, then those of group 1."""
        blocks = SimpleNamespace(block_ids=list(range(4, 20)), group_sizes=[8, 8], block_indices=[0, 0])
        chunks, chain, number = self.chunks.of_job(ticket, blocks), self.rig.chain, next(self.numbers)
        if isinstance(ticket, StoreTicket):
            chain.submit_store(number, chunks, 4)
        else:
            promoted = range(4) if ticket.promotion_ticket else ()
            chain.submit_load(number, chunks, 4, promotion_ticket=ticket.promotion_ticket, promoted=promoted)
        return self.rig.collect(number)

    def move(self, source: int, target: int, first: int) -> tuple[Outcome, ...]:
        number = next(self.numbers)
        ticket = MoveTicket(number, self.keys(first), self.places(source, first), self.places(target, first))
        self.rig.chain.submit_moves(number, self.chunks.of_moves(ticket), 4)
        return self.rig.settle(number).outcomes


def test_stores_and_loads_of_both_groups_move_the_bytes_of_one(rig: ChainRig) -> None:
    """Outcomes keep the order of the job, and slots of the other group stay as they were."""
    stage = Stage(rig)
    for tier in (MEMORY, FILE, BUCKET):
        wanted = rig.blocks(range(4, 20))
        assert stage.job(StoreTicket(1, stage.keys(0), stage.places(tier, 0))).outcomes == (OK,) * 4
        if tier == MEMORY:
            assert not rig.host.slot(rig.slot_bytes, rig.slot_bytes).memory.any()
        else:
            assert not np.frombuffer(rig.path(tier).read_bytes(), np.uint8)[rig.slot_bytes : 2 * rig.slot_bytes].any()
        for rows in rig.kv:
            rows[4:20] = 0
        result = stage.job(LoadTicket(1, stage.keys(0), stage.places(tier, 0)))
        assert result.outcomes == (OK,) * 4
        assert (rig.blocks(range(4, 12)) == wanted[:8]).all()
        assert not rig.blocks(range(12, 20)).any(), "no block of the other group is touched"
        assert result.bytes_moved == 8 * rig.layout.groups[0].block_bytes
        assert [share.tier for share in result.shares] == [tier]


def test_promotions_and_moves_of_both_groups_end_well_and_touch_one(rig: ChainRig) -> None:
    """Promotions by a load, and moves between tiers in both directions."""
    stage = Stage(rig)
    assert stage.job(StoreTicket(1, stage.keys(8), stage.places(FILE, 8))).outcomes == (OK,) * 4
    ticket = LoadTicket(1, stage.keys(8), stage.places(FILE, 8), 99, stage.places(MEMORY, 8))
    assert stage.job(ticket).outcomes == (OK,) * 4
    assert rig.settle(99).outcomes == (OK,) * 4
    assert rig.host_bytes(8).any()
    assert not rig.host.slot(9 * rig.slot_bytes, rig.slot_bytes).memory.any()
    for source, target in ((MEMORY, BUCKET), (BUCKET, MEMORY), (FILE, BUCKET)):
        assert stage.move(source, target, 8) == (OK,) * 4
    assert (rig.stored(BUCKET, 8) == rig.host_bytes(8)).all()


@pytest.mark.parametrize("staging", ["host", "device"])
def test_an_engine_on_a_device_leaves_the_group_out(tmp_path: Path, staging: str) -> None:
    """The group has no kernels and no staging. If a chunk of it comes nevertheless, it fails before any header."""
    with ThreadedDevice() as device:
        rig = Rig(tmp_path, shape=STAGE, device=device, staging=staging)
        wanted = rig.bytes_of(range(4))
        assert rig.store(1, [rig.chunk(0, range(4))]) == (OK,)
        rig.wipe()
        assert rig.load(2, [rig.chunk(0, range(4)), rig.chunk(1, range(4, 8), group=1)]) == (OK, FAILED)
        assert rig.bytes_of(range(4)) == wanted
        assert rig.collect(2).errors == ("this rank has no layer of group 1",)
        rig.close()
