"""How a tier in host memory is opened. Ranks need no link: their slots are host memory that they have already."""

from __future__ import annotations

import logging

from nixl_offload.config import MemoryConfig
from nixl_offload.tiers.base import TierContext
from nixl_offload.tiers.memory.tier import MemoryTier

logger = logging.getLogger(__name__)


def open_tier(config: MemoryConfig, context: TierContext) -> MemoryTier:
    """Deal the capacity out to ranks. Raises ConfigError when it is too small for the model."""
    if context.dp_index == 1 and context.dp_size == 1:
        logger.warning(
            "Memory tier: vLLM runs the data-parallel engines of a dense model as if each were alone, so each takes"
            " the whole capacity; if that is not meant, divide it by their number"
        )
    return MemoryTier.open(
        config,
        position=context.position,
        namespace=context.namespace,
        slot_classes=context.slot_classes,
        world_size=context.world_size,
        dp_size=context.dp_size,
    )
