"""How a tier in a bucket is opened: by the scheduler, by a rank, and by commands."""

from __future__ import annotations

import time

from nixl_offload.config import S3Config
from nixl_offload.movers.base import Mover
from nixl_offload.stores.s3 import open_store
from nixl_offload.tiers.base import TierContext
from nixl_offload.tiers.s3.link import ObjectLink
from nixl_offload.tiers.shared.inspect import SharedInspector
from nixl_offload.tiers.shared.tier import SharedPlace, SharedTier


def open_tier(config: S3Config, context: TierContext) -> SharedTier:
    """Open the store and begin with nothing known. Storage that does not answer is used once it does.

    Raises StoreError or NotSupportedError when there can be no store.
    """
    store = open_store(config)
    return SharedTier.open(
        context,
        store,
        name=f"S3 tier {store.where}",
        lookup=config.lookup,
        ttl_s=config.ttl_s,
    )


def open_link(config: S3Config, place: SharedPlace, rank: int, mover: Mover) -> ObjectLink:
    """Return a rank's link to the bucket. Reaches no server yet."""
    return ObjectLink(f"s3://{config.bucket}/{config.prefix}", place.namespace, rank, mover, time.monotonic)


def open_inspector(config: S3Config) -> SharedInspector:
    """Return what looks into the bucket. Reaches no server yet. Raises NotSupportedError: no client is installed."""
    return SharedInspector(open_store(config), kind=config.kind, capacity_bytes=config.capacity_bytes)
