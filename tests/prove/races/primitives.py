"""What the modules under test have instead of ``threading``, ``queue``, ``concurrent.futures`` and ``time``.

Only the interpreter's own ``_thread`` is replaced. What the standard library builds on it (conditions, events,
semaphores, queues, pools, joins) is the standard library's code, a copy of its modules over these locks, so that what
it does in which order is what it does in production. ``SimpleQueue`` is its Python version: here that in C would wait
unseen.

``install`` has every module of the product that is imported from then on get these. Where no scheduler runs, locks are
taken and given back as by one thread, and time is the real one.
"""

from __future__ import annotations

import _thread as real
import builtins
import importlib.abc
import importlib.machinery
import importlib.util
import queue as real_queue
import sys
import time as real_time
from collections.abc import Callable, Mapping, Sequence
from types import CodeType, ModuleType
from typing import Any, ClassVar

from tests.prove.races.scheduler import Scheduler, Stopped, Thread

PREFIXES = ("nixl_offload", "tests.unit.", "tests.model.", "tests.prove.races.scenarios", "tests.prove.races.toys")


class LockOrder:
    """Which locks were taken while others were held, by where they were made. Over all runs of a process."""

    edges: ClassVar[dict[tuple[str, str], str]] = {}
    """(Held, taken): where, and by which thread, it was first seen."""
    signals: ClassVar[set[str]] = set()

    @classmethod
    def took(cls, thread: Thread, lock: Lock) -> None:
        """A thread takes a lock and will wait for it as long as it needs."""
        for held in thread.held:
            if (held.site, lock.site) not in cls.edges and not held.is_signal and not lock.is_signal:
                cls.edges[held.site, lock.site] = f"{thread.name} at {_caller()}"

    @classmethod
    def is_no_mutex(cls, lock: Lock) -> None:
        """It is given back by another thread than took it: a signal, which has no place in an order."""
        lock.is_signal = True
        cls.signals.add(lock.site)

    @classmethod
    def cycles(cls) -> list[str]:
        """Return the cycles: locks that two threads might take in different orders."""
        after: dict[str, set[str]] = {}
        edges = {pair: where for pair, where in cls.edges.items() if cls.signals.isdisjoint(pair)}
        for held, taken in edges:
            after.setdefault(held, set()).add(taken)
        found = []
        for (held, taken), where in sorted(edges.items()):
            reached, left = set[str](), [taken]
            while left:
                site = left.pop()
                if site not in reached:
                    reached.add(site)
                    left += after.get(site, ())
            if held in reached:
                found.append(f"{held} is held when {taken} is taken by {where}, and the other way round elsewhere")
        return found


_lasting: list[Lock | RLock] = []
"""Locks of modules, which outlive a run."""


def begin_run() -> None:
    """Give back what threads have that were left where an earlier run ended before its time."""
    no_threads[0] = 0
    _sentinels.clear()
    for lock in _lasting:
        lock._at_fork_reinit()


class Lock:
    """``_thread.lock``. Any thread may give it back."""

    def __init__(self) -> None:
        self._taken = False
        scheduler = Scheduler.active
        self._user = -1 if scheduler is None or scheduler.current is None else scheduler.current.number
        if scheduler is None:
            _lasting.append(self)
        """The one thread that has made and used it so far; -1: several have."""
        self.clock: dict[int, int] = {}
        self.site = _caller()
        self.is_signal = self.site == "?" or sys._getframe(1).f_code.co_name == "wait"
        """Of the standard library's own, or what one waits for in a condition."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        scheduler = Scheduler.active
        if scheduler is None:
            if self._taken and blocking:
                raise RuntimeError(f"the lock of {self.site} is taken, and no thread runs that could give it back")
            self._taken, took = True, not self._taken
            return took
        if self._is_shared(scheduler):
            scheduler.point(f"takes {self.site}")
        if self._taken and blocking and timeout != 0:
            limit_s = None if timeout is None or timeout < 0 else timeout
            if not scheduler.wait(self, limit_s, self.site):
                return False
        if self._taken:
            return False
        me = scheduler.current
        if me is None:
            raise Stopped
        self._taken = True
        if blocking and timeout < 0:
            LockOrder.took(me, self)
        me.held.append(self)
        _join(me.clock, self.clock)
        return True

    def release(self) -> None:
        if not self._taken:
            raise RuntimeError("release unlocked lock")
        self._taken = False
        scheduler = Scheduler.active
        if scheduler is None or scheduler.current is None:
            return
        me = scheduler.current
        if self in me.held:
            me.held.remove(self)
        else:
            LockOrder.is_no_mutex(self)
            for thread in scheduler.threads:
                if self in thread.held:
                    thread.held.remove(self)
        _join(self.clock, me.clock)
        me.clock[me.number] += 1
        if self._is_shared(scheduler):
            scheduler.point(f"gave back {self.site}")

    def locked(self) -> bool:
        return self._taken

    def is_free(self) -> bool:
        """For the scheduler."""
        return not self._taken

    def _is_shared(self, scheduler: Scheduler) -> bool:
        """Whether more than one thread has used it. One that is known to one thread only says nothing to others."""
        if self._user != -1 and scheduler.current is not None and self._user != scheduler.current.number:
            self._user = -1
        return self._user == -1

    def _is_owned(self) -> bool:
        return self._taken  # as threading.Condition asks, which would try to take it

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def _at_fork_reinit(self) -> None:
        self._taken, self.clock = False, {}


class RLock:
    """``_thread.RLock``."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._owner: int | None = None
        self._count = 0
        if Scheduler.active is None:
            _lasting.append(self)

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        me = real.get_ident()
        if self._owner == me:
            self._count += 1
            return True
        took = self._lock.acquire(blocking, timeout)
        if took:
            self._owner, self._count = me, 1
        return took

    def release(self) -> None:
        if self._owner != real.get_ident():
            raise RuntimeError("cannot release un-acquired lock")
        self._count -= 1
        if not self._count:
            self._owner = None
            self._lock.release()

    def _is_owned(self) -> bool:
        return self._owner == real.get_ident()

    def _release_save(self) -> tuple[int, int | None]:
        saved, self._count, self._owner = (self._count, self._owner), 0, None
        self._lock.release()
        return saved

    def _acquire_restore(self, saved: tuple[int, int | None]) -> None:
        self._lock.acquire()
        self._count, self._owner = saved

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def _at_fork_reinit(self) -> None:
        self._owner, self._count = None, 0


_sentinels: dict[int, Lock] = {}
no_threads = [0]
"""So many more threads cannot be started."""


def _start(function: Callable[..., object], arguments: Sequence[Any], named: Mapping[str, Any] | None = None) -> int:
    scheduler = Scheduler.active
    if scheduler is None or scheduler.current is None:
        raise RuntimeError("no scheduler runs that could start a thread")
    if no_threads[0]:
        no_threads[0] -= 1
        raise RuntimeError("can't start new thread")

    def begin() -> None:
        try:
            function(*arguments, **(named or {}))
        finally:
            ended = _sentinels.pop(real.get_ident(), None)
            if ended is not None and ended.locked():
                ended.release()

    owner = getattr(function, "__self__", None)
    return scheduler.start(getattr(owner, "_name", None) or "thread", begin)


def _sentinel() -> Lock:
    lock = _sentinels[real.get_ident()] = Lock()
    return lock


def _monotonic() -> float:
    scheduler = Scheduler.active
    return real_time.monotonic() if scheduler is None else scheduler.now()


def _sleep(seconds: float) -> None:
    scheduler = Scheduler.active
    if scheduler is None:
        real_time.sleep(seconds)
    elif seconds <= 0:
        scheduler.point("lets others run")
    else:
        scheduler.wait(None, seconds, f"{seconds:g} s to pass")


def _uncaught(args: Any) -> None:
    if Scheduler.active is not None:
        Scheduler.active.fail("dead", f"thread {args.thread.name} ended with {args.exc_value!r}")


def _caller() -> str:
    """Return the place in the product, or in a test, that the standard library was called from, and where in that."""
    frame, inner = sys._getframe(1), ""
    while frame.f_back is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith(PREFIXES):
            return f"{name.rpartition('.')[2]}:{frame.f_lineno}{inner}"
        if name in {"threading", "queue", "concurrent.futures.thread", "concurrent.futures._base"}:
            inner += f" {name.rpartition('.')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


def _join(clock: dict[int, int], other: Mapping[int, int]) -> None:
    """What comes after this clock comes after the other, too."""
    for number, time in other.items():
        if time > clock.get(number, 0):
            clock[number] = time


def _ordered(base: Any) -> type:
    """Return a queue in which a get comes after the put of what it got. The Python version takes one put's count and
    another's item; the one in C, which the product uses, does both in one step.
    """

    class SimpleQueue(base):  # type: ignore[misc]
        def put(self, item: object, block: bool = True, timeout: float | None = None) -> None:
            me = Scheduler.active and Scheduler.active.current
            clock = dict(me.clock) if me else {}
            if me:
                me.clock[me.number] += 1
            super().put((item, clock), block, timeout)

        def get(self, block: bool = True, timeout: float | None = None) -> object:
            item, clock = super().get(block, timeout)
            me = Scheduler.active and Scheduler.active.current
            if me:
                _join(me.clock, clock)
            return item

    return SimpleQueue


def _module(name: str, **attributes: object) -> ModuleType:
    made = ModuleType(name)
    made.__dict__.update(attributes)
    return made


def _like(module: ModuleType, **changed: object) -> ModuleType:
    return _module(module.__name__, **{**vars(module), **changed})


class _Source(importlib.abc.Loader):
    """Runs a module's source with ``import`` giving the replacements."""

    def __init__(self, loader: Any, replacements: Mapping[str, ModuleType]) -> None:
        self._loader = loader
        self._replacements = replacements

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return None

    def get_code(self, name: str) -> CodeType | None:
        code: CodeType | None = self._loader.get_code(name)
        return code

    def exec_module(self, module: ModuleType) -> None:
        code = self._loader.get_code(module.__name__)
        module.__dict__["__builtins__"] = {**vars(builtins), "__import__": self._import}
        exec(code, module.__dict__)

    def _import(
        self,
        name: str,
        globals: Mapping[str, object] | None = None,
        locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] = (),
        level: int = 0,
    ) -> ModuleType:
        if level == 0 and name in self._replacements and (fromlist or "." not in name):
            return self._replacements[name]
        return builtins.__import__(name, globals, locals, fromlist, level)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, replacements: Mapping[str, ModuleType]) -> None:
        self._replacements = replacements

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith(PREFIXES):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Source(spec.loader, self._replacements)
        return spec


def _copy(name: str, replacements: Mapping[str, ModuleType]) -> ModuleType:
    """Load a module of the standard library once more, over the replacements."""
    spec = importlib.util.find_spec(name)
    assert spec is not None
    module = ModuleType(name)
    module.__spec__ = spec
    module.__package__ = spec.parent
    _Source(spec.loader, replacements).exec_module(module)
    return module


def install() -> None:
    """From now on modules of the product, and rigs, are loaded over these primitives. Once, before they are."""
    loaded = [name for name in sys.modules if name.startswith(PREFIXES) and not name.startswith("tests.prove.races.")]
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    if loaded:
        raise RuntimeError(f"{loaded[0]} has been imported already, over the real threads")
    thread = _like(
        real, allocate_lock=Lock, allocate=Lock, LockType=Lock, RLock=RLock, start_new_thread=_start,
        start_new=_start, _set_sentinel=_sentinel,
    )  # fmt: skip
    clock = _like(real_time, monotonic=_monotonic, perf_counter=_monotonic, time=_monotonic, sleep=_sleep)
    threading = _copy("threading", {"_thread": thread, "time": clock})
    threading.__dict__["excepthook"] = _uncaught
    found: dict[str, ModuleType] = {"_thread": thread, "time": clock, "threading": threading}
    queue = _copy("queue", {**found, "_queue": _module("_queue", Empty=real_queue.Empty)})
    queue.__dict__["SimpleQueue"] = _ordered(queue.__dict__["_PySimpleQueue"])
    found["queue"] = queue
    base = _copy("concurrent.futures._base", found)
    pool = _copy(
        "concurrent.futures.thread", {**found, "concurrent.futures": _module("concurrent.futures", _base=base)}
    )
    names = ("Future", "wait", "as_completed", "CancelledError", "TimeoutError", "FIRST_COMPLETED", "ALL_COMPLETED")
    futures = {name: getattr(base, name) for name in names}
    found["concurrent.futures"] = _module(
        "concurrent.futures", **futures, ThreadPoolExecutor=pool.__dict__["ThreadPoolExecutor"]
    )
    sys.meta_path.insert(0, _Finder(found))
