"""The rig of tests of transfers with a device, whether host memory plays the device or a real one is there.

The *model* is a function that queues work on the compute stream. Every byte that it writes, and every byte that a load
must have brought, is kept on the host in ``kv``, so a comparison covers all of KV memory, and finds bytes that nothing
was to touch. Threading: the test's thread is the model's and the engine's caller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from nixl_offload.chunk.layout import KVLayout
from nixl_offload.engine.device_packer import DevicePacker
from nixl_offload.engine.image import TransferPath
from nixl_offload.engine.staging import SlotPool
from nixl_offload.engine.streams import Device
from nixl_offload.errors import MoverError
from nixl_offload.movers.base import MemoryId, MemoryKind, MemoryRegion, Mover
from nixl_offload.movers.threaded import CopyMover
from nixl_offload.types import Outcome
from tests.contract.suites.faulty_mover import Fault, FaultyMover
from tests.unit.device_rig import ThreadedDevice, ThreadedStream
from tests.unit.engine_rig import NUM_BLOCKS, SHAPES, Bytes, Rig, Shape, allocate, layout_of, opened, until

NEVER_DIRECT = 1 << 60
Way = Literal["direct", "device", "host"]


def blank(shape: Shape, device: Device) -> tuple[list[torch.Tensor], list[Bytes], KVLayout]:
    """KV tensors of zeros on a device, arrays of the same bytes on the host, and the layout."""
    tensors = allocate(shape, device.torch_device)
    zeros: list[Bytes] = [np.zeros((NUM_BLOCKS, page), dtype=np.uint8) for page, _ in shape.tensors]
    return tensors, zeros, layout_of(shape, tensors)


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


class DeviceRig(Rig):
    """``kv`` is what KV memory must hold once the model is idle and no load is under way."""

    def __init__(
        self,
        device: Device,
        model: Callable[[Callable[[], None]], object],
        directory: Path,
        mover: Mover,
        shape: str | Shape = "per_layer_pages",
        way: Way = "device",
        *,
        slots: int = 16,
        **options: Any,
    ) -> None:
        """``model`` queues work on the compute stream. ``options``: see ``Rig``."""
        chosen: dict[str, Any] = {
            "direct_min_extent_bytes": 0 if way == "direct" else NEVER_DIRECT,
            "staging": "host" if way == "host" else "device",
        }
        if "cache" not in options:
            chosen["cache"] = blank(SHAPES[shape] if isinstance(shape, str) else shape, device)
        super().__init__(directory, shape, mover, device=device, slots=slots, **chosen | options)
        self.device, self.model, self.slots = device, model, slots
        self._rng = np.random.default_rng(11)
        self._kept: list[torch.Tensor] = []
        is_emulated = device.torch_device.type == "cpu"
        self._uploads: Any = None if is_emulated else torch.cuda.Stream(device.torch_device)

    # -- the model --------------------------------------------------------------------------------------------------

    def write(self, blocks: Sequence[int], value: int | None = None) -> None:
        """Have the model write all layers of ``blocks``: noise, or ``value``. Returns at once."""
        for tensor, kept in zip(self.tensors, self.kv, strict=True):
            shape = (len(blocks), kept.shape[1])
            rows = self._rng.integers(0, 256, shape, dtype=np.uint8) if value is None else np.full(shape, value, "u1")
            kept[list(blocks)] = rows
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

    def expect(self, blocks: Sequence[int], rows: Bytes, group: int = 0) -> None:
        """A load will have put ``rows`` into ``blocks``."""
        column = 0
        for tensor, offset, length in self.shape.groups[group].refs:
            self.kv[tensor][list(blocks), offset : offset + length] = rows[:, column : column + length]
            column += length

    def assert_as_expected(self) -> None:
        """All of KV memory, byte for byte."""
        self.settle_model()
        for index, (tensor, wanted) in enumerate(zip(self.tensors, self.kv, strict=True)):
            found = tensor.cpu().view(torch.uint8).numpy()
            wrong = np.flatnonzero((found != wanted).any(axis=1)).tolist()
            assert not wrong, f"tensor {index}: blocks {wrong} differ"

    # -- the engine -------------------------------------------------------------------------------------------------

    def warm_up(self) -> None:
        """Store and load a chunk of each group, so that nothing is compiled later. It rests in the last slots."""
        for group in range(len(self.shape.groups)):
            chunk = self.chunk(999, [0, 1, 2, 3], group=group, slot=self.slots - 1)
            assert self.store(10_000 + group, [chunk]) == (Outcome.OK,)
            assert self.load(20_000 + group, [chunk]) == (Outcome.OK,)

    def stored(self, number: int = 0, blocks: Sequence[int] = (0, 1, 2, 3)) -> Bytes:
        """Store a chunk of the model's noise, and return its rows."""
        self.write(blocks)
        assert self.store(1000 + number, [self.chunk(number, blocks)]) == (Outcome.OK,)
        return self.blocks(blocks)

    def assert_loaded(self, job: int, blocks: Sequence[int], wanted: Bytes) -> None:
        """The job ends well, with the rows ``wanted`` in ``blocks`` and nothing else changed."""
        assert self.collect(job).outcomes == (Outcome.OK,)
        self.expect(blocks, wanted)
        self.assert_as_expected()

    def claimed(self) -> None:
        """Wait until the pump has begun with whatever was submitted: ``wait`` drops what it has no time for."""
        until(lambda: not any(self.engine.queue.lanes.values()))


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
        wanted = [rig.blocks(blocks, group) for blocks in sources]
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


class Lab(NamedTuple):
    """An emulated device, and what makes rigs over it."""

    device: ThreadedDevice
    make: Callable[..., DeviceRig]


@contextmanager
def open_lab(directory: Path) -> Iterator[Lab]:
    """At the end, release all that hangs, and close all rigs, then the streams."""

    def make(
        mover: Mover | None = None, shape: str | Shape = "per_layer_pages", way: Way = "device", **options: Any
    ) -> DeviceRig:
        """Make a rig that owns ``mover``; None: one that takes any memory. ``options``: see ``DeviceRig``."""
        run = device.compute.run
        return DeviceRig(device, run, directory, mover or DeviceCopyMover(), shape, way, **options)

    with ThreadedDevice() as device, opened(make) as build:
        try:
            yield Lab(device, build)
        finally:
            device.release()


def labs(tmp_path: Path) -> Iterator[Lab]:
    """A fixture."""
    with open_lab(tmp_path) as lab:
        yield lab


def faulty(*faults: Fault) -> FaultyMover:
    """A mover of any memory, with faults."""
    return FaultyMover(DeviceCopyMover(), faults)


def pools_of(rig: DeviceRig) -> Mapping[TransferPath, SlotPool[Any]]:
    """Staging slots and header pages."""
    pools: Mapping[TransferPath, SlotPool[Any]] = rig.engine.paths.link_memory.pools
    return pools


def packer_of(rig: DeviceRig) -> DevicePacker:
    packer = rig.engine.paths.packer
    assert isinstance(packer, DevicePacker)
    return packer


def beside(rig: DeviceRig) -> ThreadedStream:
    """The stream on which headers go to the device and come from it."""
    stream = packer_of(rig)._beside
    assert isinstance(stream, ThreadedStream)
    return stream
