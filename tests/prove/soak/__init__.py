"""The soak: one engine for half an hour under a mixed load, with faults that come and go; what it takes stays flat."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import partial

from tests.prove.cells import Cell

MINUTES = float(os.environ.get("NIXL_OFFLOAD_SOAK_MINUTES", "30"))
"""How long; two are enough to develop it, five to see most faults. Beginning and end take two minutes more."""


def cells(seed: int) -> Iterable[Cell]:
    """One."""
    from tests.prove.soak.run import soak

    yield Cell(f"{MINUTES:g} minutes", partial(soak, seed, MINUTES * 60), limit_s=MINUTES * 60 + 600)
