"""A tier's index (key -> location and state) and its durable copy. See the modules for threading."""

from __future__ import annotations

from nixl_offload.index.durable import DurableIndex
from nixl_offload.index.index import Index, State

__all__ = ["DurableIndex", "Index", "State"]
