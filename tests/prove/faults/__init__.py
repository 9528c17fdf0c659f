"""The fault matrix: every fault that a tier can meet at every point, again and again, and what must hold afterwards.

A cell is a tier at a point; its process tries each fault that makes sense there. ``cell.py`` has the rounds and what is
checked after each, ``points.py`` what is done at each point, ``media.py`` what tiers rest on, ``injection.py`` the
faults, ``leaks.py`` what must be given back. This file has which faults a tier can meet where; it imports nothing of
the product, for a cell sets the clock before it does.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import partial
from typing import Final

from tests.prove.cells import Cell, Outcome
from tests.prove.clock import CLOCK

TIERS: Final = ("memory", "slab", "shared_dir", "s3_obj", "s3_obstore")
"""``s3_obj``: over NIXL's OBJ plugin; ``s3_obstore``: over that client."""
POINTS: Final = (
    *("lookup", "store", "load", "write-through", "promotion", "eviction"),
    *("start", "shutdown", "gc", "verify", "sleep"),
)
FAULTS: Final = (
    *("EIO", "ENOSPC", "EROFS", "short", "long", "slow", "hang", "flipped", "truncated", "swapped", "stale"),
    *("vanished", "permission", "500", "503", "403", "reset", "wrong length", "late write", "clock jump", "fork"),
    "OOM of staging",
)

_ERRNOS = frozenset({"EIO", "ENOSPC", "EROFS", "permission"})
ANSWERS: Final = frozenset({"500", "503", "403", "reset"})
RESTING: Final = frozenset({"long", "flipped", "truncated", "swapped", "stale", "vanished", "wrong length"})
"""What befalls chunks that lie in a tier."""

_SENSELESS: Final = frozenset(
    {
        *(("memory", "gc"), ("memory", "verify")),  # no command looks into a server's memory
        *(("s3_obj", "gc"), ("s3_obj", "verify")),  # commands reach any bucket over obstore
        ("slab", "gc"),  # it is for tiers that servers share
        *(("s3_obj", "eviction"), ("s3_obstore", "eviction")),  # servers evict nothing from a bucket; gc does
    }
)
ROUNDS: Final = {"memory": 12, "slab": 12, "shared_dir": 10, "s3_obj": 6, "s3_obstore": 8}
"""Of each fault in each cell, by tier: a server's answers take longer."""
ROUNDS_VARIABLE: Final = "NIXL_OFFLOAD_FAULT_ROUNDS"
"""Environment variable: another number of rounds, of all. With 1 no fault need strike."""
SLOW_POINTS: Final = frozenset({"start", "shutdown", "sleep", "verify", "gc"})
"""A round of these opens tiers, or reads all there is: half as many."""


def cells(seed: int) -> Iterable[Cell]:
    """Return a cell for each tier and point that go together."""
    for tier in TIERS:
        for point in POINTS:
            if faults_at(tier, point):
                rounds = int(os.environ.get(ROUNDS_VARIABLE, ROUNDS[tier] // (2 if point in SLOW_POINTS else 1)))
                yield Cell(f"{tier}/{point}", partial(_run, tier, point, seed, rounds), limit_s=600.0)


def _run(tier: str, point: str, seed: int, rounds: int) -> Outcome:
    """In the cell's process."""
    CLOCK.install()
    from tests.prove.faults.cell import FaultCell

    return FaultCell(tier, point, seed, rounds).run()


def makes_sense(tier: str, point: str, fault: str) -> bool:
    """Whether a tier can meet ``fault`` at a point."""
    if (tier, point) in _SENSELESS:
        return False
    if tier == "memory":
        if fault in _ERRNOS | ANSWERS | {"short", "slow", "long", "truncated", "vanished", "wrong length"}:
            return False  # copies within memory meet no storage; a slot has one length
        if fault in RESTING:
            return point not in {"start", "shutdown"}  # memory is empty at a start, and gone at the end
        if fault in {"hang", "late write"}:  # of a farther tier's transfer
            return point in {"write-through", "promotion", "shutdown", "sleep"}
        return fault != "OOM of staging" or point in {"start", "sleep"}
    is_bucket, is_command = tier.startswith("s3"), point in {"gc", "verify"}
    absurd = {
        "OOM of staging": is_command or point in {"lookup", "write-through", "promotion"},  # none is needed
        "EROFS": is_bucket or point in {"lookup", "load", "promotion", "verify"},  # or nothing is written
        "permission": is_bucket or (tier == "slab" and point in {"lookup", "load", "promotion"}),  # its file is open
        "ENOSPC": is_command or point in {"lookup", "load", "promotion"},  # nothing is written
        "EIO": (point == "lookup" and tier != "shared_dir") or (is_bucket and is_command),  # a server answers 500
        "short": point in {"lookup", "start"} or (is_command and not is_bucket),  # nothing is transferred
        "late write": point in {"lookup", "start"} or is_command,
        "wrong length": tier == "slab",  # slots have the length of their class
        "hang": tier == "slab" and point == "lookup",  # the index knows
        "slow": tier == "slab" and point == "lookup",
        **dict.fromkeys(ANSWERS, not is_bucket),
    }
    return not absurd.get(fault, False)


def faults_at(tier: str, point: str) -> tuple[str, ...]:
    """Return the faults that make sense there."""
    return tuple(fault for fault in FAULTS if makes_sense(tier, point, fault))
