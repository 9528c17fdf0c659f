"""A rank's half behind vLLM's ``OffloadingWorker``: tickets in, an outcome for each of their chunks out.

Threading: called by the worker's main thread. Tiers open on threads of their own, and the engine's pump threads are
behind it. Submitting never raises and never blocks on I/O: a job that cannot be done is a job that failed, and a failed
load is a recompute.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.config import OffloadingConfig

from nixl_offload.catalog import LoadTicket, MoveTicket, StoreTicket
from nixl_offload.chunk.authentication import ChunkKeys
from nixl_offload.config import Config
from nixl_offload.engine import Completion, Job, RankEngine, TierEngine, Work, WorkKind
from nixl_offload.engine.autotune import TransferPlan
from nixl_offload.engine.host import HostSlab
from nixl_offload.engine.pump import LEAKED, leak
from nixl_offload.engine.streams import READY, Fence, model_on_default_stream
from nixl_offload.errors import LayoutError
from nixl_offload.hardware.same_machine import machine_token
from nixl_offload.tiers.kinds import AnyPlace
from nixl_offload.tiers.slab.tier import SlabPlace
from nixl_offload.types import Outcome
from nixl_offload.vllm.adapters import LoadedAdapters
from nixl_offload.vllm.background import name_of
from nixl_offload.vllm.chunks import RankChunks, of_no_blocks
from nixl_offload.vllm.kv_caches import canonical_layout
from nixl_offload.vllm.messages import LoadSample, RankGeometry, RankStatus, TicketSpec
from nixl_offload.vllm.rank_shards import RankShards
from nixl_offload.vllm.rank_tiers import RankMemory, RankTiers, open_host, open_tier_engine, plan_tiers

logger = logging.getLogger(__name__)

OPENING_EVERY_S = 0.05
"""How often a rank looks whether the tiers that it opens are open."""
STATUS_EVERY_S = 0.25
"""How often a rank looks at its tiers while nothing is submitted and nothing ends."""


@dataclass(frozen=True, slots=True)
class FinishedJob:
    """One of vLLM's jobs that has ended on this rank: what it was to do, and what became of it."""

    ticket: StoreTicket | LoadTicket
    result: Completion


class NixlOffloadingWorker(OffloadingWorker):
    """vLLM's worker contract over our engine. Jobs of a tier that is not open on this rank fail.

    A pipeline stage may have no layer of a KV cache group, or of any: then it is done with its part of a job at once.
    """

    def __init__(
        self,
        offloading: OffloadingConfig,
        config: Config,
        kv_caches: CanonicalKVCaches,
        claimed_share: float = 1.0,
        *,
        engines: int = 1,
        shards: RankShards | None = None,
        keys: ChunkKeys | None = None,
    ) -> None:
        """Take the host memory that the config asks for, and compare transfer paths on a device.

        ``claimed_share``: of the device's memory, what vLLM keeps for itself. ``engines``: data-parallel engines that
        divide the memory tier. ``shards``: how chunks are cut into shards; None: each rank stores what it has as it
        lies there. ``keys``: of the config's ``authenticate``.

        This may take seconds, and the start waits for it: CUDA graphs are captured next, and no other thread may
        allocate device memory during that. Raises TierError when there is not so much host memory: at start, and only
        there.
        """
        self._config = config
        self._rank = offloading.parallel.rank
        self._tensors: list[torch.Tensor] = [item.tensor for item in kv_caches.tensors]
        blocks_per_chunk = offloading.cache.blocks_per_chunk
        self.layout = canonical_layout(kv_caches, blocks_per_chunk) if shards is None else shards.layout
        self._shards = shards
        self._has_layers = len(self.layout.empty_groups) < len(self.layout.groups)
        """Whether any; else this rank needs no memory, reaches no storage, and is done with its part at once."""
        self._host: HostSlab | None = None
        self._plans: list[TransferPlan | None] = []
        if self._has_layers:
            self._host = open_host(config, offloading.parallel, self.layout, self._tensors, engines, keys)
            self._plans = plan_tiers(config, self._tensors, self.layout)
        self._engine = RankEngine(
            len(config.tiers) if self._has_layers else 0,
            relay_offsets=() if self._host is None else self._host.relay_offsets,
            load_timeout_s=config.load_timeout_s,
        )
        self._chunks = RankChunks(
            self.layout,
            [group.group_id for group in offloading.groups],
            memory=None if config.memory is None else 0,
            rank=self._rank,
            plan=None if shards is None else shards.plan,
            shared=[position for position, tier in enumerate(config.tiers) if tier.is_shared],
        )
        numbers = () if shards is None else shards.plan.numbers(self._rank)
        memory = RankMemory(self._tensors, self.layout, self._host, claimed_share, numbers, keys)
        self._tiers = RankTiers(
            self._engine,
            open_tier=lambda position, place: open_tier_engine(
                config, position, place, memory, self._rank, self._plans[position], self._engine
            ),
            joined=self._joined,
            name_of=lambda position: f"{name_of(config.tiers[position])} on rank {self._rank}",
        )
        self._load_fence: Fence | None = None
        """Behind which this step's loads may write; None: behind all that the model was given when they are submitted.
        """
        self._jobs: dict[int, StoreTicket | LoadTicket] = {}
        self._status: RankStatus | None = None
        """The last one that was reported."""
        self._look_s = 0.0
        """When to look for a new one."""
        self._is_shut_down = False
        self.adapters = LoadedAdapters()
        """Records the LoRA adapters that are loaded on this rank."""

    def geometry(self, digest: str, attention_backends: Iterable[str] = ()) -> RankGeometry:
        """Return what this rank tells the scheduler's half. ``digest``: from ``rank_identity``."""
        slot_bytes = tuple(self.layout.slot_bytes(group) for group in range(len(self.layout.groups)))
        backends, shards = tuple(sorted(attention_backends)), self._shards
        if shards is None:
            return RankGeometry(self._rank, slot_bytes, digest, backends)
        return RankGeometry(
            self._rank, slot_bytes, shards.digest, backends, machine=machine_token(), shards=shards.plan
        )

    def open(self, places: Mapping[int, AnyPlace], opening: int = 0) -> None:
        """Begin to open tiers in the background; those that fail are tried again. ``take_status`` tells which are open.

        ``places``: by position in the config. A tier that was asked for already is left as it is, unless ``opening`` is
        a later one: then all that is open is closed first, and nothing may be under way there.
        """
        if not self._has_layers or self._is_shut_down:
            self._tiers.number = opening
        else:
            self._tiers.open(places, opening)

    def sleep(self) -> None:
        """Finish what ``drain_timeout`` allows and let go of every registration, for KV memory goes away. Idempotent.

        Until ``wake_up`` every job fails. Raises TierError where a transfer that does not end may still write to that
        memory: it must stay.
        """
        if self._has_layers and not self._is_shut_down:
            self._tiers.sleep(self._config.drain_timeout_s)

    def wake_up(self) -> None:
        """Open again, at the same places, what ``sleep`` has closed: KV memory is back, at the same addresses.

        Waits some seconds at most; what takes longer goes on in the background, and its jobs fail until then.
        """
        self._tiers.wake_up()

    def fence_loads(self) -> None:
        """Loads submitted before ``end_step`` wait for what the model's stream has now, not for what it is given
        meanwhile: that must not touch their blocks (decision 0014).
        """
        self._load_fence = self._engine.compute_fence()

    def end_step(self) -> None:
        """All loads of this step are submitted. A fence of it would be too early for those of the next."""
        self._load_fence = None

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        """Queue a store. Always True: failure is an outcome, not an exception."""
        assert isinstance(dst_spec, TicketSpec)
        self._submit(job_id, dst_spec, src_spec)
        return True

    def submit_load(
        self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        """Queue a load; ``expedited`` ones are waited for within the step and go first."""
        assert isinstance(src_spec, TicketSpec)
        self._submit(job_id, src_spec, dst_spec, is_expedited=expedited)
        return True

    def _submit(self, job_id: int, spec: TicketSpec, blocks: GPULoadStoreSpec, *, is_expedited: bool = False) -> None:
        """Queue vLLM's job, of its KV ``blocks``. ``take_finished`` tells its end, ``take_tickets`` that of what a load
        leaves in memory. All is DROPPED where this rank has loaded other content of the adapter since.
        """
        self._look_s = 0.0
        self._tiers.take_opened()
        self._jobs[job_id] = ticket = spec.ticket
        refused = None
        try:
            chunks = self._chunks.of_job(ticket, blocks)
        except LayoutError as error:
            logger.error("Job %d refused: %s", job_id, error)
            chunks, refused = of_no_blocks(ticket, blocks.block_ids), (Outcome.FAILED, str(error))
        if refused is None and not self.adapters.agrees(spec.adapter, self._rank):
            refused = (Outcome.DROPPED, "the LoRA adapter was replaced")
        fence = self._load_fence if isinstance(ticket, LoadTicket) else None
        fence = fence or self._engine.compute_fence() or READY
        if isinstance(ticket, StoreTicket):
            job = Job(WorkKind.STORE, chunks, len(ticket.keys), fence, job_id)
        else:
            promoted = [at for at, slot in enumerate(ticket.promotion_slots) if slot is not None]
            job = Job(WorkKind.LOAD, chunks, len(ticket.keys), fence, job_id, ticket.promotion_ticket, promoted)
        job.is_expedited, job.refused = is_expedited, refused
        self._engine.submit(job)

    def submit_moves(self, ticket: MoveTicket) -> None:
        """Queue moves behind everything else. They end in ``take_tickets``."""
        self._look_s = 0.0
        self._tiers.take_opened()
        chunks = self._chunks.of_moves(ticket)
        self._engine.submit(Job(WorkKind.WRITE_THROUGH, chunks, len(ticket.keys), READY, ticket=ticket.ticket))

    def samples(self, job: FinishedJob) -> Iterable[LoadSample]:
        """Return what a finished load says of the speed of its tiers."""
        return [
            LoadSample(share.tier, share.wanted_bytes, share.seconds, bool(share.failures), job.ticket.ticket)
            for share in job.result.shares
        ]

    def take_tickets(self) -> dict[int, dict[int, Outcome]]:
        """Return how promotions and write-throughs ended since the last call: ticket -> failures by position."""
        ended = {result.job_id: failures_of(result.outcomes) for result in self._engine.settled()}
        if ended:
            self._look_s = 0.0
        return ended

    def take_work(self) -> Work | None:
        """Return what was moved and what failed since the last call; None: nothing."""
        return self._engine.take_work()

    def take_status(self) -> dict[int, RankStatus]:
        """Return which tiers this rank has open, under its number; empty while that is as it was at the last call.

        Called in every step: a change that came with no job is reported ``STATUS_EVERY_S`` late.
        """
        now_s = time.monotonic()
        if now_s < self._look_s:
            return {}
        self._look_s = now_s + (OPENING_EVERY_S if self._tiers.is_opening else STATUS_EVERY_S)
        self._tiers.take_opened()
        every = frozenset(range(len(self._config.tiers)))
        is_open = self._engine.open_tiers if self._has_layers else every
        status = RankStatus(is_open, self._tiers.failed, self._engine.statuses(), self._tiers.number)
        if status == self._status or not (status.open or status.failed):
            return {}
        self._status = status
        return {self._rank: status}

    def wait(self, job_ids: set[int]) -> None:
        """Block until the source blocks of stores may be reused and loads have finished."""
        self._engine.wait(job_ids)

    @property
    def has_news(self) -> bool:
        """Whether any ``take_`` method may have something to tell. Quick: called after each forward pass, with cold CPU
        caches.
        """
        return self._engine.has_jobs or time.monotonic() >= self._look_s

    def take_finished(self) -> list[FinishedJob]:
        """Return vLLM's jobs that ended since the last call, each exactly once."""
        results = self._engine.finished()
        if results:
            self._look_s = 0.0
        return [FinishedJob(self._jobs.pop(result.job_id), result) for result in results]

    def get_finished(self) -> list[TransferResult]:
        """Return nothing: our connector worker uses ``take_finished``, which keeps outcomes per chunk."""
        return []

    def shutdown(self) -> None:
        """Drain within a deadline and release everything."""
        self._is_shut_down = True
        has_ended = self._tiers.close()
        self._engine.close(self._config.drain_timeout_s)
        if self._host is not None and has_ended and not LEAKED:
            self._host.close()
        elif self._host is not None:
            leak(self._host)  # a copy that did not end may be at it, and would be waited for

    def _joined(self, position: int, place: AnyPlace, engine: TierEngine) -> None:
        if self._shards is not None:
            self._chunks.take_places(position, place.slots if isinstance(place, SlabPlace) else None)
        access = engine.status().access  # asked now, for vLLM chooses the model's stream after it registers KV caches
        if access is not None and access.mover == "kvikio" and model_on_default_stream(self._tensors[0]):
            logger.warning(
                "%s: KvikIO's copies wait for CUDA's default stream, where this model runs (--enforce-eager on one "
                "GPU does that): a load may take as long as a step, and hold up the next. Drop --enforce-eager, or set "
                "mover: gds_mt or posix",
                name_of(self._config.tiers[position]),
            )


def failures_of(outcomes: Iterable[Outcome]) -> dict[int, Outcome]:
    """Return what did not end well, by position."""
    return {position: outcome for position, outcome in enumerate(outcomes) if outcome is not Outcome.OK}
