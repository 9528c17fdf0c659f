"""A few schedules of a few scenarios, and the toys, in one cell: some seconds, for ``make test``."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from tests.prove.cells import Cell, Outcome
from tests.prove.races import try_scenario, try_toys
from tests.prove.races.names import Share

SHARES = {
    "world/promoting": Share(2, 1, 1),
    "world/ending": Share(2, 1, 1),
    "storage/calls": Share(10, 10, 2),
    "storage/copying": Share(10, 10, 2),
    "lookups/asking": Share(10, 10, 2),
    "opening/in the background": Share(10, 10, 2),
}


def cells(seed: int) -> Iterable[Cell]:
    """Return the one cell."""
    yield Cell("quick", partial(_try, seed), limit_s=240)


def _try(seed: int) -> Outcome:
    outcome = try_toys(seed, 40)
    for name, share in SHARES.items():
        found = try_scenario(name, share, seed)
        outcome.counts["schedules"] += found.counts["schedules"]
        for kind in ("wrong", "dead", "leaks", "missed"):
            getattr(outcome, kind).extend(getattr(found, kind))
    return outcome
