"""Proves: host pages of every size, stride and alignment are copied exactly, alone and many chunks a call, and nothing
beside them; ids outside the KV cache are refused; others have the interpreter meanwhile.
"""

from __future__ import annotations

import mmap

import numpy as np
import numpy.typing as npt
import pytest
import torch
import xxhash

from nixl_offload.engine import device_packer as packer_module
from nixl_offload.engine.device_packer import DevicePacker
from nixl_offload.engine.kernels.torch_kernels import Page
from nixl_offload.engine.packer import HostPacker
from nixl_offload.engine.streams import READY, Device, HostStreams
from nixl_offload.errors import LayoutError
from nixl_offload.movers.base import MemoryKind

Bytes = npt.NDArray[np.uint8]
BLOCKS = 24
AT_ONCE = Device(torch.device("cpu"), MemoryKind.VRAM, HostStreams())
"""A device whose work is done when it is queued."""
SCATTERED = [[7, 2, 3, 19], [23, 0, 11, 12], [5, 6, 8, 9]]
CONSECUTIVE = [[4, 5, 6, 7], [8, 9, 10, 11], [20, 21, 22, 23]]


def noise(length: int, seed: int) -> Bytes:
    area: Bytes = np.frombuffer(mmap.mmap(-1, length), dtype=np.uint8)
    area[:] = np.random.default_rng(seed).integers(0, 256, length, dtype=np.uint8)
    return area


def tensors_of(layers: int, page: int, stride: int, shift: int) -> list[Bytes]:
    """``shift``: how far from a page's begin the first one lies."""
    return [
        noise(BLOCKS * stride + shift, seed)[shift:].reshape(BLOCKS, stride)[:, :page] for seed in range(1, layers + 1)
    ]


def expected(tensors: list[Bytes], pages: list[Page], ids: list[int]) -> bytes:
    return b"".join(
        tensors[page.tensor][block, page.offset : page.offset + page.bytes].tobytes() for block in ids for page in pages
    )


CASES = {
    "small pages, aligned": (3, [1152] * 3, 1152, 0),
    "small pages, odd length": (3, [1000] * 3, 1000, 0),
    "small pages, odd address": (2, [1024] * 2, 1024, 8),
    "small pages, odd stride": (2, [1024] * 2, 1032, 0),
    "part of a page": (2, [512] * 2, 2048, 0),
    "pages of several lengths": (3, [3000, 2048, 96], 4096, 0),
    "large pages": (2, [65536] * 2, 65536 + 4096, 0),
    "one layer": (1, [4096], 4096, 0),
}


@pytest.mark.parametrize("ids", [SCATTERED, CONSECUTIVE, [[9], [3], [14]]], ids=["scattered", "runs", "single"])
@pytest.mark.parametrize("case", CASES)
def test_chunks_are_copied_exactly_and_nothing_beside_them(case: str, ids: list[list[int]]) -> None:
    """Many chunks in one call, into slots that lie apart; then back into other blocks."""
    layers, sizes, stride, shift = CASES[case]
    tensors = tensors_of(layers, max(sizes), stride, shift)
    columns = [sum(sizes[:layer]) for layer in range(layers)]
    pages = [Page(layer, columns[layer], sizes[layer]) for layer in range(layers)]
    packer = HostPacker(tensors, [pages])
    block_bytes, count = sum(sizes), len(ids[0])
    slab = noise(3 * (count * block_bytes + 4096), 77).reshape(3, -1)
    before = slab.copy()
    payloads = [slot[4096:].reshape(count, block_bytes) for slot in slab]
    arrays = [np.array(each, dtype=np.int32) for each in ids]
    assert packer.gather_many(0, list(zip(arrays, payloads, strict=True)), READY).done()
    for each, payload in zip(ids, payloads, strict=True):
        assert payload.tobytes() == expected(tensors, pages, each)
    assert (slab[:, :4096] == before[:, :4096]).all()

    targets = [tensor.copy() for tensor in tensors]
    back = [(arrays[(n + 1) % 3], payloads[n]) for n in range(3)]
    untouched = sorted(set(range(BLOCKS)) - {block for each in ids for block in each})
    assert packer.scatter_many(0, back, READY).done()
    for n, (block_ids, payload) in enumerate(back):
        assert expected(tensors, pages, block_ids.tolist()) == payload.tobytes(), n
    for tensor, old, page in zip(tensors, targets, pages, strict=True):
        assert (tensor[untouched] == old[untouched]).all()
        assert (tensor[:, page.bytes :] == old[:, page.bytes :]).all()


def test_a_range_of_each_page() -> None:
    """As heads of a shard are: copied, summed, put back and cleared, with the bytes around them untouched."""
    tensors = [*tensors_of(2, 4096, 4096, 0), *tensors_of(1, 3000, 3008, 8)]
    pages = [Page(0, 0, 1024, 512), Page(1, 1024, 1024, 512), Page(2, 2048, 700, 2300)]
    packer, ids = HostPacker(tensors, [pages]), np.array([3, 4, 17], dtype=np.int32)
    payload = np.zeros((3, 2748), dtype=np.uint8)
    packer.gather_many(0, [(ids, payload)], READY)
    assert payload.tobytes() == expected(tensors, pages, ids.tolist())
    sums = [xxhash.xxh3_64_intdigest(row) for row in payload]
    assert packer.sums(0, [ids], READY).values()[0].tolist() == sums
    wanted = [tensor.copy() for tensor in tensors]
    targets = np.array([0, 23, 9], dtype=np.int32)
    for page in pages:
        columns = slice(page.offset, page.offset + page.bytes)
        wanted[page.tensor][targets, columns] = payload[:, page.column : page.column + page.bytes]
        wanted[page.tensor][ids, columns] = 0
    packer.scatter_many(0, [(targets, payload)], READY)
    packer.clear(0, ids, READY)
    assert all((tensor == other).all() for tensor, other in zip(tensors, wanted, strict=True))


@pytest.mark.parametrize("ids", [[-1, 2], [0, BLOCKS], [2**31 - 1, 0]])
def test_ids_outside_the_kv_cache_are_refused_before_anything_is_copied(ids: list[int]) -> None:
    """The group's smallest tensor counts."""
    tensors = [*tensors_of(1, 4096, 4096, 0), noise((BLOCKS + 8) * 4096, 3).reshape(-1, 4096)]
    packer = HostPacker(tensors, [[Page(0, 0, 4096), Page(1, 4096, 4096)]])
    good, bad = np.array([0, 1], dtype=np.int32), np.array(ids, dtype=np.int32)
    payloads = np.zeros((2, 2, 8192), dtype=np.uint8)
    before = [tensor.copy() for tensor in tensors]
    parts = [(good, payloads[0]), (bad, payloads[1])]
    with pytest.raises(LayoutError):
        packer.gather_many(0, parts, READY)
    with pytest.raises(LayoutError):
        packer.scatter_many(0, parts, READY)
    assert not payloads.any()
    assert all((tensor == old).all() for tensor, old in zip(tensors, before, strict=True))


@pytest.mark.parametrize("piece_bytes", [4096, 1 << 30])
@pytest.mark.parametrize("case", CASES)
def test_the_devices_packer_reckons_as_the_hosts(case: str, piece_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever page-locked pieces end. tests/gpu has the same on a device."""
    monkeypatch.setattr(packer_module, "PIN_PIECE_BYTES", piece_bytes)
    layers, sizes, stride, shift = CASES[case]
    tensors = tensors_of(layers, max(sizes), stride, shift)
    pages = [Page(layer, sum(sizes[:layer]), sizes[layer]) for layer in range(layers)]
    packer = DevicePacker([torch.from_numpy(tensor) for tensor in tensors], [pages], AT_ONCE)
    reference = HostPacker(tensors, [pages])
    arrays = [np.array(each, dtype=np.int32) for each in SCATTERED]
    slots = noise(3 * 4 * sum(sizes) + 512, 8)[512:].reshape(3, 4, -1)
    wanted = np.zeros_like(slots)
    packer.gather_many(0, list(zip(arrays, slots, strict=True)), READY)
    reference.gather_many(0, list(zip(arrays, wanted, strict=True)), READY)
    assert (slots == wanted).all()
    before = [tensor.copy() for tensor in tensors]
    packer.scatter_many(0, list(zip(reversed(arrays), slots, strict=True)), READY)
    found = [tensor.copy() for tensor in tensors]
    for tensor, old in zip(tensors, before, strict=True):
        tensor[:] = old
    reference.scatter_many(0, list(zip(reversed(arrays), slots, strict=True)), READY)
    assert all((tensor == other).all() for tensor, other in zip(tensors, found, strict=True))
