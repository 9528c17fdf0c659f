"""``make prove`` in seconds: ends of cells are told, judges see what is wrong, a little of each part is tried."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.prove import __main__ as prove
from tests.prove import faults
from tests.prove.faults.table import POINTS, TIERS, faults_at
from tests.prove.running import cells_of
from tests.prove.soak.laps import Lap
from tests.prove.soak.samples import LIMITS, grown
from tests.prove.trying import try_cells


def test_every_end_of_a_cell_is_told_and_what_was_good_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prove, "PARTS", {"kinds": "tests.unit.cells_of_all_kinds"})
    monkeypatch.setattr(prove, "_commit", lambda: "0123456789ab")

    def run(*arguments: str) -> tuple[int, dict[str, Any]]:
        status = prove.main(["--results", str(tmp_path), "--workers", "2", *arguments])
        return status, json.loads((tmp_path / "results.json").read_text())["cells"]

    status, cells = run()
    assert status == 1
    assert cells["kinds/good/counts"]["counts"] == {"things": 1}
    assert cells["kinds/bad/wrong"]["wrong"] == ["seed 1, step 2: another answer"]
    assert cells["kinds/bad/tries nothing"]["missed"] == ["nothing was tried"]
    assert "RuntimeError: not caught" in cells["kinds/bad/raises"]["dead"][0]
    assert "ended with -9" in cells["kinds/bad/dies"]["dead"][0]
    assert "did not end within 1 s" in cells["kinds/bad/hangs"]["dead"][0]
    shown = capsys.readouterr().out
    assert "| kinds/bad/wrong | 1 | 1 things | 1 | 0 | 0 | 0 |" in shown
    assert "- kinds/bad/wrong: wrong: seed 1, step 2: another answer" in shown
    assert "what the cell printed" in (tmp_path / "logs" / "kinds-bad-wrong.log").read_text()
    stat = Path(f"/proc/{cells['kinds/good/leaves a process']['note']}/stat")
    assert not stat.exists() or " Z " in stat.read_text()
    assert run("--cells", "good")[0] == 0
    _, again = run("--cells", "bad/wrong")
    assert again["kinds/good/leaves a process"] == cells["kinds/good/leaves a process"]
    assert again["kinds/bad/wrong"]["note"] != cells["kinds/bad/wrong"]["note"]


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ({"tokens": [5, 8, 7]}, "token 1 is 8, not 6"),
        ({"logprobs": [-0.1, -0.25, -0.3]}, "the logprob of token 1"),
        ({"logprobs": [-0.1, float("nan"), -0.3]}, "the logprob of token 1"),
        ({"tokens": [5, 6], "logprobs": [-0.1, -0.2]}, "2 tokens"),
        ({}, ""),
    ],
)
def test_a_soak_sees_wrong_answers(told: dict[str, Any], why: str) -> None:
    right: dict[str, Any] = {"tokens": [5, 6, 7], "logprobs": [-0.1, -0.2, -0.3], "leads": [1.0, 1.0, 1.0]}
    lap = Lap("3")
    lap.add(right, [1, 2])
    found = lap.judge([[right | told]])
    assert len(found) == bool(why)
    assert all(why in sentence for sentence in found)


@pytest.mark.parametrize("name", LIMITS)
def test_a_soak_sees_growth(name: str) -> None:
    first = dict.fromkeys(LIMITS, 100.0)
    assert grown(first, {**first, name: 100.0 + LIMITS[name]}) == []
    [sentence] = grown(first, {**first, name: 101.0 + LIMITS[name]})
    assert sentence.startswith(name)


def test_faults_that_matter_most_are_tried_everywhere() -> None:
    for tier in ("slab", "shared_dir", "s3_obj", "s3_obstore"):
        for point in ("store", "load", "write-through", "promotion", "shutdown", "sleep"):
            assert {"short", "hang", "flipped", "swapped", "stale", "vanished", "late write", "fork"} <= set(
                faults_at(tier, point)
            )
    assert len({cell.name for cell in faults.cells(1)}) == len(TIERS) * len(POINTS)


@pytest.mark.parametrize("names", [("slab/store", "s3_obstore/load"), ("shared_dir/load", "memory/promotion")])
def test_a_few_faults(tmp_path: Path, names: tuple[str, ...]) -> None:
    few = "tests.prove.faults.few"
    outcomes = try_cells("faults", few, [cell for cell in cells_of(few, 1) if cell.name in names], 1, tmp_path)
    assert len(outcomes) == len(names)
    for outcome in outcomes.values():
        assert outcome.is_good(), outcome
        assert outcome.counts["rounds"] >= outcome.counts["rounds struck"] >= 3, outcome


def test_inputs_that_fuzzing_kept_and_changes_of_them_find_nothing(tmp_path: Path) -> None:
    replay = [sys.executable, "-W", "ignore", "-m", "tests.prove.fuzz", "--replay", "--scratch", str(tmp_path)]
    ended = subprocess.run(replay, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr[-2000:]
    assert ended.stdout.count("changes of them") == 8
