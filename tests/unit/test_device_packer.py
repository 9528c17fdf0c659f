"""Proves: chunks packed on a device lie in its slots as the host would have laid them, headers, zeros and checksums
included, and come back exactly, with nothing beside them touched; numbers that do not fit are refused.

The device is emulated in host memory; tests/gpu runs the same on a real one. The order of things is in
test_packer_streams.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
import torch

from nixl_offload.chunk.checksum import block_checksums
from nixl_offload.chunk.header import HEADER_BYTES
from nixl_offload.engine.device_packer import DevicePacker
from nixl_offload.engine.kernels.base import Page
from nixl_offload.engine.packer import HostPacker
from nixl_offload.engine.queued import page_locked
from nixl_offload.engine.staging import DeviceSlot, DeviceStagingPool
from nixl_offload.engine.streams import READY, Device, Fence
from nixl_offload.errors import LayoutError
from tests.unit.device_rig import ThreadedStreams, emulated, settled

BLOCKS = 24
IDS = np.array([7, 2, 3, 19, 0], dtype=np.int32)
CASES: dict[str, tuple[list[int], int, int]] = {
    # the pages of a block's layers; from one row of a tensor to the next; how far from a word's begin the first lies
    "words": ([1152] * 3, 1152, 0),
    "odd pages": ([1001, 333, 97], 1001, 0),
    "odd addresses and strides": ([1024] * 2, 1033, 3),
    "parts of pages": ([512, 2048], 4096, 0),
    "one layer": ([4096], 4096, 0),
}


@pytest.fixture
def device() -> Iterator[Device]:
    with ThreadedStreams() as streams:
        yield emulated(streams)


def noise(size: int, seed: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


Kit = tuple[list[torch.Tensor], list[npt.NDArray[np.uint8]], list[Page]]


def kv_cache(case: str, device: Device) -> Kit:
    """KV tensors on the device, arrays of the same bytes on the host, and the pages of their one group."""
    sizes, stride, shift = CASES[case]
    tensors, arrays = [], []
    for seed in range(len(sizes)):
        area = noise(BLOCKS * stride + 16, seed)
        on_device = torch.tensor(area, device=device.torch_device)
        for made, memory in ((tensors, on_device), (arrays, area)):
            made.append(memory[shift : shift + BLOCKS * stride].reshape(BLOCKS, stride)[:, : max(sizes)])
    return tensors, arrays, [Page(n, sum(sizes[:n]), size) for n, size in enumerate(sizes)]


def header_page(device: Device, seed: int | None = None) -> npt.NDArray[np.uint8]:
    """Page-locked where the device needs that; of noise, or of zeros."""
    page: npt.NDArray[np.uint8] = page_locked(HEADER_BYTES, torch.uint8, device).numpy()
    page[:] = 0 if seed is None else noise(HEADER_BYTES, seed)
    return page


def ready(device: Device) -> Fence:
    """Behind whatever a test has put on the device."""
    return device.streams.compute_fence()


def one_layer(device: Device) -> DevicePacker:
    tensor = torch.zeros((4, 512), dtype=torch.uint8, device=device.torch_device)
    return DevicePacker([tensor], [[Page(0, 0, 512)]], device)


def acquired(pool: DeviceStagingPool) -> DeviceSlot:
    slot = pool.acquire()
    assert slot is not None
    return slot


def rows_of(slot: DeviceSlot, count: int, block_bytes: int, first: int = 0) -> torch.Tensor:
    begin = HEADER_BYTES + first * block_bytes
    return slot.memory[begin : begin + count * block_bytes].view(count, block_bytes)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("first", [0, 2])
def test_a_chunk_lies_in_its_slot_as_on_the_host_and_comes_back(case: str, first: int, device: Device) -> None:
    """Gathered, finished and inspected, then scattered into other blocks: bytes and sums equal the host's at each step,
    for whole chunks and for tails.
    """
    tensors, arrays, pages = kv_cache(case, device)
    reference, packer = HostPacker(arrays, [pages]), DevicePacker(tensors, [pages], device)
    block_bytes = sum(page.bytes for page in pages)
    end = HEADER_BYTES + (first + len(IDS)) * block_bytes
    pool = DeviceStagingPool(slot_bytes=end + 300, budget_bytes=1 << 20, device=device)
    slot, other = acquired(pool), acquired(pool)
    image, untouched = noise(pool.slot_bytes, 50), noise(pool.slot_bytes, 51)
    slot.memory.copy_(torch.from_numpy(image))
    other.memory.copy_(torch.from_numpy(untouched))
    wanted = np.empty((len(IDS), block_bytes), dtype=np.uint8)
    reference.gather_many(0, [(IDS, wanted)], READY)

    rows = rows_of(slot, len(IDS), block_bytes, first)
    sums = packer.gather(0, IDS, rows, ready(device))
    settled(sums)
    assert sums.values().dtype == np.uint64
    assert (sums.values() == block_checksums(wanted)).all()
    image[end - wanted.size : end] = wanted.reshape(-1)
    assert (slot.memory.cpu().numpy() == image).all()

    header = header_page(device, 52)
    clear = [(HEADER_BYTES, HEADER_BYTES + first * block_bytes), (end, end + 200)]
    settled(packer.finish_image(header, slot.memory, clear))
    image[:HEADER_BYTES] = header
    for begin, stop in clear:
        image[begin:stop] = 0
    assert (slot.memory.cpu().numpy() == image).all()

    come = header_page(device)
    found = packer.inspect(slot.memory, come, rows)
    settled(found)
    assert (come == header).all()
    assert (found.values() == block_checksums(wanted)).all()

    targets = ((IDS + 9) % BLOCKS).astype(np.int32)
    settled(packer.scatter(0, targets, rows, ready(device)))
    reference.scatter_many(0, [(targets, wanted)], READY)
    assert all((tensor.cpu().numpy() == array).all() for tensor, array in zip(tensors, arrays, strict=True))
    assert (slot.memory.cpu().numpy() == image).all()
    assert (other.memory.cpu().numpy() == untouched).all()


def test_groups_of_one_device(device: Device) -> None:
    """Each by its own pages; an inspection finds them by the length of the rows."""
    arrays = [noise(BLOCKS * 2048, seed).reshape(BLOCKS, 2048) for seed in range(3)]
    tensors = [torch.tensor(array, device=device.torch_device).view(torch.int8) for array in arrays]
    groups = [[Page(0, 0, 2048), Page(1, 2048, 2048)], [Page(2, 0, 1000)]]
    packer = DevicePacker(tensors, groups, device)
    slot, come = torch.zeros(HEADER_BYTES, dtype=torch.uint8, device=device.torch_device), header_page(device)
    payloads = [np.concatenate([arrays[0][IDS], arrays[1][IDS]], axis=1), arrays[2][IDS, :1000]]
    for group, wanted in enumerate(payloads):
        rows = torch.zeros(wanted.shape, dtype=torch.uint8, device=device.torch_device)
        settled(packer.gather(group, IDS, rows, ready(device)))
        assert (rows.cpu().numpy() == wanted).all()
        found = packer.inspect(slot, come, rows)
        settled(found)
        assert (found.values() == block_checksums(wanted)).all()


def test_an_inspection_without_rows_brings_the_header_alone(device: Device) -> None:
    packer = one_layer(device)
    slot, come = torch.tensor(noise(8192, 1), device=device.torch_device), header_page(device)
    found = packer.inspect(slot, come, None)
    settled(found)
    assert (come == slot.cpu().numpy()[:HEADER_BYTES]).all()
    assert found.values().shape == (0,)


@pytest.mark.parametrize("ids", [[-1, 2], [0, BLOCKS], [2**31 - 1, 0]])
def test_ids_outside_the_kv_cache_are_refused(ids: list[int], device: Device) -> None:
    """The group's smallest tensor counts: a kernel would read, or write, whatever lies behind it."""
    tensors = [
        torch.zeros((count, 512), dtype=torch.uint8, device=device.torch_device) for count in (BLOCKS, BLOCKS + 8)
    ]
    packer = DevicePacker(tensors, [[Page(0, 0, 512), Page(1, 512, 512)]], device)
    rows = torch.ones((2, 1024), dtype=torch.uint8, device=device.torch_device)
    for call in (packer.gather, packer.scatter):
        with pytest.raises(LayoutError, match="block ids"):
            call(0, np.array(ids, dtype=np.int32), rows, READY)
    assert rows.all()
    assert not any(tensor.any() for tensor in tensors)


def test_rows_that_do_not_fit_their_blocks_are_refused(device: Device) -> None:
    packer, two = one_layer(device), np.array([0, 1], dtype=np.int32)
    for count, width in ((2, 511), (3, 512)):
        rows = torch.zeros((count, width), dtype=torch.uint8, device=device.torch_device)
        for call in (packer.gather, packer.scatter):
            with pytest.raises(LayoutError, match="rows"):
                call(0, two, rows, READY)
    rows, slot = (torch.zeros(shape, dtype=torch.uint8, device=device.torch_device) for shape in ((2, 511), 8192))
    with pytest.raises(LayoutError, match="511 bytes"):
        packer.inspect(slot, header_page(device), rows)


@pytest.mark.parametrize("clear", [(4095, 5000), (-100, 5000), (5000, 8193), (6000, 5000)])
def test_only_what_lies_behind_the_header_page_can_be_cleared(clear: tuple[int, int], device: Device) -> None:
    slot = torch.ones(8192, dtype=torch.uint8, device=device.torch_device)
    with pytest.raises(LayoutError, match="cleared"):
        one_layer(device).finish_image(header_page(device), slot, [(5000, 6000), clear])
    assert slot.all()
