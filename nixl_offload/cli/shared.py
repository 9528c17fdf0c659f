"""From a config file to the shared tier in it, for commands that look after buckets and trees.

Threading: one thread.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeGuard

from nixl_offload.config import Config, FileTier, S3Tier, Tier
from nixl_offload.errors import ConfigError, StoreError
from nixl_offload.stores.base import Store
from nixl_offload.stores.select import open_store


def shared_tier(config: Config, file: str, kind: str | None = None) -> S3Tier | FileTier:
    """Return the tier that many servers share: a bucket or a tree; the one of ``kind`` where that is given.

    Raises ConfigError when there is none, or when there are several and ``kind`` does not say which.
    """
    shared = {tier.kind: tier for tier in config.tiers if _is_shared(tier)}
    if kind is None and len(shared) > 1:
        raise ConfigError(
            f"{file}: tiers: {' and '.join(shared)} are both shared, and gc looks after one at a time; say --tier "
            f"{' or --tier '.join(shared)}"
        )
    wanted = next(iter(shared), None) if kind is None else kind
    if wanted in shared:
        return shared[wanted]
    for position, tier in enumerate(config.tiers):
        if isinstance(tier, FileTier) and kind in (None, tier.kind):
            raise ConfigError(
                f"{file}: tiers[{position}]: a slab keeps to its capacity by itself, nothing is to be collected there; "
                "gc is for kind: s3, and for kind: file with layout: tree"
            )
    if shared:
        raise ConfigError(f"--tier: {kind!r} is not among the tiers of {file}; allowed: {', '.join(shared)}")
    raise ConfigError(f"{file}: tiers: none of them is shared; gc is for kind: s3, and for layout: tree")


def _is_shared(tier: Tier) -> TypeGuard[S3Tier | FileTier]:
    return isinstance(tier, S3Tier) or (isinstance(tier, FileTier) and tier.layout == "tree")


def s3_tier(config: Config, file: str) -> S3Tier:
    """Return the tier that is a bucket. Raises ConfigError when there is none."""
    for tier in config.tiers:
        if isinstance(tier, S3Tier):
            return tier
    raise ConfigError(f"{file}: tiers: none of them has kind: s3, so there is no bucket")


def open_existing(tier: S3Tier | FileTier) -> Store:
    """Return the tier's store. Raises StoreError where it would have to be made first: nothing can be in it."""
    if isinstance(tier, FileTier) and not os.path.isdir(tier.path):
        cause = "missing" if Path(tier.path).parent.is_dir() else "unreachable"
        raise StoreError(f"{tier.path}: there is no such directory; is the filesystem mounted?", cause=cause)
    return open_store(tier)
