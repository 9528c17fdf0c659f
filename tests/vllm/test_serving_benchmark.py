"""``benchmarks.serving`` from end to end: an engine that only takes time, asked by clients, with our memory tier."""

from __future__ import annotations

from pathlib import Path
from typing import Any, BinaryIO

import pytest

from benchmarks.serving import turns
from benchmarks.serving.model import SHAPES, Pace
from benchmarks.serving.report import figures
from benchmarks.serving.turns import Plan
from benchmarks.serving.workloads import Spec
from tests.vllm.zygote import MAIN_MODULE, Zygote


def test_a_side_runs_at_the_pace_it_is_given(zygote: Zygote, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fork(log_file: BinaryIO, environment: dict[str, str]) -> Any:
        return zygote.fork(log_file, {**environment, MAIN_MODULE: "benchmarks.serving.drive"}, spawns=True)

    monkeypatch.setattr(turns, "start_process", fork)
    spec = Spec(sessions=3, turns=2, tokens=400, answer_tokens=5)
    plan = Plan(spec, shape=SHAPES["70b-tp8"], pace=Pace(0.02, 0.0005), at_a_time=1, gpu_share=0.0, memory_share=2.0)
    run = turns.run_side(plan, "memory", 0, tmp_path)
    assert [(record.session, record.turn) for record in run.records] == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)]
    first = run.records[0]
    assert first.ttft_s >= 0.02 + 400 * 0.0005
    assert len(first.gaps_s) == 4
    assert first.ttft_s + sum(first.gaps_s) >= 5 * 0.02 + 400 * 0.0005, "one that is seen late shortens the next gap"
    assert run.stored_bytes > 0
    assert run.loaded_bytes > 0  # the other sessions have taken the GPU's cache meanwhile
    assert figures(run).external_rate > 0
    assert list(tmp_path.iterdir()) == []
