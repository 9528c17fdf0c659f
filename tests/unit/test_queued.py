"""Proves of what is queued on a device: checksums are told when they have arrived, block ids are checked before
anything is queued, and when a call fails nothing of it is under way. The device is emulated.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nixl_offload.engine import queued
from nixl_offload.engine.kernels.base import Page
from nixl_offload.engine.queued import DeviceGroups, QueuedSums, keep, taken_back
from nixl_offload.engine.streams import Device, HostStreams
from nixl_offload.errors import LayoutError
from nixl_offload.movers.base import MemoryKind
from tests.unit.device_rig import ThreadedStreams, emulated, settled

BLOCKS = 9
GPU = Device(torch.device("cuda"), MemoryKind.VRAM, HostStreams())
"""Whose memory nobody touches here."""


@pytest.fixture
def streams() -> Iterator[ThreadedStreams]:
    with ThreadedStreams() as made:
        yield made


def groups(device: Device) -> DeviceGroups:
    """Of two tensors, the second of which has a block less, and a group without pages."""
    tensors = [torch.zeros((BLOCKS - at, 64), dtype=torch.int8) for at in range(2)]
    return DeviceGroups(tensors, [[Page(0, 0, 64), Page(1, 64, 32)], [], [Page(0, 0, 64)]], device)


def test_checksums_come_behind_their_fence_and_not_before(streams: ThreadedStreams) -> None:
    device, stream = emulated(streams), streams.new()
    with streams.compute.held():
        fence = streams.compute.record()
        ready = []
        sums = QueuedSums.begin(stream, device, 2, lambda: torch.tensor([len(ready), -1], dtype=torch.int64), fence)
        time.sleep(0.02)  # what does not wait is done by now
        ready.append(None)
        assert not sums.done()
        with pytest.raises(RuntimeError, match="before the device had them"):
            sums.values()
    settled(sums)
    assert sums.values().tolist() == [1, 2**64 - 1]
    assert sums.values().dtype == np.uint64


def test_when_a_call_fails_what_it_queued_is_over(streams: ThreadedStreams) -> None:
    """Whoever gave it memory may use that again."""
    stream, copied = streams.new(), []

    def call() -> None:
        with taken_back(stream):
            stream.run(lambda: copied.append(1))
            raise KeyError("a bug")

    with pytest.raises(KeyError, match="a bug"):
        call()
    assert copied == [1]
    with taken_back(stream):
        stream.run(lambda: copied.append(2))


def test_every_block_that_there_is_in_all_tensors_of_a_group_can_be_named_and_no_other(
    streams: ThreadedStreams,
) -> None:
    each = groups(emulated(streams))
    found = each.ids(0, np.array([0, 3], np.int32), np.array([BLOCKS - 2], np.int32))
    assert (found.tolist(), found.dtype) == ([0, 3, BLOCKS - 2], torch.int64)
    assert each.ids(0, np.array([4], np.int32)).tolist() == [4]
    assert each.ids(2, np.array([BLOCKS - 1], np.int32)).tolist() == [BLOCKS - 1]
    assert each.ids(0).tolist() == each.ids(0, np.empty(0, np.int32)).tolist() == []
    for bad in ([0, -1], [BLOCKS - 1]):
        with pytest.raises(LayoutError, match="outside a KV cache of 8 blocks"):
            each.ids(0, np.array(bad, np.int32))
    with pytest.raises(LayoutError, match="outside a KV cache of 0 blocks"):
        each.ids(1, np.array([0], np.int32))
    assert torch.equal(each.upload(found), found)


def test_rows_are_as_long_as_the_blocks_of_their_group(streams: ThreadedStreams) -> None:
    each = groups(emulated(streams))
    assert each.block_bytes == [96, 0, 64]
    assert sorted(each.kernels) == [0, 2]
    each.check_width(0, 96)
    with pytest.raises(LayoutError, match="rows of 95 bytes for blocks of 96"):
        each.check_width(0, 95)


@pytest.mark.parametrize(
    ("names", "is_gpu", "is_slow"),
    [
        (("triton", "triton"), True, False),
        (("triton", "torch"), True, True),
        (("torch", "torch"), True, True),
        (("torch", "torch"), False, False),
    ],
)
def test_torchs_checksums_are_slow_on_a_device_alone(
    monkeypatch: pytest.MonkeyPatch, streams: ThreadedStreams, names: tuple[str, str], is_gpu: bool, is_slow: bool
) -> None:
    """One group's are enough. Then the host sums, and the autotuner leaves the device's path out."""
    made = iter(names)
    monkeypatch.setattr(queued, "open_kernels", lambda *_: SimpleNamespace(name=next(made)))
    assert groups(GPU if is_gpu else emulated(streams)).sums_slowly is is_slow


def test_memory_of_a_gpu_goes_back_to_the_allocator_behind_the_work_that_is_queued(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That of the host goes at once: work there is over when its call returns."""
    kept = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: ("the stream of", device))
    keep(SimpleNamespace(is_cuda=True, device="cuda:1", record_stream=kept.append))  # type: ignore[arg-type]
    assert kept == [("the stream of", "cuda:1")]
    keep(torch.zeros(1))
