"""A rank's half behind vLLM's ``OffloadingWorker``: tickets in, an outcome for each of their chunks out.

Threading: called by the worker's main thread. The tiers open on a thread of their own, and the engine's pump threads
are behind it. Submitting never raises and never blocks on I/O: a job that cannot be done is a job that failed, and a
failed load is a recompute.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
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
from nixl_offload.chunk.layout import split_job
from nixl_offload.config import Config
from nixl_offload.engine import ChainEngine, ChunkIO, Completion, MoveIO, Work, WorkKind
from nixl_offload.engine.host import HostSlab
from nixl_offload.engine.opened_mover import OpenedMover
from nixl_offload.engine.pump import LEAKED
from nixl_offload.errors import LayoutError, NixlOffloadError
from nixl_offload.types import Outcome, key_group
from nixl_offload.vllm.background import BackgroundOpening
from nixl_offload.vllm.kv_caches import canonical_layout
from nixl_offload.vllm.messages import LoadSample, Place, RankGeometry, RankStatus, TicketSpec
from nixl_offload.vllm.rank_engine import RankMemory, engine_of_nothing, open_engine, open_host, reach_tiers

logger = logging.getLogger(__name__)

T = TypeVar("T")

CLOSE_OPENING_S = 2.0
"""How long a shutdown waits for storage that is just being opened."""


@dataclass(frozen=True, slots=True)
class FinishedJob:
    """One of vLLM's jobs that has ended on this rank: what it was to do, and what became of it."""

    ticket: StoreTicket | LoadTicket
    chunks: tuple[ChunkIO, ...]
    result: Completion


class NixlOffloadingWorker(OffloadingWorker):
    """vLLM's worker contract over our engine. Until ``open`` has done its work, and if it fails, every job fails.

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
        """Open what needs no word of the scheduler's half: the host memory that the config asks for, and the movers of
        shared tiers. ``claimed_share``: of the device's memory, what vLLM keeps for itself. ``off``: nothing will be
        stored or loaded, so open nothing.

        This may take seconds, and the start waits for it: CUDA graphs are captured next, and no other thread may
        allocate device memory during that. Raises TierError when there is not so much host memory: at start, and only
        there. Storage that cannot be reached turns offloading off.
        """
        self._config = config
        self._rank = offloading.parallel.rank
        self._group_ids = tuple(group.group_id for group in offloading.groups)
        self._group_at = {group: at for at, group in enumerate(self._group_ids)}
        self._tensors: list[torch.Tensor] = [item.tensor for item in kv_caches.tensors]
        self.layout = canonical_layout(kv_caches, offloading.cache.blocks_per_chunk)
        self._engine = engine_of_nothing(self.layout)
        self._opening: BackgroundOpening[ChainEngine] | None = None
        self._host: HostSlab | None = None
        self._reaches: list[OpenedMover] = []
        self._broken = off
        self._jobs: dict[int, tuple[StoreTicket | LoadTicket, tuple[ChunkIO, ...]]] = {}
        self._refused: list[Completion] = []
        self._refused_tickets: dict[int, int] = {}
        """Ticket of landings or moves that were refused -> how many chunks."""
        self._status: RankStatus | None = None
        """As it was told last."""
        self._claimed_share = claimed_share
        if self._engine is None and not off:
            self._host = open_host(config, offloading.parallel, self.layout, self._tensors)
            self._reaches = self._unless_broken(lambda: reach_tiers(config, self._tensors, self.layout)) or []

    def geometry(self, digest: str, attention_backends: Iterable[str] = ()) -> RankGeometry:
        """Return what this rank tells the scheduler's half. ``digest``: from ``rank_identity``."""
        slot_bytes = tuple(self.layout.slot_bytes(group) for group in range(len(self._group_ids)))
        return RankGeometry(self._rank, slot_bytes, digest, tuple(sorted(attention_backends)))

    def open(self, places: Sequence[Place]) -> None:
        """Begin to open the tiers, which are at ``places``, in the background. ``take_status`` reports the end.

        Only the first call does anything.
        """
        if self._engine is not None or self._opening is not None or self._broken:
            return
        reaches, self._reaches = self._reaches, []
        memory = RankMemory(self._tensors, self.layout, self._host, self._claimed_share)

        def make() -> ChainEngine:
            try:
                device = self._tensors[0].device
                if device.type == "cuda":
                    torch.cuda.set_device(device)  # a new thread's is the first GPU
                # As vLLM's own calls do: what is made here is written to in inference mode, and the KV caches were
                # made in it.
                with torch.inference_mode():
                    return open_engine(self._config, memory, places, self._rank, reaches)
            except BaseException:
                for reach in reaches:
                    reach.close()
                raise

        self._opening = BackgroundOpening(make, lambda engine: engine.close(0.0), name="nixl-offload-open-rank")

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        """Queue a store. Always True: failure is an outcome, not an exception."""
        assert isinstance(dst_spec, TicketSpec)
        self.submit(dst_spec.ticket, job_id, src_spec)
        return True

    def submit_load(
        self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        """Queue a load; ``expedited`` ones are waited for within the step and go first."""
        assert isinstance(src_spec, TicketSpec)
        self.submit(src_spec.ticket, job_id, dst_spec, expedited=expedited)
        return True

    def submit(
        self,
        ticket: StoreTicket | LoadTicket | MoveTicket,
        job_id: int = 0,
        blocks: GPULoadStoreSpec | None = None,
        *,
        expedited: bool = False,
    ) -> None:
        """Queue what a ticket allows; moves go behind everything else.

        ``job_id`` and ``blocks``: vLLM's job and its KV blocks; a move has neither. A store or load ends in
        ``take_finished``, a move in ``take_tickets``, and so does what a load leaves in memory.
        """
        engine = self._open_engine()
        if isinstance(ticket, MoveTicket):
            if engine is None:
                self._refused_tickets[ticket.ticket] = len(ticket.keys)
            else:
                engine.submit_moves(ticket.ticket, self._moves(ticket))
            return
        assert blocks is not None
        why = "" if engine is not None else "storage is not open on this rank"
        try:
            chunks = self._chunks(ticket, blocks)
        except LayoutError as error:
            logger.error("Job %d refused: %s", job_id, error)
            chunks, why = self._whole_job(ticket, blocks), str(error)
        self._jobs[job_id] = ticket, chunks
        if engine is None or why:
            self._refuse(job_id, ticket, len(chunks), why)
        elif isinstance(ticket, StoreTicket):
            engine.submit_store(job_id, chunks)
        else:
            engine.submit_load(job_id, chunks, expedited=expedited, landing_ticket=ticket.landing_ticket)

    def samples(self, job: FinishedJob) -> Iterable[LoadSample]:
        """Return what a finished load says of the speed of its tiers."""
        wanted: Counter[int] = Counter()
        failed = set()
        for chunk, outcome in zip(job.chunks, job.result.outcomes, strict=True):
            wanted[chunk.location.tier] += len(chunk.block_ids) * self.layout.groups[chunk.group].block_bytes
            if outcome is not Outcome.OK:
                failed.add(chunk.location.tier)
        return [
            LoadSample(share.tier, wanted[share.tier], share.seconds, share.tier in failed, job.ticket.ticket)
            for share in job.result.shares
        ]

    def take_tickets(self) -> dict[int, dict[int, Outcome]]:
        """Return how landings and moves ended since the last call: ticket -> failures by position."""
        ended = {ticket: dict.fromkeys(range(count), Outcome.FAILED) for ticket, count in self._refused_tickets.items()}
        self._refused_tickets = {}
        if self._engine is not None:
            for result in self._engine.settled():
                ended[result.job_id] = failures_of(result.outcomes)
        return ended

    def take_work(self) -> Work | None:
        """Return what was moved and what failed since the last call; None: nothing."""
        return self._engine.take_work() if self._engine is not None else None

    def take_status(self) -> dict[int, RankStatus]:
        """Return how this rank stands, under its number; empty while that is as it was at the last call."""
        engine = self._open_engine()
        if engine is None and not self._broken:
            return {}
        status = RankStatus(False) if engine is None else RankStatus(True, engine.statuses())
        if status == self._status:
            return {}
        self._status = status
        return {self._rank: status}

    def wait(self, job_ids: set[int]) -> None:
        """Block until the source blocks of stores may be reused and loads have finished."""
        if self._engine is not None:
            self._engine.wait(job_ids)

    def take_finished(self) -> list[FinishedJob]:
        """Return vLLM's jobs that ended since the last call, each exactly once."""
        results, self._refused = self._refused, []
        if self._engine is not None:
            results = results + self._engine.finished()
        return [FinishedJob(*self._jobs.pop(result.job_id), result) for result in results]

    def get_finished(self) -> list[TransferResult]:
        """Serve vLLM's own contract; our connector worker uses ``take_finished``, which keeps outcomes per chunk."""
        return [
            TransferResult(
                job_id=job.result.job_id,
                success=all(outcome is Outcome.OK for outcome in job.result.outcomes),
                transfer_size=job.result.bytes_moved,
                transfer_time=job.result.seconds,
            )
            for job in self.take_finished()
        ]

    def shutdown(self) -> None:
        """Drain within a deadline and release everything."""
        has_opened = self._opening is None or self._opening.close(CLOSE_OPENING_S)
        if self._engine is not None:
            self._engine.close(self._config.drain_timeout_s)
            self._engine = None
        self._broken = True
        if self._host is not None and has_opened and not LEAKED:
            self._host.close()
        elif self._host is not None:
            LEAKED.append(self._host)  # a copy that did not end may be at it, and would be waited for
        for reach in self._reaches:
            reach.close()
        self._reaches = []

    def _open_engine(self) -> ChainEngine | None:
        """Return the engine, which is taken over here once it is open; None: it is not, or could not be opened."""
        if self._opening is not None and self._opening.done:
            opening, self._opening = self._opening, None
            self._engine = self._unless_broken(opening.take)
        return self._engine

    def _moves(self, ticket: MoveTicket) -> list[MoveIO]:
        return [
            MoveIO(key, self._group_at.get(key_group(key), -1), source, target)
            for key, source, target in zip(ticket.keys, ticket.sources, ticket.targets, strict=True)
        ]

    def _chunks(self, ticket: StoreTicket | LoadTicket, blocks: GPULoadStoreSpec) -> tuple[ChunkIO, ...]:
        parts = split_job(
            [key_group(key) for key in ticket.keys],
            np.asarray(blocks.block_ids),
            blocks.group_sizes,
            blocks.block_indices,
            self._group_ids,
            blocks_per_chunk=self.layout.blocks_per_chunk,
            require_full_tail=isinstance(ticket, StoreTicket),
        )
        landings = ticket.landings if isinstance(ticket, LoadTicket) else ()
        landings = landings or (None,) * len(ticket.keys)
        return tuple(
            ChunkIO(
                ticket.keys[part.key_index],
                ticket.locations[part.key_index],
                part.group,
                part.block_ids,
                part.first_block,
                None if (landing := landings[part.key_index]) is None else landing.offset,
            )
            for part in parts
        )

    def _whole_job(self, ticket: StoreTicket | LoadTicket, blocks: GPULoadStoreSpec) -> tuple[ChunkIO, ...]:
        # The arithmetic did not fit, so no block can be told to belong to a chunk: every chunk stands for all of them.
        every = np.asarray(blocks.block_ids, dtype=np.int32)
        return tuple(ChunkIO(key, place, 0, every, 0) for key, place in zip(ticket.keys, ticket.locations, strict=True))

    def _refuse(self, job_id: int, ticket: StoreTicket | LoadTicket, chunks: int, why: str) -> None:
        is_store = isinstance(ticket, StoreTicket)
        if isinstance(ticket, LoadTicket) and ticket.landing_ticket:
            self._refused_tickets[ticket.landing_ticket] = sum(landing is not None for landing in ticket.landings)
        self._refused.append(
            Completion(job_id, WorkKind.STORE if is_store else WorkKind.LOAD, (Outcome.FAILED,) * chunks, errors=(why,))
        )

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
