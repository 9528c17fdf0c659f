"""The script for CUDA machines, as far as it runs without one: no stage hides the next, and each leaves its result; the
whole benchmark on host memory, NIXL's real GDS_MT over the emulated cuFile included; a wheel of NIXL made small.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import benchmarks.gpu.__main__ as script
from benchmarks.gpu import check
from benchmarks.gpu.check import CALLS, RUNGS, TOTAL_S, Check, Stage
from benchmarks.gpu.kit import MACHINE, pins
from benchmarks.gpu.repack import repack_nixl
from benchmarks.gpu.report import table
from benchmarks.gpu.rounds import Row, WrongBytesError, contest
from nixl_offload.movers.base import MemoryKind
from tests.contract.emulation.build import Control, build_emulation
from tests.contract.suites.torch_memory import TorchMemory
from tests.gpu.conftest import pytest_runtest_logfinish

REPOSITORY = Path(__file__).parent.parent.parent
POSIX_TRIP = """
import sys, tempfile
sys.path[:0] = [{site!r}, {repository!r}]
import nixl._api, {package}
assert {package}.__file__.startswith({site!r}), {package}.__file__
from nixl_offload.movers.base import MemoryKind
from nixl_offload.movers.nixl import NixlMover
from nixl_offload.movers.nixl_plugins import PLUGINS
from nixl_offload.movers.select import probe_round_trip
mover = NixlMover(PLUGINS["posix_aio"])
with tempfile.TemporaryDirectory() as directory:
    print(probe_round_trip(mover, MemoryKind.DRAM, directory))
mover.close()
"""


def _run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_all_parts_on_host_memory(tmp_path: Path) -> None:
    """Every part ends, every row has a figure or a reason; what GDS_MT moved, direct and packed, is what arrived.

    No package is needed that the kit and its machine have not.
    """
    libraries = tmp_path / "cufile"
    libraries.mkdir()
    build_emulation(libraries)
    Control(libraries / "control")
    out, data = tmp_path / "out", tmp_path / "data"
    data.mkdir()
    ended = _run(
        *(sys.executable, "-m", "benchmarks.gpu", "--emulate", "--here", "--json", "--seconds", "4"),
        *("--out", str(out), "--dir", str(data)),
        **only_the_kit(),
        LD_LIBRARY_PATH=str(libraries),
        LD_PRELOAD=str(libraries / "libcufile.so.0"),
        CUFILE_EMULATION_CONTROL=str(libraries / "control"),
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    rows = [Row(**row) for row in json.loads(ended.stdout)["rows"]]
    assert all(row.gb_s or row.note for row in rows)
    measured = {(row.part, row.way) for row in rows if row.gb_s}
    assert {("kernels", "torch"), ("bus", "packer"), ("file", "posix, page-locked"), ("file", "gds_mt")} <= measured
    assert {("engine", "packed on the host, posix"), ("engine", "direct, gds_mt")} <= measured
    assert ("engine", "packed on the device, gds_mt") in measured
    (threshold,) = [row for row in rows if (row.case, row.way) == ("direct or packed", "gds_mt")]
    assert threshold.note.startswith(("direct from", "packed up to"))
    assert (out / "table.txt").read_text().count("\n") > len({(row.part, row.case, row.way) for row in rows})
    assert not list(data.iterdir())


def test_all_gpu_tests_are_collected_with_what_the_kit_has() -> None:
    """Nothing but the kit and what its machine has can be imported; no error, every file; all of them have a stage."""
    ended = _run(
        *(sys.executable, "-m", "pytest", "-m", "gpu", "-c", "pyproject.toml", "-vqq", "--collect-only", "tests/gpu"),
        **only_the_kit(),
        PYTEST_DISABLE_PLUGIN_AUTOLOAD="1",
        PYTEST_PLUGINS="pytest_timeout",
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-2000:]
    names = [line.partition("::")[0] for line in ended.stdout.splitlines() if "::" in line]
    assert len(names) > 250
    marked = {path for path in (REPOSITORY / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text()}
    assert marked - {Path(__file__)} == {REPOSITORY / name for name in names}
    commands = [stage.command for stages in CALLS.values() for stage in stages]
    assert all(any(name in command for command in commands) for name in names)


def test_what_is_not_in_the_kit_is_missed() -> None:
    """The test above would find it: with all that the machine lacks out of reach, a common package is not to be had."""
    ended = _run(sys.executable, "-c", "import torch, pydantic, xxhash, pytest; import hypothesis", **only_the_kit())
    assert "No module named 'hypothesis': it is not in the kit" in ended.stderr


SAY = "import json, sys; print(json.dumps({'words': sys.argv[1], 'wrong': sys.argv[2:]}))"


def run_stages(tmp_path: Path, *stages: Stage) -> tuple[int, dict[str, dict[str, Any]]]:
    """Return the exit status, and the records of ``results.jsonl`` by stage. ``{say}`` ends a stage with words."""
    (tmp_path / "out").mkdir(exist_ok=True)
    (tmp_path / "say.py").write_text(SAY)
    words = {"python": sys.executable, "say": f"{sys.executable} {tmp_path}/say.py", "scratch": str(tmp_path)}
    status = Check(tmp_path / "out", tmp_path, os.environ, words).run(stages)
    assert len(list((tmp_path / "out").iterdir())) <= 8
    lines = (tmp_path / "out" / "results.jsonl").read_text().splitlines()
    return status, {record["stage"]: record for record in map(json.loads, lines)}


NEXT = Stage("next", 20.0, "{say} well")


def test_a_stage_that_hangs_is_killed_with_its_children_and_is_no_failure(tmp_path: Path) -> None:
    """The next one runs, and exit status 0 says that nothing was wrong."""
    begun_s = time.monotonic()
    hangs = "bash -c 'sleep 600 & echo $! >{scratch}/child; sleep 600'"
    status, records = run_stages(tmp_path, Stage("hangs", 1.0, hangs), NEXT)
    assert time.monotonic() - begun_s < 20
    assert (status, records["hangs"]["kind"], records["next"]["kind"]) == (0, "cut off", "ok")
    child = Path("/proc", (tmp_path / "child").read_text().strip(), "cmdline")
    assert not child.exists() or not child.read_bytes()  # gone, or a zombie until its new parent looks


@pytest.mark.parametrize(
    ("command", "kind", "words"),
    [
        ("bash -c 'echo MemoryError: none left; exit 3'", "FAILED", "status 3: MemoryError: none left"),
        ("bash -c 'kill -11 $$'", "FAILED", "killed by signal 11: no output"),
        ("{say} 'other tokens' 'of prompt 1'", "WRONG", "other tokens"),
    ],
)
def test_a_stage_that_fails_does_not_hide_the_next(tmp_path: Path, command: str, kind: str, words: str) -> None:
    """Its reason is kept, and the exit status is 1."""
    status, records = run_stages(tmp_path, Stage("first", 20.0, command), NEXT)
    assert (status, records["next"]["kind"]) == (1, "ok")
    assert (records["first"]["kind"], records["first"]["words"]) == (kind, words)


def test_results_are_there_as_they_come(tmp_path: Path) -> None:
    """The second stage sees the first one's: a call that is killed leaves what it has found."""
    second = Stage("second", 20.0, "bash -c 'grep first {scratch}/out/results.jsonl && {say} seen'")
    status, records = run_stages(tmp_path, Stage("first", 20.0, "{say} well"), second)
    assert (status, records["second"]["words"]) == (0, "seen")


def test_the_ladder_goes_on_to_the_rung_that_works(tmp_path: Path) -> None:
    """What worked is kept for the next stage and the next call."""
    works = "bash -c '[ $GPU_CHECK_ATTENTION = TRITON_ATTN ] && {say} $GPU_CHECK_ATTENTION'"
    status, records = run_stages(tmp_path, Stage("vLLM", 20.0, works, climbs=True), NEXT)
    assert (status, records["vLLM"]["words"], records["next"]["rung"]) == (0, "TRITON_ATTN", list(RUNGS)[1])
    assert (tmp_path / "out" / "rung").read_text() == list(RUNGS)[1]


def test_the_ladder_ends(tmp_path: Path) -> None:
    """No rung works: that is a failure, and the next stage begins anew. A wrong answer is no reason to climb."""
    tried = "bash -c 'echo $GPU_CHECK_ATTENTION >>{scratch}/tried; false'"
    status, records = run_stages(tmp_path, Stage("vLLM", 20.0, tried, climbs=True))
    assert (status, records["vLLM"]["rung"], records["vLLM"]["kind"]) == (1, next(iter(RUNGS)), "FAILED")
    assert len((tmp_path / "tried").read_text().splitlines()) == len(RUNGS)
    (tmp_path / "out" / "results.jsonl").unlink()
    status, records = run_stages(tmp_path, Stage("vLLM", 20.0, "{say} 'other tokens' 'prompt 1'", climbs=True))
    assert (status, records["vLLM"]["rung"], records["vLLM"]["kind"]) == (1, next(iter(RUNGS)), "WRONG")


def test_an_early_stage_waits_for_its_turn(tmp_path: Path) -> None:
    """It is started beside the stage before it, and goes on when that has ended."""
    first = "bash -c 'until [ -e {scratch}/waits ]; do sleep 0.01; done; touch {scratch}/ended; {say} ended'"
    early = "bash -c 'echo before; touch {scratch}/waits; read line; ls {scratch}/ended && {say} $line'"
    status, records = run_stages(tmp_path, Stage("first", 20.0, first), Stage("early", 20.0, early, early=True))
    assert (status, records["early"]["words"]) == (0, "go")
    log = (tmp_path / "out" / "check.log").read_text()
    assert log.index("== first") < log.index("== early") < log.index("before")  # as if it had begun in its turn


WITHOUT_C = """
import sys, torch, benchmarks.gpu.engine
assert "vllm._C_stable_libtorch" in sys.modules
x, out = torch.randn(3, 8), torch.empty(3, 4)
torch.ops._C.silu_and_mul(out, x)
assert torch.allclose(out, torch.nn.functional.silu(x[:, :4]) * x[:, 4:])
assert not torch.ops._C.cutlass_scaled_mm_supports_fp8(90)
"""


def test_the_last_rung_has_the_operations_that_vllm_wants_at_its_start() -> None:
    """In torch, in the place of vLLM's library."""
    ended = _run(sys.executable, "-c", WITHOUT_C, GPU_CHECK_WITHOUT_C="1")
    assert ended.returncode == 0, ended.stderr[-2000:]


def test_calls_end_within_their_time() -> None:
    """By construction: limits add up to less, with some seconds to kill what hangs; a summary has ten lines at most."""
    for call, stages in CALLS.items():
        assert sum(stage.limit_s for stage in stages) <= TOTAL_S[call] - 5
        assert len({check.RACE if stage.command.startswith(check.RACE) else stage.name for stage in stages}) <= 10


MANY = """
import os, pytest
def test_first(): assert 1 == 2
def test_crash(): os.kill(os.getpid(), 11)
@pytest.mark.parametrize("size", ["64 KiB", "2 MiB"])
def test_sizes(size): pass
def test_skips(): pytest.skip("no such device")
def test_late(): pytest.xfail("known")
"""


def test_no_test_hides_what_comes_after_it(tmp_path: Path) -> None:
    """A failure, a crash in the midst: another process goes on behind it, and all is counted."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_many.py").write_text(MANY)
    command = (
        """bash -c 'cd {scratch}; {python} -m pytest -v -p no:cacheprovider --rootdir . tests/test_many.py "$@"' -"""
    )
    status, records = run_stages(tmp_path, Stage("tests", 60.0, command, check.tested))
    assert status == 1
    assert records["tests"]["figures"]["counts"] == {"failed": 1, "passed": 2, "skipped": 1, "xfail": 1}
    assert records["tests"]["figures"]["bad"] == ["tests/test_many.py::test_first", "tests/test_many.py::test_crash"]


def test_tests_that_were_cut_off_are_no_failure() -> None:
    """Unless one was red by then."""
    output = "tests/a.py::test_one[64 KiB] PASSED   [ 50%]\ntests/a.py::test_two "
    assert (check.tested(None, output).kind, check.tested(None, output).words) == (
        "cut off",
        "1 passed; then tests/a.py::test_two",
    )
    assert check.tested(None, f"tests/a.py::test_red FAILED [ 10%]\n{output}").kind == "WRONG"
    assert check.tested(2, "E   ModuleNotFoundError: No module named 'typo'").kind == "FAILED"
    assert check.tested(0, output + "PASSED\n!! Exit: the device's context is broken: 700 !!").kind == "WRONG"


def test_a_test_that_breaks_the_device_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """In it nothing would work any more."""

    def synchronize() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    with pytest.raises(pytest.exit.Exception, match="context is broken") as raised:
        pytest_runtest_logfinish()
    assert raised.value.returncode not in check.PYTEST_ENDS


def only_the_kit() -> dict[str, str]:
    """The environment of a Python that can import the kit, what its machine has, and what that needs; nothing else."""
    carried = [*pins()["site"], *pins()["fallback"]]
    wanted = [*MACHINE, *(pin.partition("==")[0] for pin in carried), "nixl-cu12", "nixl-offload"]
    allowed: set[str] = set()
    while wanted:
        name = canonicalize_name(wanted.pop())
        if name in allowed:
            continue
        allowed.add(name)
        if name in MACHINE and _installed(name):
            needs = [Requirement(line) for line in importlib.metadata.requires(name) or ()]
            wanted += [need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
    blocked = [
        module
        for module, owners in importlib.metadata.packages_distributions().items()
        if allowed.isdisjoint(map(canonicalize_name, owners)) and not (REPOSITORY / module).exists()
    ]
    return {
        "PYTHONPATH": f"{REPOSITORY / 'tests' / 'unit' / 'only_the_kit'}:{REPOSITORY}",
        "BLOCKED_MODULES": " ".join(blocked),
    }


def test_a_part_that_crashes_keeps_what_it_had_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part writes a row and dies of a signal: the row is there, another says how it ended, and the status is 1."""
    row = json.dumps({"part": "bus", "case": "gather", "way": "packer", "gb_s": 7.5})

    def start(options: object, scratch: str, log: Path, what: str, name: str, seconds: float, rows: Path) -> object:
        code = f"import os; open({str(rows)!r}, 'w').write({row!r}); os.kill(os.getpid(), 11)"
        return subprocess.Popen([sys.executable, "-c", code])

    monkeypatch.setattr(script, "_start", start)
    monkeypatch.setattr(
        sys, "argv", ["gpu", "--emulate", "--parts", "bus", "--out", str(tmp_path / "out"), "--dir", str(tmp_path)]
    )
    assert script.main() == 1
    first, last = [Row(**row) for row in json.loads((tmp_path / "out" / "benchmark.json").read_text())["rows"]]
    assert (first.gb_s, first.failed) == (7.5, False)
    assert last.failed
    assert last.note.startswith("it was killed by signal 11 after 1 rows")


def test_a_machine_without_a_gpu_is_refused_politely(tmp_path: Path) -> None:
    """Status 4, one sentence, nothing left behind."""
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    ended = _run(
        *(sys.executable, "benchmarks/gpu/check.py", "--call", "1"),
        PATH=f"{tmp_path}:{os.environ['PATH']}",
        OUT=str(tmp_path / "out"),
        TMPDIR=str(tmp_path),
    )
    assert ended.returncode == 4
    assert ended.stderr == "gpu-check: no NVIDIA GPU here: nvidia-smi does not answer\n"
    assert [path.name for path in tmp_path.iterdir()] == ["nvidia-smi"]


def test_a_small_wheel_of_nixl_works(tmp_path: Path) -> None:
    """Packed from what is installed here: the plugins that we use are in it, POSIX moves pages, and RECORD is true."""
    package = next(name for name in ("nixl-cu12", "nixl-cu13") if _installed(name))
    module = package.replace("-", "_")
    whole, small = tmp_path / f"{module}-whole.whl", tmp_path / "small.whl"
    with zipfile.ZipFile(whole, "w", zipfile.ZIP_STORED) as wheel:
        for file in importlib.metadata.distribution(package).files or []:
            if "__pycache__" not in file.parts and ".." not in file.parts and not file.parts[0].startswith("nixl_ep"):
                wheel.write(str(file.locate()), str(file))
        wheel.writestr(f"nixl_ep_{package[-4:]}/training.so", b"not an ELF file")
    repack_nixl(whole, small, compress_level=1)
    site = tmp_path / "site"
    with zipfile.ZipFile(small) as wheel:
        names = wheel.namelist()
        wheel.extractall(site)
    assert {name.split("libplugin_")[1] for name in names if "libplugin_" in name} == {
        "GDS.so",
        "GDS_MT.so",
        "POSIX.so",
    }
    assert not [name for name in names if name.startswith("nixl_ep")]
    record = next(name for name in names if name.endswith("RECORD"))
    assert {line.split(",")[0] for line in (site / record).read_text().splitlines()} == set(names)
    ended = _run(sys.executable, "-c", POSIX_TRIP.format(site=str(site), repository=str(REPOSITORY), package=module))
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert ended.stdout.endswith("round trip ok\n")


def test_contest_of_candidates() -> None:
    """Ratios are medians by round; one that fails is out with its reason, wrong bytes are marked, time ends it."""

    def wrong(number: int) -> float:
        raise WrongBytesError("the third page")

    def late(number: int) -> float:
        if number == 2:
            raise ValueError("no more")
        return 1.0

    found = contest(
        {"plain": lambda n: 2.0, "ours": lambda n: 1.0 + n, "wrong": wrong, "late": late}, 4 * 10**9, 5, np.inf
    )
    assert (found.gb_s("plain"), found.ratio("ours", "plain")) == (2.0, 0.5)
    row = found.row("p", "c", "ours", "64 KiB", "plain")
    assert (row.gb_s, row.against, row.ratio, row.note) == (1.0, "plain", 0.5, "")
    assert found.row("p", "c", "wrong", "", "plain").note == "WRONG BYTES: the third page"
    assert found.row("p", "c", "wrong", "", "plain").failed
    assert (found.row("p", "c", "late", "", "plain").note, found.gb_s("late")) == ("no more", None)
    assert len(contest({"plain": lambda n: 1.0}, 1, 50, time.monotonic()).seconds["plain"]) == 1
    text = table([row, found.row("p", "c", "late", "64 KiB", "plain")], {"gpu": "none"})
    assert "1.0 (0.50)   plain" in text
    assert text.endswith("[1] no more")


def test_memory_that_torch_allocates() -> None:
    """What is written is read back, whole and in part; it lies where the region says."""
    assert_memory_is_read_back("cpu")


def assert_memory_is_read_back(device: str) -> None:
    memory = TorchMemory(1 << 16, torch.device(device))
    assert memory.region.kind is MemoryKind.VRAM
    assert (memory.region.length_bytes, memory.region.address % (64 << 10)) == (1 << 16, 0)
    noise = np.random.default_rng(1).integers(0, 256, 1 << 16, dtype=np.uint8)
    memory.write(noise)
    assert np.array_equal(memory.read(), noise)
    assert np.array_equal(memory.read(100, 200), noise[100:200])
    memory.write(7)
    assert bool((memory.read(1 << 15) == 7).all())


def _installed(package: str) -> bool:
    try:
        importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
