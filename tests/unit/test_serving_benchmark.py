"""``benchmarks.serving``: workloads are what they say and the same for each seed, and figures are what records say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serving import report, sides, workloads
from benchmarks.serving.records import Record, Run, figures
from benchmarks.serving.turns import Plan
from benchmarks.serving.workloads import Spec
from nixl_offload.config import parse_config

ROOM = sides.Room(gpu=1 << 30, memory=1 << 30, storage=4 << 30)
BUCKET = {
    "kind": "s3",
    "bucket": "kv-cache",
    "prefix": "kv",
    "endpoint": "http://127.0.0.1:9000",
    "region": "us-east-1",
    "addressing": "path",
    "access_key": "someone",
    "secret_key": "unsaid",
}


def record(**fields: Any) -> Record:
    plain: dict[str, Any] = {
        "session": 0,
        "turn": 0,
        "prompt_tokens": 100,
        "repeated_tokens": 0,
        "cached_tokens": 0,
        "sent_s": 0.0,
        "ttft_s": 1.0,
        "gaps_s": (0.5, 0.5),
    }
    return Record(**{**plain, **fields})


def run(side: str = "prefix", round_: int = 0, records: tuple[Record, ...] = (record(),), **fields: Any) -> Run:
    plain: dict[str, Any] = {
        "processor_s": 1.0,
        "loaded_bytes": 0,
        "stored_bytes": 0,
        "external_tokens": 0,
        "load_before": 0.5,
        "start_s": 9.0,
    }
    return Run(side=side, round=round_, records=records, **{**plain, **fields})


@pytest.mark.parametrize("kind", workloads.KINDS)
def test_a_workload_is_made_by_its_seed(kind: str) -> None:
    spec = Spec(kind=kind, sessions=3, turns=4, tokens=200, answer_tokens=10)
    assert workloads.make(spec) == workloads.make(spec)
    assert workloads.make(spec) != workloads.make(Spec(kind=kind, sessions=3, turns=4, tokens=200, seed=1))
    assert sum(len(session.turns) for session in workloads.make(spec)) == 12


def test_figures_say_what_records_say() -> None:
    later = record(turn=1, repeated_tokens=80, cached_tokens=60, sent_s=2.0, ttft_s=0.2, gaps_s=(0.1, 0.2))
    found = figures(run(records=(record(), later), external_tokens=40))
    assert found.ttft_mean_s == pytest.approx(0.6)
    assert found.later_ttft_mean_s == found.later_ttft_p99_s == pytest.approx(0.2)
    assert found.gap_p50_s == pytest.approx(0.35)
    assert found.requests_per_s == pytest.approx(2 / 2.5)
    assert (found.hit_rate, found.possible_hit_rate, found.external_rate) == (0.3, 0.4, 0.2)
    with pytest.raises(ValueError, match="nothing"):
        figures(run(records=()))


def test_a_report_shows_every_side_and_compares_rounds_that_both_ran() -> None:
    runs = [
        run("memory", 1, (record(ttft_s=0.5),)),
        run("prefix", 1, (record(ttft_s=1.0),)),
        run("prefix", 0, (record(ttft_s=9.0),)),
    ]
    result = report.Result.of(Plan(Spec()), runs)
    assert list(result.runs) == ["prefix", "memory"]
    assert [one.round for one in result.runs["prefix"]] == [0, 1]
    assert result.ratio("memory", "ttft_mean_s") == 0.5
    text = report.markdown([result], report.machine())
    assert "| memory | 500 |" in text
    assert all(len(row) == len(report.heading()) for row in report.rows(result))
    assert report.table(result).row_count == 2
    json.dumps(report.as_json([result], report.machine()))


@pytest.mark.parametrize("name", sides.NOTES)
def test_each_side_has_options(name: str, tmp_path: Path) -> None:
    options = sides.engine_options(name, ROOM, tmp_path / "kv", BUCKET, "engine")
    transfer = options.get("kv_transfer_config", {})
    if sides.NOTES[name].startswith("ours"):
        told = transfer["kv_connector_extra_config"]["config"]
        assert [tier.kind for tier in parse_config(told).tiers] == [
            {"tree": "shared_dir"}.get(kind, kind) for kind in name.split("+")
        ]
        assert "unsaid" not in json.dumps(options)
    assert bool(transfer) == (name not in ("none", "prefix"))
