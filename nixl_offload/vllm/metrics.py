"""What this connector counts, as vLLM's metrics: defined once, told by the scheduler's half when something has changed.

Threading: the scheduler's thread; ``DEFINITIONS`` is a constant that the process with the exporter reads as well.
Gauges are snapshots, counters are what was added since the last telling.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingGaugeMetadata, OffloadingMetricMetadata

from nixl_offload.catalog import Settled
from nixl_offload.tiers.breaker import BreakerState
from nixl_offload.tiers.shared import SharedTier
from nixl_offload.types import Outcome

_CHUNKS: Final = "vllm:nixl_offload_chunks"
_PROBES: Final = "vllm:nixl_offload_probes"
_PROBE_ERRORS: Final = "vllm:nixl_offload_probe_errors"
_PROBE_SECONDS: Final = "vllm:nixl_offload_probe_seconds"
_LATE: Final = "vllm:nixl_offload_late_lookups"
_BREAKER: Final = "vllm:nixl_offload_breaker_state"
_OPENINGS: Final = "vllm:nixl_offload_breaker_openings"
_KNOWN: Final = "vllm:nixl_offload_known_chunks"

DEFINITIONS: Final[Mapping[str, OffloadingMetricMetadata]] = {
    _CHUNKS: OffloadingCounterMetadata(
        documentation="Chunks that were stored or loaded, by how it ended: ok, failed, corrupt or dropped.",
        labelnames=("operation", "outcome"),
    ),
    _PROBES: OffloadingCounterMetadata(documentation="Questions put to a shared tier: does this object exist?"),
    _PROBE_ERRORS: OffloadingCounterMetadata(documentation="Questions to a shared tier that were not answered."),
    _PROBE_SECONDS: OffloadingCounterMetadata(
        documentation="Time that questions to a shared tier took, summed, in seconds."
    ),
    _LATE: OffloadingCounterMetadata(
        documentation="Requests that were computed because a shared tier did not answer within lookup.timeout."
    ),
    _BREAKER: OffloadingGaugeMetadata(
        documentation="Whether a shared tier is in use: 0 closed (it is), 1 half-open (on trial), 2 open (left alone).",
        labelnames=("purpose",),
    ),
    _OPENINGS: OffloadingCounterMetadata(documentation="How often a shared tier was given up for a while."),
    _KNOWN: OffloadingGaugeMetadata(documentation="Chunks of a shared tier that are believed present."),
}
"""By name, as ``/metrics`` shows them (counters with ``_total`` behind)."""

_STATES: Final = {BreakerState.CLOSED: 0, BreakerState.HALF_OPEN: 1, BreakerState.OPEN: 2}

_Labels = tuple[str, ...]


class Telling:
    """Collects what happened and hands it to vLLM, changes only."""

    def __init__(self) -> None:
        self._chunks: Counter[_Labels] = Counter()
        self._told: dict[tuple[str, _Labels], float] = {}

    def settled(self, settled: Settled) -> None:
        """Count the chunks of a ticket."""
        operation = "store" if settled.is_store else "load"
        for key in settled.keys:
            self._chunks[operation, settled.failed.get(key, Outcome.OK).value] += 1

    def take(self, tiers: list[SharedTier]) -> OffloadingConnectorStats | None:
        """Return what has changed since the last call, None when nothing has."""
        stats = OffloadingConnectorStats()
        for labels, value in self._chunks.items():
            self._count(stats, _CHUNKS, value, labels)
        for tier in tiers:
            counts = tier.counts()
            self._count(stats, _PROBES, counts.probes.heads)
            self._count(stats, _PROBE_ERRORS, counts.probes.errors)
            self._count(stats, _PROBE_SECONDS, counts.probes.seconds)
            self._count(stats, _LATE, counts.late)
            self._count(stats, _OPENINGS, counts.openings)
            self._show(stats, _KNOWN, counts.known)
            for purpose, state in tier.breakers().items():
                self._show(stats, _BREAKER, _STATES[state], (purpose,))
        return None if stats.is_empty() else stats

    def _count(self, stats: OffloadingConnectorStats, name: str, total: float, labels: _Labels = ()) -> None:
        added = total - self._told.get((name, labels), 0)
        if added > 0:
            self._told[name, labels] = total
            stats.increase_counter(name, added, labels)

    def _show(self, stats: OffloadingConnectorStats, name: str, value: float, labels: _Labels = ()) -> None:
        if self._told.get((name, labels)) != value:
            self._told[name, labels] = value
            stats.set_gauge(name, value, labels)
