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
from nixl_offload.engine.autotune.candidates import TransferPlan
from nixl_offload.engine.engine import DIRECT_MIN_EXTENT_BYTES
from nixl_offload.engine.image import TransferPath
from nixl_offload.engine.opened_mover import (
    NEVER_DIRECT,
    EngineOptions,
    OpenedMover,
    engine_options,
    open_planned,
    plan_tier,
    shape_of,
    spared_bytes,
)
from nixl_offload.engine.streams import Device, HostStreams
from nixl_offload.errors import MoverUnavailableError
from nixl_offload.movers.base import MemoryKind
from nixl_offload.movers.copy import CopyMover
from nixl_offload.movers.select import open_mover

VRAM = Device(torch.device("cpu"), MemoryKind.VRAM, HostStreams())
DRAM = Device(torch.device("cpu"), MemoryKind.DRAM, HostStreams())
MIB = 1 << 20


def _layout(page_bytes: int = 8192, base: int = 1 << 30) -> KVLayout:
    """Two layers, four blocks a chunk."""
    tensors = tuple(RegionSpec(at, base + at * 64 * page_bytes, 64, page_bytes, page_bytes) for at in range(2))
    return KVLayout(tensors, (GroupLayout.of_pages(((0, page_bytes), (1, page_bytes))),), 4)


def _plan(path: TransferPath, mover: str = "gds_mt") -> TransferPlan:
    return TransferPlan(mover, path, "the fastest")


def test_a_shape_has_pieces_where_all_of_them_are_aligned() -> None:
    assert shape_of(_layout()).piece_bytes == 8192
    assert shape_of(_layout(base=(1 << 30) + 64)).piece_bytes == 0
    assert shape_of(_layout()).slot_bytes == 4096 + 4 * 2 * 8192


@pytest.mark.parametrize(
    ("path", "told"),
    [("direct", (8192, "device")), ("device", (NEVER_DIRECT, "device")), ("host", (NEVER_DIRECT, "host"))],
)
def test_what_was_measured_is_what_is_done(path: TransferPath, told: tuple[int, str]) -> None:
    """Direct from the measured size on; else never, whatever the size."""
    options = engine_options(OpenedMover(None, _plan(path)), CopyMover(), VRAM, _layout())
    assert (options.direct_min_extent_bytes, options.staging) == told


def test_without_figures_a_mover_that_cannot_touch_the_device_packs_on_the_host() -> None:
    options = engine_options(OpenedMover(), CopyMover(), VRAM, _layout())
    assert (options.direct_min_extent_bytes, options.staging) == (DIRECT_MIN_EXTENT_BYTES, "host")


def test_a_device_without_quick_kernels_leaves_checksums_to_the_host(tmp_path: Path) -> None:
    """Torch's take many times as long as any drive. A mover that is named is used all the same, or nothing."""
    tier = SlabConfig(kind="slab", path=str(tmp_path), capacity=1 << 30)
    plan = plan_tier(tier, VRAM, _layout(), host_because="checksums")
    assert plan is not None
    assert (plan.mover, plan.path) == ("posix", "host")
    with pytest.raises(MoverUnavailableError, match="mover 'kvikio' cannot move vram"):
        plan_tier(
            tier.model_copy(update={"mover": "kvikio"}), VRAM, _layout(base=(1 << 30) + 64), host_because="checksums"
        )


def test_staging_keeps_to_what_the_device_can_spare(caplog: pytest.LogCaptureFixture) -> None:
    """Less than asked for, down to two chunks for each engine; below that through host memory, as much as asked for."""
    options, layout = EngineOptions(NEVER_DIRECT, "device"), _layout()
    two = 2 * layout.slot_bytes(0)
    assert options.share(64 * MIB, None, 2, layout) == EngineOptions(NEVER_DIRECT, "device", 32 * MIB)
    assert options.share(64 * MIB, 40 * MIB, 2, layout) == EngineOptions(NEVER_DIRECT, "device", 20 * MIB)
    assert options.share(64 * MIB, 2 * two, 2, layout) == EngineOptions(NEVER_DIRECT, "device", two)
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        assert options.share(64 * MIB, 2 * two - 2, 2, layout) == EngineOptions(NEVER_DIRECT, "host", 32 * MIB)
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
        found = open_planned(tier, str(tmp_path), DRAM, _plan("device", "kvikio"))
    assert isinstance(found.mover, CopyMover)
    assert found.plan is None
    assert "kvikio: gone" in caplog.text
    found.close()
    with pytest.raises(MoverUnavailableError):
        open_planned(tier.model_copy(update={"mover": "kvikio"}), str(tmp_path), DRAM, _plan("device", "kvikio"))


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
