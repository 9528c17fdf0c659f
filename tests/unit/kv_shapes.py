"""KV memory in the shapes that vLLM makes, on any device, with an engine over it: what device tests share, whether host
memory plays the device (``device_rig``) or a real one is there.

The *model* is a function that queues work on the compute stream; every byte it writes, and every byte that a load must
have brought, is kept in a mirror on the host, so that a comparison covers all of KV memory: what nothing was to touch
must be untouched. Threading: the test's thread is the model's and the engine's caller.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from nixl_offload.chunk.layout import GroupLayout, KVLayout, PageRun, RegionSpec
from nixl_offload.engine import Completion, LinkEngine
from nixl_offload.engine.streams import Device
from nixl_offload.errors import MoverError
from nixl_offload.movers.base import MemoryId, MemoryKind, MemoryRegion, Mover
from nixl_offload.movers.threaded import CopyMover
from nixl_offload.tiers.base import Link
from nixl_offload.tiers.slab.file import SlabFile, SlabLink
from nixl_offload.types import PAGE_BYTES, Outcome, align_up
from tests.unit.engine_rig import CHUNK_BLOCKS, NAMESPACE, Driven, until
from tests.unit.rank_rig import Alone

NUM_BLOCKS = 48
NEVER_DIRECT = 1 << 60

KIB = 1024
Bytes = npt.NDArray[np.uint8]
Way = Literal["direct", "device", "host"]


@dataclass(frozen=True)
class KVShape:
    """``tensors``: (page, stride) of each layer's tensor.

    ``interleaved``: all tensors are views of one allocation, side by side in each of its rows.
    """

    tensors: tuple[tuple[int, int], ...]
    groups: tuple[GroupLayout, ...]
    interleaved: bool = False
    aligned: bool = False
    """Its pages may go direct."""

    @classmethod
    def layers(cls, count: int, page: int, *, stride: int | None = None, **options: Any) -> KVShape:
        """One group, a tensor for each layer."""
        group = GroupLayout.of_pages((layer, page) for layer in range(count))
        return cls(((page, stride or page),) * count, (group,), **options)


def _halves(runs: Sequence[PageRun]) -> tuple[GroupLayout, GroupLayout]:
    """Two groups: the first half of each run, and the second."""
    first = [PageRun(tensor, offset, length // 2) for tensor, offset, length in runs]
    second = [PageRun(tensor, offset + length // 2, length // 2) for tensor, offset, length in runs]
    return GroupLayout(tuple(first)), GroupLayout(tuple(second))


SHAPES = {
    "lbhnc": KVShape.layers(3, 8 * KIB, aligned=True),
    "lbhnc_strided": KVShape.layers(3, 4 * KIB, stride=12 * KIB, aligned=True),
    "lbhnc_interleaved": KVShape.layers(3, 4 * KIB, stride=12 * KIB, interleaved=True, aligned=True),
    "lbhnc_small_pages": KVShape.layers(4, 1536),
    "blhnc": KVShape(((48 * KIB, 48 * KIB),), (GroupLayout.of_pages([(0, 48 * KIB)]),), aligned=True),
    "lbhnc_head_shards": KVShape(
        ((8 * KIB, 8 * KIB),) * 3, _halves([PageRun(layer, 0, 8 * KIB) for layer in range(3)]), aligned=True
    ),
    "blhnc_head_shards": KVShape(
        ((24 * KIB, 24 * KIB),), _halves([PageRun(0, layer * 8 * KIB, 8 * KIB) for layer in range(3)]), aligned=True
    ),
    "odd_head_shards": KVShape(((3000, 3008),) * 2, _halves([PageRun(layer, 0, 3000) for layer in range(2)])),
    "mla_41k": KVShape.layers(2, 41 * KIB),
    "mla_36k": KVShape.layers(2, 36 * KIB, aligned=True),
    "hybrid": KVShape(
        ((16 * KIB, 16 * KIB),) * 2,
        (
            GroupLayout.of_pages([(0, 16 * KIB), (1, 16 * KIB)]),
            GroupLayout.of_pages([(0, 8 * KIB), (1, 4 * KIB)]),
        ),
        aligned=True,
    ),
    "padded_pages": KVShape(
        ((4 * KIB, 6 * KIB),) * 2, (GroupLayout.of_pages([(0, 3000), (1, 2056)]), GroupLayout.of_pages([(1, 1000)]))
    ),
}


def allocate(shape: KVShape, device: torch.device) -> list[torch.Tensor]:
    """KV tensors as vLLM hands them over: int8 of shape (NUM_BLOCKS, page), page-aligned, zero."""
    if shape.interleaved:
        rows = _area(NUM_BLOCKS * sum(page for page, _ in shape.tensors), device).view(NUM_BLOCKS, -1)
        ends = np.cumsum([page for page, _ in shape.tensors]).tolist()
        return [rows[:, end - page : end] for (page, _), end in zip(shape.tensors, ends, strict=True)]
    return [_area(NUM_BLOCKS * stride, device).view(NUM_BLOCKS, stride)[:, :page] for page, stride in shape.tensors]


def _area(size_bytes: int, device: torch.device) -> torch.Tensor:
    area = torch.zeros(size_bytes + PAGE_BYTES, dtype=torch.int8, device=device)
    start = -area.data_ptr() % PAGE_BYTES
    return area[start : start + size_bytes]


def layout_of(shape: KVShape, tensors: Sequence[torch.Tensor]) -> KVLayout:
    regions = tuple(
        RegionSpec(index, tensor.data_ptr(), NUM_BLOCKS, tensor.stride(0), tensor.shape[1])
        for index, tensor in enumerate(tensors)
    )
    return KVLayout(regions, shape.groups, CHUNK_BLOCKS)


class DeviceCopyMover(CopyMover):
    """Moves host memory that plays a device's, as the movers of a real one do; keeps what was registered."""

    def __init__(
        self, kinds: frozenset[MemoryKind] = frozenset(MemoryKind), refuse: Callable[[MemoryRegion], bool] | None = None
    ) -> None:
        super().__init__(name="device_copy")
        self.memory_kinds = kinds
        self.regions: list[MemoryRegion] = []
        self._refuse = refuse

    def register_memory(self, region: MemoryRegion) -> MemoryId:
        """See Mover. Raises MoverError for what the test wants refused."""
        if self._refuse is not None and self._refuse(region):
            raise MoverError(f"{self.name}: {region.length_bytes} bytes do not fit into BAR1")
        memory = super().register_memory(region)
        self.regions.append(region)
        return memory


@dataclass
class DeviceRig(Driven):
    """Built by ``make``. Blocks are written by the model's stream and compared over all of KV memory."""

    shape: KVShape
    device: Device
    model: Callable[[Callable[[], None]], object]
    """Queues work on the compute stream."""
    tensors: list[torch.Tensor]
    mirror: list[Bytes]
    """What each tensor must hold, once the model's stream is idle and no load is under way."""
    layout: KVLayout
    slab: SlabFile
    mover: Mover
    link: Link
    engine: Alone
    slots: int
    results: dict[int, Completion] = field(default_factory=dict)
    _rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(11))
    _kept: list[torch.Tensor] = field(default_factory=list)
    _uploads: Any = None

    def __post_init__(self) -> None:
        if self.device.torch_device.type != "cpu":
            self._uploads = torch.cuda.Stream(self.device.torch_device)

    @classmethod
    def make(
        cls,
        directory: Path,
        device: Device,
        model: Callable[[Callable[[], None]], object],
        mover: Mover,
        shape: str | KVShape = "lbhnc",
        way: Way = "device",
        *,
        slots: int = 16,
        staging_slots: int = 8,
        direct_io: bool = True,
        **options: Any,
    ) -> DeviceRig:
        shape = SHAPES[shape] if isinstance(shape, str) else shape
        tensors = allocate(shape, device.torch_device)
        layout = layout_of(shape, tensors)
        largest = max(layout.slot_bytes(group) for group in range(len(shape.groups)))
        extent = align_up(largest * 4, 65536)
        slab = SlabFile(directory / "kv" / "rank.slab", extent * -(-slots // 4), extent, direct_io=direct_io)
        slab.open()
        clock = options.get("clock", time.monotonic)
        link = SlabLink(slab, mover, clock)
        options.setdefault("direct_min_extent_bytes", 0 if way == "direct" else NEVER_DIRECT)
        options.setdefault("staging", "host" if way == "host" else "device")
        try:
            rank = {name: options.pop(name) for name in ("clock", "load_timeout_s") if name in options}
            options |= {"tensors": tensors, "layout": layout, "link": link, "staging_bytes": staging_slots * largest}
            make = partial(LinkEngine, rank_namespace=NAMESPACE, device=device, **options)
            engine = Alone(make, options.get("tier", 0), **rank)
        except BaseException:
            slab.close()
            raise
        mirror = [np.zeros((NUM_BLOCKS, tensor.shape[1]), dtype=np.uint8) for tensor in tensors]
        return cls(shape, device, model, tensors, mirror, layout, slab, mover, link, engine, slots)

    # -- the model --------------------------------------------------------------------------------------------------

    def write(self, blocks: Sequence[int], value: int | None = None) -> None:
        """Have the model write all layers of ``blocks``: noise, or ``value``. Returns at once."""
        for tensor, mirror in zip(self.tensors, self.mirror, strict=True):
            shape = (len(blocks), mirror.shape[1])
            rows = self._rng.integers(0, 256, shape, dtype=np.uint8) if value is None else np.full(shape, value, "u1")
            mirror[list(blocks)] = rows
            ids, source = self._uploaded(np.array(blocks)), self._uploaded(rows.view(np.int8))
            self.model(lambda tensor=tensor, ids=ids, source=source: tensor.index_copy_(0, ids, source))  # type: ignore[misc]

    def _uploaded(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """``array`` on the device, for the rest of the test; without a wait for the model's stream."""
        host = torch.from_numpy(array)
        if self.device.torch_device.type == "cpu":
            return host
        with torch.cuda.stream(self._uploads):
            self._kept.append(host.to(self.device.torch_device))
        return self._kept[-1]

    def settle_model(self) -> None:
        """Wait until the compute stream is idle."""
        fence = self.device.compute_fence()
        until(fence.done)

    def rows(self, blocks: Sequence[int], group: int = 0) -> Bytes:
        """What the blocks of a group must be: a copy, of shape (blocks, block_bytes)."""
        columns = [
            self.mirror[tensor][list(blocks), offset : offset + length]
            for tensor, offset, length in self.shape.groups[group].refs
        ]
        return np.concatenate(columns, axis=1)

    def expect(self, blocks: Sequence[int], rows: Bytes, group: int = 0) -> None:
        """A load will have put ``rows`` into ``blocks``."""
        column = 0
        for tensor, offset, length in self.shape.groups[group].refs:
            self.mirror[tensor][list(blocks), offset : offset + length] = rows[:, column : column + length]
            column += length

    def assert_as_expected(self) -> None:
        """All of KV memory, byte for byte."""
        self.settle_model()
        for index, (tensor, mirror) in enumerate(zip(self.tensors, self.mirror, strict=True)):
            found = tensor.cpu().view(torch.uint8).numpy()
            wrong = np.flatnonzero((found != mirror).any(axis=1)).tolist()
            assert not wrong, f"tensor {index}: blocks {wrong} differ"

    # -- the engine -------------------------------------------------------------------------------------------------

    def warm_up(self) -> None:
        """Store and load a chunk of each group, so that nothing is compiled later. It rests in the last slots."""
        for group in range(len(self.shape.groups)):
            chunk = self.chunk(999, [0, 1, 2, 3], group=group, slot=self.slots - 1)
            assert self.store(10_000 + group, [chunk]) == (Outcome.OK,)
            assert self.load(20_000 + group, [chunk]) == (Outcome.OK,)

    def claimed(self) -> None:
        """Wait until the pump has begun with whatever was submitted: ``wait`` drops what it has no time for."""
        until(lambda: not any(self.engine.queue.lanes.values()))

    def close(self) -> None:
        self.engine.close()
        self.mover.close()
        self.slab.close()


def assert_round_trip(rig: DeviceRig, busy: Callable[[], None]) -> None:
    """Chunks of every group, whole ones and an unaligned head, go out and come back into other blocks, while the model
    goes on writing. ``busy``: work that holds the compute stream up for some milliseconds.
    """
    rng = np.random.default_rng(5)
    for group in range(len(rig.shape.groups)):
        order = rng.permutation(NUM_BLOCKS).tolist()
        sources = [order[0:4], order[4:8], order[8:10]]
        targets = [order[10:14], order[14:18], order[18:20]]
        firsts = [0, 0, 2]
        numbers = [4 * group + n for n in range(3)]
        rig.model(busy)
        rig.write(range(NUM_BLOCKS))
        wanted = [rig.rows(blocks, group) for blocks in sources]
        plans = list(zip(numbers, sources, firsts, strict=True))
        job = 10 * group
        rig.engine.submit_store(job, [rig.chunk(n, blocks, group=group, first=first) for n, blocks, first in plans])
        rig.claimed()
        rig.engine.wait([job])
        # The step that follows reuses the blocks at once.
        rig.write(order[:10])
        assert set(rig.collect(job).outcomes) == {Outcome.OK}, rig.collect(job).errors

        # What the model still does to the target blocks comes before the load, not after it.
        rig.model(busy)
        rig.write(order[10:20], value=0xEE)
        plans = list(zip(numbers, targets, firsts, strict=True))
        loads = [rig.chunk(n, blocks, group=group, first=first) for n, blocks, first in plans]
        # Parts: blocks 1 and 2 of the first chunk, the tail of the second.
        loads.append(rig.chunk(numbers[0], order[20:22], group=group, first=1))
        loads.append(rig.chunk(numbers[1], order[22:23], group=group, first=3))
        assert set(rig.load(job + 1, loads)) == {Outcome.OK}, rig.collect(job + 1).errors
        for blocks, rows in zip(targets, wanted, strict=True):
            rig.expect(blocks, rows, group)
        rig.expect(order[20:22], wanted[0][1:3], group)
        rig.expect(order[22:23], wanted[1][3:4], group)
        rig.assert_as_expected()
