"""The table of a rank: its live jobs, the queue of each tier, and the completions. It does no I/O.

Threading: ``JobTable`` is shared by the rank's caller and the pumps of all its tiers. Its one lock guards jobs, chunks
and queues. Methods hold it for microseconds, to decide; callers act outside it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from nixl_offload.chunk.layout import KVLayout
from nixl_offload.engine.records import (
    READS_BLOCKS,
    TRANSITIONS,
    Chunk,
    ChunkState,
    Completion,
    Job,
    Lane,
    Share,
    Waiting,
    Work,
    WorkKind,
    when_closed,
    when_given_up,
)
from nixl_offload.types import Location, Outcome

logger = logging.getLogger(__name__)

EXPIRE_EVERY_S = 0.05
FENCE_POLL_S = 0.0005
"""Poll interval while stores wait for their step. CUDA has no wait with a timeout."""
MOVE_QUEUE_LIMIT_S = 30.0
"""Background work that has not begun after this time is DROPPED, to free its host slot."""
RELAY_POLL_S = 0.001
STORE_GRACE_S = 0.005
"""How long after their step's end stores may wait for a slot: enough for the pump to wake up and begin. Then they are
DROPPED, since vLLM's next step must not wait for storage."""
WAIT_LIMIT_S = 2.0
"""How long ``wait`` waits for reads of source blocks and for loads. Only hung storage takes longer, and must not hang
vLLM."""


class JobTable:
    """The live jobs of all tiers, and their completions.

    After any failure, each accepted job and each ticket is reported exactly once, and a DONE chunk stays DONE. A relay
    slot belongs to one chunk until nothing reads or writes it; else it is never used again.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        load_timeout_s: float = 30.0,
        relay_offsets: Sequence[int] = (),
    ) -> None:
        """``load_timeout_s``: a load that takes longer has failed. ``relay_offsets``: the slots in the host slab for
        moves between farther tiers.
        """
        self.clock = clock
        self.queues: dict[int, TierQueue] = {}
        """Queues of the usable tiers, by position."""
        self._lock = threading.Lock()
        self._progress = threading.Condition(self._lock)
        self._load_timeout_s = load_timeout_s
        self._live: dict[Job, None] = {}
        """Jobs with a chunk or a slot that is not reported yet, in the order of their submission."""
        self._finished: list[Completion] = []
        self._finished_tickets: list[Completion] = []
        self._work = Work()
        self._expire_s = clock()
        self._relay_offsets = list(relay_offsets)
        """Offsets of free relay slots."""
        self._relay_slots = len(relay_offsets)
        """Number of relay slots that are, or will be, free."""
        self._relaying: set[Chunk] = set()
        """Chunks that have a relay slot. A chunk may have ended while something still touches its slot."""
        self._waiting_relays: deque[Chunk] = deque()

    # -- the caller's side ------------------------------------------------------------------------------------------

    def use(self, queues: Iterable[TierQueue]) -> None:
        """Replace the tiers by these."""
        with self._lock:
            self.queues = {queue.tier: queue for queue in queues}

    def submit(self, job: Job) -> None:
        """Accept ``job`` and queue each chunk at its location's tier; moves are served last.

        A chunk of a missing tier is FAILED at once; a store beyond its tier's queue limit is DROPPED. The blocks of a
        store must reach to the end of its chunk. The caller keeps the slots that moves read or fill, and bounds the
        number of moves.
        """
        with self._lock:
            self._live[job] = None
            job.submitted_s = self.clock()
            job.unfinished = len(job.chunks)
            for chunk in job.chunks:
                chunk.queued_s = job.submitted_s
                job.unreported += chunk.kind.reports_location
            if not job.unfinished:
                self._report_job(job)
            if job.location_ticket and not job.unreported:
                self._report_ticket(job)
            if job.refused is not None:
                for chunk in job.chunks:
                    self._finish(chunk, *job.refused, "refused")
                return
            lanes = (Lane.LOAD, Lane.STORE, Lane.FETCH, Lane.BACKGROUND)
            self._queue(job.chunks, lanes[2 * job.kind.in_background + job.kind.writes])
            self._grant_relays()

    def finished(self) -> list[Completion]:
        """Return vLLM's jobs that have ended since the last call, each exactly once over all calls."""
        return self._taken(self._finished)

    def finished_tickets(self) -> list[Completion]:
        """As ``finished``, for the tickets of promotions and moves. The ticket of a store or load ends with its job."""
        return self._taken(self._finished_tickets)

    def _taken(self, completions: list[Completion]) -> list[Completion]:
        self.expire()
        if not completions:
            return []  # called in every step: a new completion can wait for the next
        with self._lock:
            taken = completions.copy()
            completions.clear()
            return taken

    def take_work(self) -> Work | None:
        """Return the sum of the tiers' work since the last call; None if there was none."""
        with self._lock:
            work, self._work = self._work, Work()
        return work or None

    @property
    def has_jobs(self) -> bool:
        """Whether ``finished`` or ``finished_tickets`` may have something to report, now or later."""
        return bool(self._live or self._finished or self._finished_tickets or self._relaying)

    def wait(self, job_ids: Collection[int], limit_s: float | None = None) -> None:
        """Block until no store among the jobs needs its KV blocks any more and all loads are finished.

        These stores go first. Wait up to ``limit_s`` (``WAIT_LIMIT_S``) for running steps; drop stores that are queued
        ``STORE_GRACE_S`` later; after another ``limit_s`` give up the rest. Loads that write to their blocks are
        awaited without a limit. Unknown ids are done.
        """
        limit_s = WAIT_LIMIT_S if limit_s is None else limit_s
        with self._lock:
            jobs = [job for job in self._live if job.job_id in job_ids]
            if not jobs:
                return
            stores, until_s = [job for job in jobs if job.kind.writes], self.clock() + limit_s
            for job in stores:
                queued = [chunk for chunk in job.chunks if chunk.state is ChunkState.QUEUED]
                self._line_up(queued, Lane.URGENT_STORE)
            while any(_needs_blocks(job) and _is_behind(job) for job in stores) and self.clock() < until_s:
                self._progress.wait(FENCE_POLL_S)
            until_s = self.clock() + STORE_GRACE_S
            while queued := [chunk for job in stores for chunk in job.chunks if chunk.state is ChunkState.QUEUED]:
                left_s = until_s - self.clock()
                if left_s > 0.0:
                    self._progress.wait(left_s)
                    continue
                for chunk in queued:
                    words = "its blocks were needed before storage had time for it"
                    self._finish(chunk, Outcome.DROPPED, words, "needed_back")
                self._sweep()
            if self._progress.wait_for(lambda: not any(map(_needs_blocks, jobs)), limit_s):
                return
            for chunk in [chunk for job in jobs for chunk in job.chunks]:
                self._give_up(chunk, f"its blocks were needed and storage did not answer in {limit_s:g} s", "no_answer")
            self._sweep()
            self._progress.wait_for(lambda: not any(map(_needs_blocks, jobs)))

    def end_relays(self, end_s: float) -> None:
        """Wait until no move between two farther tiers is under way, at most until ``end_s``. Then drop those that wait
        for a relay slot.
        """
        while self._relaying and self.clock() < end_s:
            self.expire()
            time.sleep(RELAY_POLL_S)
        with self._lock:
            for chunk in self._waiting_relays:
                self._finish(chunk, Outcome.DROPPED, "the engine is closed", "closed")

    # -- both sides -------------------------------------------------------------------------------------------------

    def expire(self) -> None:
        """Fail loads that take too long unless their KV blocks are being written; drop background work that has waited
        for ``MOVE_QUEUE_LIMIT_S``.

        Both sides call it, since a pump may hang in a system call. Checks at most every ``EXPIRE_EVERY_S``.
        """
        now_s = self.clock()
        if now_s < self._expire_s:
            return
        with self._lock:
            self._expire_s = now_s + EXPIRE_EVERY_S
            load_s, move_s = now_s - self._load_timeout_s, now_s - MOVE_QUEUE_LIMIT_S
            old = [job for job in self._live if job.submitted_s <= max(load_s, move_s)]
            for chunk in [chunk for job in old for chunk in job.chunks]:
                if not chunk.kind.writes and chunk.queued_s <= load_s:
                    self._give_up(chunk, f"storage did not answer in {self._load_timeout_s:g} s", "timeout")
                has_waited = chunk.kind.in_background and chunk.queued_s <= move_s
                if has_waited and chunk.state in {ChunkState.QUEUED, ChunkState.CLAIMED}:
                    self._finish(chunk, Outcome.DROPPED, "storage had no time for a move", "no_time")
            if old:
                self._sweep()
                self._grant_relays()
                self._progress.notify_all()

    # -- the pumps' side --------------------------------------------------------------------------------------------

    def advance(self, chunks: Sequence[Chunk], state: ChunkState) -> list[Chunk]:
        """Move chunks to ``state``, wake waiters, and return those that are in it now. The others were given up or are
        DISOWNED, and stay so.
        """
        done, disowned = ChunkState.DONE, ChunkState.DISOWNED
        with self._lock:
            going = [chunk for chunk in chunks if chunk.state is not done and chunk.state is not disowned]
            for chunk in going:
                if chunk.state is not state:
                    self._move(chunk, state)
            self._progress.notify_all()
            return going

    def complete(self, chunks: Iterable[Chunk], *, tainted: bool = False) -> None:
        """End a batch: each chunk's ``result`` becomes its outcome, and the host slots that chunks filled are reported.
        An earlier outcome or report stands. ``tainted``: something may still touch their slots.
        """
        with self._lock:
            for chunk in chunks:
                outcome, error, cause = chunk.result or (Outcome.FAILED, "it ended without an outcome", "unexpected")
                if chunk.kind.fills_slot:
                    slot = _location_outcome(chunk, outcome, tainted=tainted)
                    if chunk.onward is None:
                        self._report_location(chunk, slot)
                    elif chunk.state is not ChunkState.DONE and outcome is Outcome.OK and slot is Outcome.OK:
                        self._hand_on(chunk, chunk.onward)
                        continue
                    else:
                        self._return_relay(chunk, tainted=slot is Outcome.TAINTED)
                self._finish(chunk, outcome, error, cause)
            self._grant_relays()
            self._progress.notify_all()

    # -- under the lock ---------------------------------------------------------------------------------------------

    def _queue(self, chunks: Sequence[Chunk], lane: Lane) -> None:
        """Queue chunks at their tiers; end those that cannot be queued."""
        queued = []
        for chunk in chunks:
            queue, sort = self.queues.get(chunk.location.tier), chunk.kind.waits_as
            if queue is None or (chunk.onward is not None and chunk.onward.tier not in self.queues):
                self._finish(chunk, Outcome.FAILED, "the tier is not available on this rank", "unavailable")
            elif not 0 <= chunk.group < len(queue.block_bytes):
                self._finish(chunk, Outcome.FAILED, f"there is no group {chunk.group} on this rank", "layout")
            elif chunk.onward is not None and chunk.host_offset is None:
                self._waiting_relays.append(chunk)
            else:
                blocks = len(chunk.block_ids)
                if not blocks and chunk.host_offset is not None:
                    blocks = queue.blocks_per_chunk
                chunk.size_bytes = size_bytes = blocks * queue.block_bytes[chunk.group]
                part, shares = (chunk.kind.operation, chunk.location.tier), chunk.job.shares
                chunk.share = share = shares.get(part) or shares.setdefault(part, Share(*part))
                share.unfinished += 1
                if queue.refusal is not None:
                    self._finish(chunk, Outcome.FAILED, queue.refusal, "closed")
                elif sort == "store" and queue.waiting_bytes[sort] + size_bytes > queue.store_limit_bytes:
                    self._finish(chunk, Outcome.DROPPED, "store queue is full", "queue_full")
                else:
                    queue.waiting_bytes[sort] += size_bytes
                    chunk.queue = queue
                    queued.append(chunk)
        self._line_up(queued, lane)

    def _line_up(self, chunks: list[Chunk], lane: Lane) -> None:
        """Append chunks to a lane of their queues, sorted by group, so that a group's chunks travel in one batch."""
        chunks.sort(key=lambda chunk: chunk.group)
        for queue in dict.fromkeys([chunk.queue for chunk in chunks]):
            assert queue is not None
            queue.lanes[lane].extend([chunk for chunk in chunks if chunk.queue is queue])
            queue.ring()

    def _move(self, chunk: Chunk, state: ChunkState) -> None:
        """Change the state of a chunk that was taken. Callers notify waiters."""
        if state not in TRANSITIONS[chunk.state]:
            raise RuntimeError(f"chunk of job {chunk.job.job_id} cannot go from {chunk.state.name} to {state.name}")
        chunk.state = state

    def _give_up(self, chunk: Chunk, why: str, cause: str) -> None:
        """End a chunk early as far as that is safe."""
        end = when_given_up(chunk.kind, chunk.state)
        if isinstance(end, Outcome):
            self._finish(chunk, end, why, cause)
        elif end is not None:
            self._move(chunk, end)

    def _sweep(self) -> None:
        """Remove given-up chunks from the queues: ``take`` does not reach them while the first chunk waits."""
        for queue in self.queues.values():
            for lane, chunks in queue.lanes.items():
                if any(chunk.state is not ChunkState.QUEUED for chunk in chunks):
                    queue.lanes[lane] = deque(chunk for chunk in chunks if chunk.state is ChunkState.QUEUED)

    def _finish(self, chunk: Chunk, outcome: Outcome, error: str | None, cause: str = "") -> None:
        """Give a chunk that is not DONE its outcome. Callers notify waiters."""
        state, job, kind = chunk.state, chunk.job, chunk.kind
        if state is ChunkState.DONE:
            return
        if state is ChunkState.DISOWNED and outcome is Outcome.OK:
            outcome, error, cause = Outcome.FAILED, "its blocks were given away while they were written", "needed_back"
        chunk.state = ChunkState.DONE  # any state may end
        chunk.outcome, chunk.error, chunk.cause = outcome, error, cause
        if state is ChunkState.QUEUED:
            if chunk.queue is not None:
                chunk.queue.waiting_bytes[kind.waits_as] -= chunk.size_bytes
            self._return_relay(chunk)
            if kind.fills_slot and chunk.onward is None:
                self._report_location(chunk, outcome)  # it never began
        self._count(chunk, outcome, cause)
        job.unfinished -= 1
        if not job.unfinished:
            self._report_job(job)
        if kind is WorkKind.WRITE_THROUGH:
            self._return_relay(chunk, tainted=outcome is Outcome.TAINTED)
            self._report_location(chunk, outcome)
        elif chunk.onward is not None:
            # Report before the slot is free: a later answer of storage changes nothing. The target was never touched
            # and is not to blame.
            is_told = outcome is Outcome.CORRUPT or chunk.queue is None
            self._report_location(chunk, outcome if is_told else Outcome.DROPPED)

    def _count(self, chunk: Chunk, outcome: Outcome, cause: str = "") -> None:
        """Count a chunk's outcome in its tier's share."""
        if (share := chunk.share) is None:
            return  # never queued
        if outcome is Outcome.OK:
            share.bytes_moved += chunk.size_bytes
        else:
            share.failures[outcome, cause or "io"] += 1
        share.unfinished -= 1
        if not share.unfinished:
            share.seconds = self.clock() - chunk.job.submitted_s
            self._work.add(share)

    def _report_job(self, job: Job) -> None:
        """Report a job whose chunks are all DONE."""
        if job.job_id is not None:
            self._finished.append(job.completion())
        self._forget(job)

    def _report_location(self, chunk: Chunk, outcome: Outcome) -> None:
        """Report the end of I/O on a chunk's slot or location (TAINTED: it may go on). The first report counts."""
        job = chunk.job
        if chunk.location_outcome is None and job.unreported:
            chunk.location_outcome = outcome
            job.unreported -= 1
            if not job.unreported:
                self._report_ticket(job)

    def _report_ticket(self, job: Job) -> None:
        self._finished_tickets.append(job.location_completion())
        self._forget(job)

    def _forget(self, job: Job) -> None:
        """Forget a job once all of it is reported: last, because ``has_jobs`` reads without the lock."""
        if not job.unfinished and not job.unreported:
            self._live.pop(job, None)

    # A move between two farther tiers waits for a relay slot. One tier's pump reads into the slot, the other's writes
    # from it.

    def _grant_relays(self) -> None:
        """Give free relay slots to the moves that wait, oldest first."""
        waiting = self._waiting_relays
        while waiting and (self._relay_offsets or not self._relay_slots or waiting[0].state is ChunkState.DONE):
            chunk = waiting.popleft()
            if chunk.state is ChunkState.DONE:
                continue
            if not self._relay_slots:
                self._finish(chunk, Outcome.DROPPED, "there is no relay slot", "no_time")
                continue
            chunk.host_offset = self._relay_offsets.pop()
            self._relaying.add(chunk)
            self._queue([chunk], Lane.BACKGROUND)

    def _hand_on(self, chunk: Chunk, target: Location) -> None:
        """Queue a chunk that was read into its relay slot at the other tier. The write is a new ``Chunk``, so late
        events of the read cannot change it.
        """
        job = chunk.job
        write = replace(chunk, location=target, onward=None)
        write.kind, write.job, write.queued_s = WorkKind.WRITE_THROUGH, job, self.clock()
        job.chunks[job.chunks.index(chunk)] = write
        chunk.state, chunk.outcome = ChunkState.DONE, Outcome.OK
        self._relaying.add(write)
        self._relaying.remove(chunk)
        self._count(chunk, Outcome.OK)
        self._queue([write], Lane.BACKGROUND)

    def _return_relay(self, chunk: Chunk, *, tainted: bool = False) -> None:
        """Free a chunk's relay slot; if ``tainted``, something may still touch it, so retire it."""
        if chunk not in self._relaying:
            return
        self._relaying.remove(chunk)
        if tainted:
            self._relay_slots -= 1
            logger.error("A relay slot may still be touched; retired, %d left", self._relay_slots)
        elif chunk.host_offset is not None:
            self._relay_offsets.append(chunk.host_offset)


class TierQueue:
    """The chunks that wait for one tier, and its pump's side of the table."""

    def __init__(self, table: JobTable, tier: int, layout: KVLayout, *, store_limit_bytes: int) -> None:
        self.table = table
        self.tier = tier
        self.store_limit_bytes = store_limit_bytes
        """Limit of waiting stores; a store beyond it is DROPPED at once."""
        self.lanes: dict[Lane, deque[Chunk]] = {lane: deque() for lane in Lane}
        """Also read without the lock: add to a lane first, then wake the pump."""
        self.waiting_bytes = {"load": 0, "store": 0, "background": 0}
        """Payload bytes of QUEUED chunks."""
        self.refusal: str | None = None
        """Why every new chunk fails; None while the pump runs."""
        self._lock = table._lock
        self.block_bytes = [group.block_bytes for group in layout.groups]
        self.blocks_per_chunk = layout.blocks_per_chunk
        self._bell = threading.Lock()
        """Wakes the pump, which sleeps by acquiring it: locked until ``ring``. A Condition costs 20 µs more per job."""
        self._bell.acquire()
        self._rung = False

    def waiting(self) -> Waiting:
        """Return the queued payload bytes of loads, stores and background work."""
        with self._lock:
            return Waiting(*self.waiting_bytes.values())

    def take(self, lane: Lane, room: Callable[[Chunk], int | str]) -> list[Chunk]:
        """Claim up to ``room`` chunks from the front of ``lane``, all of one job, group and kind.

        ``room``: as ``TierPaths.room``; a chunk for which it returns text is FAILED. Called under the lock: pure and
        quick.
        """
        with self._lock:
            lane_queue, taken, queued = self.lanes[lane], list[Chunk](), ChunkState.QUEUED
            limit: int | str = 0
            while lane_queue:
                if lane_queue[0].state is queued:
                    limit = room(lane_queue[0])
                    if isinstance(limit, int):
                        break
                    self.table._finish(lane_queue[0], Outcome.FAILED, limit, "disabled")
                    self.table._progress.notify_all()
                lane_queue.popleft()  # refused, or ended or claimed through another lane before
            if not lane_queue or isinstance(limit, str) or limit < 1:
                return taken
            first, size_bytes = lane_queue[0], 0
            state = ChunkState.CLAIMED if first.kind.writes else ChunkState.TRANSFER
            while lane_queue and len(taken) < limit:
                chunk = lane_queue[0]
                if chunk.state is queued:
                    if not first.travels_with(chunk):
                        break
                    chunk.state = state
                    size_bytes += chunk.size_bytes
                    taken.append(chunk)
                lane_queue.popleft()
            taken.sort(key=lambda chunk: chunk.location.offset)  # neighbouring slots are copied in one call
            self.waiting_bytes[first.kind.waits_as] -= size_bytes
            self.table._progress.notify_all()
            return taken

    def empty(self) -> bool:
        """True if nothing is queued."""
        with self._lock:
            return not any(chunk.state is ChunkState.QUEUED for lane in self.lanes.values() for chunk in lane)

    def give_up(self, why: str) -> None:
        """Refuse new chunks and end the present ones: queued writes and background work are DROPPED, all else is
        FAILED. Host slots being filled or written out are TAINTED, since nobody will see that I/O end.
        """
        table = self.table
        with self._lock:
            self.refusal = why
            live = [chunk for job in table._live for chunk in job.chunks]
            for chunk in [chunk for chunk in dict.fromkeys((*live, *table._relaying)) if chunk.queue is self]:
                if chunk.kind.fills_slot and chunk.state is not ChunkState.QUEUED:
                    table._return_relay(chunk, tainted=True)
                    if chunk.onward is None:
                        table._report_location(chunk, Outcome.TAINTED)
                is_written = chunk.kind.writes and chunk.host_slot is not None  # in memory a store fills its slot
                outcome = Outcome.TAINTED if is_written else when_closed(chunk.kind, chunk.state)
                table._finish(chunk, outcome, why, "closed")
            table._grant_relays()
            table._progress.notify_all()

    def sleep(self, seconds: float | None) -> None:
        """Pump only: sleep until woken by new work, at most ``seconds`` (None: no limit)."""
        if self._bell.acquire(timeout=-1 if seconds is None else seconds):
            with self._lock:
                self._rung = False

    def wake(self) -> None:
        """Wake the pump."""
        with self._lock:
            self.ring()

    def ring(self) -> None:
        """As ``wake``; the caller holds the lock."""
        if not self._rung:
            self._rung = True
            self._bell.release()


def _location_outcome(chunk: Chunk, outcome: Outcome, *, tainted: bool) -> Outcome:
    """Return the outcome of the host slot that a chunk was to fill. ``tainted``: something may still touch the slot."""
    if tainted and chunk.host_slot is not None:
        return Outcome.TAINTED
    if chunk.is_kept:
        return Outcome.OK
    # The outcome of a load that was given up says more than the batch's result.
    outcome = chunk.outcome or outcome
    return Outcome.FAILED if outcome is Outcome.OK else outcome


def _is_behind(job: Job) -> bool:
    """Whether the job's step still runs. If the device has failed, returns False: the pump meets the error too, and can
    fail the chunks.
    """
    try:
        return not job.fence.done()
    except Exception:  # noqa: BLE001 - see above
        return False


def _needs_blocks(job: Job) -> bool:
    """For a store, whether it still needs its KV blocks; for a load, whether it is unfinished."""
    if not job.kind.writes:
        return job.unfinished > 0
    return any(chunk.state in READS_BLOCKS for chunk in job.chunks)
