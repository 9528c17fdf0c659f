"""Proves that ``make prove`` tells what came out of each cell, however it ended, and tries only those again in which
something was found.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.prove import __main__ as prove
from tests.prove.faults.table import FAULTS, faults_at, why_not
from tests.prove.report import FINDINGS, drawn, markdown
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
    assert "| kinds | 1 | 1 things | 1 | 0 | 0 | 0 |" in file.read_text()
    assert "| kinds/bad/wrong | 1 things | 1 | 0 | 0 | 0 |" in file.read_text()
    assert prove.main([*arguments, "--list"]) == 0
    assert capsys.readouterr().out == "kinds/bad/wrong\n"
    with pytest.raises(SystemExit):
        prove.main([*arguments, "--parts", "kinds,others"])
    assert "not known: others; parts are kinds" in capsys.readouterr().err


def test_the_matrix_and_the_reasons_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """Each fault's count at its point, and each that is not tried, by a reason; a cell's note as it is."""
    untold: dict[str, Any] = {"seconds": 1.0, **{kind: [] for kind in FINDINGS}}
    cells = {
        "faults/slab/load": {"counts": {"faults": 19, "EIO": 12, "slow": 7}, "note": "", **untold},
        "faults/memory/gc": {"counts": {}, "note": "no command looks there", **untold},
        "fuzz/stored/names": {"counts": {"inputs": 1234}, "note": "stopped early", **untold},
        "mutants/a": {"counts": {"mutants": 10, "killed": 9, "listed": 5}, "note": "", **untold},
        "mutants/b": {"counts": {"mutants": 10, "killed": 10}, "note": "", **untold},
    }
    shown = {"cells": cells, "commit": "c", "seed": 1, "machine": "m"}
    for told in drawn(shown):
        Console(width=300).print(told)
    terminal, file = capsys.readouterr().out, markdown(shown)
    counts = {fault: cells["faults/slab/load"]["counts"].get(fault, 0) for fault in faults_at("slab", "load")}
    line = f"| slab, load | {' | '.join(str(counts.get(fault, '–')) for fault in FAULTS)} |"
    for text in (terminal, file):
        assert line in text
        for fault in FAULTS:
            assert (fault in counts) == ((why_not("slab", "load", fault) or "no reason") not in text)
        assert "faults/memory/gc: no command looks there" in text
        assert "fuzz/stored/names: stopped early" in text
        assert "killed 19: 95.0% of 20 tried, 76.0% of 25 with those drawn that are listed" in text
    assert "| slab | load | 500, 503, 403, reset | no server answers for a directory |" in file
    assert "| faults/slab/load | 19 faults | 0 |" in file, "kinds of faults are in the matrix"
    assert "| faults | 2 | 19 faults, 1 cells left out | 0 |" in file
    assert "EIO" not in markdown({**shown, "cells": {"fuzz/stored/names": cells["fuzz/stored/names"]}})


def test_a_commit_is_named_with_what_differs_from_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that results of one uncommitted state do not pass for those of another."""
    monkeypatch.setattr(prove, "ROOT", tmp_path)

    def git(*words: str) -> None:
        subprocess.run(["git", "-c", "user.name=n", "-c", "user.email=e@x", *words], check=True, cwd=tmp_path)

    git("init", "-q")
    (tmp_path / "tracked").write_text("1")
    git("add", "tracked")
    git("commit", "-q", "-m", "first")
    clean = prove._commit()
    assert len(clean) == 12
    names = [clean]
    for file, content in (("tracked", "2"), ("tracked", "3"), ("new", "1"), ("new", "2"), ("newer", "2")):
        (tmp_path / file).write_text(content)
        names.append(prove._commit())
    assert len(set(names)) == len(names)
    assert all(name.startswith(clean) for name in names)
    (tmp_path / "new").unlink()
    (tmp_path / "newer").unlink()
    (tmp_path / "tracked").write_text("1")
    assert prove._commit() == clean


def test_names_of_cells_are_unique() -> None:
    with pytest.raises(ValueError, match="several cells named good/counts"):
        cells_of(MODULE, 0)
