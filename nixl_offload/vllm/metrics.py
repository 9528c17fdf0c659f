"""What this connector counts. The scheduler's half passes changes to vLLM's exporter.

Threading: the scheduler's thread; ``DEFINITIONS`` is a constant that the process with the exporter reads as well.
Gauges are snapshots, counters are what was added since the last telling, histograms the samples since then. Counters
of trouble begin as 0: a counter that appears with its first event hides that event from ``rate()``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingMetricMetadata,
)

from nixl_offload.catalog import Counts, Settled
from nixl_offload.catalog.estimate import Decision, Part
from nixl_offload.engine import TierStatus, Work
from nixl_offload.tiers.base import SharedStatistics, SlotStatistics, Tier
from nixl_offload.tiers.breaker import BreakerState
from nixl_offload.types import Outcome
from nixl_offload.vllm.metric_names import METRICS, PREFIX, SECONDS, Metric


def _definition(metric: Metric) -> OffloadingMetricMetadata:
    if metric.kind == "histogram":
        return OffloadingHistogramMetadata(metric.meaning, metric.labels, SECONDS)
    made = OffloadingCounterMetadata if metric.kind == "counter" else OffloadingGaugeMetadata
    return made(metric.meaning, metric.labels)


DEFINITIONS: Final[Mapping[str, OffloadingMetricMetadata]] = {metric.name: _definition(metric) for metric in METRICS}
"""By name, as ``/metrics`` shows them (counters with ``_total`` behind)."""

_STATES: Final = {BreakerState.CLOSED: 0, BreakerState.HALF_OPEN: 1, BreakerState.OPEN: 2}
_TROUBLE: Final = (
    ("store", Outcome.FAILED),
    ("store", Outcome.DROPPED),
    ("load", Outcome.FAILED),
    ("load", Outcome.CORRUPT),
)

_Labels = tuple[str, ...]


class MetricsReporter:
    """Collects what happened and hands it to vLLM, changes only."""

    def __init__(self, kinds: Sequence[str]) -> None:
        """``kinds``: what the tiers are called, by position."""
        self._kinds = tuple(kinds)
        self._stats = OffloadingConnectorStats()
        """What has happened since the last telling."""
        self._told: dict[tuple[str, _Labels], float] = {}
        """By name without prefix, and labels."""
        self._began = False

    def settled(self, settled: Settled) -> None:
        """Count the chunks of a ticket."""
        counted = Counter(
            (settled.kind, settled.failed.get(key, Outcome.OK).value, self._kinds[tier])
            for key, tier in zip(settled.keys, settled.tiers, strict=True)
            if tier >= 0
        )
        for labels, chunks in counted.items():
            self.add("chunks", chunks, labels)

    def looked_up(self, asked_tokens: int, parts: Sequence[Part], loaded_tokens: int) -> None:
        """Count what a request has found: ``parts`` from the beginning on, of which ``loaded_tokens`` are loaded."""
        left = asked_tokens
        for position, kind in enumerate(self._kinds):
            hit = skipped = begin = 0
            for part in parts:
                if part.tier == position:
                    taken = max(0, min(part.tokens, loaded_tokens - begin))
                    hit += taken
                    skipped += part.tokens - taken
                begin += part.tokens
            left = max(0, left - hit - skipped)
            for result, tokens in (("hit", hit), ("skipped", skipped), ("miss", left)):
                if tokens or result != "skipped":
                    self.add("lookup_tokens", tokens, (kind, result))

    def add(self, name: str, value: float, labels: _Labels) -> None:
        """Count something."""
        self._stats.increase_counter(PREFIX + name, value, labels)

    def worked(self, work: Work) -> None:
        """Count what ranks have moved, and what failed there."""
        for act, size_bytes in work.payload_bytes.items():
            self.add("transfer_bytes", size_bytes, (act.operation, self._kinds[act.tier]))
        for act, samples in work.seconds.items():
            for seconds in samples:
                self._observe("transfer_seconds", seconds, (act.operation, self._kinds[act.tier]))
        for failure, shards in work.failures.items():
            labels = (failure.operation, failure.outcome, failure.cause, self._kinds[failure.tier])
            self.add("shard_failures", shards, labels)

    def update_ranks(self, statuses: Sequence[Sequence[TierStatus]]) -> None:
        """Take what each rank tells of its tiers, by position."""
        for position, kind in enumerate(self._kinds):
            here = [of_rank[position] for of_rank in statuses if position < len(of_rank)]
            for at, operation in enumerate(("load", "store", "write_through")):
                waiting_bytes = sum(status.waiting[at] for status in here)
                self._show("queued_bytes", waiting_bytes, (operation, kind))
            self._show("disabled_ranks", sum(bool(status.trouble) for status in here), (kind,))
            accesses = [status.access for status in here if status.access is not None]
            equipped: Counter[_Labels] = Counter((kind, access.mover, "+".join(access.paths)) for access in accesses)
            told = {labels for name, labels in self._told if name == "tier_info" and labels[0] == kind}
            for labels in told | equipped.keys():
                self._show("tier_info", equipped[labels], labels)

    def take(
        self, tiers: Sequence[Tier], counts: Counts, decisions: Mapping[tuple[int, Decision], int]
    ) -> OffloadingConnectorStats | None:
        """Return what has changed since the last call, None when nothing has."""
        statistics = [tier.statistics() for tier in tiers]
        if not self._began:
            self._began = True
            self._begin()
        self._take_chain(counts)
        for (position, decision), value in decisions.items():
            self._count("hit_decisions", value, (self._kinds[position], decision))
        for kind, of_tier, retained_bytes in zip(self._kinds, statistics, counts.retained_bytes, strict=False):
            if isinstance(of_tier, SlotStatistics):
                self._show("used_bytes", of_tier.used_bytes, (kind,))
                self._show("capacity_bytes", of_tier.capacity_bytes, (kind,))
                self._show("retired_bytes", of_tier.retired_bytes, (kind,))
                self._show("retained_bytes", retained_bytes, (kind,))
                self._count("evicted_chunks", of_tier.evictions, (kind,))
            elif of_tier is not None:
                self._take_shared(of_tier, (kind,))
        if self._stats.is_empty():
            return None
        stats, self._stats = self._stats, OffloadingConnectorStats()
        return stats

    def _begin(self) -> None:
        """Tell counters as 0 before anything has happened. ``_count`` sees to the others."""
        for position, kind in enumerate(self._kinds):
            for operation, outcome in _TROUBLE:
                self.add("chunks", 0, (operation, outcome.value, kind))
            if position:
                self.add("write_through_chunks", 0, (kind,))
        self.add("hints", 0, ("any", "bad"))

    def _take_chain(self, counts: Counts) -> None:
        for (position, ended), value in counts.write_throughs.items():
            if ended == Outcome.OK.value:
                self._count("write_through_chunks", value, (self._kinds[position],))
            else:
                self._count("write_through_failures", value, (self._kinds[position], ended))
        if len(self._kinds) > 1:
            for kind, pending in zip(self._kinds[1:], counts.pending_writes[1:], strict=True):
                self._show("pending_chunks", pending, (kind,))
            self._show("unsaved_bytes", counts.unsaved_bytes)
        for why, value in counts.prefetches_given_up.items():
            self._count("hints", value, ("prefetch", why))
        for cause in ("not_admitted", "no_room", "unanswered"):
            self._count("unstored_chunks", getattr(counts, cause), (cause,))

    def _take_shared(self, shared: SharedStatistics, label: _Labels) -> None:
        self._count("probes", shared.probes, label)
        self._count("probe_errors", shared.probe_errors, label)
        for seconds in shared.probe_seconds:
            self._observe("probe_seconds", seconds, label)
        self._count("late_lookups", shared.late, label)
        self._count("breaker_openings", shared.openings, label)
        self._show("known_chunks", shared.known, label)
        if shared.evictions is not None:
            self._count("evicted_chunks", shared.evictions, label)
        for purpose, state in shared.breakers.items():
            self._show("breaker_state", _STATES[state], (purpose, *label))

    def _observe(self, name: str, value: float, labels: _Labels) -> None:
        self._stats.observe_histogram(PREFIX + name, value, labels)

    def _count(self, name: str, total: float, labels: _Labels = ()) -> None:
        """Tell what was added since the last call; at the first one also that it is 0. A smaller total is that of tiers
        that were opened anew, and count from 0 again.
        """
        told = self._told.get((name, labels))
        if total != told:
            self._told[name, labels] = total
            self.add(name, total - told if told is not None and told <= total else total, labels)

    def _show(self, name: str, value: float, labels: _Labels = ()) -> None:
        if self._told.get((name, labels)) != value:
            self._told[name, labels] = value
            self._stats.set_gauge(PREFIX + name, value, labels)
