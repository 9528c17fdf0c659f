"""Proves on a GPU: copies between the device and host memory equal HostPacker's, alone and in batches; host memory is
page-locked.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from nixl_offload.engine import device_packer, host as host_module, packer
from nixl_offload.engine.device_packer import DevicePacker
from nixl_offload.engine.host import HostSlab
from nixl_offload.engine.kernels.torch_kernels import Page
from nixl_offload.engine.packer import HostPacker
from nixl_offload.engine.streams import READY, device_of
from tests.unit.device_rig import at_once, settled

pytestmark = pytest.mark.gpu


def packer_of(tensors: list[torch.Tensor], pages: list[Page]) -> DevicePacker:
    return DevicePacker(tensors, [pages], device_of(tensors[0]))


class PinnedSlots:
    """Slots in page-locked memory, laid out as in a host slab: a header page before each payload."""

    def __init__(self, count: int, payload_bytes: int) -> None:
        self.slab = HostSlab(memory_bytes=count * (4096 + payload_bytes), relay_slots=0, slot_bytes=4096, pinned=True)
        self._slot_bytes, self._payload_bytes = 4096 + payload_bytes, payload_bytes

    def payload(self, number: int, blocks: int) -> npt.NDArray[np.uint8]:
        memory = self.slab.slot(number * self._slot_bytes, self._slot_bytes).memory
        return memory[4096 : 4096 + self._payload_bytes].reshape(blocks, -1)


@pytest.mark.parametrize("pages", [[Page(0, 0, 4096), Page(1, 4096, 4096)], [Page(0, 0, 3000), Page(1, 3000, 1001)]])
def test_batches_equal_the_host(pages: list[Page]) -> None:
    """Seven chunks per call; pages of whole 16-byte words, and pages of odd lengths."""
    host = [torch.randint(0, 256, (64, 4096), dtype=torch.uint8) for _ in range(2)]
    device = [tensor.cuda() for tensor in host]
    torch.cuda.synchronize()
    reference, on_device = HostPacker([tensor.numpy() for tensor in host], [pages]), packer_of(device, pages)
    payload_bytes = 4 * 8192
    block_bytes = sum(page.bytes for page in pages)
    slots = PinnedSlots(7, payload_bytes)
    order = np.random.default_rng(1).permutation(64).astype(np.int32)
    ids = [order[4 * n : 4 * n + 4] for n in range(7)]
    payloads = [slots.payload(n, 4).reshape(-1)[: 4 * block_bytes].reshape(4, block_bytes) for n in range(7)]
    wanted = [np.empty((4, block_bytes), dtype=np.uint8) for _ in range(7)]
    reference.gather_many(0, list(zip(ids, wanted, strict=True)), reference.fence())
    settled(on_device.gather_many(0, list(zip(ids, payloads, strict=True)), on_device.fence()))
    for found, expected in zip(payloads, wanted, strict=True):
        assert (found == expected).all()
    sums, right = on_device.sums(0, ids, on_device.fence()), reference.sums(0, ids, READY)
    settled(sums)
    assert np.array_equal(np.stack(sums.values()), np.stack(right.values()))

    back = list(reversed(ids))
    reference.scatter_many(0, list(zip(back, wanted, strict=True)), reference.fence())
    settled(on_device.scatter_many(0, list(zip(back, payloads, strict=True)), on_device.fence()))
    reference.clear(0, order[:3], READY)
    settled(on_device.clear(0, order[:3], on_device.fence()))
    for index in range(2):
        assert (device[index].cpu() == host[index]).all()
    slots.slab.close()


def test_what_crosses_the_bus_is_summed_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device sums at the gather, and again before the scatter; the CPU sums nothing."""
    host = torch.randint(0, 256, (64, 16384), dtype=torch.uint8)
    tensor, pages = host.cuda(), [Page(0, 0, 16384)]
    torch.cuda.synchronize()
    reference, on_device = HostPacker([host.numpy()], [pages]), packer_of([tensor], pages)
    slots = PinnedSlots(3, 4 * 16384)
    ids = [np.array([4 * n, 9, 30, 1], dtype=np.int32) for n in range(3)]
    payloads = [slots.payload(n, 4) for n in range(3)]
    wanted = reference.gather_many(0, [(each, np.empty((4, 16384), dtype=np.uint8)) for each in ids], READY).values()

    def refuse(_: object) -> None:
        raise AssertionError("the processor was to sum")

    monkeypatch.setattr(packer, "payload_checksums", refuse)
    gathered = on_device.gather_many(0, list(zip(ids, payloads, strict=True)), on_device.fence())
    settled(gathered)
    summed = at_once(on_device.bring(0, payloads))
    settled(summed)
    for found in (gathered.values(), summed.values()):
        assert all((one == other).all() for one, other in zip(found, wanted, strict=True))
    for payload in payloads:
        payload[:] = 0  # the scatter reads the copy on the device
    targets = [np.arange(40 + 4 * n, 44 + 4 * n, dtype=np.int32) for n in range(3)]
    settled(on_device.scatter_many(0, list(zip(targets, summed.rows(), strict=True)), on_device.fence()))
    for sources, target in zip(ids, targets, strict=True):
        assert torch.equal(tensor[target.tolist()].cpu(), host[sources.tolist()])
    slots.slab.close()


def test_payloads_that_cross_from_one_locked_piece_into_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA may refuse a copy across two registrations. With 64 KiB pieces every payload crosses one."""
    for module in (device_packer, host_module):
        monkeypatch.setattr(module, "PIN_PIECE_BYTES", 64 << 10)
    tensor = torch.randint(0, 256, (32, 65536), dtype=torch.uint8, device="cuda")
    on_device = packer_of([tensor], [Page(0, 0, 65536)])
    slots = PinnedSlots(2, 4 * 65536)
    parts = [(np.array([4 * n, 9, 30, 1], dtype=np.int32), slots.payload(n, 4)) for n in range(2)]
    settled(on_device.gather_many(0, parts, on_device.fence()))
    for ids, payload in parts:
        assert (torch.from_numpy(payload.copy()) == tensor[ids.tolist()].cpu()).all()
    blank = torch.zeros_like(tensor)
    back = packer_of([blank], [Page(0, 0, 65536)])
    settled(back.scatter_many(0, parts, back.fence()))
    for ids, _ in parts:
        assert (blank[ids.tolist()] == tensor[ids.tolist()]).all()
    slots.slab.close()


def test_host_memory_is_page_locked_and_unlocked() -> None:
    """Torch reports the memory as pinned, and after ``close`` as not pinned."""
    slab = HostSlab(memory_bytes=3 << 20, relay_slots=1, slot_bytes=4096, pinned=True)
    assert torch.from_numpy(slab.slot(0, 4096).memory).is_pinned()
    assert torch.from_numpy(slab.slot(slab.relay_offsets[0], 4096).memory).is_pinned()
    view = slab.slot(0, 4096).memory
    slab.close()
    assert not torch.from_numpy(view).is_pinned()
