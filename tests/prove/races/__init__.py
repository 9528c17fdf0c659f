"""Threads of the product under many schedules: ``make prove ARGS="--parts races"``.

``scheduler`` runs one thread at a time, ``primitives`` puts it under the product's locks, queues, pools and clocks,
``strategies`` has schedules at random, by priorities and one after another, ``accesses`` watches what is shared without
a lock, ``scenarios`` says what is tried, and ``toys`` are broken on purpose, so that all this is known to find defects.

A cell is a scenario. Its process loads the product over the primitives, so nothing here imports the product before.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from tests.prove.cells import Cell, Outcome
from tests.prove.races.names import PLAN, Share


def cells(seed: int) -> Iterable[Cell]:
    """Return a cell for each scenario, and one for the toys."""
    yield Cell("toys", partial(try_toys, seed), limit_s=300)
    for name, share in PLAN.items():
        yield Cell(name, partial(try_scenario, name, share, seed), limit_s=900)


def try_scenario(name: str, share: Share, seed: int) -> Outcome:
    """Try a scenario under so many schedules. In a process that has not loaded the product yet, or by this."""
    from tests.prove.races.exploring import explore
    from tests.prove.races.loading import scenario_of

    return explore(scenario_of(name), name, schedules=share.random, bounded=share.bounded, fine=share.fine, seed=seed)


def try_toys(seed: int, schedules: int = 100) -> Outcome:
    """Look for the defects of the toys, by so many schedules. Not to find one is a finding."""
    from tests.prove.races import loading

    return loading.try_toys(seed, schedules)
