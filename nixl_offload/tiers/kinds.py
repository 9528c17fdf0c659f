"""The kinds of tiers, by what the config calls them: how the scheduler opens each, how a rank opens its link to it, and
how commands look into it.

A new kind is a folder, a model in ``config.schema``, and a row here (the rest: CONTRIBUTING.md).

Threading: called at start, by the scheduler, by each rank, and by commands; none of it needs torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

from nixl_offload.config import DirectoryConfig, StoredConfig, TierConfig
from nixl_offload.errors import TierError
from nixl_offload.movers.base import Mover
from nixl_offload.tiers.base import Link, TierContext
from nixl_offload.tiers.inspect import Inspector
from nixl_offload.tiers.memory.tier import MemoryPlace, MemoryTier
from nixl_offload.tiers.s3 import kind as s3
from nixl_offload.tiers.shared.tier import SharedPlace, SharedTier
from nixl_offload.tiers.shared_dir import kind as shared_dir
from nixl_offload.tiers.slab.inspect import SlabInspector
from nixl_offload.tiers.slab.link import open_link as open_slab_link
from nixl_offload.tiers.slab.tier import SlabPlace, SlabTier

AnyTier = MemoryTier | SlabTier | SharedTier
AnyPlace = MemoryPlace | SlabPlace | SharedPlace


class TierKind(NamedTuple):
    """How one kind is opened. Each function takes its own kind's config and place."""

    open_tier: Callable[[Any, TierContext], AnyTier]
    open_link: Callable[[Any, Any, int, Mover], Link] | None
    """None: ranks reach it without a link."""
    open_inspector: Callable[[Any], Inspector] | None
    """None: it cannot be looked into from outside the server."""


KINDS: Final = {
    "memory": TierKind(MemoryTier.open, None, None),
    "slab": TierKind(SlabTier.open, open_slab_link, SlabInspector),
    "shared_dir": TierKind(shared_dir.open_tier, shared_dir.open_link, shared_dir.open_inspector),
    "s3": TierKind(s3.open_tier, s3.open_link, s3.open_inspector),
}


def open_tier(config: TierConfig, context: TierContext) -> AnyTier:
    """Open the scheduler's half of a tier. The caller closes it.

    Raises TierError or ConfigError, for the operator, when it cannot be used. A shared tier that does not answer is no
    error: it is used once it does.
    """
    return KINDS[config.kind].open_tier(config, context)


def require_apart(config: TierConfig | DirectoryConfig, nearer: Iterable[TierConfig | DirectoryConfig]) -> None:
    """Raise TierError where the directory of a tier is that of a nearer one, or one lies in the other, by symbolic
    links: the config's text does not tell. A slab counts all that lies under its directory as its own.

    Takes as long as both directories' storage takes to answer.
    """
    if not isinstance(config, DirectoryConfig):
        return
    for other in nearer:
        if isinstance(other, DirectoryConfig):
            paths = [os.path.realpath(path) for path in (config.path, other.path)]
            if os.path.commonpath(paths) in paths:
                raise TierError(
                    f"{config.path} and the directory of another tier, {other.path}, are {paths[0]} and {paths[1]}: "
                    "the same, or one in the other; allowed: directories side by side",
                    cause="locked",
                )


def open_link(config: TierConfig, place: AnyPlace, rank: int, mover: Mover) -> Link:
    """Open what ``rank`` reaches a stored tier by. ``mover`` stays the caller's. Raises TierError."""
    opened = KINDS[config.kind].open_link
    assert opened is not None, "memory has no link"
    return opened(config, place, rank, mover)


def open_inspector(config: StoredConfig) -> Inspector:
    """Return what looks into the tier from outside any server; the caller closes it. Makes no directory.

    Raises StoreError, NotSupportedError.
    """
    opened = KINDS[config.kind].open_inspector
    assert opened is not None, "memory has no inspector"
    return opened(config)
