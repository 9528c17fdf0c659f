"""``make prove`` in seconds: ends of cells are noted, judges see what is wrong, a little of most parts is tried. This
module is a part itself: one cell for each way in which a cell can end, so it imports little.
"""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.prove import __main__ as prove
from tests.prove import faults
from tests.prove.cells import Cell, Outcome, cells_of, run
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


def test_every_end_of_a_cell_is_noted_and_what_was_good_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prove, "PARTS", {"kinds": "tests.unit.test_prove"})
    monkeypatch.setattr(prove, "_commit", lambda: "0123456789ab")

    def tried(*arguments: str) -> tuple[int, dict[str, Any]]:
        status = prove.main(["--results", str(tmp_path), "--workers", "2", *arguments])
        return status, json.loads((tmp_path / "results.json").read_text())["cells"]

    status, rows = tried()
    assert status == 1
    assert rows["kinds/good/counts"]["counts"] == {"things": 1}
    assert rows["kinds/bad/wrong"]["wrong"] == ["seed 1, step 2: another answer"]
    assert rows["kinds/bad/tries nothing"]["missed"] == ["nothing was tried"]
    assert "ValueError: invalid literal" in rows["kinds/bad/raises"]["dead"][0]
    assert "ended with -9" in rows["kinds/bad/dies"]["dead"][0]
    assert "did not end within 5 s" in rows["kinds/bad/hangs"]["dead"][0]
    shown = capsys.readouterr().out
    assert "| kinds/bad/wrong | 1 | 1 things | 1 | 0 | 0 | 0 |" in shown
    assert "- kinds/bad/wrong: wrong: seed 1, step 2: another answer" in shown
    assert "what the cell printed" in (tmp_path / "logs" / "kinds-bad-wrong.log").read_text()
    stat = Path(f"/proc/{rows['kinds/good/leaves a process']['note']}/stat")
    assert not stat.exists() or " Z " in stat.read_text()
    assert tried("--cells", "good")[0] == 0
    _, again = tried("--cells", "bad/wrong")
    assert again["kinds/good/leaves a process"] == rows["kinds/good/leaves a process"]
    assert again["kinds/bad/wrong"]["note"] != rows["kinds/bad/wrong"]["note"]


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
    assert len({cell.name for cell in faults.cells(1)}) == len(TIERS) * len(POINTS)


def _try(part: str, seed: int, logs: Path, names: tuple[str, ...]) -> list[Outcome]:
    """Return the results of a part's cells of these names, all good."""
    module = f"tests.prove.{part}"
    wanted = [(part, module, cell) for cell in cells_of(module, seed) if cell.name in names]
    outcomes = [outcome for _, outcome, _ in run(wanted, seed, logs=logs)]
    assert len(outcomes) == len(names)
    assert all(outcome.is_good() for outcome in outcomes), outcomes
    return outcomes


@pytest.mark.parametrize("names", [("slab/store", "s3_obstore/load"), ("shared_dir/load", "memory/promotion")])
def test_each_fault_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]) -> None:
    monkeypatch.setenv(faults.ROUNDS_VARIABLE, "1")
    for outcome in _try("faults", 1, tmp_path, names):
        assert outcome.counts["rounds"] >= outcome.counts["rounds struck"] >= 3, outcome


def test_after_each_kill_every_chunk_is_whole_or_a_miss(tmp_path: Path) -> None:
    names = ("slab/two ranks, io_uring/0", "slab/behind memory/1", "tree/two servers/0")
    for outcome in _try("kills", 20, tmp_path, names):
        assert outcome.counts["kills"] == 4
        assert outcome.counts["whole"], outcome
        assert outcome.counts["sure"], outcome


@pytest.mark.parametrize("name", ["slab/first start", "tree/first start, aio"])
def test_a_server_opens_whatever_a_power_cut_leaves(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.prove import power
    from tests.prove.power.histories import STORIES

    monkeypatch.chdir(tmp_path)
    outcome = power.try_story(name, STORIES[name], "any", "20", most=16)
    assert outcome.is_good(), outcome
    assert outcome.counts["disks"] > 8
    assert outcome.counts["whole"] > 0
