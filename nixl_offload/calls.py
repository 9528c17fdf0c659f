"""Threads for calls that storage may never answer. A call that hangs blocks only these threads.

Threading: any thread may use a ``CallThreads``. Work runs on daemon threads, which do not keep the process from ending
(the interpreter joins those of a ThreadPoolExecutor at exit).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

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
    """Up to ``threads`` daemon threads, started as needed. Calls begin in the order of ``start``."""

    def __init__(self, name: str, threads: int = 8, clock: Callable[[], float] = time.monotonic) -> None:
        self.pending = 0
        """How many calls have not ended, abandoned ones included."""
        self.ended_s = clock()
        """When a call last ended. If calls keep ending, a queued call waits for a thread, not for storage."""
        self._name = name
        self._clock = clock
        self._limit = threads
        self._queue: SimpleQueue[Call[Any] | None] = SimpleQueue()
        self._lock = threading.Lock()
        """Guards ``pending`` and the list of threads."""
        self._threads: list[threading.Thread] = []

    def start(self, work: Callable[[], T], discard: Callable[[T], None] | None = None) -> Call[T]:
        """Queue a call. ``discard`` gets the result of an abandoned call, on any thread."""
        call = Call(work, discard)
        with self._lock:
            if self.pending >= len(self._threads) < self._limit:
                self._add_thread()
            self.pending += 1
        self._queue.put(call)
        return call

    def keep_up(self) -> None:
        """Retry starting a thread if calls wait and earlier starts failed."""
        if self.pending and not self._threads:
            with self._lock:
                self._add_thread()

    def close(self, patience_s: float = 0.5) -> None:
        """Let queued calls end; after ``patience_s``, abandon the threads that hang."""
        with self._lock:
            threads, self._threads = self._threads, []
        for _ in threads:
            self._queue.put(None)
        give_up_s = time.monotonic() + patience_s
        for thread in threads:
            thread.join(max(0.0, give_up_s - time.monotonic()))

    def _add_thread(self) -> None:
        thread = threading.Thread(target=self._main, name=self._name, daemon=True)
        with contextlib.suppress(RuntimeError):  # no thread can start now; the next call or ``keep_up`` tries again
            thread.start()
            self._threads.append(thread)

    def _main(self) -> None:
        while (call := self._queue.get()) is not None:
            call.run(self._clock())
            with self._lock:
                self.pending -= 1
            self.ended_s = self._clock()
