"""The bookkeeping of an engine: its live jobs, their queues and their completions, without any I/O.

Threading: ``JobTable`` is shared by the engine's caller and its pump. Its one lock guards every mutable field of
``Job`` and ``Task``; both decide by the table's methods, which hold that lock for microseconds, and act outside it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from nixl_offload.engine.records import (
    ChunkIO,
    Completion,
    Ending,
    Job,
    Task,
    completion_of,
    kind_of,
    slots_of,
    travel_together,
)
from nixl_offload.engine.states import (
    LANES,
    READS_BLOCKS,
    TRANSITIONS,
    ChunkState,
    Lane,
    WorkKind,
    claimed,
    when_closed,
    when_given_up,
)
from nixl_offload.types import Outcome

EXPIRE_EVERY_S = 0.05
FENCE_POLL_S = 0.0005
"""Between two looks at a step that stores are waited for. Nothing tells of its end."""
MOVE_QUEUE_LIMIT_S = 30.0
"""Background work that has not begun by then is DROPPED: it keeps a host slot from being used for something better."""


class JobTable:
    """The live jobs, their queues and their completions.

    After any failure still holds: each accepted job tells its outcomes exactly once, and so its host slots; a chunk
    that is DONE never leaves that state.
    """

    def __init__(self, *, store_queue_limit_bytes: int, clock: Callable[[], float]) -> None:
        self._lock = threading.Lock()
        self._bell = threading.Lock()
        """Wakes the pump: held while nobody has rung. A Condition would cost each job some 20 µs more."""
        self._bell.acquire()
        self._progress = threading.Condition(self._lock)
        self._clock = clock
        self._limit_bytes = store_queue_limit_bytes
        self._jobs: dict[int, Job] = {}
        self._lanes: dict[Lane, deque[Task]] = {lane: deque() for lane in Lane}
        self._completions: list[Completion] = []
        self._filling: dict[Job, None] = {}
        """Jobs with host slots that something may still touch; they may have ended long ago."""
        self._waiting_bytes = {"load": 0, "store": 0, "background": 0}
        """Of chunks that are QUEUED."""
        self._expire_s = clock()
        self._refusal: str | None = None
        """Why every new job fails; None while the pump lives."""
        self._woken = False

    # -- the caller's side ------------------------------------------------------------------------------------------

    def add(self, job: Job, chunks: Sequence[tuple[ChunkIO, int]], lane: Lane) -> None:
        """Accept ``job`` with its (chunk, payload bytes) pairs, all queued in ``lane``.

        Where queued stores reach their limit, the rest of the job becomes DROPPED at once: the queue has a bound. No
        job with its id may be live.
        """
        with self._lock:
            self._jobs[job.job_id] = job
            job.tasks = [Task(job, io, kind_of(job.kind, io), size_bytes) for io, size_bytes in chunks]
            job.unfinished = len(job.tasks)
            job.slots_total = job.unknown_slots = sum([task.kind.fills_slot for task in job.tasks])
            if job.unknown_slots:
                self._filling[job] = None
            if not job.tasks:
                self._tell(job)
            queue = self._accept(job, sum([task.size_bytes for task in job.tasks]))
            # Side by side, so that chunks of a group travel in one batch.
            queue.sort(key=lambda task: task.io.group)
            self._lanes[lane].extend(queue)
            self._wake()

    def _accept(self, job: Job, size_bytes: int) -> list[Task]:
        """Count what waits; return the chunks that may be queued, the others are finished."""
        waiting, sort = self._waiting_bytes, _waits_as(job.kind)
        reached, limit = waiting[sort], self._limit_bytes
        waiting[sort] += size_bytes
        if self._refusal is None and (sort != "store" or reached + size_bytes <= limit):
            return list(job.tasks)
        queue, full = list[Task](), False
        for task in job.tasks:
            reached += task.size_bytes
            full = full or (sort == "store" and reached > limit)
            if self._refusal is not None:
                self._finish(task, Outcome.FAILED, self._refusal, "closed")
            elif full:
                self._finish(task, Outcome.DROPPED, "store queue is full", "queue_full")
            else:
                queue.append(task)
        return queue

    def drain(self) -> list[Completion]:
        """Return the completions since the last call."""
        if not self._completions:
            return []  # asked in every step: what comes this moment is seen in the next
        with self._lock:
            completions, self._completions = self._completions, []
            return completions

    def expedite(self, job_ids: Collection[int]) -> list[Job]:
        """Put what is queued of these jobs before everything else. Return those that are live."""
        with self._lock:
            jobs = [self._jobs[job_id] for job_id in job_ids if job_id in self._jobs]
            for job in jobs:
                queued = [task for task in job.tasks if task.state is ChunkState.QUEUED]
                queued.sort(key=lambda task: task.io.group)
                self._lanes[Lane.URGENT_STORE if job.kind.writes else Lane.EXPEDITED_LOAD].extend(queued)
            if jobs:
                self._wake()
            return jobs

    def await_steps(self, jobs: Sequence[Job], until_s: float) -> None:
        """Return once the steps of all stores among ``jobs`` have ended, at ``until_s`` of the clock at the latest.

        The next step queues up behind one that still runs all the same, so waiting for it costs little.
        """
        stores = [job for job in jobs if job.kind.writes]
        with self._lock:
            while any(_needs_blocks(job) and _is_behind(job) for job in stores) and self._clock() < until_s:
                self._progress.wait(FENCE_POLL_S)

    def await_slots(self, jobs: Sequence[Job], until_s: float) -> None:
        """Return once no store among ``jobs`` is queued any more. What still is at ``until_s`` is DROPPED then."""
        stores = [job for job in jobs if job.kind.writes]
        with self._lock:
            while any(map(_has_queued, stores)):
                left_s = until_s - self._clock()
                if left_s > 0.0:
                    self._progress.wait(left_s)
                    continue
                for task in [task for job in stores for task in job.tasks if task.state is ChunkState.QUEUED]:
                    words = "its blocks were needed before storage had time for it"
                    self._finish(task, Outcome.DROPPED, words, "needed_back")
                self._sweep()

    def await_blocks(self, jobs: Sequence[Job], limit_s: float) -> None:
        """Return once no store among ``jobs`` needs its KV blocks and all loads are finished. After ``limit_s`` stores
        that are still reading are given up, and those loads are FAILED whose KV blocks nobody touches.
        """
        with self._lock:
            if self._progress.wait_for(lambda: not any(map(_needs_blocks, jobs)), limit_s):
                return
            for job in jobs:
                for task in job.tasks:
                    words = f"its blocks were needed and storage did not answer in {limit_s:g} s"
                    self._give_up(task, words, "no_answer")
            self._sweep()
            self._progress.wait_for(lambda: not any(map(_needs_blocks, jobs)))

    def idle(self) -> bool:
        """True if no job is live, no host slot is being filled, and nothing waits to be drained."""
        with self._lock:
            return not (self._jobs or self._completions or self._filling)

    def waiting_bytes(self) -> tuple[int, int, int]:
        """Return the payload bytes that wait for their turn: of loads, of stores, and of background work."""
        with self._lock:
            waiting = self._waiting_bytes
            return waiting["load"], waiting["store"], waiting["background"]

    # -- the pump's side --------------------------------------------------------------------------------------------

    def busy_lanes(self) -> Iterator[Lane]:
        """Yield the lanes with something in them, in their order, each looked at when its turn comes.

        Without the lock: whoever adds to a lane wakes the pump afterwards.
        """
        for lane in LANES:
            if self._lanes[lane]:
                yield lane

    def take(self, lane: Lane, room: Callable[[Task], int]) -> list[Task]:
        """Claim the first queued chunks of ``lane``: those of one job, group and kind, at most ``room`` of them.

        ``room``: for how many chunks like this one there is room (called once, under the lock: pure and quick).
        """
        with self._lock:
            queue, taken, queued = self._lanes[lane], list[Task](), ChunkState.QUEUED
            while queue and queue[0].state is not queued:
                queue.popleft()  # dropped, failed, or claimed through another lane
            limit = room(queue[0]) if queue else 0
            if limit < 1:
                return taken
            first, state, size_bytes = queue[0], claimed(queue[0].kind), 0
            while queue and len(taken) < limit:
                task = queue[0]
                if task.state is queued:
                    if not travel_together(first, task):
                        break
                    task.state = state  # at once: a load that is waited for may stand here a second time
                    size_bytes += task.size_bytes
                    taken.append(task)
                queue.popleft()
            self._waiting_bytes[_waits_as(first.job.kind)] -= size_bytes
            self._progress.notify_all()
            return taken

    def refuse(self, lane: Lane, why_not: Callable[[Task], str | None]) -> None:
        """Fail the first queued chunks of ``lane`` as long as ``why_not``, which is as ``room``, has words for them."""
        with self._lock:
            queue = self._lanes[lane]
            while queue:
                if queue[0].state is ChunkState.QUEUED:
                    why = why_not(queue[0])
                    if why is None:
                        return
                    self._finish(queue[0], Outcome.FAILED, why, "disabled")
                    self._progress.notify_all()
                queue.popleft()

    def empty(self) -> bool:
        """True if no job is live."""
        with self._lock:
            return not self._jobs

    def advance(self, tasks: Sequence[Task], state: ChunkState) -> list[bool]:
        """Move chunks on; waiters learn it. False for a chunk that was given up meanwhile, or is DISOWNED: nothing
        changed then. A chunk that is in ``state`` already stays there.
        """
        done, disowned = ChunkState.DONE, ChunkState.DISOWNED
        with self._lock:
            goes = [task.state is not done and task.state is not disowned for task in tasks]
            for task, moves in zip(tasks, goes, strict=True):
                if moves and task.state is not state:
                    self._move(task, state)
            self._progress.notify_all()
            return goes

    def complete(self, endings: Iterable[Ending]) -> None:
        """Give chunks their outcomes, and tell of the host slots that they filled. Of each the first word counts.

        ``cause``: what ``error`` says, in one word of a small set, for metrics; ``io`` where nothing is known.
        """
        with self._lock:
            for task, outcome, error, cause, slot in endings:
                if slot is not None:
                    self._settle_slot(task, slot)
                self._finish(task, outcome, error, cause)
            self._progress.notify_all()

    def expire_loads(self, timeout_s: float) -> None:
        """Fail loads that were submitted more than ``timeout_s`` ago, except where their KV blocks are being touched;
        drop background work that has waited for ``MOVE_QUEUE_LIMIT_S``.

        For both sides: a pump that hangs in a system call cannot do it. Looks at most every ``EXPIRE_EVERY_S``.
        """
        now_s = self._clock()
        if now_s < self._expire_s:
            return
        with self._lock:
            self._expire_s = now_s + EXPIRE_EVERY_S
            limit_s = now_s - timeout_s
            late = [job for job in self._jobs.values() if not job.kind.writes and job.submitted_s <= limit_s]
            for job in late:
                for task in job.tasks:
                    self._give_up(task, f"storage did not answer in {timeout_s:g} s", "timeout")
            limit_s = now_s - MOVE_QUEUE_LIMIT_S
            waited = [job for job in self._jobs.values() if job.kind.in_background and job.submitted_s <= limit_s]
            for job in waited:
                for task in job.tasks:
                    if task.state in {ChunkState.QUEUED, ChunkState.CLAIMED}:
                        self._finish(task, Outcome.DROPPED, "storage had no time for a move", "no_time")
            if late or waited:
                self._sweep()
                self._progress.notify_all()

    def give_up(self, why: str) -> None:
        """Refuse what comes and end what is there: queued writes and background work are DROPPED, all else is FAILED;
        host slots that are being filled or written out are TAINTED, for nobody will see the end of that.
        """
        with self._lock:
            self._refusal = why
            for job in list(self._filling):
                for task in job.tasks:
                    if task.kind.fills_slot and task.state is not ChunkState.QUEUED:
                        self._settle_slot(task, Outcome.TAINTED)
            for job in list(self._jobs.values()):
                for task in job.tasks:
                    self._finish(task, when_closed(task.kind, task.state), why, "closed")
            self._progress.notify_all()

    def sleep(self, seconds: float | None) -> None:
        """Pump only: sleep until woken by new work, at most ``seconds`` (None: no limit)."""
        if self._bell.acquire(timeout=-1 if seconds is None else seconds):
            with self._lock:
                self._woken = False

    def wake(self) -> None:
        """Wake the pump."""
        with self._lock:
            self._wake()

    # -- under the lock ---------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        if not self._woken:
            self._woken = True
            self._bell.release()

    def _move(self, task: Task, state: ChunkState) -> None:
        """Change the state of a chunk that was taken. Callers notify waiters."""
        if state not in TRANSITIONS[task.state]:
            raise RuntimeError(f"chunk of job {task.job.job_id} cannot go from {task.state.name} to {state.name}")
        task.state = state

    def _give_up(self, task: Task, why: str, cause: str) -> None:
        """End a chunk early as far as that is safe."""
        end = when_given_up(task.kind, task.state)
        if isinstance(end, Outcome):
            self._finish(task, end, why, cause)
        elif end is not None:
            self._move(task, end)

    def _sweep(self) -> None:
        """Forget what was given up while queued: behind a head that has to wait, nobody else would take it away."""
        for lane, queue in self._lanes.items():
            if any(task.state is not ChunkState.QUEUED for task in queue):
                self._lanes[lane] = deque(task for task in queue if task.state is ChunkState.QUEUED)

    def _finish(self, task: Task, outcome: Outcome, error: str | None, cause: str = "") -> None:
        """Give a chunk that is not DONE its outcome. Callers notify waiters."""
        state, job = task.state, task.job
        if state is ChunkState.DONE:
            return
        if state is ChunkState.DISOWNED and outcome is Outcome.OK:
            outcome, error, cause = Outcome.FAILED, "its blocks were given away while they were written", "needed_back"
        if state is ChunkState.QUEUED:
            self._waiting_bytes[_waits_as(job.kind)] -= task.size_bytes
            if task.kind.fills_slot:
                self._settle_slot(task, outcome)  # it never began
        task.state = ChunkState.DONE  # any state may end
        task.outcome, task.error, task.cause = outcome, error, cause
        job.unfinished -= 1
        if not job.unfinished:
            self._tell(job)

    def _settle_slot(self, task: Task, outcome: Outcome) -> None:
        """Nothing touches the host slot of a chunk any more, or (TAINTED) something may for ever; the first counts."""
        if task.slot is not None or not task.kind.fills_slot:
            return
        task.slot = outcome
        job = task.job
        job.unknown_slots -= 1
        if not job.unknown_slots:
            del self._filling[job]
            if not job.unfinished:
                self._completions.append(Completion(job.job_id, job.kind, (), slots_of(job)))

    def _tell(self, job: Job) -> None:
        """All chunks of a job are done."""
        del self._jobs[job.job_id]
        self._completions.append(completion_of(job, self._clock() - job.submitted_s))


def _waits_as(kind: WorkKind) -> str:
    """Where a job's bytes are counted while they wait."""
    return "background" if kind.in_background else "store" if kind.writes else "load"


def _is_behind(job: Job) -> bool:
    """Whether the job's step still runs. A device that is out of order is the pump's to find out: here is nobody who
    could make a recompute of it.
    """
    try:
        return not job.fence.done()
    except Exception:  # noqa: BLE001 - see above
        return False


def _has_queued(job: Job) -> bool:
    """Whether the pump has yet to begin with a chunk."""
    return any(task.state is ChunkState.QUEUED for task in job.tasks)


def _needs_blocks(job: Job) -> bool:
    """Whether a store reads its KV blocks, or may yet; whether a load is unfinished."""
    if not job.kind.writes:
        return job.unfinished > 0
    return any(task.state in READS_BLOCKS for task in job.tasks)
