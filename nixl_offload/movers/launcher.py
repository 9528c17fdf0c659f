"""A thread of a mover's own, for calls that may block.

Threading: ``submit`` and ``end`` from any thread; calls are made one after the other, in the order they came. It is a
daemon: what hangs in a call does not keep the process from ending, as a ThreadPoolExecutor's thread would.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Launcher:
    """One daemon thread and its queue."""

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queue a call; what it returns or raises is the future's."""
        future: Future[T] = Future()

        def called() -> None:
            try:
                future.set_result(call(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001 - the future's
                future.set_exception(error)

        self._queue.put(called)
        return future

    def end(self, *, wait: bool) -> None:
        """End the thread behind what is queued. ``wait``: until it has ended."""
        self._queue.put(None)
        if wait:
            self._thread.join()

    def _main(self) -> None:
        while (called := self._queue.get()) is not None:
            called()
            del called  # it holds what it was called with
