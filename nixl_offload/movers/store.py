"""Objects through a ``stores.Store``: host memory, one request per extent, on a few threads of its own.

The first choice for a bucket and host memory.
Threading: driven by one thread. Its own threads are daemons: a server that hangs holds up neither ``close`` for longer
than its time nor the end of the process.
Ownership: it owns the store and closes it. A transfer is final when no thread touches its memory any more.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import os
import queue
import threading
import time
from collections import deque
from dataclasses import dataclass, field

from nixl_offload.errors import StoreError
from nixl_offload.movers.base import Extents, FileId, MemoryKind, Mover, MoverLimits, Op, TransferState
from nixl_offload.movers.handles import FileEntry, MemoryEntry, total_bytes
from nixl_offload.movers.tracked import ExtentTransfer, TrackedMover
from nixl_offload.stores.base import Store

logger = logging.getLogger(__name__)

_LAST = 2
"""Behind reads, 0, and writes, 1: no more is to come."""
_LOOK_S = 0.001
"""An end is known so much too late at most."""
_AFTER_CLOSE_S = 1.0
"""How long calls get to end by themselves once their store has been closed under them."""


@dataclass(slots=True, eq=False)
class _StoreTransfer(ExtentTransfer):
    failure: str | None = None
    absent: bool = False
    """What the worker found out; it becomes ``error`` and ``missing`` when the transfer is polled."""
    ended: threading.Event = field(default_factory=threading.Event)


class StoreMover(TrackedMover[_StoreTransfer]):
    """Puts and gets objects with the store's blocking calls. ``threads`` is how many requests are in flight.

    What is beyond that waits here, reads in front. After a failure the memory is free; ``quarantine`` is set only by
    ``close``, for calls that do not end within ``close_timeout_s``.
    """

    def __init__(self, store: Store, *, threads: int, close_timeout_s: float = 30.0) -> None:
        limits = MoverLimits(max_extents_per_transfer=1, whole_writes=True)
        super().__init__(store.name, frozenset({MemoryKind.DRAM}), limits)
        self._store = store
        self._threads = threads
        self._close_timeout_s = close_timeout_s
        self._jobs: queue.PriorityQueue[tuple[int, int, _StoreTransfer | None]] = queue.PriorityQueue()
        """Reads first, for requests wait for them; by rank and number."""
        self._numbers = itertools.count()
        self._over: deque[_StoreTransfer] = deque()
        """What has ended since the last look."""
        self._workers = 0

    # It moves objects only: back to what a mover does that moves no files.
    adopt_file = Mover.adopt_file

    def open_object(self, name: str, length_bytes: int) -> FileId:
        self._check_usable()
        return self._table.add_file(FileEntry(-1, name, length_bytes))

    def close_file(self, file: FileId) -> None:
        self._table.pop_file(file)

    def _make(self, op: Op, memory: MemoryEntry, mem: Extents, file: FileEntry, fil: Extents) -> _StoreTransfer:
        return _StoreTransfer(op, total_bytes(mem), memory=memory, file=file, mem=mem, fil=fil)

    def _launch(self, transfer: _StoreTransfer) -> None:
        if self._workers < min(self._threads, len(self._in_flight)):
            name = f"nixl-offload-{self.name}-{self._workers + 1}"
            try:
                threading.Thread(target=self._work, name=name, daemon=True).start()
                self._workers += 1
            except RuntimeError as error:  # no thread to be had now; those that there are go on
                if not self._workers:
                    self._finish(transfer, f"{self.name}: {error}")
                    return
        self._jobs.put((int(transfer.op is Op.WRITE), next(self._numbers), transfer))

    def _advance(self, transfer: _StoreTransfer) -> None:
        if transfer.ended.is_set():
            transfer.missing = transfer.absent
            self._finish(transfer, transfer.failure)

    def look(self) -> float | None:
        if os.getpid() != self._pid:
            return None
        news = False
        while self._over:
            news |= self.poll(self._over.popleft()) is not TransferState.PENDING
        return 0.0 if news else _LOOK_S

    def close(self) -> None:
        """Wait ``close_timeout_s`` at most, then close the store under what is left."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self._drain(self._close_timeout_s)
        for _ in range(self._workers):
            self._jobs.put((_LAST, next(self._numbers), None))
        self._store.close()
        self._drain(_AFTER_CLOSE_S)
        if self._in_flight:
            logger.warning("%s: %d requests did not end; leaking their memory", self.name, len(self._in_flight))
        self._abandon()
        self._table.memories.clear()
        self._table.files.clear()

    def _drain(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        for transfer in list(self._in_flight.values()):
            transfer.ended.wait(max(deadline - time.monotonic(), 0.0))
            self._advance(transfer)

    def _work(self) -> None:
        """Serve the queue until told to stop, on a thread of its own."""
        while (transfer := self._jobs.get()[2]) is not None:
            try:
                self._move(transfer)
            except StoreError as error:
                transfer.failure, transfer.absent = f"{self.name}: {error}", error.cause == "missing"
            except Exception as error:  # noqa: BLE001 - whatever it is, the transfer must end and the thread go on
                transfer.failure = f"{self.name}: {transfer.op.value} of {transfer.file.path}: {error!r}"
            transfer.ended.set()
            self._over.append(transfer)

    def _move(self, transfer: _StoreTransfer) -> None:
        name = transfer.file.path
        for address, length, offset in transfer.rows():
            view = memoryview((ctypes.c_char * length).from_address(address)).cast("B")
            if transfer.op is Op.READ:
                self._store.read_into(name, offset, view)
            else:
                self._store.write(name, view)
