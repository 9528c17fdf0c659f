"""A few cells of the fault matrix, with one round of each fault; and what the matrix says of itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.prove import faults
from tests.prove.faults.table import FAULTS, POINTS, TIERS, faults_at, why_not
from tests.prove.running import cells_of, run

FEW = "tests.prove.faults.few"


def test_every_fault_at_every_point_is_tried_or_has_a_reason() -> None:
    for tier in TIERS:
        for point in POINTS:
            tried = faults_at(tier, point)
            reasons = {fault: why_not(tier, point, fault) for fault in FAULTS if fault not in tried}
            assert all(reasons.values())
    # What nearly everything else relies on, so that a reason too many is noticed.
    for tier in ("slab", "shared_dir", "s3_obj", "s3_obstore"):
        for point in ("store", "load", "write-through", "promotion", "shutdown", "sleep"):
            assert {"short", "hang", "flipped", "swapped", "stale", "vanished", "late write", "fork"} <= set(
                faults_at(tier, point)
            )
    assert len({cell.name for cell in faults.cells(1)}) == len(TIERS) * len(POINTS)


@pytest.mark.parametrize("names", [("slab/store", "s3_obstore/load"), ("shared_dir/load", "memory/promotion")])
def test_a_few_cells(tmp_path: Path, names: tuple[str, ...]) -> None:
    wanted = [("faults", FEW, cell) for cell in cells_of(FEW, 1) if cell.name in names]
    results = {}
    for part, cell, outcome, _ in run(wanted, 1, workers=2, logs=tmp_path):
        assert outcome.is_good(), (cell.name, outcome)
        assert outcome.counts["faults"] >= 3, outcome
        results[f"{part}/{cell.name}"] = {"counts": outcome.counts}
    assert len(results) == len(names)
    lines = faults.matrix({"cells": results}).splitlines()
    assert len(lines) == 2 + len(names)
    assert all(line.count("|") == len(FAULTS) + 2 for line in lines)
