"""Proves on the emulated device: no checksum of what goes through host memory is the processor's, either way; what a
store into memory has summed goes on to storage with it; and what is damaged reaches no KV block all the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from nixl_offload.chunk.header import HEADER_BYTES, lacks_checksums
from nixl_offload.engine import Chunk, Completion, device_packer, packed, packer
from nixl_offload.engine import host as host_module
from nixl_offload.engine.device_packer import DevicePacker
from nixl_offload.engine.host import HostSlab
from nixl_offload.engine.memory_engine import MemoryEngine
from nixl_offload.engine.records import WorkKind
from nixl_offload.types import Location, Outcome
from tests.unit.device_lab import Lab, open_lab
from tests.unit.device_rig import at_once
from tests.unit.kv_shapes import NAMESPACE, SHAPES, DeviceRig, allocate, layout_of, until
from tests.unit.rank_rig import Alone

OK, FAILED, CORRUPT = Outcome.OK, Outcome.FAILED, Outcome.CORRUPT
MEMORY = 1
"""The position of the memory tier; that of the file is 0."""
SLOTS = 8
FLIP = HEADER_BYTES + 4321
"""A byte of the first block."""


@dataclass
class Rank:
    """A memory tier and a slab on disk, over one device's KV blocks. Chunks of the file go through host memory."""

    rig: DeviceRig
    slab: HostSlab
    memory: Alone
    ended: dict[int, Completion] = field(default_factory=dict)

    def chunk(self, number: int, blocks: list[int], *, first: int = 0, group: int = 0) -> Chunk:
        """Return a chunk in slot ``number`` of the memory tier."""
        io = self.rig.chunk(number, blocks, first=first, group=group)
        return replace(io, location=Location(MEMORY, io.location.offset, io.location.slot_bytes))

    def image(self, number: int) -> npt.NDArray[np.uint8]:
        size = self.rig.location(0).slot_bytes
        return self.slab.slot(number * size, size).memory

    def _collect(self, job: int) -> tuple[Outcome, ...]:
        def there() -> bool:
            self.ended.update({done.job_id: done for done in self.memory.finished()})
            return job in self.ended

        until(there)
        return self.ended[job].outcomes

    def store(self, job: int, chunks: list[Chunk]) -> tuple[Outcome, ...]:
        self.memory.submit_store(job, chunks)
        return self._collect(job)

    def load(self, job: int, chunks: list[Chunk]) -> tuple[Outcome, ...]:
        self.memory.submit_load(job, chunks)
        return self._collect(job)

    def move(self, job: int, kind: WorkKind, numbers: list[int], group: int = 0) -> tuple[Outcome, ...]:
        """Between slots of the same numbers here and there."""
        offsets = [self.rig.location(number).offset for number in numbers]
        chunks = [
            replace(self.rig.chunk(number, [], group=group), host_offset=offset)
            for number, offset in zip(numbers, offsets, strict=True)
        ]
        self.rig.engine.submit_background(job, chunks, kind)
        return self.rig.collect(job).outcomes

    def flip_in_file(self, number: int, place: int) -> None:
        stored = np.memmap(self.rig.slab.path, dtype=np.uint8, mode="r+")
        stored[self.rig.location(number).offset + place] ^= 1
        stored.flush()


@contextmanager
def opened(directory: Path, shape: str = "lbhnc", **options: Any) -> Iterator[tuple[Lab, Rank]]:
    with open_lab(directory) as lab:
        tensors = allocate(SHAPES[shape], torch.device("cpu"))
        layout = layout_of(SHAPES[shape], tensors)
        size = max(layout.slot_bytes(group) for group in range(len(layout.groups)))
        slab = HostSlab(memory_bytes=SLOTS * size, relay_slots=1, slot_bytes=size)
        rig = lab.make(None, shape, "host", host=slab, **options)
        places = {"tensors": rig.tensors, "layout": rig.layout, "host": slab, "rank_namespace": NAMESPACE}
        verify = options.get("verify", "checksum")
        memory = Alone(partial(MemoryEngine, tier=MEMORY, device=rig.device, verify=verify, **places), MEMORY)
        try:
            yield lab, Rank(rig, slab, memory)
        finally:
            memory.close(1.0)
            slab.close()


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
@pytest.mark.parametrize("shape", ["lbhnc", "blhnc", "hybrid", "padded_pages"])
def test_every_way_through_host_memory(tmp_path: Path, shape: str, verify: str) -> None:
    """Into memory and back, on to the file, from there by the host's path, by a promotion, and to a relay slot; whole
    chunks, and one that begins late.
    """
    with opened(tmp_path, shape, verify=verify) as (_, rank):
        rig, job = rank.rig, 0
        for group in range(len(rig.shape.groups)):
            rig.write(range(16))
            wanted, tail = rig.rows([0, 1, 2, 3], group), rig.rows([4, 5], group)
            stores = [rank.chunk(0, [0, 1, 2, 3], group=group), rank.chunk(1, [4, 5], first=2, group=group)]
            assert rank.store(job, stores) == (OK, OK)
            assert not lacks_checksums(rank.image(0)[:HEADER_BYTES])
            loads = [rank.chunk(0, [16, 17, 18, 19], group=group), rank.chunk(1, [20], first=3, group=group)]
            assert rank.load(job + 1, loads) == (OK, OK)
            rig.expect([16, 17, 18, 19], wanted, group)
            rig.expect([20], tail[1:], group)
            assert rank.move(job + 2, WorkKind.WRITE_THROUGH, [0, 1], group) == (OK, OK)
            rank.image(0)[:], rank.image(1)[:] = 0, 0
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
            assert rank.load(job + 4, [rank.chunk(0, [32, 33, 34, 35], group=group)]) == (OK,)
            rig.expect([32, 33, 34, 35], wanted, group)
            assert rank.move(job + 5, WorkKind.FETCH, [0], group) == (OK,)
            rig.write(range(4))
            stores = [rig.chunk(3, [0, 1, 2, 3], group=group), rig.chunk(4, [2, 3], first=2, group=group)]
            assert rig.store(job + 6, stores) == (OK, OK)
            again = rig.rows([0, 1, 2, 3], group)
            assert rig.load(job + 7, [rig.chunk(3, [40, 41, 42, 43], group=group)]) == (OK,)
            rig.expect([40, 41, 42, 43], again, group)
            rig.assert_as_expected()
            job += 10


def test_damage_in_storage_is_refused_and_costs_its_chunk_alone(tmp_path: Path) -> None:
    """On the host's path, as a promotion, as a fetch; what was stored beside it is served."""
    with opened(tmp_path) as (_, rank):
        rig = rank.rig
        rig.write(range(12))
        wanted = [rig.rows(range(4 * n, 4 * n + 4)) for n in range(3)]
        assert rank.store(0, [rank.chunk(n, list(range(4 * n, 4 * n + 4))) for n in range(3)]) == (OK,) * 3
        assert rank.move(1, WorkKind.WRITE_THROUGH, [0, 1, 2]) == (OK,) * 3
        rank.flip_in_file(1, FLIP)
        loads = [rig.chunk(n, list(range(16 + 4 * n, 20 + 4 * n))) for n in range(3)]
        assert rig.load(2, loads) == (OK, CORRUPT, OK)
        for n in (0, 2):
            rig.expect(range(16 + 4 * n, 20 + 4 * n), wanted[n])
        rig.assert_as_expected()
        promoted = [replace(io, host_offset=rig.location(n).offset) for n, io in enumerate(loads)]
        assert rig.load(3, promoted) == (OK, CORRUPT, OK)
        assert rank.load(4, [rank.chunk(n, [40, 41, 42, 43]) for n in (1,)]) == (CORRUPT,)
        assert rank.move(5, WorkKind.FETCH, [1]) == (CORRUPT,)
        rig.assert_as_expected()


def test_damage_in_memory_is_told_by_the_sums_of_the_gather(tmp_path: Path) -> None:
    """Damage between a store and its write-through: storage gets the damaged bytes, but no load accepts them."""
    with opened(tmp_path) as (_, rank):
        rig = rank.rig
        rig.write(range(4))
        assert rank.store(0, [rank.chunk(0, [0, 1, 2, 3])]) == (OK,)
        rank.image(0)[FLIP] ^= 1
        assert rank.move(1, WorkKind.WRITE_THROUGH, [0]) == (OK,)
        assert rig.load(2, [rig.chunk(0, [8, 9, 10, 11])]) == (CORRUPT,)
        assert rig.load(3, [rig.chunk(0, [9, 10, 11], first=1)]) == (OK,)  # the other blocks are right
        rig.expect([9, 10, 11], rig.rows([1, 2, 3]))
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
    with opened(tmp_path) as (_, rank):
        rig = rank.rig
        rig.write(range(16))
        assert rig.store(0, [rig.chunk(n, list(range(4 * n, 4 * n + 4))) for n in range(4)]) == (OK,) * 4
        wanted = rig.rows(range(16))
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
    with opened(tmp_path, verify="always") as (_, rank):
        rig, paths = rank.rig, rank.memory.paths
        bus = paths.packer  # type: ignore[attr-defined]
        rig.write(range(16))
        wanted = rig.rows(range(16))
        assert rank.store(0, [rank.chunk(n, list(range(4 * n, 4 * n + 4))) for n in range(4)]) == (OK,) * 4
        monkeypatch.setattr(device_packer, "BROUGHT_BYTES", 16 * bus.block_bytes[0])
        monkeypatch.setattr(type(paths.complaints), "error", lambda *_, **__: None)  # type: ignore[attr-defined]  # pytest keeps it
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
                rank.memory.submit_load(job, [rank.chunk(n, list(range(16 + 4 * n, 20 + 4 * n))) for n in numbers])
            until(lambda: len(bus._brought) == 2)
        for job in (1, 2):
            assert rank._collect(job) == (OK, OK)
        assert not failures
        rig.expect(range(16, 32), wanted)
        rig.assert_as_expected()


def test_a_device_without_memory_has_the_host_sum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path) as (_, rank):
        bus = rank.rig.engine.paths.packer
        monkeypatch.setattr(bus._beside, "run", _out_of_memory)
        payload = np.zeros((2, bus.block_bytes[0]), dtype=np.uint8)
        found = at_once(bus.bring(0, [payload]))
        assert not found.has_sums
        assert found.rows()[0] is payload


def _out_of_memory(work: Any) -> None:
    raise torch.OutOfMemoryError
