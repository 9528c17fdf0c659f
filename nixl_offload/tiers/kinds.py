"""The table of tier kinds, by their names in the config: how the scheduler opens each kind, how a rank opens its link,
and how commands inspect it.

A new kind is a module beside this one, a model in ``config.schema``, and functions here (the rest: CONTRIBUTING.md).

Threading: called at start, by the scheduler, by each rank, and by commands; none of it needs torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from nixl_offload.config import S3Config, SharedDirConfig, StoredConfig, TierConfig
from nixl_offload.errors import ConfigError
from nixl_offload.identity.namespace import namespace_name
from nixl_offload.movers.base import Mover
from nixl_offload.stores.directory import TreeStore
from nixl_offload.stores.s3 import open_store
from nixl_offload.tiers.base import Link, Place, TierContext
from nixl_offload.tiers.inspect import Inspector
from nixl_offload.tiers.ownership import is_kept, is_local, kept_free, require_directory, warn_of_others
from nixl_offload.tiers.shared.eviction import Eviction
from nixl_offload.tiers.shared.inspect import SharedInspector
from nixl_offload.tiers.shared.links import ObjectLink, TreeLink
from nixl_offload.tiers.shared.tier import SharedTier
from nixl_offload.tiers.slab.file import open_link as open_slab_link
from nixl_offload.tiers.slab.inspect import SlabInspector
from nixl_offload.tiers.slab.tier import SlabTier
from nixl_offload.tiers.slot_tier import MemoryTier
from nixl_offload.units import format_size

AnyTier = MemoryTier | SlabTier | SharedTier


def _open_shared_dir(config: SharedDirConfig, context: TierContext) -> SharedTier:
    """Also raises ConfigError if engines evict there and the capacity is less than two chunks."""
    keeps, least_bytes = is_kept(config), 2 * context.chunk_bytes
    if keeps and config.capacity_bytes < least_bytes:
        raise ConfigError(
            f"capacity {format_size(config.capacity_bytes)} of {config.path} is too small for this model: chunks of "
            f"{context.chunk_bytes} bytes on all ranks together need at least {format_size(least_bytes)}"
        )
    store = TreeStore(config.path)
    warn_of_others(config.path)
    name, share = f"Shared directory tier {store.where}", kept_free(config)
    return SharedTier(
        context.position,
        store,
        context.namespace,
        name=name,
        lookup=config.lookup,
        ttl_s=None,
        eviction=Eviction(store, config.capacity_bytes, name=name, kept_free=share) if keeps else None,
        is_local=is_local(config.path),
    )


def _open_s3(config: S3Config, context: TierContext) -> SharedTier:
    store = open_store(config)
    name = f"S3 tier {store.where}"
    options: Any = {"name": name, "lookup": config.lookup, "ttl_s": config.ttl_s, "reads_at_once": config.connections}
    return SharedTier(context.position, store, context.namespace, **options)


def _link_shared_dir(config: SharedDirConfig, place: Place, rank: int, mover: Mover) -> TreeLink:
    return TreeLink(
        config.path,
        namespace_name(place.namespace),
        mover,
        direct_io=config.direct_io,
        kept_free=kept_free(config),
        clock=time.monotonic,
        is_kept=is_kept(config),
    )


def _inspect_shared_dir(config: SharedDirConfig) -> SharedInspector:
    require_directory(Path(config.path))
    return SharedInspector(TreeStore(config.path), kind=config.kind, capacity_bytes=config.capacity_bytes)


# By kind; the functions take the config, and the place, of that kind.
_TIERS: Final[dict[str, Callable[[Any, TierContext], AnyTier]]] = {
    "memory": MemoryTier.open,
    "slab": SlabTier.open,
    "shared_dir": _open_shared_dir,
    "s3": _open_s3,
}
_LINKS: Final[dict[str, Callable[[Any, Any, int, Mover], Link]]] = {
    "slab": open_slab_link,
    "shared_dir": _link_shared_dir,
    "s3": lambda config, place, rank, mover: ObjectLink(
        config.where, namespace_name(place.namespace), mover, time.monotonic
    ),
}
_INSPECTORS: Final[dict[str, Callable[[Any], Inspector]]] = {
    "slab": SlabInspector,
    "shared_dir": _inspect_shared_dir,
    "s3": lambda config: SharedInspector(open_store(config), kind="s3", capacity_bytes=config.capacity_bytes),
}


def open_tier(config: TierConfig, context: TierContext) -> AnyTier:
    """Open the scheduler's half of a tier. The caller closes it.

    Raises TierError or ConfigError, with a message for the operator, if the tier cannot be used. A shared tier that
    does not answer is not an error: it is used once it answers.
    """
    return _TIERS[config.kind](config, context)


def open_link(config: TierConfig, place: Place, rank: int, mover: Mover) -> Link:
    """Open the link of ``rank`` to a stored tier. The caller keeps ``mover``. Raises TierError."""
    return _LINKS[config.kind](config, place, rank, mover)


def open_inspector(config: StoredConfig) -> Inspector:
    """Return the tier's inspector; the caller closes it. Makes no directory.

    Raises StoreError, NotSupportedError.
    """
    return _INSPECTORS[config.kind](config)
