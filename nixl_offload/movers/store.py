"""Objects through a ``stores.Store``: host memory, one request per extent, on a few threads of its own.

The second way to a bucket, where NIXL's plugin cannot load or cannot talk to the server.
Threading: driven by one thread. Its own threads are daemons: a server that hangs holds up neither ``close`` for longer
than its time nor the end of the process. Threads do not survive a fork.
Ownership: it owns the store and closes it. A transfer is final when no thread touches its memory any more.
"""

from __future__ import annotations

import ctypes
import logging
import os
import queue
import threading
import time
from dataclasses import dataclass, field

from nixl_offload.errors import MoverError, StoreError
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
from nixl_offload.movers.handles import FileEntry, HandleTable, MemoryEntry, fork_message
from nixl_offload.stores.base import Store

logger = logging.getLogger(__name__)

_AFTER_CLOSE_S = 1.0
"""How long calls get to end by themselves once their store has been closed under them."""


@dataclass(slots=True, eq=False)
class _StoreTransfer(Transfer):
    memory: MemoryEntry = field(kw_only=True)
    file: FileEntry = field(kw_only=True)
    memory_extents: Extents = field(kw_only=True)
    file_extents: Extents = field(kw_only=True)
    failure: str | None = None
    absent: bool = False
    """The worker's words and finding; ``error`` and ``missing`` are told with the state."""
    ended: threading.Event = field(default_factory=threading.Event)


class StoreMover(Mover):
    """Puts and gets objects with the store's blocking calls. ``threads`` is how many requests are in flight.

    The extents of one transfer are read one after the other; ``LimitedMover`` makes a transfer of each. After a failure
    the rest of its extents is left alone and its memory is free; ``quarantine`` is set only by ``close``, for calls
    that do not end within ``close_timeout_s``.
    """

    def __init__(self, store: Store, *, threads: int, close_timeout_s: float = 30.0) -> None:
        self.name = store.name
        self.memory_kinds = frozenset({MemoryKind.DRAM})
        self.limits = MoverLimits(
            alignment_bytes=1,
            max_extent_bytes=UNLIMITED,
            max_extents_per_transfer=1,
            max_extents_in_flight=threads,
            whole_writes=True,
            tells_short_reads=True,
        )
        self._store = store
        self._threads = threads
        self._close_timeout_s = close_timeout_s
        self._pid = os.getpid()
        self._table = HandleTable(self.name)
        self._jobs: queue.SimpleQueue[_StoreTransfer | None] = queue.SimpleQueue()
        self._workers = 0
        self._in_flight: set[_StoreTransfer] = set()
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

    def open_object(self, name: str, length_bytes: int) -> FileId:
        """See Mover."""
        self._check_usable()
        return self._table.add_file(FileEntry(-1, name, length_bytes))

    def close_file(self, file: FileId) -> None:
        """See Mover. Raises MoverError while a transfer is in flight."""
        self._table.pop_file(file)

    def submit(
        self, op: Op, memory: MemoryId, memory_extents: Extents, file: FileId, file_extents: Extents
    ) -> Transfer:
        """See Mover."""
        self._check_usable()
        m, mem, f, fil = self._table.check(self.limits, op, memory, memory_extents, file, file_extents)
        if not len(mem):
            return Transfer(op, 0, TransferState.DONE)
        transfer = _StoreTransfer(op, int(mem[:, 1].sum()), memory=m, file=f, memory_extents=mem, file_extents=fil)
        m.in_flight += 1
        f.in_flight += 1
        self._in_flight.add(transfer)
        if self._workers < min(self._threads, len(self._in_flight)):
            self._workers += 1
            name = f"nixl-offload-{self.name}-{self._workers}"
            threading.Thread(target=self._work, name=name, daemon=True).start()
        self._jobs.put(transfer)
        return transfer

    def poll(self, transfer: Transfer) -> TransferState:
        """See Mover."""
        if transfer.state is not TransferState.PENDING or not isinstance(transfer, _StoreTransfer):
            return transfer.state
        if os.getpid() != self._pid:
            transfer.error, transfer.quarantine = fork_message(self.name, self._pid), True
            transfer.state = TransferState.FAILED
        elif transfer.ended.is_set():
            self._in_flight.discard(transfer)
            transfer.memory.in_flight -= 1
            transfer.file.in_flight -= 1
            transfer.error, transfer.missing = transfer.failure, transfer.absent
            transfer.state = TransferState.DONE if transfer.error is None else TransferState.FAILED
        return transfer.state

    def close(self) -> None:
        """See Mover. Waits ``close_timeout_s`` at most, then closes the store under what is left."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self._drain(self._close_timeout_s)
        for _ in range(self._workers):
            self._jobs.put(None)
        self._store.close()
        self._drain(_AFTER_CLOSE_S)
        if self._in_flight:
            logger.warning("%s: %d requests did not end; leaking their memory", self.name, len(self._in_flight))
        for transfer in self._in_flight:
            transfer.error, transfer.quarantine = f"{self.name}: still in flight when the mover was closed", True
            transfer.state = TransferState.FAILED
        self._in_flight.clear()
        self._table.memories.clear()
        self._table.files.clear()

    def _drain(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        for transfer in list(self._in_flight):
            transfer.ended.wait(max(deadline - time.monotonic(), 0.0))
            self.poll(transfer)

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise MoverError(fork_message(self.name, self._pid))
        if self._closed:
            raise MoverError(f"{self.name}: this mover is closed")

    def _work(self) -> None:
        """Serve the queue until told to stop, on a thread of its own."""
        while (transfer := self._jobs.get()) is not None:
            try:
                self._move(transfer)
            except StoreError as error:
                transfer.failure, transfer.absent = f"{self.name}: {error}", error.cause == "missing"
            except Exception as error:  # noqa: BLE001 - whatever it is, the transfer must end and the thread go on
                transfer.failure = f"{self.name}: {transfer.op.value} of {transfer.file.path}: {error!r}"
            transfer.ended.set()

    def _move(self, transfer: _StoreTransfer) -> None:
        address, name = transfer.memory.region.address, transfer.file.path
        rows = zip(transfer.memory_extents.tolist(), transfer.file_extents.tolist(), strict=True)
        for (memory_offset, length), (offset, _) in rows:
            view = memoryview((ctypes.c_char * length).from_address(address + memory_offset)).cast("B")
            if transfer.op is Op.READ:
                self._store.read_into(name, offset, view)
            else:
                self._store.write(name, view)
