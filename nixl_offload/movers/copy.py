"""The plain mover: host memory and files by ``preadv`` and ``pwritev`` on a few threads. The contract's reference.

Used where NIXL cannot run, and in tests. Threading: driven by one thread; a fixed pool moves the bytes (the GIL is free
while they move). Threads do not survive a fork, so a mover works only in the process that made it.
"""

from __future__ import annotations

import ctypes
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from nixl_offload.errors import MoverError
from nixl_offload.movers.base import (
    UNLIMITED,
    Extents,
    FileId,
    MemoryId,
    MemoryKind,
    MemoryRegion,
    Mover,
    MoverLimits,
    Op,
    Transfer,
    TransferState,
)
from nixl_offload.movers.handles import (
    FileEntry,
    HandleTable,
    MemoryEntry,
    check_adopted,
    fork_message,
    open_regular_file,
)
from nixl_offload.types import PAGE_BYTES

_TASK_BYTES = 8 << 20
"""About this much is one task of the pool: large enough that Python costs nothing, small enough to use all threads."""


@dataclass(slots=True, eq=False)
class _CopyTransfer(Transfer):
    memory: MemoryEntry | None = None
    file: FileEntry | None = None
    stop: threading.Event = field(default_factory=threading.Event)
    tasks: list[Future[None]] = field(default_factory=list)


class CopyMover(Mover):
    """Moves bytes between host memory and files. A short read or write is a failure, told in words with the offset.

    After a failure the rows that had not begun are left alone, and the state turns FAILED only when every thread has
    let go of the memory: this mover never needs quarantine.
    """

    def __init__(self, threads: int = 4, *, name: str = "copy") -> None:
        self.name = name
        self.memory_kinds = frozenset({MemoryKind.DRAM})
        self.limits = MoverLimits(
            alignment_bytes=PAGE_BYTES,
            max_extent_bytes=UNLIMITED,
            max_extents_per_transfer=UNLIMITED,
            max_extents_in_flight=UNLIMITED,
        )
        self._threads = threads
        self._pid = os.getpid()
        self._pool: ThreadPoolExecutor | None = None
        self._table = HandleTable(name)
        self._in_flight: set[_CopyTransfer] = set()
        self._closed = False

    def register_memory(self, region: MemoryRegion) -> MemoryId:
        """See Mover. Host memory only."""
        self._check_usable()
        if region.kind not in self.memory_kinds:
            raise MoverError(f"{self.name}: moves host memory only, not {region.kind.value}")
        if region.length_bytes <= 0:
            raise MoverError(f"{self.name}: an empty memory region")
        return self._table.add_memory(MemoryEntry(region))

    def unregister_memory(self, memory: MemoryId) -> None:
        """See Mover. Raises MoverError while a transfer is in flight."""
        self._table.pop_memory(memory)

    def open_file(self, path: str, length_bytes: int, *, direct_io: bool) -> FileId:
        """See Mover."""
        self._check_usable()
        fd, direct = open_regular_file(path, direct_io=direct_io)
        return self._table.add_file(FileEntry(fd, path, length_bytes, direct_io, direct))

    def adopt_file(self, fd: int, path: str, length_bytes: int, *, direct: bool) -> FileId:
        """See Mover."""
        try:
            self._check_usable()
        except MoverError:
            os.close(fd)
            raise
        check_adopted(fd, path)
        return self._table.add_file(FileEntry(fd, path, length_bytes, direct, direct))

    def close_file(self, file: FileId) -> None:
        """See Mover. Raises MoverError while a transfer is in flight."""
        os.close(self._table.pop_file(file).fd)

    def submit(
        self, op: Op, memory: MemoryId, memory_extents: Extents, file: FileId, file_extents: Extents
    ) -> Transfer:
        """See Mover."""
        self._check_usable()
        m, mem, f, fil = self._table.check(self.limits, op, memory, memory_extents, file, file_extents)
        transfer = _CopyTransfer(op, int(mem[:, 1].sum()), memory=m, file=f)
        if not len(mem):
            transfer.state = TransferState.DONE
            return transfer
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="nixl-offload-copy")
        m.in_flight += 1
        f.in_flight += 1
        self._in_flight.add(transfer)
        # Cut after every _TASK_BYTES of rows.
        ends = np.flatnonzero(np.diff(np.cumsum(mem[:, 1]) // _TASK_BYTES)) + 1
        address = m.region.address
        for mem_rows, file_rows in zip(np.split(mem, ends), np.split(fil, ends), strict=True):
            transfer.tasks.append(self._pool.submit(_move, transfer, address, mem_rows, f, file_rows))
        return transfer

    def poll(self, transfer: Transfer) -> TransferState:
        """See Mover."""
        if transfer.state is not TransferState.PENDING or not isinstance(transfer, _CopyTransfer):
            return transfer.state
        if os.getpid() != self._pid:
            transfer.error, transfer.quarantine = self._fork_message(), True
            transfer.state = TransferState.FAILED
            return transfer.state
        if not all(task.done() for task in transfer.tasks):
            return transfer.state
        errors = [error for task in transfer.tasks if (error := task.exception()) is not None]
        if errors:
            transfer.error = f"{self.name}: {errors[0]}"
        self._in_flight.discard(transfer)
        if transfer.memory is not None and transfer.file is not None:
            transfer.memory.in_flight -= 1
            transfer.file.in_flight -= 1
        transfer.tasks = []
        transfer.state = TransferState.FAILED if errors else TransferState.DONE
        return transfer.state

    def close(self) -> None:
        """See Mover. Blocks until the kernel has let go of every buffer; in a forked child it does nothing."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        if self._pool is not None:
            self._pool.shutdown(wait=True)
        for transfer in list(self._in_flight):
            self.poll(transfer)
        for file in list(self._table.files):
            self.close_file(file)
        self._table.memories.clear()

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise MoverError(self._fork_message())
        if self._closed:
            raise MoverError(f"{self.name}: this mover is closed")

    def _fork_message(self) -> str:
        return fork_message(self.name, self._pid)


def _move(transfer: _CopyTransfer, address: int, mem: Extents, file: FileEntry, fil: Extents) -> None:
    """Move the rows in order, on a thread of the pool. Raises OSError or EOFError and tells the siblings to stop."""
    op, stop = transfer.op, transfer.stop
    try:
        for (mem_offset, length), (file_offset, _) in zip(mem.tolist(), fil.tolist(), strict=True):
            if stop.is_set():
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
        stop.set()
        raise OSError(error.errno, f"{op.value} of {file.path} failed: {error.strerror}") from error
    except EOFError:
        stop.set()
        raise
