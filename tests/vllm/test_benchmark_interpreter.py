"""``benchmarks.interpreter`` and played copies run. No other test uses them."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from benchmarks import interpreter
from benchmarks.serving import played


@pytest.mark.parametrize(("medium", "mover"), [("slab", "posix"), ("memory", "copy")])
def test_it_measures_a_round(medium: str, mover: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "JOBS", (1, 8))
    monkeypatch.setattr(interpreter, "RUN_CHUNKS", 8)
    with closing(interpreter.Rank(medium, tmp_path)) as rank, closing(interpreter.Latecomer()) as other:
        assert rank.mover.startswith(mover)
        for operation in interpreter.OPERATIONS:
            by_size, (median_us, p99_us) = interpreter.measure(rank, operation, rounds=1, other=other)
            assert min(by_size) > 0
            assert p99_us >= median_us > 0


def test_a_copy_by_the_clock_takes_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(played.RATE, "2e4")
    packer = played.ClockedPacker([], [[]])
    packer.block_bytes = [10_000]
    assert not packer.scatter_many(0, [(np.arange(2), np.empty(0))], played.Copy(0)).done()
