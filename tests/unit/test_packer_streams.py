"""Proves, for slots on the host and on the device, the order of what a packer queues: stores and loads wait for the
model's stream and not for each other, no fence comes before its copy, nothing waits for the device, and no error leaves
anything queued.

The device is emulated: what these say of streams and fences is said of a real one in tests/gpu.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from nixl_offload.chunk.checksum import block_checksums
from nixl_offload.engine import device_packer as packer_module
from nixl_offload.engine.copies import BlockIds, SlotRows
from nixl_offload.engine.device_packer import DevicePacker
from nixl_offload.engine.kernels.torch_kernels import Page
from nixl_offload.engine.streams import READY, Device, Fence
from nixl_offload.errors import LayoutError
from tests.unit.device_rig import ThreadedFence, ThreadedStream, ThreadedStreams, emulated, settled

BLOCKS, LAYERS, PAGE = 16, 2, 512
IDS = np.array([3, 9, 1, 14], dtype=np.int32)
A_WHILE_S = 0.05
"""In which a stream that waits for nothing has long done what was queued."""


class Kit:
    """A packer over a KV cache of zeros, and a payload of four blocks, all of ones, on the host or on the device."""

    def __init__(self, side: str, device: Device) -> None:
        self.tensors = [torch.zeros((BLOCKS, PAGE), dtype=torch.uint8) for _ in range(LAYERS)]
        pages = [[Page(layer, layer * PAGE, PAGE) for layer in range(LAYERS)]]
        self.payload: npt.NDArray[np.uint8] = np.ones((len(IDS), LAYERS * PAGE), dtype=np.uint8)
        self.side = side
        self.packer = DevicePacker(self.tensors, pages, device)

    def fill(self, value: int) -> None:
        for tensor in self.tensors:
            tensor.fill_(value)

    def gather(self, fence: Fence, ids: BlockIds = IDS) -> Fence:
        return self.packer.gather_many(0, self.halves(ids), fence)

    def scatter(self, fence: Fence, ids: BlockIds = IDS) -> Fence:
        return self.packer.scatter_many(0, self.halves(ids), fence)

    def halves(self, ids: BlockIds) -> list[tuple[BlockIds, SlotRows]]:
        """Two chunks."""
        payload: SlotRows = self.payload if self.side == "host" else torch.from_numpy(self.payload)
        return [(ids[:2], payload[:2]), (ids[2:], payload[2:])]

    def blocks(self) -> npt.NDArray[np.uint8]:
        return np.concatenate([tensor.numpy()[IDS] for tensor in self.tensors], axis=1)

    def slow(self, monkeypatch: pytest.MonkeyPatch, name: str, before: Callable[[], object]) -> None:
        """Have a kernel of the group begin with ``before``."""
        kernel = getattr(self.packer._groups.kernels[0], name)

        def slowly(*arguments: Any) -> Any:
            before()
            return kernel(*arguments)

        monkeypatch.setattr(self.packer._groups.kernels[0], name, slowly)


@pytest.fixture
def streams() -> Iterator[ThreadedStreams]:
    with ThreadedStreams() as all_of_them:
        yield all_of_them


@pytest.fixture(params=["host", "device"])
def kit(request: pytest.FixtureRequest, streams: ThreadedStreams) -> Kit:
    return Kit(request.param, emulated(streams))


def test_a_store_sees_what_the_model_writes_before_its_fence(kit: Kit, streams: ThreadedStreams) -> None:
    """And while the model is at it, the caller is free and the store not done."""
    with streams.compute.held():
        streams.compute.run(partial(kit.fill, 7))
        stored = kit.gather(streams.compute_fence())
        time.sleep(A_WHILE_S)
        assert not stored.done()
        assert (kit.payload == 1).all()
    settled(stored)
    assert (kit.payload == 7).all()


def test_a_load_does_not_overtake_what_the_model_writes_before_its_fence(kit: Kit, streams: ThreadedStreams) -> None:
    """Fresh blocks are zeroed by the model's stream: zeros over a load would be wrong tokens."""
    with streams.compute.held():
        streams.compute.run(partial(kit.fill, 0))
        loaded = kit.scatter(streams.compute_fence())
        time.sleep(A_WHILE_S)
        assert not loaded.done()
        assert (kit.blocks() == 0).all()
    settled(loaded)
    assert (kit.blocks() == 1).all()


@pytest.mark.parametrize("way", ["gather", "scatter"])
def test_no_fence_is_done_before_its_copy(kit: Kit, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slot would be written to storage, or the request answered, half copied."""
    begin = threading.Event()
    for name in ("gather", "scatter"):
        kit.slow(monkeypatch, name, lambda: begin.wait(20.0))
    copied = getattr(kit, way)(READY)
    time.sleep(A_WHILE_S)
    assert not copied.done()
    begin.set()
    settled(copied)
    assert (kit.blocks() == kit.payload).all()


def test_sums_wait_for_the_model_and_only_where_they_must(streams: ThreadedStreams) -> None:
    """The sums of a store go behind its fence; those of a load that has come wait for no store."""
    kit = Kit("host", emulated(streams))
    old = block_checksums(np.zeros((len(IDS), LAYERS * PAGE), dtype=np.uint8))
    new = block_checksums(np.full((len(IDS), LAYERS * PAGE), 7, dtype=np.uint8))
    with streams.compute.held():
        streams.compute.run(partial(kit.fill, 7))
        of_store = kit.packer.sums(0, [IDS], streams.compute_fence())
        of_load = kit.packer.sums(0, [IDS], READY)
        settled(of_load)
        assert (of_load.values()[0] == old).all()
        assert not of_store.done()
    settled(of_store)
    assert (of_store.values()[0] == new).all()


def test_blocks_are_cleared_behind_the_fence(streams: ThreadedStreams) -> None:
    """Only the blocks that are named, and not before the model has written to them."""
    kit = Kit("host", emulated(streams))
    kit.fill(1)
    with streams.compute.held():
        streams.compute.run(partial(kit.fill, 7))
        cleared = kit.packer.clear(0, IDS[:2], streams.compute_fence())
        assert not cleared.done()
    settled(cleared)
    assert not kit.blocks()[:2].any()
    assert (kit.blocks()[2:] == 7).all()
    with pytest.raises(LayoutError):
        kit.packer.clear(0, np.array([-1], dtype=np.int32), READY)


def test_headers_and_inspections_wait_for_no_step(streams: ThreadedStreams) -> None:
    """Another chunk's gather, or scatter, may be waiting for the model meanwhile."""
    kit = Kit("device", emulated(streams))
    slot, headers = torch.zeros(8192, dtype=torch.uint8), np.full((1, 4096), 5, dtype=np.uint8)
    with streams.compute.held():
        waiting = [kit.gather(streams.compute_fence()), kit.scatter(streams.compute_fence())]
        settled(kit.packer.finish_images(headers, [slot], [[]]))
        settled(kit.packer.inspect(0, [slot], [slot[4096:].view(4, 1024)])[1])
        assert not any(fence.done() for fence in waiting)
    for fence in waiting:
        settled(fence)


class Failing(ThreadedStream):
    """Fails the caller at its n-th call of one kind, as CUDA does without memory: what came before is queued, and comes
    late.
    """

    def __init__(self, streams: ThreadedStreams, where: str, at: int) -> None:
        super().__init__("failing")
        streams.made.append(self)
        self.told = threading.Event()
        super().run(lambda: self.told.wait(0.3))
        self._where, self._left = where, at

    def run(self, work: Callable[[], None]) -> None:
        self._count("run")
        super().run(work)

    def record(self) -> ThreadedFence:
        self._count("record")
        return super().record()

    def _count(self, where: str) -> None:
        self._left -= where == self._where
        if self._left == 0:
            self._left = -1
            raise RuntimeError("out of memory")


@pytest.mark.parametrize("side", ["host", "device"])
@pytest.mark.parametrize(
    ("way", "where", "at"),
    [
        ("gather", "run", 2),
        ("gather", "record", 1),
        ("scatter", "run", 2),
        ("scatter", "record", 1),
        ("finish_images", "record", 1),
        ("inspect", "record", 1),
    ],
)
def test_when_a_call_fails_nothing_of_it_is_under_way_any_more(
    side: str, way: str, where: str, at: int, streams: ThreadedStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots and blocks are given to others then: what was queued before the failure must not land in them."""
    monkeypatch.setattr(packer_module, "SCRATCH_BYTES", 1)
    kit = Kit(side, emulated(streams))
    failing = Failing(streams, where, at)
    for name in ("_out", "_in", "_beside"):
        monkeypatch.setattr(kit.packer, name, failing)
    slot, headers = torch.zeros(8192, dtype=torch.uint8), np.full((1, 4096), 5, dtype=np.uint8)
    calls: dict[str, Callable[[], object]] = {
        "gather": lambda: kit.gather(READY),
        "scatter": lambda: kit.scatter(READY),
        "finish_images": lambda: kit.packer.finish_images(headers, [slot], [[slice(4096, 5000)]]),
        "inspect": lambda: kit.packer.inspect(0, [slot], []),
    }
    with pytest.raises(RuntimeError, match="out of memory"):
        calls[way]()
    memory = (kit.payload, kit.blocks(), slot.numpy())
    then = [each.copy() for each in memory]
    failing.told.set()
    failing.synchronize()
    now = (kit.payload, kit.blocks(), slot.numpy())
    assert all((here == there).all() for here, there in zip(now, then, strict=True))


def test_an_error_on_the_device_is_told_by_every_fence_behind_it(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never by a fence that is done: the copy did not happen."""

    def broken() -> None:
        raise RuntimeError("an illegal address")

    kit.slow(monkeypatch, "gather", broken)
    first, second = kit.gather(READY), kit.gather(READY)
    for fence in (first, second):
        with pytest.raises(RuntimeError, match="out of order"):
            settled(fence)
    assert (kit.payload == 1).all()
