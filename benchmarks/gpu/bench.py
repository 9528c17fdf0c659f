"""What the parts of the GPU benchmark share: the device, and KV caches in shape.

Threading: one thread.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.engine import layout_of
from nixl_offload.engine.streams import CudaDevice, Device
from nixl_offload.movers.base import MemoryKind

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
"""For host memory that plays the device: shows that it works, and measures nothing."""


@dataclass
class Scene:
    """Where it is measured, and how much."""

    device: Device
    directory: Path
    """On the filesystem to be measured."""
    scale: Scale
    deadline_s: float
    """By ``time.monotonic``."""
    unfit: dict[str, str] = field(default_factory=dict)
    """Movers that crash, hang or refuse here, each with the reason: not to be tried again."""

    @staticmethod
    def make(directory: str, seconds: float, *, emulate: bool) -> Scene:
        """Return CUDA's first device, or host memory that plays one."""
        if emulate:
            torch.set_num_threads(1)  # on busy cores its threads wait for each other: a hundred times slower
            device = Device(torch.device("cpu"), MemoryKind.VRAM)
        else:
            first = torch.device("cuda", torch.cuda.current_device())
            device = CudaDevice(first)
        return Scene(device, Path(directory), SMALL if emulate else FULL, time.monotonic() + seconds)

    @property
    def emulated(self) -> bool:
        return self.device.torch_device.type == "cpu"

    def sync(self) -> None:
        """Wait for the device."""
        if not self.emulated:
            torch.cuda.synchronize(self.device.torch_device)

    def share(self, done: int, parts: int) -> float:
        """Return the deadline of the next of ``parts`` equal parts, ``done`` of which are over."""
        now_s = time.monotonic()
        return now_s + max(0.0, self.deadline_s - now_s) / (parts - done)

    def noise(self, size_bytes: int) -> torch.Tensor:
        """Return memory of the device that is full of noise, aligned as cuFile likes it."""
        whole = torch.empty(size_bytes + DEVICE_PAGE_BYTES, dtype=torch.uint8, device=self.device.torch_device)
        begin = -whole.data_ptr() % DEVICE_PAGE_BYTES
        whole[begin : begin + size_bytes].view(torch.int64).random_()
        return whole[begin : begin + size_bytes]


class Cache:
    """A KV cache of pieces of one size. It is four times what a round moves, so that no processor cache helps."""

    SETS = 4
    """Disjoint sets of blocks. Rounds take them in turns."""

    def __init__(self, scene: Scene, piece_bytes: int, layers: int | None = None, shards: int = 1) -> None:
        """A page has ``shards`` pieces; the last one is used. ``layers``: by default as the scale's chunks need."""
        scale = scene.scale
        layers = layers or max(1, scale.chunk_bytes // (piece_bytes * scale.blocks_per_chunk))
        self.piece_bytes, self.block_bytes = piece_bytes, layers * piece_bytes
        self.chunks = max(1, scale.total_bytes // (self.block_bytes * shards * scale.blocks_per_chunk))
        self.total_bytes = self.chunks * self.block_bytes * scale.blocks_per_chunk
        blocks, page_bytes = self.chunks * scale.blocks_per_chunk * self.SETS, piece_bytes * shards
        self.tensors = [scene.noise(blocks * page_bytes).view(blocks, page_bytes) for _ in range(layers)]
        self.layout = layout_of(self.tensors, scale.blocks_per_chunk)
        order = np.random.default_rng(1).permutation(blocks).astype(np.int32)
        self._sets = order.reshape(self.SETS, self.chunks, scale.blocks_per_chunk)
        scene.sync()

    def ids(self, number: int) -> npt.NDArray[np.int32]:
        """Return the scattered block ids of a round, shape (chunks, blocks_per_chunk)."""
        ids: npt.NDArray[np.int32] = self._sets[number % self.SETS]
        return ids

    def index(self, number: int) -> torch.Tensor:
        """Return ``ids`` on the device, in one dimension."""
        return torch.from_numpy(self.ids(number).reshape(-1).astype(np.int64)).to(self.tensors[0].device)

    def blocks(self, number: int) -> torch.Tensor:
        """Return the content of a round's blocks, shape (blocks, block_bytes)."""
        index = self.index(number)
        return torch.cat([kv[:, -self.piece_bytes :].index_select(0, index) for kv in self.tensors], dim=1)
