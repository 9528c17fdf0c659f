"""Opens the scheduler's half of each tier of the config, and says how chunks travel between them.

Threading: called once, on one thread, before the first step.
"""

from __future__ import annotations

from vllm.v1.kv_offload.config import OffloadingParallelConfig

from nixl_offload.catalog import ChainOptions
from nixl_offload.config import Config, MemoryConfig, TierConfig
from nixl_offload.identity.namespace import Namespace
from nixl_offload.tiers import kinds
from nixl_offload.tiers.base import TierContext
from nixl_offload.tiers.memory.tier import rank_memory_bytes


def open_tier(
    tier: TierConfig, position: int, namespace: Namespace, parallel: OffloadingParallelConfig
) -> kinds.AnyTier:
    """Open what ``tier`` describes for the chunks of ``namespace``. Raises as ``tiers.kinds.open_tier``."""
    context = TierContext(
        position,
        namespace,
        world_size=parallel.world_size,
        dp_index=parallel.data_parallel_index,
        dp_size=parallel.data_parallel_size,
    )
    return kinds.open_tier(tier, context)


def chain_options(config: Config, parallel: OffloadingParallelConfig) -> ChainOptions:
    """Return what the config says of how chunks travel from tier to tier, in bytes per rank."""
    nearest = config.tiers[0]
    if not isinstance(nearest, MemoryConfig):
        return ChainOptions(move_backlog_bytes=config.staging_bytes)
    capacity_bytes = nearest.capacity_bytes
    unsaved_bytes = capacity_bytes // 4 if nearest.unsaved_limit_bytes is None else nearest.unsaved_limit_bytes
    return ChainOptions(
        promote=nearest.promote,
        pin_unsaved=nearest.unsaved == "pin",
        unsaved_limit_bytes=rank_memory_bytes(unsaved_bytes, parallel.world_size, parallel.data_parallel_size),
        move_backlog_bytes=config.staging_bytes,
        memory=0,
    )
