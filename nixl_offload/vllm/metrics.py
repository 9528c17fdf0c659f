"""What this connector counts, as vLLM's metrics: defined once, told by the scheduler's half when something has changed.

Threading: the scheduler's thread; ``DEFINITIONS`` is a constant that the process with the exporter reads as well.
Gauges are snapshots, counters are what was added since the last telling.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingGaugeMetadata, OffloadingMetricMetadata

from nixl_offload.catalog import Counts, Settled
from nixl_offload.estimate import Decision
from nixl_offload.tiers.breaker import BreakerState
from nixl_offload.tiers.shared import SharedTier
from nixl_offload.tiers.slots import SlotTier
from nixl_offload.types import Outcome

_CHUNKS: Final = "vllm:nixl_offload_chunks"
_MOVED: Final = "vllm:nixl_offload_moved_chunks"
_NOT_MOVED: Final = "vllm:nixl_offload_unmoved_chunks"
_DUE: Final = "vllm:nixl_offload_due_chunks"
_UNSAVED: Final = "vllm:nixl_offload_unsaved_bytes"
_NOT_STORED: Final = "vllm:nixl_offload_unstored_chunks"
_DECISIONS: Final = "vllm:nixl_offload_hit_decisions"
_USED: Final = "vllm:nixl_offload_used_bytes"
_EVICTED: Final = "vllm:nixl_offload_evicted_chunks"
_PROBES: Final = "vllm:nixl_offload_probes"
_PROBE_ERRORS: Final = "vllm:nixl_offload_probe_errors"
_PROBE_SECONDS: Final = "vllm:nixl_offload_probe_seconds"
_LATE: Final = "vllm:nixl_offload_late_lookups"
_BREAKER: Final = "vllm:nixl_offload_breaker_state"
_OPENINGS: Final = "vllm:nixl_offload_breaker_openings"
_KNOWN: Final = "vllm:nixl_offload_known_chunks"

_TIER: Final = ("tier",)

DEFINITIONS: Final[Mapping[str, OffloadingMetricMetadata]] = {
    _CHUNKS: OffloadingCounterMetadata(
        documentation=(
            "Chunks that were stored (from KV blocks), loaded (to KV blocks), landed (kept in memory as they were "
            "loaded) or moved (to a farther tier), by how it ended: ok, failed, corrupt, dropped or tainted. The tier "
            "is the one stored to, loaded from, landed in or moved to."
        ),
        labelnames=("operation", "outcome", "tier"),
    ),
    _MOVED: OffloadingCounterMetadata(documentation="Chunks that have arrived in a farther tier.", labelnames=_TIER),
    _NOT_MOVED: OffloadingCounterMetadata(
        documentation="Chunks that were to be moved to a farther tier and were not, by cause.",
        labelnames=("tier", "cause"),
    ),
    _DUE: OffloadingGaugeMetadata(documentation="Chunks that wait to be moved to a farther tier.", labelnames=_TIER),
    _UNSAVED: OffloadingGaugeMetadata(
        documentation="Bytes per rank that memory keeps, whoever needs room, until they have reached the next tiers."
    ),
    _NOT_STORED: OffloadingCounterMetadata(
        documentation=(
            "Chunks that were offered and not stored, by cause: not_admitted (not computed store_after times yet), "
            "no_room (every tier is full, out of use, or too slow)."
        ),
        labelnames=("cause",),
    ),
    _DECISIONS: OffloadingCounterMetadata(
        documentation=(
            "Parts of hits, by the tier that has them and what was decided: taken, skipped (computing is expected to "
            "be faster), trial (taken to see whether that is still so)."
        ),
        labelnames=("tier", "decision"),
    ),
    _USED: OffloadingGaugeMetadata(
        documentation="Bytes per rank in which chunks lie, in tiers that have slots.", labelnames=_TIER
    ),
    _EVICTED: OffloadingCounterMetadata(
        documentation="Chunks that made room for others, in tiers that have slots.", labelnames=_TIER
    ),
    _PROBES: OffloadingCounterMetadata(
        documentation="Questions put to a shared tier: does this object exist?", labelnames=_TIER
    ),
    _PROBE_ERRORS: OffloadingCounterMetadata(
        documentation="Questions to a shared tier that were not answered.", labelnames=_TIER
    ),
    _PROBE_SECONDS: OffloadingCounterMetadata(
        documentation="Time that questions to a shared tier took, summed, in seconds.", labelnames=_TIER
    ),
    _LATE: OffloadingCounterMetadata(
        documentation="Requests that were computed because a shared tier did not answer within lookup.timeout.",
        labelnames=_TIER,
    ),
    _BREAKER: OffloadingGaugeMetadata(
        documentation="Whether a shared tier is in use: 0 closed (it is), 1 half-open (on trial), 2 open (left alone).",
        labelnames=("purpose", "tier"),
    ),
    _OPENINGS: OffloadingCounterMetadata(
        documentation="How often a shared tier was given up for a while.", labelnames=_TIER
    ),
    _KNOWN: OffloadingGaugeMetadata(
        documentation="Chunks of a shared tier that are believed present.", labelnames=_TIER
    ),
}
"""By name, as ``/metrics`` shows them (counters with ``_total`` behind)."""

_STATES: Final = {BreakerState.CLOSED: 0, BreakerState.HALF_OPEN: 1, BreakerState.OPEN: 2}

_Labels = tuple[str, ...]


class Telling:
    """Collects what happened and hands it to vLLM, changes only."""

    def __init__(self, kinds: Sequence[str]) -> None:
        """``kinds``: what the tiers are called, by position."""
        self._kinds = tuple(kinds)
        self._chunks: Counter[_Labels] = Counter()
        self._told: dict[tuple[str, _Labels], float] = {}

    def settled(self, settled: Settled) -> None:
        """Count the chunks of a ticket."""
        for key, tier in zip(settled.keys, settled.tiers, strict=True):
            if tier >= 0:
                outcome = settled.failed.get(key, Outcome.OK)
                self._chunks[settled.kind, outcome.value, self._kinds[tier]] += 1

    def take(
        self, tiers: Sequence[object], counts: Counts, decisions: Mapping[tuple[int, Decision], int]
    ) -> OffloadingConnectorStats | None:
        """Return what has changed since the last call, None when nothing has."""
        stats = OffloadingConnectorStats()
        for labels, value in self._chunks.items():
            self._count(stats, _CHUNKS, value, labels)
        self._take_chain(stats, counts)
        for (position, decision), value in decisions.items():
            self._count(stats, _DECISIONS, value, (self._kinds[position], decision.value))
        for kind, tier in zip(self._kinds, tiers, strict=False):
            if isinstance(tier, SharedTier):
                self._take_shared(stats, tier, (kind,))
            elif isinstance(tier, SlotTier):
                self._show(stats, _USED, sum(taken.bytes_total for taken in tier.occupancy().values()), (kind,))
                self._count(stats, _EVICTED, tier.evictions, (kind,))
        return None if stats.is_empty() else stats

    def _take_chain(self, stats: OffloadingConnectorStats, counts: Counts) -> None:
        for (position, ended), value in counts.moves.items():
            if ended == Outcome.OK.value:
                self._count(stats, _MOVED, value, (self._kinds[position],))
            else:
                self._count(stats, _NOT_MOVED, value, (self._kinds[position], ended))
        if len(self._kinds) > 1:
            for kind, due in zip(self._kinds[1:], counts.due[1:], strict=True):
                self._show(stats, _DUE, due, (kind,))
            self._show(stats, _UNSAVED, counts.unsaved_bytes)
        self._count(stats, _NOT_STORED, counts.not_admitted, ("not_admitted",))
        self._count(stats, _NOT_STORED, counts.no_room, ("no_room",))

    def _take_shared(self, stats: OffloadingConnectorStats, tier: SharedTier, label: _Labels) -> None:
        counts = tier.counts()
        self._count(stats, _PROBES, counts.probes.heads, label)
        self._count(stats, _PROBE_ERRORS, counts.probes.errors, label)
        self._count(stats, _PROBE_SECONDS, counts.probes.seconds, label)
        self._count(stats, _LATE, counts.late, label)
        self._count(stats, _OPENINGS, counts.openings, label)
        self._show(stats, _KNOWN, counts.known, label)
        for purpose, state in tier.breakers().items():
            self._show(stats, _BREAKER, _STATES[state], (purpose, *label))

    def _count(self, stats: OffloadingConnectorStats, name: str, total: float, labels: _Labels = ()) -> None:
        added = total - self._told.get((name, labels), 0)
        if added > 0:
            self._told[name, labels] = total
            stats.increase_counter(name, added, labels)

    def _show(self, stats: OffloadingConnectorStats, name: str, value: float, labels: _Labels = ()) -> None:
        if self._told.get((name, labels)) != value:
            self._told[name, labels] = value
            stats.set_gauge(name, value, labels)
