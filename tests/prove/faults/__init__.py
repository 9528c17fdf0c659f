"""The fault matrix: every fault that a tier can meet at every point, again and again, and what must hold afterwards.

A cell is a tier at a point (``table.py``); its process tries each fault that makes sense there. ``rounds.py`` has the
rounds and what is checked after each, ``points.py`` what is done at each point, ``context.py`` what it has at hand,
``server.py`` the server, ``media.py`` what tiers rest on, ``injection.py`` the faults.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Final

from tests.prove.cells import Cell, Outcome
from tests.prove.faults.clock import CLOCK
from tests.prove.faults.table import FAULTS, POINTS, TIERS, faults_at, senseless

ROUNDS: Final = {"memory": 12, "slab": 12, "shared_dir": 10, "s3_obj": 6, "s3_obstore": 8}
"""Of each fault in each cell, by tier: a server's answers take longer."""
SLOW_POINTS: Final = frozenset({"start", "shutdown", "sleep", "verify", "gc"})
"""A round of these opens tiers, or reads all there is: half as many."""


def cells(seed: int, rounds: int | None = None) -> Iterable[Cell]:
    """Return a cell for each tier and point. Those that make no sense say why. ``rounds``: None: see ``ROUNDS``."""
    for tier in TIERS:
        for point in POINTS:
            why = senseless(tier, point)
            times = rounds or ROUNDS[tier] // (2 if point in SLOW_POINTS else 1)
            run = partial(_run, tier, point, seed, times) if why is None else partial(Outcome, note=why)
            yield Cell(f"{tier}/{point}", run, limit_s=600.0)


def matrix(results: Mapping[str, Any]) -> str:
    """Return how often each fault struck, tiers by points and faults, as Markdown. ``results``: as in results.json."""
    lines = ["| | " + " | ".join(FAULTS) + " |", "|" + "---|" * (len(FAULTS) + 1)]
    for tier in TIERS:
        for point in POINTS:
            row = results["cells"].get(f"faults/{tier}/{point}")
            if row is not None and row["counts"]:
                makes_sense = faults_at(tier, point)
                counts = [str(row["counts"].get(fault, 0)) if fault in makes_sense else "–" for fault in FAULTS]
                lines.append(f"| {tier}, {point} | " + " | ".join(counts) + " |")
    return "\n".join(lines) + "\n"


def _run(tier: str, point: str, seed: int, rounds: int) -> Outcome:
    """In the cell's process."""
    CLOCK.install()
    from tests.prove.faults.rounds import Cell as Tried

    return Tried(tier, point, seed, rounds).run()
