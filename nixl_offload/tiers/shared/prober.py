"""Looks into a shared store on threads of its own: what is there, and small tasks when nobody waits for an answer.

Threading: every public method returns at once and may be called by the scheduler's thread alone. A fixed number of
daemon threads does the asking; one that hangs in the store is never waited for. Decisions are taken under one lock,
storage is asked outside it; results cross over in a queue, which ``drain`` empties.
Ownership: the store belongs to whoever made the prober.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

from nixl_offload.errors import StoreError
from nixl_offload.stores.base import Store
from nixl_offload.tiers.shared.lookups import Search
from nixl_offload.tiers.shared.naming import StoredShard
from nixl_offload.types import Key

logger = logging.getLogger(__name__)
T = TypeVar("T")

MAX_TASKS: Final = 1024
"""Tasks that may wait. More are refused; the next lookup of the chunk asks for them again."""
MAX_SAMPLES: Final = 1024
"""Durations of questions that are kept until somebody takes them."""
TASK_THREADS: Final = 2


class Sight(Enum):
    """What a look at one object gave."""

    PRESENT = "present"
    ABSENT = "absent"
    """Not there, or too old to count."""
    DAMAGED = "damaged"
    """There, with a size that no good shard has."""


class Answer(NamedTuple):
    """One object was looked at."""

    key: Key
    asked_s: float
    """When the question went out, on the prober's clock. What happened to the key since is not in the answer."""
    sight: Sight | None
    """None: the store did not say."""
    modified_s: float = 0.0
    """By the store's clock, of what is there."""
    error: StoreError | None = None


@dataclass(slots=True, eq=False)
class Question:
    """Whether a key is there."""

    key: Key
    waiters: list[tuple[Search, int]] = field(default_factory=list)
    asked_s: float = 0.0
    is_overdue: bool = False
    """It was out for too long, and was returned as such. Its error would be no news."""


Event = Answer | Search | Callable[[], None]
"""An answer; a search that has ended; or what to do with the result of a task."""


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
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Start ``threads`` threads, of which at most two do tasks at a time, and one for trials.

        ``witness_of`` returns the object that stands for a key, None for a key that cannot be there; any thread calls
        it. ``wall`` is this machine's idea of the store's clock: minutes of difference do no harm. Raises RuntimeError
        when no more threads can be started; none is left then.
        """
        self.since_s = 0.0
        """Objects modified earlier, by the store's clock, count as absent. Set by the scheduler's thread."""
        self.questions = 0
        """Questions that were answered or failed, ever."""
        self.errors = 0
        self._store = store
        self._witness_of = witness_of
        self._ttl_s = ttl_s
        self._busy_threads = threads
        """For questions and tasks. One more is left for a trial: questions that hang must not keep it waiting."""
        self._clock = clock
        self._wall = wall
        self._events: deque[Event] = deque()
        self._seconds: deque[float] = deque(maxlen=MAX_SAMPLES)
        self._changed = threading.Condition()
        """Guards all that follows."""
        self._searches: set[Search] = set()
        self._questions: dict[Key, Question] = {}
        """Out, or queued."""
        self._queue: deque[Question] = deque()
        self._out: set[Question] = set()
        self._tasks: deque[Callable[[], None]] = deque()
        self._tasks_running = 0
        self._trial: Callable[[], None] | None = None
        self._is_trying = False
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

    def search(self, search: Search) -> None:
        """Begin a search. It becomes an event when it has ended; each of its questions ends in an ``Answer``."""
        with self._changed:
            self._searches.add(search)
            self._advance(search)

    def cancel(self, search: Search) -> int:
        """Give a search up: it becomes no event any more, unless it has ended and was not drained.

        Returns how many leading keys it has found to be there so far.
        """
        with self._changed:
            self._searches.discard(search)
            return search.plan.known

    def cancel_all(self) -> None:
        """Give up every search and every question that is not out yet."""
        with self._changed:
            self._searches.clear()
            for question in self._queue:
                del self._questions[question.key]
            self._queue.clear()

    def do(self, work: Callable[[Store], T], then: Callable[[T | None, StoreError | None], None]) -> bool:
        """Do ``work`` on a thread when no question waits, and ``then``, with its result or error, when events are
        drained. False: too many tasks wait already.
        """
        with self._changed:
            if len(self._tasks) >= MAX_TASKS or self._closing:
                return False
            self._tasks.append(partial(self._do, work, then))
            self._changed.notify()
            return True

    def try_store(self, work: Callable[[Store], T], then: Callable[[T | None, StoreError | None], None]) -> None:
        """The same before all else, on a thread of its own, to see whether the store answers. One at a time."""
        with self._changed:
            if self._trial is None and not self._is_trying:
                self._trial = partial(self._do, work, then)
                self._changed.notify()

    def drain(self, limit: int) -> list[Event]:
        """Return what has happened since the last call, ``limit`` events at most."""
        events = self._events
        return [events.popleft() for _ in range(min(limit, len(events)))]

    def overdue(self, now_s: float, limit_s: float) -> tuple[set[Key], list[Question]]:
        """Return the keys whose questions have been out for longer than ``limit_s``, and the questions that were not
        returned before.
        """
        with self._changed:
            late = [question for question in self._out if now_s - question.asked_s > limit_s]
            new = [question for question in late if not question.is_overdue]
            for question in new:
                question.is_overdue = True
            return {question.key for question in late}, new

    def expired(self, modified_s: float) -> bool:
        """Whether an object of that date no longer counts. Any thread may ask."""
        return modified_s < self.since_s or (self._ttl_s is not None and self._wall() - modified_s > self._ttl_s)

    @property
    def is_busy(self) -> bool:
        """Whether something is being done or waits to be. What is to be drained does not count."""
        with self._changed:
            return bool(self._questions or self._tasks or self._tasks_running or self._trial or self._is_trying)

    def take_seconds(self) -> list[float]:
        """Return how long questions took since the last call; the latest ``MAX_SAMPLES`` of them."""
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

    def _advance(self, search: Search) -> None:
        for position in search.plan.next_round():
            key = search.keys[position]
            question = self._questions.get(key)
            if question is None:
                question = self._questions[key] = Question(key)
                self._queue.append(question)
                self._changed.notify()
            question.waiters.append((search, position))
        if search.plan.done:
            self._searches.discard(search)
            self._events.append(search)

    def _take(self) -> Callable[[], None] | None:
        """Wait for something to do; None when it closes."""
        while not self._closing:
            if self._trial is not None:
                work, self._trial, self._is_trying = self._trial, None, True
                return partial(self._run_trial, work)
            busy = len(self._out) + self._tasks_running
            while self._queue and busy < self._busy_threads:
                question = self._queue.popleft()
                if any(search in self._searches for search, _ in question.waiters):
                    question.asked_s = self._clock()
                    self._out.add(question)
                    return partial(self._ask, question)
                del self._questions[question.key]
            if self._tasks and self._tasks_running < TASK_THREADS and busy < self._busy_threads:
                self._tasks_running += 1
                return partial(self._run_task, self._tasks.popleft())
            self._changed.wait()
        return None

    # On the prober's threads.

    def _work(self) -> None:
        while True:
            with self._changed:
                work = self._take()
            if work is None:
                return
            work()

    def _ask(self, question: Question) -> None:
        began_s = time.monotonic()
        found, error = self._try(partial(self._look, question.key))
        seconds = time.monotonic() - began_s
        sight, modified_s = found if found is not None else (None, 0.0)
        answer = Answer(question.key, question.asked_s, sight, modified_s, error)
        with self._changed:
            self._out.discard(question)
            del self._questions[question.key]
            self.questions += 1
            self.errors += error is not None
            self._seconds.append(seconds)
            if error is None or not question.is_overdue:
                self._events.append(answer)
            waiting = [waiter for waiter in question.waiters if waiter[0] in self._searches]
            for search, position in waiting:
                search.failed |= error is not None
                search.plan.answer(position, sight is Sight.PRESENT)
            for search in dict.fromkeys(search for search, _ in waiting):
                self._advance(search)

    def _look(self, key: Key, store: Store) -> tuple[Sight, float]:
        witness = self._witness_of(key)
        info = store.head(witness.name) if witness is not None else None
        if witness is None or info is None or self.expired(info.modified_s):
            return Sight.ABSENT, 0.0
        return Sight.PRESENT if info.size_bytes == witness.size_bytes else Sight.DAMAGED, info.modified_s

    def _run_trial(self, work: Callable[[], None]) -> None:
        work()
        with self._changed:
            self._is_trying = False

    def _run_task(self, work: Callable[[], None]) -> None:
        work()
        with self._changed:
            self._tasks_running -= 1
            self._changed.notify()

    def _do(self, work: Callable[[Store], Any], then: Callable[[Any, StoreError | None], None]) -> None:
        result, error = self._try(work)
        self._events.append(partial(then, result, error))

    def _try(self, work: Callable[[Store], T]) -> tuple[T | None, StoreError | None]:
        try:
            return work(self._store), None
        except StoreError as error:
            return None, error
        except Exception as error:
            # A thread that ended here would be missed for ever, and its question with it.
            logger.exception("A look into a shared store ended in an error that should not be")
            return None, StoreError(type(error).__name__, cause="io")
