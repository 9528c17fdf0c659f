"""The scheduler's half behind vLLM's ``OffloadingManager``: translates vLLM's questions into the catalog's.

Threading: called by the scheduler's thread. Nothing here blocks on storage and nothing raises for reasons of storage.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

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

from nixl_offload.catalog import NOWHERE, Catalog
from nixl_offload.catalog.estimate import LoadOrRecompute, Part
from nixl_offload.config import Config
from nixl_offload.engine import Standing, Work
from nixl_offload.errors import ConfigError, NixlOffloadError, TierError
from nixl_offload.tiers.memory.tier import MemoryTier
from nixl_offload.tiers.shared.tier import SharedTier
from nixl_offload.tiers.slab.tier import SlabTier
from nixl_offload.types import Asker, Key, Lookup, key_group
from nixl_offload.vllm.messages import ChunkSpec, LoadSample, MoveSpec, Place, RankGeometry, TicketReport
from nixl_offload.vllm.metrics import Telling
from nixl_offload.vllm.open_tiers import chain_options
from nixl_offload.vllm.opening import Opening

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)

_HIT, _VLLM_HIT = Lookup.HIT, LookupResult.HIT
_ANSWERS = {
    Lookup.MISS: LookupResult.MISS,
    Lookup.PENDING: LookupResult.HIT_PENDING,
    Lookup.RETRY: LookupResult.RETRY,
}

_NO_WINDOWS: Mapping[int, int] = MappingProxyType({})

SLOW_FAILURE_S = 1.0
"""A load that fails sooner was refused, and says nothing of how long loads take."""
WEIGHTS_WAIT_S = 1.5
"""A start waits so long at most to learn which weights a local model has."""
SMALL_WEIGHTS_WAIT_S = 30.0
"""Likewise, for a model that is read in a second: it takes longer only where the machine is too busy."""
STORE_BACKLOG_STAGINGS = 4
"""Stores in flight, per rank, as a multiple of the staging size; beyond it chunks are dropped, not queued."""


class _Face(NamedTuple):
    """How vLLM and llm-d's indexer name a kind of tier."""

    medium: Medium
    locality: Locality
    source: CacheHitSource
    tells_all: bool
    """Whether every chunk that goes is told of. vLLM remembers until then what a chunk was made of."""


_FACES = {
    MemoryTier: _Face(Medium.CPU, Locality.LOCAL, CacheHitSource.HOST, True),
    SlabTier: _Face(Medium.STORAGE, Locality.LOCAL, CacheHitSource.DISK, True),
    # vLLM has no word for a bucket or a shared filesystem yet.
    SharedTier: _Face(Medium.STORAGE, Locality.REMOTE, CacheHitSource.EXTERNAL_UNSPECIFIED, False),
}


@dataclass(frozen=True, slots=True)
class Refused:
    """State of a request whose keys are worth nothing: it is neither stored nor loaded."""


@dataclass(frozen=True, slots=True)
class _Allowed:
    """The tiers that a request's ``kv_load_tiers`` lets it load from."""

    tiers: frozenset[int]


class _Worth(NamedTuple):
    """What was decided about a request's hit, so that it is decided once."""

    first_token: int
    tokens: int
    loaded_tokens: int
    parts: tuple[Part, ...] = ()
    """Which tiers have them, from the beginning on; empty where it was not asked."""


class Looked(NamedTuple):
    """What a request asked about and found, to be counted once it is scheduled."""

    first_token: int
    asked_tokens: int
    """Whole chunks behind what the GPU's cache has; 0: counted."""
    found_tokens: int


class NixlOffloadManager(OffloadingManager):
    """Answers vLLM from the catalog. Until ``open`` every lookup is a miss and nothing is stored."""

    def __init__(self, offloading: OffloadingConfig, config: Config, vllm_config: VllmConfig) -> None:
        """Remember what ``open`` will need; touches no storage."""
        self._offloading = offloading
        self._config = config
        self._vllm_config = vllm_config
        self._opening: Opening | None = None
        self._catalog: Catalog | None = None
        self._tiers: list[MemoryTier | SlabTier | SharedTier] = []
        self._faces: list[_Face] = []
        self._places: tuple[Place, ...] = ()
        self._moves: list[MoveSpec] = []
        self._events: list[OffloadingEvent] = []
        self._removed: list[OffloadKey] = []
        self._token_bytes: dict[int, float] = {}
        """By KV cache group, on each rank."""
        self._speeds: LoadOrRecompute | None = None
        self._telling = Telling([tier.kind for tier in config.tiers])
        self._telling_failed = False

    def open(
        self,
        ranks: Sequence[RankGeometry],
        *,
        wait_s: float = WEIGHTS_WAIT_S,
        small_wait_s: float = SMALL_WEIGHTS_WAIT_S,
    ) -> None:
        """Open the tiers, once. ``ranks``: what every rank has told, in order.

        Where a local model's files must be read to know which weights they are, waits ``wait_s`` at most, and
        ``small_wait_s`` for a small one; what takes longer goes on in the background, tiers included, and the manager
        takes them over when the next request comes.

        Raises TierError or ConfigError, for the operator, when a tier cannot be used: at start, and only there. Called
        again (vLLM repeats the handshake when it wakes up) it leaves the tiers, and the lock they hold, as they are.
        """
        if self._opening is not None:
            return
        self._opening = opening = Opening(self._config, self._vllm_config, self._offloading, ranks)
        if not opening.wait(wait_s, small_wait_s):
            logger.info("Offloading begins as soon as the model's files have been read, to know which weights they are")
        self._take_over(at_start=True)

    def _take_over(self, *, at_start: bool = False) -> None:
        """Take the tiers over once they are open. What is wrong with one ends nothing but a start."""
        opened = self._opening.take() if self._opening is not None else None
        if opened is None:
            return
        if isinstance(opened, Exception):
            if at_start and isinstance(opened, (TierError, ConfigError)):
                raise opened
            trace = None if isinstance(opened, NixlOffloadError) else opened
            logger.error("Offloading is off until the engine restarts: %s", opened, exc_info=trace)
            return
        namespace, self._tiers = opened
        parallel = self._offloading.parallel
        self._places = tuple(tier.place for tier in self._tiers)
        self._faces = [_FACES[type(tier)] for tier in self._tiers]
        blocks = self._offloading.cache.blocks_per_chunk
        self._token_bytes = {
            group.group_id: namespace.slot_bytes(group.group_id) / (group.tokens_per_block * blocks)
            for group in self._offloading.groups
        }
        self._speeds = LoadOrRecompute(len(self._tiers), ranks=parallel.world_size)
        self._catalog = Catalog(
            self._tiers,
            world_size=parallel.world_size,
            slot_bytes=lambda key: namespace.slot_bytes(key_group(key)),
            store_backlog_bytes=STORE_BACKLOG_STAGINGS * self._config.staging_bytes,
            chain=chain_options(self._config, parallel),
            store_after=self._config.store_after,
        )

    # What vLLM asks while it schedules.

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Every request is offloaded chunk by chunk."""
        if self._catalog is None:
            self._take_over()
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Say whether one chunk can be loaded."""
        if self._catalog is None or req_context.get_state(Refused) is not None:
            return LookupResult.MISS
        # Asked thousands of times a step, mostly about hits.
        asker = Asker(req_context.req_id, req_context.get_offload_key_position(key))
        answer = self._catalog.lookup(Key(key), time.monotonic(), asker, self._allowed(req_context))
        return _VLLM_HIT if answer is _HIT else _ANSWERS[answer]

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """A step is scheduled: tiers go and look for what its lookups did not find in memory, and moves begin."""
        if self._catalog is None:
            return
        now_s = time.monotonic()
        self._catalog.flush(now_s)
        self._moves += [MoveSpec(*grant) for grant in self._catalog.begin_moves(now_s)]

    def take_moves(self) -> tuple[list[MoveSpec], tuple[Place, ...]]:
        """Return the moves to tell the ranks of, and where the ranks find the tiers."""
        moves, self._moves = self._moves, []
        return moves, self._places

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forget what is remembered of a request's lookups."""
        if self._catalog is not None:
            self._catalog.forget_asker(req_context.req_id)

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        """Return what kind of tier serves a hit."""
        position = self._catalog.where(Key(key), self._allowed(req_context)) if self._catalog is not None else None
        return CacheHitSource.EXTERNAL_UNSPECIFIED if position is None else self._faces[position].source

    def worth_loading(
        self,
        keys: Sequence[OffloadKey],
        req_context: ReqContext,
        first_token: int,
        tokens: int,
        chunk_tokens: int,
        windows: Mapping[int, int] = _NO_WINDOWS,
    ) -> int:
        """Return how many of ``tokens``, which ``keys`` hold from ``first_token`` on, are loaded sooner than computed.

        ``keys`` are the chunks of ``chunk_tokens`` that cover them, in order; the first may begin before that token,
        and what lies behind the last is taken with it, or not at all. ``windows``: the tokens at most that are loaded
        of a KV cache group which looks no farther back; all of the others is. A request that is asked about again in
        the same words gets the same answer.
        """
        if self._catalog is None or self._speeds is None:
            return tokens
        asked = req_context.get_state(_Worth)
        if asked is not None and asked[:2] == (first_token, tokens):
            return asked.loaded_tokens
        allowed, end = self._allowed(req_context), first_token + tokens
        chunk_bytes = round(chunk_tokens * sum(size for at, size in self._token_bytes.items() if at not in windows))
        parts: list[Part] = []
        at = first_token
        for key in keys:
            until = min(end, at - at % chunk_tokens + chunk_tokens)
            tier = self._catalog.where(Key(key), allowed)
            if tier is None:
                return tokens  # it will be seen when it is loaded
            if parts and parts[-1].tier == tier:
                last = parts.pop()
                parts.append(Part(tier, last.tokens + until - at, last.size_bytes + chunk_bytes))
            else:
                parts.append(Part(tier, until - at, chunk_bytes))
            at = until
        if not parts:
            return tokens
        last = parts.pop()
        window_bytes = round(sum(self._token_bytes[at] * min(tokens, most) for at, most in windows.items()))
        parts.append(Part(last.tier, last.tokens + end - at, last.size_bytes + window_bytes))
        worth = tokens
        if self._config.slow_hits == "skip":
            worth = self._speeds.choose(parts, first_token, time.monotonic()).tokens
        req_context.set_state(_Worth(first_token, tokens, worth, tuple(parts)))
        return worth

    def count_lookup(self, req_context: ReqContext) -> None:
        """Count what a request has looked up (``Looked``), once."""
        looked = req_context.get_state(Looked)
        if looked is None or not looked.asked_tokens:
            return
        req_context.set_state(Looked(0, 0, 0))
        worth = req_context.get_state(_Worth) if looked.found_tokens else None
        if worth is None or worth[:2] != (looked.first_token, looked.found_tokens):
            self._telling.looked_up(looked.asked_tokens, (), 0)
        else:
            self._telling.looked_up(looked.asked_tokens, worth.parts, worth.loaded_tokens)

    def observe_prefill(self, tokens: int, context_tokens: int, seconds: float) -> None:
        """Take note of a step that has computed ``tokens`` behind ``context_tokens`` others."""
        if self._speeds is not None:
            self._speeds.prefill.observe(tokens, seconds, context_tokens)

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Mark chunks as recently used."""
        if self._catalog is not None:
            self._catalog.touch(Key(key) for key in keys)

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> ChunkSpec:
        """Pin chunks and tell the ranks where they are."""
        wanted = tuple(Key(key) for key in keys)
        if self._catalog is None:
            return ChunkSpec(0, wanted, (NOWHERE,) * len(wanted), ())
        grant = self._catalog.prepare_load(wanted, time.monotonic(), self._allowed(req_context))
        self._collect_events()
        return ChunkSpec(grant.ticket, grant.keys, grant.locations, self._places, grant.landing_ticket, grant.landings)

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        """Reserve room for what is not stored yet; fewer keys, or none, when room is short or storage too slow."""
        if self._catalog is None or req_context.get_state(Refused) is not None:
            return PrepareStoreOutput([], ChunkSpec(0, (), (), ()), [])
        grant = self._catalog.reserve((Key(key) for key in keys), time.monotonic())
        self._collect_events()
        if grant is None:
            return PrepareStoreOutput([], ChunkSpec(0, (), (), ()), [])
        spec = ChunkSpec(grant.ticket, grant.keys, grant.locations, self._places)
        return PrepareStoreOutput([OffloadKey(key) for key in grant.keys], spec, [])

    # What the ranks report. vLLM's own complete_store and complete_load carry no outcome and survive no reset, so
    # tickets settle here, from our own message, and those two have nothing left to do.

    def settle(self, reports: Mapping[int, TicketReport], loads: Iterable[LoadSample] = ()) -> set[OffloadKey]:
        """Take the ranks' word on tickets: READY, dropped, or gone; and on how long tiers took to serve loads.

        Returns the chunks that a load did not bring.
        """
        lost: set[OffloadKey] = set()
        if self._catalog is None:
            return lost
        now_s = time.monotonic()
        for sample in loads:
            self._observe_load(sample, now_s)
        for ticket, report in reports.items():
            settled = self._catalog.report(ticket, report.ranks, report.failures, now_s)
            if settled is None:
                continue
            self._telling.settled(settled)
            if settled.kind == "load":
                lost.update(OffloadKey(key) for key in settled.failed)
            if settled.failed:
                outcomes = Counter(outcome.value for outcome in settled.failed.values())
                logger.debug("%s of %d chunks: %s", settled.kind, len(settled.keys), dict(outcomes))
        self._collect_events()
        return lost

    def take_work(self, work: Work | None, standings: Mapping[int, tuple[Standing, ...]]) -> None:
        """Take note, for metrics, of what the ranks have moved and of how their tiers stand."""
        try:
            if work is not None:
                self._telling.worked(work)
            if standings:
                self._telling.stand(standings)
        except Exception:  # noqa: BLE001 - metrics are not worth an engine
            self._complain_of_metrics()

    def has_pending_work(self) -> bool:
        """Keep an idle engine stepping until every rank has reported every ticket, and nothing waits to be moved."""
        return self._catalog is not None and (self._catalog.open_tickets > 0 or self._catalog.has_moves)

    def is_waiting(self) -> bool:
        """Whether some rank moves bytes, or somebody looks into a shared tier."""
        return self.has_pending_work() or any(isinstance(tier, SharedTier) and tier.is_looking for tier in self._tiers)

    def get_stats(self) -> OffloadingConnectorStats | None:
        """Return what has changed in our metrics since the last call."""
        if self._catalog is None:
            return None
        decisions = self._speeds.counts() if self._speeds is not None else {}
        try:
            return self._telling.take(self._tiers, self._catalog.counts(), decisions)
        except Exception:  # noqa: BLE001 - metrics are not worth an engine
            self._complain_of_metrics()
            return None

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return what was stored and removed since the last call."""
        events, self._events = self._events, []
        self._removed += [key for event in events if event.removed for key in event.keys]
        return events

    def take_removed(self) -> list[OffloadKey]:
        """Return the chunks of which ``take_events`` has told that they went from some tier, since the last call."""
        removed, self._removed = self._removed, []
        return removed

    def is_known(self, key: OffloadKey) -> bool:
        """Whether a chunk is in some tier, or on its way there."""
        return self._catalog is not None and any(tier.state(Key(key)) is not None for tier in self._tiers)

    def reset_cache(self) -> None:
        """Forget everything. Slots that a rank may still touch come back as their tickets settle."""
        if self._catalog is not None:
            self._catalog.clear()
            self._events = []  # as with vLLM's own managers, its "all blocks cleared" says the rest
            logger.info("Cleared by reset_prefix_cache: nothing that was stored before is served any more")

    def shutdown(self) -> None:
        """Close the tiers: indexes are written out, locks released, background work ends.

        vLLM has ended the ranks before: they drained what was on its way, and could not tell. What they may have
        finished is written down as a hint; its checksums tell, when it is loaded, whether they had.
        """
        if self._opening is not None:
            self._opening.close()
        verifies = self._config.verify == "checksum"
        pending = self._catalog.in_flight_stores() if self._catalog is not None and verifies else ()
        for position, tier in enumerate(self._tiers):
            if isinstance(tier, SlabTier):
                tier.close([key for at, key in pending if at == position])
            else:
                tier.close()

    def _complain_of_metrics(self) -> None:
        """Say once that metrics could not be told: by a rank of another config, for one."""
        if not self._telling_failed:
            logger.exception("Metrics are incomplete from now on; do all ranks run the same config and version?")
        self._telling_failed = True

    def _observe_load(self, sample: LoadSample, now_s: float) -> None:
        """A load that failed says only that it would have taken longer; one that failed quickly says nothing."""
        assert self._speeds is not None
        if sample.tier >= len(self._speeds.tiers):
            return  # of a rank with another config
        speed = self._speeds.tiers[sample.tier]
        least_s = max(speed.seconds(sample.size_bytes) or 0.0, SLOW_FAILURE_S) if sample.failed else 0.0
        if sample.seconds > least_s:
            speed.observe(sample.size_bytes, sample.seconds, now_s)

    def _allowed(self, req_context: ReqContext) -> frozenset[int] | None:
        """Return the tiers that a request may load from, None for all: ``kv_load_tiers`` in its transfer params."""
        chosen = req_context.load_tier_filter
        if chosen is TierFilter.ALL:
            return None
        known = req_context.get_state(_Allowed)
        if known is None:
            faces = enumerate(self._faces)
            known = _Allowed(frozenset(at for at, face in faces if chosen.allows(face.medium, face.locality)))
            req_context.set_state(known)
        return known.tiers

    def _collect_events(self) -> None:
        assert self._catalog is not None
        for change in self._catalog.take_changes():
            if self._offloading.enable_kv_cache_events:
                face = self._faces[change.tier]
                keys = [OffloadKey(key) for key in change.keys]
                self._events.append(
                    OffloadingEvent(keys, face.medium, change.removed, face.locality, removal_expected=face.tells_all)
                )
