"""Proves, over real files: ``wait`` frees source blocks and nothing sooner; loads overtake stores; each job ends
exactly once; ``close`` leaves nothing running.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import pytest

from nixl_offload.chunk.header import HEADER_BYTES
from nixl_offload.engine import LinkPaths, TierSetup
from nixl_offload.errors import LayoutError
from nixl_offload.movers.base import Op
from nixl_offload.movers.threaded import CopyMover
from nixl_offload.tiers.slab.file import SlabLink
from nixl_offload.types import Outcome
from tests.contract.suites.faulty_mover import Fault, FaultKind, FaultyMover
from tests.unit.engine_rig import Rig, own_shards, rank_memory, rigs, until
from tests.unit.stored_rig import flip

OK, FAILED, CORRUPT, DROPPED = Outcome.OK, Outcome.FAILED, Outcome.CORRUPT, Outcome.DROPPED
Make = Callable[..., Rig]
make = pytest.fixture(rigs)


def test_verify_header_checks_identity_but_not_payload(make: Make) -> None:
    rig = make("per_layer", verify="header")
    assert rig.store(0, [rig.chunk(0, [1, 2, 3, 4])]) == (OK,)
    flip(rig.slab.path, HEADER_BYTES + 5)
    assert rig.load(1, [rig.chunk(0, [5, 6, 7, 8])]) == (OK,)
    assert rig.load(2, [rig.chunk(1, [5, 6, 7, 8], slot=0)]) == (CORRUPT,)


# -- wait, order, pressure ------------------------------------------------------------------------------------------


def test_loads_overtake_stores_and_find_room(make: Make) -> None:
    """With every store in flight hanging, a load still gets staging and ends."""
    mover = FaultyMover(CopyMover(), [Fault(1, FaultKind.STUCK, op=Op.WRITE, every=True)])
    rig = make("per_layer", mover, staging_slots=2)
    wanted = rig.bytes_of([1, 2, 3, 4])
    assert rig.store(0, [rig.chunk(0, [1, 2, 3, 4])]) == (OK,)
    rig.engine.submit_store(1, [rig.chunk(n, [1, 2, 3, 4]) for n in range(1, 8)])
    until(lambda: mover.submitted.count(Op.WRITE) == 2)
    assert rig.load(2, [rig.chunk(0, [5, 6, 7, 8])]) == (OK,)
    assert rig.bytes_of([5, 6, 7, 8]) == wanted
    mover.release()
    assert rig.collect(1).outcomes == (OK,) * 7


# -- jobs -----------------------------------------------------------------------------------------------------------


def test_caller_and_pump_share_jobs_without_losing_any(make: Make) -> None:
    """A thousand jobs, submitted while others end, are waited for or are taken: each ends exactly once."""
    rig = make("mla", staging_slots=6)
    assert rig.store(0, [rig.chunk(n, [1, 2, 3, 4]) for n in range(6)]) == (OK,) * 6
    for job in range(1, 1001):
        chunks = [rig.chunk((job + n) % 6, [5 * n, 5 * n + 1, 5 * n + 2, 5 * n + 3]) for n in range(3)]
        (rig.engine.submit_load if job % 3 else rig.engine.submit_store)(job, chunks)
        if job % 7 == 0:
            rig.engine.wait([job, job - 3])
        rig.poll()
    rig.until(lambda: len(rig.results) == 1001)
    assert rig.engine.idle()


# -- start and end --------------------------------------------------------------------------------------------------


def test_direct_is_chosen_where_it_can_and_said(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="nixl_offload.engine"):
        make("direct_blocks")
        make("packed_blocks", direct_min_extent_bytes=1 << 20)
        make("per_layer", direct_min_extent_bytes=1)
    lines = [record.message for record in caplog.records if "KV group" in record.message]
    assert lines[0].endswith("KV group 0: direct")
    assert "smaller than 1048576" in lines[1]
    assert "not aligned to 4096" in lines[2]


def test_tensors_that_are_not_those_of_the_layout_are_refused(make: Make) -> None:
    rig = make("per_layer")
    setup = TierSetup(rig.engine, rank_memory(rig.tensors[::-1], rig.layout), own_shards(rig.layout))
    with pytest.raises(LayoutError):
        LinkPaths(setup, SlabLink(rig.slab, CopyMover(), time.monotonic), staging_bytes=1 << 20)


def test_close_finishes_what_is_queued_and_leaves_no_thread(make: Make) -> None:
    rig = make("per_layer")
    before = {thread.name for thread in threading.enumerate()}
    assert "nixl-offload-pump" in before
    rig.engine.submit_store(1, [rig.chunk(n, [1, 2, 3, 4]) for n in range(20)])
    rig.engine.close()
    assert rig.collect(1).outcomes == (OK,) * 20
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("nixl-offload")]
    rig.engine.close()
    rig.engine.submit_load(2, [rig.chunk(0, [1, 2, 3, 4])])
    rig.engine.submit_store(3, [rig.chunk(0, [1, 2, 3, 4])])
    rig.engine.wait([2, 3])
    assert {result.outcomes for result in rig.engine.finished()} == {(FAILED,)}
