"""Proves the promises at length: ``make prove``. A test for each cell of each part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import pytest

from tests.prove.cells import Cell, cells_of, tried

PARTS: Final = ("soak", "yardstick", "faults", "kills", "power", "scheduler", "fuzz")
"""Modules with ``cells(seed: int) -> Iterable[Cell]``. Those with the longest cells come first, so that no core has to
wait for another at the end.
"""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Find the cells for ``--seed``."""
    found = [(part, cell) for part in PARTS for cell in cells_of(f"tests.prove.{part}", metafunc.config.option.seed)]
    metafunc.parametrize(("part", "cell"), found, ids=[f"{part}/{cell.name}" for part, cell in found])


@pytest.mark.timeout(0)
def test_cell(
    part: str, cell: Cell, pytestconfig: pytest.Config, record_property: Callable[[str, object], None]
) -> None:
    outcome = tried(f"tests.prove.{part}", cell, pytestconfig.option.seed)
    record_property("counts", outcome.counts)
    record_property("note", outcome.note)
    assert not outcome.findings, "\n".join(outcome.findings)
    if not outcome.counts:
        pytest.skip(outcome.note)
