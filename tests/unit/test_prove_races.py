"""A small part of ``make prove ARGS="--parts races"``: what is broken on purpose is found, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.prove.races import quick
from tests.prove.races.strategies import read, written
from tests.prove.running import run


def test_what_is_broken_is_found_and_the_product_is_not(tmp_path: Path) -> None:
    """In a process of its own, where the product is loaded over the scheduler's locks."""
    (cell,) = quick.cells(1)
    ((_, _, outcome, _),) = run([("races", quick.__name__, cell)], 1, workers=1, logs=tmp_path)
    assert outcome.is_good(), outcome
    assert outcome.counts["schedules"] > 300


@pytest.mark.parametrize("deviations", [{}, {3: 1}, {3: 1, 12: 0}])
def test_a_schedule_is_read_as_it_was_written(deviations: dict[int, int]) -> None:
    assert read(written(deviations)) == deviations
