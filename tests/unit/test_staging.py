"""Proves: staging slots are page-aligned and disjoint, at least two, never handed out twice or once retired."""

from __future__ import annotations

import logging

import pytest

from nixl_offload.engine.staging import StagingPool
from nixl_offload.types import PAGE_BYTES


def test_slots_are_aligned_disjoint_and_inside_the_region() -> None:
    pool = StagingPool(slot_bytes=5000, budget_bytes=8192 * 5 + 100)
    assert pool.slot_bytes == 8192
    slots = [pool.acquire() for _ in range(5)]
    assert pool.acquire() is None
    assert pool.free == 0
    for index, slot in enumerate(slots):
        assert slot is not None
        assert slot.memory.ctypes.data % PAGE_BYTES == 0
        assert slot.memory.ctypes.data == pool.region.address + slot.offset_bytes
        assert slot.memory.nbytes == 8192
        slot.memory[:] = index
    for index, slot in enumerate(slots):
        assert slot is not None
        assert (slot.memory == index).all()
    assert pool.region.length_bytes == 5 * 8192


def test_a_budget_too_small_for_two_slots_is_exceeded_and_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        pool = StagingPool(slot_bytes=1 << 20, budget_bytes=4096)
    assert pool.slots_total == 2
    assert "staging_bytes=4096" in caplog.text


def test_released_slots_come_back_and_a_double_release_is_refused() -> None:
    pool = StagingPool(slot_bytes=4096, budget_bytes=8192)
    first, second = pool.acquire(), pool.acquire()
    assert first is not None
    assert second is not None
    pool.release(first)
    again = pool.acquire()
    assert again is not None
    assert again.index == first.index
    pool.release(second)
    with pytest.raises(RuntimeError, match="twice"):
        pool.release(second)


def test_a_retired_slot_never_comes_back() -> None:
    pool = StagingPool(slot_bytes=4096, budget_bytes=3 * 4096)
    bad = pool.acquire()
    assert bad is not None
    pool.retire(bad)
    assert pool.usable == 2
    rest = [pool.acquire(), pool.acquire()]
    assert bad.index not in {slot.index for slot in rest if slot is not None}
    assert pool.acquire() is None


def test_memory_outlives_the_pool_while_a_slot_is_held() -> None:
    """A mover may still write to a slot after everything else was dropped."""
    pool = StagingPool(slot_bytes=4096, budget_bytes=8192)
    slot = pool.acquire()
    assert slot is not None
    del pool
    slot.memory[:] = 7
    assert int(slot.memory.sum()) == 7 * 4096
