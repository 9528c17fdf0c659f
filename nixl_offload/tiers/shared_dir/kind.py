"""How a tier in a shared directory is opened: by the scheduler, by a rank, and by commands."""

from __future__ import annotations

import time
from pathlib import Path

from nixl_offload.config import SharedDirConfig
from nixl_offload.movers.base import Mover
from nixl_offload.stores.select import open_store
from nixl_offload.tiers.base import TierContext
from nixl_offload.tiers.inspect import require_directory
from nixl_offload.tiers.shared.inspect import SharedInspector
from nixl_offload.tiers.shared.tier import SharedPlace, SharedTier
from nixl_offload.tiers.shared_dir.link import TreeLink


def open_tier(config: SharedDirConfig, context: TierContext) -> SharedTier:
    """Open the store and begin with nothing known. Storage that does not answer is used once it does.

    Raises StoreError or NotSupportedError when there can be no store, and when a required one does not answer.
    """
    store = open_store(config)
    return SharedTier.open(
        context,
        store,
        name=f"Shared directory tier {store.where}",
        lookup=config.lookup,
        ttl_s=None,
        warm_start=config.warm_start,
        required=config.required,
    )


def open_link(config: SharedDirConfig, place: SharedPlace, rank: int, mover: Mover) -> TreeLink:
    """Return a rank's link to the directory. Touches no file yet."""
    return TreeLink(config.path, place.namespace, rank, mover, direct_io=config.direct_io, clock=time.monotonic)


def open_inspector(config: SharedDirConfig) -> SharedInspector:
    """Return what looks into the directory. Raises StoreError where there is none: it is not made."""
    require_directory(Path(config.path))
    return SharedInspector(open_store(config), kind=config.kind, capacity_bytes=config.capacity_bytes)
