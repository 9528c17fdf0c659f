"""The scheduler's half behind vLLM's ``OffloadingManager``: translates the questions of vLLM's ``offloading/scheduler``
into the catalog's.

Threading: called by the scheduler's thread. Nothing here blocks on storage, and nothing raises for reasons of storage
but at a start where a tier's options do not fit the model.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    LookupResult,
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

from nixl_offload.catalog import Catalog, ChainOptions, MoveTicket, StoreTicket
from nixl_offload.config import Config
from nixl_offload.engine import Work
from nixl_offload.errors import NixlOffloadError
from nixl_offload.identity.namespace import Namespace
from nixl_offload.tiers.base import Tier
from nixl_offload.tiers.slot_tier import rank_memory_bytes
from nixl_offload.types import Key, Lookup, LookupContext, key_group
from nixl_offload.vllm.identity import with_loaded_weights
from nixl_offload.vllm.load_decision import LoadDecider
from nixl_offload.vllm.messages import LoadSample, RankGeometry, RankStatus, TicketReport, TicketSpec
from nixl_offload.vllm.metrics import MetricsReporter
from nixl_offload.vllm.notes import notes_of
from nixl_offload.vllm.serving_tiers import ServingTiers, sharing_engines
from nixl_offload.vllm.tier_events import event_of, label_of

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_HIT, _VLLM_HIT = Lookup.HIT, LookupResult.HIT
_ANSWERS = {
    Lookup.MISS: LookupResult.MISS,
    Lookup.PENDING: LookupResult.HIT_PENDING,
    Lookup.RETRY: LookupResult.RETRY,
}
_NO_STORE = StoreTicket(0, (), ())

STATS_EVERY_S = 0.25
"""How often metrics are looked at while no chunk is looked up, stored, loaded or moved."""
STORE_BACKLOG_STAGINGS = 4
"""Stores in flight, per rank, as a multiple of the staging size; beyond it chunks are dropped, not queued."""


def chain_options(config: Config, parallel: ParallelConfig) -> ChainOptions:
    """Return what the config says of how chunks travel from tier to tier, in bytes per rank."""
    memory = config.memory
    if memory is None:
        return ChainOptions(write_through_backlog_bytes=config.staging_bytes)
    unsaved_bytes = memory.capacity_bytes // 4 if memory.unsaved_limit_bytes is None else memory.unsaved_limit_bytes
    return ChainOptions(
        promote=memory.promote,
        unsaved_limit_bytes=rank_memory_bytes(unsaved_bytes, parallel.world_size, len(sharing_engines(parallel))),
        write_through_backlog_bytes=config.staging_bytes,
        memory=0,
    )


class NixlOffloadManager(OffloadingManager):
    """Answers vLLM from the catalog. A tier serves from when it is open here and on all ranks; until then nothing is
    found there and nothing is stored there.
    """

    def __init__(self, offloading: OffloadingConfig, config: Config, vllm_config: VllmConfig) -> None:
        """Remember what ``open`` will need; touches no storage."""
        self._offloading = offloading
        self._parallel = vllm_config.parallel_config
        self._config = config
        self.version = 0
        """Counts what may change the answers to lookups, but for what tiers that others write to find by themselves."""
        self.serving = ServingTiers(offloading, config, vllm_config, begin=self._take_namespace, join=self._take_tier)
        self._tiers = self.serving.tiers
        """By position, as in the catalog."""
        self._first: Namespace | None = None
        """The namespace of the start; None: not known yet."""
        self._loaded_weights: str | None = None
        self._reopens = False
        """Tiers are to be opened for other weights, once nothing is under way."""
        self.is_paused = False
        """vLLM has paused, and may sleep, when ranks move nothing: no move begins until it computes again."""
        self._slot_bytes: dict[int, int] = {}
        """By KV cache group, once the namespace is known: of a chunk, on each rank."""
        self._token_bytes: dict[int, float] = {}
        """The same of a token."""
        self._labels = [label_of(tier, is_local=False) for tier in config.tiers]
        """By position; whether a directory is on a drive of this machine is known once it is open."""
        self.moves: list[MoveTicket] = []
        """What ``take_moves`` would return."""
        self._removed: list[OffloadKey] = []
        """What ``take_removed`` would return."""
        self._metrics = MetricsReporter([tier.kind for tier in config.tiers])
        self._metrics_failed = False
        self._stats_s = 0.0
        """When to look at the metrics again."""
        self.decider = LoadDecider(
            self._where,
            self._token_bytes,
            tiers=len(self._tiers),
            ranks=self._parallel.world_size,
            skips_slow=config.slow_hits == "skip",
            clock=time.monotonic,
        )
        """How much of a hit is loaded."""
        self._make_catalog()

    # Tiers that open, and open again for other weights.

    def open(self, ranks: Sequence[RankGeometry], *, waits: bool = True) -> None:
        """Open the tiers, once. ``ranks``: the geometry of each, in order. ``waits``: before the first step.

        Waits and raises as ``ServingTiers.open``, and only at a start. Called again (vLLM repeats the handshake when it
        wakes up) it leaves the tiers, and the lock they hold, as they are.
        """
        if self.serving.is_begun:
            return
        try:
            self.serving.open(ranks, waits=waits)
        except NixlOffloadError:
            self.shutdown()
            raise

    def reopen(self, loaded_weights: str | None) -> None:
        """Serve, from now on, what was computed with other weights: ``loaded_weights`` tells them from those of the
        start; None: they are those again.

        Nothing is found and nothing is stored until the tiers are open in that namespace, which waits until what is
        under way has ended.
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
        self.catalog = Catalog(
            self._tiers,
            world_size=self._parallel.world_size,
            slot_bytes=lambda key: self._slot_bytes[key_group(key)],
            store_backlog_bytes=STORE_BACKLOG_STAGINGS * self._config.staging_bytes,
            chain=chain_options(self._config, self._parallel),
            store_after=self._config.store_after,
        )

    def _take_namespace(self, namespace: Namespace) -> None:
        if self._first is not None:
            self._make_catalog()  # the tiers of the one before are closed
        self._first = self._first or namespace
        blocks = self._offloading.cache.blocks_per_chunk
        for group in self._offloading.groups:
            size_bytes = self._slot_bytes[group.group_id] = namespace.slot_bytes(group.group_id)
            self._token_bytes[group.group_id] = size_bytes / (group.tokens_per_block * blocks)

    def _take_tier(self, position: int, tier: Tier) -> None:
        self.version += 1
        self._labels[position] = label_of(self._config.tiers[position], is_local=tier.is_local)
        self.catalog.join(position, tier)

    def take_ranks(self, ranks: Mapping[int, RankStatus]) -> None:
        """Take the word of ranks whose status has changed. A tier serves when all of them have opened it."""
        self._stats_s = 0.0
        self.serving.take_ranks(ranks)
        statuses = [status.tiers for status in self.serving.ranks.values()]
        disabled = {position for tiers in statuses for position, tier in enumerate(tiers) if tier.trouble}
        self.catalog.disable(disabled, time.monotonic())
        self._tell(self._metrics.update_ranks, statuses)

    # What hints need: see ``hints``.

    def allowed_tiers(self, req_context: ReqContext) -> frozenset[int] | None:
        """Return the tiers that a request may load from, None for all: ``kv_load_tiers`` in its transfer params."""
        chosen = req_context.load_tier_filter
        if chosen is TierFilter.ALL:
            return None
        notes = notes_of(req_context)
        if notes.allowed_tiers is None:
            notes.allowed_tiers = frozenset(
                at for at, label in enumerate(self._labels) if chosen.allows(label.medium, label.locality)
            )
        return notes.allowed_tiers

    def drop(self, keys: Iterable[OffloadKey]) -> None:
        """Give up chunks, in their order: see ``Catalog.drop``."""
        self.catalog.drop(cast("Iterable[Key]", keys))
        self._changed()

    def count(self, metric: str, *labels: str) -> None:
        """Count one of something."""
        self._stats_s = 0.0
        self._metrics.add(metric, 1, labels)

    # What vLLM asks while it schedules.

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Every request is offloaded chunk by chunk."""
        self.serving.update()
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Say whether one chunk can be loaded."""
        notes = notes_of(req_context)
        if self._reopens or not notes.loads or not notes.knows_keys:
            return LookupResult.MISS
        # Asked thousands of times a step, mostly about hits.
        context = LookupContext(req_context.req_id, req_context.get_offload_key_position(key))
        answer = self.catalog.lookup(Key(key), time.monotonic(), context, self.allowed_tiers(req_context))
        return _VLLM_HIT if answer is _HIT else _ANSWERS[answer]

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """A step is scheduled: tiers go and look for what its lookups did not find in memory, and moves begin."""
        if self._reopens:
            self._reopen_when_idle()
        if not self.serving.is_whole:
            self.serving.update()
        self.catalog.flush(time.monotonic())
        if self.catalog.is_chain and not self._reopens and not self.is_paused:
            moves = self.catalog.begin_moves(time.monotonic())
            self.moves += moves
            if moves or self.has_events:
                self._changed()

    def take_moves(self) -> list[MoveTicket]:
        """Return the moves to tell the ranks of."""
        moves, self.moves = self.moves, []
        return moves

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forget what is remembered of a request's lookups."""
        self.catalog.forget_request(req_context.req_id)

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        """Return what kind of tier serves a hit."""
        position = self._where(key, req_context)
        return CacheHitSource.EXTERNAL_UNSPECIFIED if position is None else self._labels[position].source

    def _where(self, key: OffloadKey, req_context: ReqContext | None) -> int | None:
        """Return the tier that would serve a chunk to a request; None: to any request."""
        return self.catalog.where(Key(key), None if req_context is None else self.allowed_tiers(req_context))

    def allocated(self, req_context: ReqContext) -> None:
        """A request is given blocks: count what it has looked up, once. It may wait anew if it is preempted."""
        notes = notes_of(req_context)
        looked, notes.looked_up, notes.waits_since_s = notes.looked_up, None, None
        if looked is None or not looked.asked_tokens:
            return
        self._stats_s = 0.0
        decision = notes.decision
        if looked.found_tokens and decision is not None and decision[:2] == (looked.first_token, looked.found_tokens):
            self._metrics.looked_up(looked.asked_tokens, decision.parts, decision.loaded_tokens)
        else:
            self._metrics.looked_up(looked.asked_tokens, (), 0)

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Mark chunks as recently used."""
        self.catalog.touch(cast("Collection[Key]", keys))

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> TicketSpec:
        """Pin chunks and tell the ranks where they are."""
        self.version += 1
        wanted = cast("Collection[Key]", keys)
        ticket = self.catalog.prepare_load(wanted, time.monotonic(), self.allowed_tiers(req_context))
        self.decider.begin_load(ticket, req_context)
        return TicketSpec(ticket, notes_of(req_context).adapter)

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        """Reserve room for what is not stored yet; fewer keys, or none, when room is short or storage too slow."""
        notes, ticket = notes_of(req_context), None
        if self._slot_bytes and not self._reopens and notes.stores and notes.knows_keys:
            ticket = self.catalog.reserve(cast("Collection[Key]", keys), time.monotonic(), req_context.req_id)
            self._changed()
        ticket = ticket or _NO_STORE
        return PrepareStoreOutput(
            keys_to_store=cast("list[OffloadKey]", list(ticket.keys)),
            store_spec=TicketSpec(ticket, notes.adapter),
            evicted_keys=[],
        )

    # What the ranks report. vLLM's own complete_store and complete_load carry no outcome and survive no reset, so
    # tickets settle here, from our own message, and those two have nothing left to do.

    def settle(self, reports: Mapping[int, TicketReport], loads: Sequence[LoadSample] = ()) -> set[OffloadKey]:
        """Take the ranks' word on tickets: READY, dropped, or gone; and on how long tiers took to serve loads.

        Returns the chunks that a load did not bring.
        """
        lost: set[OffloadKey] = set()
        self._changed()
        now_s = time.monotonic()
        self.decider.observe_loads(loads)
        for ticket, report in reports.items():
            settled = self.catalog.report(ticket, report.ranks, report.failures, now_s)
            if settled is None:
                continue
            self._metrics.settled(settled)
            if settled.kind == "load":
                self.decider.end_load(ticket)
                lost.update(OffloadKey(key) for key in settled.failed)
            if settled.failed:
                outcomes = Counter(outcome.value for outcome in settled.failed.values())
                logger.debug("%s of %d chunks: %s", settled.kind, len(settled.keys), dict(outcomes))
        return lost

    def take_work(self, work: Work) -> None:
        """Take note, for metrics, of what the ranks have moved."""
        self._stats_s = 0.0
        self._tell(self._metrics.worked, work)

    def has_pending_work(self) -> bool:
        """Keep an idle engine stepping while ranks open tiers, until they have reported every ticket, and nothing waits
        to be moved.
        """
        catalog = self.catalog
        is_busy = catalog.open_tickets > 0 or (catalog.has_pending_writes and not self.is_paused)
        return is_busy or self.serving.is_opening or (self._reopens and not self.serving.is_off)

    @property
    def will_store(self) -> bool:
        """Whether nothing is stored now, and something will be in a moment: what waits till then is not lost."""
        return self._reopens or self.serving.is_about_to_serve

    def is_waiting(self) -> bool:
        """Whether some rank opens its tiers or moves bytes, or somebody looks into a shared tier."""
        return self.has_pending_work() or self.is_looking

    @property
    def is_looking(self) -> bool:
        """Whether some tier is looking for what requests have asked about."""
        return any(tier.is_looking for tier in self._tiers)

    def get_stats(self) -> OffloadingConnectorStats | None:
        """Return what has changed in our metrics since the last call.

        Called in every step: a change that came with no chunk is reported ``STATS_EVERY_S`` late.
        """
        now_s = time.monotonic()
        if not self._slot_bytes or now_s < self._stats_s:
            return None
        self._stats_s = now_s + STATS_EVERY_S
        return self._tell(self._metrics.take, self._tiers, self.catalog.counts(), self.decider.counts())

    @property
    def has_events(self) -> bool:
        """Whether ``take_events`` has something to take. Asked in every step."""
        return self.catalog.has_changes

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return what was stored and removed since the last call."""
        changes = self.catalog.take_changes() if self.has_events else ()
        if not self._offloading.enable_kv_cache_events:
            return []
        self._removed += [OffloadKey(key) for change in changes if change.removed for key in change.keys]
        return [event_of(change, self._labels[change.tier]) for change in changes]

    def take_removed(self) -> list[OffloadKey]:
        """Return the chunks that ``take_events`` has reported as gone from some tier, since the last call."""
        removed, self._removed = self._removed, []
        return removed

    def is_known(self, key: OffloadKey) -> bool:
        """Whether a chunk is in some tier, or on its way there."""
        return any(tier.state(Key(key)) is not None for tier in self._tiers)

    def reset_cache(self) -> None:
        """Forget everything. Slots that a rank may still touch come back as their tickets settle."""
        self._changed()
        self.catalog.clear()
        self.serving.clear_closed()
        logger.info("Cleared by reset_prefix_cache: nothing that was stored before is served any more")

    def shutdown(self) -> None:
        """Close the tiers: indexes are written out, locks released, background work ends.

        vLLM has ended the ranks before: they drained what was on its way, and could not tell. What they may have
        finished is written down as a hint; its checksums tell, when it is loaded, whether they had.
        """
        self.serving.close(self.catalog.in_flight_stores() if self._config.verify != "header" else ())

    def _changed(self) -> None:
        """Take note that chunks came or went, or are about to."""
        self.version += 1
        self._stats_s = 0.0

    def _tell(self, tell: Callable[..., _T], *what: Any) -> _T | None:
        """Tell metrics something. They are not worth an engine: one of their errors is logged."""
        try:
            return tell(*what)
        except Exception:
            if not self._metrics_failed:
                logger.exception("Metrics are incomplete from now on; do all ranks run the same config and version?")
            self._metrics_failed = True
            return None
