"""vLLM's words for our tiers, and the events in which it hears what they hold.

Threading: the scheduler's thread.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from vllm.v1.kv_offload.base import Locality, Medium, OffloadingEvent, OffloadKey, ReqContext, TierFilter
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from nixl_offload.catalog import Change
from nixl_offload.config import TierConfig


class TierLabel(NamedTuple):
    """How vLLM, and llm-d's indexer behind it, name a kind of tier."""

    medium: Medium
    locality: Locality
    source: CacheHitSource
    reports_removals: bool
    """Whether every chunk that goes is told of. vLLM remembers until then what a chunk was made of."""


_MEMORY: Final = TierLabel(Medium.CPU, Locality.LOCAL, CacheHitSource.HOST, True)
_LOCAL: Final = TierLabel(Medium.STORAGE, Locality.LOCAL, CacheHitSource.DISK, True)
_SHARED: Final = TierLabel(Medium.STORAGE, Locality.REMOTE, CacheHitSource.EXTERNAL_UNSPECIFIED, False)
"""vLLM has no word for a bucket or a shared filesystem yet."""


def label_of(tier: TierConfig) -> TierLabel:
    """Return what vLLM calls a tier."""
    if tier.is_shared:
        return _SHARED
    return _LOCAL if tier.outlives_process else _MEMORY


@dataclass(frozen=True, slots=True)
class _Allowed:
    """The tiers that a request's ``kv_load_tiers`` lets it load from."""

    tiers: frozenset[int]


def allowed_tiers(req_context: ReqContext, labels: Iterable[TierLabel]) -> frozenset[int] | None:
    """Return the tiers that a request may load from, None for all: ``kv_load_tiers`` in its transfer params."""
    chosen = req_context.load_tier_filter
    if chosen is TierFilter.ALL:
        return None
    known = req_context.get_state(_Allowed)
    if known is None:
        tiers = (at for at, label in enumerate(labels) if chosen.allows(label.medium, label.locality))
        known = _Allowed(frozenset(tiers))
        req_context.set_state(known)
    return known.tiers


class TierEvents:
    """Collects what became loadable and what ceased to be, until vLLM asks. ``enabled``: whether it will."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._events: list[OffloadingEvent] = []
        self._removed: list[OffloadKey] = []

    def add(self, changes: Iterable[Change], labels: list[TierLabel]) -> None:
        """Take note of changes, in their order. ``labels``: of the tiers, by position."""
        for change in changes if self._enabled else ():
            medium, locality, _, reports_removals = labels[change.tier]
            keys = [OffloadKey(key) for key in change.keys]
            event = OffloadingEvent(keys, medium, change.removed, locality, removal_expected=reports_removals)
            self._events.append(event)

    def clear(self) -> None:
        """Forget what was not taken yet."""
        self._events = []

    def take(self) -> list[OffloadingEvent]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        self._removed += [key for event in events if event.removed for key in event.keys]
        return events

    def take_removed(self) -> list[OffloadKey]:
        """Return the chunks of which ``take`` has told that they went from some tier, since the last call."""
        removed, self._removed = self._removed, []
        return removed
