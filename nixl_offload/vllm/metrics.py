"""What this connector counts, told to vLLM's exporter by the scheduler's half when something has changed.

Threading: the scheduler's thread; ``DEFINITIONS`` is a constant that the process with the exporter reads as well.
Gauges are snapshots, counters are what was added since the last telling, histograms the samples since then. Counters
of trouble are told as 0 at first: a counter that appears with its first event hides that event from ``rate()``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
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
from nixl_offload.vllm import metric_names as names
from nixl_offload.vllm.metric_names import Metric


def _definition(metric: Metric) -> OffloadingMetricMetadata:
    if metric.kind == "counter":
        return OffloadingCounterMetadata(metric.meaning, metric.labels)
    if metric.kind == "gauge":
        return OffloadingGaugeMetadata(metric.meaning, metric.labels)
    return OffloadingHistogramMetadata(metric.meaning, metric.labels, metric.buckets)


DEFINITIONS: Final[Mapping[str, OffloadingMetricMetadata]] = {
    metric.name: _definition(metric) for metric in names.METRICS
}
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
        self._began = False
        self._statuses: dict[int, tuple[TierStatus, ...]] = {}
        """By rank."""

    def restart(self) -> None:
        """The tiers are opened anew, and count from 0 again. The exporter shows gauges until it is told otherwise."""
        gauges = {metric.name for metric in names.METRICS if metric.kind == "gauge"}
        self._told = {told: value for told, value in self._told.items() if told[0] in gauges}
        self._statuses.clear()

    def settled(self, settled: Settled) -> None:
        """Count the chunks of a ticket."""
        counted = Counter(
            (settled.kind, settled.failed.get(key, Outcome.OK).value, self._kinds[tier])
            for key, tier in zip(settled.keys, settled.tiers, strict=True)
            if tier >= 0
        )
        for labels, chunks in counted.items():
            self._stats.increase_counter(names.CHUNKS.name, chunks, labels)

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
                    self._stats.increase_counter(names.LOOKUPS.name, tokens, (kind, result))

    def hint(self, hint: str, result: str) -> None:
        """Count a hint that came with a request."""
        self._stats.increase_counter(names.HINTS.name, 1, (hint, result))

    def block_was_reused(self) -> None:
        """Count a chunk that is not stored because vLLM gave one of its blocks away."""
        self._stats.increase_counter(names.NOT_STORED.name, 1, ("block_reused",))

    def worked(self, work: Work) -> None:
        """Count what ranks have moved, and what failed there."""
        for act, size_bytes in work.payload_bytes.items():
            self._stats.increase_counter(names.PAYLOAD.name, size_bytes, (act.operation, self._kinds[act.tier]))
        for act, samples in work.seconds.items():
            for seconds in samples:
                self._stats.observe_histogram(names.DURATION.name, seconds, (act.operation, self._kinds[act.tier]))
        for failure, shards in work.failures.items():
            labels = (failure.operation, failure.outcome, failure.cause, self._kinds[failure.tier])
            self._stats.increase_counter(names.FAILURES.name, shards, labels)

    def update_ranks(self, statuses: Mapping[int, tuple[TierStatus, ...]]) -> None:
        """Take what ranks tell of their tiers, by rank and position; of other ranks nothing has changed."""
        self._statuses.update(statuses)
        for position, kind in enumerate(self._kinds):
            here = [of_rank[position] for of_rank in self._statuses.values() if position < len(of_rank)]
            for at, operation in enumerate(("load", "store", "write_through")):
                waiting_bytes = sum(status.waiting[at] for status in here)
                self._show(names.QUEUED, waiting_bytes, (operation, kind))
            self._show(names.DISABLED, sum(bool(status.trouble) for status in here), (kind,))
            equipped = Counter(
                (kind, status.access.mover, "+".join(status.access.paths))
                for status in here
                if status.access is not None
            )
            gone = [at for name, at in self._told if name == names.INFO.name and at[0] == kind and at not in equipped]
            for labels in gone:
                self._show(names.INFO, 0, labels)
            for labels, ranks in equipped.items():
                self._show(names.INFO, ranks, labels)

    def take(
        self, tiers: Sequence[Tier], counts: Counts, decisions: Mapping[tuple[int, Decision], int]
    ) -> OffloadingConnectorStats | None:
        """Return what has changed since the last call, None when nothing has."""
        statistics = [tier.statistics() for tier in tiers]
        if not self._began:
            self._began = True
            for metric, labels in self._first():
                self._stats.increase_counter(metric.name, 0, labels)
        self._take_chain(counts)
        for (position, decision), value in decisions.items():
            self._count(names.DECISIONS, value, (self._kinds[position], decision.value))
        for kind, of_tier, retained_bytes in zip(self._kinds, statistics, counts.retained_bytes, strict=False):
            if of_tier.slots is not None:
                self._take_slots(of_tier.slots, (kind,))
                self._show(names.RETAINED, retained_bytes, (kind,))
            if of_tier.shared is not None:
                self._take_shared(of_tier.shared, (kind,))
        if self._stats.is_empty():
            return None
        stats, self._stats = self._stats, OffloadingConnectorStats()
        return stats

    def _first(self) -> Iterator[tuple[Metric, _Labels]]:
        """Return the counters that are told as 0 before anything has happened. ``_count`` sees to the others."""
        for position, kind in enumerate(self._kinds):
            for operation, outcome in _TROUBLE:
                yield names.CHUNKS, (operation, outcome.value, kind)
            if position:
                yield names.WRITTEN_THROUGH, (kind,)
        yield names.HINTS, ("any", "bad")

    def _take_chain(self, counts: Counts) -> None:
        for (position, ended), value in counts.write_throughs.items():
            if ended == Outcome.OK.value:
                self._count(names.WRITTEN_THROUGH, value, (self._kinds[position],))
            else:
                self._count(names.NOT_WRITTEN_THROUGH, value, (self._kinds[position], ended))
        if len(self._kinds) > 1:
            for kind, pending in zip(self._kinds[1:], counts.pending_writes[1:], strict=True):
                self._show(names.PENDING, pending, (kind,))
            self._show(names.UNSAVED, counts.unsaved_bytes)
        for why, value in counts.prefetches_given_up.items():
            self._count(names.HINTS, value, ("prefetch", why))
        self._count(names.NOT_STORED, counts.not_admitted, ("not_admitted",))
        self._count(names.NOT_STORED, counts.no_room, ("no_room",))
        self._count(names.NOT_STORED, counts.unanswered, ("unanswered",))

    def _take_slots(self, slots: SlotStatistics, label: _Labels) -> None:
        self._show(names.USED, slots.used_bytes, label)
        self._show(names.CAPACITY, slots.capacity_bytes, label)
        self._show(names.RETIRED, slots.retired_bytes, label)
        self._count(names.EVICTED, slots.evictions, label)

    def _take_shared(self, shared: SharedStatistics, label: _Labels) -> None:
        self._count(names.PROBES, shared.probes, label)
        self._count(names.PROBE_ERRORS, shared.probe_errors, label)
        for seconds in shared.probe_seconds:
            self._stats.observe_histogram(names.PROBE_SECONDS.name, seconds, label)
        self._count(names.LATE, shared.late, label)
        self._count(names.OPENINGS, shared.openings, label)
        self._show(names.KNOWN, shared.known, label)
        if shared.evictions is not None:
            self._count(names.EVICTED, shared.evictions, label)
        for purpose, state in shared.breakers.items():
            self._show(names.BREAKER, _STATES[state], (purpose, *label))

    def _count(self, metric: Metric, total: float, labels: _Labels = ()) -> None:
        """Tell what was added since the last call; at the first one also that it is 0."""
        told = self._told.get((metric.name, labels))
        added = total - (told or 0)
        if added > 0 or told is None:
            self._told[metric.name, labels] = total
            self._stats.increase_counter(metric.name, added, labels)

    def _show(self, metric: Metric, value: float, labels: _Labels = ()) -> None:
        if self._told.get((metric.name, labels)) != value:
            self._told[metric.name, labels] = value
            self._stats.set_gauge(metric.name, value, labels)
