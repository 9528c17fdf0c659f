"""Looks into a shared store on threads of its own: what is there, and small tasks when nobody waits for an answer.

Threading: every public method returns at once and may be called by the scheduler's thread alone, except that results
cross over in a queue that ``drain`` empties. A fixed number of daemon threads does the asking; one that hangs in the
store is never waited for. Decisions are taken under one lock, storage is asked outside it.
Ownership: the store belongs to whoever made the prober.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from nixl_offload.errors import StoreError
from nixl_offload.stores.base import Store
from nixl_offload.tiers.shared.chain_search import Search
from nixl_offload.tiers.shared.naming import StoredShard
from nixl_offload.tiers.shared.prober_events import (
    BackgroundTask,
    Event,
    Overdue,
    ProbeAnswer,
    ProbeCounts,
    ProbeResult,
    SearchEnd,
    TaskEnd,
    TrialEnd,
)
from nixl_offload.types import Key

logger = logging.getLogger(__name__)

MAX_TASKS = 1024
"""Tasks that may wait; more are refused: whoever wanted them wants them again later."""
MAX_SAMPLES = 1024
"""Durations of HEADs that are kept until somebody takes them."""


@dataclass(slots=True, eq=False)
class _Search:
    number: int
    keys: Sequence[Key]
    plan: Search


@dataclass(slots=True, eq=False)
class _Probe:
    key: Key
    plain: bool = False
    """Wanted for itself, whatever becomes of the searches."""
    waiters: list[tuple[_Search, int]] = field(default_factory=list)
    asked_s: float = 0.0
    told: bool = False
    """Already returned as overdue."""


class _TrialProbe(NamedTuple):
    name: str


class Prober:
    """Runs searches round by round, and asks about each key once at a time however many searches want it.

    An object counts as present when it has the size it must have, was modified after ``since_s``, and within ``ttl_s``.
    """

    def __init__(
        self,
        store: Store,
        *,
        witness_of: Callable[[Key], StoredShard | None],
        ttl_s: float | None = None,
        threads: int = 16,
        task_threads: int = 2,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Start ``threads`` threads, of which at most ``task_threads`` do tasks at a time, and one for trials.

        ``witness_of`` tells the object that stands for a key, None for a key that cannot be there; it is called from
        any thread. ``wall`` is this machine's idea of the store's clock: minutes of difference do no harm. Raises
        RuntimeError when no more threads can be started; none is left then.
        """
        self.since_s = 0.0
        """Objects modified earlier, by the store's clock, count as absent. Set by the scheduler's thread."""
        self._store = store
        self._witness_of = witness_of
        self._ttl_s = ttl_s
        self._busy_threads = threads
        """For questions and tasks. One more is left for a trial: questions that hang must not keep it waiting."""
        self._task_threads = task_threads
        self._clock = clock
        self._wall = wall
        self._events: deque[Event] = deque()
        self._changed = threading.Condition()
        """Guards all that follows."""
        self._searches: dict[int, _Search] = {}
        self._probes: dict[Key, _Probe] = {}
        """Asked about now, or queued."""
        self._queue: deque[_Probe] = deque()
        self._running: set[_Probe] = set()
        self._trial: _TrialProbe | None = None
        self._trial_out = False
        self._tasks: deque[BackgroundTask] = deque()
        self._tasks_running = 0
        self._counts = ProbeCounts()
        self._seconds: deque[float] = deque(maxlen=MAX_SAMPLES)
        self._closing = False
        self._threads: list[threading.Thread] = []
        try:
            for number in range(threads + 1):
                thread = threading.Thread(target=self._work, name=f"nixl-offload-probe-{number}", daemon=True)
                thread.start()
                self._threads.append(thread)
        except RuntimeError:  # no more threads to be had: those that there are would wait for ever
            self.close()
            raise

    def search(self, number: int, keys: Sequence[Key], plan: Search) -> None:
        """Begin a search over ``keys``, in the order of ``plan``'s positions. Ends in one ``SearchEnd``."""
        with self._changed:
            search = _Search(number, keys, plan)
            self._searches[number] = search
            self._counts.searches += 1
            self._advance(search)

    def probe(self, keys: Sequence[Key]) -> None:
        """Look at ``keys``, each for itself. Ends in a ``ProbeAnswer`` each."""
        with self._changed:
            for key in keys:
                self._want(key).plain = True

    def cancel(self, number: int) -> int:
        """Give a search up: no ``SearchEnd`` any more, but one that is there already and was not drained. Questions
        that are out still end in a ``ProbeAnswer``.

        Returns how many leading keys it has found to be there so far.
        """
        with self._changed:
            search = self._searches.pop(number, None)
            return search.plan.known if search is not None else 0

    def cancel_all(self) -> None:
        """Give up every search and every question that is not out yet."""
        with self._changed:
            self._searches.clear()
            for probe in self._queue:
                del self._probes[probe.key]
            self._queue.clear()

    def trial(self, name: str) -> bool:
        """Look at one object before all else, to see whether the store answers. False: a trial is out already."""
        with self._changed:
            if self._trial is not None or self._trial_out:
                return False
            self._trial = _TrialProbe(name)
            self._changed.notify()
            return True

    def do(self, task: BackgroundTask) -> bool:
        """Do ``task`` when no question waits. Ends in a ``TaskEnd``. False: too many wait already."""
        with self._changed:
            if len(self._tasks) >= MAX_TASKS or self._closing:
                return False
            self._tasks.append(task)
            self._changed.notify()
            return True

    def drain(self, limit: int) -> list[Event]:
        """Return what has happened since the last call, ``limit`` events at most."""
        events = self._events
        return [events.popleft() for _ in range(min(limit, len(events)))]

    def overdue(self, now_s: float, limit_s: float) -> list[Overdue]:
        """Return the questions that have been out for longer than ``limit_s``. No error will be told of them later."""
        with self._changed:
            late = [probe for probe in self._running if now_s - probe.asked_s > limit_s]
            told = [Overdue(probe.key, probe.asked_s, not probe.told) for probe in late]
            for probe in late:
                probe.told = True
            return told

    @property
    def idle(self) -> bool:
        """Whether nothing is being done and nothing waits, results included."""
        with self._changed:
            busy = self._probes or self._tasks or self._tasks_running or self._trial or self._trial_out
            return not busy and not self._events

    def counts(self) -> ProbeCounts:
        """Return a copy of the counters."""
        with self._changed:
            return replace(self._counts)

    def take_seconds(self) -> list[float]:
        """Return how long HEADs took since the last call; the latest ``MAX_SAMPLES`` of them."""
        if not self._seconds:
            return []
        with self._changed:
            seconds = list(self._seconds)
            self._seconds.clear()
            return seconds

    def close(self, timeout_s: float = 1.0) -> None:
        """Begin nothing more, and wait ``timeout_s`` at most for what is under way. Idempotent."""
        with self._changed:
            self._closing = True
            self._tasks.clear()
            self._changed.notify_all()
        self.cancel_all()
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))

    # Under the lock.

    def _want(self, key: Key) -> _Probe:
        probe = self._probes.get(key)
        if probe is None:
            probe = self._probes[key] = _Probe(key)
            self._queue.append(probe)
            self._changed.notify()
        return probe

    def _advance(self, search: _Search) -> None:
        for position in search.plan.next_round():
            self._want(search.keys[position]).waiters.append((search, position))
        if search.plan.done:
            del self._searches[search.number]
            self._counts.rounds += search.plan.rounds
            self._counts.questions += search.plan.probes
            self._events.append(SearchEnd(search.number, search.plan.boundary, search.plan.found))

    def _take(self) -> _Probe | _TrialProbe | BackgroundTask | None:
        while not self._closing:
            if self._trial is not None:
                trial, self._trial, self._trial_out = self._trial, None, True
                return trial
            busy = len(self._running) + self._tasks_running
            while self._queue and busy < self._busy_threads:
                probe = self._queue.popleft()
                if probe.plain or any(search.number in self._searches for search, _ in probe.waiters):
                    probe.asked_s = self._clock()
                    self._running.add(probe)
                    return probe
                del self._probes[probe.key]
            if self._tasks and self._tasks_running < self._task_threads and busy < self._busy_threads:
                self._tasks_running += 1
                return self._tasks.popleft()
            self._changed.wait()
        return None

    def _answered(self, probe: _Probe, answer: ProbeAnswer, seconds: float) -> None:
        self._running.discard(probe)
        del self._probes[probe.key]
        self._counts.heads += 1
        self._counts.seconds += seconds
        self._seconds.append(seconds)
        self._counts.errors += answer.found is ProbeResult.ERROR
        if not (probe.told and answer.found is ProbeResult.ERROR):
            self._events.append(answer)
        touched: dict[int, _Search] = {}
        for search, position in probe.waiters:
            if self._searches.get(search.number) is search:
                search.plan.answer(position, answer.found is ProbeResult.PRESENT)
                touched[search.number] = search
        for search in touched.values():
            self._advance(search)

    # On the prober's threads.

    def _work(self) -> None:
        while True:
            with self._changed:
                task = self._take()
            if task is None:
                return
            if isinstance(task, _Probe):
                began_s = time.monotonic()
                answer = self._look(task.key, task.asked_s)
                with self._changed:
                    self._answered(task, answer, time.monotonic() - began_s)
            elif isinstance(task, _TrialProbe):
                cause, message = self._try(lambda name=task.name: self._store.head(name))  # type: ignore[misc]
                with self._changed:
                    self._trial_out = False
                    self._events.append(TrialEnd(cause, message))
            else:
                cause, message = self._try(lambda task=task: task.run(self._store))  # type: ignore[misc]
                with self._changed:
                    self._tasks_running -= 1
                    self._counts.tasks += 1
                    self._counts.task_errors += bool(cause)
                    self._events.append(TaskEnd(task, cause, message))
                    self._changed.notify()

    def _look(self, key: Key, asked_s: float) -> ProbeAnswer:
        found: list[ProbeAnswer] = []

        def ask() -> None:
            witness = self._witness_of(key)
            info = self._store.head(witness.name) if witness is not None else None
            if witness is None or info is None or self.expired(info.modified_s):
                found.append(ProbeAnswer(key, ProbeResult.ABSENT, asked_s))
            elif info.size_bytes != witness.size_bytes:
                found.append(ProbeAnswer(key, ProbeResult.DAMAGED, asked_s, info.modified_s))
            else:
                found.append(ProbeAnswer(key, ProbeResult.PRESENT, asked_s, info.modified_s))

        cause, message = self._try(ask)
        return found[0] if found else ProbeAnswer(key, ProbeResult.ERROR, asked_s, cause=cause, message=message)

    def expired(self, modified_s: float) -> bool:
        """Whether an object of that date no longer counts. May be called from any thread."""
        return modified_s < self.since_s or (self._ttl_s is not None and self._wall() - modified_s > self._ttl_s)

    @staticmethod
    def _try(action: Callable[[], object]) -> tuple[str, str]:
        """Return the cause and message of what went wrong, empty when nothing did."""
        try:
            action()
        except StoreError as error:
            return error.cause, str(error)
        except Exception as error:
            # A thread that ended here would be missed for ever, and its question with it.
            logger.exception("A look into a shared store ended in an error that should not be")
            return "io", type(error).__name__
        return "", ""
