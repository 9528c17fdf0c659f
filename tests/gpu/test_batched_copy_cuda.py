"""Proves on a GPU: batched copies bring the bytes that the host's packer brings, whole blocks and strided pages, both
ways; they wait for the compute stream, and nobody for them.
"""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from nixl_offload.engine.batched_copy import cuda_batched_copy
from nixl_offload.engine.bus_packer import BusPacker
from nixl_offload.engine.kernels.base import Page
from nixl_offload.engine.packer import HostPacker
from nixl_offload.engine.staging import StagingPool
from nixl_offload.engine.streams import Fence, device_of

pytestmark = pytest.mark.gpu

IDS = np.array([7, 8, 9, 31, 2], dtype=np.int32)
PAGES = [Page(0, 0, 65536), Page(1, 65536, 32768)]


def _settled(fence: Fence) -> None:
    deadline_s = time.monotonic() + 30
    while not fence.done():
        assert time.monotonic() < deadline_s
        time.sleep(0.0005)


@pytest.fixture
def packer() -> BusPacker:
    copy = cuda_batched_copy(torch.cuda.current_device())
    if copy is None:
        pytest.skip("the driver has no cuMemcpyBatchAsync")
    tensors = [torch.randint(0, 256, (32, 65536), dtype=torch.uint8, device="cuda") for _ in range(2)]
    torch.cuda.synchronize()
    made = BusPacker(tensors, [PAGES], device_of(tensors[0]), batched=lambda *_: copy)
    made.tensors = tensors  # type: ignore[attr-defined]
    return made


def test_bytes_and_sums_are_those_of_the_host(packer: BusPacker) -> None:
    tensors: list[torch.Tensor] = packer.tensors  # type: ignore[attr-defined]
    host = [tensor.cpu() for tensor in tensors]
    reference = HostPacker([tensor.numpy() for tensor in host], [PAGES])
    width = sum(page.bytes for page in PAGES)
    slot = StagingPool(slot_bytes=len(IDS) * width, budget_bytes=1 << 20, pinned=True).acquire()
    assert slot is not None
    payload = slot.memory[: len(IDS) * width].reshape(len(IDS), width)
    wanted = np.empty_like(payload)
    sums = reference.gather_many(0, [(IDS, wanted)], reference.fence()).values()
    gathered = packer.gather_many(0, [(IDS, payload)], packer.fence())
    _settled(gathered)
    assert (payload == wanted).all()
    assert (gathered.values()[0] == sums[0]).all()
    back = IDS[::-1].copy()
    reference.scatter_many(0, [(back, wanted)], reference.fence())
    _settled(packer.scatter_many(0, [(back, payload)], packer.fence()))
    for there, here in zip(tensors, host, strict=True):
        assert torch.equal(there.cpu(), here)
