"""Proves on a GPU: copies between the device and host memory equal HostPacker's, and host memory is page-locked. Chunks
packed on the device equal the host's (the tests of the emulated device, on a real one). Loads wait for no store, no
call blocks, and memory that is released while in use is not reused.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from nixl_offload.chunk.checksum import block_checksums
from nixl_offload.engine import device_packer, host as host_module, packer
from nixl_offload.engine.device_packer import DevicePacker, page_locked
from nixl_offload.engine.host import HostSlab
from nixl_offload.engine.kernels.torch_kernels import Page
from nixl_offload.engine.packer import HostPacker
from nixl_offload.engine.streams import READY, Device, device_of
from tests.unit.device_rig import at_once, settled
from tests.unit.test_packer import (  # noqa: F401 - run with the fixture below
    test_chunks_lie_in_their_slots_as_on_the_host_and_come_back,
    test_rows_that_do_not_fit_their_blocks_are_refused,
)

pytestmark = pytest.mark.gpu

IDS = np.array([3, 9, 1, 14], dtype=np.int32)
PAGES = [[Page(0, 0, 4096), Page(1, 4096, 4096)]]
STEP_CYCLES = 1_000_000_000
"""About half a second: longer than anything here."""


@pytest.fixture
def device() -> Iterator[Device]:
    """The GPU; a test's work on it ends before the next test."""
    yield device_of(torch.empty(0, device="cuda"))
    torch.cuda.synchronize()


def packer_of(tensors: list[torch.Tensor], pages: list[Page]) -> DevicePacker:
    return DevicePacker(tensors, [pages], device_of(tensors[0]))


class PinnedSlots:
    """Slots in page-locked memory, laid out as in a host slab: a header page before each payload of four blocks."""

    def __init__(self, count: int, block_bytes: int) -> None:
        self._payload_bytes = 4 * block_bytes
        self._slot_bytes = 4096 + -(-self._payload_bytes // 4096) * 4096
        self.slab = HostSlab(memory_bytes=count * self._slot_bytes, relay_slots=0, slot_bytes=4096, pinned=True)
        self.payloads = [self._payload(number) for number in range(count)]

    def _payload(self, number: int) -> npt.NDArray[np.uint8]:
        memory = self.slab.slot(number * self._slot_bytes, self._slot_bytes).memory
        return memory[4096 : 4096 + self._payload_bytes].reshape(4, -1)


@pytest.mark.parametrize(
    ("pages", "pinned_bytes"),
    [
        ([Page(0, 0, 4096), Page(1, 4096, 4096)], 0),
        ([Page(0, 0, 3000), Page(1, 3000, 1001)], 0),
        ([Page(0, 0, 65536)], 64 << 10),
    ],
    ids=["whole words", "odd lengths", "across registrations"],
)
def test_batches_equal_the_host(pages: list[Page], pinned_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven chunks per call. CUDA may refuse a copy across two registrations: with pieces of 64 KiB every payload
    crosses one.
    """
    for module in (device_packer, host_module) if pinned_bytes else ():
        monkeypatch.setattr(module, "PIN_PIECE_BYTES", pinned_bytes)
    block_bytes = sum(page.bytes for page in pages)
    host = [torch.randint(0, 256, (64, max(4096, page.bytes)), dtype=torch.uint8) for page in pages]
    tensors = [tensor.cuda() for tensor in host]
    torch.cuda.synchronize()
    reference, on_device = HostPacker([tensor.numpy() for tensor in host], [pages]), packer_of(tensors, pages)
    slots = PinnedSlots(7, block_bytes)
    order = np.random.default_rng(1).permutation(64).astype(np.int32)
    ids = [order[4 * n : 4 * n + 4] for n in range(7)]
    wanted = [np.empty((4, block_bytes), dtype=np.uint8) for _ in range(7)]
    reference.gather_many(0, list(zip(ids, wanted, strict=True)), READY)
    settled(on_device.gather_many(0, list(zip(ids, slots.payloads, strict=True)), on_device._device.compute_fence()))
    for found, expected in zip(slots.payloads, wanted, strict=True):
        assert (found == expected).all()
    sums, right = on_device.sums(0, ids, on_device._device.compute_fence()), reference.sums(0, ids, READY)
    settled(sums)
    assert np.array_equal(np.stack(sums.values()), np.stack(right.values()))

    back = list(reversed(ids))
    reference.scatter_many(0, list(zip(back, wanted, strict=True)), READY)
    settled(on_device.scatter_many(0, list(zip(back, slots.payloads, strict=True)), on_device._device.compute_fence()))
    reference.clear(0, order[:3], READY)
    settled(on_device.clear(0, order[:3], on_device._device.compute_fence()))
    assert all((found.cpu() == expected).all() for found, expected in zip(tensors, host, strict=True))
    slots.slab.close()


def test_what_crosses_the_bus_is_summed_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device sums at the gather, and again before the scatter; the CPU sums nothing."""
    host = torch.randint(0, 256, (64, 16384), dtype=torch.uint8)
    tensor, pages = host.cuda(), [Page(0, 0, 16384)]
    torch.cuda.synchronize()
    reference, on_device = HostPacker([host.numpy()], [pages]), packer_of([tensor], pages)
    slots = PinnedSlots(3, 16384)
    payloads = slots.payloads
    ids = [np.array([4 * n, 9, 30, 1], dtype=np.int32) for n in range(3)]
    wanted = reference.gather_many(0, [(each, np.empty((4, 16384), dtype=np.uint8)) for each in ids], READY).values()

    def refuse(_: object) -> None:
        raise AssertionError("the processor was to sum")

    monkeypatch.setattr(packer, "payload_checksums", refuse)
    gathered = on_device.gather_many(0, list(zip(ids, payloads, strict=True)), on_device._device.compute_fence())
    settled(gathered)
    summed = at_once(on_device.bring(0, payloads))
    settled(summed)
    for found in (gathered.values(), summed.values()):
        assert all((one == other).all() for one, other in zip(found, wanted, strict=True))
    for payload in payloads:
        payload[:] = 0  # the scatter reads the copy on the device
    targets = [np.arange(40 + 4 * n, 44 + 4 * n, dtype=np.int32) for n in range(3)]
    parts = list(zip(targets, summed.brought([4] * 3), strict=True))
    settled(on_device.scatter_many(0, parts, on_device._device.compute_fence()))
    for sources, target in zip(ids, targets, strict=True):
        assert torch.equal(tensor[target.tolist()].cpu(), host[sources.tolist()])
    slots.slab.close()


def test_host_memory_is_page_locked_and_unlocked() -> None:
    """Torch reports the memory as pinned, and after ``close`` as not pinned."""
    slab = HostSlab(memory_bytes=3 << 20, relay_slots=1, slot_bytes=4096, pinned=True)
    assert torch.from_numpy(slab.slot(0, 4096).memory).is_pinned()
    assert torch.from_numpy(slab.slot(slab.relay_offsets[0], 4096).memory).is_pinned()
    view = slab.slot(0, 4096).memory
    slab.close()
    assert not torch.from_numpy(view).is_pinned()


class Kit:
    """Two layers of zeros and a slot of ones. Everything has been called, so nothing compiles later."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.tensors = [torch.zeros((16, 4096), dtype=torch.uint8, device="cuda") for _ in range(2)]
        self.packer = DevicePacker(self.tensors, PAGES, device)
        self.slot = torch.ones(4096 + 4 * 8192 + 512, dtype=torch.uint8, device="cuda")
        self.rows = self.slot[4096 : 4096 + 4 * 8192].view(4, 8192)
        self.parts = [(IDS[:1], self.rows[:1]), (IDS[1:], self.rows[1:])]
        self.headers = np.ones((1, 4096), dtype=np.uint8)
        self.payload = page_locked(4 * 8192, torch.uint8, device).numpy().reshape(4, 8192)
        for _ in range(2):
            self.everything()
            torch.cuda.synchronize()
        for tensor in self.tensors:
            tensor.zero_()
        self.slot.fill_(1)
        torch.cuda.synchronize()

    def everything(self) -> None:
        """Make one call of each kind, after the model's stream. The results do not matter."""
        fence = self.device.compute_fence()
        asked = [
            self.packer.gather_many(0, self.parts, fence),
            self.packer.finish_images(self.headers, [self.slot], [[slice(4096 + 4 * 8192, len(self.slot))]]),
            self.packer.inspect(0, [self.slot] * 2, [rows for _, rows in self.parts])[1],
            self.packer.scatter_many(0, self.parts, fence),
            self.packer.gather_many(0, [(IDS, self.payload)], fence),
            self.packer.scatter_many(0, [(IDS, self.payload)], fence),
            self.packer.sums(0, [IDS], fence),
        ]
        for each in asked:
            each.done()


@pytest.fixture
def kit(device: Device) -> Kit:
    return Kit(device)


def test_nothing_makes_the_caller_wait(kit: Kit) -> None:
    """No call waits for the busy model's stream, whether or not torch knows that such a call blocks."""
    torch.cuda._sleep(STEP_CYCLES)
    busy = kit.device.compute_fence()
    torch.cuda.set_sync_debug_mode("error")
    try:
        began_s = time.monotonic()
        kit.everything()
        took_s = time.monotonic() - began_s
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not busy.done()
    assert took_s < 0.1


def test_loads_headers_and_inspections_wait_for_no_store(kit: Kit) -> None:
    """They do not wait either for the step that a store waits for."""
    other = torch.empty_like(kit.rows)
    early = kit.device.compute_fence()
    torch.cuda._sleep(STEP_CYCLES)
    busy = kit.device.compute_fence()
    stored = kit.packer.gather_many(0, [(IDS[:2], other[:2]), (IDS[2:], other[2:])], busy)
    settled(kit.packer.finish_images(kit.headers, [kit.slot], [[]]))
    _, inspected = kit.packer.inspect(0, [kit.slot], [kit.rows])
    settled(inspected)
    assert (inspected.values()[0] == block_checksums(np.ones((4, 8192), dtype=np.uint8))).all()
    settled(kit.packer.scatter_many(0, kit.parts, early))
    settled(sums := kit.packer.sums(0, [IDS], READY))
    assert (sums.values()[0] == inspected.values()[0]).all()
    assert not busy.done()
    assert not stored.done()
    settled(stored)


def test_a_slot_that_is_let_go_of_while_it_is_filled_is_not_handed_out(kit: Kit) -> None:
    """Else the next owner of its memory would find a chunk in it."""
    torch.cuda.empty_cache()
    rows = torch.empty((4, 8192 << 10), dtype=torch.uint8, device="cuda")[:, :8192]
    address, length_bytes = rows.data_ptr(), 4 * (8192 << 10)
    torch.cuda._sleep(STEP_CYCLES)
    stored = kit.packer.gather_many(0, [(IDS[:1], rows[:1]), (IDS[1:], rows[1:])], kit.device.compute_fence())
    del rows
    fresh = torch.empty(length_bytes, dtype=torch.uint8, device="cuda")
    assert fresh.data_ptr() != address
    assert not stored.done()
    settled(stored)


def test_sums_that_nobody_waits_for_land_in_nobodys_memory(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch keeps page-locked memory until the copy into it is done. We rely on that for ids and sums."""
    used = set[int]()

    def noted(*arguments: Any) -> torch.Tensor:
        memory = page_locked(*arguments)
        used.add(memory.data_ptr())
        return memory

    monkeypatch.setattr(device_packer, "page_locked", noted)
    torch.cuda._sleep(STEP_CYCLES)
    busy = kit.device.compute_fence()
    sums = kit.packer.gather_many(0, kit.parts, busy)
    del sums
    fresh = [page_locked(len(IDS), torch.int64, kit.device) for _ in range(64)]
    assert used.isdisjoint(each.data_ptr() for each in fresh)
    assert not busy.done()
