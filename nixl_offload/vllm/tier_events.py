"""vLLM's words for our tiers, and the events in which it hears what they hold.

Threading: the scheduler's thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.kv_offload.base import Locality, Medium, OffloadingEvent, OffloadKey
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from nixl_offload.catalog import Change
from nixl_offload.config import TierConfig


class TierLabel(NamedTuple):
    """How vLLM, and llm-d's indexer behind it, name a kind of tier."""

    medium: Medium
    locality: Locality
    source: CacheHitSource
    reports_removals: bool
    """Whether each removal is reported. vLLM remembers until then what a chunk was made of."""
    event_medium: str | None = None
    """What events call the medium, where vLLM has no word for it: as llm-d's router weighs it (decision 0023)."""


_MEMORY: Final = TierLabel(Medium.CPU, Locality.LOCAL, CacheHitSource.HOST, True)
_DRIVE: Final = (Medium.STORAGE, Locality.LOCAL, CacheHitSource.DISK)
_SLAB: Final = TierLabel(*_DRIVE, True)
_LOCAL_DIR: Final = TierLabel(*_DRIVE, False)
_SHARED: Final = (Medium.STORAGE, Locality.REMOTE, CacheHitSource.EXTERNAL_UNSPECIFIED, False)
_SHARED_DIR: Final = TierLabel(*_SHARED, event_medium="SHARED_STORAGE")
_BUCKET: Final = TierLabel(*_SHARED, event_medium="OBJECT_STORE")


def label_of(tier: TierConfig, *, is_local: bool) -> TierLabel:
    """Return what vLLM calls a tier. ``is_local``: no other machine reaches what it holds."""
    if tier.kind == "shared_dir":
        return _LOCAL_DIR if is_local else _SHARED_DIR
    return {"memory": _MEMORY, "slab": _SLAB, "s3": _BUCKET}[tier.kind]


def name_media(events: Iterable[KVCacheEvent]) -> Iterator[KVCacheEvent]:
    """Call the medium what ``event_medium`` says in events that vLLM has made of ours."""
    for event in events:
        if isinstance(event, BlockStored | BlockRemoved) and event.ownership is not None:
            event.medium, event.ownership = event.ownership, None
        yield event


def event_of(change: Change, label: TierLabel) -> OffloadingEvent:
    """Return vLLM's event of what became loadable in a tier, or ceased to be."""
    return OffloadingEvent(
        [OffloadKey(key) for key in change.keys],
        label.medium,
        change.removed,
        label.locality,
        ownership=label.event_medium,  # vLLM passes it on: ``name_media``
        removal_expected=label.reports_removals,
    )
