"""Autotune: which movers and transfer paths are compared, which wins, and that nothing that storage does keeps an
engine from starting. ``test_autotune_movers.py`` has the device's paths.
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from nixl_offload.cli.main import main
from nixl_offload.config import SlabConfig
from nixl_offload.engine.autotune import compare as compare_module
from nixl_offload.engine.autotune import plan as plan_module
from nixl_offload.engine.autotune.candidates import (
    MeasuredPath,
    Shape,
    TransferPlan,
    best_of,
    candidates_of,
    told_to_bounce,
)
from nixl_offload.engine.autotune.compare import compare
from nixl_offload.engine.autotune.plan import plan_transfers
from nixl_offload.engine.autotune.scratch import TrialMemory, new_scratch_path
from nixl_offload.engine.image import TransferPath
from nixl_offload.engine.pump import LEAKED
from nixl_offload.engine.streams import Device, HostStreams
from nixl_offload.errors import MoverUnavailableError
from nixl_offload.hardware.gds import GdsReport
from nixl_offload.movers.base import MemoryKind, Mover, Op
from nixl_offload.movers.copy import CopyMover
from nixl_offload.movers.limits import LimitedMover
from nixl_offload.movers.select import Probe, ProbedMover
from nixl_offload.stores.directory import TreeStore
from nixl_offload.tiers.slab.directory import TierDirectory
from nixl_offload.types import PAGE_BYTES
from tests.contract.suites.faulty_mover import Fault, FaultKind, FaultyMover
from tests.unit.gc_rig import namespace_of, put_chunk, put_manifest

KIB = 1 << 10
SHAPE = Shape(64 * KIB + PAGE_BYTES, 16 * KIB)
DEVICE = Device(torch.device("cpu"), MemoryKind.VRAM, HostStreams())
"""Host memory in the part of a device's. Without libcufile only POSIX can run then."""
HOST = Device(torch.device("cpu"), MemoryKind.DRAM, HostStreams())
PATHS: tuple[tuple[str, TransferPath], ...] = (("posix", "host"), ("copy", "host"))
"""Two movers that run everywhere, under the names of two candidates."""
BUDGET_S = 10.0
FAST = {"read_bytes_s": 4e9, "write_bytes_s": 2e9}


@pytest.fixture(autouse=True)
def _small_turns(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An image goes through each slot once per turn, so that the time is never over unless a test says so. Torch's
    threads, which copy between host and "device" here, would wait for each other where cores are few.
    """
    monkeypatch.setattr(compare_module, "MAX_LAPS", 1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def tier_at(directory: Path, mover: str = "auto") -> SlabConfig:
    return SlabConfig.model_validate({"kind": "slab", "path": str(directory), "capacity": "1GiB", "mover": mover})


def planned(
    directory: Path, *, mover: str = "auto", device: Device = DEVICE, shape: Shape = SHAPE, **how: Any
) -> TransferPlan:
    plan = plan_transfers(tier_at(directory, mover), str(directory), device, shape, **{"budget_s": BUDGET_S, **how})
    assert plan is not None
    return plan


def tried(
    directory: Path, movers: dict[str, Callable[[], Mover]], *, shape: Shape = SHAPE, **how: Any
) -> dict[str, MeasuredPath]:
    """Compare movers under the names of ``PATHS``."""
    found = compare(
        PATHS,
        str(directory),
        DEVICE,
        shape,
        lambda name: movers[name](),
        **{"direct_io": True, "budget_s": BUDGET_S, **how},
    )
    return {candidate.mover: candidate for candidate in found}


def limited(*faults: Fault) -> LimitedMover:
    return LimitedMover(FaultyMover(CopyMover(), faults))


def late(op: Op | None = None) -> Fault:
    """Forty polls, which are twenty milliseconds at least, for each transfer."""
    return Fault(0, FaultKind.LATE, op=op, amount=40, every=True)


# What is compared, and which is taken


@pytest.mark.parametrize(
    ("mover", "piece_bytes", "accelerator", "paths"),
    [
        ("auto", 0, True, "gds_mt device, kvikio device, posix host"),
        (
            "auto",
            256 * KIB,
            True,
            "gds_mt direct, gds_mt device, kvikio direct, kvikio device, posix host",
        ),
        ("auto", 64 * KIB, True, "gds_mt device, gds_mt direct, kvikio device, kvikio direct, posix host"),
        ("gds_mt", 256 * KIB, True, "gds_mt direct, gds_mt device"),
        ("kvikio", 0, True, "kvikio device"),
        ("posix", 256 * KIB, True, "posix host"),
        ("auto", 256 * KIB, False, "auto host"),
        ("gds_mt", 256 * KIB, False, "gds_mt host"),
    ],
)
def test_what_is_compared(mover: str, piece_bytes: int, accelerator: bool, paths: str) -> None:
    """Preferred first; small pieces go packed where nothing is known."""
    found = candidates_of(mover, Shape(1 << 20, piece_bytes), accelerator=accelerator)
    assert ", ".join(map(" ".join, found)) == paths


def test_reads_count_twice() -> None:
    """A load holds up a request: what reads faster wins over what writes faster by as much."""
    reads = MeasuredPath("posix", "host", True, "", read_bytes_s=3e9, write_bytes_s=1e9)
    writes = MeasuredPath("gds_mt", "device", True, "", read_bytes_s=1e9, write_bytes_s=3e9)
    assert best_of([writes, reads]) is reads


@pytest.mark.parametrize(("share", "wins"), [(1.09, "direct"), (1.11, "host")])
def test_within_ten_percent_fewer_copies_win(share: float, wins: str) -> None:
    """And only within."""
    host = MeasuredPath("posix", "host", True, "", read_bytes_s=share * 1e9, write_bytes_s=share * 1e9)
    direct = MeasuredPath("kvikio", "direct", True, "", read_bytes_s=1e9, write_bytes_s=1e9)
    device = MeasuredPath("gds_mt", "device", True, "", read_bytes_s=1e9, write_bytes_s=1e9)
    best = best_of([host, device, direct])
    assert best is not None
    assert best.path == wins


def test_gds_mt_before_kvikio() -> None:
    """Where both do as well, on the same path."""
    kvikio = MeasuredPath("kvikio", "device", True, "", **FAST)
    measured = [
        replace(kvikio, mover=mover, path=path)
        for mover, path in candidates_of("auto", Shape(1 << 20, 0), accelerator=True)
        if mover != "posix"
    ]
    assert best_of(measured) == replace(kvikio, mover="gds_mt")


def figures(mover: str, path: TransferPath, read_gb_s: float) -> MeasuredPath:
    return MeasuredPath(mover, path, True, "", read_bytes_s=read_gb_s * 1e9, write_bytes_s=2e9)


@pytest.mark.parametrize(
    ("direct", "device", "host", "slot_bytes", "bounces"),
    [
        (5.9, 5.5, 6.0, 2 << 20, False),
        (2.0, 4.3, 6.0, 2 << 20, False),  # many small pieces; packed it is as fast as the drive
        (2.0, 4.1, 6.0, 2 << 20, True),
        (2.0, 1.0, 6.0, 256 * KIB, False),
        (2.0, 1.0, 0.0, 2 << 20, False),
    ],
)
def test_bouncing_is_told_by_its_speed(
    direct: float, device: float, host: float, slot_bytes: int, bounces: bool
) -> None:
    """Against what the drive gives to host memory; not of small images, where calls count, nor without a figure."""
    found = [
        figures("gds_mt", "direct", direct),
        figures("gds_mt", "device", device),
        figures("kvikio", "device", 1.0),
        figures("posix", "host", host),
    ]
    told = told_to_bounce(found, Shape(slot_bytes, 64 * KIB))
    assert (told == (found[1], found[3])) is bounces
    assert (told is not None) is bounces


@pytest.mark.parametrize(
    ("mover", "piece_bytes"),
    [("auto", 256 * KIB), ("gds_mt", 256 * KIB), ("gds_mt", 0)],
    ids=["auto", "named", "named, with one path"],
)
@pytest.mark.parametrize(
    ("real", "verdict", "warnings"),
    [
        (True, "GPUDirect Storage: real (nvidia-fs 2.27, xfs on nvme0n1)", 1),
        (False, "GPUDirect Storage: not certain, because the driver's options cannot be told", 1),
        (False, "compatibility mode: cuFile copies through host memory, because ...", 0),
    ],
)
def test_it_is_said_where_nothing_else_says_so(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    mover: str,
    piece_bytes: int,
    real: bool,
    verdict: str,
    warnings: int,
) -> None:
    """Also of a mover that the config names: what it is held against is measured then, and never taken."""
    speeds = {("gds_mt", "direct"): 1.0, ("gds_mt", "device"): 1.5, ("posix", "host"): 6.0}

    def compared(candidates: Sequence[tuple[str, TransferPath]], *_: Any, **__: Any) -> tuple[MeasuredPath, ...]:
        return tuple(
            figures(name, path, speeds[name, path]) if name != "kvikio" else MeasuredPath(name, path, False, "gone")
            for name, path in candidates
        )

    monkeypatch.setattr(plan_module, "compare", compared)
    monkeypatch.setattr(plan_module, "gds_report", lambda _: GdsReport(real, verdict, ()))
    plan = planned(tmp_path, mover=mover, shape=Shape(2 << 20, piece_bytes))
    assert plan.mover == ("posix" if mover == "auto" else "gds_mt")
    assert all(found.mover != "posix" for found in plan.candidates) is (mover == "gds_mt")
    said = [record.message for record in caplog.records if "copies through host memory, or drive" in record.message]
    assert len(said) == warnings
    assert all("gds_mt reads 1.5 GB/s" in words and "takes 6 GB/s" in words and verdict in words for words in said)


def test_without_figures_there_is_no_best() -> None:
    """One that failed or was not measured is not compared."""
    assert (
        best_of([MeasuredPath("gds_mt", "direct", False, "broken", **FAST), MeasuredPath("posix", "host", True, "")])
        is None
    )


@pytest.mark.parametrize("images", [1, 3, 16])
@pytest.mark.parametrize("piece_bytes", [4 * KIB, 20 * KIB, 1 << 30])
def test_pieces_cover_the_image_and_lie_apart(images: int, piece_bytes: int) -> None:
    """In the file a chunk's pieces follow one another behind its header; in memory no two of all chunks overlap."""
    shape = Shape(SHAPE.slot_bytes, piece_bytes)
    memory = TrialMemory(DEVICE, shape, images, shape.slot_bytes)
    taken = []
    for number in range(images):
        in_memory, in_file = memory.pieces_of(number)
        assert (in_memory[:, 1] == in_file[:, 1]).all()
        ends = in_file.sum(axis=1)
        assert in_file[0, 0] == number * shape.slot_bytes + PAGE_BYTES
        assert (in_file[1:, 0] == ends[:-1]).all()
        assert ends[-1] == (number + 1) * shape.slot_bytes
        taken += in_memory.tolist()
    taken.sort()
    assert all(begin + length <= after for (begin, length), (after, _) in pairwise(taken))
    assert sum(taken[-1]) <= memory.device_region.length_bytes


# Where there is nothing to compare


@pytest.mark.parametrize(("mover", "device"), [("posix", DEVICE), ("auto", HOST), ("gds_mt", HOST)])
def test_nothing_to_choose(tmp_path: Path, mover: str, device: Device) -> None:
    """One path only: nothing is opened, measured or kept. Opening it is for the engine."""
    plan = planned(tmp_path, mover=mover, device=device)
    assert (plan.mover, plan.path, plan.candidates) == (mover, "host", ())
    assert plan.reason
    assert not list(tmp_path.iterdir())


def test_one_that_can_run(tmp_path: Path) -> None:
    """Without libcufile and a driver there is only host memory, which is not measured. Nothing is left behind."""
    plan = planned(tmp_path)
    assert (plan.mover, plan.path) == ("posix", "host")
    assert plan.reason == "the first that runs: not measured: nothing else can run"
    why = {found.mover: found.reason for found in plan.candidates if not found.ok}
    assert set(why) == {"gds_mt", "kvikio"}
    assert "GDS_MT" in why["gds_mt"]
    assert not list(tmp_path.iterdir())


def test_nothing_that_is_asked_for_can_run(tmp_path: Path) -> None:
    """All reasons in one sentence, as from ``open_mover``."""
    with pytest.raises(MoverUnavailableError, match=r"mover 'gds_mt' cannot move vram .* gds_mt: .*GDS_MT plugin"):
        planned(tmp_path, mover="gds_mt")
    assert not list(tmp_path.iterdir())


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    """Is told as a mover that cannot run, for no file can be made there."""
    with pytest.raises(MoverUnavailableError, match="No such file or directory"):
        planned(tmp_path / "gone")


def test_what_did_not_open_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Storage that hangs takes a minute to say so for each mover, and vLLM's engine has ten to start."""
    names: list[str] = []

    def refused(name: str, *_: object, **__: object) -> ProbedMover:
        names.append(name)
        raise MoverUnavailableError("a page did not move within 20 s")

    monkeypatch.setattr(plan_module, "open_mover", refused)
    with pytest.raises(MoverUnavailableError, match=r"gds_mt: a page did not move.*copy: a page did not move"):
        planned(tmp_path)
    assert names == ["gds_mt", "kvikio", "posix", "copy"]


def test_without_nixl_copy_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = plan_module.open_mover

    def without_nixl(name: Any, *rest: Any, **how: Any) -> ProbedMover:
        if name != "copy":
            raise MoverUnavailableError(f"{name}: NIXL cannot be imported")
        return real(name, *rest, **how)

    monkeypatch.setattr(plan_module, "open_mover", without_nixl)
    plan = planned(tmp_path)
    assert (plan.mover, plan.path) == ("copy", "host")
    assert [found.ok for found in plan.candidates] == [False] * 5 + [True]


def test_check_measures_as_a_server_does(tmp_path: Path) -> None:
    """Without a GPU the KV cache is in host memory, and nothing is compared."""
    plan = plan_transfers(tier_at(tmp_path), str(tmp_path), HOST, SHAPE)
    assert plan == TransferPlan("auto", "host", "the KV cache is in host memory")


# Measuring


@pytest.mark.parametrize(("slow", "wins"), [("copy", "posix"), ("posix", "copy")])
def test_the_slower_one_loses(tmp_path: Path, slow: str, wins: str) -> None:
    """Whichever it is; nothing is left behind."""
    found = tried(tmp_path, {slow: lambda: limited(late()), wins: limited})
    assert best_of(list(found.values())) is found[wins]
    assert found[wins].read_bytes_s > found[slow].read_bytes_s
    assert found[wins].write_bytes_s > found[slow].write_bytes_s
    assert not list(tmp_path.iterdir())


def test_one_that_reads_slowly_loses(tmp_path: Path) -> None:
    """Reads and writes are measured apart."""
    found = tried(tmp_path, {"posix": lambda: limited(late(Op.READ)), "copy": limited})
    assert found["copy"].read_bytes_s > found["posix"].read_bytes_s
    assert found["posix"].write_bytes_s > found["posix"].read_bytes_s


def test_turns_alternate_and_the_scratch_file_has_no_name(tmp_path: Path) -> None:
    """A B A B, so that a disk that gets slower does so for both; a process that is killed then leaves nothing."""
    turns: list[tuple[str, Op]] = []
    names: list[Path] = []

    class Watched(CopyMover):
        def submit(self, op: Op, *request: Any) -> Any:
            names.extend(tmp_path.iterdir())
            if turns[-1:] != [(self.name, op)]:
                turns.append((self.name, op))
            return super().submit(op, *request)

    tried(tmp_path, {name: lambda name=name: LimitedMover(Watched(name=name)) for name, _ in PATHS})
    turn = [(name, op) for name, _ in PATHS for op in (Op.WRITE, Op.READ)]
    assert len(turns) >= 2 * len(turn)
    assert turns == (turn * (compare_module.ROUNDS + 1))[: len(turns)]
    assert not names


def test_the_scratch_file_is_private(tmp_path: Path) -> None:
    """0600 while it has a name, and empty."""
    seen = []

    class Looking(CopyMover):
        def open_file(self, path: str, length_bytes: int, *, direct_io: bool) -> Any:
            status = os.stat(path)
            seen.append((stat.S_IMODE(status.st_mode), status.st_size, Path(path).parent))
            return super().open_file(path, length_bytes, direct_io=direct_io)

    tried(tmp_path, {"posix": lambda: LimitedMover(Looking()), "copy": limited})
    assert seen == [(0o600, 0, tmp_path)]


def test_without_direct_io(tmp_path: Path) -> None:
    """Through the page cache, which is emptied before reads."""
    found = tried(tmp_path, {"posix": limited, "copy": limited}, direct_io=False)
    assert all(candidate.measured for candidate in found.values())


@pytest.mark.parametrize("kind", [FaultKind.FAIL, FaultKind.REFUSE])
def test_one_that_fails_in_the_middle(tmp_path: Path, kind: FaultKind) -> None:
    """Is out of the running, with its reason; the other is measured all the same, and next start looks again."""
    found = tried(tmp_path, {"posix": lambda: limited(Fault(5, kind, op=Op.READ)), "copy": limited})
    assert not found["posix"].ok
    assert "scripted fault" in found["posix"].reason
    assert found["copy"].measured


def test_quarantined_memory_is_never_freed(tmp_path: Path) -> None:
    """A failed transfer that may still write: its memory outlives the comparison."""
    before = len(LEAKED)
    fault = Fault(0, FaultKind.FAIL, op=Op.READ, quarantine=True)
    found = tried(tmp_path, {"posix": lambda: limited(fault), "copy": limited})
    assert not found["posix"].ok
    assert [type(kept) for kept in LEAKED[before:]] == [TrialMemory]
    del LEAKED[before:]


def test_storage_that_hangs(tmp_path: Path) -> None:
    """Nobody waits for it longer than the limit; what it may still touch is kept, and the comparison ends there."""
    before = len(LEAKED)
    fault = Fault(0, FaultKind.STUCK, op=Op.READ)
    stuck = LimitedMover(FaultyMover(CopyMover(), [fault]), close_timeout_s=0.1)
    began_s = time.monotonic()
    found = tried(tmp_path, {"posix": lambda: stuck, "copy": limited}, limit_s=0.3)
    assert time.monotonic() - began_s < 5
    assert (found["posix"].ok, found["posix"].reason) == (False, "storage did not answer for 0 s")
    assert found["copy"].ok
    assert not found["copy"].measured
    assert {id(kept) for kept in LEAKED[before:]} >= {id(stuck)}
    del LEAKED[before:]
    stuck.close()
    assert not list(tmp_path.iterdir())


def test_slow_storage_does_not_hold_the_start(tmp_path: Path) -> None:
    """When the time is over, what there is has to do: the second one has no figures, and next start looks again."""
    slow = Fault(0, FaultKind.LATE, amount=400, every=True)
    began_s = time.monotonic()
    found = tried(tmp_path, {"posix": lambda: limited(slow), "copy": limited}, budget_s=0.1)
    assert time.monotonic() - began_s < 5
    assert found["copy"].ok
    assert found["copy"].reason == "not measured: no time was left"


def test_one_that_cannot_be_opened(tmp_path: Path) -> None:
    """Whatever it raises: it is third parties' code."""

    def broken() -> Mover:
        raise ZeroDivisionError("in a library")

    found = tried(tmp_path, {"posix": broken, "copy": limited})
    assert (found["posix"].ok, found["posix"].reason) == (False, "ZeroDivisionError('in a library')")
    assert (found["copy"].ok, found["copy"].measured) == (True, False)


def test_memory_of_a_mover_that_was_passed_over_is_never_freed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What did not answer may answer late, into memory that the model has by then."""
    kept: list[torch.Tensor] = []
    monkeypatch.setattr(plan_module, "_KEPT", kept)
    report = [Probe("kvikio", True, "round trip ok")]
    monkeypatch.setattr(plan_module, "open_mover", lambda *_, **__: ProbedMover(CopyMover(), tuple(report)))
    plan_module.open_file_mover("auto", tier_at(tmp_path), str(tmp_path), DEVICE).close()
    assert not kept
    report.insert(0, Probe("gds_mt", False, "a page did not move within 10 s"))
    plan_module.open_file_mover("auto", tier_at(tmp_path), str(tmp_path), DEVICE).close()
    assert len(kept) == 1


def test_memory_that_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half as many images, and half of that; where there is not even room for one, nothing is measured."""
    room = [5 * SHAPE.slot_bytes]
    empty = torch.empty

    def limited_empty(size: int, **how: Any) -> torch.Tensor:
        if size > room[0]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        return empty(size, **how)

    monkeypatch.setattr(torch, "empty", limited_empty)
    assert TrialMemory(DEVICE, Shape(SHAPE.slot_bytes, 0), 16, SHAPE.slot_bytes).images == 4
    room[0] = SHAPE.slot_bytes
    found = tried(tmp_path, {"posix": limited, "copy": limited})
    for candidate in found.values():
        assert candidate.ok
        assert "not measured: no 0 MiB of memory on cpu: CUDA out of memory" in candidate.reason


def test_an_error_of_our_own_does_not_keep_an_engine_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is told with its trace, and there is no plan: the tier's mover is opened unmeasured."""
    monkeypatch.setattr(plan_module, "compare", lambda *_, **__: 1 / 0)
    assert plan_transfers(tier_at(tmp_path), str(tmp_path), DEVICE, SHAPE) is None
    assert [record.levelname for record in caplog.records if record.exc_info] == ["ERROR"]


# What else is in the directory


def test_what_killed_ranks_left_is_removed(tmp_path: Path) -> None:
    """By the next one that measures; what is young may be in use, what has other names is not ours."""
    old_s = time.time() - 3600
    directory = str(tmp_path)
    old = [Path(new_scratch_path(directory)), tmp_path / ".mover-probe-a8b_x2y4"]
    kept = [Path(new_scratch_path(directory)), tmp_path / ".mover-choice-notes.txt", tmp_path / "scratch"]
    for path in [*old, *kept]:
        path.touch()
    for path in [*old, *kept[1:]]:
        os.utime(path, (old_s, old_s))
    planned(tmp_path)
    assert set(tmp_path.iterdir()) == set(kept)


def test_gc_leaves_scratch_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a shared directory it is neither listed nor counted nor deleted, whatever else goes."""
    root = tmp_path / "kv"
    store = TreeStore(str(root))
    namespace = namespace_of()
    put_manifest(store, namespace)
    shards = put_chunk(store, namespace, 1)
    ours = root / ".mover-choice-0123456789abcdef.scratch"
    ours.touch()
    for path in [ours, *(root / shard for shard in shards)]:
        os.utime(path, (1, 1))
    config = tmp_path / "kv.yaml"
    config.write_text(f"tiers: [{{kind: shared_dir, path: {root}, capacity: 1GiB}}]\n")
    assert main(["gc", str(config), "--older-than", "1h", "--delete", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert not any((root / shard).exists() for shard in shards)
    assert ours.exists()
    assert report["other_objects"] == 0
    assert [info.name for info in store.list("")] == [f"{namespace.name}/manifest.json"]


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
    planned(tmp_path)
    assert opened() == first
    (tmp_path / "stranger").write_bytes(bytes(8 << 20))
    assert opened() < first
