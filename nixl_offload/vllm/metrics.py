"""The connector's metrics. The scheduler's half passes changes to vLLM's exporter.

Threading: the scheduler's thread; ``DEFINITIONS`` is a constant that the process with the exporter reads as well.
Gauges are snapshots; counters and histograms have what was added since the last report. Counters of trouble begin as 0:
a counter that appears with its first event hides that event from ``rate()``.
Failure: errors in metrics do not raise. The first one is logged.
"""

from __future__ import annotations

import functools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar, cast

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingMetricMetadata,
)

from nixl_offload.catalog.catalog import Catalog, Settled
from nixl_offload.engine import TierStatus, Work
from nixl_offload.tiers.base import SlotStatistics
from nixl_offload.tiers.breaker import BreakerState
from nixl_offload.types import Outcome
from nixl_offload.vllm.load_decision import Counts, Part
from nixl_offload.vllm.metric_names import METRICS, PREFIX, SECONDS, Metric

logger = logging.getLogger(__name__)

STATS_EVERY_S = 0.25
"""How often metrics are looked at while no chunk is looked up, stored, loaded or moved."""


def _definition(metric: Metric) -> OffloadingMetricMetadata:
    if metric.kind == "histogram":
        return OffloadingHistogramMetadata(metric.meaning, metric.labels, SECONDS)
    made = OffloadingCounterMetadata if metric.kind == "counter" else OffloadingGaugeMetadata
    return made(metric.meaning, metric.labels)


DEFINITIONS: Final[Mapping[str, OffloadingMetricMetadata]] = {metric.name: _definition(metric) for metric in METRICS}
"""By name, as ``/metrics`` shows them (which appends ``_total`` to counters)."""

_STATES: Final = {BreakerState.CLOSED: 0, BreakerState.HALF_OPEN: 1, BreakerState.OPEN: 2}
_TROUBLE: Final = (
    ("store", Outcome.FAILED),
    ("store", Outcome.DROPPED),
    ("load", Outcome.FAILED),
    ("load", Outcome.CORRUPT),
)

_Labelled = tuple[str, ...]
"""The name of a metric without prefix, then its labels."""
_Method = TypeVar("_Method", bound=Callable[..., Any])


def _harmless(method: _Method) -> _Method:
    """Log the first error of these methods, and return None instead."""

    @functools.wraps(method)
    def called(self: MetricsReporter, *arguments: Any) -> Any:
        try:
            return method(self, *arguments)
        except Exception:
            if not self.has_failed:
                logger.exception("Metrics are incomplete from now on; do all ranks run the same config and version?")
            self.has_failed = True
            return None

    return cast("_Method", called)


class MetricsReporter:
    """Collects metrics and passes their changes to vLLM."""

    def __init__(self, kinds: Sequence[str]) -> None:
        """``kinds``: the tiers' names in labels, by position."""
        self.has_failed = False
        """An error was logged."""
        self._kinds = tuple(kinds)
        self._stats = OffloadingConnectorStats()
        """Changes since the last report."""
        self._reported: dict[_Labelled, float] = {}
        self._began = False
        self._look_s = 0.0

    def look_soon(self) -> None:
        """Something has changed: let the next ``take`` look."""
        self._look_s = 0.0

    def add(self, name: str, value: float, *labels: str) -> None:
        """Count something."""
        self.look_soon()
        self._stats.increase_counter(PREFIX + name, value, labels)

    @_harmless
    def settled(self, settled: Settled) -> None:
        """Count the chunks of a ticket."""
        counted = Counter(zip(settled.tiers, map(settled.failed.get, settled.keys), strict=True))
        for (tier, outcome), chunks in counted.items():
            if tier >= 0:
                self.add("chunks", chunks, settled.kind, (outcome or Outcome.OK).value, self._kinds[tier])

    @_harmless
    def looked_up(self, asked_tokens: int, parts: Sequence[Part], loaded_tokens: int) -> None:
        """Count a request's lookup: the hit's ``parts`` in order; their first ``loaded_tokens`` are loaded."""
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
                    self.add("lookup_tokens", tokens, kind, result)

    @_harmless
    def worked(self, work: Work) -> None:
        """Count what ranks have moved, and what failed there."""
        self.look_soon()
        for act, size_bytes in work.payload_bytes.items():
            self.add("transfer_bytes", size_bytes, act.operation, self._kinds[act.tier])
        for act, samples in work.seconds.items():
            self._observe("transfer_seconds", samples, act.operation, self._kinds[act.tier])
        for failure, shards in work.failures.items():
            labels = (failure.operation, failure.outcome, failure.cause, self._kinds[failure.tier])
            self.add("shard_failures", shards, *labels)

    @_harmless
    def update_ranks(self, statuses: Sequence[Sequence[TierStatus]]) -> None:
        """Take the status of each rank's tiers, by position."""
        self.look_soon()
        for position, kind in enumerate(self._kinds):
            here = [of_rank[position] for of_rank in statuses if position < len(of_rank)]
            for at, operation in enumerate(("load", "store", "write_through")):
                self._show("queued_bytes", sum(status.waiting[at] for status in here), operation, kind)
            self._show("disabled_ranks", sum(bool(status.trouble) for status in here), kind)
            accesses = [status.access for status in here if status.access is not None]
            equipped: Counter[_Labelled] = Counter(
                ("tier_info", kind, access.mover, "+".join(access.paths)) for access in accesses
            )
            before = {labelled for labelled in self._reported if labelled[:2] == ("tier_info", kind)}
            for labelled in before | equipped.keys():
                self._show(labelled[0], equipped[labelled], *labelled[1:])

    @_harmless
    def take(self, catalog: Catalog, decisions: Counts) -> OffloadingConnectorStats | None:
        """Return what has changed since the last call, None when nothing has.

        Called in every step: a change that came with no chunk is reported ``STATS_EVERY_S`` late.
        """
        now_s = time.monotonic()
        if now_s < self._look_s:
            return None
        self._look_s = now_s + STATS_EVERY_S
        if not self._began:
            self._begin()
        for counts in (catalog.counts, decisions):
            for (name, *labels), value in counts.items():
                named = [self._kinds[label] if isinstance(label, int) else label for label in labels]
                self._count(str(name), value, *named)
        for position, (kind, tier) in enumerate(zip(self._kinds, catalog.tiers, strict=True)):
            if position:
                self._show("pending_chunks", catalog.moves.pending[position], kind)
            statistics = tier.statistics()
            if isinstance(statistics, SlotStatistics):
                self._show("used_bytes", statistics.used_bytes, kind)
                self._show("capacity_bytes", statistics.capacity_bytes, kind)
                self._show("retired_bytes", statistics.retired_bytes, kind)
            elif statistics is not None:
                self._count("probes", statistics.probes, kind)
                self._count("probe_errors", statistics.probe_errors, kind)
                self._observe("probe_seconds", statistics.probe_seconds, kind)
                self._count("late_lookups", statistics.late, kind)
                self._show("breaker_state", _STATES[statistics.breaker], kind)
            if statistics is not None and statistics.evictions is not None:
                self._count("evicted_chunks", statistics.evictions, kind)
        if self._stats.is_empty():
            return None
        stats, self._stats = self._stats, OffloadingConnectorStats()
        return stats

    def _begin(self) -> None:
        """Report counters of trouble as 0 before anything has happened. ``_count`` does so for the other counters."""
        self._began = True
        begins: list[_Labelled] = [
            ("chunks", operation, how.value, kind) for kind in self._kinds for operation, how in _TROUBLE
        ]
        begins += [("unstored_chunks", cause) for cause in ("not_admitted", "no_room", "unanswered")]
        for name, *labels in (*begins, ("hints", "any", "bad")):
            self._stats.increase_counter(PREFIX + name, 0, tuple(labels))

    def _observe(self, name: str, samples: Iterable[float], *labels: str) -> None:
        for value in samples:
            self._stats.observe_histogram(PREFIX + name, value, labels)

    def _count(self, name: str, total: float, *labels: str) -> None:
        """Report what was added since the last call; the first call reports 0, too. If the total is smaller than
        before, tiers were reopened and count from 0 again.
        """
        before = self._reported.get((name, *labels))
        if total != before:
            self._reported[name, *labels] = total
            added = total - before if before is not None and before <= total else total
            self._stats.increase_counter(PREFIX + name, added, labels)

    def _show(self, name: str, value: float, *labels: str) -> None:
        if self._reported.get((name, *labels)) != value:
            self._reported[name, *labels] = value
            self._stats.set_gauge(PREFIX + name, value, labels)
