"""The tiers in order: every decision of the scheduler's half. What to store where, what is there, who still uses it,
what goes on to a farther tier.

Threading: called by the scheduler's thread alone. No I/O, no thread, no clock: time is passed in.
"""

from __future__ import annotations

from nixl_offload.catalog.catalog import Catalog
from nixl_offload.catalog.changes import Change
from nixl_offload.catalog.counts import Counts
from nixl_offload.catalog.tickets import NOBODY, NOWHERE, Kind, LoadTicket, MoveTicket, Settled, StoreTicket
from nixl_offload.catalog.write_through import ChainOptions
from nixl_offload.tiers.base import Tier

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
    "Tier",
]
