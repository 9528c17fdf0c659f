"""Proves that ``make prove`` tells what came out of each cell, however it ended, and tries only those again in which
something was found.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.prove import __main__ as prove
from tests.prove.running import cells_of

MODULE = "tests.unit.cells_of_all_kinds"


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(prove, "PARTS", {"kinds": MODULE})
    monkeypatch.setattr(prove, "_commit", lambda: "0123456789ab")
    return tmp_path / "results"


def run(results: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    status = prove.main(["--results", str(results), "--json", "--workers", "2", *arguments])
    return status, json.loads(capsys.readouterr().out)


def test_every_end_of_a_cell_is_told(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, told = run(results, capsys)
    assert status == 1
    cells = told["cells"]
    assert cells["kinds/good/counts"]["counts"] == {"things": 1}
    assert cells["kinds/good/senseless"]["note"] == "nothing to try"
    assert cells["kinds/bad/wrong"]["wrong"] == ["seed 1, step 2: another answer"]
    assert cells["kinds/bad/tries nothing"]["missed"] == ["nothing was tried"]
    assert "RuntimeError: not caught" in cells["kinds/bad/raises"]["dead"][0]
    assert "ended with -9" in cells["kinds/bad/dies"]["dead"][0]
    assert "did not end within 1 s" in cells["kinds/bad/hangs"]["dead"][0]
    logs = {log.name: log.read_text() for log in (results / "logs").iterdir()}
    assert logs.keys() == {f"kinds-bad-{name}.log" for name in ("wrong", "tries_nothing", "raises", "dies", "hangs")}
    assert "what the cell printed" in logs["kinds-bad-wrong.log"]
    stat = Path(f"/proc/{cells['kinds/good/leaves a process']['note']}/stat")
    assert not stat.exists() or " Z " in stat.read_text()


def test_what_was_good_is_not_tried_again(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, first = run(results, capsys, "--cells", "good")
    assert (status, len(first["cells"])) == (0, 3)
    assert run(results, capsys, "--cells", "good") == (0, first)
    notes = [run(results, capsys, "--cells", "wrong")[1]["cells"]["kinds/bad/wrong"]["note"] for _ in range(2)]
    assert notes[0] != notes[1]
    assert run(results, capsys, "--cells", "counts", "--seed", "2")[1]["cells"]["kinds/good/counts"]["counts"] == {
        "things": 2
    }
    assert len(json.loads((results / "results-before.json").read_text())["cells"]) == 4


def test_what_is_shown(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = results.parent / "table.md"
    arguments = ["--results", str(results), "--markdown", str(file), "--cells", "wrong"]
    assert prove.main(arguments) == 1
    assert "kinds/bad/wrong: wrong: seed 1, step 2: another answer" in capsys.readouterr().out
    assert "| kinds/bad | 1 | 1 things | 1 | 0 | 0 | 0 |" in file.read_text()
    assert prove.main([*arguments, "--list"]) == 0
    assert capsys.readouterr().out == "kinds/bad/wrong\n"
    with pytest.raises(SystemExit):
        prove.main([*arguments, "--parts", "kinds,others"])
    assert "not known: others; parts are kinds" in capsys.readouterr().err


def test_names_of_cells_are_unique() -> None:
    with pytest.raises(ValueError, match="several cells named good/counts"):
        cells_of(MODULE, 0)
