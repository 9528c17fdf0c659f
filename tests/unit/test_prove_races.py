"""A small part of ``make prove ARGS="--parts races"``: what is broken on purpose is found, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.prove.races import quick
from tests.prove.races.exploring import Scenario, explore
from tests.prove.races.strategies import read, written
from tests.prove.running import run


def test_what_is_broken_is_found_and_the_product_is_not(tmp_path: Path) -> None:
    """In a process of its own, where the product is loaded over the scheduler's locks."""
    (cell,) = quick.cells(1)
    ((_, _, outcome, _),) = run([("races", quick.__name__, cell)], 1, workers=1, logs=tmp_path)
    assert outcome.is_good(), outcome
    assert outcome.counts["schedules"] > 300


def test_to_watch_nothing_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = explore(Scenario(lambda run: None), "nothing", schedules=1, bounded=1, fine=2, seed=1)
    assert outcome.missed == ["2 schedules were to watch what threads share, and met nothing of it"]


def test_bounded_schedules_go_round_the_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    seeds: list[int] = []
    for seed in (1, 2):
        explore(Scenario(lambda run: seeds.append(run.seed), seeds=100), "none", schedules=0, bounded=40, seed=seed)
    assert seeds[:40] == [*range(2, 42)]
    assert seeds[40:] == [*range(4, 44)]


@pytest.mark.parametrize("deviations", [{}, {3: 1}, {3: 1, 12: 0}])
def test_a_schedule_is_read_as_it_was_written(deviations: dict[int, int]) -> None:
    assert read(written(deviations)) == deviations
