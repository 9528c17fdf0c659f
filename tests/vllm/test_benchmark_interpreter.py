"""``benchmarks.interpreter`` runs: it reaches far into the package, and nothing else would say that it is broken."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from nixl._api import nixlBind

from benchmarks import interpreter
from nixl_offload.engine.jobs import TierQueue
from nixl_offload.engine.packer import HostCopy
from nixl_offload.engine.paths import Stretch


@pytest.mark.parametrize(("medium", "mover"), [("slab", "posix"), ("memory", "copy")])
def test_it_measures_a_round(medium: str, mover: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "JOBS", (1, 8))
    monkeypatch.setattr(interpreter, "RUN_CHUNKS", 8)
    for owner, name in ((Stretch, "_let_go"), (TierQueue, "sleep"), (HostCopy, "gather"), (HostCopy, "scatter")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # probes replace them; undone with the test
    probes = interpreter.Probes()
    with closing(interpreter.Rank(medium, tmp_path)) as rank:
        assert rank.mover.startswith(mover)
        if medium == "slab":
            for name in interpreter.NIXL_CALLS:
                monkeypatch.setattr(nixlBind.nixlAgent, name, getattr(nixlBind.nixlAgent, name))
            probes.watch_nixl()
        for operation in interpreter.OPERATIONS:
            by_size, (p99_us, longest_us) = interpreter.measure(rank, operation, rounds=1, probes=probes)
            assert all(figure > 0 for figures in by_size.values() for figure in figures)
            assert longest_us >= p99_us > 0
