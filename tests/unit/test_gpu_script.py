"""The script for CUDA machines, as far as it runs without one: the whole benchmark on host memory, NIXL's real GDS_MT
over the emulated cuFile included; a wheel of NIXL made small; the shell script's refusal; memory for the suites.
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

import numpy as np
import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import benchmarks.gpu.__main__ as script
from benchmarks.gpu.kit import MACHINE, pins
from benchmarks.gpu.repack import repack_nixl
from benchmarks.gpu.report import table
from benchmarks.gpu.rounds import Row, WrongBytesError, contest
from benchmarks.gpu.run_tests import ORDER
from nixl_offload.movers.base import MemoryKind
from nixl_offload.testing.torch_memory import TorchMemory
from tests.contract.emulation.build import Control, build_emulation

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


def test_the_script_collects_all_gpu_tests_with_what_the_kit_has() -> None:
    """Nothing but the kit and what its machine has can be imported; no error, every file, what others rest on first."""
    ended = _run(
        *(sys.executable, "-m", "benchmarks.gpu.run_tests", "--collect-only"),
        **only_the_kit(),
        PYTEST_DISABLE_PLUGIN_AUTOLOAD="1",
        PYTEST_PLUGINS="pytest_timeout",
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-2000:]
    names = [line.partition("::")[0] for line in ended.stdout.splitlines() if "::" in line]
    files = [name.removeprefix("tests/gpu/test_").removesuffix("_cuda.py") for name in dict.fromkeys(names)]
    assert tuple(files) == ORDER
    assert len(names) > 250
    marked = {path for path in (REPOSITORY / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text()}
    assert marked - {Path(__file__)} == {REPOSITORY / f"tests/gpu/test_{name}_cuda.py" for name in ORDER}


def test_what_is_not_in_the_kit_is_missed() -> None:
    """The test above would find it: with all that the machine lacks out of reach, a common package is not to be had."""
    ended = _run(sys.executable, "-c", "import torch, pydantic, xxhash, pytest; import hypothesis", **only_the_kit())
    assert "No module named 'hypothesis': it is not in the kit" in ended.stderr


RUN_TESTS = {
    "first": "def test_{}(): assert 1 == 2",
    "crash": "def test_{}(): import os; os.kill(os.getpid(), 11)",
    "broken": "def test_{}(): sys.modules['torch'] = BrokenContext",
    "skips": "def test_{}(): pytest.skip('no such device')",
    "last": "def test_{}(): pass",
}
BROKEN_CONTEXT = """
import sys
from types import SimpleNamespace
import pytest
pytestmark = pytest.mark.gpu
def synchronize():
    raise RuntimeError("an illegal memory access was encountered")
BrokenContext = SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: True, synchronize=synchronize))
"""


def test_no_failure_hides_what_comes_after_it(tmp_path: Path) -> None:
    """A failure, a crash, a context that a test broke, an import that fails, a hang: all else is run, and all told."""
    lines = [BROKEN_CONTEXT, *(code.format(name) for name, code in RUN_TESTS.items())]
    (tmp_path / "test_many.py").write_text("\n".join(lines))
    (tmp_path / "test_typo.py").write_text("import no_such_module")
    (tmp_path / "test_hangs.py").write_text(f"{BROKEN_CONTEXT}def test_hangs(): import time; time.sleep(600)")
    (tmp_path / "test_end.py").write_text(f"{BROKEN_CONTEXT}def test_end(): pass")
    files = [str(tmp_path / f"test_{name}.py") for name in ("many", "typo", "hangs", "end")]
    ended = _run(
        *(sys.executable, "-m", "benchmarks.gpu.run_tests", "--out", str(tmp_path), "--seconds", "24", *files),
    )
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert ended.stdout.splitlines() == [
        "FAILED test_many.py::test_first: assert 1 == 2",
        "CRASHED test_many.py::test_crash: the process was killed by signal 11",
        "ERROR test_typo.py: pytest ended with 2, see tests.log",
        "CRASHED test_hangs.py::test_hangs: the time for this file was up",
        "LEFT OUT test_hangs.py, the rest: the time for this file was up",
        "1 skipped: no such device",
        "3 passed, 2 crashed, 1 failed, 1 skipped, 1 error, 1 left out",
    ]
    assert "the device's context is broken: an illegal memory access" in (tmp_path / "tests.log").read_text()


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


def test_the_shell_script_refuses_politely(tmp_path: Path) -> None:
    """Without a GPU: status 4, one sentence, nothing left behind."""
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    ended = _run(
        *("bash", "benchmarks/gpu/run.sh"),
        PATH=f"{tmp_path}:{os.environ['PATH']}",
        PYTHON=sys.executable,
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
