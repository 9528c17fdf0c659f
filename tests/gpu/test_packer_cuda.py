"""Proves on a GPU: CudaPacker's copies equal HostPacker's, wait for the compute stream, and hold nobody up."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from nixl_offload.engine.packer import CudaPacker, Fence, HostPacker, Page
from nixl_offload.engine.staging import StagingPool

pytestmark = pytest.mark.gpu

PAGES = [[Page(0, 0, 3000), Page(1, 3000, 4096)], [Page(1, 0, 1000)]]
IDS = np.array([7, 8, 9, 31, 2], dtype=np.int32)


def _settled(fence: Fence) -> None:
    deadline_s = time.monotonic() + 30
    while not fence.done():
        assert time.monotonic() < deadline_s
        time.sleep(0.0005)


@pytest.mark.parametrize("group", [0, 1])
def test_gather_scatter_and_checksums_equal_the_host(group: int) -> None:
    host = [torch.randint(0, 256, (32, 4096), dtype=torch.uint8) for _ in range(2)]
    device = [tensor.cuda() for tensor in host]
    torch.cuda.synchronize()
    reference, packer = HostPacker([tensor.numpy() for tensor in host], PAGES), CudaPacker(device, PAGES)
    block_bytes = sum(page.bytes for page in PAGES[group])
    pool = StagingPool(slot_bytes=len(IDS) * block_bytes, budget_bytes=1 << 20, pinned=True)
    slot = pool.acquire()
    assert slot is not None
    payload = slot.memory[: len(IDS) * block_bytes].reshape(len(IDS), block_bytes)
    wanted = np.empty_like(payload)
    reference.gather(group, IDS, wanted, reference.fence())
    _settled(packer.gather(group, IDS, payload, packer.fence()))
    assert (payload == wanted).all()
    assert (packer.checksums(group, IDS) == reference.checksums(group, IDS)).all()

    targets = IDS[::-1].copy()
    reference.scatter(group, targets, wanted, reference.fence())
    _settled(packer.scatter(group, targets, payload, packer.fence()))
    for index in range(2):
        assert (device[index].cpu() == host[index]).all()


def test_a_gather_waits_for_the_compute_stream_and_the_caller_for_nothing() -> None:
    """The compute stream is busy for a good while and then writes the blocks; the gather must see what it wrote."""
    tensor = torch.zeros((32, 4096), dtype=torch.uint8, device="cuda")
    packer = CudaPacker([tensor], [[Page(0, 0, 4096)]])
    pool = StagingPool(slot_bytes=len(IDS) * 4096, budget_bytes=1 << 20, pinned=True)
    slot = pool.acquire()
    assert slot is not None
    payload = slot.memory[: len(IDS) * 4096].reshape(len(IDS), 4096)
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)
    tensor.fill_(7)
    began_s = time.monotonic()
    fence = packer.gather(0, IDS, payload, packer.fence())
    assert time.monotonic() - began_s < 0.2
    assert not fence.done()
    _settled(fence)
    assert (payload == 7).all()
