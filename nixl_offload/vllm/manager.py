"""Our ``OffloadingManager``: answers vLLM's questions about what the tiers hold and will take.

Threading: called by the scheduler's thread; never blocks on storage.
Failure: storage never raises, except at a start with a tier whose options do not fit the model.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, cast

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    TierFilter,
)
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from nixl_offload.catalog.catalog import Catalog, MoveTicket, StoreTicket
from nixl_offload.catalog.moves import ChainOptions
from nixl_offload.config import Config, TierConfig
from nixl_offload.errors import NixlOffloadError
from nixl_offload.identity.namespace import Namespace
from nixl_offload.tiers.base import Tier
from nixl_offload.tiers.slot_tier import MemoryTier
from nixl_offload.types import Key, Lookup, LookupContext, key_group
from nixl_offload.vllm.identity import with_loaded_weights
from nixl_offload.vllm.lazy_stores import LazyStores
from nixl_offload.vllm.load_decision import LoadDecider, LoadNotes
from nixl_offload.vllm.messages import LoadSample, RankGeometry, RankStatus, TicketReport, TicketSpec
from nixl_offload.vllm.metrics import MetricsReporter
from nixl_offload.vllm.serving_tiers import ServingTiers
from nixl_offload.vllm.vllm_scheduler import notes_of

logger = logging.getLogger(__name__)

STORE_BACKLOG_STAGINGS: Final = 4
"""Stores in flight, per rank, as a multiple of the staging size; beyond it chunks are dropped, not queued."""

_ANSWERS: Final = {
    Lookup.HIT: LookupResult.HIT,
    Lookup.MISS: LookupResult.MISS,
    Lookup.PENDING: LookupResult.HIT_PENDING,
    Lookup.RETRY: LookupResult.RETRY,
}
_NO_STORE: Final = StoreTicket(0, (), ())


class TierLabel(NamedTuple):
    """What vLLM, and llm-d's indexer, call a kind of tier."""

    medium: Medium
    locality: Locality
    source: CacheHitSource
    reports_removals: bool
    """Whether each removal is reported. vLLM keeps a chunk's description until then."""
    event_medium: str | None = None
    """The medium's name in events, if vLLM has none: the name that llm-d's router weighs (decision 0023)."""


_SHARED: Final = (Medium.STORAGE, Locality.REMOTE, CacheHitSource.EXTERNAL_UNSPECIFIED, False)
_LABELS: Final = {
    "memory": TierLabel(Medium.CPU, Locality.LOCAL, CacheHitSource.HOST, True),
    "slab": TierLabel(Medium.STORAGE, Locality.LOCAL, CacheHitSource.DISK, True),
    "shared_dir": TierLabel(*_SHARED, event_medium="SHARED_STORAGE"),
    "s3": TierLabel(*_SHARED, event_medium="OBJECT_STORE"),
}


def label_of(tier: TierConfig, *, is_local: bool) -> TierLabel:
    """Return what vLLM calls a tier. ``is_local``: only this machine can read the tier."""
    if tier.kind == "shared_dir" and is_local:
        return _LABELS["slab"]._replace(reports_removals=False)
    return _LABELS[tier.kind]


class NixlOffloadManager(OffloadingManager):
    """Answers vLLM from the catalog. A tier finds and stores nothing until it is open here and on all ranks."""

    def __init__(self, offloading: OffloadingConfig, config: Config, vllm_config: VllmConfig) -> None:
        """Remember what ``open`` will need; touches no storage."""
        self._offloading = offloading
        self._parallel = vllm_config.parallel_config
        self._config = config
        self.version = 0
        """Counts changes that may change all answers to lookups. ``Catalog.version`` counts those of single chunks."""
        self.serving = ServingTiers(offloading, config, vllm_config, begin=self._take_namespace, join=self._take_tier)
        self._first: Namespace | None = None
        """The namespace of the start; None: not known yet."""
        self._loaded_weights: str | None = None
        self._reopens = False
        """Whether tiers are to be opened for other weights, once no ticket is open."""
        self.is_paused = False
        """Whether vLLM has paused. It may then sleep, so no move begins until it computes again."""
        self._slot_bytes: dict[int, int] = {}
        """Bytes of a chunk on each rank, by KV cache group. Empty until the namespace is known."""
        self._token_bytes: dict[int, float] = {}
        """The same for a token."""
        self._labels = [label_of(tier, is_local=False) for tier in config.tiers]
        """By position; whether a directory is on a drive of this machine is known once it is open."""
        self.lazy: LazyStores | None = None
        """Stores to memory that are put off; None: none is."""
        self.moves: list[MoveTicket] = []
        """Moves to send to the ranks. The caller empties it."""
        self.removed: list[OffloadKey] = []
        """Chunks that ``take_events`` has reported as gone from some tier. The caller empties it."""
        self.metrics: Final = MetricsReporter([tier.kind for tier in config.tiers])
        self.decider: Final = LoadDecider(
            len(config.tiers), token_bytes=self._token_bytes, skips_slow=config.slow_hits == "skip"
        )
        """Decides how much of a hit is loaded."""
        self._make_catalog()

    # Tiers that open, and open again for other weights.

    def open(self, ranks: Sequence[RankGeometry], *, waits: bool = True) -> None:
        """Open the tiers. ``ranks``: the geometry of each, in order. ``waits``: before the first step.

        Waits and raises as ``ServingTiers.open``, and only at a start.
        """
        try:
            self.serving.open(ranks, waits=waits)
        except NixlOffloadError:
            self.shutdown()
            raise

    def reopen(self, loaded_weights: str | None) -> None:
        """Serve the namespace of other weights from now on. ``loaded_weights`` identifies them; None: those of the
        start. The tiers are opened in that namespace once no ticket is open. Until then nothing is found or stored.
        """
        if self.serving.is_begun and not self.serving.is_off:
            self._loaded_weights = loaded_weights
            self._reopens = True
            self._changed()
            self._reopen_when_idle()

    def _reopen_when_idle(self) -> None:
        if self._first is None or self.catalog.open_tickets:
            return
        self._reopens = False
        self._changed()
        self.serving.reopen(with_loaded_weights(self._first, self._loaded_weights))

    def _make_catalog(self) -> None:
        memory = self._config.memory
        self.catalog = Catalog(
            [Tier() for _ in self._config.tiers],  # has nothing, until a tier joins
            world_size=self._parallel.world_size,
            slot_bytes=lambda key: self._slot_bytes[key_group(key)],
            store_backlog_bytes=STORE_BACKLOG_STAGINGS * self._config.staging_bytes,
            chain=ChainOptions(
                write_through_backlog_bytes=self._config.staging_bytes,
                memory=None if memory is None else 0,
                gpu_has=lambda key: self.lazy is not None and key in self.lazy,
            ),
            store_after=self._config.store_after,
        )

    def _take_namespace(self, namespace: Namespace) -> None:
        self._changed()
        if self._first is not None:
            counts = self.catalog.counts  # metrics go on
            self._make_catalog()  # the tiers of the old namespace are closed
            self.catalog.counts.update(counts)
        self._first = self._first or namespace
        blocks = self._offloading.cache.blocks_per_chunk
        for group in self._offloading.groups:
            size_bytes = self._slot_bytes[group.group_id] = namespace.slot_bytes(group.group_id)
            self._token_bytes[group.group_id] = size_bytes / (group.tokens_per_block * blocks)

    def _take_tier(self, position: int, tier: Tier) -> None:
        self._changed()
        self._labels[position] = label_of(self._config.tiers[position], is_local=tier.is_local)
        if isinstance(tier, MemoryTier):
            tier.is_exclusive = self.lazy is not None
        self.catalog.join(position, tier)

    def take_ranks(self, ranks: Mapping[int, RankStatus]) -> None:
        """Take the status of ranks for which it has changed. A tier serves once all ranks have opened it."""
        self.serving.take_ranks(ranks)
        statuses = [status.tiers for status in self.serving.ranks.values()]
        disabled = {position for tiers in statuses for position, tier in enumerate(tiers) if tier.stores_fail}
        unreadable = {position for tiers in statuses for position, tier in enumerate(tiers) if tier.loads_fail}
        self.catalog.disable(disabled, unreadable, time.monotonic())
        self.metrics.update_ranks(statuses)

    # What vLLM asks while it schedules.

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Every request is offloaded chunk by chunk."""
        self.serving.update()
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Called by vLLM's ``_lookup``: say whether one chunk can be loaded."""
        notes = notes_of(req_context)
        if self._reopens or not notes.loads or not notes.knows_keys:
            return LookupResult.MISS
        context = LookupContext(req_context.req_id, req_context.get_offload_key_position(key), notes.load.waits)
        return _ANSWERS[self.catalog.lookup(Key(key), time.monotonic(), context, self.allowed_tiers(req_context))]

    def leading_hits(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> int:
        """Return how many of ``keys``, from the first on, slots have. ``lookup`` says HIT for each."""
        notes = notes_of(req_context)
        if self._reopens or not notes.loads or not notes.knows_keys:
            return 0
        return self.catalog.leading_hits(cast("Sequence[Key]", keys), self.allowed_tiers(req_context))

    def allowed_tiers(self, req_context: ReqContext) -> frozenset[int] | None:
        """Return the tiers that a request may load from, None for all: ``kv_load_tiers`` in its transfer params."""
        chosen = req_context.load_tier_filter
        if chosen is TierFilter.ALL:
            return None
        return frozenset(at for at, label in enumerate(self._labels) if chosen.allows(label.medium, label.locality))

    def where(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> list[int | None]:
        """Return the tier that would serve each chunk, or None. Without a ``req_context`` all tiers are allowed."""
        allowed = None if req_context is None else self.allowed_tiers(req_context)
        return self.catalog.where(cast("Sequence[Key]", keys), allowed)

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        """Return what kind of tier serves a hit."""
        (position,) = self.where((key,), req_context)
        return CacheHitSource.EXTERNAL_UNSPECIFIED if position is None else self._labels[position].source

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> TicketSpec:
        """Called by vLLM's ``update_state_after_alloc``: pin chunks and return where they are, for the ranks."""
        wanted, notes, now_s = cast("Collection[Key]", keys), notes_of(req_context), time.monotonic()
        ticket = self.catalog.prepare_load(wanted, now_s, self.allowed_tiers(req_context))
        self.decider.begin_load(ticket.ticket, ticket.locations, notes.load, now_s)
        return TicketSpec(ticket, notes.adapter)

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        """Called by vLLM's ``_build_store_jobs``: reserve room for what no tier has; for less if room is short."""
        notes, ticket, wanted, leaving = notes_of(req_context), None, cast("Collection[Key]", keys), set[Key]()
        may_store = self._slot_bytes and not self._reopens and notes.stores and notes.knows_keys
        if may_store and self.lazy is not None:
            others = cast("list[Key]", self.lazy.put_off(keys, req_context))
            leaving = set(others)
            put_off = [key for key in wanted if key not in leaving]
            wanted = wanted if self.catalog.is_chain else others
        if may_store and wanted:
            ticket = self.catalog.reserve(wanted, time.monotonic(), req_context.req_id, leaving)
            self.metrics.look_soon()
        if may_store and self.lazy is not None:
            self.catalog.give_up(put_off)
        ticket = ticket or _NO_STORE
        return PrepareStoreOutput(
            keys_to_store=cast("list[OffloadKey]", list(ticket.keys)),
            store_spec=TicketSpec(ticket, notes.adapter),
            evicted_keys=[],
        )

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Called by vLLM's ``build_connector_meta``, last: tiers begin this step's searches, and moves begin."""
        if self._reopens:
            self._reopen_when_idle()
        if not self.serving.is_whole:
            self.serving.update()
        self.catalog.on_step(time.monotonic())
        for position, tier in enumerate(self.catalog.tiers):
            if tier.timed_reads:
                self.decider.observe_reads(position, tier.timed_reads, time.monotonic())
                tier.timed_reads = ()
        if self.catalog.is_chain and not self._reopens and not self.is_paused:
            moves, now_s = self.catalog.begin_moves(time.monotonic()), time.monotonic()
            for move in moves:
                if move.targets[0].tier == self.catalog.chain.memory:
                    self.decider.begin_load(move.ticket, move.sources, LoadNotes(), now_s)
            self.moves += moves
            if moves or self.catalog.changes:
                self.metrics.look_soon()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forget a request's lookups and fetch."""
        self.catalog.moves.end_fetch(req_context.req_id)
        self.catalog.forget_request(req_context.req_id)

    # What the ranks report. vLLM's complete_store and complete_load carry no outcome and survive no reset. They do
    # nothing here: tickets settle from our own message.

    def settle(self, reports: Mapping[int, TicketReport], loads: Sequence[LoadSample] = ()) -> set[OffloadKey]:
        """Settle the tickets that all ranks have reported, and learn how long tiers took to serve loads. Returns the
        chunks that a load did not bring.
        """
        lost: set[OffloadKey] = set()
        self.metrics.look_soon()
        now_s = time.monotonic()
        self.decider.observe_loads(loads)
        for ticket, report in reports.items():
            settled = self.catalog.report(ticket, report.ranks, report.failures, now_s)
            if settled is None:
                continue
            self.metrics.settled(settled)
            self.decider.end_load(ticket, now_s, bool(settled.failed) if settled.kind == "prefetch" else None)
            if settled.kind == "load":
                lost.update(OffloadKey(key) for key in settled.failed)
            if settled.failed:
                outcomes = Counter(outcome.value for outcome in settled.failed.values())
                logger.debug("%s of %d chunks: %s", settled.kind, len(settled.keys), dict(outcomes))
        return lost

    # What vLLM asks between steps.

    def has_pending_work(self) -> bool:
        """Whether an idle engine must keep stepping: ranks open tiers, a ticket is open, or a move waits."""
        is_busy = self.catalog.open_tickets > 0 or (self.catalog.moves.has_pending and not self.is_paused)
        return is_busy or self.serving.is_opening or (self._reopens and not self.serving.is_off)

    @property
    def will_store(self) -> bool:
        """Whether nothing can be stored now but soon will be. Chunks are then offered later."""
        return self._reopens or self.serving.is_about_to_serve

    @property
    def is_looking(self) -> bool:
        """Whether some tier is looking for chunks that requests have asked about."""
        return any(tier.is_looking for tier in self.catalog.tiers)

    def get_stats(self) -> OffloadingConnectorStats | None:
        """Return what has changed in our metrics since the last call."""
        return self.metrics.take(self.catalog, self.decider.counts) if self._slot_bytes else None

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return the events of chunks that were stored or removed since the last call."""
        changes = self.catalog.take_changes()
        if not self._offloading.enable_kv_cache_events:
            return []
        events = []
        for change in changes:
            label, keys = self._labels[change.tier], cast("list[OffloadKey]", change.keys)
            if change.removed:
                self.removed += keys
            events.append(
                OffloadingEvent(
                    keys,
                    label.medium,
                    change.removed,
                    label.locality,
                    ownership=label.event_medium,  # vLLM passes it on to ``NixlOffloadScheduler.take_events``
                    removal_expected=label.reports_removals,
                )
            )
        return events

    def is_known(self, key: OffloadKey) -> bool:
        """Whether a chunk is in some tier, or on its way there."""
        return any(tier.state(Key(key)) is not None for tier in self.catalog.tiers)

    def reset_cache(self) -> None:
        """Forget everything. Slots that a rank may still touch come back as their tickets settle."""
        self._changed()
        self.catalog.clear()
        self.serving.clear_closed()
        logger.info("Cleared by reset_prefix_cache: nothing that was stored before is served any more")

    def shutdown(self) -> None:
        """Close the tiers: indexes are written out, locks released, background work ends.

        vLLM has ended the ranks before. They drained their stores, but could not report them. Such chunks go into the
        index as hints; checksums tell, when they are loaded, whether they were finished.
        """
        self.serving.close(self.catalog.in_flight_stores() if self._config.verify != "header" else ())

    def _changed(self) -> None:
        """Note that any chunk may have come or gone."""
        self.version += 1
        self.metrics.look_soon()
