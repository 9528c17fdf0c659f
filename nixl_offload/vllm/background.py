"""Opens something on a thread of its own, and tries again until it is open, so that no step waits for it.

Threading: ``BackgroundOpening`` has one daemon thread; its methods may be called from any other. Where no thread can
be started now, ``take`` tries again.
Ownership: whoever takes the result owns it. What nobody takes is closed, at ``close`` or when it comes after that.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from nixl_offload.errors import NixlOffloadError
from nixl_offload.hardware.cores import unbound
from nixl_offload.tiers.breaker import Breaker

logger = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_PAUSE_S = 10.0
LONGEST_PAUSE_S = 300.0
"""Pauses between two trials double from the first to the longest."""


class BackgroundOpening(Generic[T]):
    """Begins at once. ``make`` opens the thing; as often as it raises it is called again, after a pause. ``discard``
    closes the thing if nobody has taken it.

    The first failure of each cause is logged as a warning that begins with ``what``, and so is, as information, the end
    of the trouble. An error that is not ours is logged with its trace, once for each type. Nothing is kept alive by the
    trace of a failure.
    """

    def __init__(self, make: Callable[[], T], discard: Callable[[T], None], *, what: str, thread_name: str) -> None:
        self._make = make
        self._discard = discard
        self._what = what
        self._tried = threading.Event()
        self._closing = threading.Event()
        self._thread_name = thread_name
        self._breaker = Breaker(
            what, threshold=1, first_pause_s=FIRST_PAUSE_S, longest_pause_s=LONGEST_PAUSE_S, effect="not open"
        )
        """Of the thread, once there is one."""
        self._traced: set[type[BaseException]] = set()
        """Likewise: the types of errors that were logged with their trace."""
        self._lock = threading.Lock()
        """Guards what follows."""
        self._opened: list[T] = []
        """What was opened and not taken yet: one thing, or nothing."""
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None
        with self._lock:
            self._start_thread()

    @property
    def error(self) -> Exception | None:
        """Why it is not open yet, by the last trial. None: it is open, or the first trial has not ended."""
        with self._lock:
            return self._error

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the first trial has ended, well or not; False: not within ``timeout_s``."""
        return self._tried.wait(timeout_s)

    def take(self) -> T | None:
        """Return what was opened, once; None: it is not open, or was taken."""
        with self._lock:
            if self._thread is None and not self._closing.is_set() and self._breaker.allows(time.monotonic()):
                self._start_thread()
            return self._opened.pop() if self._opened else None

    def stop(self) -> None:
        """Begin no further trial. Waits for nothing."""
        self._closing.set()

    def close(self, timeout_s: float) -> bool:
        """Give up, and close what nobody took. False: the thread did not end within ``timeout_s``. Idempotent."""
        with self._lock:
            self._closing.set()
            left, self._opened = self._opened, []
            thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
        for each in left:
            self._discard(each)
        return thread is None or not thread.is_alive()

    def _start_thread(self) -> None:
        """Begin, or take note that the machine has no thread to spare now. Holds the lock."""
        thread = threading.Thread(target=self._run, name=self._thread_name, daemon=True)
        try:
            with unbound():
                thread.start()
        except RuntimeError as error:
            self._error = error.with_traceback(None)
            self._breaker.failed("thread", str(error), time.monotonic())
            self._tried.set()
        else:
            self._thread = thread

    def _run(self) -> None:
        while not self._closing.is_set() and not self._try():
            while not self._breaker.allows(time.monotonic()):
                if self._closing.wait(max(0.0, self._breaker.until_s - time.monotonic())):
                    return

    def _try(self) -> bool:
        try:
            opened = self._make()
        except BaseException as error:
            if not isinstance(error, NixlOffloadError) and type(error) not in self._traced:
                self._traced.add(type(error))
                logger.error("%s: an unexpected error keeps it from being opened", self._what, exc_info=error)
            _drop_traces(error)
            with self._lock:
                self._error = error if isinstance(error, Exception) else RuntimeError(repr(error))
            cause = getattr(error, "cause", "") or type(error).__name__
            self._breaker.failed(cause, str(error).rstrip("."), time.monotonic())
            self._tried.set()
            return False
        self._breaker.succeeded(time.monotonic())
        with self._lock:
            is_late = self._closing.is_set()
            if not is_late:
                self._opened.append(opened)
                self._error = None
        if is_late:
            self._discard(opened)
        self._tried.set()
        return True


def _drop_traces(error: BaseException) -> None:
    """Let go of the frames that ``error``, and what led to it, came through: they hold what was being opened."""
    left: list[BaseException | None] = [error]
    seen: set[int] = set()
    while left:
        each = left.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            each.__traceback__ = None
            left += each.__cause__, each.__context__
