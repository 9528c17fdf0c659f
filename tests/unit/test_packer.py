"""Proves, of the host's packer and of a device's: pages of every size, stride and alignment are copied exactly, many
chunks a call, and nothing beside them; ids outside the KV cache and rows of wrong shapes are refused. Chunks packed on
a device lie in its slots as the host would have laid them, headers, zeros and checksums included. No fence comes before
its copy.

The device is emulated in host memory; tests/gpu runs the same on a real one. test_device_ways has what waits for the
model's stream, and what does not.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import xxhash

from nixl_offload.chunk.checksum import block_checksums
from nixl_offload.chunk.header import HEADER_BYTES
from nixl_offload.engine import device_packer
from nixl_offload.engine.device_packer import DevicePacker
from nixl_offload.engine.kernels.torch_kernels import Page
from nixl_offload.engine.packer import HostPacker
from nixl_offload.engine.staging import Slot, device_pool
from nixl_offload.engine.streams import READY, Device
from nixl_offload.errors import LayoutError
from nixl_offload.movers.base import MemoryKind
from tests.unit.device_rig import ThreadedDevice, devices, settled

Bytes = npt.NDArray[np.uint8]
BLOCKS = 24
AT_ONCE = Device(torch.device("cpu"), MemoryKind.VRAM)
"""A device whose work is done when it is queued."""
A_WHILE_S = 0.05
"""A time after which a stream that waits for nothing has finished its queue."""
IDS = {
    "scattered": [[7, 2, 3, 19], [23, 0, 11, 12], [5, 6, 8, 9]],
    "runs": [[4, 5, 6, 7], [8, 9, 10, 11], [20, 21, 22, 23]],
    "single": [[9], [3], [14]],
    "stack": [[9], [3], [14]],
}
CASES: dict[str, tuple[list[int], int, int, int]] = {
    # the pages of a block's layers; from one row of a tensor to the next; how far from a page the first lies; offset
    "small pages, aligned": ([1152] * 3, 1152, 0, 0),
    "small pages, odd lengths": ([1001, 333, 97], 1001, 0, 0),
    "small pages, odd length": ([1000] * 3, 1000, 0, 0),
    "small pages, odd address": ([1024] * 2, 1024, 8, 0),
    "small pages, odd addresses and strides": ([1024] * 2, 1033, 3, 0),
    "parts of pages": ([512, 2048], 4096, 0, 0),
    "heads in the midst of a page": ([1024, 700], 4096, 0, 512),
    "pages of several lengths": ([3000, 2048, 96], 4096, 0, 0),
    "large pages": ([65536] * 2, 65536 + 4096, 0, 0),
    "one layer": ([4096], 4096, 0, 0),
}


device = pytest.fixture(devices)


def noise(length: int, seed: int) -> Bytes:
    area: Bytes = np.frombuffer(mmap.mmap(-1, length), dtype=np.uint8)
    area[:] = np.random.default_rng(seed).integers(0, 256, length, dtype=np.uint8)
    return area


def kv_cache(case: str, where: torch.device) -> tuple[list[torch.Tensor], list[Bytes], list[Page]]:
    """KV tensors on a device, arrays of the same bytes on the host, and the pages of their one group."""
    sizes, stride, shift, offset = CASES[case]
    tensors, arrays = list[torch.Tensor](), list[Bytes]()
    for seed in range(len(sizes)):
        area = noise(BLOCKS * stride + 16, seed)
        tensor = torch.tensor(area, device=where)[shift : shift + BLOCKS * stride]
        tensors.append(tensor.view(BLOCKS, stride)[:, : offset + max(sizes)])
        arrays.append(area[shift : shift + BLOCKS * stride].reshape(BLOCKS, stride)[:, : offset + max(sizes)])
    return tensors, arrays, [Page(n, sum(sizes[:n]), size, offset) for n, size in enumerate(sizes)]


def packer_of(kind: str, tensors: list[torch.Tensor], pages: list[Page], monkeypatch: pytest.MonkeyPatch) -> Any:
    if kind == "host":
        return HostPacker([tensor.numpy() for tensor in tensors], [pages])
    if kind == "device, short pieces":  # wherever page-locked pieces end
        monkeypatch.setattr(device_packer, "PIN_PIECE_BYTES", 4096)
    return DevicePacker(tensors, [pages], AT_ONCE)


@pytest.mark.parametrize("kind", ["host", "device", "device, short pieces"])
@pytest.mark.parametrize("ids", IDS)
@pytest.mark.parametrize("case", CASES)
def test_chunks_are_copied_exactly_and_nothing_beside_them(
    case: str, ids: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many chunks in one call, into slots that lie apart; summed where they lie; then back into other blocks; then
    cleared.
    """
    tensors, before, pages = kv_cache(case, AT_ONCE.torch_device)
    packer = packer_of(kind, tensors, pages, monkeypatch)
    arrays = [np.array(each, dtype=np.int32) for each in IDS[ids]]
    count = len(arrays[0])
    slab = noise(3 * (count * packer.block_bytes[0] + 4096), 77).reshape(3, -1)
    headers = slab[:, :4096].copy()
    payloads = [slot[4096:].reshape(count, -1) for slot in slab]
    if ids == "stack":
        arrays, payloads = [np.concatenate(arrays)], [slab[:, 4096:]]
        headers[1:] *= kind == "host"  # a device copies zeros with the blocks
    gathered = packer.gather_many(0, list(zip(arrays, payloads, strict=True)), READY)
    assert gathered.done()
    for each, payload in zip(arrays, payloads, strict=True):
        wanted = [before[page.tensor][each, page.offset : page.offset + page.bytes] for page in pages]
        assert (payload == np.concatenate(wanted, axis=1)).all()
    assert (slab[:, :4096] == headers).all()
    sums = [[xxhash.xxh3_64_intdigest(row) for row in payload] for payload in payloads]
    assert np.array(gathered.values()).tolist() == np.array(packer.sums(0, arrays, READY).values()).tolist() == sums

    back = [(arrays[(n + 1) % len(arrays)], payload) for n, payload in enumerate(payloads)]
    assert packer.scatter_many(0, back, READY).done()
    for block_ids, payload in back:
        for page in pages:
            columns = slice(page.column, page.column + page.bytes)
            before[page.tensor][block_ids, page.offset : page.offset + page.bytes] = payload[:, columns]
    assert all((tensor.numpy() == other).all() for tensor, other in zip(tensors, before, strict=True))
    packer.clear(0, arrays[0], READY)
    for page in pages:
        before[page.tensor][arrays[0], page.offset : page.offset + page.bytes] = 0
    assert all((tensor.numpy() == other).all() for tensor, other in zip(tensors, before, strict=True))


@pytest.mark.parametrize("kind", ["host", "device"])
@pytest.mark.parametrize("ids", [[-1, 2], [0, BLOCKS], [2**31 - 1, 0]])
def test_ids_outside_the_kv_cache_are_refused_before_anything_is_copied(
    kind: str, ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The group's smallest tensor sets the limit: memory after it would be read or written."""
    tensors = [torch.from_numpy(noise(blocks * 4096, blocks).reshape(-1, 4096)) for blocks in (BLOCKS, BLOCKS + 8)]
    packer = packer_of(kind, tensors, [Page(0, 0, 4096), Page(1, 4096, 4096)], monkeypatch)
    payloads = np.zeros((2, 2, 8192), dtype=np.uint8)
    before = [tensor.clone() for tensor in tensors]
    parts = [(np.array([0, 1], dtype=np.int32), payloads[0]), (np.array(ids, dtype=np.int32), payloads[1])]
    for call in (packer.gather_many, packer.scatter_many):
        with pytest.raises(LayoutError, match="block ids"):
            call(0, parts, READY)
    assert not payloads.any()
    assert all((tensor == old).all() for tensor, old in zip(tensors, before, strict=True))


# -- slots on a device ----------------------------------------------------------------------------------------------


def rows_of(slot: Slot[Any], count: int, block_bytes: int, first: int = 0) -> torch.Tensor:
    begin = HEADER_BYTES + first * block_bytes
    return slot.memory[begin : begin + count * block_bytes].view(count, block_bytes)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("counts", [[5], [5, 2, 1, 5]], ids=["alone", "batch"])
def test_chunks_lie_in_their_slots_as_on_the_host_and_come_back(
    case: str, first: int, counts: list[int], device: Device
) -> None:
    """Gathered, finished and inspected, then scattered into other blocks: bytes and sums equal the host's at each step,
    for whole chunks and for tails.
    """
    tensors, arrays, pages = kv_cache(case, device.torch_device)
    reference, packer = HostPacker(arrays, [pages]), DevicePacker(tensors, [pages], device)
    block_bytes = sum(page.bytes for page in pages)
    ids = np.split(np.random.default_rng(3).permutation(BLOCKS)[: sum(counts)].astype(np.int32), np.cumsum(counts)[:-1])
    ends = [HEADER_BYTES + (first + count) * block_bytes for count in counts]
    pool = device_pool(slot_bytes=max(ends) + 300, budget_bytes=8 << 20, device=device)
    slots = [pool.acquire() for _ in range(len(counts) + 1)]  # the last slot belongs to no chunk
    images = [noise(pool.slot_bytes, 50 + number) for number in range(len(slots))]
    for slot, image in zip(slots, images, strict=True):
        slot.memory.copy_(torch.from_numpy(image))

    def assert_images() -> None:
        for slot, image in zip(slots, images, strict=True):
            assert (slot.memory.cpu().numpy() == image).all()

    wanted = [np.empty((count, block_bytes), dtype=np.uint8) for count in counts]
    reference.gather_many(0, list(zip(ids, wanted, strict=True)), READY)
    right = np.concatenate([block_checksums(payload) for payload in wanted])
    rows = [rows_of(slot, count, block_bytes, first) for slot, count in zip(slots, counts, strict=False)]
    sums = packer.gather_many(0, list(zip(ids, rows, strict=True)), device.compute_fence())
    settled(sums)
    assert (np.concatenate(sums.values()) == right).all()
    for image, payload, end in zip(images, wanted, ends, strict=False):
        image[end - payload.size : end] = payload.reshape(-1)
    assert_images()

    headers = noise(len(counts) * HEADER_BYTES, 52).reshape(-1, HEADER_BYTES)
    clear = [[slice(HEADER_BYTES, HEADER_BYTES + first * block_bytes), slice(end, end + 200)] for end in ends]
    memories = [slot.memory for slot in slots[:-1]]
    settled(packer.finish_images(headers, memories, clear))
    for image, header, ranges in zip(images, headers, clear, strict=False):
        image[:HEADER_BYTES] = header
        for part in ranges:
            image[part] = 0
    assert_images()

    come, found = packer.inspect(0, memories, rows)
    settled(found)
    assert (come == headers).all()
    assert (np.concatenate(found.values()) == right).all()

    targets = [((each + 9) % BLOCKS).astype(np.int32) for each in ids]
    settled(packer.scatter_many(0, list(zip(targets, rows, strict=True)), device.compute_fence()))
    reference.scatter_many(0, list(zip(targets, wanted, strict=True)), READY)
    assert all((tensor.cpu().numpy() == array).all() for tensor, array in zip(tensors, arrays, strict=True))
    assert_images()


def test_rows_that_do_not_fit_their_blocks_are_refused(device: Device) -> None:
    def rows(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.uint8, device=device.torch_device)

    two, slot = np.array([0, 1], dtype=np.int32), rows(8192)
    packer = DevicePacker([rows(4, 512)], [[Page(0, 0, 512)]], device)
    for shape in ((2, 511), (3, 512)):
        for call in (packer.gather_many, packer.scatter_many):
            with pytest.raises(LayoutError, match="rows"):
                call(0, [(two, rows(*shape))], READY)
    for first in (511, 512):
        with pytest.raises(LayoutError, match="511"):
            packer.inspect(0, [slot, slot], [rows(2, first), rows(2, 511)])


@pytest.mark.parametrize(
    ("is_gpu", "name", "is_slow"), [(True, "triton", False), (True, "torch", True), (False, "torch", False)]
)
def test_torchs_checksums_are_slow_on_a_real_device_alone(
    monkeypatch: pytest.MonkeyPatch, device: Device, is_gpu: bool, name: str, is_slow: bool
) -> None:
    """One such group is enough. Then the host sums, and chunks go through host memory."""
    made = iter(["triton", name])
    monkeypatch.setattr(device_packer, "open_kernels", lambda *_: SimpleNamespace(name=next(made)))
    where = Device(torch.device("cuda"), MemoryKind.VRAM) if is_gpu else device
    pages = [[Page(0, 0, 64)], [], [Page(0, 0, 32)]]
    assert DevicePacker([torch.zeros((9, 64), dtype=torch.int8)], pages, where).sums_slowly is is_slow


def test_memory_of_a_gpu_goes_back_to_the_allocator_behind_the_work_that_is_queued(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Host memory is freed at once: work there has ended when its call returns."""
    kept: list[object] = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: ("the stream of", device))
    device_packer.keep(SimpleNamespace(is_cuda=True, device="cuda:1", record_stream=kept.append))  # type: ignore[arg-type]
    assert kept == [("the stream of", "cuda:1")]
    device_packer.keep(torch.zeros(1))


# -- order -----------------------------------------------------------------------------------------------------------


SOME = np.array([3, 9, 1, 14], dtype=np.int32)
LAYERS, PAGE = 2, 512


class Kit:
    """A packer over a KV cache of zeros, and a payload of four blocks, all of ones, on the host or on the device."""

    def __init__(self, side: str, device: Device) -> None:
        self.tensors = [torch.zeros((BLOCKS, PAGE), dtype=torch.uint8) for _ in range(LAYERS)]
        pages = [[Page(layer, layer * PAGE, PAGE) for layer in range(LAYERS)]]
        self.payload: npt.NDArray[np.uint8] = np.ones((len(SOME), LAYERS * PAGE), dtype=np.uint8)
        self.side = side
        self.packer = DevicePacker(self.tensors, pages, device)

    def fill(self, value: int) -> None:
        for tensor in self.tensors:
            tensor.fill_(value)

    def run(self, way: str) -> Any:
        """Gather or scatter two chunks."""
        payload: Any = self.payload if self.side == "host" else torch.from_numpy(self.payload)
        return getattr(self.packer, f"{way}_many")(0, [(SOME[:2], payload[:2]), (SOME[2:], payload[2:])], READY)

    def blocks(self) -> npt.NDArray[np.uint8]:
        return np.concatenate([tensor.numpy()[SOME] for tensor in self.tensors], axis=1)

    def slow(self, monkeypatch: pytest.MonkeyPatch, name: str, before: Callable[[], object]) -> None:
        """Make a kernel of the group call ``before`` first."""
        kernel = getattr(self.packer._kernels[0], name)

        def slowly(*arguments: Any) -> Any:
            before()
            return kernel(*arguments)

        monkeypatch.setattr(self.packer._kernels[0], name, slowly)


@pytest.fixture(params=["host", "device"])
def kit(request: pytest.FixtureRequest, device: Device) -> Kit:
    return Kit(request.param, device)


@pytest.mark.parametrize("way", ["gather", "scatter"])
def test_no_fence_is_done_before_its_copy(kit: Kit, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a half-copied slot would be written to storage, or its request answered."""
    begin = threading.Event()
    for name in ("gather", "scatter"):
        kit.slow(monkeypatch, name, lambda: begin.wait(20.0))
    copied = kit.run(way)
    time.sleep(A_WHILE_S)
    assert not copied.done()
    if way == "gather":
        with pytest.raises(RuntimeError, match="before their bytes were there"):
            copied.values()
    begin.set()
    settled(copied)
    assert (kit.blocks() == kit.payload).all()


def test_blocks_are_cleared_behind_the_fence(device: ThreadedDevice) -> None:
    """Only the named blocks, and only after the model has written to them."""
    kit = Kit("host", device)
    kit.fill(1)
    with device.compute.held():
        device.compute.run(partial(kit.fill, 7))
        cleared = kit.packer.clear(0, SOME[:2], device.compute_fence())
        assert not cleared.done()
    settled(cleared)
    assert not kit.blocks()[:2].any()
    assert (kit.blocks()[2:] == 7).all()
    with pytest.raises(LayoutError):
        kit.packer.clear(0, np.array([-1], dtype=np.int32), READY)


def test_an_error_on_the_device_is_told_by_every_fence_behind_it(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    """No such fence is ever done, because the copy did not happen."""

    def broken() -> None:
        raise RuntimeError("an illegal address")

    kit.slow(monkeypatch, "gather", broken)
    first, second = kit.run("gather"), kit.run("gather")
    for fence in (first, second):
        with pytest.raises(RuntimeError, match="out of order"):
            settled(fence)
    assert (kit.payload == 1).all()
