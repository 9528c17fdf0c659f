"""Proves: staging slots, on the host and on a device, are page-aligned and disjoint, at least two, never handed out
twice or once retired; a device gives what it can spare, and says when it cannot.
"""

from __future__ import annotations

import logging
import mmap
import time

import numpy as np
import pytest
import torch

from nixl_offload.chunk.layout import GroupLayout, KVLayout, RegionSpec
from nixl_offload.engine.device_packer import DEVICE_BYTES
from nixl_offload.engine.link_memory import share_staging
from nixl_offload.engine.staging import Staging, device_pool, host_pool
from nixl_offload.engine.streams import Device
from nixl_offload.errors import MoverError
from nixl_offload.movers.base import MemoryKind
from nixl_offload.types import PAGE_BYTES
from tests.unit.device_rig import ThreadedDevice

DEVICE = Device(torch.device("cpu"), MemoryKind.VRAM)


def test_a_budget_too_small_for_two_slots_is_exceeded_and_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        pool = host_pool(slot_bytes=1 << 20, budget_bytes=4096)
        assert pool.slots_total == 2
        assert "staging_bytes=4096" in caplog.text
        caplog.clear()
        host_pool(slot_bytes=1 << 20, budget_bytes=2 << 20)
        assert not caplog.records, "two are enough"


@pytest.mark.parametrize(("begins_at", "asked"), [(0, [5]), (512, [5, 6])])
def test_page_locked_slots_are_aligned_too_and_take_no_page_more_than_they_must(
    monkeypatch: pytest.MonkeyPatch, begins_at: int, asked: list[int]
) -> None:
    """Torch's page-locked memory may begin anywhere in a page."""
    area = np.frombuffer(mmap.mmap(-1, 16 * PAGE_BYTES), dtype=np.uint8)
    lengths = []

    def empty(length_bytes: int, *, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        assert (dtype, pin_memory) == (torch.uint8, True)
        lengths.append(length_bytes)
        return torch.from_numpy(area[begins_at : begins_at + length_bytes])

    monkeypatch.setattr(torch, "empty", empty)
    pool = host_pool(slot_bytes=PAGE_BYTES, budget_bytes=5 * PAGE_BYTES, page_locked=True)
    assert [length_bytes // PAGE_BYTES for length_bytes in lengths] == asked
    assert (pool.slots_total, pool.region.length_bytes) == (5, 5 * PAGE_BYTES)
    assert pool.region.address % PAGE_BYTES == 0
    first, *_, last = (pool.acquire() for _ in range(5))
    assert first is not None
    assert last is not None
    first.memory[:], last.memory[:] = 1, 5
    begin = PAGE_BYTES if begins_at else 0
    assert (area[begin : begin + PAGE_BYTES] == 1).all()
    assert (area[begin + 4 * PAGE_BYTES : begin + 5 * PAGE_BYTES] == 5).all()


def test_a_device_without_room_says_what_can_be_done(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(size: int, **_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(MoverError, match=r"no room for 30 staging slots of 1MiB.*gpu_memory_utilization.*host memory"):
        device_pool(slot_bytes=1 << 20, budget_bytes=30 << 20, device=DEVICE)


GIB, MIB = 1 << 30, 1 << 20


@pytest.mark.parametrize(
    ("side", "free_bytes", "claimed", "packers", "wanted", "found"),
    [
        ("device", 79 * GIB, 0.9, 0, 64 * MIB, ("device", 32 * MIB)),
        ("device", 79 * GIB, 0.9, 0, 8 * GIB, ("device", GIB)),  # activations come later: only 8 GiB are not claimed
        ("device", 2 * GIB, 0.9, 0, 8 * GIB, ("device", GIB // 4)),  # other processes use the device too
        ("device", 79 * GIB, 0.9, 3, 8 * GIB, ("device", GIB - 3 * DEVICE_BYTES // 2)),  # room for copies
        ("device", 79 * GIB, 1.0, 1, 64 * MIB, ("host", 32 * MIB)),
        ("host", 79 * GIB, 0.9, 0, 64 * MIB, ("host", 32 * MIB)),
    ],
)
def test_staging_keeps_to_what_the_device_can_spare(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    side: Staging,
    free_bytes: int,
    claimed: float,
    packers: int,
    wanted: int,
    found: tuple[str, int],
) -> None:
    """A quarter of the free, unclaimed memory, for two tiers. If two chunks do not fit, host memory is used."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free_bytes, 80 * GIB))
    layout = KVLayout((RegionSpec(GIB, 64, 8192, 8192),), (GroupLayout.of_pages([(0, 8192)]),), 4)
    device = Device(torch.device("cuda"), MemoryKind.VRAM)
    options = {"packers": packers, "sharers": 2, "layout": layout}
    side, share_bytes = share_staging(side, wanted, device, claimed, **options)
    assert (side, share_bytes) == (found[0], pytest.approx(found[1], rel=1e-6))
    assert ("gpu_memory_utilization" in caplog.text) == (claimed == 1.0)
    assert share_staging("device", wanted, DEVICE, claimed, **options) == ("device", wanted // 2)


def test_memory_of_a_device_is_not_handed_out_while_the_model_may_still_write_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An allocator may return memory that a queued kernel of its old owner will still write; movers know no streams."""
    with ThreadedDevice() as device:
        reused = torch.zeros(3 * PAGE_BYTES, dtype=torch.uint8)
        monkeypatch.setattr(torch, "empty", lambda *_, **__: reused)
        device.compute.run(lambda: time.sleep(0.1))
        device.compute.run(lambda: reused.__setitem__(slice(None), 9))
        pool = device_pool(slot_bytes=PAGE_BYTES, budget_bytes=2 * PAGE_BYTES, device=device)
        slot = pool.acquire()
        assert slot is not None
        assert (slot.memory == 9).all()


def test_slots_on_a_device_are_aligned_disjoint_and_inside_one_region_of_it(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        pool = device_pool(slot_bytes=5000, budget_bytes=8192 * 5 + 100, device=DEVICE)
    assert (pool.slots_total, pool.slot_bytes, pool.region.length_bytes) == (5, 8192, 5 * 8192)
    assert (pool.region.kind, pool.region.device_id) == (MemoryKind.VRAM, 0)
    slots = [pool.acquire() for _ in range(5)]
    assert pool.acquire() is None
    for index, slot in enumerate(slots):
        assert slot is not None
        assert slot.memory.data_ptr() % PAGE_BYTES == 0
        assert slot.memory.data_ptr() == pool.region.address + slot.offset_bytes
        assert (slot.memory.shape, slot.memory.dtype) == ((8192,), torch.uint8)
        slot.memory.fill_(index)
    for index, slot in enumerate(slots):
        assert slot is not None
        assert (slot.memory == index).all()
    pool.retire(slots[0])
    pool.release(slots[1])
    with pytest.raises(RuntimeError, match="twice"):
        pool.release(slots[1])
    assert (pool.usable, pool.free) == (4, 1)
    assert "staging_bytes" not in caplog.text
