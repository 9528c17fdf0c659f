"""Proves for the paths of device memory, emulated by host memory, and for any fault of medium, mover or device: each
chunk gets one outcome, no KV block of a packed group sees unverified bytes, and no slot is reused under I/O or under
work of the device.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest

from nixl_offload.engine import pump
from nixl_offload.engine.direct import LATE_S
from nixl_offload.movers.base import Op
from nixl_offload.types import Outcome
from tests.contract.suites.faulty_mover import Fault, FaultKind, FaultyMover
from tests.unit.device_lab import DeviceCopyMover, DeviceRig, Lab, Way, faulty, labs, packer_of, pools_of
from tests.unit.engine_rig import Clock, until

OK, FAILED, CORRUPT = Outcome.OK, Outcome.FAILED, Outcome.CORRUPT
SOURCE, TARGET = [0, 1, 2, 3], [4, 5, 6, 7]
WAYS: tuple[Way, ...] = ("direct", "device")


lab = pytest.fixture(labs)


@pytest.fixture
def leaked() -> Iterator[list[object]]:
    """What was kept for the life of the process; forgotten after the test, which made it on purpose."""
    kept = len(pump.LEAKED)
    yield pump.LEAKED
    del pump.LEAKED[kept:]


def assert_refused(rig: DeviceRig, job: int, number: int, way: Way, outcomes: set[Outcome]) -> None:
    """Only blocks that were asked for may change: not in a packed group, to zero on the direct path. Nothing unverified
    stays.
    """
    found = rig.load(job, [rig.chunk(number, TARGET)])
    assert set(found) <= outcomes, found
    if way == "direct":
        rig.expect(TARGET, np.zeros_like(rig.blocks(TARGET)))
    rig.assert_as_expected()
    rig.write(TARGET)


# -- the medium -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_a_chunk_in_anothers_place_is_corrupt(lab: Lab, way: Way) -> None:
    """Whole and sound, but not the one that was asked for; nor blocks that were never stored."""
    rig = lab.make(None, "packed_blocks", way)
    rig.stored(0)
    rig.stored(1)
    size = rig.location(0).slot_bytes
    image = np.memmap(rig.slab.path, dtype=np.uint8, mode="r+")
    image[:size] = image[size : 2 * size]
    image.flush()
    assert_refused(rig, 1, 0, way, {CORRUPT})
    assert rig.store(2, [rig.chunk(3, SOURCE[:2], first=2)]) == (OK,)
    assert_refused(rig, 3, 3, way, {CORRUPT})
    assert rig.load(4, [rig.chunk(1, TARGET)]) == (OK,)


def test_a_short_read_that_nobody_tells_is_found_by_the_checksums(lab: Lab) -> None:
    """The slot still holds another chunk's payload. ``verify: header`` or not: a mover that does not tell is not
    believed.
    """
    inner = DeviceCopyMover()
    inner.limits = replace(inner.limits, tells_short_reads=False)
    mover = FaultyMover(inner)
    rig = lab.make(mover, "packed_blocks", "direct", verify="header", staging_slots=2)
    rig.stored(0)
    rig.stored(1)
    for job, amount in enumerate((4096, 8192, 0)):
        assert rig.load(3 * job, [rig.chunk(1, [8, 9, 10, 11])] * 2) == (OK, OK)
        rig.write([8, 9, 10, 11])
        mover.script = [Fault(mover.submitted.count(Op.READ), FaultKind.SHORT, op=Op.READ, amount=amount)]
        assert_refused(rig, 3 * job + 1, 0, "device", {CORRUPT})


# -- the mover ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_a_failed_read_fails_its_chunk_only(lab: Lab, way: Way) -> None:
    """More often than there are slots: each comes back."""
    mover = faulty()
    rig = lab.make(mover, "packed_blocks", way, staging_slots=2)
    images = [rig.stored(number) for number in range(2)]
    for job in range(5):
        bad = mover.submitted.count(Op.READ) + job % 2
        mover.script = [Fault(bad, FaultKind.FAIL, op=Op.READ, amount=4096)]
        if way == "direct":
            # A batch of both: its header pages fail, then the header page or the blocks of one of them alone.
            bad = mover.submitted.count(Op.READ) + 2 + job % 4
            mover.script = [replace(fault, nth=nth) for fault in mover.script for nth in (bad - 2 - job % 4, bad)]
        outcomes = rig.load(job, [rig.chunk(n, [12 + 4 * n, 13 + 4 * n, 14 + 4 * n, 15 + 4 * n]) for n in range(2)])
        assert sorted(outcomes, key=str) == [FAILED, OK]
        if way == "direct":
            for n, outcome in enumerate(outcomes):
                blocks = range(12 + 4 * n, 16 + 4 * n)
                rig.expect(blocks, images[n] if outcome is OK else np.zeros_like(images[n]))
            rig.assert_as_expected()
        rig.write(range(12, 20))
        rig.assert_as_expected()


def test_while_a_direct_load_hangs_others_go_through_staging(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    """Its request waits, as its blocks may still be written; the next ones can be given up, also afterwards."""
    clock, mover = Clock(), faulty()
    rig = lab.make(mover, "packed_blocks", "direct", clock=clock)
    wanted = rig.stored()
    plan = rig.engine.paths.link_memory.plans[0]
    mover.script = [Fault(mover.submitted.count(Op.READ), FaultKind.STUCK, op=Op.READ)]
    reads = mover.submitted.count(Op.READ)
    rig.engine.submit_load(1, [rig.chunk(0, TARGET)])
    until(lambda: mover.submitted.count(Op.READ) > reads)
    assert plan.path == "direct"

    def is_late() -> bool:
        clock.ahead_s += LATE_S
        return plan.path == plan.packed

    until(is_late)
    assert rig.load(2, [rig.chunk(0, [8, 9, 10, 11])]) == (OK,)
    rig.expect([8, 9, 10, 11], wanted)
    assert 1 not in rig.results
    mover.release()
    assert rig.collect(1).outcomes == (OK,)
    rig.expect(TARGET, wanted)
    rig.assert_as_expected()
    assert plan.path == plan.packed
    assert [record.message[:23] for record in caplog.records] == ["A load into KV blocks h"]


def test_direct_chunks_wait_for_header_pages(lab: Lab) -> None:
    """None free: they wait, and fail only when none will ever be free again."""
    rig = lab.make(None, "packed_blocks", "direct")
    rig.stored()
    pages = pools_of(rig)["direct"]
    until(lambda: pages.free == pages.usable)
    taken = [page for _ in range(pages.usable) if (page := pages.acquire()) is not None]
    rig.engine.submit_load(1, [rig.chunk(0, TARGET)])
    time.sleep(0.02)
    assert rig.engine.finished() == []
    pages.release(taken.pop())
    rig.engine.submit_load(2, [rig.chunk(0, TARGET)])
    assert rig.collect(1).outcomes == rig.collect(2).outcomes == (OK,)
    until(lambda: pages.free == 1)
    last = pages.acquire()
    assert last is not None
    for page in (*taken, last):
        pages.retire(page)
    assert rig.load(3, [rig.chunk(0, TARGET)]) == (FAILED,)


# -- the device -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("work", ["gather", "scatter", "sums_of_rows"])
def test_work_that_fails_on_the_device_costs_its_slot(
    lab: Lab, work: str, monkeypatch: pytest.MonkeyPatch, leaked: list[object]
) -> None:
    """An illegal address, an error of the memory: nobody knows what still runs. The chunk is FAILED, its slot is never
    used again, and the engine goes on as far as the device does.
    """
    rig = lab.make(staging_slots=4)
    wanted = rig.stored()

    def broken(*_: object) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    kept = len(leaked)
    with monkeypatch.context() as patch:
        patch.setattr(type(packer_of(rig)._kernels[0]), work, broken)
        if work == "gather":
            assert rig.store(1, [rig.chunk(1, SOURCE)]) == (FAILED,)
        else:
            assert rig.load(1, [rig.chunk(0, TARGET)]) == (FAILED,)
        until(lambda: len(leaked) == kept + 1)
        assert pools_of(rig)["device"].usable == 3
        for stream in lab.device.made:
            with suppress(RuntimeError):
                stream.synchronize()
    rig.assert_as_expected()
    assert rig.load(2, [rig.chunk(0, TARGET)]) == (OK,)
    rig.expect(TARGET, wanted)
    rig.assert_as_expected()


def test_closing_while_the_device_hangs_keeps_its_memory(lab: Lab, leaked: list[object]) -> None:
    """The model's stream never gets to the fence: ``close`` returns in time, and nothing is freed under the device."""
    rig = lab.make()
    kept = len(leaked)
    with lab.device.compute.held():
        rig.engine.submit_store(1, [rig.chunk(0, SOURCE)])
        until(lambda: bool(rig.engine._batches))
        rig.engine.close(0.1)  # else the stream's own limit would end it, and the store be done
        assert rig.collect(1).outcomes == (FAILED,)
        assert len(leaked) == kept + 1
