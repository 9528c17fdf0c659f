"""The script for CUDA machines, where there is none: no stage hides the next; the benchmark runs on host memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.contest import Row, Run, WrongBytesError, contest, table
from benchmarks.gpu.check import CALLS, TOTAL_S, Check, Stage
from tests.contract.emulation.build import Control, build_emulation

REPOSITORY = Path(__file__).parent.parent.parent


def test_all_parts_on_host_memory(tmp_path: Path) -> None:
    """Every part ends, every row has a figure or a reason; what GDS_MT moved, direct and packed, is what arrived."""
    libraries, data = tmp_path / "cufile", tmp_path / "data"
    libraries.mkdir()
    data.mkdir()
    build_emulation(libraries)
    Control(libraries / "control")
    emulated = {
        "PYTHONPATH": str(REPOSITORY),
        "LD_LIBRARY_PATH": str(libraries),
        "LD_PRELOAD": str(libraries / "libcufile.so.0"),
        "CUFILE_EMULATION_CONTROL": str(libraries / "control"),
    }
    command = [sys.executable, "-m", "benchmarks.gpu", "--emulate", "--seconds", "4", "--dir", str(data)]
    ended = subprocess.run(
        command, cwd=REPOSITORY, env=os.environ | emulated, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    rows = [Row(**json.loads(line)) for line in ended.stdout.splitlines() if line.startswith('{"what"')]
    assert all(row.mb_s or row.note for row in rows)
    measured = {(row.what[0], row.side) for row in rows if row.mb_s}
    assert {("kernels", "gather, torch"), ("bus", "packer"), ("engine", "packed on the host, posix")} <= measured
    assert {("engine", "direct, gds_mt"), ("engine", "packed on the device, gds_mt")} <= measured
    assert list(json.loads(ended.stdout.splitlines()[-1])["unfit"]) == ["kvikio"]
    assert not list(data.iterdir())


def test_a_candidate_with_wrong_bytes_fails_the_run_and_the_others_are_compared() -> None:
    def wrong(number: int) -> Run:
        raise WrongBytesError(f"in round {number}")

    found = contest({"base": lambda _: Run(1.0), "twice": lambda _: Run(0.5), "wrong": wrong}, 10**9, rounds=2)
    rows = {row.side: row for row in found.rows("base", "load")}
    assert (rows["base"].mb_s, rows["base"].ratio) == (1000, None)
    assert (rows["twice"].mb_s, rows["twice"].ratio) == (2000, 2.0)
    assert [row.side for row in rows.values() if row.failed] == ["wrong"]
    assert table(list(rows.values())).splitlines()[-1] == "wrong: WrongBytesError: in round 0"
    assert table([]) == "", "part movers has no rows"


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


def test_stages_fit_into_the_time_of_their_call() -> None:
    assert all(sum(stage.limit_s for stage in stages) <= TOTAL_S[call] for call, stages in CALLS.items())


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
