"""Opens something on a thread of its own, and retries until it is open, so that no step waits for it.

Threading: one daemon thread for each ``BackgroundOpening``, whose methods may be called from any other thread.
Ownership: the caller of ``take`` owns the result. A result that nobody takes is closed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from nixl_offload.config import TierConfig
from nixl_offload.errors import ConfigError, NixlOffloadError, TierError
from nixl_offload.hardware.machine import unbound
from nixl_offload.tiers.breaker import Breaker

logger = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_PAUSE_S = 10.0
LONGEST_PAUSE_S = 300.0
"""Pauses between two trials double from the first to the longest."""
CLOSE_S = 2.0
"""How long sleep and shutdown wait for storage that is just being opened."""


class BackgroundOpening(Generic[T]):
    """Begins at once. ``make`` opens the thing and is called again, after a pause, when it raises. ``discard`` closes
    the thing if nobody has taken it.

    Logs a warning for the first failure of each cause, beginning with ``what``, and a line when it is over. Only
    unexpected errors are logged with a traceback. Failures keep no object alive.
    """

    def __init__(
        self,
        make: Callable[[], T],
        discard: Callable[[T], object],
        *,
        what: str,
        thread_name: str,
        after: Iterable[threading.Thread] = (),
    ) -> None:
        """``after``: threads that must end before the first trial, because they use the same storage."""
        self._after = after
        self._make = make
        self._discard = discard
        self._thread_name = thread_name
        self._tried = threading.Event()
        self._closing = threading.Event()
        self._breaker = Breaker(
            what, threshold=1, first_pause_s=FIRST_PAUSE_S, longest_pause_s=LONGEST_PAUSE_S, effect="not open"
        )
        """Used by the thread alone once it runs."""
        self._lock = threading.Lock()
        """Guards changes of the fields below."""
        self._opened: list[T] = []
        """The opened thing until it is taken; else empty."""
        self.error: NixlOffloadError | None = None
        """Why the last trial failed; None if the thing is open or the first trial has not ended."""
        self._thread: threading.Thread | None = None
        with self._lock:
            self._start_thread()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the first trial, successful or not. Returns False if it has not ended within ``timeout_s``."""
        return self._tried.wait(timeout_s)

    def take(self) -> T | None:
        """Return the opened thing once; None if it is not open or was taken. Retries a failed start of the thread."""
        with self._lock:
            if self._thread is None and not self._closing.is_set() and self._breaker.allows(time.monotonic()):
                self._start_thread()
            return self._opened.pop() if self._opened else None

    def close(self) -> list[threading.Thread]:
        """Stop trying, and close a thing that nobody took. Returns the thread, without waiting for it to end."""
        with self._lock:
            self._closing.set()
            left, self._opened = self._opened, []
            thread = self._thread
        for each in left:
            self._discard(each)
        return [] if thread is None else [thread]

    def _start_thread(self) -> None:
        """Call with the lock held. Records an error if the machine has no thread to spare."""
        thread = threading.Thread(target=self._run, name=self._thread_name, daemon=True)
        try:
            with unbound():
                thread.start()
        except RuntimeError as error:
            self.error = TierError(str(error), cause="thread")
            self._breaker.failed("thread", str(error), time.monotonic())
            self._tried.set()
        else:
            self._thread = thread

    def _run(self) -> None:
        for thread in self._after:
            thread.join()
        while not self._closing.is_set() and not self._try():
            while not self._breaker.allows(time.monotonic()):
                if self._closing.wait(max(0.0, self._breaker.until_s - time.monotonic())):
                    return

    def _try(self) -> bool:
        try:
            opened = self._make()
        except BaseException as error:  # noqa: BLE001 - also a panic in a library
            cause, text = getattr(error, "cause", "") or type(error).__name__, str(error).rstrip(".") or repr(error)
            with self._lock:  # a new error: the raised one's frames would keep alive what was being opened
                self.error = ConfigError(text) if isinstance(error, ConfigError) else TierError(text, cause=cause)
            trace = None if isinstance(error, NixlOffloadError) else error
            self._breaker.failed(cause, text, time.monotonic(), trace)
            self._tried.set()
            return False
        self._breaker.succeeded(time.monotonic())
        with self._lock:
            is_late = self._closing.is_set()
            if not is_late:
                self._opened.append(opened)
                self.error = None
        if is_late:
            self._discard(opened)
        self._tried.set()
        return True


def in_background(close: Callable[[], object]) -> list[threading.Thread]:
    """Close something on a new thread, and return the thread. If none can be started, close it in this one."""

    def run() -> None:
        try:
            close()
        except Exception:  # the step must go on
            logger.exception("A tier was not closed in order")

    thread = threading.Thread(target=run, name="nixl-offload-close", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        run()
        return []
    return [thread]


def join_all(threads: list[threading.Thread], timeout_s: float) -> list[threading.Thread]:
    """Wait for all threads, at most ``timeout_s`` in total; return those that have not ended."""
    until_s = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, until_s - time.monotonic()))
    return [thread for thread in threads if thread.is_alive()]


def name_of(tier: TierConfig) -> str:
    """Return a tier's name for messages: its kind and where it is."""
    return f"{tier.kind} tier {tier.where}"
