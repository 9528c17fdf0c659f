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
    """Calls have the names of their methods; ``open`` with O_CREAT is ``create``, and with O_DIRECT ``direct``, too."""

    def __init__(self) -> None:
        self.held = 0
        """Calls that hang now, or did."""
        self._hanging: frozenset[str] = frozenset()
        self._released = threading.Event()
        self._refused: dict[tuple[str, str], int] = {}

    def refuse(self, number: int, call: str, path: str = "") -> None:
        """Fail such calls from now on, with this errno: all, or those for a path."""
        self._refused[call, path.rstrip("/")] = number

    def hang(self, *calls: str) -> None:
        """Hold such calls back from now on, as a server that does not answer; those that hang already go on so."""
        self._hanging = frozenset(calls)
        self._released.clear()

    def release(self) -> None:
        """Let all go on, and refuse nothing."""
        self._hanging, self._refused = frozenset(), {}
        self._released.set()

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        return self._around(name, found) if name in vars(Filesystem) and not name.startswith("_") else found

    def _around(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def met(*arguments: Any, **options: Any) -> Any:
            flags, path = arguments[1] if name == "open" else 0, str(arguments[0]).rstrip("/")
            names = {"create" if flags & os.O_CREAT else name} | ({"direct"} if flags & os.O_DIRECT else set())
            if names & self._hanging:
                self.held += 1
                self._released.wait(60)
            for refused, number in self._refused.items():
                if refused[0] in names and refused[1] in ("", path):
                    raise OSError(number, os.strerror(number))
            return call(*arguments, **options)

        return met
