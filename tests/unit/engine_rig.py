"""A rank of one tier for tests: KV tensors of every shape that vLLM makes, a real slab on disk (or another link), an
engine, and an independent idea of what the bytes of a chunk must be.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from nixl_offload.chunk.layout import GroupLayout, KVLayout, PageRun, RegionSpec
from nixl_offload.chunk.shards import Shard
from nixl_offload.engine import Chunk, Completion, LinkPaths, MemoryPaths, TierEngine, TierSetup
from nixl_offload.engine.host import HostSlab
from nixl_offload.engine.jobs import JobTable
from nixl_offload.engine.paths import RankMemory
from nixl_offload.engine.streams import Device, device_of
from nixl_offload.movers.base import Mover, Transfer, TransferState
from nixl_offload.movers.threaded import CopyMover
from nixl_offload.tiers.base import Link
from nixl_offload.tiers.slab.file import SlabFile, SlabLink
from nixl_offload.types import PAGE_BYTES, Key, Location, Outcome, align_up
from tests.contract.suites.faulty_mover import Fault, FaultyMover
from tests.unit.rank_rig import Alone

NAMESPACE = bytes(range(32))
NUM_BLOCKS = 48
CHUNK_BLOCKS = 4
DEADLINE_S = 20.0
Bytes = npt.NDArray[np.uint8]


def own_shards(layout: KVLayout, namespace: bytes = NAMESPACE, number: int = 0) -> list[Shard]:
    """The shards of a rank whose chunks are not cut, with ``namespace`` in their headers."""
    return [Shard(number, namespace)] * len(layout.groups)


class Clock:
    """Real time plus the time that the test adds."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


class RaisingMover(FaultyMover):
    """Breaks the contract on demand: ``poll`` raises ``error`` while it is set."""

    error: BaseException | None = None

    def poll(self, transfer: Transfer) -> TransferState:
        if self.error is not None:
            raise self.error
        return super().poll(transfer)


def faulty(*faults: Fault) -> FaultyMover:
    """Return a mover by copying, with these faults."""
    return FaultyMover(CopyMover(), faults)


class HangingSlab(SlabFile):
    """Its checks and allocations hang while ``hang`` is set; so does the pump."""

    hang: threading.Event | None = None

    def check(self) -> int:
        self._wait()
        return super().check()

    def ensure(self, offset: int, length_bytes: int) -> Generator[None, None, None]:
        self._wait()
        return super().ensure(offset, length_bytes)

    def _wait(self) -> None:
        if self.hang is not None:
            self.hang.wait(30)


@dataclass(frozen=True)
class Shape:
    """``tensors``: (page, stride) of each."""

    tensors: tuple[tuple[int, int], ...]
    groups: tuple[GroupLayout, ...]
    direct: bool = False
    """Chunks go direct, if a test does not choose the path."""
    interleaved: bool = False
    """All tensors are views of one allocation, side by side in each of its rows."""

    @property
    def is_aligned(self) -> bool:
        """Whether chunks of the first group may go direct."""
        runs = self.groups[0].refs
        sizes = [size for run in runs for size in (run.page_offset, run.length, self.tensors[run.tensor_index][1])]
        return not any(size % PAGE_BYTES for size in sizes)

    @classmethod
    def layers(cls, count: int, page: int, *, stride: int | None = None, **options: Any) -> Shape:
        """One group, and a tensor for each of its layers."""
        group = GroupLayout.of_pages((layer, page) for layer in range(count))
        return cls(((page, stride or page),) * count, (group,), **options)


def whole(*pages: tuple[int, int]) -> GroupLayout:
    """A group of (tensor, stored bytes) of each layer."""
    return GroupLayout.of_pages(pages)


def runs(*refs: tuple[int, int, int]) -> GroupLayout:
    """A group of (tensor, offset in the page, bytes)."""
    return GroupLayout(tuple(PageRun(*ref) for ref in refs))


SHAPES = {
    "per_layer": Shape.layers(3, 1536),
    "per_layer_pages": Shape.layers(3, 8192),
    "interleaved": Shape.layers(3, 4096, stride=12288, interleaved=True),
    "packed_blocks": Shape.layers(1, 24576),
    "two_groups": Shape(((2048, 2048),) * 3, (whole((0, 2048), (1, 2048)), whole((2, 1000)))),
    "shared_tensors": Shape(((8192, 8192),) * 2, (whole((0, 8192), (1, 8192)), whole((0, 4096), (1, 2048)))),
    "padded": Shape(((4096, 6144),) * 2, (whole((0, 3000), (1, 2056)), whole((1, 1000)))),
    "mla": Shape.layers(1, 1152),
    "head_shards": Shape(((1536, 2048),) * 2, (runs((0, 0, 768), (1, 0, 768)), runs((0, 768, 768), (1, 768, 768)))),
    "direct_blocks": Shape.layers(1, 8192, direct=True),
    "direct_per_layer": Shape.layers(2, 4096, stride=8192, direct=True),
    "direct_head_shards": Shape(
        ((16384, 16384),), (runs((0, 0, 4096), (0, 8192, 4096)), runs((0, 4096, 4096), (0, 12288, 4096))), direct=True
    ),
}


def allocate(shape: Shape, device: torch.device | None = None) -> list[torch.Tensor]:
    """KV tensors as vLLM hands them over: int8 of shape (NUM_BLOCKS, page), page-aligned, zero."""
    if shape.interleaved:
        rows = _area(NUM_BLOCKS * sum(page for page, _ in shape.tensors), device).view(NUM_BLOCKS, -1)
        return list(rows.split([page for page, _ in shape.tensors], dim=1))
    return [_area(NUM_BLOCKS * stride, device).view(NUM_BLOCKS, stride)[:, :page] for page, stride in shape.tensors]


def _area(size_bytes: int, device: torch.device | None) -> torch.Tensor:
    area = torch.zeros(size_bytes + PAGE_BYTES, dtype=torch.int8, device=device)
    start = -area.data_ptr() % PAGE_BYTES
    return area[start : start + size_bytes]


def layout_of(shape: Shape, tensors: Sequence[torch.Tensor]) -> KVLayout:
    regions = [RegionSpec(tensor.data_ptr(), NUM_BLOCKS, tensor.stride(0), tensor.shape[1]) for tensor in tensors]
    return KVLayout(tuple(regions), shape.groups, CHUNK_BLOCKS)


def kv_cache(shape: Shape, seed: int) -> tuple[list[torch.Tensor], list[Bytes], KVLayout]:
    """KV tensors full of noise, the same as numpy arrays of shape (NUM_BLOCKS, page), and their layout."""
    rng, tensors = np.random.default_rng(seed), allocate(shape)
    kv = [tensor.view(torch.uint8).numpy() for tensor in tensors]
    for rows in kv:
        rows[:] = rng.integers(0, 256, rows.shape, dtype=np.uint8)
    return tensors, kv, layout_of(shape, tensors)


def rank_memory(
    tensors: Sequence[torch.Tensor], layout: KVLayout, *, device: Device | None = None, **options: Any
) -> RankMemory:
    """``device``: by default that of the tensors."""
    return RankMemory(tensors, layout, device or device_of(tensors[0]), **options)


class Driven:
    """The base of rigs: a KV cache, slots of tiers, and jobs to wait for."""

    engine: Any

    def __init__(
        self, shape: str | Shape, seed: int = 1, cache: tuple[list[torch.Tensor], list[Bytes], KVLayout] | None = None
    ) -> None:
        """``cache``: instead of a new ``kv_cache``."""
        self.shape = SHAPES[shape] if isinstance(shape, str) else shape
        self.tensors, self.kv, self.layout = cache or kv_cache(self.shape, seed)
        """``kv``: what each tensor holds or must hold, of shape (NUM_BLOCKS, page)."""
        self.slot_bytes = max(self.layout.slot_bytes(group) for group in range(len(self.layout.groups)))
        """Slots have one size, so that chunks of any group fit."""
        self.results: dict[int, Completion] = {}

    def close(self) -> None:
        """Close the engine, and all that is the rig's."""
        raise NotImplementedError

    def key(self, number: int, group: int = 0) -> Key:
        return Key(number.to_bytes(32, "little") + group.to_bytes(4, "big"))

    def location(self, slot: int) -> Location:
        return Location(0, slot * self.slot_bytes, self.slot_bytes)

    def chunk(
        self, number: int, blocks: Iterable[int], *, group: int = 0, first: int = 0, slot: int | None = None
    ) -> Chunk:
        """Chunk ``number`` rests in slot ``number`` by default."""
        location = self.location(number if slot is None else slot)
        return Chunk(self.key(number, group), location, group, np.array(list(blocks), dtype=np.int32), first)

    def blocks(self, blocks: Sequence[int], group: int = 0) -> Bytes:
        """A copy of these blocks of ``kv``, as rows of a payload."""
        columns = [
            self.kv[tensor][list(blocks), offset : offset + length]
            for tensor, offset, length in self.shape.groups[group].refs
        ]
        return np.concatenate(columns, axis=1)

    def bytes_of(self, blocks: Sequence[int], group: int = 0) -> bytes:
        """The expected payload of these blocks."""
        return self.blocks(blocks, group).tobytes()

    def wipe(self, value: int = 0) -> None:
        for rows in self.kv:
            rows[:] = value

    def poll(self) -> None:
        """Take ended jobs. A job that ends twice is an error."""
        for result in self.engine.finished():
            assert result.job_id not in self.results, f"job {result.job_id} ended twice"
            self.results[result.job_id] = result

    def until(self, condition: Callable[[], bool], timeout_s: float = DEADLINE_S) -> None:
        def polled() -> bool:
            self.poll()
            return condition()

        until(polled, timeout_s)

    def collect(self, job_id: int, timeout_s: float = DEADLINE_S) -> Completion:
        self.until(lambda: job_id in self.results, timeout_s)
        return self.results[job_id]

    def store(self, job_id: int, chunks: Sequence[Chunk]) -> tuple[Outcome, ...]:
        self.engine.submit_store(job_id, chunks)
        return self.collect(job_id).outcomes

    def load(self, job_id: int, chunks: Sequence[Chunk]) -> tuple[Outcome, ...]:
        self.engine.submit_load(job_id, chunks)
        return self.collect(job_id).outcomes


RigT = TypeVar("RigT", bound=Driven)


def _alone(memory: RankMemory, shards: list[Shard], paths: Callable[..., Any], options: dict[str, Any]) -> Alone:
    """A rank of one tier with these paths. ``options``: the rank's, the tier's, and those of ``paths``."""
    rank = {name: options.pop(name) for name in ("clock", "load_timeout_s") if name in options}
    tier = {name: options.pop(name) for name in ("tier", "verify", "keys") if name in options}

    def make(table: JobTable) -> TierEngine:
        return TierEngine(paths(TierSetup(table, memory, shards, **tier), **options))

    return Alone(make, tier.get("tier", 0), **rank)


class Rig(Driven):
    """A rank of one tier: a slab, or what ``link`` reaches. ``kv`` are views of the tensors."""

    engine: Alone

    def __init__(
        self,
        directory: Path,
        shape: str | Shape = "per_layer",
        mover: Mover | None = None,
        *,
        slots: int = 64,
        staging_slots: int = 8,
        seed: int = 1,
        slab: Any = None,
        link: Callable[[Mover, Callable[[], float]], Link] | None = None,
        namespace: bytes = NAMESPACE,
        cache: tuple[list[torch.Tensor], list[Bytes], KVLayout] | None = None,
        direct_io: bool = True,
        shard: int = 0,
        host: HostSlab | None = None,
        device: Device | None = None,
        **options: Any,
    ) -> None:
        """``options`` are the engine's, or the rank's."""
        super().__init__(shape, seed, cache)
        if slab is None and link is None:
            extent = align_up(self.slot_bytes * 4, 65536)
            slab = SlabFile(directory / "kv" / "rank.slab", extent * -(-slots // 4), extent, direct_io=direct_io)
            slab.open()
        if self.shape.direct:
            options.setdefault("direct_min_extent_bytes", 4096)
        self.slab: SlabFile | None = slab
        self.mover = mover or CopyMover()
        self.movers = (self.mover,)
        clock = options.get("clock", time.monotonic)
        self.link = link(self.mover, clock) if link is not None else SlabLink(slab, self.mover, clock)
        memory = rank_memory(self.tensors, self.layout, host=host, device=device)
        options["staging_bytes"] = staging_slots * self.slot_bytes
        paths = partial(LinkPaths, link=self.link)
        self.engine = _alone(memory, own_shards(self.layout, namespace, shard), paths, options)

    def close(self) -> None:
        self.engine.close()
        self.mover.close()
        if self.slab is not None:
            self.slab.close()


class MemoryRig(Driven):
    """A rank of a memory tier alone. ``host``: the slab of an earlier rig, with its chunks."""

    engine: Alone

    def __init__(
        self,
        shape: str = "per_layer",
        *,
        slots: int = 16,
        namespace: bytes = NAMESPACE,
        host: HostSlab | None = None,
        device: Device | None = None,
        cache: tuple[list[torch.Tensor], list[Bytes], KVLayout] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(shape, cache=cache)
        self.host = host or HostSlab(memory_bytes=slots * self.slot_bytes, relay_slots=1, slot_bytes=self.slot_bytes)
        memory = rank_memory(self.tensors, self.layout, host=self.host, device=device)
        self.engine = _alone(memory, own_shards(self.layout, namespace), MemoryPaths, options)

    def memory(self, slot: int) -> Bytes:
        """The bytes of a slot."""
        return self.host.slot(slot * self.slot_bytes, self.slot_bytes).memory

    def close(self) -> None:
        self.engine.close(1.0)
        self.host.close()


def until(condition: Any, timeout_s: float = DEADLINE_S) -> None:
    """Poll ``condition`` until it is true."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "waited in vain"
        time.sleep(0.0005)


@contextmanager
def opened(make: Callable[..., RigT]) -> Iterator[Callable[..., RigT]]:
    """Yield ``make``. At the end, end what its rigs' movers hold up, and close the rigs."""
    made: list[RigT] = []

    def build(*arguments: Any, **options: Any) -> RigT:
        made.append(make(*arguments, **options))
        return made[-1]

    try:
        yield build
    finally:
        for mover in (mover for rig in made for mover in getattr(rig, "movers", ())):
            if isinstance(mover, FaultyMover):
                mover.release()
        for rig in made:
            rig.close()


def rigs(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    """A fixture."""
    with opened(partial(Rig, tmp_path)) as make:
        yield make
