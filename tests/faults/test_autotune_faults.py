"""Proves that a disk that is nearly full, or cannot be written, costs the comparison of movers and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nixl_offload.config import SlabConfig
from nixl_offload.engine import autotune
from nixl_offload.engine.autotune import plan_tier
from nixl_offload.engine.streams import Device
from nixl_offload.movers.base import MemoryKind
from tests.mounts import mounted
from tests.unit.test_autotune import layout_of

from .conftest import SmallFilesystem

DEVICE = Device(torch.device("cpu"), MemoryKind.VRAM)


def test_a_disk_that_is_nearly_full(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with mounted(tmp_path / "disk", "size=8m") as disk:
        (disk / "filler").write_bytes(bytes((8 << 20) - (256 << 10)))
        assert _refused(disk, caplog) == ["filler"]
    assert "the disk has 0 MiB left, too little to measure with" in caplog.text


def test_a_disk_that_cannot_be_written(small_filesystem: SmallFilesystem, caplog: pytest.LogCaptureFixture) -> None:
    small_filesystem.make_read_only()
    assert not _refused(small_filesystem.path, caplog)
    assert "Read-only file system" in caplog.text


def _refused(directory: Path, caplog: pytest.LogCaptureFixture) -> list[str]:
    """No mover is taken; return what is in the directory then."""
    tier = SlabConfig.model_validate({"kind": "slab", "path": str(directory), "capacity": "1GiB"})
    with caplog.at_level("INFO", autotune.logger.name):
        assert plan_tier(tier, DEVICE, layout_of()) is None
    return [path.name for path in directory.iterdir() if path.name != "lost+found"]
