"""``benchmarks.serving``: a seed makes a workload, figures are what records say, sides are valid configs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.serving import report, sides, workloads
from benchmarks.serving.report import Record, Run, figures
from benchmarks.serving.workloads import Spec
from nixl_offload.config import parse_config

BUCKET = {"kind": "s3", "bucket": "kv-cache", "endpoint": "http://127.0.0.1:9000", "region": "us-east-1"}


def record(**fields: Any) -> Record:
    plain: dict[str, Any] = {"session": 0, "turn": 0, "prompt_tokens": 100, "repeated_tokens": 0, "cached_tokens": 0}
    return Record(**{**plain, "sent_s": 0.0, "ttft_s": 1.0, "gaps_s": (0.5, 0.5), **fields})


def run(side: str = "prefix", round_: int = 0, *records: Record, external_tokens: int = 0) -> Run:
    return Run(side, round_, records, 1.0, 0, 0, external_tokens, 0.5)


@pytest.mark.parametrize("kind", workloads.KINDS)
def test_a_workload_is_made_by_its_seed(kind: str) -> None:
    spec = Spec(kind=kind, sessions=3, turns=4, tokens=200, answer_tokens=10)
    assert workloads.make(spec) == workloads.make(spec)
    assert workloads.make(spec) != workloads.make(Spec(kind=kind, sessions=3, turns=4, tokens=200, seed=1))
    assert sum(len(session.turns) for session in workloads.make(spec)) == 12


def test_figures_and_ratios_say_what_records_say() -> None:
    later = record(turn=1, repeated_tokens=80, cached_tokens=60, sent_s=2.0, ttft_s=0.2, gaps_s=(0.1, 0.2))
    found = figures(run("memory", 0, record(), later, external_tokens=40))
    assert found["TTFT mean ms"] == pytest.approx(600)
    assert found["later mean"] == found["later p99"] == pytest.approx(200)
    assert found["ITL p50"] == pytest.approx(350)
    assert found["requests/s"] == pytest.approx(2 / 2.5)
    assert (found["hits %"], found["connector %"]) == (30, 20)
    rounds = [(1, 0.5, "memory"), (1, 1.0, "prefix"), (0, 9.0, "prefix")]
    runs = [run(side, number, record(ttft_s=ttft_s)) for number, ttft_s, side in rounds]
    assert report.ratio(runs, "memory", "TTFT mean ms") == 0.5, "only a round that both have run is compared"
    heading, _, *rows = report.table(runs).splitlines()
    assert [row.split()[1] for row in rows] == ["prefix", "memory"]
    assert {row.count("|") for row in rows} == {heading.count("|")}


@pytest.mark.parametrize("name", sides.NOTES)
def test_each_side_has_options(name: str, tmp_path: Path) -> None:
    room = sides.Room(gpu=1 << 30, memory=1 << 30, storage=4 << 30)
    options = sides.engine_options(name, room, tmp_path / "kv", BUCKET, "engine")
    transfer = options.get("kv_transfer_config", {})
    assert bool(transfer) == (name != "prefix")
    if sides.NOTES[name].startswith("ours"):
        kinds = [tier.kind for tier in parse_config(transfer["kv_connector_extra_config"]["config"]).tiers]
        assert kinds == [{"tree": "shared_dir"}.get(kind, kind) for kind in name.split("+")]
