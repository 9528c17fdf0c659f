"""A filesystem that fails, hangs or lies on cue, over the real one: for code that takes a ``Filesystem``.

Threading: any thread meets what is in force; one test sets it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

from nixl_offload.stores.filesystem import Filesystem


class HostileFilesystem(Filesystem):
    """``before`` is called ahead of each call with its name and its first argument, and may raise OSError. ``open``
    with O_CREAT has the name ``create``.
    """

    def __init__(self) -> None:
        self.before: Callable[[str, object], None] = lambda call, target: None
        self.held = 0
        """Calls that hang now, or did."""
        self._hanging: frozenset[str] = frozenset()
        self._released = threading.Event()

    def hang(self, *calls: str) -> None:
        """Hold such calls back from now on, as a server that does not answer; those that hang already go on so."""
        self._hanging = frozenset(calls)
        self._released.clear()

    def release(self) -> None:
        """Let all go on."""
        self._hanging = frozenset()
        self._released.set()

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        return self._around(name, found) if name in vars(Filesystem) and not name.startswith("_") else found

    def _around(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def met(*arguments: Any, **options: Any) -> Any:
            called = "create" if name == "open" and arguments[1] & os.O_CREAT else name
            if called in self._hanging:
                self.held += 1
                self._released.wait(60)
            self.before(called, arguments[0])
            return call(*arguments, **options)

        return met
