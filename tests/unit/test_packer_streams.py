"""Proves, for slots on the host and on the device, the order of what a packer queues: no fence comes before its copy,
blocks are cleared behind the model's writes, and no error leaves anything queued. test_device_ways has what waits for
the model's stream, and what does not.

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
        kernel = getattr(self.packer._kernels[0], name)

        def slowly(*arguments: Any) -> Any:
            before()
            return kernel(*arguments)

        monkeypatch.setattr(self.packer._kernels[0], name, slowly)


@pytest.fixture
def streams() -> Iterator[ThreadedStreams]:
    with ThreadedStreams() as all_of_them:
        yield all_of_them


@pytest.fixture(params=["host", "device"])
def kit(request: pytest.FixtureRequest, streams: ThreadedStreams) -> Kit:
    return Kit(request.param, emulated(streams))


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


class Failing(ThreadedStream):
    """Fails the caller at its first call of one kind, as CUDA does without memory: what came before is queued, and
    comes late.
    """

    def __init__(self, streams: ThreadedStreams, where: str) -> None:
        super().__init__("failing")
        streams.made.append(self)
        self.told = threading.Event()
        super().run(lambda: self.told.wait(0.3))
        self._where = where

    def run(self, work: Callable[[], None]) -> None:
        self._fail("run")
        super().run(work)

    def record(self) -> ThreadedFence:
        self._fail("record")
        return super().record()

    def _fail(self, where: str) -> None:
        if where == self._where:
            self._where = ""
            raise RuntimeError("out of memory")


@pytest.mark.parametrize("side", ["host", "device"])
@pytest.mark.parametrize(
    ("way", "where"),
    [
        ("gather", "run"),
        ("gather", "record"),
        ("scatter", "record"),
        ("finish_images", "record"),
        ("inspect", "record"),
    ],
)
def test_when_a_call_fails_nothing_of_it_is_under_way_any_more(
    side: str, way: str, where: str, streams: ThreadedStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots and blocks are given to others then: what was queued before the failure must not land in them."""
    kit = Kit(side, emulated(streams))
    failing = Failing(streams, where)
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
