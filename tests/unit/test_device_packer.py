"""Proves: chunks packed on a device lie in its slots as the host would have laid them, headers, zeros and checksums
included, and come back exactly, with nothing beside them touched; numbers that do not fit are refused.

The device is emulated in host memory. The order of things is in test_packer_streams.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
import torch

from nixl_offload.checksum import block_checksums
from nixl_offload.engine.device_packer import DevicePacker
from nixl_offload.engine.kernels.base import Page
from nixl_offload.engine.packer import READY, HostPacker
from nixl_offload.engine.staging import DeviceSlot, DeviceStagingPool
from nixl_offload.engine.streams import Device
from nixl_offload.errors import LayoutError
from nixl_offload.format import HEADER_BYTES
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


def kv_cache(case: str) -> tuple[list[npt.NDArray[np.uint8]], list[Page]]:
    sizes, stride, shift = CASES[case]
    tensors = [
        noise(BLOCKS * stride + 16, seed)[shift : shift + BLOCKS * stride].reshape(BLOCKS, stride)[:, : max(sizes)]
        for seed in range(len(sizes))
    ]
    return tensors, [Page(n, sum(sizes[:n]), size) for n, size in enumerate(sizes)]


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
    tensors, pages = kv_cache(case)
    block_bytes = sum(page.bytes for page in pages)
    end = HEADER_BYTES + (first + len(IDS)) * block_bytes
    reference, packer = (
        HostPacker(tensors, [pages]),
        DevicePacker([torch.from_numpy(t) for t in tensors], [pages], device),
    )
    pool = DeviceStagingPool(slot_bytes=end + 300, budget_bytes=1 << 20, device=device)
    slot, other = acquired(pool), acquired(pool)
    other.memory.copy_(torch.from_numpy(noise(pool.slot_bytes, 50)))
    slot.memory.copy_(torch.from_numpy(noise(pool.slot_bytes, 51)))
    image, untouched = slot.memory.numpy().copy(), other.memory.clone()
    wanted = np.empty((len(IDS), block_bytes), dtype=np.uint8)
    reference.gather(0, IDS, wanted, READY)

    rows = rows_of(slot, len(IDS), block_bytes, first)
    sums = packer.gather(0, IDS, rows, READY)
    settled(sums)
    assert sums.values().dtype == np.uint64
    assert (sums.values() == block_checksums(wanted)).all()
    image[end - wanted.size : end] = wanted.reshape(-1)
    assert (slot.memory.numpy() == image).all()

    header = noise(HEADER_BYTES, 52)
    clear = [(HEADER_BYTES, HEADER_BYTES + first * block_bytes), (end, end + 200)]
    settled(packer.finish_image(header, slot.memory, clear))
    image[:HEADER_BYTES] = header
    for begin, stop in clear:
        image[begin:stop] = 0
    assert (slot.memory.numpy() == image).all()

    come = np.zeros(HEADER_BYTES, dtype=np.uint8)
    found = packer.inspect(slot.memory, come, rows)
    settled(found)
    assert (come == header).all()
    assert (found.values() == block_checksums(wanted)).all()
    assert (slot.memory.numpy() == image).all()

    before = [tensor.copy() for tensor in tensors]
    targets = ((IDS + 9) % BLOCKS).astype(np.int32)
    settled(packer.scatter(0, targets, rows, READY))
    assert (slot.memory.numpy() == image).all()
    scattered = [tensor.copy() for tensor in tensors]
    for tensor, old in zip(tensors, before, strict=True):
        tensor[:] = old
    reference.scatter(0, targets, wanted, READY)
    assert all((tensor == found).all() for tensor, found in zip(tensors, scattered, strict=True))
    assert (other.memory == untouched).all()


def test_groups_of_one_device(device: Device) -> None:
    """Each by its own pages; an inspection finds them by the length of the rows."""
    tensors = [noise(BLOCKS * 2048, seed).reshape(BLOCKS, 2048) for seed in range(3)]
    groups = [[Page(0, 0, 2048), Page(1, 2048, 2048)], [Page(2, 0, 1000)]]
    packer = DevicePacker([torch.from_numpy(tensor).view(torch.int8) for tensor in tensors], groups, device)
    for group, wanted in enumerate(
        [np.concatenate([tensors[0][IDS], tensors[1][IDS]], axis=1), tensors[2][IDS, :1000]]
    ):
        rows = torch.zeros(wanted.shape, dtype=torch.uint8)
        settled(packer.gather(group, IDS, rows, READY))
        assert (rows.numpy() == wanted).all()
        found = packer.inspect(torch.zeros(HEADER_BYTES, dtype=torch.uint8), np.empty(HEADER_BYTES, np.uint8), rows)
        settled(found)
        assert (found.values() == block_checksums(wanted)).all()


def test_an_inspection_without_rows_brings_the_header_alone(device: Device) -> None:
    packer = DevicePacker([torch.zeros((4, 512), dtype=torch.uint8)], [[Page(0, 0, 512)]], device)
    slot, come = torch.from_numpy(noise(8192, 1)), np.zeros(HEADER_BYTES, dtype=np.uint8)
    found = packer.inspect(slot, come, None)
    settled(found)
    assert (come == slot.numpy()[:HEADER_BYTES]).all()
    assert found.values().shape == (0,)


@pytest.mark.parametrize("ids", [[-1, 2], [0, BLOCKS], [2**31 - 1, 0]])
def test_ids_outside_the_kv_cache_are_refused(ids: list[int], device: Device) -> None:
    """The group's smallest tensor counts: a kernel would read, or write, whatever lies behind it."""
    tensors = [torch.zeros((blocks, 512), dtype=torch.uint8) for blocks in (BLOCKS, BLOCKS + 8)]
    packer = DevicePacker(tensors, [[Page(0, 0, 512), Page(1, 512, 512)]], device)
    rows = torch.ones((2, 1024), dtype=torch.uint8)
    for call in (packer.gather, packer.scatter):
        with pytest.raises(LayoutError, match="block ids"):
            call(0, np.array(ids, dtype=np.int32), rows, READY)
    assert rows.all()
    assert not any(tensor.any() for tensor in tensors)


def test_rows_that_do_not_fit_their_blocks_are_refused(device: Device) -> None:
    packer = DevicePacker([torch.zeros((4, 512), dtype=torch.uint8)], [[Page(0, 0, 512)]], device)
    two, slot = np.array([0, 1], dtype=np.int32), torch.zeros(8192, dtype=torch.uint8)
    for rows in (torch.zeros((2, 511), dtype=torch.uint8), torch.zeros((3, 512), dtype=torch.uint8)):
        for call in (packer.gather, packer.scatter):
            with pytest.raises(LayoutError, match="rows"):
                call(0, two, rows, READY)
    with pytest.raises(LayoutError, match="511 bytes"):
        packer.inspect(slot, np.zeros(HEADER_BYTES, np.uint8), torch.zeros((2, 511), dtype=torch.uint8))


@pytest.mark.parametrize("clear", [(4095, 5000), (-100, 5000), (5000, 8193), (6000, 5000)])
def test_only_what_lies_behind_the_header_page_can_be_cleared(clear: tuple[int, int], device: Device) -> None:
    packer = DevicePacker([torch.zeros((4, 512), dtype=torch.uint8)], [[Page(0, 0, 512)]], device)
    slot = torch.ones(8192, dtype=torch.uint8)
    with pytest.raises(LayoutError, match="cleared"):
        packer.finish_image(np.zeros(HEADER_BYTES, np.uint8), slot, [(5000, 6000), clear])
    assert slot.all()
