"""Proves on a GPU: KV memory in vLLM's shapes comes back bit for bit by every path and mover, while kernels write to
it. No path overtakes the compute stream or reports too early; a damaged file is refused. Needs neither vLLM nor a
registry.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nixl_offload.chunk.header import HEADER_BYTES
from nixl_offload.engine import link_memory
from nixl_offload.engine.streams import device_of
from nixl_offload.errors import MoverError
from nixl_offload.movers.base import MemoryKind, Mover, Op
from nixl_offload.movers.select import open_mover
from nixl_offload.types import Outcome
from tests.contract.suites.faulty_mover import FaultyMover
from tests.unit.device_lab import DeviceRig, Way, assert_round_trip
from tests.unit.engine_rig import SHAPES, Shape

pytestmark = pytest.mark.gpu

OK, FAILED, CORRUPT = Outcome.OK, Outcome.FAILED, Outcome.CORRUPT
ROUTES = [("gds_mt", "direct"), ("gds_mt", "device"), ("kvikio", "direct"), ("kvikio", "device"), ("posix", "host")]
"""All pairs of mover and path."""
BUSY_CYCLES = 20_000_000
"""About ten milliseconds."""
LONG_CYCLES = 1_500_000_000
"""Most of a second."""
SOURCE, TARGET = [0, 1, 2, 3], [4, 5, 6, 7]
ALL_SHAPES = {**SHAPES, "large": Shape.layers(8, 512 << 10)}
"""The large one has chunks of 16 MiB in pieces of 512 KiB."""

Make = Callable[..., DeviceRig]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    rigs: list[DeviceRig] = []

    def build(mover: str, way: Way, shape: str | Shape = "per_layer_pages", **options: Any) -> DeviceRig:
        device = device_of(torch.empty(0, device="cuda"))
        opened = FaultyMover(opened_mover(mover, tmp_path))  # without faults: it counts
        try:
            rig = DeviceRig(device, lambda work: work(), tmp_path, opened, shape, way, **options)
        except BaseException:
            opened.close()
            raise
        rigs.append(rig)
        rig.warm_up()
        return rig

    torch.cuda.synchronize()
    yield build
    for rig in rigs:
        rig.close()
    torch.cuda.synchronize()


def opened_mover(name: str, directory: Path) -> Mover:
    """Return a mover whose probe of device memory succeeded, or skip with the reason."""
    if name == "kvikio":
        pytest.importorskip("kvikio")
    try:
        return open_mover(name, MemoryKind.VRAM, str(directory)).mover  # type: ignore[arg-type]
    except MoverError as error:
        pytest.skip(str(error))


def submitted(rig: DeviceRig, op: Op) -> int:
    assert isinstance(rig.mover, FaultyMover)
    return rig.mover.submitted.count(op)


def way_of(rig: DeviceRig) -> Way:
    way: Way = rig.engine.paths.plans[0].path
    return way


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        byte = os.pread(file.fileno(), 1, at)[0]
        os.pwrite(file.fileno(), bytes([byte ^ 0x10]), at)
        os.fsync(file.fileno())


@pytest.mark.parametrize(("mover", "way"), ROUTES)
@pytest.mark.parametrize("shape", ALL_SHAPES)
def test_every_shape_comes_back(make: Make, shape: str, mover: str, way: Way) -> None:
    """Whole chunks and unaligned beginnings of every group, while kernels write."""
    rig = make(mover, way, ALL_SHAPES[shape])
    expected = "device" if way == "direct" and not ALL_SHAPES[shape].is_aligned else way
    assert way_of(rig) == expected
    assert_round_trip(rig, lambda: torch.cuda._sleep(BUSY_CYCLES))


@pytest.mark.parametrize(("mover", "way"), ROUTES)
def test_a_store_waits_for_the_compute_stream_and_a_caller_for_nothing(make: Make, mover: str, way: Way) -> None:
    """The busy compute stream writes the blocks late. The late bytes are stored, and no write begins before."""
    rig = make(mover, way)
    rig.write(range(8), value=1)
    written = submitted(rig, Op.WRITE)
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG_CYCLES)
    rig.write(SOURCE)
    wanted = rig.blocks(SOURCE)
    began_s = time.monotonic()
    rig.engine.submit_store(1, [rig.chunk(0, SOURCE)])
    assert time.monotonic() - began_s < 0.1
    time.sleep(0.1)
    assert not rig.device.compute_fence().done(), "the test's own step was too short"
    assert submitted(rig, Op.WRITE) == written
    rig.engine.wait([1])
    rig.write(SOURCE, value=2)
    assert rig.collect(1).outcomes == (OK,)
    assert rig.load(2, [rig.chunk(0, TARGET)]) == (OK,)
    rig.expect(TARGET, wanted)
    rig.assert_as_expected()


@pytest.mark.parametrize(("mover", "way"), ROUTES)
def test_a_load_does_not_overtake_the_compute_stream(make: Make, mover: str, way: Way) -> None:
    """The target blocks are zeroed late. The load does not finish before, and is not overwritten."""
    rig = make(mover, way)
    wanted = rig.stored()
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG_CYCLES)
    rig.write(TARGET, value=0)
    rig.engine.submit_load(2, [rig.chunk(0, TARGET)])
    time.sleep(0.1)
    assert rig.engine.finished() == []
    assert not rig.device.compute_fence().done(), "the test's own step was too short"
    rig.assert_loaded(2, TARGET, wanted)


@pytest.mark.parametrize(("mover", "way"), ROUTES)
def test_a_load_ends_while_the_step_runs_that_it_came_with(make: Make, mover: str, way: Way) -> None:
    """Its fence lies before that step, and after all earlier steps, which write to its blocks."""
    assert load_ended_first(make(mover, way)), "the load waited for the step that it came with"


@pytest.mark.parametrize(("mover", "way"), ROUTES)
def test_a_load_that_came_with_a_step_on_the_default_stream_brings_its_bytes(make: Make, mover: str, way: Way) -> None:
    """A mover whose copies wait for that stream, such as KvikIO, is late but right."""
    with torch.cuda.stream(torch.cuda.default_stream()):
        if not load_ended_first(make(mover, way)):
            pytest.xfail(f"{mover}, {way}: loads wait for a model on the default stream")


def load_ended_first(rig: DeviceRig) -> bool:
    """Load during a long step, check the bytes, and return whether the load ended before the step."""
    wanted = rig.stored()
    rig.write(range(8, 12))  # uploads before the device is busy
    torch.cuda.synchronize()
    torch.cuda._sleep(BUSY_CYCLES)
    rig.write(TARGET, value=0)
    fence = rig.engine.compute_fence()
    torch.cuda._sleep(LONG_CYCLES)
    rig.engine.submit_load(2, [rig.chunk(0, TARGET)], fence=fence)
    assert rig.collect(2).outcomes == (OK,)
    is_first = not rig.device.compute_fence().done()
    rig.expect(TARGET, wanted)
    rig.assert_as_expected()
    return is_first


@pytest.mark.parametrize(("mover", "way"), ROUTES)
def test_what_rots_in_the_file_is_refused(make: Make, mover: str, way: Way) -> None:
    """Damaged header or payload, another chunk's location, a short file. Blocks of a packed group stay unchanged."""
    rig = make(mover, way, "per_layer_pages")
    rig.write(SOURCE)
    assert rig.store(0, [rig.chunk(0, SOURCE), rig.chunk(1, SOURCE)]) == (OK, OK)

    def assert_refused(job: int, *outcomes: Outcome) -> None:
        assert rig.load(job, [rig.chunk(0, TARGET)])[0] in outcomes
        if way == "direct":
            rig.write(TARGET)
        rig.assert_as_expected()

    used = HEADER_BYTES + 4 * rig.layout.groups[0].block_bytes
    places = {0, HEADER_BYTES - 1, HEADER_BYTES, used - 1}
    places |= {int(place) for place in np.random.default_rng(3).integers(0, used, 6)}
    for job, place in enumerate(sorted(places), start=1):
        flip(rig.slab.path, place)
        assert_refused(job, CORRUPT)
        flip(rig.slab.path, place)
    assert rig.load(98, [rig.chunk(0, [8, 9, 10, 11])]) == (OK,)
    rig.expect([8, 9, 10, 11], rig.blocks(SOURCE))
    assert rig.load(99, [rig.chunk(5, TARGET, slot=0)]) == (CORRUPT,)
    if way == "direct":
        rig.write(TARGET)
    with rig.slab.path.open("r+b") as file:
        file.truncate(used // 2)
    assert_refused(100, CORRUPT, FAILED)


def test_a_device_without_room_stages_in_host_memory(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test asks for as much memory as the whole device has. That fails, so page-locked memory is used."""
    total_bytes = torch.cuda.mem_get_info()[1]
    real = link_memory.device_pool
    monkeypatch.setattr(
        link_memory, "device_pool", lambda *, budget_bytes, **options: real(budget_bytes=total_bytes, **options)
    )
    rig = make("gds_mt", "device")
    assert way_of(rig) == "host"
    assert_round_trip(rig, lambda: torch.cuda._sleep(BUSY_CYCLES))
