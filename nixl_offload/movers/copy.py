"""The plain mover: host memory and files by ``preadv`` and ``pwritev`` on a few threads. The contract's reference.

Used where NIXL cannot run, and in tests. Threading: driven by one thread; a fixed pool moves the bytes (the GIL is free
while they move).
"""

from __future__ import annotations

import ctypes
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from nixl_offload.movers.base import Extents, MemoryKind, MoverLimits, Op
from nixl_offload.movers.handles import FileEntry, MemoryEntry
from nixl_offload.movers.tracked import ExtentTransfer, TrackedMover
from nixl_offload.types import PAGE_BYTES

_TASK_BYTES = 8 << 20
"""About this much is one task of the pool: large enough that Python costs nothing, small enough to use all threads."""


@dataclass(slots=True, eq=False)
class _CopyTransfer(ExtentTransfer):
    stop: threading.Event = field(default_factory=threading.Event)
    tasks: list[Future[None]] = field(default_factory=list)
    """Each ends, or is cancelled before it begins; nothing else touches the memory."""
    refusal: RuntimeError | None = None
    """Why not all of them could be begun."""


class CopyMover(TrackedMover[_CopyTransfer]):
    """Moves bytes between host memory and files. A short read or write is a failure, told in words with the offset.

    After a failure the rows that had not begun are left alone, and the state turns FAILED only when every thread has
    let go of the memory: this mover never needs quarantine.
    """

    def __init__(self, threads: int = 4, *, name: str = "copy") -> None:
        limits = MoverLimits(alignment_bytes=PAGE_BYTES)
        super().__init__(name, frozenset({MemoryKind.DRAM}), limits)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="nixl-offload-copy")

    def _make(self, op: Op, memory: MemoryEntry, mem: Extents, file: FileEntry, fil: Extents) -> _CopyTransfer:
        return _CopyTransfer(op, int(mem[:, 1].sum()), memory=memory, file=file, mem=mem, fil=fil)

    def _launch(self, transfer: _CopyTransfer) -> None:
        mem, fil = transfer.mem, transfer.fil
        ends = np.flatnonzero(np.diff(np.cumsum(mem[:, 1]) // _TASK_BYTES)) + 1
        for mem_rows, fil_rows in zip(np.split(mem, ends), np.split(fil, ends), strict=True):
            task: Future[None] = Future()
            transfer.tasks.append(task)
            try:
                self._pool.submit(_run, task, transfer, mem_rows, fil_rows)
            except RuntimeError as error:  # no thread to be had now; another may have taken it up, or will
                if task.cancel():
                    transfer.stop.set()
                    transfer.refusal = error
                    return

    def _advance(self, transfer: _CopyTransfer) -> None:
        if all(task.done() for task in transfer.tasks):
            errors: list[BaseException] = [] if transfer.refusal is None else [transfer.refusal]
            errors += [error for task in transfer.tasks if not task.cancelled() and (error := task.exception())]
            self._finish(transfer, f"{self.name}: {errors[0]}" if errors else None)
            transfer.tasks = []

    def close(self) -> None:
        """Block until the kernel has let go of every buffer; in a forked child do nothing."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self._pool.shutdown(wait=True)
        for transfer in list(self._in_flight.values()):
            self._advance(transfer)
        for file in list(self._table.files):
            self.close_file(file)
        self._table.memories.clear()


def _run(task: Future[None], transfer: _CopyTransfer, mem: Extents, fil: Extents) -> None:
    """Make ``task`` of ``_move``, unless it was cancelled: the pool keeps what it could find no thread for."""
    if not task.set_running_or_notify_cancel():
        return
    try:
        _move(transfer, mem, fil)
    except BaseException as error:  # noqa: BLE001 - the task's
        task.set_exception(error)
    else:
        task.set_result(None)


def _move(transfer: _CopyTransfer, mem: Extents, fil: Extents) -> None:
    """Move the rows in order, on a thread of the pool. Raises OSError or EOFError and tells the siblings to stop."""
    op, file, address = transfer.op, transfer.file, transfer.memory.region.address
    try:
        for (mem_offset, length), (file_offset, _) in zip(mem.tolist(), fil.tolist(), strict=True):
            if transfer.stop.is_set():
                return
            view = memoryview((ctypes.c_char * length).from_address(address + mem_offset)).cast("B")
            done = 0
            while done < length:
                if op is Op.READ:
                    moved = os.preadv(file.fd, [view[done:]], file_offset + done)
                else:
                    moved = os.pwritev(file.fd, [view[done:]], file_offset + done)
                # Under O_DIRECT a piece that ends off the grid is the end of the file; going on would only give EINVAL.
                if moved == 0 or (file.direct and moved % PAGE_BYTES):
                    raise EOFError(
                        f"short {op.value} of {file.path} at {file_offset}: {done + moved} of {length} bytes"
                    )
                done += moved
    except OSError as error:
        transfer.stop.set()
        raise OSError(error.errno, f"{op.value} of {file.path} failed: {error.strerror}") from error
    except EOFError:
        transfer.stop.set()
        raise
