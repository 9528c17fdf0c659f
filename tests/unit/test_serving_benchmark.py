"""``benchmarks.serving``: workloads are what they say and the same for each seed, and figures are what records say."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serving import __main__ as command
from benchmarks.serving import model, report, sides, turns, workloads
from benchmarks.serving.records import Record, Run, figures, medians, percentile, ratios
from benchmarks.serving.turns import Plan
from benchmarks.serving.workloads import Session, Spec, Turn
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


def test_prompts_of_sessions_grow_by_what_was_said() -> None:
    session = workloads.make(Spec(sessions=1, turns=3, tokens=50, answer_tokens=5))[0]
    answers = [[0] * 5, [0] * 5]
    first, last = session.prompt(0, []), session.prompt(2, answers)
    assert last[:55] == first + answers[0]
    assert len(last) == 3 * 50 + 2 * 5
    assert [session.repeated_tokens(turn) for turn in range(3)] == [0, 55, 110]


def test_documents_are_asked_about_from_their_beginning() -> None:
    session = workloads.make(Spec(kind="documents", sessions=1, turns=3, tokens=50, answer_tokens=5))[0]
    assert len(session.prefix) == 150
    assert session.prompt(2, ()) == [*session.prefix, *session.turns[2].new]
    assert [session.repeated_tokens(turn) for turn in range(3)] == [0, 150, 150]


def test_agents_read_a_hundred_times_what_they_write() -> None:
    made = workloads.make(Spec(kind="agents", sessions=4, turns=20, tokens=1000))
    prompts = [
        len(session.prompt(turn, [[0] * earlier.answer_tokens for earlier in session.turns[:turn]]))
        for session in made
        for turn in range(20)
    ]
    answers = [turn.answer_tokens for session in made for turn in session.turns]
    assert sum(prompts) / sum(answers) == pytest.approx(workloads.INPUT_PER_OUTPUT, rel=0.02)
    assert len({session.prefix for session in made}) == 1
    assert [session.is_prefix_known for session in made] == [False, True, True, True]


def test_system_prompts_repeat_and_cold_prompts_do_not() -> None:
    spec = {"sessions": 2, "turns": 3, "tokens": 100}
    shared, cold = (workloads.make(Spec(kind=kind, **spec)) for kind in ("system", "cold"))
    assert [session.repeated_tokens(0) for session in shared] == [0, 0, 100, 100, 100, 100]
    assert not any(session.repeated_tokens(0) for session in cold)
    assert len({session.turns[0].new[:8] for session in cold}) == 6


def test_the_working_set_counts_a_shared_prefix_once() -> None:
    made = [Session((2, 3), (Turn((4,), 5),)), Session((2, 3), (Turn((6,), 5),), is_prefix_known=True)]
    assert workloads.unique_tokens(made) == 2 + 6 + 6
    assert workloads.longest_tokens(made) == 8


def test_arrivals_are_a_poisson_process() -> None:
    arrivals = workloads.poisson(4.0, 20_000, seed=3)
    gaps = [after - before for before, after in zip([0.0, *arrivals], arrivals, strict=False)]
    assert min(gaps) >= 0
    assert statistics.fmean(gaps) == pytest.approx(0.25, rel=0.03)
    assert statistics.pstdev(gaps) == pytest.approx(0.25, rel=0.05)  # exponential: as wide as its mean
    assert arrivals == workloads.poisson(4.0, 20_000, seed=3) != workloads.poisson(4.0, 20_000, seed=4)
    with pytest.raises(ValueError, match="above zero"):
        workloads.poisson(0.0, 1, seed=0)


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


def test_what_was_not_measured_is_not_a_number() -> None:
    assert math.isnan(percentile([], 99))
    assert math.isnan(figures(run()).later_ttft_mean_s)
    assert math.isnan(ratios([], [], "ttft_mean_s"))
    cold = figures(run())
    assert math.isnan(ratios([cold], [cold], "later_ttft_mean_s") or math.nan)


def test_medians_and_ratios_go_round_by_round() -> None:
    base = [figures(run(records=(record(ttft_s=time_s),))) for time_s in (1.0, 10.0, 2.0)]
    ours = [figures(run(records=(record(ttft_s=time_s),))) for time_s in (0.5, 5.0, 2.0)]
    assert medians(base).ttft_mean_s == 2.0
    assert ratios(ours, base, "ttft_mean_s") == 0.5
    with pytest.raises(ValueError, match="no rounds"):
        medians([])


def test_a_run_survives_its_journey() -> None:
    made = run(records=(record(), record(turn=1)))
    assert Run.from_json(json.loads(json.dumps(made.as_json()))) == made


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


def test_shapes_weigh_what_their_models_do() -> None:
    weights = {name: shape.token_bytes for name, shape in model.SHAPES.items()}
    assert weights == {"8b": 128 << 10, "70b-tp8": 40 << 10, "mla": 61 * 576 * 2}
    assert model.Pace(0.01, 0.0001).duration_s(100) == pytest.approx(0.02)


def test_room_holds_a_request_whatever_its_share() -> None:
    plan = Plan(Spec(sessions=2, turns=2, tokens=100, answer_tokens=10), gpu_share=0.0)
    assert plan.room().gpu >= 220 * model.SHAPES["8b"].token_bytes
    assert plan.longest_tokens % model.BLOCK_TOKENS == 0
    assert plan.working_set_bytes == 2 * 220 * model.SHAPES["8b"].token_bytes


def test_sides_take_turns_and_one_that_fails_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, str]] = []

    def run_side(plan: Plan, side: str, number: int, directory: Path | None, say: turns.Progress) -> Run:
        asked.append((number, side))
        if side == "slab":
            raise turns.SideError("no room")
        return run(side, number)

    monkeypatch.setattr(turns, "run_side", run_side)
    said: list[str] = []
    made = list(turns.measure(Plan(Spec()), ["prefix", "slab", "memory"], 3, None, said.append))
    assert [one.side for one in made] == ["prefix", "memory", "memory", "prefix", "memory", "prefix"]
    assert asked.count((0, "slab")) == 1
    assert asked.index((1, "memory")) < asked.index((1, "prefix"))
    assert any("no room" in line for line in said)


def test_the_command_line_makes_plans() -> None:
    chosen = command.parser().parse_args(["--workload", "all", "--tokens", "300", "--memory-gb", "0.5", "--rate", "2"])
    made = command.plans(chosen)
    assert [plan.workload.kind for plan in made] == list(workloads.KINDS)
    assert all(plan.room().memory == pytest.approx(500_000_000, abs=1) for plan in made)
    with pytest.raises(SystemExit):
        command.main(["--sides", "nobody"])
    with pytest.raises(SystemExit):
        command.main(["--rounds", "0"])


def test_the_shape_of_a_real_model_is_read_from_its_config(tmp_path: Path) -> None:
    made = model.write_model(tmp_path, model.SHAPES["70b-tp8"], model.Pace(), 1024)
    assert model.shape_of(str(made)).token_bytes == model.SHAPES["70b-tp8"].token_bytes
    with pytest.raises(OSError, match="absent"):
        model.shape_of(str(tmp_path / "absent"))
