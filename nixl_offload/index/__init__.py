"""A tier's index (key -> location and state) and its journal. See the modules for threading."""

from __future__ import annotations

from nixl_offload.index.index import Index, State
from nixl_offload.index.journal import DurableIndex

__all__ = ["DurableIndex", "Index", "State"]
