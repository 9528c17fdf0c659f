"""A rank's half behind vLLM's worker: jobs in, outcomes out, and the failure channel that vLLM's own worker lacks.

Threading: called by the worker's main thread; the engine's pump thread is behind it. Submitting never raises and never
blocks on I/O: a job that cannot be done is a job that failed, and a failed load is a recompute.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import get_offloading_group_ids
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.config import OffloadingConfig

from nixl_offload.chunk.layout import split_job
from nixl_offload.config import Config
from nixl_offload.engine import ChainEngine, ChunkIO, JobResult, MoveIO, Standing, Work
from nixl_offload.engine.host import HostSlab
from nixl_offload.engine.opened_mover import OpenedMover
from nixl_offload.engine.pump import LEAKED
from nixl_offload.errors import LayoutError, NixlOffloadError
from nixl_offload.types import Outcome, key_group
from nixl_offload.vllm.kv_caches import canonical_layout, without_padding
from nixl_offload.vllm.messages import (
    ChainMetadata,
    ChunkSpec,
    LoadSample,
    MoveSpec,
    Place,
    RankGeometry,
    TicketReport,
    WorkerReport,
)
from nixl_offload.vllm.rank_engine import RankMemory, engine_of_nothing, open_engine, open_host, reach_tiers
from nixl_offload.vllm.rank_identity import allocation_digest

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from nixl_offload.vllm.spec import NixlOffloadSpec

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(slots=True)
class RankJob:
    """All there is to know of a job on this rank, from submission to report."""

    ticket: int
    is_store: bool
    chunks: tuple[ChunkIO, ...]


@dataclass(frozen=True, slots=True)
class RankResult:
    """One finished job with the job it belongs to."""

    job: RankJob
    result: JobResult


class NixlOffloadingWorker(OffloadingWorker):
    """vLLM's worker contract over our engine, which opens with the first job (it says where the tiers are).

    A pipeline stage may have no layer of a KV cache group, or of any: then it is done with its part of a job at once.
    """

    def __init__(
        self,
        offloading: OffloadingConfig,
        config: Config,
        kv_caches: CanonicalKVCaches,
        claimed_share: float = 1.0,
        *,
        off: bool = False,
    ) -> None:
        """Take the host memory that the config asks for, and reach shared tiers. ``claimed_share``: of the device's
        memory, what vLLM keeps for itself. ``off``: nothing will be stored or loaded, so open nothing.

        Raises TierError when there is not so much memory: at start, and only there. Storage that cannot be reached
        turns offloading off.
        """
        self._config = config
        self._rank = offloading.parallel.rank
        self._group_ids = tuple(group.group_id for group in offloading.groups)
        self._group_at = {group: at for at, group in enumerate(self._group_ids)}
        self._tensors: list[torch.Tensor] = [item.tensor for item in kv_caches.tensors]
        self.layout = canonical_layout(kv_caches, offloading.cache.blocks_per_chunk)
        self._engine = engine_of_nothing(self.layout)
        self._host: HostSlab | None = None
        self._reaches: list[OpenedMover] = []
        self._broken = off
        self._jobs: dict[int, RankJob] = {}
        self._refused: list[JobResult] = []
        self._refused_tickets: dict[int, int] = {}
        """Ticket of landings or moves that were refused -> how many chunks."""
        self._told: tuple[Standing, ...] = ()
        self._claimed_share = claimed_share
        if self._engine is None and not off:
            self._host = open_host(config, offloading.parallel, self.layout, self._tensors)
            self._reaches = self._unless_broken(lambda: reach_tiers(config, self._tensors, self.layout)) or []

    def geometry(self, digest: str, attention_backends: Iterable[str] = ()) -> RankGeometry:
        """Return what this rank tells the scheduler's half. ``digest``: from ``rank_identity``."""
        slot_bytes = tuple(self.layout.slot_bytes(group) for group in range(len(self._group_ids)))
        return RankGeometry(self._rank, slot_bytes, digest, tuple(sorted(attention_backends)))

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        """Queue a store. Always True: failure is an outcome, not an exception."""
        self._submit(job_id, dst_spec, src_spec, is_store=True, expedited=False)
        return True

    def submit_load(
        self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        """Queue a load; ``expedited`` ones are waited for within the step and go first."""
        self._submit(job_id, src_spec, dst_spec, is_store=False, expedited=expedited)
        return True

    def submit_moves(self, moves: Iterable[MoveSpec], places: tuple[Place, ...]) -> None:
        """Queue what travels between tiers, behind everything else. Each move ends in ``take_tickets``."""
        for move in moves:
            engine = self._open(places)
            if engine is None:
                self._refused_tickets[move.ticket] = len(move.keys)
                continue
            engine.submit_moves(
                move.ticket,
                [
                    MoveIO(key, self._group_at.get(key_group(key), -1), source, target)
                    for key, source, target in zip(move.keys, move.sources, move.targets, strict=True)
                ],
            )

    def samples(self, job: RankJob, result: JobResult) -> Iterable[LoadSample]:
        """Return what a finished load says of the speed of its tiers."""
        wanted: Counter[int] = Counter()
        failed = set()
        for chunk, outcome in zip(job.chunks, result.outcomes, strict=True):
            wanted[chunk.location.tier] += len(chunk.block_ids) * self.layout.groups[chunk.group].block_bytes
            if outcome is not Outcome.OK:
                failed.add(chunk.location.tier)
        return [LoadSample(part.tier, wanted[part.tier], part.seconds, part.tier in failed) for part in result.shares]

    def take_tickets(self) -> dict[int, dict[int, Outcome]]:
        """Return how landings and moves ended since the last call: ticket -> failures by position."""
        ended = {ticket: dict.fromkeys(range(count), Outcome.FAILED) for ticket, count in self._refused_tickets.items()}
        self._refused_tickets = {}
        if self._engine is not None:
            for result in self._engine.settled():
                ended[result.ticket] = failures_of(result.outcomes)
        return ended

    def take_work(self) -> Work | None:
        """Return what was moved and what failed since the last call; None: nothing."""
        return self._engine.take_work() if self._engine is not None else None

    def take_standings(self) -> dict[int, tuple[Standing, ...]]:
        """Return how this rank's tiers stand, under its number; empty while that is as it was at the last call."""
        standings = self._engine.standings() if self._engine is not None else ()
        if standings == self._told:
            return {}
        self._told = standings
        return {self._rank: standings}

    def wait(self, job_ids: set[int]) -> None:
        """Block until the source blocks of stores may be reused and loads have finished."""
        if self._engine is not None:
            self._engine.wait(job_ids)

    def take_results(self) -> list[RankResult]:
        """Return jobs that finished since the last call, each exactly once."""
        results, self._refused = self._refused, []
        if self._engine is not None:
            results = results + self._engine.finished()
        return [RankResult(self._jobs.pop(result.job_id), result) for result in results]

    def get_finished(self) -> list[TransferResult]:
        """Serve vLLM's own contract; our connector worker uses ``take_results``, which keeps outcomes per chunk."""
        return [
            TransferResult(
                job_id=item.result.job_id,
                success=all(outcome is Outcome.OK for outcome in item.result.outcomes),
                transfer_size=item.result.bytes_moved,
                transfer_time=item.result.seconds,
            )
            for item in self.take_results()
        ]

    def shutdown(self) -> None:
        """Drain within a deadline and release everything."""
        if self._engine is not None:
            self._engine.close(self._config.drain_timeout_s)
            self._engine = None
        if self._host is not None and not LEAKED:
            self._host.close()
        elif self._host is not None:
            LEAKED.append(self._host)  # a copy that did not end may be at it, and would be waited for
        for reach in self._reaches:
            reach.close()
        self._reaches = []

    def _submit(
        self, job_id: int, spec: LoadStoreSpec, blocks: GPULoadStoreSpec, *, is_store: bool, expedited: bool
    ) -> None:
        assert isinstance(spec, ChunkSpec)
        try:
            chunks = self._chunks(spec, blocks, is_store=is_store)
        except LayoutError as error:
            logger.error("Job %d refused: %s", job_id, error)
            chunks = self._whole_job(spec, blocks)
            self._refuse(job_id, spec, chunks, is_store, str(error))
            return
        engine = self._open(spec.places)
        if engine is None:
            self._refuse(job_id, spec, chunks, is_store, "storage is not available on this rank")
            return
        self._jobs[job_id] = RankJob(spec.ticket, is_store, chunks)
        if is_store:
            engine.submit_store(job_id, chunks)
        else:
            engine.submit_load(job_id, chunks, expedited=expedited, landing_ticket=spec.landing_ticket)

    def _chunks(self, spec: ChunkSpec, blocks: GPULoadStoreSpec, *, is_store: bool) -> tuple[ChunkIO, ...]:
        parts = split_job(
            [key_group(key) for key in spec.keys],
            np.asarray(blocks.block_ids),
            blocks.group_sizes,
            blocks.block_indices,
            self._group_ids,
            blocks_per_chunk=self.layout.blocks_per_chunk,
            require_full_tail=is_store,
        )
        landings = spec.landings or (None,) * len(spec.keys)
        return tuple(
            ChunkIO(
                spec.keys[part.key_index],
                spec.locations[part.key_index],
                part.group,
                part.block_ids,
                part.first_block,
                None if (landing := landings[part.key_index]) is None else landing.offset,
            )
            for part in parts
        )

    def _whole_job(self, spec: ChunkSpec, blocks: GPULoadStoreSpec) -> tuple[ChunkIO, ...]:
        # The arithmetic did not fit, so no block can be told to belong to a chunk: every chunk stands for all of them.
        every = np.asarray(blocks.block_ids, dtype=np.int32)
        return tuple(ChunkIO(key, place, 0, every, 0) for key, place in zip(spec.keys, spec.locations, strict=True))

    def _refuse(self, job_id: int, spec: ChunkSpec, chunks: tuple[ChunkIO, ...], is_store: bool, why: str) -> None:
        self._jobs[job_id] = RankJob(spec.ticket, is_store, chunks)
        outcomes = (Outcome.FAILED,) * len(chunks)
        if spec.landing_ticket:
            self._refused_tickets[spec.landing_ticket] = sum(landing is not None for landing in spec.landings)
        self._refused.append(JobResult(job_id, is_store, outcomes, 0, 0.0, (why,)))

    def _open(self, places: Sequence[Place]) -> ChainEngine | None:
        if self._engine is None and not self._broken and places:
            reaches, self._reaches = self._reaches, []
            memory = RankMemory(self._tensors, self.layout, self._host, self._claimed_share)
            self._engine = self._unless_broken(lambda: open_engine(self._config, memory, places, self._rank, reaches))
            if self._engine is None:
                for reach in reaches:
                    reach.close()
        return self._engine

    def _unless_broken(self, make: Callable[[], T]) -> T | None:
        """Return what ``make`` makes. Whatever it raises turns offloading off on this rank, and nothing else."""
        try:
            return make()
        except NixlOffloadError as error:
            logger.error("Offloading is off on rank %d until the engine restarts: %s", self._rank, error)
        except Exception:
            logger.exception("Offloading is off on rank %d until the engine restarts", self._rank)
        self._broken = True
        return None


def failures_of(outcomes: Iterable[Outcome]) -> dict[int, Outcome]:
    """Return what did not end well, by position."""
    return {position: outcome for position, outcome in enumerate(outcomes) if outcome is not Outcome.OK}


class NixlConnectorWorker(OffloadingConnectorWorker):
    """vLLM's connector worker, without its assertions that storage never fails."""

    def __init__(self, spec: NixlOffloadSpec, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(spec, vllm_config, kv_cache_config)
        # Every rank has a slab of its own: each stores and reports, also where the KV is replicated (MLA with TP > 1).
        self._is_store_writer = True
        self._report = WorkerReport()
        self._failed_blocks: set[int] = set()
        self._failed_requests: set[str] = set()
        self._single_group = len(spec.config.groups) == 1
        self._allocated = ""
        """Digest of this rank's KV caches, once they are registered."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """As vLLM's; and take down what was allocated. Where that fails, the scheduler's half stays off."""
        try:
            self._allocated = allocation_digest(self.vllm_config, self.kv_cache_config, kv_caches)
        except Exception:
            logger.exception("What lies where in the KV caches of this rank is not understood")
        super().register_kv_caches(kv_caches)

    def _init_worker(self, kv_caches: CanonicalKVCaches) -> None:
        offloaded = get_offloading_group_ids(self.kv_cache_config)
        groups = [self.kv_cache_config.kv_cache_groups[group] for group in offloaded]
        super()._init_worker(without_padding(kv_caches, groups))

    @property
    def rank_worker(self) -> NixlOffloadingWorker:
        """Our worker. Exists once the KV caches are registered."""
        assert isinstance(self.worker, NixlOffloadingWorker)
        return self.worker

    def geometry(self) -> RankGeometry | None:
        """Return what a chunk needs on this rank, once the KV caches are registered."""
        if self.worker is None:
            return None
        if not any(group.layer_names for group in self.kv_cache_config.kv_cache_groups):
            return self.rank_worker.geometry(self._allocated)  # vLLM would name the backend that it prefers
        backends = {backend.get_name() for backend in get_current_attn_backends(self.vllm_config)}
        return self.rank_worker.geometry(self._allocated, backends)

    def start_kv_transfers(self, metadata: OffloadingConnectorMetadata) -> None:
        """Submit vLLM's jobs, then our moves."""
        super().start_kv_transfers(metadata)
        if isinstance(metadata, ChainMetadata):
            self.rank_worker.submit_moves(metadata.moves, metadata.places)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """Collect outcomes. A failed load is reported as received *and* as failed, so that its request resumes."""
        received: set[str] = set()
        for item in self.rank_worker.take_results():
            job, result = item.job, item.result
            failures = failures_of(result.outcomes)
            self._report.mark_completed(result.job_id)
            self._report.tickets[job.ticket] = TicketReport(1, failures)
            if result.bytes_moved:
                stats = self._report.transfer_stats
                (stats.store if job.is_store else stats.load).record(result.bytes_moved, result.seconds)
            request = self._load_jobs.pop(result.job_id, None)
            if request is not None:
                received.add(request)
            if failures and not job.is_store:
                self._fail_load(job, request, failures)
            if not job.is_store:
                self._report.loads.extend(self.rank_worker.samples(job, result))
        for ticket, failures in self.rank_worker.take_tickets().items():
            self._report.tickets[ticket] = TicketReport(1, failures)
        self._report.work = self.rank_worker.take_work()
        self._report.standings = self.rank_worker.take_standings()
        return set(), received

    def take_failed_requests(self) -> set[str]:
        """Return requests whose load failed since the last call (models with several KV groups)."""
        failed, self._failed_requests = self._failed_requests, set()
        return failed

    def take_failed_blocks(self) -> set[int]:
        """Return blocks that a load did not fill since the last call (models with one KV group)."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def build_connector_worker_meta(self) -> WorkerReport:
        """Return what has finished since the last call.

        Also when nothing has: vLLM keeps an empty step to itself, and our scheduler's half counts them: ``step_clock``.
        """
        report, self._report = self._report, WorkerReport()
        return report

    def _fail_load(self, job: RankJob, request: str | None, failures: Mapping[int, Outcome]) -> None:
        logger.warning(
            "Load of request %s: %d of %d chunks not usable (%s)",
            request,
            len(failures),
            len(job.chunks),
            ", ".join(sorted({outcome.value for outcome in failures.values()})),
        )
        if self._single_group:
            for position in failures:
                self._failed_blocks.update(job.chunks[position].block_ids.tolist())
        elif request is not None:
            self._failed_requests.add(request)
