"""Autotune on a disk that is full, gets full, or cannot be written: that alone keeps no engine from starting,
and nothing is left behind.
"""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest
import torch

from nixl_offload.config import SlabConfig
from nixl_offload.engine import autotune
from nixl_offload.engine.autotune import MeasuredMover, compare, plan_transfers
from nixl_offload.engine.streams import Device, HostStreams
from nixl_offload.movers.base import MemoryKind
from nixl_offload.movers.copy import CopyMover
from nixl_offload.types import PAGE_BYTES

from .conftest import SmallFilesystem

MIB = 1 << 20
DEVICE = Device(torch.device("cpu"), MemoryKind.VRAM, HostStreams())
SLOT_BYTES = MIB + PAGE_BYTES


def tried(directory: Path) -> tuple[MeasuredMover, ...]:
    """Compare a mover with itself."""
    paths = (("posix", "host"), ("copy", "host"))
    return compare(paths, str(directory), DEVICE, SLOT_BYTES, lambda _: CopyMover(), direct_io=False, budget_s=60.0)


def files(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir() if path.name != "lost+found"]


def test_little_is_taken_where_little_is_left(tmpfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 8 MiB a quarter at most, for this test: room for one image."""
    monkeypatch.setattr(autotune, "FREE_SHARE", 4)
    assert all(candidate.measured for candidate in tried(tmpfs))
    assert not files(tmpfs)


def test_a_disk_that_is_nearly_full(tmpfs: Path) -> None:
    """Nothing is measured, and the first that runs is taken; the reason says why."""
    (tmpfs / "filler").write_bytes(bytes(5 * MIB))
    for candidate in tried(tmpfs):
        assert candidate.ok
        assert candidate.reason == "not measured: the disk has 3 MiB left, too little to measure with"
    assert files(tmpfs) == ["filler"]


def test_a_disk_that_gets_full(tmpfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others took what was free a moment ago: where none can write it is not the movers' fault."""
    monkeypatch.setattr(autotune, "FREE_SHARE", Fraction(1, 8))
    (tmpfs / "filler").write_bytes(bytes(7 * MIB + MIB // 2))
    for candidate in tried(tmpfs):
        assert candidate.ok
        assert candidate.reason.startswith("not measured: the scratch file could not be written: ")
        assert "No space left on device" in candidate.reason
    assert files(tmpfs) == ["filler"]


def test_a_disk_that_cannot_be_written(small_filesystem: SmallFilesystem, caplog: pytest.LogCaptureFixture) -> None:
    """No mover can make its round trip: the log says so, and there is no plan."""
    small_filesystem.make_read_only()
    tier = SlabConfig.model_validate({"kind": "slab", "path": str(small_filesystem.path), "capacity": "1GiB"})
    with caplog.at_level("INFO", autotune.logger.name):
        assert plan_transfers(tier, str(small_filesystem.path), DEVICE, SLOT_BYTES) is None
    assert "Read-only file system" in caplog.text
    assert not files(small_filesystem.path)
