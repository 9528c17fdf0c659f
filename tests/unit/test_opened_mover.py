"""Proves what an engine is told of the transfer path that was measured, of staging, and of what a device can spare."""

from __future__ import annotations

import logging
import os
import sys
import time
from pathlib import Path

import pytest
import torch

from nixl_offload.chunk.layout import GroupLayout, KVLayout, RegionSpec
from nixl_offload.config import SlabConfig
from nixl_offload.engine import opened_mover as opened_module
from nixl_offload.engine.autotune import TransferPlan
from nixl_offload.engine.engine_memory import Staging
from nixl_offload.engine.opened_mover import (
    OpenedMover,
    open_planned,
    plan_tier,
    share_staging,
    spared_bytes,
    staging_of,
)
from nixl_offload.engine.streams import Device, HostStreams
from nixl_offload.errors import MoverUnavailableError
from nixl_offload.movers.base import MemoryKind
from nixl_offload.movers.copy import CopyMover
from nixl_offload.movers.select import open_mover

VRAM = Device(torch.device("cpu"), MemoryKind.VRAM, HostStreams())
DRAM = Device(torch.device("cpu"), MemoryKind.DRAM, HostStreams())
MIB = 1 << 20


def _layout(page_bytes: int = 8192) -> KVLayout:
    """Two layers, four blocks a chunk."""
    tensors = tuple(RegionSpec(at, (1 << 30) + at * 64 * page_bytes, 64, page_bytes, page_bytes) for at in range(2))
    return KVLayout(tensors, (GroupLayout.of_pages(((0, page_bytes), (1, page_bytes))),), 4)


@pytest.mark.parametrize("side", ["device", "host"])
def test_chunks_are_packed_where_it_was_measured(side: Staging) -> None:
    assert staging_of(OpenedMover(None, TransferPlan("gds_mt", side)), CopyMover(), VRAM) == side


def test_without_figures_a_mover_that_cannot_touch_the_device_packs_on_the_host() -> None:
    assert staging_of(OpenedMover(), CopyMover(), VRAM) == "host"


def test_a_device_without_quick_kernels_leaves_checksums_to_the_host(tmp_path: Path) -> None:
    """Torch's take many times as long as any drive. A mover that is named is used all the same, or nothing."""
    tier = SlabConfig(kind="slab", path=str(tmp_path), capacity=1 << 30)
    assert plan_tier(tier, VRAM, _layout(), host_because="checksums") == TransferPlan("posix", "host")
    named = tier.model_copy(update={"mover": "kvikio"})
    assert plan_tier(named, VRAM, _layout(), host_because="checksums") is None


def test_staging_keeps_to_what_the_device_can_spare(caplog: pytest.LogCaptureFixture) -> None:
    """Less than asked for, down to two chunks for each engine; below that through host memory, as much as asked for."""
    layout = _layout()
    two = 2 * layout.slot_bytes(0)
    assert share_staging("device", 64 * MIB, None, 2, layout) == ("device", 32 * MIB)
    assert share_staging("device", 64 * MIB, 40 * MIB, 2, layout) == ("device", 20 * MIB)
    assert share_staging("device", 64 * MIB, 2 * two, 2, layout) == ("device", two)
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        assert share_staging("device", 64 * MIB, 2 * two - 2, 2, layout) == ("host", 32 * MIB)
    assert "gpu_memory_utilization" in caplog.text


def test_what_the_model_has_claimed_is_not_spared(monkeypatch: pytest.MonkeyPatch) -> None:
    """However much of it is free at start: activations come later."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (79 << 30, 80 << 30))
    device = Device(torch.device("cuda"), MemoryKind.VRAM, HostStreams())
    assert spared_bytes(device, 0.9, 0) == pytest.approx(2 << 30, rel=1e-6)
    assert spared_bytes(device, 0.9, 3) == pytest.approx((2 << 30) - 3 * (128 << 20), rel=1e-6), "for copies"
    assert spared_bytes(device, 1.0, 1) == 0
    assert spared_bytes(VRAM, 0.9, 1) is None


def test_a_planned_mover_that_opens_no_more_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With a warning; and where the config names that very mover, nothing is passed over."""

    def opened(name: str, tier: SlabConfig, directory: str, device: Device) -> CopyMover:
        if name == "kvikio":
            raise MoverUnavailableError("kvikio: gone")
        return CopyMover()

    monkeypatch.setattr(opened_module, "open_file_mover", opened)
    tier = SlabConfig(kind="slab", path=str(tmp_path), capacity=1 << 30)
    with caplog.at_level(logging.WARNING):
        found = open_planned(tier, str(tmp_path), DRAM, TransferPlan("kvikio", "device"))
    assert isinstance(found.mover, CopyMover)
    assert found.plan is None
    assert "kvikio: gone" in caplog.text
    found.close()
    with pytest.raises(MoverUnavailableError):
        open_planned(tier.model_copy(update={"mover": "kvikio"}), str(tmp_path), DRAM, TransferPlan("kvikio", "device"))


def test_what_a_killed_process_has_left_is_removed(tmp_path: Path) -> None:
    """Whatever the mover, and with no plan: a young one may be a neighbour's."""
    old, young = tmp_path / ".mover-probe-abcd1234", tmp_path / ".mover-probe-efgh5678"
    for path in (old, young):
        path.write_bytes(bytes(16384))
    os.utime(old, (time.time() - 400.0,) * 2)
    tier = SlabConfig(kind="slab", path=str(tmp_path), capacity=1 << 30)
    opened_module.open_planned(tier, str(tmp_path), DRAM, None).close()
    assert [path.name for path in tmp_path.iterdir()] == [young.name]


def test_without_nixl_nobody_is_sent_to_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What keeps io_uring or aio from working is not what is wrong where the package is missing."""
    monkeypatch.delitem(sys.modules, "nixl._api", raising=False)
    monkeypatch.setitem(sys.modules, "nixl", None)
    with pytest.raises(MoverUnavailableError, match="`pip install nixl` brings it") as refused:
        open_mover("posix", MemoryKind.DRAM, str(tmp_path))
    assert "io_uring" not in str(refused.value)
    assert "aio contexts" not in str(refused.value)
