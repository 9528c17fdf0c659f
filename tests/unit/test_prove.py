"""A little of most parts of ``make prove``, and that each end of a cell is noted. This module is a part itself: one
cell for each way in which a cell can end, so it imports little.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.prove import faults
from tests.prove.cells import Cell, Outcome, cells_of, tried
from tests.prove.faults import POINTS, TIERS, faults_at


def cells(seed: int) -> Iterator[Cell]:
    """Yield the cells of this part."""
    yield Cell("good/counts", partial(Outcome, {"things": seed}))
    yield Cell("good/senseless", partial(Outcome, note="nothing to try"))
    yield Cell("good/leaves a process", _leave_a_process)
    yield Cell("bad/wrong", _print_and_be_wrong)
    yield Cell("bad/tries nothing", partial(Outcome, {"things": 0}))
    yield Cell("bad/raises", partial(int, "not caught"))
    yield Cell("bad/dies", partial(signal.raise_signal, signal.SIGKILL))
    yield Cell("bad/hangs", partial(time.sleep, 3600), limit_s=5.0)


def _leave_a_process() -> Outcome:
    left = subprocess.Popen(["sleep", "3600"])
    number, left.returncode = left.pid, 0  # so that nothing warns about it
    return Outcome({"processes": 1}, note=str(number))


def _print_and_be_wrong() -> Outcome:
    print("what the cell printed")
    return Outcome({"things": 1}, wrong=["seed 1, step 2: another answer"], note=str(time.monotonic_ns()))


@pytest.mark.parametrize(
    ("name", "findings"),
    [
        ("good/counts", []),
        ("good/senseless", []),
        ("bad/wrong", ["wrong: seed 1, step 2: another answer"]),
        ("bad/tries nothing", ["missed: nothing was tried"]),
        ("bad/raises", ["ValueError: invalid literal"]),
        ("bad/dies", ["dead: its process ended with -9"]),
        ("bad/hangs", ["dead: did not end within 5 s"]),
    ],
)
def test_every_end_of_a_cell_is_noted(name: str, findings: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    outcome = _tried("tests.unit.test_prove", name)
    assert len(outcome.findings) == len(findings)
    assert all(words in said for words, said in zip(findings, outcome.findings, strict=True))
    assert ("what the cell printed" in capsys.readouterr().out) == (name == "bad/wrong")
    assert outcome.counts == {"things": 1} or name not in ("good/counts", "bad/wrong")


def test_a_process_that_a_cell_leaves_ends_with_it() -> None:
    from tests.unit.engine_rig import until

    stat = Path(f"/proc/{_tried('tests.unit.test_prove', 'good/leaves a process').note}/stat")
    until(lambda: not stat.exists() or " Z " in stat.read_text())


def test_a_soak_sees_growth() -> None:
    from tests.prove.soak import LIMITS, grown

    first = dict.fromkeys(LIMITS, 100.0)
    for name, limit in LIMITS.items():
        assert grown(first, {**first, name: 100.0 + limit}) == []
        [sentence] = grown(first, {**first, name: 101.0 + limit})
        assert sentence.startswith(name)


def test_faults_that_matter_most_are_tried_everywhere() -> None:
    most = {"short", "hang", "flipped", "swapped", "stale", "vanished", "late write", "fork"}
    for tier in ("slab", "shared_dir", "s3_obj", "s3_obstore"):
        for point in ("store", "load", "write-through", "promotion", "shutdown", "sleep"):
            assert most <= set(faults_at(tier, point))
    assert len({cell.name for cell in faults.cells(1)}) == len(TIERS) * len(POINTS) - 7, "seven make no sense"


def _tried(module: str, name: str, seed: int = 1) -> Outcome:
    [cell] = [cell for cell in cells_of(module, seed) if cell.name == name]
    return tried(module, cell, seed)


@pytest.mark.parametrize("name", ["slab/store", "s3_obstore/load", "shared_dir/load", "memory/promotion"])
def test_each_fault_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(faults.ROUNDS_VARIABLE, "1")
    outcome = _tried("tests.prove.faults", name)
    assert outcome.findings == []
    assert outcome.counts["rounds"] >= outcome.counts["rounds struck"] >= 3, outcome


@pytest.mark.parametrize("name", ["slab/two ranks, io_uring/0", "slab/behind memory/1", "tree/two servers/0"])
def test_after_each_kill_every_chunk_is_whole_or_a_miss(name: str) -> None:
    outcome = _tried("tests.prove.kills", name, seed=20)
    assert outcome.findings == []
    assert outcome.counts["kills"] == 4
    assert outcome.counts["whole"], outcome
    assert outcome.counts["sure"], outcome


@pytest.mark.parametrize("name", ["slab/first start", "tree/first start, aio"])
def test_a_server_opens_whatever_a_power_cut_leaves(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.prove import power
    from tests.prove.power.histories import STORIES

    monkeypatch.chdir(tmp_path)
    outcome = power.try_story(name, STORIES[name], "20", most=16)
    assert outcome.findings == []
    assert outcome.counts["disks"] > 8
    assert outcome.counts["whole"] > 0


def test_a_file_without_a_name_is_not_taken_for_one_that_had_its_inode(tmp_path: Path) -> None:
    from tests.prove.power.recording import Kind, build, record

    root = tmp_path / "recorded"
    root.mkdir()
    history = record(build(tmp_path), root, "tests.unit.test_prove")
    assert [call.data for call in history.calls if call.kind is Kind.WRITE] == [b"named"]


def _use_an_inode_again(root: Path) -> None:
    path = root / "file"
    path.write_bytes(b"named")
    path.unlink()
    with tempfile.TemporaryFile(buffering=0, dir=root) as file:  # ext4 gives it the inode that has just become free
        file.write(b"nameless")


if __name__ == "__main__":
    _use_an_inode_again(Path(sys.argv[1]))
