"""Choosing a mover and a way: what is compared with what, which wins, where it is remembered and for how long, and that
nothing that storage or other ranks do keeps an engine from starting. ``test_choose_movers.py`` has the device's ways.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from nixl_offload.cli.main import main
from nixl_offload.config import SlabConfig
from nixl_offload.engine import choose as choose_module
from nixl_offload.engine.choice import cache, trial
from nixl_offload.engine.choice.base import Candidate, Choice, Shape, best_of, ways_of
from nixl_offload.engine.choice.machine import digest_of, fingerprint
from nixl_offload.engine.choice.memory import TrialMemory
from nixl_offload.engine.choice.trial import Verdict, hold_trial
from nixl_offload.engine.choose import choose, read_cached
from nixl_offload.engine.image import Way
from nixl_offload.engine.pump import LEAKED
from nixl_offload.engine.streams import Device, HostStreams
from nixl_offload.errors import MoverUnavailableError
from nixl_offload.movers.base import MemoryKind, Mover, Op
from nixl_offload.movers.copy import CopyMover
from nixl_offload.movers.limits import LimitedMover
from nixl_offload.movers.select import OpenedMover, Probe
from nixl_offload.stores.directory import TreeStore
from nixl_offload.testing.faulty_mover import Fault, FaultKind, FaultyMover
from nixl_offload.tiers.slab.directory import TierDirectory
from nixl_offload.types import PAGE_BYTES
from tests.unit.gc_rig import namespace_of, put_chunk, put_manifest

KIB = 1 << 10
SHAPE = Shape(64 * KIB + PAGE_BYTES, 16 * KIB)
DEVICE = Device(torch.device("cpu"), MemoryKind.VRAM, HostStreams())
"""Host memory in the part of a device's. Without libcufile only POSIX can run then."""
HOST = Device(torch.device("cpu"), MemoryKind.DRAM, HostStreams())
WAYS: tuple[tuple[str, Way], ...] = (("posix", "host"), ("copy", "host"))
"""Two movers that run everywhere, under the names of two candidates."""
BUDGET_S = 10.0
FAST = {"read_bytes_s": 4e9, "write_bytes_s": 2e9}


@pytest.fixture(autouse=True)
def _small_turns(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An image goes through each slot once per turn, so that the time is never over unless a test says so. Torch's
    threads, which copy between host and "device" here, would wait for each other where cores are few.
    """
    monkeypatch.setattr(trial, "MAX_LAPS", 1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def tier_at(directory: Path, mover: str = "auto") -> SlabConfig:
    return SlabConfig.model_validate({"kind": "slab", "path": str(directory), "capacity": "1GiB", "mover": mover})


def chosen(
    directory: Path, *, mover: str = "auto", device: Device = DEVICE, shape: Shape = SHAPE, **how: Any
) -> Choice:
    return choose(tier_at(directory, mover), str(directory), device, shape, **{"budget_s": BUDGET_S, **how})


def machine_of(directory: Path, shape: Shape = SHAPE) -> dict[str, str]:
    return fingerprint(tier_at(directory), str(directory), DEVICE, shape)


def measured_at(measured_s: float) -> Choice:
    """What a machine with a device might have come to."""
    candidates = (
        Candidate("gds_mt", "direct", True, "", **FAST),
        Candidate("posix", "host", True, "", 1e9, 1e9),
        Candidate("kvikio", "device", False, "no NVIDIA driver"),
    )
    return Choice("gds_mt", "direct", candidates, measured_s, False, "the fastest")


def keep(directory: Path, choice: Choice, shape: Shape = SHAPE, *, finished: bool = True) -> Path:
    """Write ``choice`` down as if it had been measured here."""
    machine = machine_of(directory, shape)
    cache.write_choice(str(directory), machine, shape, choice, finished=finished)
    return Path(cache.choice_path(str(directory), machine))


def tried(
    directory: Path, movers: dict[str, Callable[[], Mover]], *, shape: Shape = SHAPE, **how: Any
) -> tuple[Verdict, dict[str, Candidate]]:
    """Compare movers under the names of ``WAYS``."""
    verdict = hold_trial(
        WAYS,
        str(directory),
        DEVICE,
        shape,
        lambda name: movers[name](),
        **{"direct_io": True, "budget_s": BUDGET_S, **how},
    )
    return verdict, {found.mover: found for found in verdict.candidates}


def limited(*faults: Fault) -> LimitedMover:
    return LimitedMover(FaultyMover(CopyMover(), faults))


def late(op: Op | None = None) -> Fault:
    """Forty polls, which are twenty milliseconds at least, for each transfer."""
    return Fault(0, FaultKind.LATE, op=op, amount=40, every=True)


# What is compared, and which is taken


@pytest.mark.parametrize(
    ("mover", "piece_bytes", "accelerator", "ways"),
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
        ("gds", 256 * KIB, True, "gds device"),
        ("posix", 256 * KIB, True, "posix host"),
        ("auto", 256 * KIB, False, "auto host"),
        ("gds_mt", 256 * KIB, False, "gds_mt host"),
    ],
)
def test_what_is_compared(mover: str, piece_bytes: int, accelerator: bool, ways: str) -> None:
    """Preferred first; small pieces go packed where nothing is known; GDS never touches KV blocks."""
    found = ways_of(mover, Shape(1 << 20, piece_bytes), accelerator=accelerator)
    assert ", ".join(map(" ".join, found)) == ways


def test_reads_count_twice() -> None:
    """A load holds up a request: what reads faster wins over what writes faster by as much."""
    reads = Candidate("posix", "host", True, "", read_bytes_s=3e9, write_bytes_s=1e9)
    writes = Candidate("gds_mt", "device", True, "", read_bytes_s=1e9, write_bytes_s=3e9)
    assert best_of([writes, reads]) is reads


@pytest.mark.parametrize(("share", "wins"), [(1.09, "direct"), (1.11, "host")])
def test_within_ten_percent_fewer_copies_win(share: float, wins: str) -> None:
    """And only within."""
    host = Candidate("posix", "host", True, "", read_bytes_s=share * 1e9, write_bytes_s=share * 1e9)
    direct = Candidate("kvikio", "direct", True, "", read_bytes_s=1e9, write_bytes_s=1e9)
    device = Candidate("gds_mt", "device", True, "", read_bytes_s=1e9, write_bytes_s=1e9)
    best = best_of([host, device, direct])
    assert best is not None
    assert best.way == wins


def test_gds_mt_before_kvikio() -> None:
    """Where both do as well, on the same way."""
    kvikio = Candidate("kvikio", "device", True, "", **FAST)
    assert best_of([kvikio, replace(kvikio, mover="gds_mt")]) == replace(kvikio, mover="gds_mt")


def test_without_figures_there_is_no_best() -> None:
    """One that failed or was not measured is not compared."""
    assert (
        best_of([Candidate("gds_mt", "direct", False, "broken", **FAST), Candidate("posix", "host", True, "")]) is None
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


@pytest.mark.parametrize(
    ("mover", "device", "way"), [("posix", DEVICE, "host"), ("gds", DEVICE, "device"), ("auto", HOST, "host")]
)
def test_nothing_to_choose(tmp_path: Path, mover: str, device: Device, way: str) -> None:
    """One way only: nothing is opened, measured or kept. Opening it is for the engine."""
    choice = chosen(tmp_path, mover=mover, device=device)
    assert (choice.mover, choice.way, choice.cached, choice.measured_at) == (mover, way, False, 0.0)
    assert choice.reason
    assert not list(tmp_path.iterdir())


def test_one_that_can_run(tmp_path: Path) -> None:
    """Without libcufile and a driver there is only host memory: it is not measured, and that is remembered."""
    choice = chosen(tmp_path)
    assert (choice.mover, choice.way) == ("posix", "host")
    assert choice.reason == "the first that runs: not measured: nothing else can run"
    why = {found.mover: found.reason for found in choice.candidates if not found.ok}
    assert set(why) == {"gds_mt", "kvikio"}
    assert "GDS_MT" in why["gds_mt"]
    assert chosen(tmp_path) == replace(choice, cached=True)


def test_nothing_that_is_asked_for_can_run(tmp_path: Path) -> None:
    """All reasons in one sentence, as from ``open_mover``."""
    with pytest.raises(MoverUnavailableError, match=r"mover 'gds_mt' cannot move vram .* gds_mt: .*GDS_MT plugin"):
        chosen(tmp_path, mover="gds_mt")
    assert [path.name for path in tmp_path.iterdir()] == [".mover-choice.lock"]


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    """Is told as a mover that cannot run, for no file can be made there."""
    with pytest.raises(MoverUnavailableError, match="No such file or directory"):
        chosen(tmp_path / "gone")


def test_what_did_not_open_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Storage that hangs takes a minute to say so for each mover, and vLLM's engine has ten to start."""
    names: list[str] = []

    def refused(name: str, *_: object, **__: object) -> OpenedMover:
        names.append(name)
        raise MoverUnavailableError("a page did not move within 20 s")

    monkeypatch.setattr(choose_module, "open_mover", refused)
    with pytest.raises(MoverUnavailableError, match=r"gds_mt: a page did not move.*copy: a page did not move"):
        chosen(tmp_path)
    assert names == ["gds_mt", "kvikio", "posix", "copy"]


# Measuring


@pytest.mark.parametrize(("slow", "wins"), [("copy", "posix"), ("posix", "copy")])
def test_the_slower_one_loses(tmp_path: Path, slow: str, wins: str) -> None:
    """Whichever it is; nothing is left behind."""
    verdict, found = tried(tmp_path, {slow: lambda: limited(late()), wins: limited})
    assert (verdict.finished, verdict.trouble) == (True, "")
    best = best_of(verdict.candidates)
    assert best is found[wins]
    assert found[wins].read_bytes_s > found[slow].read_bytes_s
    assert found[wins].write_bytes_s > found[slow].write_bytes_s
    assert not list(tmp_path.iterdir())


def test_one_that_reads_slowly_loses(tmp_path: Path) -> None:
    """Reads and writes are measured apart."""
    _, found = tried(tmp_path, {"posix": lambda: limited(late(Op.READ)), "copy": limited})
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

    tried(tmp_path, {name: lambda name=name: LimitedMover(Watched(name=name)) for name, _ in WAYS})
    turn = [(name, op) for name, _ in WAYS for op in (Op.WRITE, Op.READ)]
    assert len(turns) >= 2 * len(turn)
    assert turns == (turn * (trial.ROUNDS + 1))[: len(turns)]
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
    verdict, found = tried(tmp_path, {"posix": limited, "copy": limited}, direct_io=False)
    assert verdict.finished
    assert all(candidate.measured for candidate in found.values())


@pytest.mark.parametrize("kind", [FaultKind.FAIL, FaultKind.REFUSE])
def test_one_that_fails_in_the_middle(tmp_path: Path, kind: FaultKind) -> None:
    """Is out of the running, with its reason; the other is measured all the same, and next start looks again."""
    verdict, found = tried(tmp_path, {"posix": lambda: limited(Fault(5, kind, op=Op.READ)), "copy": limited})
    assert not verdict.finished
    assert not found["posix"].ok
    assert "scripted fault" in found["posix"].reason
    assert found["copy"].measured


def test_quarantined_memory_is_never_freed(tmp_path: Path) -> None:
    """A failed transfer that may still write: its memory outlives the comparison."""
    before = len(LEAKED)
    fault = Fault(0, FaultKind.FAIL, op=Op.READ, quarantine=True)
    _, found = tried(tmp_path, {"posix": lambda: limited(fault), "copy": limited})
    assert not found["posix"].ok
    assert [type(kept) for kept in LEAKED[before:]] == [TrialMemory]
    del LEAKED[before:]


def test_storage_that_hangs(tmp_path: Path) -> None:
    """Nobody waits for it longer than the limit; what it may still touch is kept, and the comparison ends there."""
    before = len(LEAKED)
    fault = Fault(0, FaultKind.STUCK, op=Op.READ)
    stuck = LimitedMover(FaultyMover(CopyMover(), [fault]), close_timeout_s=0.1)
    began_s = time.monotonic()
    verdict, found = tried(tmp_path, {"posix": lambda: stuck, "copy": limited}, limit_s=0.3)
    assert time.monotonic() - began_s < 5
    assert (found["posix"].ok, found["posix"].reason) == (False, "storage did not answer for 0 s")
    assert found["copy"].ok
    assert not found["copy"].measured
    assert not verdict.finished
    assert {id(kept) for kept in LEAKED[before:]} >= {id(stuck)}
    del LEAKED[before:]
    stuck.close()
    assert not list(tmp_path.iterdir())


def test_slow_storage_does_not_hold_the_start(tmp_path: Path) -> None:
    """When the time is over, what there is has to do: the second one has no figures, and next start looks again."""
    slow = Fault(0, FaultKind.LATE, amount=400, every=True)
    began_s = time.monotonic()
    verdict, found = tried(tmp_path, {"posix": lambda: limited(slow), "copy": limited}, budget_s=0.1)
    assert time.monotonic() - began_s < 5
    assert not verdict.finished
    assert found["copy"].ok
    assert found["copy"].reason == "not measured: no time was left"


def test_one_that_cannot_be_opened(tmp_path: Path) -> None:
    """Whatever it raises: it is third parties' code."""

    def broken() -> Mover:
        raise ZeroDivisionError("in a library")

    verdict, found = tried(tmp_path, {"posix": broken, "copy": limited})
    assert (found["posix"].ok, found["posix"].reason) == (False, "ZeroDivisionError('in a library')")
    assert (found["copy"].ok, found["copy"].measured) == (True, False)
    assert verdict.finished


def test_memory_of_a_mover_that_was_passed_over_is_never_freed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What did not answer may answer late, into memory that the model has by then."""
    kept: list[torch.Tensor] = []
    monkeypatch.setattr(choose_module, "_KEPT", kept)
    report = [Probe("kvikio", True, "round trip ok")]
    monkeypatch.setattr(choose_module, "open_mover", lambda *_, **__: OpenedMover(CopyMover(), tuple(report)))
    choose_module.open_file_mover("auto", tier_at(tmp_path), str(tmp_path), DEVICE).close()
    assert not kept
    report.insert(0, Probe("gds_mt", False, "a page did not move within 10 s"))
    choose_module.open_file_mover("auto", tier_at(tmp_path), str(tmp_path), DEVICE).close()
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
    verdict, found = tried(tmp_path, {"posix": limited, "copy": limited})
    assert "no 0 MiB of memory on cpu: CUDA out of memory" in verdict.trouble
    assert all(candidate.ok and not candidate.measured for candidate in found.values())
    assert not verdict.finished


# What is remembered


def test_a_choice_is_read_back(tmp_path: Path) -> None:
    """As it was written, in a private file; nothing is opened or written for it."""
    choice = measured_at(time.time() - 100)
    path = keep(tmp_path, choice)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert chosen(tmp_path) == replace(choice, cached=True)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("age_s", "finished", "used"),
    [
        (6 * 86_400.0, True, True),
        (8 * 86_400.0, True, False),
        (30.0, False, True),
        (90.0, False, False),
        (-60.0, True, True),
        (-3600.0, True, False),
    ],
)
def test_a_lifetime(tmp_path: Path, age_s: float, finished: bool, used: bool) -> None:
    """A week; a minute for what was not compared with all; a clock that runs ahead is forgiven some minutes."""
    keep(tmp_path, measured_at(time.time() - age_s), finished=finished)
    assert (cache.read_choice(str(tmp_path), machine_of(tmp_path)) is not None) is used
    [found] = read_cached(str(tmp_path))
    assert found.current is used
    assert found.age_s == pytest.approx(age_s, abs=20)


def test_another_shape_or_setting_has_a_choice_of_its_own(tmp_path: Path) -> None:
    """What is measured for one says nothing of the other."""
    keep(tmp_path, measured_at(time.time()))
    assert cache.read_choice(str(tmp_path), machine_of(tmp_path)) is not None
    assert cache.read_choice(str(tmp_path), machine_of(tmp_path, Shape(SHAPE.slot_bytes, 0))) is None
    other = fingerprint(tier_at(tmp_path, "gds_mt"), str(tmp_path), DEVICE, SHAPE)
    assert cache.read_choice(str(tmp_path), other) is None


def test_another_machine_has_a_choice_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its driver, nvidia-fs, libcufile, cufile.json and their variables all count."""
    root = tmp_path / "root"
    found = {digest_of(machine_of(tmp_path))}

    def look() -> int:
        found.add(digest_of(fingerprint(tier_at(tmp_path), str(tmp_path), DEVICE, SHAPE, root)))
        return len(found)

    assert look() == 2  # no mounts there
    for path in ("proc/driver/nvidia/version", "proc/driver/nvidia-fs/version", "etc/cufile.json"):
        count = len(found)
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text("1.0\n")
        assert look() == count + 1
        (root / path).write_text("1.1\n")
        assert look() == count + 2
    count = len(found)
    monkeypatch.setenv("KVIKIO_COMPAT_MODE", "ON")
    assert look() == count + 1
    monkeypatch.setenv("CUFILE_LOGFILE_PATH", f"/tmp/{os.getpid()}.log")
    assert look() == count + 1
    (root / "libcufile.so.0").write_text("")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(root))
    assert look() == count + 2


def damage(path: Path, **changes: Any) -> None:
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, **changes}))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_text(""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:100]),
    "no text": lambda path: path.write_bytes(os.urandom(2000)),
    "another kind": lambda path: path.write_text("[]"),
    "deep": lambda path: path.write_text("[" * 60_000),
    "another version": lambda path: damage(path, version=2),
    "more": lambda path: damage(path, more=1),
    "no mover": lambda path: damage(path, mover=None),
    "what was not measured": lambda path: damage(path, mover="kvikio", way="device"),
    "another machine's": lambda path: damage(path, machine={"device": "another"}),
    "not a number": lambda path: damage(path, measured_at="soon"),
    "too large": lambda path: damage(path, reason="x" * (1 << 17)),
    "a directory": lambda path: (path.unlink(), path.mkdir()),
    "a link": lambda path: (path.rename(path.parent / "elsewhere"), path.symlink_to("elsewhere")),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_choice_counts_for_nothing(tmp_path: Path, kind: str) -> None:
    """It is found out anew."""
    path = keep(tmp_path, measured_at(time.time()))
    assert cache.read_choice(str(tmp_path), machine_of(tmp_path)) is not None
    DAMAGES[kind](path)
    assert cache.read_choice(str(tmp_path), machine_of(tmp_path)) is None
    choice = chosen(tmp_path)
    assert (choice.mover, choice.cached) == ("posix", False)
    if kind != "a directory":
        assert chosen(tmp_path).cached


def test_what_is_remembered_chooses_among_what_is_allowed(tmp_path: Path) -> None:
    """Anybody may have written it: it does not bring in GDS, which may tell failed reads as done."""
    candidates = (Candidate("gds", "direct", True, "", **FAST),)
    keep(tmp_path, Choice("gds", "direct", candidates, time.time(), False, "of course"))
    assert chosen(tmp_path).mover == "posix"


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    """The choice is made and not kept: the place of its file is taken by a directory."""
    Path(cache.choice_path(str(tmp_path), machine_of(tmp_path))).mkdir()
    assert not chosen(tmp_path).cached
    assert not chosen(tmp_path).cached
    assert not [path.name for path in tmp_path.iterdir() if path.suffix in (".tmp", ".scratch")]


def test_all_choices_of_a_tier(tmp_path: Path) -> None:
    """What cannot be read is left out, what is old is told as such."""
    keep(tmp_path, measured_at(time.time() - 1000))
    keep(tmp_path, measured_at(time.time()), Shape(1 << 20, 0)).write_text("{}")
    keep(tmp_path, measured_at(1.0), Shape(2 << 20, 0))
    (tmp_path / ".mover-choice-of-somebody.json").write_text(keep(tmp_path, measured_at(2.0)).read_text())
    keep(tmp_path, measured_at(time.time() - 1000))
    found = {cached.shape: cached for cached in read_cached(str(tmp_path))}
    assert {shape: cached.current for shape, cached in found.items()} == {SHAPE: True, Shape(2 << 20, 0): False}
    assert found[SHAPE].choice.candidates == measured_at(0).candidates
    assert found[SHAPE].machine["packages"].startswith("torch ")
    assert read_cached(str(tmp_path / "gone")) == []


# Several ranks


def test_ranks_that_start_together_open_movers_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one finds out, the others read what it found."""
    opened: list[str] = []
    real = choose_module.open_mover

    def counted(kind: Any, *rest: Any, **how: Any) -> Any:
        opened.append(kind)
        time.sleep(0.1)
        return real(kind, *rest, **how)

    monkeypatch.setattr(choose_module, "open_mover", counted)
    with ThreadPoolExecutor(4) as ranks:
        choices = list(ranks.map(lambda _: chosen(tmp_path, lock_wait_s=30.0), range(4)))
    assert opened == ["gds_mt", "kvikio", "posix"]
    assert sorted(choice.cached for choice in choices) == [False, True, True, True]
    assert len({(choice.mover, choice.way, choice.measured_at) for choice in choices}) == 1


def locked(directory: Path) -> int:
    """Hold the lock as another rank does."""
    fd = os.open(cache.lock_path(str(directory)), os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)
    return fd


def test_a_rank_does_not_wait_for_ever(tmp_path: Path) -> None:
    """It takes what would be taken unmeasured, and keeps nothing: the other one still measures."""
    fd = locked(tmp_path)
    try:
        choice = chosen(tmp_path, lock_wait_s=0.2)
    finally:
        os.close(fd)
    assert (choice.mover, choice.way, choice.cached) == ("posix", "host", False)
    assert choice.reason == "the first that runs: another rank has been measuring for 0 s"
    assert [found.mover for found in choice.candidates] == ["gds_mt", "kvikio", "posix"]
    assert not read_cached(str(tmp_path))


def test_a_rank_takes_what_comes_while_it_waits(tmp_path: Path) -> None:
    """Though the lock is still held."""
    fd = locked(tmp_path)
    choice = measured_at(time.time())
    timer = threading.Timer(0.2, keep, [tmp_path, choice])
    timer.start()
    try:
        assert chosen(tmp_path, lock_wait_s=30.0) == replace(choice, cached=True)
    finally:
        timer.join()
        os.close(fd)


def test_a_directory_that_takes_no_lock(tmp_path: Path) -> None:
    """As on some file servers: each rank finds out by itself. Here the lock's file is none."""
    cache.lock_path(str(tmp_path)).mkdir()
    assert not chosen(tmp_path).cached
    assert chosen(tmp_path).cached


def test_an_error_of_our_own_does_not_keep_an_engine_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is told with its trace, and the first that runs is taken."""
    monkeypatch.setattr(choose_module, "hold_trial", lambda *_, **__: 1 / 0)
    choice = chosen(tmp_path)
    assert (choice.mover, choice.way) == ("posix", "host")
    assert "ZeroDivisionError" in choice.reason
    assert [record.levelname for record in caplog.records if record.exc_info] == ["ERROR"]


# What else is in the directory


def test_what_killed_ranks_left_is_removed(tmp_path: Path) -> None:
    """By the next one that measures; what is young may be in use, what has other names is not ours."""
    old_s = time.time() - 3600
    scratch = Path(cache.new_scratch_path(str(tmp_path)))
    draft = Path(cache.choice_path(str(tmp_path), {}).replace(".json", "-0123456789abcdef.tmp"))
    old = [scratch, draft, tmp_path / ".mover-probe-a8b_x2y4"]
    kept = [Path(cache.new_scratch_path(str(tmp_path))), tmp_path / ".mover-choice-notes.txt", tmp_path / "scratch"]
    forgotten = keep(tmp_path, measured_at(1.0), Shape(1 << 20, 0))
    expired = keep(tmp_path, measured_at(1.0), Shape(2 << 20, 0))
    for path in [*old, *kept]:
        path.touch()
    for path in [*old, *kept[1:], expired]:
        os.utime(path, (old_s, old_s))
    os.utime(forgotten, (1, 1))
    chosen(tmp_path)
    assert {path for path in (*old, *kept, forgotten, expired) if path.exists()} == {*kept, expired}


def test_gc_leaves_choices_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a tree they are neither listed nor counted nor deleted, whatever else goes."""
    root = tmp_path / "kv"
    store = TreeStore(str(root))
    namespace = namespace_of()
    put_manifest(store, namespace)
    shards = put_chunk(store, namespace, 1)
    chosen(root)
    left = root / ".mover-choice-0123456789abcdef.scratch"
    left.touch()
    ours = {path for path in root.iterdir() if path.name.startswith(".")}
    assert len(ours) == 3
    for path in [*ours, *(root / shard for shard in shards)]:
        os.utime(path, (1, 1))
    config = tmp_path / "kv.yaml"
    config.write_text(f"tiers: [{{kind: shared_dir, path: {root}, capacity: 1GiB}}]\n")
    assert main(["gc", str(config), "--older-than", "1h", "--delete", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert not any((root / shard).exists() for shard in shards)
    assert all(path.exists() for path in ours)
    assert report["foreign_objects"] == 0
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
            dp_size=dp_size,
        )
        directory.close()
        return directory.rank_bytes

    first = opened()
    chosen(tmp_path)
    for pieces in range(64):
        keep(tmp_path, measured_at(time.time()), Shape(1 << 20, pieces * PAGE_BYTES))
    assert opened() == first
    (tmp_path / "stranger").write_bytes(bytes(8 << 20))
    assert opened() < first
