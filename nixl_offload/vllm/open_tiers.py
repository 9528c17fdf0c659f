"""Opens the scheduler's half of each tier of the config, and says how chunks travel between them.

Threading: pure but for ``open_tier``, which reaches storage and is called by a thread of each tier's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nixl_offload.catalog import ChainOptions
from nixl_offload.config import Config, TierConfig
from nixl_offload.identity.namespace import Namespace
from nixl_offload.tiers import kinds
from nixl_offload.tiers.base import TierContext
from nixl_offload.tiers.memory.tier import rank_memory_bytes
from nixl_offload.vllm.data_parallel import sharing_engines

if TYPE_CHECKING:
    from vllm.config import ParallelConfig


def open_tier(
    tier: TierConfig,
    position: int,
    namespace: Namespace,
    parallel: ParallelConfig,
    nearer: Sequence[TierConfig] = (),
) -> kinds.AnyTier:
    """Open what ``tier`` describes for the chunks of ``namespace``. May take as long as storage hangs.

    Raises as ``tiers.kinds.open_tier``, and as ``require_apart`` for the tiers that are ``nearer``.
    """
    kinds.require_apart(tier, nearer)
    context = TierContext(
        position,
        namespace,
        world_size=parallel.world_size,
        dp_index=parallel.data_parallel_index,
        dp_engines=sharing_engines(parallel),
    )
    return kinds.open_tier(tier, context)


def chain_options(config: Config, parallel: ParallelConfig) -> ChainOptions:
    """Return what the config says of how chunks travel from tier to tier, in bytes per rank."""
    memory = config.memory
    if memory is None:
        return ChainOptions(write_through_backlog_bytes=config.staging_bytes)
    unsaved_bytes = memory.capacity_bytes // 4 if memory.unsaved_limit_bytes is None else memory.unsaved_limit_bytes
    return ChainOptions(
        promote=memory.promote,
        pin_unsaved=memory.unsaved == "pin",
        unsaved_limit_bytes=rank_memory_bytes(unsaved_bytes, parallel.world_size, len(sharing_engines(parallel))),
        write_through_backlog_bytes=config.staging_bytes,
        memory=0,
    )
