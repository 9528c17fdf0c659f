"""``benchmarks.serving`` from end to end: an engine that only takes time, asked by clients, with our memory tier."""

from __future__ import annotations

from pathlib import Path
from typing import Any, BinaryIO

import pytest

from benchmarks.serving import steps, turns
from benchmarks.serving.model import SHAPES, Pace
from benchmarks.serving.records import figures
from benchmarks.serving.turns import Plan
from benchmarks.serving.workloads import Spec
from tests.vllm.zygote import MAIN_MODULE, Zygote


def test_a_side_runs_at_the_pace_it_is_given(zygote: Zygote, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fork(log_file: BinaryIO, environment: dict[str, str]) -> Any:
        return zygote.fork(log_file, {**environment, MAIN_MODULE: "benchmarks.serving.drive"}, spawns=True)

    monkeypatch.setattr(turns, "start_process", fork)
    spec = Spec(sessions=3, turns=2, tokens=400, answer_tokens=5)
    plan = Plan(spec, shape=SHAPES["70b-tp8"], pace=Pace(0.02, 0.0005), at_a_time=1, gpu_share=0.0, memory_share=2.0)
    run = turns.run_side(plan, "memory", 0, tmp_path, print)
    assert [(record.session, record.turn) for record in run.records] == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)]
    first = run.records[0]
    assert first.ttft_s >= 0.02 + 400 * 0.0005
    assert len(first.gaps_s) == 4
    assert first.ttft_s + sum(first.gaps_s) >= 5 * 0.02 + 400 * 0.0005, "one that is seen late shortens the next gap"
    assert run.stored_bytes > 0
    assert run.loaded_bytes > 0  # the other sessions have taken the GPU's cache meanwhile
    assert figures(run).external_rate > 0
    assert list(tmp_path.iterdir()) == []


def test_the_processor_time_of_a_step_is_measured_by_call(
    zygote: Zygote, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fork(log_file: BinaryIO, environment: dict[str, str]) -> Any:
        return zygote.fork(log_file, {**environment, MAIN_MODULE: "benchmarks.serving.step_engine"}, spawns=True)

    monkeypatch.setattr(steps, "start_process", fork)
    spec = Spec(sessions=2, turns=2, tokens=400, answer_tokens=5)
    plan = Plan(spec, shape=SHAPES["70b-tp8"], pace=Pace(0.001, 0.00001), at_a_time=2, gpu_share=0.0, memory_share=2.0)
    run = steps.measure(plan, "memory", 0, tmp_path)
    assert run["us"].keys() == {*steps.SCHEDULER, *steps.RANK, steps.ALL, steps.WHOLE}
    assert min(run["us"].values()) > 0
    assert run["us"][steps.ALL] < run["us"][steps.WHOLE] < 1e6 * run["step_s"]
    assert run["calls"]["building the step's message"] >= 1
    lines = steps.table({"memory": [run], "again": [run]}).splitlines()
    assert len({line.count("|") for line in lines}) == 1
    assert list(tmp_path.iterdir()) == []
