"""How a tier in a shared directory is opened, by the scheduler and by a rank."""

from __future__ import annotations

import time

from nixl_offload.config import SharedDirConfig
from nixl_offload.movers.base import Mover
from nixl_offload.stores.select import open_store
from nixl_offload.tiers.base import TierContext
from nixl_offload.tiers.shared.tier import SharedPlace, SharedTier
from nixl_offload.tiers.shared_dir.link import TreeLink


def open_tier(config: SharedDirConfig, context: TierContext) -> SharedTier:
    """Open the store and begin with nothing known. Storage that does not answer is used once it does.

    Raises StoreError or NotSupportedError when there can be no store.
    """
    store = open_store(config)
    return SharedTier.open(
        context,
        store,
        name=f"Shared directory tier {store.where}",
        lookup=config.lookup,
        ttl_s=None,
        warm_start=config.warm_start,
    )


def open_link(config: SharedDirConfig, place: SharedPlace, rank: int, mover: Mover) -> TreeLink:
    """Return a rank's link to the directory. Touches no file yet."""
    return TreeLink(config.path, place.namespace, rank, mover, direct_io=config.direct_io, clock=time.monotonic)
