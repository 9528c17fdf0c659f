"""Opens the scheduler's half of each tier of the config.

Threading: called once, on the scheduler's thread, before the first step.
"""

from __future__ import annotations

from vllm.v1.kv_offload.config import OffloadingParallelConfig

from nixl_offload.catalog import ChainOptions
from nixl_offload.config import Config, MemoryConfig, S3Config, SlabConfig, TierConfig
from nixl_offload.identity.namespace import Namespace
from nixl_offload.stores.select import open_store
from nixl_offload.tiers.memory.tier import MemoryTier, rank_memory_bytes
from nixl_offload.tiers.shared.tier import SharedTier
from nixl_offload.tiers.slab.tier import SlabTier


def open_tier(
    tier: TierConfig,
    position: int,
    namespace: Namespace,
    parallel: OffloadingParallelConfig,
) -> MemoryTier | SlabTier | SharedTier:
    """Open what ``tier`` describes for the chunks of ``namespace``.

    Raises TierError or ConfigError, for the operator, when it cannot be used. A shared tier that
    does not answer is no error: it is used once it does.
    """
    slot_classes = sorted({namespace.slot_bytes(group.group_id) for group in namespace.fields.groups})
    if isinstance(tier, MemoryConfig):
        return MemoryTier.open(
            tier,
            position=position,
            namespace=namespace,
            slot_classes=slot_classes,
            world_size=parallel.world_size,
            dp_size=parallel.data_parallel_size,
        )
    if isinstance(tier, SlabConfig):
        return SlabTier.open(
            tier,
            position=position,
            namespace=namespace,
            slot_classes=slot_classes,
            world_size=parallel.world_size,
            dp_index=parallel.data_parallel_index,
            dp_size=parallel.data_parallel_size,
        )
    store = open_store(tier)
    try:
        return SharedTier(
            position,
            store,
            namespace,
            name=f"{'S3' if isinstance(tier, S3Config) else 'Shared directory'} tier {store.where}",
            lookup=tier.lookup,
            ttl_s=tier.ttl_s if isinstance(tier, S3Config) else None,
            warm_start=tier.warm_start,
        )
    except BaseException:
        store.close()
        raise


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
