"""The fault matrix: every fault that a tier can meet at every point, again and again, and what must hold afterwards.

A cell is a tier at a point (``table.py``); its process tries each fault that makes sense there. ``rounds.py`` has the
rounds and what is checked after each, ``points.py`` what is done at each point, ``context.py`` what it has at hand,
``server.py`` the server, ``media.py`` what tiers rest on, ``injection.py`` the faults.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import partial
from typing import Final

from tests.prove.cells import Cell, Outcome
from tests.prove.faults.clock import CLOCK
from tests.prove.faults.table import POINTS, TIERS, senseless

ROUNDS: Final = {"memory": 12, "slab": 12, "shared_dir": 10, "s3_obj": 6, "s3_obstore": 8}
"""Of each fault in each cell, by tier: a server's answers take longer."""
ROUNDS_VARIABLE: Final = "NIXL_OFFLOAD_FAULT_ROUNDS"
"""Environment variable: another number of rounds, of all. With 1 no fault need strike."""
SLOW_POINTS: Final = frozenset({"start", "shutdown", "sleep", "verify", "gc"})
"""A round of these opens tiers, or reads all there is: half as many."""


def cells(seed: int) -> Iterable[Cell]:
    """Return a cell for each tier and point. Those that make no sense say why."""
    for tier in TIERS:
        for point in POINTS:
            why = senseless(tier, point)
            rounds = int(os.environ.get(ROUNDS_VARIABLE, ROUNDS[tier] // (2 if point in SLOW_POINTS else 1)))
            run = partial(_run, tier, point, seed, rounds) if why is None else partial(Outcome, note=why)
            yield Cell(f"{tier}/{point}", run, limit_s=600.0)


def _run(tier: str, point: str, seed: int, rounds: int) -> Outcome:
    """In the cell's process."""
    CLOCK.install()
    from tests.prove.faults.rounds import Cell as Tried

    return Tried(tier, point, seed, rounds).run()
