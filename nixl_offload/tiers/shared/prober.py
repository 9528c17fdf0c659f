"""Asks a shared store which chunks exist, and does small tasks in it, on threads of its own.

Threading: every public method returns at once, and only the scheduler's thread may call it, except ``expired``.
Questions and tasks have separate threads, and nobody waits for a thread that hangs in the store. Decisions are taken
under one lock, storage is asked outside it. Results pass through a queue, and ``take_in`` makes the callbacks on the
scheduler's thread.
Ownership: the store belongs to the prober's owner.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeVar

from nixl_offload.calls import CallThreads
from nixl_offload.errors import StoreError
from nixl_offload.stores.base import Store
from nixl_offload.tiers.shared.search import Search
from nixl_offload.types import Key

logger = logging.getLogger(__name__)
T = TypeVar("T")

MAX_SAMPLES: Final = 1024
"""Limit of the durations that are kept until ``take_seconds``."""


@dataclass(slots=True, eq=False)
class KeyProbe:
    """The question whether a key exists, and its answer. The answer ignores later changes to the key."""

    key: Key
    waiters: list[tuple[Search, int]] = field(default_factory=list)
    """Searches, and the key's position in each."""
    asked_s: float = 0.0
    """When it was sent, on the prober's clock."""
    is_overdue: bool = False
    """Whether ``overdue`` has returned it. Its error is then not reported again."""
    is_there: bool = False
    """Whether it exists, with the right size and young enough to count."""
    modified_s: float = 0.0
    """The object's modification time, by the store's clock; 0 if absent."""
    error: StoreError | None = None


class Prober:
    """Asks the questions of searches. A key is asked about once at a time, even if several searches wait for it."""

    def __init__(
        self,
        store: Store,
        *,
        witness_of: Callable[[Key], tuple[str, int] | None],
        on_answer: Callable[[KeyProbe], None],
        on_end: Callable[[Search], None],
        ttl_s: float | None = None,
        threads: int = 16,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """``witness_of``: the shard that is looked for; None: the key is absent. ``on_answer`` is called for every
        question, ``on_end`` for every search that was not cancelled. ``threads``: for questions.
        """
        self.since_s = 0.0
        """Objects modified earlier, by the store's clock, count as absent. Set by the scheduler's thread."""
        self.questions = 0
        """Questions that were answered or failed, since the start."""
        self.errors = 0
        self._store = store
        self._witness_of = witness_of
        self._on_answer = on_answer
        self._on_end = on_end
        self._ttl_s = ttl_s
        self._clock = clock
        self._wall = wall
        self._asking = CallThreads("nixl-offload-probe", threads)
        self._tasks = CallThreads("nixl-offload-probe-task", 2)
        self._events: deque[Callable[[], None]] = deque()
        """Callbacks for the scheduler's thread."""
        self._seconds: deque[float] = deque(maxlen=MAX_SAMPLES)
        self._lock = threading.Lock()
        """Guards the fields below."""
        self._probes: dict[Key, KeyProbe] = {}
        """Questions sent or queued."""
        self._out: set[KeyProbe] = set()
        self._is_closed = False

    def search(self, search: Search) -> None:
        """Begin a search."""
        with self._lock:
            self._advance(search)

    def cancel(self, search: Search) -> int:
        """Cancel a search. Its questions that were not sent yet are not asked. If it has ended already, ``on_end`` may
        still be called.

        Returns how many leading keys it has found so far.
        """
        with self._lock:
            search.is_over = True
            return search.known

    def do(self, work: Callable[[Store], object], then: Callable[[StoreError | None], None]) -> None:
        """Do ``work`` on a thread, then call ``then`` with its error. Two tasks run at a time."""
        self._tasks.start(partial(self._do, work, then))

    def take_in(self) -> None:
        """Make the callbacks that are due. Retries starting threads if earlier starts failed."""
        if not self._is_closed:
            self._asking.keep_up()
            self._tasks.keep_up()
        for _ in range(len(self._events)):
            self._events.popleft()()

    def overdue(self, now_s: float, limit_s: float) -> list[KeyProbe]:
        """Return the questions that were sent more than ``limit_s`` ago, each once."""
        with self._lock:
            late = [probe for probe in self._out if not probe.is_overdue and now_s - probe.asked_s > limit_s]
            for probe in late:
                probe.is_overdue = True
            return late

    def expired(self, modified_s: float) -> bool:
        """Whether an object modified at that time counts as absent. Any thread may ask."""
        return modified_s < self.since_s or (self._ttl_s is not None and self._wall() - modified_s > self._ttl_s)

    def take_seconds(self) -> list[float]:
        """Return the durations of questions since the last call; the latest ``MAX_SAMPLES`` at most."""
        seconds, self._seconds = self._seconds, deque(maxlen=MAX_SAMPLES)
        return list(seconds)

    def close(self, timeout_s: float = 1.0) -> None:
        """Start nothing more, and wait ``timeout_s`` at most for running work. Idempotent."""
        self._is_closed = True
        give_up_s = time.monotonic() + timeout_s
        for threads in (self._asking, self._tasks):
            threads.close(max(0.0, give_up_s - time.monotonic()))

    def _advance(self, search: Search) -> None:
        """Ask the search's next questions. The caller holds the lock."""
        for position in search.next_round():
            key = search.keys[position]
            probe = self._probes.get(key)
            if probe is None:
                probe = self._probes[key] = KeyProbe(key)
                self._asking.start(partial(self._ask, probe))
            probe.waiters.append((search, position))
        if search.done:
            search.is_over = True
            self._events.append(partial(self._on_end, search))

    # On threads.

    def _ask(self, probe: KeyProbe) -> None:
        with self._lock:
            if self._is_closed or all(search.is_over for search, _ in probe.waiters):
                del self._probes[probe.key]
                return
            probe.asked_s = self._clock()
            self._out.add(probe)
        began_s = time.monotonic()
        found, probe.error = self._try(partial(self._look, probe.key))
        self._seconds.append(time.monotonic() - began_s)
        if found is not None:
            probe.is_there, probe.modified_s = found
        with self._lock:
            self._out.discard(probe)
            del self._probes[probe.key]
            self.questions += 1
            self.errors += probe.error is not None
            if probe.error is None or not probe.is_overdue:
                self._events.append(partial(self._on_answer, probe))
            waiting = [waiter for waiter in probe.waiters if not waiter[0].is_over]
            for search, position in waiting:
                search.failed |= probe.error is not None
                search.answer(position, probe.is_there)
            for search in dict.fromkeys(search for search, _ in waiting):
                self._advance(search)

    def _look(self, key: Key, store: Store) -> tuple[bool, float]:
        witness = self._witness_of(key)
        info = store.head(witness[0]) if witness is not None else None
        if witness is None or info is None or self.expired(info.modified_s):
            return False, 0.0
        return info.size_bytes == witness[1], info.modified_s

    def _do(self, work: Callable[[Store], object], then: Callable[[StoreError | None], None]) -> None:
        if not self._is_closed:
            self._events.append(partial(then, self._try(work)[1]))

    def _try(self, work: Callable[[Store], T]) -> tuple[T | None, StoreError | None]:
        try:
            return work(self._store), None
        except StoreError as error:
            return None, error
        except Exception as error:
            logger.exception("A look into a shared store ended in an error that should not be")
            return None, StoreError(type(error).__name__, cause="io")
