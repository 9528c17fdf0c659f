"""Proves on the emulated device: no checksum of what goes through host memory is the processor's, either way; what a
store into memory has summed goes on to storage with it; and what is damaged reaches no KV block all the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nixl_offload.chunk.header import HEADER_BYTES, lacks_checksums
from nixl_offload.engine import device_packer, host as host_module, packed, packer
from nixl_offload.engine.device_packer import DevicePacker
from nixl_offload.engine.records import WorkKind
from nixl_offload.types import Outcome
from tests.unit.device_lab import DeviceRig, blank, open_lab
from tests.unit.device_rig import at_once
from tests.unit.engine_rig import SHAPES, MemoryRig, until

OK, FAILED, CORRUPT = Outcome.OK, Outcome.FAILED, Outcome.CORRUPT
FLIP = HEADER_BYTES + 4321
"""A byte of the first block."""


@contextmanager
def opened(directory: Path, shape: str = "per_layer_pages", **options: Any) -> Iterator[tuple[DeviceRig, MemoryRig]]:
    """A slab on disk, whose chunks go through host memory, and a memory tier, over one device's KV blocks."""
    with open_lab(directory) as lab:
        cache, verify = blank(SHAPES[shape], lab.device), options.get("verify", "checksum")
        memory = MemoryRig(shape, cache=cache, device=lab.device, verify=verify)
        try:
            yield lab.make(None, shape, "host", host=memory.host, cache=cache, **options), memory
        finally:
            memory.close()


def moved(rig: DeviceRig, job: int, kind: WorkKind, numbers: Sequence[int], group: int = 0) -> tuple[Outcome, ...]:
    """Move chunks between slots of the same numbers in the slab and in host memory."""
    chunks = [
        replace(rig.chunk(number, [], group=group), host_offset=rig.location(number).offset) for number in numbers
    ]
    rig.engine.submit_background(job, chunks, kind)
    return rig.collect(job).outcomes


@pytest.fixture(autouse=True)
def no_sums_of_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forbid other checksums; ``block_checksums`` stays, because it plays the device's kernels."""

    def refuse(payloads: Any) -> Any:
        if payloads:
            raise AssertionError("the processor was to sum")
        return []

    for module in (packer, packed, host_module):
        monkeypatch.setattr(module, "payload_checksums", refuse)


@pytest.mark.parametrize("verify", ["checksum", "always"])
@pytest.mark.parametrize("shape", ["per_layer_pages", "packed_blocks", "shared_tensors", "padded"])
def test_every_way_through_host_memory(tmp_path: Path, shape: str, verify: str) -> None:
    """Into memory and back, on to the file, from there by the host's path, by a promotion, and to a relay slot; whole
    chunks, and one that begins late.
    """
    with opened(tmp_path, shape, verify=verify) as (rig, memory):
        job = 0
        for group in range(len(rig.shape.groups)):
            rig.write(range(16))
            wanted, tail = rig.blocks([0, 1, 2, 3], group), rig.blocks([4, 5], group)
            stores = [memory.chunk(0, [0, 1, 2, 3], group=group), memory.chunk(1, [4, 5], first=2, group=group)]
            assert memory.store(job, stores) == (OK, OK)
            assert not lacks_checksums(memory.memory(0)[:HEADER_BYTES])
            loads = [memory.chunk(0, [16, 17, 18, 19], group=group), memory.chunk(1, [20], first=3, group=group)]
            assert memory.load(job + 1, loads) == (OK, OK)
            rig.expect([16, 17, 18, 19], wanted, group)
            rig.expect([20], tail[1:], group)
            assert moved(rig, job + 2, WorkKind.WRITE_THROUGH, [0, 1], group) == (OK, OK)
            memory.memory(0)[:], memory.memory(1)[:] = 0, 0
            loads = [
                rig.chunk(0, [24, 25], first=1, group=group),
                rig.chunk(1, [26, 27], first=2, group=group),
                replace(rig.chunk(0, [28, 29, 30], first=1, group=group), host_offset=0),
                replace(rig.chunk(1, [31], first=3, group=group), host_offset=rig.location(1).offset),
            ]
            assert rig.load(job + 3, loads) == (OK,) * 4, rig.collect(job + 3).errors
            rig.expect([24, 25], wanted[1:3], group)
            rig.expect([26, 27], tail, group)
            rig.expect([28, 29, 30], wanted[1:], group)
            rig.expect([31], tail[1:], group)
            assert memory.load(job + 4, [memory.chunk(0, [32, 33, 34, 35], group=group)]) == (OK,)
            rig.expect([32, 33, 34, 35], wanted, group)
            assert moved(rig, job + 5, WorkKind.FETCH, [0], group) == (OK,)
            rig.write(range(4))
            stores = [rig.chunk(3, [0, 1, 2, 3], group=group), rig.chunk(4, [2, 3], first=2, group=group)]
            assert rig.store(job + 6, stores) == (OK, OK)
            again = rig.blocks([0, 1, 2, 3], group)
            assert rig.load(job + 7, [rig.chunk(3, [40, 41, 42, 43], group=group)]) == (OK,)
            rig.expect([40, 41, 42, 43], again, group)
            rig.assert_as_expected()
            job += 10


def test_damage_in_storage_is_refused_and_costs_its_chunk_alone(tmp_path: Path) -> None:
    """On the host's path, as a promotion, as a fetch; what was stored beside it is served."""
    with opened(tmp_path) as (rig, memory):
        rig.write(range(12))
        wanted = [rig.blocks(range(4 * n, 4 * n + 4)) for n in range(3)]
        assert memory.store(0, [memory.chunk(n, list(range(4 * n, 4 * n + 4))) for n in range(3)]) == (OK,) * 3
        assert moved(rig, 1, WorkKind.WRITE_THROUGH, [0, 1, 2]) == (OK,) * 3
        stored = np.memmap(rig.slab.path, dtype=np.uint8, mode="r+")
        stored[rig.location(1).offset + FLIP] ^= 1
        stored.flush()
        loads = [rig.chunk(n, list(range(16 + 4 * n, 20 + 4 * n))) for n in range(3)]
        assert rig.load(2, loads) == (OK, CORRUPT, OK)
        for n in (0, 2):
            rig.expect(range(16 + 4 * n, 20 + 4 * n), wanted[n])
        rig.assert_as_expected()
        promoted = [replace(io, host_offset=rig.location(n).offset) for n, io in enumerate(loads)]
        assert rig.load(3, promoted) == (OK, CORRUPT, OK)
        assert memory.load(4, [memory.chunk(n, [40, 41, 42, 43]) for n in (1,)]) == (CORRUPT,)
        assert moved(rig, 5, WorkKind.FETCH, [1]) == (CORRUPT,)
        rig.assert_as_expected()


def test_damage_in_memory_is_told_by_the_sums_of_the_gather(tmp_path: Path) -> None:
    """Damage between a store and its write-through: storage gets the damaged bytes, but no load accepts them."""
    with opened(tmp_path) as (rig, memory):
        rig.write(range(4))
        assert memory.store(0, [memory.chunk(0, [0, 1, 2, 3])]) == (OK,)
        memory.memory(0)[FLIP] ^= 1
        assert moved(rig, 1, WorkKind.WRITE_THROUGH, [0]) == (OK,)
        assert rig.load(2, [rig.chunk(0, [8, 9, 10, 11])]) == (CORRUPT,)
        assert rig.load(3, [rig.chunk(0, [9, 10, 11], first=1)]) == (OK,)  # the other blocks are right
        rig.expect([9, 10, 11], rig.blocks([1, 2, 3]))
        rig.assert_as_expected()


def test_batches_take_turns_for_scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If there is scratch for one batch only, batches go one after the other, and all arrive."""
    monkeypatch.setattr(device_packer, "BROUGHT_BYTES", 1)
    refused: list[None] = []
    real = DevicePacker.bring

    def counted(self: DevicePacker, *arguments: Any) -> Any:
        steps = real(self, *arguments)
        while True:
            try:
                next(steps)
            except StopIteration as stop:
                return stop.value
            refused.append(None)
            yield

    monkeypatch.setattr(DevicePacker, "bring", counted)
    with opened(tmp_path) as (rig, _):
        rig.write(range(16))
        assert rig.store(0, [rig.chunk(n, list(range(4 * n, 4 * n + 4))) for n in range(4)]) == (OK,) * 4
        wanted = rig.blocks(range(16))
        with rig.engine.paths.packer._beside.held():
            for n in range(4):
                rig.engine.submit_load(n + 1, [rig.chunk(n, list(range(16 + 4 * n, 20 + 4 * n)))])
            until(lambda: len(refused) > 3)
        for n in range(4):
            assert rig.collect(n + 1).outcomes == (OK,)
        rig.expect(range(16, 32), wanted)
        rig.assert_as_expected()


def test_batches_that_fail_to_scatter_hold_no_scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each fills the scratch. If it kept it while its chunks are tried one by one, later loads would wait."""
    with opened(tmp_path, verify="always") as (rig, memory):
        paths = memory.engine.paths
        bus = paths.packer
        rig.write(range(16))
        wanted = rig.blocks(range(16))
        assert memory.store(0, [memory.chunk(n, list(range(4 * n, 4 * n + 4))) for n in range(4)]) == (OK,) * 4
        monkeypatch.setattr(device_packer, "BROUGHT_BYTES", 16 * bus.block_bytes[0])
        monkeypatch.setattr(type(paths.complaints), "error", lambda *_, **__: None)  # pytest keeps it
        real, failures = bus.scatter_many, [1, 2]

        def scatter(group: int, parts: Any, fence: Any) -> Any:
            if len(parts) > 1:
                failures.pop()
                raise torch.OutOfMemoryError
            return real(group, parts, fence)

        monkeypatch.setattr(bus, "scatter_many", scatter)
        with bus._beside.held():
            for job in (1, 2):
                numbers = (2 * job - 2, 2 * job - 1)
                memory.engine.submit_load(job, [memory.chunk(n, list(range(16 + 4 * n, 20 + 4 * n))) for n in numbers])
            until(lambda: len(bus._brought) == 2)
        for job in (1, 2):
            assert memory.collect(job).outcomes == (OK, OK)
        assert not failures
        rig.expect(range(16, 32), wanted)
        rig.assert_as_expected()


def test_a_device_without_memory_has_the_host_sum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path) as (rig, _):
        bus = rig.engine.paths.packer
        monkeypatch.setattr(bus._beside, "run", _out_of_memory)
        payload = np.zeros((2, bus.block_bytes[0]), dtype=np.uint8)
        found = at_once(bus.bring(0, [payload]))
        assert not found.has_sums


def _out_of_memory(work: Any) -> None:
    raise torch.OutOfMemoryError
