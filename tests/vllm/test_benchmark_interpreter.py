"""``benchmarks.interpreter`` runs. It reaches far into the package, and no other test uses it."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from benchmarks import interpreter


@pytest.mark.parametrize(("medium", "mover"), [("slab", "posix"), ("memory", "copy")])
def test_it_measures_a_round(medium: str, mover: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "JOBS", (1, 8))
    monkeypatch.setattr(interpreter, "RUN_CHUNKS", 8)
    with closing(interpreter.Rank(medium, tmp_path)) as rank, interpreter.Probes() as probes:
        assert rank.mover.startswith(mover)
        for operation in interpreter.OPERATIONS:
            by_size, (p99_us, longest_us) = interpreter.measure(rank, operation, rounds=1, probes=probes)
            assert all(figure > 0 for figures in by_size.values() for figure in figures)
            assert longest_us >= p99_us > 0
