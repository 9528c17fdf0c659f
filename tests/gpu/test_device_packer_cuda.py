"""Proves on a GPU: chunks packed on the device lie there as the host would have laid them (the proofs of the emulated
device, on a real one), wait for no store, and never make their caller wait; what is let go of while it is in use is not
handed out again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from nixl_offload.chunk.checksum import block_checksums
from nixl_offload.engine.device_packer import DevicePacker, SummedOnDevice, page_locked
from nixl_offload.engine.kernels.torch_kernels import Page
from nixl_offload.engine.streams import READY, Device, device_of
from tests.unit.device_rig import settled
from tests.unit.test_device_packer import (  # noqa: F401 - run here with the fixture below
    test_chunks_lie_in_their_slots_as_on_the_host_and_come_back,
    test_rows_that_do_not_fit_their_blocks_are_refused,
)

pytestmark = pytest.mark.gpu

IDS = np.array([3, 9, 1, 14], dtype=np.int32)
PAGES = [[Page(0, 0, 4096), Page(1, 4096, 4096)]]
STEP_CYCLES = 1_000_000_000
"""About half a second: longer than anything here takes."""


@pytest.fixture
def device() -> Iterator[Device]:
    """The one GPU; what a test left on it is over before the next one."""
    yield device_of(torch.empty(0, device="cuda"))
    torch.cuda.synchronize()


class Kit:
    """Two layers of zeros, a slot of ones; everything has been called once, so that nothing is compiled later."""

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
        """One call of each kind, behind the model's stream. What comes of it is of no interest."""
        fence = self.device.streams.compute_fence()
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
    """Neither a call that torch knows to wait, nor one that it does not: the model's stream is busy all the while."""
    torch.cuda._sleep(STEP_CYCLES)
    busy = kit.device.streams.compute_fence()
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
    """Nor for the step that a store waits for."""
    other = torch.empty_like(kit.rows)
    early = kit.device.streams.compute_fence()
    torch.cuda._sleep(STEP_CYCLES)
    busy = kit.device.streams.compute_fence()
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
    """Whoever got its memory would find a chunk in it."""
    torch.cuda.empty_cache()
    rows = torch.empty((4, 8192 << 10), dtype=torch.uint8, device="cuda")[:, :8192]
    address, length_bytes = rows.data_ptr(), 4 * (8192 << 10)
    torch.cuda._sleep(STEP_CYCLES)
    stored = kit.packer.gather_many(0, [(IDS[:1], rows[:1]), (IDS[1:], rows[1:])], kit.device.streams.compute_fence())
    del rows
    fresh = torch.empty(length_bytes, dtype=torch.uint8, device="cuda")
    assert fresh.data_ptr() != address
    assert not stored.done()
    settled(stored)


def test_sums_that_nobody_waits_for_land_in_nobodys_memory(kit: Kit) -> None:
    """Torch keeps page-locked memory until the copy into it is done: we rely on that for ids and sums alike."""
    torch.cuda._sleep(STEP_CYCLES)
    busy = kit.device.streams.compute_fence()
    sums = kit.packer.gather_many(0, kit.parts, busy)
    assert isinstance(sums, SummedOnDevice)
    address = sums.host.data_ptr()
    del sums
    fresh = [page_locked(len(IDS), torch.int64, kit.device) for _ in range(64)]
    assert address not in {each.data_ptr() for each in fresh}
    assert not busy.done()
