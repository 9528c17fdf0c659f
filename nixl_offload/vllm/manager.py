"""The scheduler's half behind vLLM's ``OffloadingManager``: translates vLLM's questions into the catalog's.

Threading: called by the scheduler's thread. Nothing here blocks on storage and nothing raises for reasons of storage.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

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
)
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from nixl_offload.catalog import NOWHERE, Catalog
from nixl_offload.config import Config
from nixl_offload.tiers.file import FileTier
from nixl_offload.tiers.shared import SharedTier
from nixl_offload.types import Asker, Key, Lookup, Outcome, key_group
from nixl_offload.vllm.identity import build_namespace
from nixl_offload.vllm.messages import ChunkSpec, Place, TicketReport
from nixl_offload.vllm.metrics import Telling
from nixl_offload.vllm.open_tiers import open_tier

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)

_HIT, _VLLM_HIT = Lookup.HIT, LookupResult.HIT
_ANSWERS = {
    Lookup.MISS: LookupResult.MISS,
    Lookup.PENDING: LookupResult.HIT_PENDING,
    Lookup.RETRY: LookupResult.RETRY,
}

STORE_BACKLOG_STAGINGS = 4
"""Stores in flight, per rank, as a multiple of the staging size; beyond it chunks are dropped, not queued."""


class NixlOffloadManager(OffloadingManager):
    """Answers vLLM from the catalog. Until ``open`` every lookup is a miss and nothing is stored."""

    def __init__(self, offloading: OffloadingConfig, config: Config, vllm_config: VllmConfig) -> None:
        """Remember what ``open`` will need; touches no storage."""
        self._offloading = offloading
        self._config = config
        self._vllm_config = vllm_config
        self._catalog: Catalog | None = None
        self._tiers: list[FileTier | SharedTier] = []
        self._places: tuple[Place, ...] = ()
        self._events: list[OffloadingEvent] = []
        self._telling = Telling()

    def open(
        self, slot_bytes: tuple[int, ...], kv_cache_config: KVCacheConfig, attention_backends: Sequence[str] = ()
    ) -> None:
        """Open the tiers, once. ``slot_bytes``: what a chunk of each KV cache group needs on each rank.

        ``attention_backends``: those that the ranks really use, sorted.

        Raises TierError or ConfigError, for the operator, when a tier cannot be used: at start, and only there. Called
        again (vLLM repeats the handshake when it wakes up) it leaves the tiers, and the lock they hold, as they are.
        """
        if self._catalog is not None:
            return
        namespace = build_namespace(
            self._vllm_config, kv_cache_config, self._offloading, self._config, slot_bytes, attention_backends
        )
        by_group = {group.group_id: size for group, size in zip(self._offloading.groups, slot_bytes, strict=True)}
        world_size = self._offloading.parallel.world_size
        for position, tier in enumerate(self._config.tiers):
            self._tiers.append(open_tier(tier, position, namespace, by_group, self._offloading.parallel))
        self._places = tuple(tier.place for tier in self._tiers)
        self._catalog = Catalog(
            self._tiers,
            world_size=world_size,
            slot_bytes=lambda key: by_group[key_group(key)],
            store_backlog_bytes=STORE_BACKLOG_STAGINGS * self._config.staging_bytes,
        )

    # What vLLM asks while it schedules.

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Every request is offloaded chunk by chunk."""
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Say whether one chunk can be loaded."""
        if self._catalog is None:
            return LookupResult.MISS
        # Asked thousands of times a step, mostly about hits.
        asker = Asker(req_context.req_id, req_context.get_offload_key_position(key))
        answer = self._catalog.lookup(Key(key), time.monotonic(), asker)
        return _VLLM_HIT if answer is _HIT else _ANSWERS[answer]

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """A step is scheduled: tiers go and look for what its lookups did not find in memory."""
        if self._catalog is not None:
            self._catalog.flush(time.monotonic())

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forget what is remembered of a request's lookups."""
        if self._catalog is not None:
            self._catalog.forget_asker(req_context.req_id)

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        """Return what kind of tier serves a hit. vLLM has no word for a bucket or a shared filesystem yet."""
        is_local = isinstance(self._tiers[0], FileTier) if self._tiers else True
        return CacheHitSource.DISK if is_local else CacheHitSource.EXTERNAL_UNSPECIFIED

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Mark chunks as recently used."""
        if self._catalog is not None:
            self._catalog.touch(Key(key) for key in keys)

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> ChunkSpec:
        """Pin chunks and tell the ranks where they are."""
        wanted = tuple(Key(key) for key in keys)
        if self._catalog is None:
            return ChunkSpec(0, wanted, (NOWHERE,) * len(wanted), ())
        grant = self._catalog.prepare_load(wanted, time.monotonic())
        return ChunkSpec(grant.ticket, grant.keys, grant.locations, self._places)

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        """Reserve room for what is not stored yet; fewer keys, or none, when room is short or storage too slow."""
        if self._catalog is None:
            return PrepareStoreOutput([], ChunkSpec(0, (), (), ()), [])
        grant = self._catalog.reserve((Key(key) for key in keys), time.monotonic())
        self._collect_events()
        if grant is None:
            return PrepareStoreOutput([], ChunkSpec(0, (), (), ()), [])
        spec = ChunkSpec(grant.ticket, grant.keys, grant.locations, self._places)
        return PrepareStoreOutput([OffloadKey(key) for key in grant.keys], spec, [])

    # What the ranks report. vLLM's own complete_store and complete_load carry no outcome and survive no reset, so
    # tickets settle here, from our own message, and those two have nothing left to do.

    def settle(self, reports: Mapping[int, TicketReport]) -> set[OffloadKey]:
        """Take the ranks' word on tickets: READY, dropped, or gone. Returns the chunks that a load did not bring."""
        lost: set[OffloadKey] = set()
        if self._catalog is None:
            return lost
        now_s = time.monotonic()
        for ticket, report in reports.items():
            settled = self._catalog.report(ticket, report.ranks, report.failures, now_s)
            if settled is not None:
                self._telling.settled(settled)
            if settled is not None and not settled.is_store:
                lost.update(OffloadKey(key) for key in settled.failed)
            if settled is not None and settled.failed:
                counts: dict[Outcome, int] = {}
                for outcome in settled.failed.values():
                    counts[outcome] = counts.get(outcome, 0) + 1
                logger.debug(
                    "%s of %d chunks: %s",
                    "Store" if settled.is_store else "Load",
                    len(settled.keys),
                    ", ".join(f"{number} {outcome.value}" for outcome, number in counts.items()),
                )
        self._collect_events()
        return lost

    def has_pending_work(self) -> bool:
        """Keep an idle engine stepping until every rank has reported every ticket."""
        return self._catalog is not None and self._catalog.open_tickets > 0

    def is_waiting(self) -> bool:
        """Whether some rank moves bytes, or somebody looks into a shared tier."""
        return self.has_pending_work() or any(isinstance(tier, SharedTier) and tier.is_looking for tier in self._tiers)

    def get_stats(self) -> OffloadingConnectorStats | None:
        """Return what has changed in our metrics since the last call."""
        return self._telling.take([tier for tier in self._tiers if isinstance(tier, SharedTier)])

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return what was stored and removed since the last call."""
        events, self._events = self._events, []
        return events

    def reset_cache(self) -> None:
        """Forget everything. Slots that a rank may still touch come back as their tickets settle."""
        if self._catalog is not None:
            self._catalog.clear()
            self._events = []  # as with vLLM's own managers, its "all blocks cleared" says the rest
            logger.info("Cleared by reset_prefix_cache: nothing that was stored before is served any more")

    def shutdown(self) -> None:
        """Close the tiers: indexes are written out, locks released, background work ends."""
        for tier in self._tiers:
            tier.close()

    def _collect_events(self) -> None:
        assert self._catalog is not None
        stored, removed = self._catalog.take_changes()
        if not self._offloading.enable_kv_cache_events:
            return
        locality = Locality.LOCAL if isinstance(self._tiers[0], FileTier) else Locality.REMOTE
        for keys, is_removal in ((stored, False), (removed, True)):
            if keys:
                self._events.append(
                    OffloadingEvent(
                        keys=[OffloadKey(key) for key in keys],
                        medium=Medium.STORAGE,
                        removed=is_removal,
                        locality=locality,
                    )
                )
