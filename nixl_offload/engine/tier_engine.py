"""One tier on a rank, as its caller sees it: jobs in, one completion each out. Everything slow happens on its pump.

Threading: one caller thread (vLLM's worker) plus the pump. The caller's methods enqueue and read; none does I/O.
Ownership: tensors belong to the caller, who keeps them alive and the blocks of a job untouched until ``wait`` or
``finished`` says otherwise.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence

from nixl_offload.chunk.layout import KVLayout
from nixl_offload.engine.jobs import JobTable
from nixl_offload.engine.pump import Pauses, Pump, PumpPaths
from nixl_offload.engine.records import ChunkIO, Completion, Job
from nixl_offload.engine.states import Lane, WorkKind
from nixl_offload.engine.streams import READY, Fence
from nixl_offload.engine.transfer_statistics import TierStatus
from nixl_offload.engine.waiting import wait_source_free

logger = logging.getLogger(__name__)

WAIT_LIMIT_S = 2.0
"""How long ``wait`` lets a store read its blocks, or a load finish. Only hung storage takes longer, and it shall not
hang the engine."""


class TierEngine(ABC):
    """The caller's side of an engine. Whatever fails, each submitted job tells its outcomes exactly once, and so the
    host slots that it fills.

    Nothing raises for storage reasons. Job ids are the caller's; negative ones are ``chain.ChainEngine``'s own. Loads
    overtake stores. A store is FAILED when nothing can write to its location any more, or when a transfer has not ended
    within its quarantine, or with the pump: then only header and checksums tell late bytes from the next chunk's own. A
    load that storage does not answer in time is FAILED unless something may still write to its blocks.
    """

    def __init__(self, layout: KVLayout, compute_fence: Callable[[], Fence], clock: Callable[[], float]) -> None:
        self._blocks_per_chunk = layout.blocks_per_chunk
        self._block_bytes = [group.block_bytes for group in layout.groups]
        self._compute_fence = compute_fence
        self._clock = clock
        self._closed = False

    def _start(self, table: JobTable, driven: PumpPaths, *, load_timeout_s: float, name: str, pauses: Pauses) -> None:
        """Start the pump. The last step of construction."""
        self._table = table
        self._load_timeout_s = load_timeout_s
        self._pump = Pump(table, driven, load_timeout_s=load_timeout_s, clock=self._clock, name=name, pauses=pauses)
        self._pump.start()

    @property
    def jobs(self) -> JobTable:
        """What is live here, for ``waiting``."""
        return self._table

    def submit_store(self, job_id: int, chunks: Sequence[ChunkIO]) -> None:
        """Queue a store of blocks that the compute stream has written, or will have when it gets here.

        Under pressure chunks become DROPPED at once. The blocks of each chunk must reach to the chunk's end.
        """
        self._submit(job_id, chunks, WorkKind.STORE, Lane.STORE)

    def submit_load(
        self, job_id: int, chunks: Sequence[ChunkIO], *, expedited: bool = False, fence: Fence | None = None
    ) -> None:
        """Queue a load to KV blocks, some of it by way of host slots that keep it. ``expedited`` puts it before the
        loads that wait already. ``fence``: behind it nothing but this load touches the blocks; None: that is so from
        this point of the compute stream on.
        """
        self._submit(job_id, chunks, WorkKind.LOAD, Lane.EXPEDITED_LOAD if expedited else Lane.LOAD, fence)

    def submit_background(self, job_id: int, chunks: Sequence[ChunkIO], kind: WorkKind) -> None:
        """Queue whole images behind all loads and stores: from host slots to the tier (WRITE_THROUGH) or back (FETCH).

        The caller bounds how many there are. One that has not begun after ``jobs.MOVE_QUEUE_LIMIT_S`` is DROPPED.
        """
        assert kind.in_background
        self._submit(job_id, chunks, kind, Lane.BACKGROUND)

    def compute_fence(self) -> Fence:
        """Mark this point of the compute stream, the caller's own: a fence for any engine of the same device."""
        return self._compute_fence()

    def finished(self) -> list[Completion]:
        """Return what was completed since the last call, each exactly once over all calls."""
        self._table.expire_loads(self._load_timeout_s)
        completions = self._table.drain()
        if completions and logger.isEnabledFor(logging.DEBUG):
            for done in completions:
                logger.debug(
                    "job %d (%s): %d chunks, %d bytes, %.1f ms %s",
                    done.job_id,
                    done.kind.label,
                    len(done.outcomes),
                    done.bytes_moved,
                    done.seconds * 1e3,
                    "; ".join(done.errors),
                )
        return completions

    def wait(self, job_ids: Collection[int], limit_s: float | None = None) -> None:
        """Stores: return as soon as their source blocks may be reused. Loads: return when they are finished.

        Chunks not yet begun are DROPPED ``waiting.STORE_GRACE_S`` after their step; chunks of which the blocks were
        read do not hold this up, however slow the storage. After ``limit_s`` (``WAIT_LIMIT_S``) the rest is given up
        too: a store whose blocks are still being read can then only end as FAILED. Only a load that is writing to its
        blocks is waited for without limit. Unknown ids are done.
        """
        wait_source_free([(self._table, job_ids)], WAIT_LIMIT_S if limit_s is None else limit_s, self._clock)

    def idle(self) -> bool:
        """True if no job is live, no host slot is being filled, and there is nothing to tell."""
        return self._table.idle()

    @abstractmethod
    def status(self) -> TierStatus:
        """Return what waits here and how the tier stands, for metrics. Quick; it may be a moment old."""

    def close(self, deadline_s: float = 5.0) -> None:
        """Finish what ``deadline_s`` allows; queued stores and moves become DROPPED then, all else FAILED. Idempotent.

        Afterwards the pump is gone, ``finished`` still gives the last completions, and new jobs fail at once. Memory
        that a hung transfer may still touch is kept for the life of the process; host slots that one may still touch
        are TAINTED.
        """
        if not self._closed:
            self._closed = True
            self._pump.stop(deadline_s)

    def _submit(
        self, job_id: int, chunks: Sequence[ChunkIO], kind: WorkKind, lane: Lane, fence: Fence | None = None
    ) -> None:
        if fence is None:
            fence = READY if kind.in_background else self._compute_fence()
        sized = [(io, self._payload_bytes(io)) for io in chunks]
        self._table.add(Job(job_id, kind, fence, self._clock()), sized, lane)

    def _payload_bytes(self, io: ChunkIO) -> int:
        if not 0 <= io.group < len(self._block_bytes):
            return 0
        blocks = len(io.block_ids)
        if not blocks and io.host_offset is not None:
            blocks = self._blocks_per_chunk
        return blocks * self._block_bytes[io.group]
