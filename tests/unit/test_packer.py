"""Proves, of the host's packer and of a device's: pages of every size, stride and alignment are copied exactly, many
chunks a call, and nothing beside them; ids outside the KV cache are refused. ``test_device_packer`` goes on with what
is a device's own.
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import xxhash

from nixl_offload.engine import device_packer
from nixl_offload.engine.device_packer import DevicePacker
from nixl_offload.engine.kernels.torch_kernels import Page
from nixl_offload.engine.packer import HostPacker
from nixl_offload.engine.streams import READY, Device
from nixl_offload.errors import LayoutError
from nixl_offload.movers.base import MemoryKind

Bytes = npt.NDArray[np.uint8]
BLOCKS = 24
AT_ONCE = Device(torch.device("cpu"), MemoryKind.VRAM)
"""A device whose work is done when it is queued."""
IDS = {
    "scattered": [[7, 2, 3, 19], [23, 0, 11, 12], [5, 6, 8, 9]],
    "runs": [[4, 5, 6, 7], [8, 9, 10, 11], [20, 21, 22, 23]],
    "single": [[9], [3], [14]],
}


def noise(length: int, seed: int) -> Bytes:
    area: Bytes = np.frombuffer(mmap.mmap(-1, length), dtype=np.uint8)
    area[:] = np.random.default_rng(seed).integers(0, 256, length, dtype=np.uint8)
    return area


def tensors_of(layers: int, page: int, stride: int, shift: int) -> list[Bytes]:
    """``shift``: bytes from the start of a page to the first tensor."""
    return [
        noise(BLOCKS * stride + shift, seed)[shift:].reshape(BLOCKS, stride)[:, :page] for seed in range(1, layers + 1)
    ]


def packer_of(kind: str, tensors: list[Bytes], pages: list[Page], monkeypatch: pytest.MonkeyPatch) -> Any:
    if kind == "host":
        return HostPacker(tensors, [pages])
    if kind == "device, short pieces":  # wherever page-locked pieces end
        monkeypatch.setattr(device_packer, "PIN_PIECE_BYTES", 4096)
    return DevicePacker([torch.from_numpy(tensor) for tensor in tensors], [pages], AT_ONCE)


CASES: dict[str, tuple[list[int], int, int, int]] = {
    # the pages of a block's layers; from one row of a tensor to the next; how far from a page the first lies; offset
    "small pages, aligned": ([1152] * 3, 1152, 0, 0),
    "small pages, odd length": ([1000] * 3, 1000, 0, 0),
    "small pages, odd address": ([1024] * 2, 1024, 8, 0),
    "small pages, odd stride": ([1024] * 2, 1032, 0, 0),
    "part of a page": ([512] * 2, 2048, 0, 0),
    "heads in the midst of a page": ([1024, 700], 4096, 0, 512),
    "pages of several lengths": ([3000, 2048, 96], 4096, 0, 0),
    "large pages": ([65536] * 2, 65536 + 4096, 0, 0),
    "one layer": ([4096], 4096, 0, 0),
}


@pytest.mark.parametrize("kind", ["host", "device", "device, short pieces"])
@pytest.mark.parametrize("ids", IDS)
@pytest.mark.parametrize("case", CASES)
def test_chunks_are_copied_exactly_and_nothing_beside_them(
    case: str, ids: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many chunks in one call, into slots that lie apart; summed where they lie; then back into other blocks; then
    cleared.
    """
    sizes, stride, shift, offset = CASES[case]
    tensors = tensors_of(len(sizes), offset + max(sizes), stride, shift)
    pages = [Page(layer, sum(sizes[:layer]), size, offset) for layer, size in enumerate(sizes)]
    packer = packer_of(kind, tensors, pages, monkeypatch)
    arrays = [np.array(each, dtype=np.int32) for each in IDS[ids]]
    count, before = len(arrays[0]), [tensor.copy() for tensor in tensors]
    slab = noise(3 * (count * sum(sizes) + 4096), 77).reshape(3, -1)
    headers = slab[:, :4096].copy()
    payloads = [slot[4096:].reshape(count, -1) for slot in slab]
    gathered = packer.gather_many(0, list(zip(arrays, payloads, strict=True)), READY)
    assert gathered.done()
    for each, payload in zip(arrays, payloads, strict=True):
        wanted = [before[page.tensor][each, page.offset : page.offset + page.bytes] for page in pages]
        assert (payload == np.concatenate(wanted, axis=1)).all()
    assert (slab[:, :4096] == headers).all()
    sums = [[xxhash.xxh3_64_intdigest(row) for row in payload] for payload in payloads]
    assert np.array(gathered.values()).tolist() == np.array(packer.sums(0, arrays, READY).values()).tolist() == sums

    back = [(arrays[(n + 1) % 3], payloads[n]) for n in range(3)]
    assert packer.scatter_many(0, back, READY).done()
    for block_ids, payload in back:
        for page in pages:
            columns = slice(page.column, page.column + page.bytes)
            before[page.tensor][block_ids, page.offset : page.offset + page.bytes] = payload[:, columns]
    assert all((tensor == other).all() for tensor, other in zip(tensors, before, strict=True))
    packer.clear(0, arrays[0], READY)
    for page in pages:
        before[page.tensor][arrays[0], page.offset : page.offset + page.bytes] = 0
    assert all((tensor == other).all() for tensor, other in zip(tensors, before, strict=True))


@pytest.mark.parametrize("kind", ["host", "device"])
@pytest.mark.parametrize("ids", [[-1, 2], [0, BLOCKS], [2**31 - 1, 0]])
def test_ids_outside_the_kv_cache_are_refused_before_anything_is_copied(
    kind: str, ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The group's smallest tensor sets the limit: memory after it would be read or written."""
    tensors = [*tensors_of(1, 4096, 4096, 0), noise((BLOCKS + 8) * 4096, 3).reshape(-1, 4096)]
    packer = packer_of(kind, tensors, [Page(0, 0, 4096), Page(1, 4096, 4096)], monkeypatch)
    payloads = np.zeros((2, 2, 8192), dtype=np.uint8)
    before = [tensor.copy() for tensor in tensors]
    parts = [(np.array([0, 1], dtype=np.int32), payloads[0]), (np.array(ids, dtype=np.int32), payloads[1])]
    for call in (packer.gather_many, packer.scatter_many):
        with pytest.raises(LayoutError, match="block ids"):
            call(0, parts, READY)
    assert not payloads.any()
    assert all((tensor == old).all() for tensor, old in zip(tensors, before, strict=True))
