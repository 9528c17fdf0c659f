"""How a tier in a shared directory is opened: by the scheduler, by a rank, and by commands.

Where the machine alone has the directory, one of its engines keeps it to its capacity; elsewhere ``nixl-offload gc``
does.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

from nixl_offload.config import SharedDirConfig
from nixl_offload.errors import ConfigError
from nixl_offload.hardware.mounts import LOCAL, find_mount
from nixl_offload.movers.base import Mover
from nixl_offload.stores.directory import TreeStore
from nixl_offload.tiers.base import TierContext
from nixl_offload.tiers.free_space import kept_free
from nixl_offload.tiers.inspect import require_directory
from nixl_offload.tiers.shared.eviction import Eviction
from nixl_offload.tiers.shared.inspect import SharedInspector
from nixl_offload.tiers.shared.tier import SharedPlace, SharedTier
from nixl_offload.tiers.shared_dir.link import TreeLink
from nixl_offload.tiers.slab.file import warn_of_others
from nixl_offload.units import format_size


def open_tier(config: SharedDirConfig, context: TierContext) -> SharedTier:
    """Open the store and begin with nothing known. Storage that does not answer is used once it does.

    Raises StoreError or NotSupportedError when there can be no store, and ConfigError when what engines would keep
    there is less than two chunks.
    """
    keeps, least_bytes = is_kept(config), 2 * context.chunk_bytes
    if keeps and config.capacity_bytes < least_bytes:
        raise ConfigError(
            f"capacity {format_size(config.capacity_bytes)} of {config.path} is too small for this model: chunks of "
            f"{context.chunk_bytes} bytes on all ranks together need at least {format_size(least_bytes)}"
        )
    store = TreeStore(config.path)
    warn_of_others(config.path)
    name, share = f"Shared directory tier {store.where}", kept_free(config)
    return SharedTier.open(
        context,
        store,
        name=name,
        lookup=config.lookup,
        ttl_s=None,
        eviction=partial(Eviction, store, config.capacity_bytes, name=name, kept_free=share) if keeps else None,
        is_local=is_local(config),
    )


def is_kept(config: SharedDirConfig, root: str = "/") -> bool:
    """Whether engines keep the directory to its capacity: as the config says, or because no other machine has it.

    ``root`` stands for ``/`` in tests.
    """
    return is_local(config, root) if config.evict is None else config.evict


def is_local(config: SharedDirConfig, root: str = "/") -> bool:
    """Whether no other machine has the directory, by its filesystem. Takes as long as its storage takes to answer."""
    mount = find_mount(config.path, root)
    return mount is not None and mount.kind in LOCAL


def open_link(config: SharedDirConfig, place: SharedPlace, rank: int, mover: Mover) -> TreeLink:
    """Return a rank's link to the directory. Touches no file yet."""
    return TreeLink(
        config.path,
        place.namespace,
        rank,
        mover,
        direct_io=config.direct_io,
        kept_free=kept_free(config),
        clock=time.monotonic,
        is_kept=is_kept(config),
    )


def open_inspector(config: SharedDirConfig) -> SharedInspector:
    """Return what looks into the directory. Raises StoreError where there is none: it is not made."""
    require_directory(Path(config.path))
    return SharedInspector(TreeStore(config.path), kind=config.kind, capacity_bytes=config.capacity_bytes)
