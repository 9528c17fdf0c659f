"""Proves, with host memory in the part of a device's: every KV shape travels every way and comes back bit for bit while
the model writes; no way touches a block before its fence, or tells an end before it; and why a way was taken is said.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator

import pytest

from nixl_offload.chunk.header import HEADER_BYTES
from nixl_offload.movers.base import MemoryKind, MemoryRegion, Op
from nixl_offload.types import Outcome
from tests.unit.device_lab import DeviceCopyMover, Lab, Way, assert_round_trip, beside, faulty, labs
from tests.unit.engine_rig import NUM_BLOCKS, SHAPES, until

OK, FAILED, CORRUPT, DROPPED = Outcome.OK, Outcome.FAILED, Outcome.CORRUPT, Outcome.DROPPED
SOURCE, TARGET = [0, 1, 2, 3], [4, 5, 6, 7]
WAYS: tuple[Way, ...] = ("direct", "device", "host")


lab = pytest.fixture(labs)


# -- round trips ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_comes_back_by_every_way(lab: Lab, caplog: pytest.LogCaptureFixture, shape: str, way: Way) -> None:
    """Whole chunks and unaligned heads of every group. A shape that is not aligned is packed, however small a piece may
    be.
    """
    with caplog.at_level(logging.INFO, logger="nixl_offload.engine"):
        rig = lab.make(None, shape, way)
    words = {"direct": "direct", "device": "packed on the device", "host": "packed through host memory"}
    expected = way if way != "direct" or SHAPES[shape].is_aligned else "device"
    assert caplog.text.count(f"KV group 0: {words[expected]}") == 1
    assert_round_trip(rig, lambda: time.sleep(0.005))


def test_what_one_way_stored_another_loads(lab: Lab) -> None:
    """The file does not depend on the way it was written."""
    images = set()
    for slot, way in enumerate(WAYS):
        rig = lab.make(None, "per_layer_pages", way)
        rig.write(range(12))  # the same noise in every rig
        assert rig.store(1, [rig.chunk(0, [3, 1, 2, 0], slot=slot)]) == (OK,)
        place = rig.location(slot)
        images.add(rig.slab.path.read_bytes()[place.offset + HEADER_BYTES : place.offset + place.slot_bytes])
        wanted = rig.blocks([3, 1, 2, 0])
        rig.close()
    assert len(images) == 1
    for way in WAYS:
        rig = lab.make(None, "per_layer_pages", way)
        for slot in range(3):
            blocks = list(range(20 + 4 * slot, 24 + 4 * slot))
            assert rig.load(slot, [rig.chunk(0, blocks, slot=slot)]) == (OK,)
            rig.expect(blocks, wanted)
        rig.assert_as_expected()
        rig.close()


# -- gates ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_a_store_reads_nothing_that_the_model_has_not_written(lab: Lab, way: Way) -> None:
    """The compute stream is held: nothing goes out, and ``wait`` does not say that the blocks are free. Then the model
    writes, and that is what is stored.
    """
    mover = faulty()
    rig = lab.make(mover, "per_layer_pages", way)
    rig.write(range(8), value=1)
    rig.settle_model()
    waiter = threading.Thread(target=rig.engine.wait, args=([1],))
    with lab.device.compute.held():
        rig.write(SOURCE)
        wanted = rig.blocks(SOURCE)
        rig.engine.submit_store(1, [rig.chunk(0, SOURCE)])
        waiter.start()
        waiter.join(0.1)
        assert waiter.is_alive()
        assert mover.submitted == []
        assert rig.engine.finished() == []
    waiter.join(10)
    assert not waiter.is_alive()
    rig.write(SOURCE, value=2)
    assert rig.collect(1).outcomes == (OK,)
    rig.engine.submit_load(2, [rig.chunk(0, TARGET)])
    rig.assert_loaded(2, TARGET, wanted)


@pytest.mark.parametrize("way", WAYS)
def test_blocks_needed_before_the_model_has_written_them_are_not_stored(lab: Lab, way: Way) -> None:
    """``wait`` gives up in its time, however long the step; nothing is written then, and the next store works."""
    mover = faulty()
    rig = lab.make(mover, "per_layer_pages", way, staging_slots=2)
    with lab.device.compute.held():
        rig.write(SOURCE)
        rig.engine.submit_store(1, [rig.chunk(n, SOURCE) for n in range(6)])
        rig.engine.wait([1], limit_s=0.05)  # else the stream's own limit would end it, and the store succeed
        assert rig.collect(1).outcomes == (DROPPED,) * 6
    until(lambda: not rig.engine._batches)
    assert mover.submitted == []
    assert rig.store(2, [rig.chunk(1, SOURCE)]) == (OK,)


@pytest.mark.parametrize("way", WAYS)
def test_a_load_does_not_overtake_the_model(lab: Lab, way: Way) -> None:
    """The model zeroes the target blocks, late: until it has, the load neither touches them nor is told as finished."""
    mover = faulty()
    rig = lab.make(mover, "per_layer_pages", way)
    wanted = rig.stored()
    reads = 0 if way == "direct" else 1
    with lab.device.compute.held():
        rig.write(TARGET, value=0)
        rig.engine.submit_load(2, [rig.chunk(0, TARGET)])
        until(lambda: mover.submitted.count(Op.READ) == reads)
        time.sleep(0.1)
        assert mover.submitted.count(Op.READ) == reads
        assert rig.engine.finished() == []
    rig.assert_loaded(2, TARGET, wanted)


def test_the_mover_gets_an_image_only_when_it_is_complete(lab: Lab) -> None:
    """The header page is still on its way to the device: nothing is written yet, but the blocks are free."""
    mover = faulty()
    rig = lab.make(mover)
    rig.write(SOURCE)
    wanted = rig.blocks(SOURCE)
    with beside(rig).held():
        rig.engine.submit_store(1, [rig.chunk(0, SOURCE)])
        rig.engine.wait([1])
        rig.write(SOURCE, value=9)
        time.sleep(0.05)
        assert mover.submitted == []
    assert rig.collect(1).outcomes == (OK,)
    rig.engine.submit_load(2, [rig.chunk(0, TARGET)])
    rig.assert_loaded(2, TARGET, wanted)


@pytest.mark.parametrize("verify", ["checksum", "header"])
def test_nothing_is_scattered_before_the_header_has_come(lab: Lab, verify: str) -> None:
    """Until the copy from the device has arrived, the page on the host holds another chunk's header."""
    rig = lab.make(verify=verify)
    wanted = rig.stored()
    with beside(rig).held():
        rig.engine.submit_load(2, [rig.chunk(0, TARGET)])
        time.sleep(0.05)
        assert rig.engine.finished() == []
        rig.assert_as_expected()
    rig.assert_loaded(2, TARGET, wanted)


@pytest.mark.parametrize("way", WAYS)
def test_a_load_ends_while_the_step_runs_that_it_came_with(lab: Lab, way: Way) -> None:
    """The load's fence is from before the step's forward pass."""
    rig = lab.make(None, "per_layer_pages", way)
    wanted = rig.stored()
    fence = rig.engine.compute_fence()
    with lab.device.compute.held():
        rig.write([8, 9])  # what the step writes
        rig.engine.submit_load(2, [rig.chunk(0, TARGET)], fence=fence)
        assert rig.collect(2).outcomes == (OK,)
    rig.assert_loaded(2, TARGET, wanted)


@pytest.mark.parametrize("way", WAYS)
def test_a_load_waits_for_the_step_before_the_one_that_it_came_with(lab: Lab, way: Way) -> None:
    """That step still writes to the blocks, for their old request. If overtaken, it would overwrite the load."""
    rig = lab.make(None, "per_layer_pages", way)
    wanted = rig.stored()
    with lab.device.compute.held():
        rig.write(TARGET)
        fence = rig.engine.compute_fence()
        rig.write([8, 9])
        rig.engine.submit_load(2, [rig.chunk(0, TARGET)], fence=fence)
        time.sleep(0.1)
        assert rig.engine.finished() == []
    rig.assert_loaded(2, TARGET, wanted)


# -- reasons --------------------------------------------------------------------------------------------------------


def reasons(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message.split("KV group ")[1] for record in caplog.records if "KV group" in record.message]


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.INFO, logger="nixl_offload.engine"):
        yield caplog


def test_memory_that_cannot_be_registered_is_done_without(lab: Lab, said: pytest.LogCaptureFixture) -> None:
    """KV blocks refused: chunks are packed on the device. Staging refused too: host memory. Each reason is logged."""
    kv_bytes = NUM_BLOCKS * 8192

    def kv_blocks(region: MemoryRegion) -> bool:
        return region.kind is MemoryKind.VRAM and region.length_bytes == kv_bytes

    def vram(region: MemoryRegion) -> bool:
        return region.kind is MemoryKind.VRAM

    rig = lab.make(DeviceCopyMover(refuse=kv_blocks), "per_layer_pages", "direct")
    assert reasons(said) == [
        f"0: packed on the device, because its memory cannot be registered: device_copy: {kv_bytes} bytes do not fit "
        "into BAR1"
    ]
    assert_round_trip(rig, lambda: time.sleep(0.005))
    rig.close()
    said.clear()
    mover = DeviceCopyMover(refuse=vram)
    rig = lab.make(mover, "per_layer_pages", "direct")
    assert reasons(said)[0].startswith("0: packed through host memory, because its memory cannot be registered")
    assert "and staging on the device cannot be registered: device_copy:" in reasons(said)[0]
    assert {region.kind for region in mover.regions} == {MemoryKind.DRAM}
    assert_round_trip(rig, lambda: time.sleep(0.005))
