"""The tiers in order: every decision of the scheduler's half. What to store where, what is there, who still uses it,
what goes on to a farther tier.

Threading: called by the scheduler's thread alone. No I/O, no thread, no clock: time is passed in.
"""

from __future__ import annotations

from nixl_offload.catalog.catalog import Catalog
from nixl_offload.catalog.moves import ChainOptions
from nixl_offload.catalog.tickets import (
    NOBODY,
    NOWHERE,
    Change,
    Counts,
    Kind,
    LoadTicket,
    MoveTicket,
    Settled,
    StoreTicket,
)

__all__ = [
    "NOBODY",
    "NOWHERE",
    "Catalog",
    "ChainOptions",
    "Change",
    "Counts",
    "Kind",
    "LoadTicket",
    "MoveTicket",
    "Settled",
    "StoreTicket",
]
