"""How a slab tier is opened: by the scheduler, which locks its directory, by a rank, which opens its slab there, and by
commands, which look into it.
"""

from __future__ import annotations

import os
import time

from nixl_offload.config import SlabConfig
from nixl_offload.movers.base import Mover
from nixl_offload.tiers.base import TierContext
from nixl_offload.tiers.slab.file import SlabFile, rank_file_name, warn_of_others
from nixl_offload.tiers.slab.inspect import SlabInspector
from nixl_offload.tiers.slab.link import SlabLink
from nixl_offload.tiers.slab.tier import SlabPlace, SlabTier


def open_tier(config: SlabConfig, context: TierContext) -> SlabTier:
    """Lock the directory and find what it holds. Raises TierError (locked, no permission, too little capacity)."""
    warn_of_others(config.path)
    return SlabTier.open(
        config,
        position=context.position,
        namespace=context.namespace,
        slot_classes=context.slot_classes,
        world_size=context.world_size,
        dp_index=context.dp_index,
        dp_engines=context.dp_engines,
    )


def open_link(config: SlabConfig, place: SlabPlace, rank: int, mover: Mover) -> SlabLink:
    """Open a rank's slab, which the link closes. Raises TierError."""
    slab = SlabFile(
        os.path.join(place.directory, rank_file_name(rank)),
        rank_bytes=place.rank_bytes,
        extent_bytes=place.extent_bytes,
        direct_io=config.direct_io,
        owner=place.owner,
    )
    slab.open()
    return SlabLink(slab, mover, time.monotonic)


def open_inspector(config: SlabConfig) -> SlabInspector:
    """Return what looks into the directory, which need not be there."""
    return SlabInspector(config.path, capacity_bytes=config.capacity_bytes)
