"""Lets tests try some of a part's cells, each in a process of its own as ``make prove`` does."""

from __future__ import annotations

from pathlib import Path

from tests.prove.cells import Cell, Outcome
from tests.prove.running import run


def try_cells(
    part: str, module: str, cells: list[Cell], seed: int, logs: Path, *, workers: int = 2
) -> dict[str, Outcome]:
    """Return what came out of each."""
    wanted = [(part, module, cell) for cell in cells]
    return {cell.name: outcome for _, cell, outcome, _ in run(wanted, seed, workers=workers, logs=logs)}
