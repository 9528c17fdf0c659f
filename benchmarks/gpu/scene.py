"""Where it is measured and how much: the device, or host memory that plays one, a directory, and KV caches in shape.

Threading: one thread.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from nixl_offload.chunk.layout import GroupLayout, KVLayout, RegionSpec
from nixl_offload.engine.streams import CudaStreams, Device, HostStreams
from nixl_offload.errors import MoverError
from nixl_offload.movers.base import MemoryKind, MemoryRegion, Mover
from nixl_offload.movers.select import MoverChoice, open_mover

KIB, MIB = 1 << 10, 1 << 20
PIECES_BYTES = (64 * KIB, 512 * KIB, 2 * MIB)
"""What of a KV block lies together."""
DEVICE_PAGE_BYTES = 64 * KIB


@dataclass(frozen=True)
class Scale:
    """How much is moved in a round."""

    total_bytes: int
    chunk_bytes: int
    blocks_per_chunk: int
    rounds: int


FULL = Scale(256 * MIB, 32 * MIB, 16, 7)
SMALL = Scale(8 * MIB, 4 * MIB, 2, 1)
"""For host memory: shows that it works, and measures nothing."""


@dataclass(frozen=True)
class Scene:
    """``directory``: of the file, on the filesystem to be measured. ``deadline_s``: by ``time.monotonic``."""

    device: Device
    directory: Path
    scale: Scale
    deadline_s: float
    unfit: Mapping[str, str] = field(default_factory=dict)
    """Movers that have been seen to crash, hang or refuse here, each with the reason: not to be tried again."""

    @property
    def emulated(self) -> bool:
        return self.device.torch_device.type == "cpu"

    def sync(self) -> None:
        """Wait for the device."""
        if not self.emulated:
            torch.cuda.synchronize(self.device.torch_device)

    def share(self, done: int, parts: int) -> float:
        """The deadline of the next of ``parts`` equal parts, ``done`` of which are over."""
        now = time.monotonic()
        return now + max(0.0, self.deadline_s - now) / max(1, parts - done)

    def empty(self, size_bytes: int) -> torch.Tensor:
        """Memory of the device, aligned as cuFile likes it."""
        whole = torch.empty(size_bytes + DEVICE_PAGE_BYTES, dtype=torch.uint8, device=self.device.torch_device)
        begin = -whole.data_ptr() % DEVICE_PAGE_BYTES
        return whole[begin : begin + size_bytes]

    def noise(self, size_bytes: int) -> torch.Tensor:
        """The same, full of noise."""
        memory = self.empty(size_bytes)
        memory.view(torch.int64).random_()
        return memory

    def locked(self, size_bytes: int) -> torch.Tensor:
        """Page-locked host memory, page-aligned."""
        whole = torch.zeros(size_bytes + DEVICE_PAGE_BYTES, dtype=torch.uint8, pin_memory=self.device.page_locks)
        begin = -whole.data_ptr() % DEVICE_PAGE_BYTES
        return whole[begin : begin + size_bytes]

    def region(self, memory: torch.Tensor) -> MemoryRegion:
        """``memory`` of the device as movers name it."""
        return MemoryRegion(memory.data_ptr(), memory.numel(), self.device.kind, self.device.number)

    def mover(self, kind: MoverChoice) -> Mover:
        """A mover that has shown that it runs here. Raises MoverError, in words."""
        if kind in self.unfit:
            raise MoverError(self.unfit[kind])
        memory = self.empty(DEVICE_PAGE_BYTES)
        scratch = self.region(memory) if self.emulated else None
        mover = open_mover(kind, self.device.kind, str(self.directory), scratch=scratch).mover
        del memory  # not before: the region does not keep it alive
        return mover


def find_device(*, emulate: bool) -> Device:
    """CUDA's first device, or host memory that plays one."""
    if emulate:
        torch.set_num_threads(1)  # on busy cores its threads wait for each other: a hundred times slower
        return Device(torch.device("cpu"), MemoryKind.VRAM, HostStreams())
    device = torch.device("cuda", torch.cuda.current_device())
    return Device(device, MemoryKind.VRAM, CudaStreams(device))


class Cache:
    """A KV cache of pieces of one size, four times what a round moves: rounds do not meet each other in a cache."""

    SETS = 4

    def __init__(self, scene: Scene, piece_bytes: int) -> None:
        scale = scene.scale
        self.layers = max(1, scale.chunk_bytes // (piece_bytes * scale.blocks_per_chunk))
        self.block_bytes = self.layers * piece_bytes
        self.chunk_bytes = self.block_bytes * scale.blocks_per_chunk
        self.chunks = max(1, scale.total_bytes // self.chunk_bytes)
        self.total_bytes = self.chunks * self.chunk_bytes
        per_set = self.chunks * scale.blocks_per_chunk
        blocks = per_set * self.SETS
        self.tensors = [scene.noise(blocks * piece_bytes).view(blocks, piece_bytes) for _ in range(self.layers)]
        specs = [RegionSpec(n, kv.data_ptr(), blocks, piece_bytes, piece_bytes) for n, kv in enumerate(self.tensors)]
        refs = tuple((n, piece_bytes) for n in range(self.layers))
        self.layout = KVLayout(tuple(specs), (GroupLayout.of_pages(refs),), scale.blocks_per_chunk)
        order = np.random.default_rng(1).permutation(blocks).astype(np.int32)
        self._sets = order.reshape(self.SETS, self.chunks, scale.blocks_per_chunk)
        scene.sync()

    def ids(self, number: int) -> npt.NDArray[np.int32]:
        """The scattered block ids of a round, shape (chunks, blocks_per_chunk)."""
        ids: npt.NDArray[np.int32] = self._sets[number % self.SETS]
        return ids

    def blocks(self, ids: npt.NDArray[np.int32]) -> torch.Tensor:
        """What lies in these blocks, shape (blocks, block_bytes)."""
        index = torch.from_numpy(ids.reshape(-1).astype(np.int64)).to(self.tensors[0].device)
        return torch.cat([kv.index_select(0, index) for kv in self.tensors], dim=1)
