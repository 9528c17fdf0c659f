"""Benchmarks of both halves, and played copies, run. No other test uses them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import interpreter, scheduler
from benchmarks.serving import played
from docs import pictures


@pytest.mark.parametrize("medium", ["slab", "memory"])
def test_a_rank_takes_time_for_each_chunk(medium: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "JOBS", (1, 8))
    monkeypatch.setattr(interpreter, "RUN_CHUNKS", 8)
    with interpreter.open_rank(medium, tmp_path) as rank:
        assert all(min(interpreter.measure(rank, operation, 1)) > 0 for operation in interpreter.OPERATIONS)


def test_the_schedulers_thread_is_measured_on_all_sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the picture is drawn."""
    found = tmp_path / "found.json"
    scheduler.main(["--tokens", "512", "1024", "--waiting", "1", "3", "--rounds", "1", "--json", str(found)])
    rows = json.loads(found.read_text())["rows"]
    assert {frozenset(row["ms"]) for row in rows} == {frozenset(scheduler.SIDES), frozenset(["memory+slab"])}
    assert {row["requests"] for row in rows if row["what"] == "waiting"} == {1, 3}
    monkeypatch.setattr(pictures, "PLACE", tmp_path)
    pictures.main("scheduler", str(found))
    assert "</svg>" in (tmp_path / "scheduler.svg").read_text()


def test_a_copy_by_the_clock_takes_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(played.RATE, "2e4")
    packer = played.ClockedPacker([], [[]])
    packer.block_bytes = [10_000]
    assert not packer.scatter_many(0, [(np.arange(2), np.empty(0))], played.Copy(0)).done()
