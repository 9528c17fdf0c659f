"""Movers that make blocking calls on their own threads: ``copy`` for files, and one for any store.

Threading: driven by one thread. Its own threads are daemons, so a hung call delays neither ``close`` beyond its limit
nor the end of the process. A transfer is final when no thread touches its memory any more.
"""

from __future__ import annotations

import ctypes
import logging
import os
from abc import abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from nixl_offload.calls import CallThreads
from nixl_offload.errors import MoverError, NixlOffloadError, StoreError
from nixl_offload.movers.base import FILE_LIMITS, OBJECT_LIMITS, MemoryKind, Mover, MoverLimits, Op, TrackedTransfer
from nixl_offload.stores.base import Store
from nixl_offload.types import PAGE_BYTES

logger = logging.getLogger(__name__)

Row = tuple[int, int, int]
"""Address, length, and offset in the file."""

HOST: Final = frozenset({MemoryKind.DRAM})
_TASK_BYTES: Final = 8 << 20
"""Rows of about this many bytes make one task: large enough to hide Python's cost, small enough for all threads."""
_LOOK_S: Final = 0.001
"""Most delay until the end of a transfer is noticed."""
_AFTER_CLOSE_S: Final = 1.0
"""How long calls may take to end after ``_release``."""


@dataclass(slots=True, eq=False)
class ThreadedTransfer(TrackedTransfer):
    """A transfer and its remaining tasks."""

    tasks_left: int = 0
    failure: BaseException | None = None
    stop: bool = False
    """Set when a task fails or the mover is closed: tasks that have not begun are skipped."""


class ThreadedMover(Mover):
    """Moves rows by ``_move``. At most ``threads`` calls run at once; the rest waits, reads before writes.

    The memory of a failed transfer is free. ``close`` sets ``quarantine`` for calls that outlive ``close_timeout_s``.
    """

    transfer_type = ThreadedTransfer

    def __init__(
        self,
        name: str,
        limits: MoverLimits,
        *,
        threads: int,
        close_timeout_s: float,
        memory_kinds: frozenset[MemoryKind] = HOST,
    ) -> None:
        super().__init__(name, memory_kinds, limits, close_timeout_s)
        self._threads = threads
        self._calls = CallThreads(f"nixl-offload-{name}", threads)
        self._ended: deque[tuple[ThreadedTransfer, BaseException | None]] = deque()
        """Transfers whose task a thread has ended, with the error."""

    @abstractmethod
    def _move(self, transfer: ThreadedTransfer, rows: Sequence[Row]) -> None:
        """Move rows, on a thread. Any exception fails the transfer. May stop at ``transfer.stop``."""

    def _release(self) -> None:
        """Free the mover's resources at the end. This may end hung calls."""

    def _launch(self, transfer: ThreadedTransfer) -> None:
        tasks: list[list[Row]] = []
        room_bytes = 0
        for row in transfer.rows():
            if room_bytes <= 0:
                tasks.append([])
                room_bytes = _TASK_BYTES
            tasks[-1].append(row)
            room_bytes -= row[1]
        transfer.tasks_left = len(tasks)
        for task in tasks:
            self._calls.post(partial(self._work, transfer, task), int(transfer.op is Op.WRITE))
        if not self._calls.keep_up():
            transfer.stop = True
            self._finish(transfer, f"{self.name}: no thread can be started now")

    def _advance(self, transfer: ThreadedTransfer) -> None:
        self._collect()

    def poll_all(self) -> float | None:
        return 0.0 if self._collect() else _LOOK_S

    def _collect(self) -> bool:
        """Make transfers final whose last task has ended. Returns whether there were any."""
        any_final = False
        while self._ended:
            transfer, error = self._ended.popleft()
            transfer.tasks_left -= 1
            transfer.failure = transfer.failure or error
            if transfer.tasks_left or transfer not in self._in_flight:
                continue
            failure, any_final = transfer.failure, True
            transfer.missing = isinstance(failure, StoreError) and failure.cause == "missing"
            text = None if failure is None else f"{self.name}: {self._words(transfer, failure)}"
            self._finish(transfer, text)
        return any_final

    def _shut(self) -> None:
        for transfer in self._in_flight.values():
            transfer.stop = True
        self._release()
        self._calls.close(_AFTER_CLOSE_S)
        self._collect()

    def _work(self, transfer: ThreadedTransfer, rows: Sequence[Row], _: float) -> None:
        """Run a task, on a thread."""
        error = None
        try:
            if not transfer.stop:
                self._move(transfer, rows)
            if transfer.stop:
                raise MoverError("given up before it was done")
        except BaseException as raised:  # noqa: BLE001 - also a panic in a library: the transfer must end
            error = raised
        self._ended.append((transfer, error))
        transfer.stop |= error is not None

    def _words(self, transfer: ThreadedTransfer, error: BaseException) -> str:
        if isinstance(error, NixlOffloadError):
            return str(error).removeprefix(f"{self.name}: ")
        why = error.strerror if isinstance(error, OSError) else repr(error)
        return f"{transfer.op.value} of {transfer.file.path} failed: {why}"


def host_view(address: int, length_bytes: int) -> memoryview:
    """Return a writable view of host memory."""
    return memoryview((ctypes.c_char * length_bytes).from_address(address)).cast("B")


class CopyMover(ThreadedMover):
    """Moves host memory and files by ``preadv`` and ``pwritev``. The contract's reference, used if NIXL cannot run.

    A short read or write is a failure; the error has the offset.
    """

    def __init__(self, threads: int = 4, *, name: str = "copy", close_timeout_s: float = 30.0) -> None:
        super().__init__(name, FILE_LIMITS, threads=threads, close_timeout_s=close_timeout_s)

    def _move(self, transfer: ThreadedTransfer, rows: Sequence[Row]) -> None:
        op, file = transfer.op, transfer.file
        for address, length, offset in rows:
            if transfer.stop:
                return
            memory, done = host_view(address, length), 0
            while done < length:
                if op is Op.READ:
                    moved = os.preadv(file.fd, [memory[done:]], offset + done)
                else:
                    moved = os.pwritev(file.fd, [memory[done:]], offset + done)
                done += moved
                # Under O_DIRECT an unaligned piece is the end of the file; going on would only give EINVAL.
                if moved == 0 or (file.direct and moved % PAGE_BYTES):
                    raise MoverError(f"short {op.value} of {file.path} at {offset}: {done} of {length} bytes")


class StoreMover(ThreadedMover):
    """Moves host memory and objects by a store's blocking calls: one per transfer, ``threads`` at a time.

    Owns the store and closes it.
    """

    def __init__(self, store: Store, *, threads: int, close_timeout_s: float = 30.0) -> None:
        super().__init__(store.name, OBJECT_LIMITS, threads=threads, close_timeout_s=close_timeout_s)
        self.store = store

    def _release(self) -> None:
        self.store.close()

    def _move(self, transfer: ThreadedTransfer, rows: Sequence[Row]) -> None:
        [(address, length, offset)] = rows
        if transfer.op is Op.READ:
            self.store.read_into(transfer.file.path, offset, host_view(address, length))
        else:
            self.store.write(transfer.file.path, host_view(address, length))
