"""Watches attributes of chosen classes: each access is a switch point, and two that nothing orders are a finding.

Orders are those of locks, starts and ends of threads, as vector clocks tell (FastTrack, Flanagan and Freund 2009, but
with whole clocks). Only the attribute itself is watched: what a container that it names does is not.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

from tests.prove.races.scheduler import Scheduler, Thread


class _History:
    __slots__ = ("reads", "write")

    def __init__(self) -> None:
        self.write: tuple[int, int, str] | None = None
        """Number of the thread, its time, and where."""
        self.reads: dict[int, tuple[int, str]] = {}


class Watch(AbstractContextManager["Watch"]):
    """While it is entered, classes tell of accesses to their objects. ``races``: what was found, a line each."""

    def __init__(self, classes: tuple[type, ...], allowed: Mapping[str, str]) -> None:
        self._classes = classes
        self._allowed = allowed
        self._before: list[tuple[type, Any, Any, bool, bool]] = []
        self._histories: dict[tuple[int, str], _History] = {}
        self._kept: dict[int, object] = {}
        """Objects, so that no other gets the identity of one that is gone."""
        self.races: list[str] = []
        self.shared = 0
        """Accesses to attributes that another thread has used, too."""

    def __enter__(self) -> Watch:
        for watched in self._classes:
            get, put = watched.__getattribute__, watched.__setattr__
            own = vars(watched)
            self._before.append((watched, get, put, "__getattribute__" in own, "__setattr__" in own))
            self._replace(watched, get, put)
        return self

    def __exit__(self, *_: object) -> None:
        for watched, get, put, had_get, had_put in self._before:
            for name, value, had in (("__getattribute__", get, had_get), ("__setattr__", put, had_put)):
                if had:
                    setattr(watched, name, value)
                else:
                    delattr(watched, name)
        self._before = []

    def _replace(self, watched: type, get: Any, put: Any) -> None:
        def getattribute(this: Any, name: str) -> Any:
            if (not name.startswith("__") and not hasattr(type(this), name)) or name in _slots(type(this)):
                self._accessed(this, name, is_write=False)
            return get(this, name)

        def setattribute(this: Any, name: str, value: Any) -> None:
            self._accessed(this, name, is_write=True)
            put(this, name, value)

        watched.__getattribute__ = getattribute  # type: ignore[method-assign]
        watched.__setattr__ = setattribute  # type: ignore[method-assign]

    def _accessed(self, this: object, name: str, *, is_write: bool) -> None:
        scheduler = Scheduler.active
        if scheduler is None or scheduler.current is None:
            return
        frame = sys._getframe(2)
        place = f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
        key = f"{type(this).__name__}.{name}"
        known = self._histories.get((id(this), name))
        shared = known is not None and (
            len(known.reads) > 1 or (known.write and known.write[0] != scheduler.current.number)
        )
        self.shared += bool(shared)
        if shared or len(scheduler.threads) > 1:
            scheduler.point(f"{'sets' if is_write else 'reads'} {key} at {place}")
        thread = scheduler.current
        assert thread is not None
        if known is None:
            known = self._histories[id(this), name] = _History()
            self._kept[id(this)] = this
        if key not in self._allowed:
            self._compare(known, thread, key, place, is_write=is_write)
        now = thread.clock[thread.number]
        if is_write:
            known.write, known.reads = (thread.number, now, f"{thread.name} at {place}"), {}
        else:
            known.reads[thread.number] = now, f"{thread.name} at {place}"

    def _compare(self, known: _History, thread: Thread, key: str, place: str, *, is_write: bool) -> None:
        others = [] if known.write is None else [(known.write[0], known.write[1], f"is set by {known.write[2]}")]
        if is_write:
            others += [(number, time, f"is read by {where}") for number, (time, where) in known.reads.items()]
        for number, time, what in others:
            if number != thread.number and time > thread.clock.get(number, 0):
                does = "set" if is_write else "read"
                self.races.append(f"{key} {what}, and {does} by {thread.name} at {place}: nothing orders the two")


@cache
def _slots(watched: type) -> frozenset[str]:
    return frozenset(name for each in watched.__mro__ for name in vars(each).get("__slots__", ()))
