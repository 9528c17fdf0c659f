"""A rank's half behind vLLM's connector: our messages beside vLLM's jobs (see ``worker``), and reports of failures.

Threading: called by the worker's main thread. Nothing raises for reasons of storage.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.v1.kv_offload.base import OffloadingSpec

from nixl_offload.catalog import LoadTicket
from nixl_offload.errors import NotSupportedError
from nixl_offload.types import Outcome
from nixl_offload.vllm.adapters import LoadedAdapters
from nixl_offload.vllm.kv_caches import keeps_prefix
from nixl_offload.vllm.messages import (
    NOTHING,
    RankGeometry,
    StepMetadata,
    TicketReport,
    WeightsAnswer,
    WorkerReport,
)
from nixl_offload.vllm.rank_identity import allocation_digest, sources_of
from nixl_offload.vllm.spec import NixlOffloadSpec
from nixl_offload.vllm.tensor_digests import weights_digest
from nixl_offload.vllm.vllm_internals import (
    find_worker,
    finish_before_blocks_change,
    models_of_worker,
    pop_loading_request,
    store_on_every_rank,
    submit_deferred_stores,
    watch_adapters,
)
from nixl_offload.vllm.worker import FinishedJob, NixlOffloadingWorker, failures_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.worker.worker_base import WorkerBase

logger = logging.getLogger(__name__)


class NixlConnectorWorker(OffloadingConnectorWorker):
    """vLLM's connector worker, without its assertions that storage never fails."""

    worker: NixlOffloadingWorker | None

    def __init__(self, spec: OffloadingSpec, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(spec, vllm_config, kv_cache_config)
        store_on_every_rank(self)  # each has storage of its own
        self._report = NOTHING
        """What is not reported yet. ``_news`` returns one that may be written to."""
        self.failed_blocks: set[int] = set()
        """Those that ``take_failed_blocks`` would return."""
        self._failed_requests: set[str] = set()
        self._keeps_prefix = keeps_prefix(kv_cache_config, len(spec.config.groups))
        self._adapters = LoadedAdapters()
        self._geometry: RankGeometry | None = None
        """What was allocated and loaded, once the KV caches are registered."""
        self._has_told_geometry = False
        self._vllm_worker: WorkerBase | None = None
        self._weights_unknown = False

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """As vLLM's; and take down what was allocated and loaded. Where the caches are not understood, the scheduler's
        half stays off.
        """
        digest = ""
        sources: tuple[str, ...] = ("(not known)",)
        try:
            digest = allocation_digest(self.vllm_config, self.kv_cache_config, kv_caches)
        except Exception:
            logger.exception("What lies where in the KV caches of this rank is not understood")
        assert isinstance(self.spec, NixlOffloadSpec)
        self.spec.take_kv_caches(kv_caches)
        super().register_kv_caches(kv_caches)
        self._vllm_worker = find_worker(self.vllm_config)
        if self._vllm_worker is not None:
            watch_adapters(self._vllm_worker, self._adapters.loaded)
            finish_before_blocks_change(self._vllm_worker)
            sources = sources_of(models_of_worker(self._vllm_worker))
        self.rank_worker.adapters = self._adapters
        backends: set[str] = set()
        if any(group.layer_names for group in self.kv_cache_config.kv_cache_groups):
            # Of a rank without layers vLLM would name the backend that it prefers.
            backends = {backend.get_name() for backend in get_current_attn_backends(self.vllm_config)}
        geometry = self.rank_worker.geometry(digest, backends)
        self._geometry = replace(geometry, weights=self._digest_weights(), sources=sources)

    def sleep(self) -> None:
        """Finish what is under way and let go of KV memory. As ``NixlOffloadingWorker.sleep``."""
        if self.worker is not None:
            # What the last step left for the next one: its blocks are gone then.
            submit_deferred_stores(self)
            self.rank_worker.sleep()

    def wake_up(self) -> None:
        """Take KV memory again, which is where it was."""
        if self.worker is not None:
            self.rank_worker.wake_up()

    def _digest_weights(self) -> str | None:
        """Return a digest of the weights on this rank; None, with one line in the log, where there is none."""
        try:
            if self._vllm_worker is None:
                raise NotSupportedError("vLLM's worker was not found in this process")
            return weights_digest(models_of_worker(self._vllm_worker))
        except Exception as error:  # noqa: BLE001 - without a digest nothing stored is trusted
            if not self._weights_unknown:
                logger.warning("Which weights this rank has loaded cannot be told: %s", error)
            self._weights_unknown = True
            return None

    @property
    def rank_worker(self) -> NixlOffloadingWorker:
        """Our worker. Exists once the KV caches are registered."""
        assert isinstance(self.worker, NixlOffloadingWorker)
        return self.worker

    def geometry(self) -> RankGeometry | None:
        """Return what this rank has, once the KV caches are registered. The caller passes it on."""
        self._has_told_geometry = self._geometry is not None
        return self._geometry

    def handle_preemptions(self, kv_connector_metadata: OffloadingConnectorMetadata) -> None:
        """Before each forward pass: submit the stores of the step before, as vLLM does, and fence this step's loads.

        vLLM submits loads after it has launched the forward pass. With a fence of that moment they would wait for it.
        """
        super().handle_preemptions(kv_connector_metadata)
        if kv_connector_metadata.load_jobs:
            self.rank_worker.fence_loads()

    def start_kv_transfers(self, metadata: OffloadingConnectorMetadata) -> None:
        """Submit vLLM's loads, then our moves; and open the tiers that the message names."""
        try:
            super().start_kv_transfers(metadata)
        finally:
            if metadata.load_jobs:
                self.rank_worker.end_step()
        if isinstance(metadata, StepMetadata):
            self.rank_worker.open(metadata.places, metadata.opening)
            for ticket in metadata.moves:
                self.rank_worker.submit_moves(ticket)
            if question := metadata.weights_question:
                self._news().weights[self.spec.config.parallel.rank] = WeightsAnswer(question, self._digest_weights())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """As vLLM's; stores never hold a request's blocks."""
        return set(), self.take_received()

    def take_received(self) -> set[str]:
        """Collect outcomes, and return the requests whose load has ended. One that failed is received *and* failed, so
        that its request resumes.
        """
        received: set[str] = set()
        worker = self.worker
        assert worker is not None
        if not worker.has_news:
            return received
        jobs, tickets = worker.take_finished(), worker.take_tickets()
        for job in jobs:
            self._take_job(worker, job, received)
        for ticket, failures in tickets.items():
            self._news().tickets[ticket] = TicketReport(1, failures)
        if (jobs or tickets) and (work := worker.take_work()) is not None:
            report = self._news()
            report.work = work if report.work is None else report.work.merge(work)
        if status := worker.take_status():
            self._news().ranks.update(status)
        return received

    def _take_job(self, worker: NixlOffloadingWorker, job: FinishedJob, received: set[str]) -> None:
        report, result, is_load = self._news(), job.result, isinstance(job.ticket, LoadTicket)
        failures = failures_of(result.outcomes)
        report.mark_completed(result.job_id)
        report.tickets[job.ticket.ticket] = TicketReport(1, failures)
        if result.bytes_moved:
            stats = report.transfer_stats
            (stats.load if is_load else stats.store).record(num_bytes=result.bytes_moved, time=result.seconds)
        request = pop_loading_request(self, result.job_id)
        if request is not None:
            received.add(request)
        if is_load:
            if failures:
                self._fail_load(job, request, failures)
            report.loads.extend(worker.samples(job))

    def _news(self) -> WorkerReport:
        if self._report is NOTHING:
            self._report = WorkerReport()
        return self._report

    def take_failed_requests(self) -> set[str]:
        """Return requests whose load failed since the last call, where no prefix of it can be kept."""
        failed, self._failed_requests = self._failed_requests, set()
        return failed

    def take_failed_blocks(self) -> set[int]:
        """Return blocks that a load did not fill since the last call, where vLLM keeps what lies before them."""
        failed, self.failed_blocks = self.failed_blocks, set()
        return failed

    def build_connector_worker_meta(self) -> WorkerReport:
        """Return what has finished since the last call.

        Also when nothing has: vLLM keeps an empty step to itself, and our scheduler's half counts them: ``step_clock``.
        """
        if not self._has_told_geometry and (geometry := self.geometry()) is not None:
            self._news().geometries[geometry.rank] = geometry
        if adapters := self._adapters.take():
            self._news().adapters[self.spec.config.parallel.rank] = adapters
        report, self._report = self._report, NOTHING
        return report

    def _fail_load(self, job: FinishedJob, request: str | None, failures: Mapping[int, Outcome]) -> None:
        logger.warning(
            "Load of request %s: %d of %d chunks not usable (%s)",
            request,
            len(failures),
            len(job.result.outcomes),
            "; ".join(job.result.errors),
        )
        if self._keeps_prefix:
            for chunk in job.result.chunks:
                if chunk.position in failures:
                    self.failed_blocks.update(chunk.block_ids.tolist())
        elif request is not None:
            self._failed_requests.add(request)
