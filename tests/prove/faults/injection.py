"""Faults on cue: in calls of the operating system below one directory, in transfers, in requests, in memory, in time.

Threading: ``Faults`` is armed and lifted by the cell's thread; what it breaks is called by any of the product's. Calls
of the cell's own thread are spared inside ``spared``.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from nixl_offload.engine import staging
from nixl_offload.movers import select
from nixl_offload.movers.base import Extents, FileId, MemoryId, MemoryKind, Mover, Op, Transfer
from nixl_offload.movers.nixl import AgentMover, NixlTransfer
from nixl_offload.stores import directory, filesystem
from nixl_offload.tiers.slab import file as slab_file
from tests.contract.suites.faulty_mover import Fault, FaultKind, FaultyMover

ERRNOS: Final = {
    "EIO": errno.EIO,
    "ENOSPC": errno.ENOSPC,
    "EROFS": errno.EROFS,
    "permission": errno.EACCES,
    "stale": errno.ESTALE,
}
_CHANGING = frozenset({"pwrite", "pwritev", "write", "mkdir", "rename", "replace", "ftruncate", "truncate", "fallocate",
                       "unlink", "utime", "fsync", "rmdir"})  # fmt: skip
_NAMING = frozenset({"open", "mkdir", "rename", "replace", "unlink", "rmdir", "scandir", "listdir", "stat", "truncate"})
_WRAPPED: Final = sorted((_CHANGING | _NAMING | {"pread", "preadv", "fstat", "statvfs", "fstatvfs"}) - {"fallocate"})
_OPENS_TO_CHANGE: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_OF_CALLS: Final = {*ERRNOS, "slow", "hang", "late write"}
FOREVER: Final = 1 << 30


class Armed:
    """One fault that is in force: what it does to calls and to transfers, how likely, and how often it did."""

    def __init__(self, fault: str, seed: int, *, share: float, most: int, calls: bool, transfers: bool) -> None:
        self.fault = fault
        self.hits = 0
        self._rng = random.Random(seed)
        self._lock = threading.Lock()
        self._share = share
        self.most = most
        self.calls = calls
        self.transfers = transfers
        self.released = threading.Event()

    def strikes(self) -> bool:
        """Whether this one is hit."""
        with self._lock:
            if self.hits >= self.most or self._rng.random() >= self._share:
                return False
            self.hits += 1
            return True

    def number(self, most: int) -> int:
        """Return a number below ``most``."""
        with self._lock:
            return self._rng.randrange(most)


class Faults:
    """What breaks in this process. ``root``: only calls on paths below it fail."""

    def __init__(self, root: Path) -> None:
        self._root = str(root)
        self.armed: Armed | None = None
        """What is in force."""
        self._mine = threading.local()
        self._movers: list[SeededMover] = []
        self.counts: Counter[str] = Counter()
        for name in _WRAPPED:
            setattr(os, name, self._around(name, getattr(os, name)))
        fcntl.fcntl = self._around("fcntl", fcntl.fcntl)
        filesystem.fallocate = self._around("fallocate", filesystem.fallocate)
        self._wrap_memory()
        self._wrap_movers()

    def lift(self) -> None:
        """End it. What hangs goes on."""
        armed, self.armed = self.armed, None
        if armed is not None:
            armed.released.set()
            self.counts[armed.fault] += armed.hits
        for mover in self._movers:
            mover.release()

    def lift_calls(self) -> None:
        """Let calls of the operating system go on; transfers that are stuck stay so."""
        if self.armed is not None:
            self.armed.calls = False
            self.armed.released.set()

    @contextlib.contextmanager
    def spared(self) -> Iterator[None]:
        """Nothing that this thread does in here fails."""
        self._mine.spared = True
        try:
            yield
        finally:
            self._mine.spared = False

    def over(self, mover: Mover) -> SeededMover:
        """Return ``mover``, broken on cue."""
        self._movers = [known for known in self._movers if not known.is_closed]
        self._movers.append(SeededMover(mover, self))
        return self._movers[-1]

    def _around(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            armed = self.armed
            if armed is not None and armed.calls and arguments and not getattr(self._mine, "spared", False):
                self._mine.spared = True  # for looking up the path below, and what pathlib calls within a call
                try:
                    self._break(armed, name, arguments)
                finally:
                    self._mine.spared = False
            return real(*arguments, **named)

        return call

    def _break(self, armed: Armed, name: str, arguments: tuple[Any, ...]) -> None:
        if armed.fault in {"ENOSPC", "EROFS"}:
            changes = name in _CHANGING or (name == "open" and bool(arguments[1] & _OPENS_TO_CHANGE))
            if not changes or (armed.fault == "ENOSPC" and name in {"unlink", "rmdir"}):
                return
        elif (armed.fault == "permission" and name not in _NAMING) or armed.fault not in _OF_CALLS:
            return
        if not self._is_below_root(arguments[0]) or not armed.strikes():
            return
        if armed.fault == "slow":
            time.sleep(0.001)
        elif armed.fault in {"hang", "late write"}:
            armed.released.wait(30.0)
        else:
            number = ERRNOS[armed.fault]
            raise OSError(number, os.strerror(number), None if isinstance(arguments[0], int) else str(arguments[0]))

    def _is_below_root(self, what: Any) -> bool:
        if isinstance(what, int):
            try:
                what = os.readlink(f"/proc/self/fd/{what}")
            except OSError:
                return False
        return os.fspath(what).startswith(self._root) if isinstance(what, str | os.PathLike) else False

    def _wrap_memory(self) -> None:
        """Memory that cannot be had: maps are refused, and staging slots are all taken."""
        real_map, real_acquire = mmap.mmap, staging.SlotPool.acquire

        def map_memory(*arguments: Any, **named: Any) -> Any:
            armed = self.armed
            if (
                armed is not None
                and armed.fault == "OOM of staging"
                and armed.calls
                and threading.current_thread() is not threading.main_thread()
                and armed.strikes()
            ):
                raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
            return real_map(*arguments, **named)

        def acquire(pool: Any) -> Any:
            armed = self.armed
            if armed is not None and armed.fault == "OOM of staging" and armed.transfers and armed.strikes():
                return None
            return real_acquire(pool)

        # Only where the product maps; mmap.mmap itself is a class that others subclass.
        for module in (staging, slab_file, directory):
            module.mmap = SimpleNamespace(**{**vars(mmap), "mmap": map_memory})  # type: ignore[attr-defined]
        staging.SlotPool.acquire = acquire  # type: ignore[method-assign]

    def _wrap_movers(self) -> None:
        """Have every mover that the product makes broken on cue."""

        def wrapped(make: Callable[..., Mover]) -> Callable[..., Mover]:
            return lambda *arguments, **named: self.over(make(*arguments, **named))

        select.make_mover = wrapped(select.make_mover)
        select.make_object_mover = wrapped(select.make_object_mover)  # type: ignore[assignment]
        real_begin = AgentMover._begin

        def begin(mover: AgentMover, transfer: NixlTransfer) -> str | None:
            """Start nothing: what NIXL says of a read that has failed, which the mover of objects repeats."""
            armed = self.armed
            if armed is not None and armed.transfers and armed.fault == "EIO" and mover.name == "obj":
                return "ERR" if armed.strikes() else real_begin(mover, transfer)
            return real_begin(mover, transfer)

        AgentMover._begin = begin  # type: ignore[method-assign]


class SeededMover(FaultyMover):
    """Breaks transfers as what is armed says."""

    def __init__(self, mover: Mover, faults: Faults) -> None:
        super().__init__(mover)
        self._faults = faults
        self._total_bytes = 1
        self.is_closed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    @property
    def memory_kinds(self) -> frozenset[MemoryKind]:  # type: ignore[override]
        """See Mover: known once NIXL has started."""
        return self.inner.memory_kinds

    @memory_kinds.setter
    def memory_kinds(self, kinds: frozenset[MemoryKind]) -> None:
        """They are those of the mover below."""

    def submit(
        self, op: Op, memory: MemoryId, memory_extents: Extents, file: FileId, file_extents: Extents
    ) -> Transfer:
        """See FaultyMover."""
        self._total_bytes = max(1, int(memory_extents[:, 1].sum()))
        return super().submit(op, memory, memory_extents, file, file_extents)

    def release(self) -> None:
        """Let what is stuck go on; what will be stuck later waits for the next one."""
        self._released.set()

    def _next_fault(self, op: Op) -> Fault | None:
        armed = self._faults.armed
        if armed is None or not armed.transfers or armed.fault not in _TRANSFERS:
            return None
        if armed.fault in {"ENOSPC", "EROFS", "permission"} and op is Op.READ:
            return None
        if not armed.strikes():
            return None
        self._released.clear()
        kind = _TRANSFERS[armed.fault]
        if kind is FaultKind.FAIL and armed.number(4) == 0:
            kind = FaultKind.REFUSE
        amount = armed.number(40) if kind is FaultKind.LATE else armed.number(self._total_bytes)
        return Fault(0, kind, op, amount)

    def _flip(self, transfer: Any, position: int, *, source: bool = False) -> None:
        with contextlib.suppress(FileNotFoundError):  # what has vanished needs no flip
            super()._flip(transfer, position, source=source)

    def close(self) -> None:
        """See Mover."""
        self.is_closed = True
        super().close()


_TRANSFERS: Final = {
    "EIO": FaultKind.FAIL,
    "ENOSPC": FaultKind.FAIL,
    "EROFS": FaultKind.FAIL,
    "permission": FaultKind.FAIL,
    "short": FaultKind.SHORT,
    "slow": FaultKind.LATE,
    "hang": FaultKind.STUCK,
    "late write": FaultKind.STUCK,
    "flipped": FaultKind.CORRUPT,
}
