"""Every transition of jobs and chunks: the whole bookkeeping of the engine, without any I/O.

Threading: ``JobTable`` is shared by the engine's caller and its pump. Its one lock guards every mutable field of
``Job`` and ``Task``; both decide by the table's methods, which hold that lock for microseconds, and act outside it.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence

from nixl_offload.engine.records import TRANSITIONS, ChunkIO, Job, JobResult, Landed, Lane, Stage, Task
from nixl_offload.types import Outcome

logger = logging.getLogger(__name__)

EXPIRE_EVERY_S = 0.05
MOVE_QUEUE_LIMIT_S = 30.0
"""A move that has not begun by then is DROPPED: it keeps a host slot from being used for something better."""


class JobTable:
    """The live jobs, their queues and their results.

    After any failure still holds: each accepted job yields exactly one ``JobResult``, and one ``Landed`` if it fills
    host slots; a task that is DONE never leaves that stage.
    """

    def __init__(self, *, store_queue_limit_bytes: int, clock: Callable[[], float]) -> None:
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._progress = threading.Condition(self._lock)
        self._clock = clock
        self._limit_bytes = store_queue_limit_bytes
        self._jobs: dict[int, Job] = {}
        self._lanes: dict[Lane, deque[Task]] = {lane: deque() for lane in Lane}
        self._results: list[JobResult] = []
        self._landing: dict[Job, None] = {}
        """Jobs with host slots of which nothing was told yet; they may have ended long ago."""
        self._landed: list[Landed] = []
        self._queued_store_bytes = 0
        self._waiting_bytes = [0, 0, 0]
        """Of loads, stores and moves that are QUEUED."""
        self._expire_s = clock()
        self._refusal: str | None = None
        """Why every new job fails; None while the pump lives."""
        self._woken = False

    # -- the caller's side ------------------------------------------------------------------------------------------

    def add(self, job: Job, chunks: Sequence[tuple[ChunkIO, int]], lane: Lane) -> None:
        """Accept ``job`` with its (chunk, payload bytes) pairs, all queued in ``lane``.

        Where queued stores reach their limit, the rest of the job becomes DROPPED at once: the queue has a bound. A job
        id that is still live is a bug of the caller: it is logged and ignored, so no job is launched twice.
        """
        with self._lock:
            if job.job_id in self._jobs:
                logger.error("job %d was submitted twice; the second submit is ignored", job.job_id)
                return
            self._jobs[job.job_id] = job
            job.tasks = [Task(job, io, size_bytes) for io, size_bytes in chunks]
            job.unfinished = len(job.tasks)
            job.unlanded = sum(task.is_landing for task in job.tasks)
            if job.unlanded:
                self._landing[job] = None
            if not job.tasks:
                self._emit(job)
            full = False
            limited = job.is_store and not job.is_move
            for task in job.tasks:
                self._waiting_bytes[_kind(job)] += task.size_bytes
                if limited:
                    self._queued_store_bytes += task.size_bytes
                full = full or (limited and self._queued_store_bytes > self._limit_bytes)
                if self._refusal is not None:
                    self._finish(task, Outcome.FAILED, self._refusal, "closed")
                elif full:
                    self._finish(task, Outcome.DROPPED, "store queue is full", "queue_full")
                else:
                    self._lanes[lane].append(task)
            self._wake()

    def drain(self) -> list[JobResult]:
        """Return the results since the last call; each job appears in exactly one of them."""
        with self._lock:
            results, self._results = self._results, []
            return results

    def drain_landed(self) -> list[Landed]:
        """Return the landings since the last call; each job appears in at most one of them."""
        with self._lock:
            landed, self._landed = self._landed, []
            return landed

    def wait_source_free(self, job_ids: Collection[int], grace_s: float, limit_s: float) -> None:
        """Block until no store among ``job_ids`` needs its KV blocks any more. What is still queued ``grace_s`` after
        its fence was done is DROPPED, and what is still reading after ``limit_s`` is given up. Loads among them are
        waited for until they are finished; after ``limit_s`` those are FAILED whose KV blocks nobody touches.
        """
        with self._lock:
            jobs = [self._jobs[job_id] for job_id in job_ids if job_id in self._jobs]
            if not jobs:
                return
            for job in jobs:
                queued = [task for task in job.tasks if task.stage is Stage.QUEUED]
                self._lanes[Lane.URGENT_STORE if job.is_store else Lane.EXPEDITED_LOAD].extend(queued)
            self._wake()
            stores = [job for job in jobs if job.is_store]
            self._grant_grace(stores, grace_s, limit_s)
            late = [task for job in stores for task in job.tasks if task.stage is Stage.QUEUED]
            for task in late:
                self._finish(
                    task, Outcome.DROPPED, "its blocks were needed before storage had time for it", "needed_back"
                )
            if late:
                self._sweep()
            if not self._progress.wait_for(lambda: not any(map(_needs_blocks, jobs)), limit_s):
                for job in jobs:
                    for task in job.tasks:
                        self._give_up(
                            task, f"its blocks were needed and storage did not answer in {limit_s:g} s", "no_answer"
                        )
                self._sweep()
                self._progress.wait_for(lambda: not any(map(_needs_blocks, jobs)))

    def _grant_grace(self, stores: Sequence[Job], grace_s: float, limit_s: float) -> None:
        """Wait until ``stores`` have read their blocks, or nothing but storage can be what keeps them from it.

        A fence that is not done is a step that still runs. The next one queues up behind it all the same, so waiting
        for it costs little; a dropped store would cost computing its blocks again.
        """
        ends_s = self._clock() + limit_s
        behind = True
        while behind and self._clock() < ends_s:
            behind = any(map(_is_behind, stores))
            if self._progress.wait_for(lambda: not any(_reads_source(job) for job in stores), grace_s):
                return

    def idle(self) -> bool:
        """True if no job is live, no host slot is being filled, and nothing waits to be drained."""
        with self._lock:
            return not (self._jobs or self._results or self._landing or self._landed)

    def waiting_bytes(self) -> tuple[int, int, int]:
        """Return the payload bytes that wait for their turn: of loads, of stores, and of moves."""
        with self._lock:
            loads, stores, moves = self._waiting_bytes
        return loads, stores, moves

    # -- the pump's side --------------------------------------------------------------------------------------------

    def take(self, lane: Lane, fits: Callable[[Task], bool]) -> Task | None:
        """Claim the first queued task of ``lane`` if ``fits`` says so (called under the lock: pure and quick)."""
        with self._lock:
            queue = self._lanes[lane]
            while queue:
                task = queue[0]
                if task.stage is not Stage.QUEUED:
                    queue.popleft()  # dropped, failed, or claimed through another lane
                    continue
                if not fits(task):
                    return None
                queue.popleft()
                self._move(task, Stage.SOURCE if task.job.is_store else Stage.IO)
                return task
            return None

    def refuse(self, lane: Lane, why_not: Callable[[Task], str | None]) -> None:
        """Fail the first queued tasks of ``lane`` as long as ``why_not`` has words for it (as ``take``'s ``fits``)."""
        with self._lock:
            queue = self._lanes[lane]
            while queue:
                if queue[0].stage is Stage.QUEUED:
                    why = why_not(queue[0])
                    if why is None:
                        return
                    self._finish(queue[0], Outcome.FAILED, why, "out_of_use")
                queue.popleft()

    def empty(self) -> bool:
        """True if no job is live."""
        with self._lock:
            return not self._jobs

    def advance(self, task: Task, stage: Stage) -> bool:
        """Move a task on; waiters learn it. False, and nothing changed, if the task was given up meanwhile."""
        with self._lock:
            if task.stage is Stage.DONE:
                return False
            self._move(task, stage)
            return True

    def finish(self, task: Task, outcome: Outcome, error: str | None = None, cause: str = "") -> None:
        """Give a task its outcome; the first one counts, later ones are ignored.

        ``cause``: what ``error`` says, in one word of a small set, for metrics; ``io`` where nothing is known.
        """
        with self._lock:
            self._finish(task, outcome, error, cause)

    def land(self, task: Task, outcome: Outcome) -> None:
        """Nothing moves in the host slot of a task any more, or (TAINTED) something may for ever; the first counts."""
        with self._lock:
            self._land(task, outcome)

    def touch_in_place(self, task: Task) -> bool:
        """The mover is about to touch KV blocks: from now on the task is given up by nobody. False, and it must not, if
        that has happened already.
        """
        with self._lock:
            task.in_place = task.stage is not Stage.DONE
            return task.in_place

    def expire_loads(self, timeout_s: float) -> None:
        """Fail loads that were submitted more than ``timeout_s`` ago, except where their KV blocks are being touched;
        drop moves that have waited for ``MOVE_QUEUE_LIMIT_S``.

        For both sides: a pump that hangs in a system call cannot do it. Looks at most every ``EXPIRE_EVERY_S``.
        """
        with self._lock:
            now_s = self._clock()
            if now_s < self._expire_s:
                return
            self._expire_s = now_s + EXPIRE_EVERY_S
            limit_s = now_s - timeout_s
            late = [job for job in self._jobs.values() if not job.is_store and job.submitted_s <= limit_s]
            for job in late:
                for task in job.tasks:
                    self._give_up(task, f"storage did not answer in {timeout_s:g} s", "timeout")
            limit_s = now_s - MOVE_QUEUE_LIMIT_S
            waited = [job for job in self._jobs.values() if job.is_move and job.submitted_s <= limit_s]
            for job in waited:
                for task in job.tasks:
                    if task.stage in {Stage.QUEUED, Stage.SOURCE}:
                        self._finish(task, Outcome.DROPPED, "storage had no time for a move", "no_time")
            if late or waited:
                self._sweep()

    def give_up(self, why: str) -> None:
        """Refuse what comes and end what is there: queued stores and moves are DROPPED, all else is FAILED; host slots
        that are being filled or written out are TAINTED, for nobody will see the end of that.
        """
        with self._lock:
            self._refusal = why
            for job in list(self._jobs.values()):
                for task in job.tasks:
                    self._finish(task, _given_up(task), why, "closed")
            for job in list(self._landing):
                for task in job.tasks:
                    if task.is_landing:
                        self._land(task, Outcome.TAINTED)

    def sleep(self, seconds: float | None) -> None:
        """Pump only: sleep until woken by new work, at most ``seconds`` (None: no limit)."""
        with self._lock:
            if not self._woken:
                self._work.wait(seconds)
            self._woken = False

    def wake(self) -> None:
        """Wake the pump."""
        with self._lock:
            self._wake()

    # -- under the lock ---------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        self._woken = True
        self._work.notify()

    def _move(self, task: Task, stage: Stage) -> None:
        if stage not in TRANSITIONS[task.stage]:
            raise RuntimeError(f"chunk of job {task.job.job_id} cannot go from {task.stage.name} to {stage.name}")
        if task.stage is Stage.QUEUED:
            self._waiting_bytes[_kind(task.job)] -= task.size_bytes
            if task.job.is_store and not task.job.is_move:
                self._queued_store_bytes -= task.size_bytes
        task.stage = stage
        self._progress.notify_all()

    def _give_up(self, task: Task, why: str, cause: str) -> None:
        """End a task early as far as that is safe. A store that has written nothing is DROPPED; one whose mover reads
        the KV blocks is disowned, for its location may be given away only when the mover has let go. A load is FAILED
        unless its KV blocks are being written.
        """
        if task.job.is_store:
            if task.stage is Stage.SOURCE and task.in_place:
                task.disowned = True
            elif task.stage in {Stage.QUEUED, Stage.SOURCE}:
                self._finish(task, Outcome.DROPPED, why, cause)
        elif not task.in_place and task.stage is not Stage.SCATTER:
            dropped = task.job.is_move and task.stage is Stage.QUEUED
            self._finish(task, Outcome.DROPPED if dropped else Outcome.FAILED, why, cause)

    def _sweep(self) -> None:
        """Forget what was given up while queued: behind a head that has to wait, nobody else would take it away."""
        for lane, queue in self._lanes.items():
            if any(task.stage is not Stage.QUEUED for task in queue):
                self._lanes[lane] = deque(task for task in queue if task.stage is Stage.QUEUED)

    def _finish(self, task: Task, outcome: Outcome, error: str | None, cause: str = "") -> None:
        if task.stage is Stage.DONE:
            return
        if task.disowned and outcome is Outcome.OK:
            outcome, error, cause = Outcome.FAILED, "its blocks were given away while they were written", "needed_back"
        if task.stage is Stage.QUEUED and task.is_landing:
            self._land(task, outcome)  # it never began
        self._move(task, Stage.DONE)
        task.outcome, task.error, task.cause = outcome, error, cause
        task.job.unfinished -= 1
        if not task.job.unfinished:
            self._emit(task.job)

    def _land(self, task: Task, outcome: Outcome) -> None:
        if task.landed is not None:
            return
        task.landed = outcome
        task.job.unlanded -= 1
        if not task.job.unlanded:
            del self._landing[task.job]
            landed = tuple(other.landed or Outcome.FAILED for other in task.job.tasks if other.is_landing)
            self._landed.append(Landed(task.job.job_id, landed))

    def _emit(self, job: Job) -> None:
        del self._jobs[job.job_id]
        ok_bytes = sum(task.size_bytes for task in job.tasks if task.outcome is Outcome.OK)
        errors = tuple(dict.fromkeys(task.error for task in job.tasks if task.error is not None))
        outcomes = tuple(task.outcome or Outcome.FAILED for task in job.tasks)
        seconds = self._clock() - job.submitted_s
        failed = [task for task in job.tasks if task.outcome is not Outcome.OK]
        counts = Counter((task.outcome or Outcome.FAILED, task.cause or "io") for task in failed)
        causes = tuple((outcome, cause, shards) for (outcome, cause), shards in counts.items())
        self._results.append(JobResult(job.job_id, job.is_store, outcomes, ok_bytes, seconds, errors, causes=causes))


def _kind(job: Job) -> int:
    """Where a job's bytes are counted while they wait: loads, stores, moves."""
    return 2 if job.is_move else int(job.is_store)


def _given_up(task: Task) -> Outcome:
    """What becomes of a task when nobody will see its end."""
    if task.stage is Stage.QUEUED and (task.job.is_store or task.job.is_move):
        return Outcome.DROPPED
    if task.job.is_store and task.io.host_offset is not None:
        return Outcome.TAINTED
    return Outcome.FAILED


def _is_behind(job: Job) -> bool:
    """Whether the job's step still runs. A device that is out of order is the pump's to find out: here is nobody who
    could make a recompute of it.
    """
    try:
        return not job.fence.done()
    except Exception:  # noqa: BLE001 - see above
        return False


def _reads_source(job: Job) -> bool:
    """Whether a store reads its KV blocks, or may yet."""
    return any(task.stage in {Stage.QUEUED, Stage.SOURCE} and not task.disowned for task in job.tasks)


def _needs_blocks(job: Job) -> bool:
    return _reads_source(job) if job.is_store else job.unfinished > 0
