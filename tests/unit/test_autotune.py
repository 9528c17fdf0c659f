"""Proves which mover is taken between a device and a directory's files, that no fault of storage meanwhile keeps an
engine from starting or frees memory that late I/O may touch.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nixl_offload.chunk.layout import GroupLayout, KVLayout, RegionSpec
from nixl_offload.config import SlabConfig
from nixl_offload.engine import autotune
from nixl_offload.engine.autotune import Speed, best_of, measure, open_planned, plan_tier, staging_for
from nixl_offload.engine.pump import LEAKED
from nixl_offload.engine.staging import SlotPool
from nixl_offload.engine.streams import Device
from nixl_offload.errors import MoverError, MoverUnavailableError
from nixl_offload.movers.base import MemoryKind, Mover, Op
from nixl_offload.movers.select import Probe, ProbedMover
from nixl_offload.movers.threaded import CopyMover
from tests.contract.suites.faulty_mover import Fault, FaultKind
from tests.mounts import mounted
from tests.unit.engine_rig import faulty

DEVICE = Device(torch.device("cpu"), MemoryKind.VRAM)
"""Host memory in the part of a device's. Without libcufile only POSIX can run then."""
HOST = Device(torch.device("cpu"), MemoryKind.DRAM)
MIB = 1 << 20


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """On few cores, torch's threads, which copy between host and "device" here, would wait for each other."""
    monkeypatch.setattr(autotune, "TRIAL_BYTES", MIB)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def layout_of(page_bytes: int = 8192) -> KVLayout:
    """Two layers, four blocks a chunk."""
    tensors = tuple(RegionSpec((1 << 30) + at * 64 * page_bytes, 64, page_bytes, page_bytes) for at in range(2))
    return KVLayout(tensors, (GroupLayout.of_pages(((0, page_bytes), (1, page_bytes))),), 4)


def tier_at(directory: Path, mover: str = "auto") -> SlabConfig:
    return SlabConfig.model_validate({"kind": "slab", "path": str(directory), "capacity": "1GiB", "mover": mover})


def measured(mover: Mover, directory: Path, **how: Any) -> Speed:
    return measure(mover, str(directory), DEVICE, 64 << 10, direct_io=True, **how)


# Which mover is taken


@pytest.mark.parametrize(
    ("gds_mt", "kvikio", "posix", "taken"),
    [
        ((1, 3), (1, 1), (3, 1), "posix"),  # a load holds up a request, so reads count twice
        ((1, 1), (1, 1), (1.09, 1.09), "gds_mt"),
        ((1, 1), (1, 1), (1.11, 1.11), "posix"),
        ((1, 1), (2, 2), (1, 1), "kvikio"),
    ],
)
def test_the_fastest_is_taken_or_the_first_within_ten_percent_of_it(
    gds_mt: tuple[float, float], kvikio: tuple[float, float], posix: tuple[float, float], taken: str
) -> None:
    speeds = [Speed(*figures) for figures in (gds_mt, kvikio, posix)]
    assert best_of(dict(zip(autotune.CANDIDATES, speeds, strict=True))) == taken


def test_what_is_settled_is_not_measured(tmp_path: Path) -> None:
    """A mover named in the config, host memory, and checksums without fast kernels on the device."""
    assert plan_tier(tier_at(tmp_path, "posix"), DEVICE, layout_of(), through_host=True) is None
    assert plan_tier(tier_at(tmp_path), HOST, layout_of(), through_host=True) is None
    assert plan_tier(tier_at(tmp_path), DEVICE, layout_of(), through_host=True) == "posix"


def test_without_a_driver_host_memory_is_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """No file is left, and one log line has the figures and the reasons."""
    with caplog.at_level("INFO", autotune.logger.name):
        assert plan_tier(tier_at(tmp_path), DEVICE, layout_of()) == "posix"
    [line] = [record.message for record in caplog.records if record.name == autotune.logger.name]
    assert "posix is the fastest" in line
    assert "posix: read " in line
    assert "GDS_MT" in line
    assert not list(tmp_path.iterdir())


def test_an_unexpected_error_is_no_reason_not_to_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tier's mover is then opened without measuring."""
    monkeypatch.setattr(autotune, "measure", lambda *_, **__: 1 / 0)
    assert plan_tier(tier_at(tmp_path), DEVICE, layout_of()) is None


@pytest.mark.parametrize(
    ("options", "words"),
    [("size=256k", "the disk has 0 MiB left, too little to measure with"), ("ro", "Read-only file system")],
)
def test_a_disk_that_is_full_or_read_only_costs_the_comparison_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, options: str, words: str
) -> None:
    with mounted(tmp_path / "disk", options) as disk, caplog.at_level("INFO", autotune.logger.name):
        assert plan_tier(tier_at(disk), DEVICE, layout_of()) is None
        assert not list(disk.iterdir())
    assert words in caplog.text


# Measuring


@pytest.mark.parametrize("kind", [FaultKind.FAIL, FaultKind.REFUSE])
def test_one_that_fails_in_the_middle_is_closed(tmp_path: Path, kind: FaultKind) -> None:
    before = len(LEAKED)
    with pytest.raises(MoverError, match="scripted fault"):
        measured(faulty(Fault(1, kind, op=Op.READ)), tmp_path)
    assert len(LEAKED) == before


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (Fault(0, FaultKind.STUCK, op=Op.READ), "storage did not answer for 0 s"),
        (Fault(0, FaultKind.FAIL, op=Op.READ, quarantine=True), "scripted fault"),
    ],
)
def test_memory_that_may_still_be_written_is_never_freed(tmp_path: Path, fault: Fault, words: str) -> None:
    """Nor does anybody wait for storage longer than the limit."""
    before, mover = len(LEAKED), faulty(fault)
    with pytest.raises(MoverError, match=words):
        measured(mover, tmp_path, limit_s=0.3)
    [kept] = LEAKED[before:]
    assert isinstance(kept, tuple)
    assert kept[0] is mover
    assert isinstance(kept[1], SlotPool)
    del LEAKED[before:]
    mover.close()


def test_memory_of_a_mover_that_was_passed_over_is_never_freed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A late transfer would write into memory that the model has by then."""
    kept: list[object] = []
    monkeypatch.setattr(autotune, "keep_forever", kept.append)
    report = [Probe("kvikio", True, "round trip ok")]
    monkeypatch.setattr(autotune, "open_mover", lambda *_, **__: ProbedMover(CopyMover(), tuple(report)))
    autotune.open_file_mover("auto", tier_at(tmp_path), str(tmp_path), DEVICE).close()
    assert not kept
    report.insert(0, Probe("gds_mt", False, "a page did not move within 10 s"))
    autotune.open_file_mover("auto", tier_at(tmp_path), str(tmp_path), DEVICE).close()
    assert len(kept) == 1


# What is opened


def test_a_planned_mover_that_opens_no_more_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def opened(name: str, tier: SlabConfig, directory: str, device: Device) -> CopyMover:
        if name == "kvikio":
            raise MoverUnavailableError("kvikio: gone")
        return CopyMover()

    monkeypatch.setattr(autotune, "open_file_mover", opened)
    mover = open_planned(tier_at(tmp_path), str(tmp_path), DEVICE, "kvikio")
    mover.close()
    assert (mover.name, staging_for(mover, DEVICE)) == ("copy", "host"), "it cannot touch the device"
    assert "kvikio: gone" in caplog.text
    with pytest.raises(MoverUnavailableError):
        open_planned(tier_at(tmp_path, "kvikio"), str(tmp_path), DEVICE, None)
