"""The memory tier on a rank: chunks between KV blocks and slots of the host slab, copied batch by batch on one thread.

Threading: one caller thread (vLLM's worker) plus the copier, which alone drives the packer and touches slots. The
caller's methods enqueue and read. Nothing waits for a device: fences are polled.
Ownership: slots belong to the catalog, which gives none away before its chunk's outcome is told; KV tensors and slab
belong to the caller, who closes them after the engine.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from nixl_offload.chunk.checksum import block_checksums
from nixl_offload.chunk.header import HEADER_BYTES, check_header, verify_blocks
from nixl_offload.chunk.layout import KVLayout
from nixl_offload.engine import image
from nixl_offload.engine.engine import STORE_GRACE_S, WAIT_LIMIT_S
from nixl_offload.engine.host import HostSlab
from nixl_offload.engine.image import GroupPlan
from nixl_offload.engine.jobs import JobTable
from nixl_offload.engine.packer import BlockIds, Packer, Payload, make_packer, pages_of, require_agreement
from nixl_offload.engine.pump import LEAKED, MAX_FAILED_PASSES, STUCK_POLL_S
from nixl_offload.engine.ratelog import RateLog
from nixl_offload.engine.records import ChunkIO, Job, JobResult, Landed, Lane, Stage, Task
from nixl_offload.engine.staging import Slot
from nixl_offload.engine.streams import Device, Fence
from nixl_offload.engine.tally import Equipment, Standing, Waiting
from nixl_offload.errors import FormatError, LayoutError
from nixl_offload.types import Outcome

logger = logging.getLogger(__name__)

STORE_BATCH_BYTES = 64 << 20
"""Copied by one call: a load that comes meanwhile waits for no more than that."""
LOAD_BATCH_BYTES = 16 << 20
"""Smaller, so that the next batch is verified while a device fetches this one."""
MAX_BATCHES = 8
"""In flight on a device."""
MAX_STORE_BATCHES = 4
"""Of those, stores."""
STORE_QUEUE_BYTES = 1 << 30
"""Stores that may wait; what comes on top is dropped at once."""
POLL_S = 0.0002
"""Pause between looks at fences. A batch takes a device one to three milliseconds."""
SLOW_POLL_S = 0.002
SLOW_AFTER_S = 0.05
"""The pause once nothing has ended for so long: the compute stream is busy with a step, and its fence comes with it."""

_EQUIPMENT = Equipment("copy", ("host",))


@dataclass(slots=True, eq=False)
class _Piece:
    """One chunk of a batch."""

    task: Task
    plan: GroupPlan
    slot: Slot


@dataclass(slots=True, eq=False)
class _Batch:
    """Chunks of one job on their way; over when every fence is done."""

    is_store: bool
    pieces: list[_Piece]
    fences: list[Fence] = field(default_factory=list)
    error: Exception | None = None
    """Some group could not be copied: every chunk fails, once the others are over."""


class MemoryEngine:
    """Implements ``chain.TierEngine``. Each submitted job yields exactly one ``JobResult``, whatever fails.

    Loads overtake stores. A load becomes OK only after identity, lengths and (``verify="checksum"``) checksums were
    verified in the slot; on CORRUPT or FAILED its KV blocks are untouched. FAILED and DROPPED stores have let go of
    their slots.
    """

    def __init__(
        self,
        *,
        tensors: Sequence[torch.Tensor],
        layout: KVLayout,
        host: HostSlab,
        rank_namespace: bytes,
        tier: int = 0,
        verify: Literal["checksum", "header"] = "checksum",
        clock: Callable[[], float] = time.monotonic,
        load_timeout_s: float = 30.0,
        store_queue_bytes: int = STORE_QUEUE_BYTES,
        packer: Packer | None = None,
        device: Device | None = None,
    ) -> None:
        """Start the copier.

        ``tensors`` as for ``engine.Engine``; ``tier``: the position of the memory tier; ``packer``: None takes the one
        for ``device``, and that None asks the tensors. Raises LayoutError when tensors and layout disagree.
        """
        require_agreement(tensors, layout)
        self._layout = layout
        self._host = host
        self._namespace = rank_namespace
        self._tier = tier
        self._verify_checksum = verify == "checksum"
        self._clock = clock
        self._load_timeout_s = load_timeout_s
        self._tensors = tuple(tensors)
        self._packer = packer if packer is not None else make_packer(tensors, pages_of(layout), device)
        self._plans = [image.make_plan(layout, group) for group in range(len(layout.groups))]
        self._table = JobTable(store_queue_limit_bytes=store_queue_bytes, clock=clock)
        self._log = RateLog(logger, clock)
        self._batches: list[_Batch] = []
        self._stop_by_s: float | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._main, name="nixl-offload-memory", daemon=True)
        self._thread.start()

    # -- the caller's side ------------------------------------------------------------------------------------------

    def submit_store(self, job_id: int, chunks: Sequence[ChunkIO]) -> None:
        """Queue a store of blocks that the compute stream has written, or will have when it gets here.

        Never blocks and never raises. Under pressure chunks become DROPPED at once. The blocks of each chunk must reach
        to the chunk's end.
        """
        self._submit(job_id, chunks, is_store=True, lane=Lane.STORE)

    def submit_load(self, job_id: int, chunks: Sequence[ChunkIO], *, expedited: bool = False) -> None:
        """Queue a load. ``expedited`` puts it before the loads that wait already."""
        self._submit(job_id, chunks, is_store=False, lane=Lane.EXPEDITED_LOAD if expedited else Lane.LOAD)

    def submit_move(self, job_id: int, chunks: Sequence[ChunkIO], *, is_store: bool) -> None:
        """Moves are made by the engines of farther tiers, to or from the slots here: each of these chunks is FAILED."""
        self._submit(job_id, chunks, is_store=is_store, lane=Lane.MOVE)

    def finished(self) -> list[JobResult]:
        """Return the jobs that ended since the last call, each exactly once over all calls."""
        self._table.expire_loads(self._load_timeout_s)
        return self._table.drain()

    def landed(self) -> list[Landed]:
        """Return what became of host slots that a job should have filled: never OK, see ``submit_move``."""
        return self._table.drain_landed()

    def wait(self, job_ids: Collection[int], limit_s: float | None = None) -> None:
        """Stores: return as soon as their source blocks may be reused. Loads: return when they are finished.

        Chunks not yet begun get ``STORE_GRACE_S``, then they are DROPPED. After ``limit_s`` (``WAIT_LIMIT_S``) a store
        that a device has not copied yet can only end as FAILED; a load that it has not begun to copy is FAILED, any
        other is waited for without limit. Unknown ids are done.
        """
        self._table.wait_source_free(job_ids, STORE_GRACE_S, WAIT_LIMIT_S if limit_s is None else limit_s)

    def idle(self) -> bool:
        """True if no job is live and ``finished`` would return nothing."""
        return self._table.idle()

    def standing(self) -> Standing:
        """Return what waits here, for metrics."""
        return Standing(Waiting(*self._table.waiting_bytes()), "", _EQUIPMENT)

    def close(self, deadline_s: float = 5.0) -> None:
        """Finish what ``deadline_s`` allows; queued stores become DROPPED then, all else FAILED. Idempotent.

        Afterwards the copier is gone, ``finished`` still gives the last results, and new jobs fail at once. Memory that
        a device may still touch is kept for the life of the process.
        """
        if self._closed:
            return
        self._closed = True
        self._stop_by_s = self._clock() + deadline_s
        self._table.wake()
        self._thread.join(deadline_s + 1.0)
        if self._thread.is_alive():
            logger.error("The copier of the memory tier hangs; it is left behind with its memory")
            LEAKED.append(self)
            why = "the engine was closed while the device hung"
            self._taint_in_flight(why)
            self._table.give_up(why)

    def _submit(self, job_id: int, chunks: Sequence[ChunkIO], *, is_store: bool, lane: Lane) -> None:
        sized = [(io, self._size_bytes(io)) for io in chunks]
        job = Job(job_id, is_store, self._packer.fence(), self._clock(), is_move=lane is Lane.MOVE)
        self._table.add(job, sized, lane)

    def _size_bytes(self, io: ChunkIO) -> int:
        return len(io.block_ids) * self._plans[io.group].block_bytes if 0 <= io.group < len(self._plans) else 0

    # -- the copier's thread ----------------------------------------------------------------------------------------

    def _main(self) -> None:
        why = "the engine is closed"
        try:
            self._loop()
        except BaseException:
            why = "the copier ended unexpectedly"
            logger.critical("The copier of the memory tier ended; every job fails from now on", exc_info=True)
        finally:
            if self._batches:
                LEAKED.append((self._tensors, self._host, self._packer, self._batches))
                logger.error("%d copies did not end; their memory is kept until the process exits", len(self._batches))
                self._taint_in_flight(why)
            self._table.give_up(why)

    def _loop(self) -> None:
        failed_passes, moved_s = 0, self._clock()
        while True:
            try:
                moved = self._push()
                moved |= self._begin_next()
                self._table.expire_loads(self._load_timeout_s)
                failed_passes = 0
            except Exception as error:
                failed_passes += 1
                if failed_passes > MAX_FAILED_PASSES:
                    raise
                self._log.error("pass", "The copier stumbled and goes on: %r", error, exc_info=error)
                time.sleep(STUCK_POLL_S)
                moved = False
            now_s = self._clock()
            if self._stop_by_s is not None and (
                now_s >= self._stop_by_s or (not moved and not self._batches and self._table.empty())
            ):
                return
            if moved:
                moved_s = now_s
            elif self._batches or self._stop_by_s is not None:
                self._table.sleep(POLL_S if now_s - moved_s < SLOW_AFTER_S else SLOW_POLL_S)
            else:
                self._table.sleep(None)

    def _begin_next(self) -> bool:
        """Begin one batch, of the first lane that has something; True if there was one."""
        for lane in Lane:
            tasks = self._take(lane)
            if not tasks:
                continue
            try:
                self._begin(tasks)
            except Exception as error:  # noqa: BLE001 - a dead copier would be a dead tier
                self._crashed(tasks, error)
            return True
        return False

    def _take(self, lane: Lane) -> list[Task]:
        """Claim chunks of one job, as many as make a batch."""
        tasks: list[Task] = []
        room_bytes = STORE_BATCH_BYTES

        def fits(task: Task) -> bool:
            if tasks:
                return task.job is tasks[0].job and task.size_bytes <= room_bytes
            stores = sum(batch.is_store for batch in self._batches)
            return len(self._batches) < MAX_BATCHES and not (task.job.is_store and stores >= MAX_STORE_BATCHES)

        while (task := self._table.take(lane, fits)) is not None:
            if not tasks and not task.job.is_store:
                room_bytes = LOAD_BATCH_BYTES
            tasks.append(task)
            room_bytes -= task.size_bytes
        return tasks

    def _begin(self, tasks: Sequence[Task]) -> None:
        """Queue the copies of a batch, one call for each KV group. Every chunk that cannot go has its outcome then."""
        admitted = [piece for task in tasks if (piece := self._admit(task)) is not None]
        if not admitted:
            return
        batch = _Batch(tasks[0].job.is_store, admitted)
        # From here on a device may be at the slots: the batch is followed until it is over, come what may.
        self._batches.append(batch)
        copy = self._packer.gather_many if batch.is_store else self._packer.scatter_many
        try:
            for group, parts in _parts(batch).items():
                batch.fences.append(copy(group, parts, tasks[0].job.fence))
        except Exception as error:  # noqa: BLE001 - what this call had queued is taken back, other groups' goes on
            batch.error = error
        self._end_if_done(batch)

    def _admit(self, task: Task) -> _Piece | None:
        """Check a chunk, and verify one that is to be loaded. None: it has its outcome."""
        try:
            piece = self._piece(task)
            return piece if self._may_copy(piece) else None
        except FormatError as error:
            words = f"corrupt: {error.reason}"
            self._log.warning(words, "A chunk in memory was refused and will be recomputed: %s", error)
            self._table.finish(task, Outcome.CORRUPT, words, error.reason)
        except LayoutError as error:
            self._log.error("LayoutError", "A chunk could not be copied: %s", error)
            self._end(task, Outcome.FAILED, str(error), "layout")
        return None

    def _piece(self, task: Task) -> _Piece:
        """Raises LayoutError for numbers that do not fit: memory is touched unchecked later."""
        io = task.io
        if io.location.tier != self._tier or not 0 <= io.group < len(self._plans):
            raise LayoutError(f"there is no group {io.group}, or no tier for {io.location}, in this engine")
        if io.host_offset is not None or task.job.is_move:
            raise LayoutError("the memory tier copies between its own slots and KV blocks only")
        plan = self._plans[io.group]
        image.check(plan, io)
        if io.location.offset + io.location.slot_bytes > self._host.memory_bytes:
            raise LayoutError(f"{io.location} lies beyond the {self._host.memory_bytes} bytes of the memory tier")
        if task.job.is_store and io.first_block + len(io.block_ids) != plan.blocks:
            raise LayoutError(f"a store of blocks up to {io.first_block + len(io.block_ids)} of {plan.blocks}")
        return _Piece(task, plan, self._host.slot(io.location.offset, io.location.slot_bytes))

    def _may_copy(self, piece: _Piece) -> bool:
        """Verify what is to be loaded; False if the chunk was given up. Raises FormatError."""
        task, io = piece.task, piece.task.io
        if task.job.is_store:
            # Given up from now on, it is FAILED when the copy is over: not before may others have the slot.
            return self._table.touch_in_place(task)
        header = check_header(piece.slot.memory[:HEADER_BYTES], image.expected(self._namespace, piece.plan, io))
        if header.first_valid_block > io.first_block:
            raise FormatError(
                f"block {io.first_block} was asked for, the shard begins with {header.first_valid_block}",
                reason="blocks",
            )
        if self._verify_checksum:
            verify_blocks(header, image.rows(piece.slot, piece.plan, io), io.first_block)
        return self._table.advance(task, Stage.SCATTER)

    def _push(self) -> bool:
        """End the batches that are over; True if there were any."""
        ended = False
        for batch in tuple(self._batches):
            ended |= self._end_if_done(batch)
        return ended

    def _end_if_done(self, batch: _Batch) -> bool:
        """Give its chunks their outcomes if a batch is over."""
        try:
            while batch.fences and batch.fences[-1].done():
                batch.fences.pop()
        except Exception as error:  # noqa: BLE001 - a device that answers no more
            self._batches.remove(batch)
            LEAKED.append((self._tensors, self._host, batch))
            self._crashed([piece.task for piece in batch.pieces], error, copying=True)
            return True
        if batch.fences:
            return False
        self._batches.remove(batch)
        if batch.error is not None:
            self._crashed([piece.task for piece in batch.pieces], batch.error)
            return True
        if batch.is_store:
            # All source blocks are free before the first checksum is computed.
            for piece in batch.pieces:
                self._table.advance(piece.task, Stage.IO)
        for piece in batch.pieces:
            self._complete(piece)
        return True

    def _complete(self, piece: _Piece) -> None:
        """All is copied: seal what was stored, and tell."""
        try:
            if piece.task.job.is_store:
                self._seal(piece)
            self._table.finish(piece.task, Outcome.OK)
        except Exception as error:  # noqa: BLE001 - a dead copier would be a dead tier
            self._crashed([piece.task], error)

    def _seal(self, piece: _Piece) -> None:
        """Write the header over blocks that lie in their slot, and zero the rest of the image."""
        if piece.task.stage is Stage.DONE or piece.task.disowned:
            return
        io = piece.task.io
        checksums = block_checksums(image.rows(piece.slot, piece.plan, io))
        image.write_header(piece.slot, image.expected(self._namespace, piece.plan, io), checksums, io.first_block)
        image.clear_around(piece.slot, piece.plan, io.first_block)

    def _crashed(self, tasks: Sequence[Task], error: Exception, *, copying: bool = False) -> None:
        """An exception that nobody expects: a bug, ours or a device's. The chunks fail, the copier goes on.

        ``copying``: nobody will see the end of a copy, so what it writes to is TAINTED.
        """
        self._log.error(f"crash:{type(error).__name__}", "Chunks failed unexpectedly: %r", error, exc_info=error)
        for task in tasks:
            tainted = copying and task.job.is_store
            self._end(task, Outcome.TAINTED if tainted else Outcome.FAILED, f"unexpected {type(error).__name__}")

    def _end(self, task: Task, outcome: Outcome, words: str, cause: str = "unexpected") -> None:
        self._table.finish(task, outcome, words, cause)
        if task.is_landing:
            self._table.land(task, outcome)

    def _taint_in_flight(self, why: str) -> None:
        """Nobody will see the end of what is in flight."""
        for batch in self._batches:
            for piece in batch.pieces:
                self._end(piece.task, Outcome.TAINTED if batch.is_store else Outcome.FAILED, why, "closed")


def _parts(batch: _Batch) -> dict[int, list[tuple[BlockIds, Payload]]]:
    by_group: dict[int, list[tuple[BlockIds, Payload]]] = {}
    for piece in batch.pieces:
        io = piece.task.io
        by_group.setdefault(io.group, []).append((io.block_ids, image.rows(piece.slot, piece.plan, io)))
    return by_group
