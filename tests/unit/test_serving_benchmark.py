"""``benchmarks.serving``: a seed makes a workload, figures are what records say, sides are valid configs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serving import report, sides, workloads
from benchmarks.serving.report import LATER, Record, Run, figures
from benchmarks.serving.workloads import Spec
from nixl_offload.config import parse_config

BUCKET = {"kind": "s3", "bucket": "kv-cache", "endpoint": "http://127.0.0.1:9000", "region": "us-east-1"}


def record(**fields: Any) -> Record:
    plain: dict[str, Any] = {"prompt_tokens": 100, "repeated_tokens": 0, "cached_tokens": 0}
    return Record(**{**plain, "sent_s": 0.0, "ttft_s": 1.0, "gaps_s": (0.5, 0.5), **fields})


def run(side: str = "prefix", seed: int = 0, *records: Record) -> Run:
    return Run(side, seed, records, 1.0, 0.5)


@pytest.mark.parametrize("document_tokens", [0, 500])
def test_a_workload_is_made_by_its_seed(document_tokens: int) -> None:
    spec = Spec(3, 4, 200, document_tokens)
    (session, *_), again, other = map(workloads.make, (spec, spec, replace(spec, seed=1)))
    assert session == again[0] != other[0]
    answers = [[0] * turn.answer_tokens for turn in session.turns]
    before, last = session.prompt(2, answers[:2]) + answers[2], session.prompt(3, answers[:3])
    assert session.repeated_tokens(3) == (document_tokens or len(before)) == len(last) - 200
    assert last[:-200] == before[: len(last) - 200]


def test_figures_and_ratios_say_what_records_say() -> None:
    later = record(repeated_tokens=80, cached_tokens=60, sent_s=2.0, ttft_s=0.2, gaps_s=(0.1, 0.2))
    found = figures(run("memory", 0, record(), later))
    wanted = {"TTFT": 600, LATER: 200, "later p99": 200, "ITL p50": 350, "requests/s": 0.8, "hits %": 30}
    assert {name: found[name] for name in wanted} == pytest.approx(wanted)
    seeds = [(1, 0.5, "memory"), (1, 1.0, "prefix"), (2, 1.0, "memory"), (2, 4.0, "prefix"), (0, 9.0, "prefix")]
    runs = [run(side, seed, record(ttft_s=ttft_s)) for seed, ttft_s, side in seeds]
    memory, prefix = ([each for each in runs if each.side == side] for side in ("memory", "prefix"))
    pairs = report.ratio(memory, prefix)
    assert pairs.mean == pytest.approx(8**-0.5), "only seeds of both are compared"
    assert pairs.low < 0.25 < pairs.mean < 0.5 < pairs.high
    assert [row.split()[1] for row in report.table(runs).splitlines()[2:]] == ["memory", "prefix"]
    assert "0.35" in report.comparison(prefix, [replace(each, side="prefix") for each in memory])


@pytest.mark.parametrize("name", sides.NOTES)
def test_each_side_has_options(name: str, tmp_path: Path) -> None:
    options = sides.engine_options(name, sides.Room(1 << 30, 1 << 30, 4 << 30), tmp_path / "kv", BUCKET, "engine")
    transfer = options.get("kv_transfer_config", {})
    if sides.NOTES[name].startswith("ours"):
        kinds = [tier.kind for tier in parse_config(transfer["kv_connector_extra_config"]["config"]).tiers]
        assert kinds == [{"tree": "shared_dir", "free": "memory"}.get(kind, kind) for kind in name.split("+")]
