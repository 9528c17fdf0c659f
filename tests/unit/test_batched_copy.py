"""Proves on the emulated device: where a batch of copies takes the place of gathering and scattering, the bytes and the
checksums are the same, neighbours are joined, no copy goes over two page-locked pieces, and the order of streams holds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from nixl_offload.engine import batched_copy, bus_packer
from nixl_offload.engine.batched_copy import (
    Addresses,
    copy_on_host,
    cuda_batched_copy,
    find_batched_copy,
)
from nixl_offload.engine.bus_packer import BusPacker
from nixl_offload.engine.kernels.base import Page
from nixl_offload.engine.packer import HostPacker, pages_of
from nixl_offload.engine.streams import READY, Device, HostStreams
from nixl_offload.errors import LayoutError
from nixl_offload.movers.base import MemoryKind
from tests.unit.device_lab import open_lab
from tests.unit.device_rig import ThreadedStreams, emulated, settled
from tests.unit.kv_shapes import SHAPES, allocate, assert_round_trip, layout_of

Bytes = npt.NDArray[np.uint8]
A_WHILE_S = 0.05


@pytest.fixture
def streams() -> Iterator[ThreadedStreams]:
    with ThreadedStreams() as all_of_them:
        yield all_of_them


class Counted:
    """Copies, and keeps what it was asked for."""

    def __init__(self) -> None:
        self.calls: list[tuple[Addresses, Addresses, Addresses]] = []

    def __call__(self, targets: Addresses, sources: Addresses, sizes: Addresses) -> None:
        self.calls.append((targets, sources, sizes))
        copy_on_host(targets, sources, sizes)


def noise(shape: str) -> list[torch.Tensor]:
    tensors = allocate(SHAPES[shape], torch.device("cpu"))
    for tensor in tensors:
        tensor.random_(-128, 127)
    return tensors


@pytest.mark.parametrize("piece_bytes", [1 << 30, 12 << 10])
@pytest.mark.parametrize("shape", list(SHAPES))
def test_bytes_and_sums_are_those_of_the_host(
    streams: ThreadedStreams, monkeypatch: pytest.MonkeyPatch, shape: str, piece_bytes: int
) -> None:
    """Several chunks, in scattered and in consecutive blocks, across borders of page-locked pieces."""
    monkeypatch.setattr(bus_packer, "PIN_PIECE_BYTES", piece_bytes)
    tensors, copy = noise(shape), Counted()
    layout = layout_of(SHAPES[shape], tensors)
    bus = BusPacker(tensors, pages_of(layout), emulated(streams), batched=lambda *_: copy)
    reference = HostPacker([tensor.view(torch.uint8).numpy() for tensor in tensors], pages_of(layout))
    ids = [np.array(part, dtype=np.int32) for part in ([5, 1, 2], [], [7, 8, 9, 10], [40])]
    for group, block_bytes in enumerate(bus._groups.block_bytes):
        area: Bytes = np.zeros((3 + 4 + 1 + 2) * block_bytes + 4096, dtype=np.uint8)
        payloads, begin = [], 64
        for part in ids:
            payloads.append(area[begin : begin + len(part) * block_bytes].reshape(len(part), block_bytes))
            begin += len(part) * block_bytes + 8
        wanted = [np.zeros_like(payload) for payload in payloads]
        sums = reference.gather_many(group, list(zip(ids, wanted, strict=True)), READY).values()
        gathered = bus.gather_many(group, list(zip(ids, payloads, strict=True)), READY)
        settled(gathered)
        for found, right in zip(payloads, wanted, strict=True):
            assert np.array_equal(found, right)
        for some, others in zip(gathered.values(), sums, strict=True):
            assert np.array_equal(some, others)
        back = [np.array(part, dtype=np.int32) for part in ([20, 22, 21], [], [30, 31, 32, 33], [11])]
        before = [tensor.clone() for tensor in tensors]
        settled(bus.scatter_many(group, list(zip(back, payloads, strict=True)), READY))
        found_after = [tensor.clone() for tensor in tensors]
        for tensor, old in zip(tensors, before, strict=True):
            tensor.copy_(old)
        reference.scatter_many(group, list(zip(back, payloads, strict=True)), READY)
        for tensor, after in zip(tensors, found_after, strict=True):
            assert torch.equal(tensor, after)
    for number, (targets, sources, sizes) in enumerate(copy.calls):
        host = sources if number % 2 else targets
        assert (host // piece_bytes == (host + sizes - np.uint64(1)) // piece_bytes).all()


def test_neighbours_are_one_copy(streams: ThreadedStreams) -> None:
    """Consecutive blocks that lie in one piece: a copy for each run, whatever a block has in it."""
    tensors, copy = noise("blhnc"), Counted()
    layout = layout_of(SHAPES["blhnc"], tensors)
    bus = BusPacker(tensors, pages_of(layout), emulated(streams), batched=lambda *_: copy)
    payload = np.zeros((6, bus._groups.block_bytes[0]), dtype=np.uint8)
    settled(bus.gather_many(0, [(np.array([3, 4, 5, 9, 10, 1], dtype=np.int32), payload)], READY))
    ((_, _, sizes),) = copy.calls
    assert (sizes // np.uint64(payload.shape[1])).tolist() == [3, 2, 1]


def test_copies_wait_for_the_model_and_errors_leave_nothing_queued(streams: ThreadedStreams) -> None:
    tensors, copy = noise("blhnc"), Counted()
    layout = layout_of(SHAPES["blhnc"], tensors)
    bus = BusPacker(tensors, pages_of(layout), emulated(streams), batched=lambda *_: copy)
    ids = np.array([1, 2], dtype=np.int32)
    payload = np.zeros((2, bus._groups.block_bytes[0]), dtype=np.uint8)
    with streams.compute.held():
        fence = bus.fence()
        fences = [bus.gather_many(0, [(ids, payload)], fence), bus.scatter_many(0, [(ids, payload.copy())], fence)]
        time.sleep(A_WHILE_S)
        assert not copy.calls
        assert not any(each.done() for each in fences)
    for each in fences:
        settled(each)
    assert len(copy.calls) == 2
    for wrong in ([(np.array([48], dtype=np.int32), payload[:1])], [(ids, payload[:1])], [(ids, payload[:, :-8])]):
        for call in (bus.gather_many, bus.scatter_many):
            with pytest.raises(LayoutError):
                call(0, wrong, READY)
    assert len(copy.calls) == 2


def test_what_the_driver_refuses_is_gathered_from_then_on() -> None:
    """It took the trial's memory, and does not take that of the KV cache: without this no chunk would ever move."""
    tensors, refusals = noise("blhnc"), list[None]()

    def refused(*_: Addresses) -> None:
        refusals.append(None)
        raise RuntimeError("cuMemcpyBatchAsync: CUDA error 1")

    device = Device(torch.device("cpu"), MemoryKind.VRAM, HostStreams())
    bus = BusPacker(tensors, pages_of(layout_of(SHAPES["blhnc"], tensors)), device, batched=lambda *_: refused)
    ids = np.array([1, 2], dtype=np.int32)
    payload = np.zeros((2, bus._groups.block_bytes[0]), dtype=np.uint8)
    with pytest.raises(RuntimeError):
        bus.gather_many(0, [(ids, payload)], READY)
    assert bus.gather_many(0, [(ids, payload)], READY).done()
    assert np.array_equal(payload, tensors[0][[1, 2]].view(torch.uint8).numpy())
    bus.scatter_many(0, [(ids + 2, payload)], READY)
    assert torch.equal(tensors[0][3:5], tensors[0][1:3])
    assert len(refusals) == 1


@pytest.mark.parametrize("shape", ["blhnc", "lbhnc_strided", "hybrid"])
def test_an_engine_goes_on_by_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: str) -> None:
    """Stores and loads through host memory while the model writes."""
    copy = Counted()
    monkeypatch.setattr(bus_packer, "find_batched_copy", lambda *_: copy)
    with open_lab(tmp_path) as lab:
        assert_round_trip(lab.make(None, shape, "host"), lambda: time.sleep(0.005))
    assert copy.calls


@pytest.mark.parametrize("fault", ["", "other bytes", "other blocks", "raises"])
def test_it_is_tried_before_it_is_taken(
    streams: ThreadedStreams, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """What brings other bytes, writes elsewhere or fails is not taken, whatever its speed; once is enough to know."""
    monkeypatch.setattr(batched_copy, "TRIAL_BYTES", 1 << 18)
    monkeypatch.setattr(batched_copy, "PLAIN_SHARE", 0.0001)
    monkeypatch.setattr(batched_copy, "_RATIOS", {})
    calls = 0

    def copy(targets: Addresses, sources: Addresses, sizes: Addresses) -> None:
        nonlocal calls
        calls += 1
        if fault == "raises":
            raise RuntimeError("CUDA error 1")
        if fault == "other bytes":
            sources = sources[::-1]
        if fault == "other blocks" and calls == 2:
            targets = targets - np.uint64(1 << 16)
        copy_on_host(targets, sources, sizes)

    with caplog.at_level(logging.INFO):
        assert batched_copy._is_quick(copy, emulated(streams), 1 << 16) is (not fault)
    assert ("taken" if not fault else "trying them failed") in caplog.text
    before = calls
    assert batched_copy._is_quick(copy, emulated(streams), 1 << 16) is (not fault)
    assert calls == before


def test_where_there_is_no_driver_blocks_are_gathered(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, streams: ThreadedStreams
) -> None:
    """And small pages, and what only plays a device, are not even asked about."""
    monkeypatch.setattr(batched_copy, "_CUDA", "libcuda-that-is-not-there.so.1")
    cuda_batched_copy.cache_clear()
    with caplog.at_level(logging.INFO):
        assert cuda_batched_copy(0) is None
    assert "Copies over the bus are not batched" in caplog.text
    cuda_batched_copy.cache_clear()
    assert find_batched_copy(emulated(streams), [Page(0, 0, 1 << 20)]) is None
