"""A rank's half of our connector. ``NixlConnectorWorker`` takes our messages and reports outcomes;
``NixlOffloadingWorker`` turns tickets into jobs of the engine.

Threading: called by the worker's main thread. Tiers open on threads of their own, and the engine has pump threads.
Failure: submitting never raises and never blocks on I/O. A job that cannot be done fails, and a failed load is
recomputed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.v1.kv_offload.base import GPULoadStoreSpec, LoadStoreSpec, OffloadingSpec, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.config import OffloadingConfig

from nixl_offload.catalog.catalog import MoveTicket, StoreTicket
from nixl_offload.chunk.authentication import ChunkKeys
from nixl_offload.config import Config
from nixl_offload.engine import Completion, Job, RankEngine, WorkKind
from nixl_offload.engine.host import HostSlab
from nixl_offload.engine.paths import RankMemory
from nixl_offload.engine.pump import LEAKED, leak
from nixl_offload.engine.streams import READY, device_of
from nixl_offload.errors import LayoutError, NotSupportedError
from nixl_offload.hardware.machine import machine_token
from nixl_offload.tiers.base import Place
from nixl_offload.tiers.slab.file import SlabPlace
from nixl_offload.types import Outcome
from nixl_offload.vllm.adapters import LoadedAdapters
from nixl_offload.vllm.chunks import RankChunks, of_no_blocks
from nixl_offload.vllm.kv_caches import keeps_prefix
from nixl_offload.vllm.messages import (
    NOTHING,
    LoadSample,
    RankGeometry,
    RankStatus,
    StepMetadata,
    TicketReport,
    TicketSpec,
    WeightsAnswer,
    WorkerReport,
)
from nixl_offload.vllm.rank_identity import sources_of, weights_digest
from nixl_offload.vllm.rank_shards import RankShards
from nixl_offload.vllm.rank_tiers import RankTiers, open_host, plan_tiers
from nixl_offload.vllm.vllm_internals import (
    find_worker,
    finish_before_blocks_change,
    models_of_worker,
    pop_loading_request,
    store_on_every_rank,
    watch_adapters,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.worker.worker_base import WorkerBase

    from nixl_offload.vllm.connector import NixlOffloadSpec

logger = logging.getLogger(__name__)

OPENING_EVERY_S = 0.05
"""How often a rank checks its tiers while some are being opened."""
STATUS_EVERY_S = 0.25
"""How often a rank checks its tiers while no job is submitted or ends."""


class NixlConnectorWorker(OffloadingConnectorWorker):
    """vLLM's connector worker, without its assertions that storage never fails."""

    worker: NixlOffloadingWorker | None
    spec: NixlOffloadSpec

    def __init__(self, spec: OffloadingSpec, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(spec, vllm_config, kv_cache_config)
        store_on_every_rank(self)  # each has storage of its own
        self._report = NOTHING
        """The next report. ``_news`` returns one that may be written to."""
        self.failed_blocks: set[int] = set()
        """The blocks that ``take_failed_blocks`` would return."""
        self._keeps_prefix = keeps_prefix(kv_cache_config, len(spec.config.groups))
        self._geometry: RankGeometry | None = None
        """Set once the KV caches are registered."""
        self._has_sent_geometry = False
        self._vllm_worker: WorkerBase | None = None
        self._has_warned_of_weights = False

    @property
    def rank_worker(self) -> NixlOffloadingWorker:
        """Our worker. Exists once the KV caches are registered."""
        assert isinstance(self.worker, NixlOffloadingWorker)
        return self.worker

    # Start, sleep

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """As vLLM's. Also records this rank's geometry. Caches that are not understood keep offloading off."""
        sources: tuple[str, ...] = ("(not known)",)
        self.spec.kv_caches = kv_caches
        super().register_kv_caches(kv_caches)
        self.spec.kv_caches = {}  # they go away while the engine sleeps
        self._vllm_worker = find_worker(self.vllm_config)
        if self._vllm_worker is not None:
            watch_adapters(self._vllm_worker, self.rank_worker.adapters.loaded)
            finish_before_blocks_change(self._vllm_worker)
            sources = sources_of(models_of_worker(self._vllm_worker))
        backends: set[str] = set()
        if any(group.layer_names for group in self.kv_cache_config.kv_cache_groups):
            # For a rank without layers vLLM would name the backend that it prefers.
            backends = {backend.get_name() for backend in get_current_attn_backends(self.vllm_config)}
        geometry = self.rank_worker.geometry(backends)
        self._geometry = replace(geometry, weights=self._digest_weights(), sources=sources)

    def geometry(self) -> RankGeometry | None:
        """Return this rank's geometry; None until the KV caches are registered. The caller must send it."""
        self._has_sent_geometry = self._geometry is not None
        return self._geometry

    def sleep(self) -> None:
        """Finish all jobs and release KV memory. Raises as ``NixlOffloadingWorker.sleep``."""
        if self.worker is not None:
            # Submits the stores that the last step left for the next one, when their blocks would be gone.
            self.handle_preemptions(OffloadingConnectorMetadata({}, {}, set()))
            self.worker.sleep()

    def wake_up(self) -> None:
        """Use KV memory again. It is where it was."""
        if self.worker is not None:
            self.worker.wake_up()

    def _digest_weights(self) -> str | None:
        """Return a digest of the weights on this rank; None, with one line in the log, if that fails."""
        try:
            if self._vllm_worker is None:
                raise NotSupportedError("vLLM's worker was not found in this process")
            return weights_digest(models_of_worker(self._vllm_worker))
        except Exception as error:  # noqa: BLE001 - without a digest nothing stored is trusted
            if not self._has_warned_of_weights:
                logger.warning("Which weights this rank has loaded cannot be told: %s", error)
            self._has_warned_of_weights = True
            return None

    # A step

    def start_moves(self, metadata: StepMetadata) -> None:
        """Open the tiers that the message names, submit its moves, and answer its question about weights."""
        self.rank_worker.open(metadata.places, metadata.opening)
        for ticket in metadata.moves:
            self.rank_worker.submit_moves(ticket)
        if question := metadata.weights_question:
            self._news().weights[self.spec.config.parallel.rank] = WeightsAnswer(question, self._digest_weights())

    def take_results(self) -> KVConnectorTransferResults:
        """Return the requests whose load has ended since the last call, and note outcomes for the next report.

        If no prefix of a failed load can be kept, its request is received *and* failed, so that it resumes. Stores
        never hold a request's blocks.
        """
        received: set[str] = set()
        failed: set[str] = set()
        worker = self.rank_worker
        if worker.has_news:
            jobs, tickets = worker.engine.finished(), worker.take_tickets()
            for job in jobs:
                request, has_failed = self._report_job(job)
                if request is not None:
                    received.add(request)
                    if has_failed and not self._keeps_prefix:
                        failed.add(request)
            for ticket, failures in tickets.items():
                self._news().tickets[ticket] = TicketReport(1, failures)
            if status := worker.take_status(at_once=bool(jobs or tickets)):
                self._news().ranks.update(status)
        return KVConnectorTransferResults(set(), received, failed)

    def _report_job(self, result: Completion) -> tuple[str | None, bool]:
        """Report one of vLLM's jobs; return the request that it has loaded for, and whether some of that failed."""
        report, job, failures = self._news(), result.job, _failures_of(result.outcomes)
        report.mark_completed(result.job_id)
        report.tickets[job.ticket] = TicketReport(1, failures)
        is_load = job.kind is WorkKind.LOAD
        if result.bytes_moved:
            stats = report.transfer_stats
            (stats.load if is_load else stats.store).record(num_bytes=result.bytes_moved, time=result.seconds)
        request = pop_loading_request(self, result.job_id)
        if is_load:
            report.loads.extend(
                LoadSample(share.tier, share.seconds, bool(share.failures), job.ticket) for share in result.shares
            )
            if failures:
                logger.warning(
                    "Load of request %s: %d of %d chunks not usable (%s)",
                    request,
                    len(failures),
                    len(result.outcomes),
                    "; ".join(result.errors),
                )
                if self._keeps_prefix:
                    for chunk in job.chunks:
                        if chunk.position in failures:
                            self.failed_blocks.update(chunk.block_ids.tolist())
        return request, is_load and bool(failures)

    def take_failed_blocks(self) -> set[int]:
        """Return the blocks that loads since the last call did not fill, if vLLM can keep the prefix before them."""
        failed, self.failed_blocks = self.failed_blocks, set()
        return failed

    def build_connector_worker_meta(self) -> WorkerReport:
        """Return what has finished since the last call. Also when nothing has: vLLM keeps an empty step to itself, and
        ``PrefillSpeed`` in ``load_decision`` needs the end of each.
        """
        if not self._has_sent_geometry and (geometry := self.geometry()) is not None:
            self._news().geometries[geometry.rank] = geometry
        if self.worker is not None and (adapters := self.worker.adapters.take()):
            self._news().adapters[self.spec.config.parallel.rank] = adapters
        if self.worker is not None and self._report is not NOTHING:
            self._report.work = self.worker.engine.take_work()
        report, self._report = self._report, NOTHING
        return report

    def _news(self) -> WorkerReport:
        if self._report is NOTHING:
            self._report = WorkerReport()
        return self._report


class NixlOffloadingWorker(OffloadingWorker):
    """vLLM's worker contract over our engine. Jobs of a tier that is not open on this rank fail.

    A pipeline stage may have no layer of a KV cache group, or of any. Its part of a job is then done at once.
    """

    def __init__(
        self,
        offloading: OffloadingConfig,
        config: Config,
        tensors: list[torch.Tensor],
        shards: RankShards,
        claimed_share: float = 1.0,
        *,
        engines: int = 1,
        keys: ChunkKeys | None = None,
    ) -> None:
        """Take the host memory that the config asks for, and compare transfer paths on a device.

        ``tensors``: the KV caches, those of ``shards.layout``. ``claimed_share``: the share of the device's memory that
        vLLM keeps for itself. ``engines``: data-parallel engines that divide the memory tier. ``keys``: from the
        config's ``authenticate``.

        This may take seconds. The start waits for it, because CUDA graphs are captured next, and no other thread may
        allocate device memory during that. Raises TierError if there is too little host memory: at start, and only
        there.
        """
        self._config = config
        self._rank = offloading.parallel.rank
        self._tensors = tensors
        self._shards = shards
        self.layout = shards.layout
        self._has_layers = any(group.refs for group in self.layout.groups)
        """Whether this rank has layers. If not, it needs neither memory nor storage."""
        self._host: HostSlab | None = None
        plans: list[str | None] = []
        if self._has_layers:
            self._host = open_host(config, offloading.parallel, self.layout, self._tensors, engines, keys)
            plans = plan_tiers(config, self._tensors, self.layout)
        self.engine = RankEngine(
            len(config.tiers) if self._has_layers else 0,
            relay_offsets=() if self._host is None else self._host.relay_offsets,
            load_timeout_s=config.load_timeout_s,
        )
        self._chunks = RankChunks(
            self.layout,
            [group.group_id for group in offloading.groups],
            shards.plan,
            self._rank,
            memory=None if config.memory is None else 0,
            shared=[position for position, tier in enumerate(config.tiers) if tier.is_shared],
        )
        self.device = device_of(self._tensors[0] if self._tensors else torch.empty(0))
        """That of the KV caches."""
        numbers = [number for _, number in shards.plan.shards_of(self._rank)]
        memory = RankMemory(self._tensors, self.layout, self.device, self._host, numbers, keys, claimed_share)
        self._tiers = RankTiers(self.engine, config, memory, self._rank, plans)
        self._status: RankStatus | None = None
        """The last reported status."""
        self._look_s = 0.0
        """When to look for a new status."""
        self._is_shut_down = False
        self.adapters = LoadedAdapters()
        """Records the LoRA adapters that are loaded on this rank."""

    def geometry(self, attention_backends: Iterable[str] = ()) -> RankGeometry:
        """Return this rank's geometry for the scheduler's half."""
        slot_bytes = tuple(self.layout.slot_bytes(group) for group in range(len(self.layout.groups)))
        backends, shards = tuple(sorted(attention_backends)), self._shards
        return RankGeometry(self._rank, slot_bytes, shards.digest, shards.plan, backends, machine_token())

    def open(self, places: Mapping[int, Place], opening: int = 0) -> None:
        """Begin to open tiers in the background; those that fail are tried again. ``take_status`` says which are open.

        ``places``: by position in the config. A repeated call for a tier does nothing. With a new ``opening``, all open
        tiers are closed first; they must have no jobs.
        """
        if not self._has_layers or self._is_shut_down:
            self._tiers.number = opening
            return
        self._tiers.open(places, opening)
        for position, place in places.items():
            self._chunks.take_places(position, place.slots if isinstance(place, SlabPlace) else None)

    def sleep(self) -> None:
        """Drain for at most ``drain_timeout``, then release every registration: KV memory goes away. Idempotent.

        Until ``wake_up`` every job fails. Raises TierError if a transfer that does not end may still write to that
        memory: it must stay.
        """
        if self._has_layers and not self._is_shut_down:
            self._tiers.sleep(self._config.drain_timeout_s)

    def wake_up(self) -> None:
        """Open again, at the same places, the tiers that ``sleep`` has closed. KV memory is back at the same addresses.

        Waits some seconds at most. Slower tiers open in the background; their jobs fail until then.
        """
        self._tiers.wake_up()

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        """Called by vLLM's ``handle_preemptions``: queue a store. Always True, for a failure is an outcome."""
        assert isinstance(dst_spec, TicketSpec)
        self._submit(job_id, dst_spec, src_spec)
        return True

    def submit_load(
        self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        """Called by vLLM's ``start_kv_transfers``: queue a load. None is ``expedited``; such loads are turned off."""
        assert isinstance(src_spec, TicketSpec)
        self._submit(job_id, src_spec, dst_spec)
        return True

    def _submit(self, job_id: int, spec: TicketSpec, blocks: GPULoadStoreSpec) -> None:
        """Queue vLLM's job for its KV ``blocks``. The engine reports its end, ``take_tickets`` that of a load's
        promotions. All chunks are DROPPED if this rank has since loaded other content for the adapter.
        """
        self._look_s = 0.0
        self._tiers.take_opened()
        ticket = spec.ticket
        refused = None
        try:
            chunks = self._chunks.of_job(ticket, blocks)
        except LayoutError as error:
            logger.error("Job %d refused: %s", job_id, error)
            chunks, refused = of_no_blocks(ticket, blocks.block_ids), (Outcome.FAILED, str(error))
        if refused is None and not self.adapters.agrees(spec.adapter, self._rank):
            refused = (Outcome.DROPPED, "the LoRA adapter was replaced")
        fence = self.device.compute_fence()
        if isinstance(ticket, StoreTicket):
            job = Job(WorkKind.STORE, chunks, len(ticket.keys), fence, job_id, ticket.ticket)
        else:
            promoted = [at for at, slot in enumerate(ticket.promotion_slots) if slot is not None]
            tickets = ticket.ticket, ticket.promotion_ticket
            job = Job(WorkKind.LOAD, chunks, len(ticket.keys), fence, job_id, *tickets, promoted)
        job.refused = refused
        self.engine.submit(job)

    def submit_moves(self, ticket: MoveTicket) -> None:
        """Queue moves after all other jobs. ``take_tickets`` reports their end."""
        self._look_s = 0.0
        self._tiers.take_opened()
        chunks = self._chunks.of_moves(ticket)
        is_fetch = self._config.memory is not None and ticket.targets[0].tier == 0
        kind = WorkKind.FETCH if is_fetch else WorkKind.WRITE_THROUGH
        self.engine.submit(Job(kind, chunks, len(ticket.keys), READY, ticket=ticket.ticket))

    def take_tickets(self) -> dict[int, dict[int, Outcome]]:
        """Return how promotions and write-throughs ended since the last call: ticket -> failures by position."""
        return {result.job_id: _failures_of(result.outcomes) for result in self.engine.finished_tickets()}

    def take_status(self, *, at_once: bool = False) -> dict[int, RankStatus]:
        """Return this rank's status, by its number; empty if that has not changed since the last call.

        Called in every step: a change that came with no job is reported ``STATUS_EVERY_S`` late, unless ``at_once``.
        """
        now_s = time.monotonic()
        if now_s < self._look_s and not at_once:
            return {}
        self._look_s = now_s + (OPENING_EVERY_S if self._tiers.is_opening else STATUS_EVERY_S)
        self._tiers.take_opened()
        every = frozenset(range(len(self._config.tiers)))
        is_open = self.engine.open_tiers if self._has_layers else every
        status = RankStatus(is_open, self._tiers.failed, self.engine.statuses(), self._tiers.number)
        if status == self._status or not (status.open or status.failed):
            return {}
        self._status = status
        return {self._rank: status}

    def wait(self, job_ids: set[int]) -> None:
        """Block until the source blocks of stores may be reused and loads have finished."""
        self.engine.wait(job_ids)

    @property
    def has_news(self) -> bool:
        """Whether a ``take_`` method may have news. Quick: asked after each forward pass."""
        return self.engine.has_jobs or time.monotonic() >= self._look_s

    def get_finished(self) -> list[TransferResult]:
        """Return nothing: our connector worker asks the engine, which keeps outcomes per chunk."""
        return []

    def shutdown(self) -> None:
        """Drain within a deadline and release everything."""
        self._is_shut_down = True
        has_ended = self._tiers.close()
        self.engine.close(self._config.drain_timeout_s)
        if self._host is not None and has_ended and not LEAKED:
            self._host.close()
        elif self._host is not None:
            leak(self._host)  # a copy that did not end may still use it, and freeing it would wait for that copy


def _failures_of(outcomes: Iterable[Outcome]) -> dict[int, Outcome]:
    """Return the outcomes that are not OK, by position."""
    return {position: outcome for position, outcome in enumerate(outcomes) if outcome is not Outcome.OK}
