"""How a slab tier is opened: by the scheduler, which locks its directory, by a rank, which opens its slab there, and by
commands, which look into it.
"""

from __future__ import annotations

import contextlib
import os
import time

from nixl_offload.config import SlabConfig
from nixl_offload.movers.base import Mover
from nixl_offload.tiers.base import TierContext
from nixl_offload.tiers.free_space import kept_free
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
        replicas=context.replicas,
    )


def open_link(config: SlabConfig, place: SlabPlace, rank: int, mover: Mover) -> SlabLink:
    """Open a rank's slab, and those of the ranks that have copies for it; the link closes them. Raises TierError."""
    with contextlib.ExitStack() as undo:
        slabs = []
        for each in [rank, *place.slots.neighbours(rank)]:
            slabs.append(
                SlabFile(
                    os.path.join(place.directory, rank_file_name(each)),
                    rank_bytes=place.rank_bytes,
                    extent_bytes=place.extent_bytes,
                    direct_io=config.direct_io,
                    owner=place.owner,
                    is_locked_here=place.is_locked_here(),
                    kept_free=kept_free(config),
                )
            )
            slabs[-1].open()  # whoever comes first makes it
            undo.callback(slabs[-1].close)
        undo.pop_all()
    return SlabLink(slabs[0], mover, time.monotonic, neighbours=slabs[1:])


def open_inspector(config: SlabConfig) -> SlabInspector:
    """Return what looks into the directory, which need not be there."""
    return SlabInspector(config.path, capacity_bytes=config.capacity_bytes)
