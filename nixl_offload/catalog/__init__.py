"""All decisions of the scheduler's half over the tiers in order: what to store where, what is there, who still uses it,
and what moves to a farther tier.
"""

from __future__ import annotations

from nixl_offload.catalog.catalog import (
    NOBODY,
    NOWHERE,
    Catalog,
    Change,
    Kind,
    LoadTicket,
    MoveTicket,
    Settled,
    StoreTicket,
)
from nixl_offload.catalog.moves import ChainOptions

__all__ = [
    "NOBODY",
    "NOWHERE",
    "Catalog",
    "ChainOptions",
    "Change",
    "Kind",
    "LoadTicket",
    "MoveTicket",
    "Settled",
    "StoreTicket",
]
