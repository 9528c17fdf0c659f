"""How a tier in host memory is opened. Ranks need no link: their slots are host memory that they have already."""

from __future__ import annotations

from nixl_offload.config import MemoryConfig
from nixl_offload.tiers.base import TierContext
from nixl_offload.tiers.memory.tier import MemoryTier


def open_tier(config: MemoryConfig, context: TierContext) -> MemoryTier:
    """Deal the capacity out to ranks. Raises ConfigError when it is too small for the model."""
    return MemoryTier.open(
        config,
        position=context.position,
        namespace=context.namespace,
        slot_classes=context.slot_classes,
        world_size=context.world_size,
        dp_size=len(context.dp_engines),
    )
