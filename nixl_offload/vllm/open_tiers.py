"""Opens the scheduler's half of each tier of the config.

Threading: called once, on the scheduler's thread, before the first step.
"""

from __future__ import annotations

from collections.abc import Mapping

from vllm.v1.kv_offload.config import OffloadingParallelConfig

from nixl_offload.config import FileTier as FileTierSettings
from nixl_offload.config import MemoryTier, S3Tier
from nixl_offload.errors import NotSupportedError
from nixl_offload.namespace import Namespace
from nixl_offload.stores.select import open_store
from nixl_offload.tiers.file import FileTier
from nixl_offload.tiers.shared import SharedTier
from nixl_offload.types import key_group


def open_tier(
    tier: MemoryTier | FileTierSettings | S3Tier,
    position: int,
    namespace: Namespace,
    slot_bytes: Mapping[int, int],
    parallel: OffloadingParallelConfig,
) -> FileTier | SharedTier:
    """Open what ``tier`` describes. ``slot_bytes``: what a chunk needs on each rank, by KV cache group.

    Raises TierError, ConfigError or NotSupportedError, for the operator, when it cannot be used. A shared tier that
    does not answer is no error: it is used once it does.
    """
    if isinstance(tier, MemoryTier):
        raise NotSupportedError("kind: memory is not built yet; use file or s3")
    if isinstance(tier, FileTierSettings) and tier.layout == "slab":
        return FileTier.open(
            tier,
            position=position,
            namespace=namespace,
            slot_classes=sorted(set(slot_bytes.values())),
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
            name=f"{'S3' if isinstance(tier, S3Tier) else 'Shared file'} tier {store.where}",
            lookup=tier.lookup,
            ttl_s=tier.ttl_s if isinstance(tier, S3Tier) else None,
            world_size=parallel.world_size,
            slot_bytes=lambda key: slot_bytes[key_group(key)],
            warm_start=tier.warm_start,
        )
    except BaseException:
        store.close()
        raise
