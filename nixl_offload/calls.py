"""Threads for calls that storage may never answer. A call that hangs blocks only these threads.

Threading: any thread may use a ``CallThreads``. Work runs on daemon threads, which do not keep the process from ending
(the interpreter joins those of a ThreadPoolExecutor at exit).
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import PriorityQueue
from typing import TypeVar

T = TypeVar("T")


class Call(Future[T]):
    """One call, queued or running, as a future."""

    def __init__(self, work: Callable[[], T], discard: Callable[[T], None] | None) -> None:
        super().__init__()
        self.begun_s: float | None = None
        """When a thread began it; None while it is queued."""
        self._work = work
        self._discard = discard

    def abandon(self) -> None:
        """Give the result up: ``discard`` gets it, now or when the call ends."""
        self.add_done_callback(lambda _: self._discard_result())

    def run(self, now_s: float) -> None:
        """Do the work, on a thread of ``CallThreads``."""
        self.begun_s = now_s
        try:
            value = self._work()
        except BaseException as error:  # noqa: BLE001 - handed on by result
            self.set_exception(error)
        else:
            self.set_result(value)

    def _discard_result(self) -> None:
        if self._discard is not None and self.exception() is None:
            with contextlib.suppress(OSError):
                self._discard(self.result())


class CallThreads:
    """Up to ``threads`` daemon threads, started as needed. Calls begin by priority, the lowest first, then in order."""

    def __init__(self, name: str, threads: int = 8, clock: Callable[[], float] = time.monotonic) -> None:
        self.pending = 0
        """How many calls have not ended, abandoned ones included."""
        self.ended_s = clock()
        """When a call last ended. If calls keep ending, a queued call waits for a thread, not for storage."""
        self._name = name
        self._clock = clock
        self._limit = threads
        self._queue: PriorityQueue[tuple[float, int, Callable[[float], None] | None]] = PriorityQueue()
        """Priority, number, and what runs; None ends a thread."""
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        """Guards ``pending`` and the list of threads."""
        self._threads: list[threading.Thread] = []

    def start(self, work: Callable[[], T], discard: Callable[[T], None] | None = None) -> Call[T]:
        """Queue a call. ``discard`` gets the result of an abandoned call, on any thread."""
        call = Call(work, discard)
        self.post(call.run)
        return call

    def post(self, run: Callable[[float], None], priority: int = 0) -> None:
        """Queue ``run``, which gets the time and raises nothing: no ``Call``, which would cost 6 µs."""
        with self._lock:
            if self.pending >= len(self._threads) < self._limit:
                self._add_thread()
            self.pending += 1
        self._queue.put((priority, next(self._numbers), run))

    def keep_up(self) -> bool:
        """Retry starting a thread if calls wait and earlier starts failed. Returns whether there is one."""
        if self.pending and not self._threads:
            with self._lock:
                self._add_thread()
        return bool(self._threads)

    def close(self, patience_s: float = 0.5) -> None:
        """Let queued calls end; after ``patience_s``, abandon the threads that hang."""
        with self._lock:
            threads, self._threads = self._threads, []
        for _ in threads:
            self._queue.put((math.inf, next(self._numbers), None))
        give_up_s = time.monotonic() + patience_s
        for thread in threads:
            thread.join(max(0.0, give_up_s - time.monotonic()))

    def _add_thread(self) -> None:
        thread = threading.Thread(target=self._main, name=self._name, daemon=True)
        with contextlib.suppress(RuntimeError):  # no thread can start now; the next call or ``keep_up`` tries again
            thread.start()
            self._threads.append(thread)

    def _main(self) -> None:
        while (run := self._queue.get()[2]) is not None:
            run(self._clock())
            with self._lock:
                self.pending -= 1
            self.ended_s = self._clock()
