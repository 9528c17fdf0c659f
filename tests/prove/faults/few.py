"""Each cell of the fault matrix with one round of each fault: what ``make test`` has time for."""

from __future__ import annotations

from collections.abc import Iterable

from tests.prove import faults
from tests.prove.cells import Cell


def cells(seed: int) -> Iterable[Cell]:
    """Return the cells of ``faults.cells``."""
    return faults.cells(seed, rounds=1)
