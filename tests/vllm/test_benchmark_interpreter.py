"""``benchmarks.interpreter`` runs: it reaches far into the package, and nothing else would say that it is broken."""

from __future__ import annotations

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
    with interpreter.open_rank(medium, tmp_path) as rank:
        assert rank.mover.startswith(mover)
        if medium == "slab":
            for name in interpreter.NIXL_CALLS:
                monkeypatch.setattr(nixlBind.nixlAgent, name, getattr(nixlBind.nixlAgent, name))
            probes.watch_nixl()
        found = {
            operation: interpreter.measure(rank, operation, rounds=1, probes=probes)
            for operation in interpreter.OPERATIONS
        }
    for result in found.values():
        assert all(cpu["caller"] > 0 and cpu["others"] > 0 for cpu in result["cpu_us"].values())
        assert all(cpu["interpreter"] > 0 and cpu["without"] > 0 for cpu in result["cpu_us"].values())
        assert result["stretch_longest_us"] >= result["stretch_p99_us"] > 0
