"""Opens something on a thread of its own, so that no step waits for it.

Threading: ``BackgroundOpening`` has one daemon thread; its methods may be called from any other.
Ownership: whoever takes the result owns it. What nobody takes is closed, at ``close`` or when it comes after that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from nixl_offload.hardware.cores import unbound

T = TypeVar("T")


class BackgroundOpening(Generic[T]):
    """Begins at once. ``make`` opens the thing, and ``discard`` closes it if nobody has taken it."""

    def __init__(self, make: Callable[[], T], discard: Callable[[T], None], *, name: str) -> None:
        self._make = make
        self._discard = discard
        self._done = threading.Event()
        self._lock = threading.Lock()
        """Guards what follows."""
        self._opened: list[T] = []
        """What was opened and not taken yet: one thing, or nothing."""
        self._error: Exception | None = None
        self._closed = False
        with unbound():
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()

    @property
    def done(self) -> bool:
        """Whether ``make`` has ended, by an exception or not."""
        return self._done.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is ``done``; False: not within ``timeout_s``."""
        return self._done.wait(timeout_s)

    def take(self) -> T | None:
        """Return what was opened, once; None: not yet, or it was taken. Raises what ``make`` raised, once."""
        with self._lock:
            error, self._error = self._error, None
            if error is not None:
                raise error
            return self._opened.pop() if self._opened else None

    def close(self, timeout_s: float) -> bool:
        """Give up, and close what nobody took. False: the thread did not end within ``timeout_s``. Idempotent."""
        with self._lock:
            self._closed = True
            left, self._opened = self._opened, []
        self._thread.join(timeout_s)
        for each in left:
            self._discard(each)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            opened = self._make()
        except BaseException as error:  # noqa: BLE001 - whoever takes the result is told, of a panic in a library, too
            with self._lock:
                self._error = error if isinstance(error, Exception) else RuntimeError(repr(error))
        else:
            with self._lock:
                is_late = self._closed
                if not is_late:
                    self._opened.append(opened)
            if is_late:
                self._discard(opened)
        finally:
            self._done.set()
