"""Looks into a shared store on threads of its own: what is there, and small tasks beside.

Threading: every public method returns at once and may be called by the scheduler's thread alone, except ``expired``.
Questions, tasks and the trial have threads apart, so none waits for another; one that hangs in the store is never
waited for. Decisions are taken under one lock, storage is asked outside it; results cross over in a queue, and
``take_in`` calls back with them on the scheduler's thread.
Ownership: the store belongs to the prober's owner.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, Final, TypeVar

from nixl_offload.errors import StoreError
from nixl_offload.stores.base import Store
from nixl_offload.tiers.calls import CallThreads
from nixl_offload.tiers.shared.naming import StoredShard
from nixl_offload.tiers.shared.search import Search
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


@dataclass(slots=True, eq=False)
class Question:
    """Whether a key is there, and the answer. What happened to the key since it was asked is not in the answer."""

    key: Key
    waiters: list[tuple[Search, int]] = field(default_factory=list)
    """Searches, and the key's position in each."""
    asked_s: float = 0.0
    """When it went out, on the prober's clock."""
    is_overdue: bool = False
    """It was out for too long, and was returned as such. Its error would be no news."""
    sight: Sight | None = None
    """None: the store did not say."""
    modified_s: float = 0.0
    """By the store's clock, of what is there."""
    error: StoreError | None = None


class Prober:
    """Searches ask about keys, each key once at a time however many searches wait for it."""

    def __init__(
        self,
        store: Store,
        *,
        shards_of: Callable[[Key], Iterable[StoredShard]],
        on_answer: Callable[[Question], None],
        on_end: Callable[[Search], None],
        ttl_s: float | None = None,
        threads: int = 16,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """``shards_of``: the first is looked at for a key; none: there can be none. ``on_answer`` is called for every
        question, ``on_end`` for every search that was not cancelled. ``threads``: for questions.
        """
        self.since_s = 0.0
        """Objects modified earlier, by the store's clock, count as absent. Set by the scheduler's thread."""
        self.questions = 0
        """Questions that were answered or failed, ever."""
        self.errors = 0
        self._store = store
        self._shards_of = shards_of
        self._on_answer = on_answer
        self._on_end = on_end
        self._ttl_s = ttl_s
        self._clock = clock
        self._wall = wall
        self._asking = CallThreads("nixl-offload-probe", threads)
        self._tasks = CallThreads("nixl-offload-probe-task", TASK_THREADS)
        self._trial = CallThreads("nixl-offload-probe-trial", 1)
        self._events: deque[Callable[[], None]] = deque()
        """What to call on the scheduler's thread."""
        self._seconds: deque[float] = deque(maxlen=MAX_SAMPLES)
        self._lock = threading.Lock()
        """Guards all that follows."""
        self._searches: set[Search] = set()
        self._questions: dict[Key, Question] = {}
        """Out, or queued."""
        self._out: set[Question] = set()
        self._is_closed = False

    def search(self, search: Search) -> None:
        """Begin a search."""
        with self._lock:
            self._searches.add(search)
            self._advance(search)

    def cancel(self, search: Search) -> int:
        """Give a search up. One that has ended may still be taken in.

        Returns how many leading keys it has found to be there so far.
        """
        with self._lock:
            self._searches.discard(search)
            return search.known

    def cancel_all(self) -> None:
        """Give up every search. Questions that are not out yet are not asked."""
        with self._lock:
            self._searches.clear()

    def do(self, work: Callable[[Store], T], then: Callable[[T | None, StoreError | None], None]) -> bool:
        """Do ``work`` on a thread, and call back ``then`` with its result or error.

        False: too many tasks wait already.
        """
        if self._tasks.pending >= MAX_TASKS:
            return False
        self._tasks.start(partial(self._do, work, then))
        return True

    def try_store(self, work: Callable[[Store], T], then: Callable[[T | None, StoreError | None], None]) -> None:
        """The same on another thread, to see whether the store answers. One at a time; others are left out."""
        if not self._trial.pending:
            self._trial.start(partial(self._do, work, then))

    def take_in(self, limit: int) -> None:
        """Call back for what has happened since the last call, ``limit`` times at most. Starts threads that were
        missing.
        """
        if not self._is_closed:
            for threads in (self._asking, self._tasks, self._trial):
                threads.keep_up()
        for _ in range(min(limit, len(self._events))):
            self._events.popleft()()

    def overdue(self, now_s: float, limit_s: float) -> tuple[set[Key], list[Question]]:
        """Return the keys whose questions have been out for longer than ``limit_s``, and the questions that were not
        returned before.
        """
        with self._lock:
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
        """Whether something is being done or waits to be. What is to be taken in does not count."""
        return bool(self._asking.pending or self._tasks.pending or self._trial.pending)

    def take_seconds(self) -> list[float]:
        """Return how long questions took since the last call; the latest ``MAX_SAMPLES`` of them."""
        seconds, self._seconds = self._seconds, deque(maxlen=MAX_SAMPLES)
        return list(seconds)

    def close(self, timeout_s: float = 1.0) -> None:
        """Begin nothing more, and wait ``timeout_s`` at most for what is under way. Idempotent."""
        self._is_closed = True
        self.cancel_all()
        give_up_s = time.monotonic() + timeout_s
        for threads in (self._asking, self._tasks, self._trial):
            threads.close(max(0.0, give_up_s - time.monotonic()))

    def _advance(self, search: Search) -> None:
        """Ask what the search wants to know next; the lock is held."""
        for position in search.next_round():
            key = search.keys[position]
            question = self._questions.get(key)
            if question is None:
                question = self._questions[key] = Question(key)
                self._asking.start(partial(self._ask, question))
            question.waiters.append((search, position))
        if search.done:
            self._searches.discard(search)
            self._events.append(partial(self._on_end, search))

    # On threads.

    def _ask(self, question: Question) -> None:
        with self._lock:
            if not any(search in self._searches for search, _ in question.waiters):
                del self._questions[question.key]
                return
            question.asked_s = self._clock()
            self._out.add(question)
        began_s = time.monotonic()
        found, question.error = self._try(partial(self._look, question.key))
        self._seconds.append(time.monotonic() - began_s)
        if found is not None:
            question.sight, question.modified_s = found
        with self._lock:
            self._out.discard(question)
            del self._questions[question.key]
            self.questions += 1
            self.errors += question.error is not None
            if question.error is None or not question.is_overdue:
                self._events.append(partial(self._on_answer, question))
            waiting = [waiter for waiter in question.waiters if waiter[0] in self._searches]
            for search, position in waiting:
                search.failed |= question.error is not None
                search.answer(position, question.sight is Sight.PRESENT)
            for search in dict.fromkeys(search for search, _ in waiting):
                self._advance(search)

    def _look(self, key: Key, store: Store) -> tuple[Sight, float]:
        witness = next(iter(self._shards_of(key)), None)
        info = store.head(witness.name) if witness is not None else None
        if witness is None or info is None or self.expired(info.modified_s):
            return Sight.ABSENT, 0.0
        return Sight.PRESENT if info.size_bytes == witness.size_bytes else Sight.DAMAGED, info.modified_s

    def _do(self, work: Callable[[Store], Any], then: Callable[[Any, StoreError | None], None]) -> None:
        if not self._is_closed:
            self._events.append(partial(then, *self._try(work)))

    def _try(self, work: Callable[[Store], T]) -> tuple[T | None, StoreError | None]:
        try:
            return work(self._store), None
        except StoreError as error:
            return None, error
        except Exception as error:
            logger.exception("A look into a shared store ended in an error that should not be")
            return None, StoreError(type(error).__name__, cause="io")
