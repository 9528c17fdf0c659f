"""Autotune: which movers and transfer paths are compared, which wins, and that nothing that storage does keeps an
engine from starting. ``test_autotune_movers.py`` has the device's paths.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nixl_offload.config import SlabConfig
from nixl_offload.engine import autotune
from nixl_offload.engine.autotune import MeasuredMover, best_of, compare, plan_transfers, remove_leftovers
from nixl_offload.engine.pump import LEAKED
from nixl_offload.engine.streams import Device, HostStreams
from nixl_offload.movers.base import MemoryKind, Mover, Op
from nixl_offload.movers.copy import CopyMover
from nixl_offload.movers.select import Probe, ProbedMover
from nixl_offload.tiers.slab.directory import TierDirectory
from nixl_offload.types import PAGE_BYTES
from tests.contract.suites.faulty_mover import Fault, FaultKind, FaultyMover
from tests.unit.gc_rig import namespace_of

SLOT_BYTES = (64 << 10) + PAGE_BYTES
DEVICE = Device(torch.device("cpu"), MemoryKind.VRAM, HostStreams())
"""Host memory in the part of a device's. Without libcufile only POSIX can run then."""
HOST = Device(torch.device("cpu"), MemoryKind.DRAM, HostStreams())
BUDGET_S = 60.0


@pytest.fixture(autouse=True)
def _few_slots(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """So that the time is never over unless a test says so. Torch's threads, which copy between host and "device"
    here, would wait for each other where cores are few.
    """
    monkeypatch.setattr(autotune, "_SCRATCH_BYTES", (0, 256 << 20))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def tier_at(directory: Path, mover: str = "auto") -> SlabConfig:
    return SlabConfig.model_validate({"kind": "slab", "path": str(directory), "capacity": "1GiB", "mover": mover})


def tried(directory: Path, movers: dict[str, Callable[[], Mover]], **how: Any) -> dict[str, MeasuredMover]:
    """Compare movers that run everywhere, under the names of two candidates."""
    found = compare(
        (("posix", "host"), ("copy", "host")),
        str(directory),
        DEVICE,
        SLOT_BYTES,
        lambda name: movers[name](),
        **{"direct_io": True, "budget_s": BUDGET_S, **how},
    )
    return {candidate.mover: candidate for candidate in found}


def faulty(*faults: Fault) -> Mover:
    return FaultyMover(CopyMover(), faults)


def late(op: Op | None = None) -> Fault:
    """Forty polls, which are twenty milliseconds at least, for each transfer."""
    return Fault(0, FaultKind.LATE, op=op, amount=40, every=True)


# Which mover is taken


def measured(mover: str, read: float, write: float) -> MeasuredMover:
    return MeasuredMover(mover, "host" if mover == "posix" else "device", True, "", read * 1e9, write * 1e9)


@pytest.mark.parametrize(
    ("gds_mt", "kvikio", "posix", "taken"),
    [
        ((1, 3), (1, 1), (3, 1), "posix"),  # a load holds up a request, so reads count twice
        ((1, 1), (1, 1), (1.09, 1.09), "gds_mt"),
        ((1, 1), (1, 1), (1.11, 1.11), "posix"),
        ((1, 1), (1.05, 1.05), (0.5, 0.5), "gds_mt"),
        ((1, 1), (2, 2), (1, 1), "kvikio"),
    ],
)
def test_the_fastest_is_taken_or_the_first_within_ten_percent_of_it(
    gds_mt: tuple[float, float], kvikio: tuple[float, float], posix: tuple[float, float], taken: str
) -> None:
    best = best_of([measured("gds_mt", *gds_mt), measured("kvikio", *kvikio), measured("posix", *posix)])
    assert best is not None
    assert best.mover == taken


# Where there is nothing to compare


@pytest.mark.parametrize(("mover", "device"), [("posix", DEVICE), ("gds_mt", DEVICE), ("auto", HOST), ("gds_mt", HOST)])
def test_a_mover_that_is_named_and_memory_of_the_host_are_not_measured(
    tmp_path: Path, mover: str, device: Device
) -> None:
    assert plan_transfers(tier_at(tmp_path, mover), str(tmp_path), device, SLOT_BYTES) is None
    assert not list(tmp_path.iterdir())


def test_without_a_driver_host_memory_is_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is left behind, and one line has the figures and the reasons."""
    with caplog.at_level("INFO", autotune.logger.name):
        plan = plan_transfers(tier_at(tmp_path), str(tmp_path), DEVICE, SLOT_BYTES, budget_s=BUDGET_S)
    assert plan is not None
    assert (plan.mover, plan.side) == ("posix", "host")
    [line] = [record.message for record in caplog.records if record.name == autotune.logger.name]
    assert "posix, the fastest" in line
    assert "posix: read " in line
    assert "GDS_MT" in line
    assert not list(tmp_path.iterdir())


# Measuring


@pytest.mark.parametrize(("slow", "wins"), [("copy", "posix"), ("posix", "copy")])
def test_the_slower_one_loses_and_leaves_nothing_behind(tmp_path: Path, slow: str, wins: str) -> None:
    found = tried(tmp_path, {slow: lambda: faulty(late()), wins: faulty})
    assert best_of(list(found.values())) is found[wins]
    assert found[wins].read_bytes_s > found[slow].read_bytes_s
    assert found[wins].write_bytes_s > found[slow].write_bytes_s
    assert not list(tmp_path.iterdir())


def test_the_scratch_file_is_private(tmp_path: Path) -> None:
    """0600 while it has a name, and empty."""
    seen = []

    class Looking(CopyMover):
        def adopt_file(self, fd: int, path: str, length_bytes: int, *, direct: bool) -> Any:
            status = os.stat(path)
            seen.append((stat.S_IMODE(status.st_mode), status.st_size, Path(path).parent))
            return super().adopt_file(fd, path, length_bytes, direct=direct)

    tried(tmp_path, {"posix": Looking, "copy": faulty})
    assert seen == [(0o600, 0, tmp_path)]


@pytest.mark.parametrize("kind", [FaultKind.FAIL, FaultKind.REFUSE])
def test_one_that_fails_in_the_middle(tmp_path: Path, kind: FaultKind) -> None:
    """Is out of the running, with its reason; the other is measured all the same, and next start looks again."""
    found = tried(tmp_path, {"posix": lambda: faulty(Fault(2, kind, op=Op.READ)), "copy": faulty})
    assert not found["posix"].ok
    assert "scripted fault" in found["posix"].reason
    assert found["copy"].measured


def test_quarantined_memory_is_never_freed(tmp_path: Path) -> None:
    """A failed transfer that may still write: its memory outlives the comparison."""
    before = len(LEAKED)
    fault = Fault(0, FaultKind.FAIL, op=Op.READ, quarantine=True)
    found = tried(tmp_path, {"posix": lambda: faulty(fault), "copy": faulty})
    assert not found["posix"].ok
    assert [type(kept) for kept in LEAKED[before:]] == [autotune._TrialMemory]
    del LEAKED[before:]


def test_storage_that_hangs(tmp_path: Path) -> None:
    """Nobody waits for it longer than the limit; what it may still touch is kept, and the comparison ends there."""
    before = len(LEAKED)
    fault = Fault(0, FaultKind.STUCK, op=Op.READ)
    stuck = FaultyMover(CopyMover(), [fault])
    found = tried(tmp_path, {"posix": lambda: stuck, "copy": faulty}, limit_s=0.3)
    assert (found["posix"].ok, found["posix"].reason) == (False, "storage did not answer for 0 s")
    assert found["copy"].ok
    assert not found["copy"].measured
    assert {id(kept) for kept in LEAKED[before:]} >= {id(stuck)}
    del LEAKED[before:]
    stuck.close()
    assert not list(tmp_path.iterdir())


def test_memory_of_a_mover_that_was_passed_over_is_never_freed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What did not answer may answer late, into memory that the model has by then."""
    kept: list[torch.Tensor] = []
    monkeypatch.setattr(autotune, "_KEPT", kept)
    report = [Probe("kvikio", True, "round trip ok")]
    monkeypatch.setattr(autotune, "open_mover", lambda *_, **__: ProbedMover(CopyMover(), tuple(report)))
    autotune.open_file_mover("auto", tier_at(tmp_path), str(tmp_path), DEVICE).close()
    assert not kept
    report.insert(0, Probe("gds_mt", False, "a page did not move within 10 s"))
    autotune.open_file_mover("auto", tier_at(tmp_path), str(tmp_path), DEVICE).close()
    assert len(kept) == 1


def test_memory_that_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half as many slots, and half of that; where there is not even room for one, nothing is measured."""
    monkeypatch.setattr(autotune, "_SCRATCH_BYTES", (16 * SLOT_BYTES, 16 * SLOT_BYTES))
    room = [5 * SLOT_BYTES]
    empty = torch.empty

    def faulty_empty(size: int, **how: Any) -> torch.Tensor:
        if size > room[0]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        return empty(size, **how)

    monkeypatch.setattr(torch, "empty", faulty_empty)
    assert autotune._TrialMemory(str(tmp_path), DEVICE, SLOT_BYTES, host=True).slots == 4
    room[0] = SLOT_BYTES
    found = tried(tmp_path, {"posix": faulty, "copy": faulty})
    for candidate in found.values():
        assert candidate.ok
        assert "not measured: no 0 MiB of memory on cpu: CUDA out of memory" in candidate.reason


def test_an_error_of_our_own_does_not_keep_an_engine_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is told with its trace, and there is no plan: the tier's mover is opened unmeasured."""
    monkeypatch.setattr(autotune, "compare", lambda *_, **__: 1 / 0)
    assert plan_transfers(tier_at(tmp_path), str(tmp_path), DEVICE, SLOT_BYTES) is None
    assert [record.levelname for record in caplog.records if record.exc_info] == ["ERROR"]


# What else is in the directory


def test_what_killed_ranks_left_is_removed(tmp_path: Path) -> None:
    """By the next one that measures; what is young may be in use, what has other names is not ours."""
    old_s = time.time() - 3600
    old = [tmp_path / ".mover-choice-01ab.scratch", tmp_path / ".mover-probe-a8b_x2y4"]
    kept = [tmp_path / ".mover-choice-02ab.scratch", tmp_path / ".mover-choice-notes.txt", tmp_path / "scratch"]
    for path in [*old, *kept]:
        path.touch()
    for path in [*old, *kept[1:]]:
        os.utime(path, (old_s, old_s))
    remove_leftovers(str(tmp_path))
    assert set(tmp_path.iterdir()) == set(kept)


@pytest.mark.parametrize("dp_size", [1, 2])
def test_a_slab_keeps_its_size(tmp_path: Path, dp_size: int) -> None:
    """The files are paid for as other small ones: a second start finds as much room, and cuts nothing off."""

    def opened() -> int:
        directory = TierDirectory.open(
            tmp_path,
            capacity_bytes=dp_size * (64 << 20),
            namespace=namespace_of(),
            slot_classes=(PAGE_BYTES,),
            world_size=1,
            dp_engines=range(dp_size),
        )
        directory.close()
        return directory.rank_bytes

    first = opened()
    (tmp_path / ".mover-choice-0123456789abcdef.scratch").write_bytes(bytes(200 << 10))
    assert opened() == first
    (tmp_path / "stranger").write_bytes(bytes(8 << 20))
    assert opened() < first
