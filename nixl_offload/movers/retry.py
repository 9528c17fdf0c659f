"""A wrapper that reads again what failed, and finds out what is simply not there. Writes are left to the client below.

A client that reads straight into the caller's memory cannot try again by itself: the second answer would land behind
what the first one left there, so it fails although the server is well again (docs/decisions/0008-object-movers.md).
Threading: as the wrapped mover: one thread drives it. Questions to the store are asked on one daemon thread.
Ownership: it owns the wrapped mover and the store, and closes both.
"""

from __future__ import annotations

import logging
import os
import queue
import random
import threading
import time
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

import numpy as np

from nixl_offload.errors import MoverError, StoreError
from nixl_offload.movers.base import Extents, FileId, MemoryId, MemoryRegion, Mover, Op, Transfer, TransferState
from nixl_offload.movers.handles import fork_message
from nixl_offload.stores.base import Store

logger = logging.getLogger(__name__)

NOT_ANSWERING: Final = frozenset({"unreachable", "timeout", "throttled", "server"})
"""Causes of a StoreError that say nothing of the client or the object: another time the same call works."""


class _Answer(Enum):
    """What the store says while a transfer waits."""

    GO_ON = "go on"
    """The object is there, or nobody knows: try again."""
    ABSENT = "absent"
    SILENT = "silent"
    """The server does not answer the store either: leave it alone."""


@dataclass(slots=True, eq=False)
class _Lookup:
    """How it is with an object, for the asking thread."""

    name: str
    answer: _Answer | None = None


@dataclass(slots=True, eq=False)
class _RetriedTransfer(Transfer):
    inner: Transfer = field(kw_only=True)
    request: tuple[MemoryId, Extents, FileId, Extents] = field(kw_only=True)
    attempts_left: int = field(kw_only=True)
    started_s: float = field(kw_only=True)
    again_s: float | None = None
    """When the next attempt may start; None while one runs."""
    question: _Lookup | None = None


class RetryingMover(Mover):
    """The wrapped mover's contract and limits. A READ that failed and left its memory alone is submitted again.

    ``attempts`` in all, with a pause of half to one and a half ``pause_s`` between them; none begins later than
    ``within_s`` after the first, so that a server that takes long to fail is not asked twice. ``store`` is asked in the
    pause whether the object is there, which the wrapped mover cannot tell: what is absent (``Transfer.missing``), and
    what a server that does not answer has, is not tried again.
    """

    def __init__(
        self,
        mover: Mover,
        store: Store | None = None,
        *,
        attempts: int = 3,
        pause_s: float = 0.1,
        within_s: float = 3.0,
    ) -> None:
        self.name = mover.name
        self.memory_kinds = mover.memory_kinds
        self.limits = mover.limits
        self.inner = mover
        self._store = store
        self._attempts = attempts
        self._pause_s = pause_s
        self._within_s = within_s
        self._pid = os.getpid()
        self._waiting: set[_RetriedTransfer] = set()
        self._busy: dict[int, int] = {}
        self._names: dict[FileId, str] = {}
        self._questions: queue.SimpleQueue[_Lookup | None] = queue.SimpleQueue()
        self._asker: threading.Thread | None = None
        self._closed = False

    # Regions and targets: the wrapped mover's, kept while a transfer of theirs waits

    def register_memory(self, region: MemoryRegion) -> MemoryId:
        return self.inner.register_memory(region)

    def unregister_memory(self, memory: MemoryId) -> None:
        self._check_idle(memory)
        self.inner.unregister_memory(memory)

    def open_file(self, path: str, length_bytes: int, *, direct_io: bool) -> FileId:
        return self.inner.open_file(path, length_bytes, direct_io=direct_io)

    def adopt_file(self, fd: int, path: str, length_bytes: int, *, direct: bool) -> FileId:
        return self.inner.adopt_file(fd, path, length_bytes, direct=direct)

    def open_object(self, name: str, length_bytes: int) -> FileId:
        file = self.inner.open_object(name, length_bytes)
        self._names[file] = name
        return file

    def close_file(self, file: FileId) -> None:
        self._check_idle(file)
        self.inner.close_file(file)
        self._names.pop(file, None)

    # Transfers

    def submit(
        self, op: Op, memory: MemoryId, memory_extents: Extents, file: FileId, file_extents: Extents
    ) -> Transfer:
        inner = self.inner.submit(op, memory, memory_extents, file, file_extents)
        if op is Op.WRITE or inner.state is TransferState.DONE:
            return inner
        request = (memory, np.array(memory_extents), file, np.array(file_extents))
        return _RetriedTransfer(
            op,
            inner.bytes_total,
            inner=inner,
            request=request,
            attempts_left=self._attempts - 1,
            started_s=time.monotonic(),
        )

    def poll(self, transfer: Transfer) -> TransferState:
        """Between two attempts this says PENDING, and starts the next when it is time."""
        if not isinstance(transfer, _RetriedTransfer):
            return self.inner.poll(transfer)
        if transfer.state is not TransferState.PENDING:
            return transfer.state
        if os.getpid() != self._pid:
            transfer.error, transfer.quarantine = fork_message(self.name, self._pid), True
            transfer.state = TransferState.FAILED
        elif transfer.again_s is not None:
            self._go_on(transfer, transfer.again_s)
        elif self.inner.poll(transfer.inner) is not TransferState.PENDING:
            self._end_attempt(transfer)
        return transfer.state

    def _end_attempt(self, transfer: _RetriedTransfer) -> None:
        inner, now_s = transfer.inner, time.monotonic()
        again_s = now_s + self._pause_s * random.uniform(0.5, 1.5)
        settled = inner.state is TransferState.DONE or inner.quarantine or inner.missing or self._closed
        if settled or not transfer.attempts_left or again_s > transfer.started_s + self._within_s:
            self._settle(transfer)
            return
        transfer.attempts_left -= 1
        transfer.again_s = again_s
        self._hold(transfer)
        name = self._names.get(transfer.request[2])
        if self._store is not None and name is not None:
            transfer.question = _Lookup(name)
            self._ask(transfer.question)

    def _go_on(self, transfer: _RetriedTransfer, again_s: float) -> None:
        now_s = time.monotonic()
        answer = transfer.question.answer if transfer.question is not None else _Answer.GO_ON
        if answer is _Answer.ABSENT:
            transfer.inner.missing = True
            self._settle(transfer)
        elif answer is _Answer.SILENT or now_s > transfer.started_s + self._within_s:
            self._settle(transfer)
        elif answer is _Answer.GO_ON and now_s >= again_s:
            self._let_go(transfer)
            try:
                transfer.inner = self.inner.submit(transfer.op, *transfer.request)
            except MoverError:
                self._settle(transfer)  # refused now, so what the last attempt said stands

    def _settle(self, transfer: _RetriedTransfer) -> None:
        self._let_go(transfer)
        inner = transfer.inner
        transfer.error, transfer.quarantine, transfer.missing = inner.error, inner.quarantine, inner.missing
        transfer.state = inner.state

    # Between two attempts the wrapped mover knows nothing of the transfer, so its memory and object are kept here.

    def _hold(self, transfer: _RetriedTransfer) -> None:
        self._waiting.add(transfer)
        for handle in (transfer.request[0], transfer.request[2]):
            self._busy[handle] = self._busy.get(handle, 0) + 1

    def _let_go(self, transfer: _RetriedTransfer) -> None:
        if transfer not in self._waiting:
            return
        self._waiting.discard(transfer)
        transfer.again_s = transfer.question = None
        for handle in (transfer.request[0], transfer.request[2]):
            self._busy[handle] -= 1
            if not self._busy[handle]:
                del self._busy[handle]

    def _check_idle(self, handle: int) -> None:
        if handle in self._busy:
            raise MoverError(f"{self.name}: {handle} has transfers in flight, waiting to be tried again")

    # Questions

    def _ask(self, question: _Lookup) -> None:
        if self._asker is None:
            asker = threading.Thread(target=self._answer, name=f"nixl-offload-{self.name}-ask", daemon=True)
            try:
                asker.start()
            except RuntimeError:  # no thread to be had now, so nobody knows
                question.answer = _Answer.GO_ON
                return
            self._asker = asker
        self._questions.put(question)

    def _answer(self) -> None:
        """Serve the questions until told to stop, on the asking thread."""
        while (question := self._questions.get()) is not None:
            question.answer = self._look_for(question.name)

    def _look_for(self, name: str) -> _Answer:
        assert self._store is not None
        try:
            return _Answer.ABSENT if self._store.head(name) is None else _Answer.GO_ON
        except StoreError as error:
            logger.debug("%s: whether %s is there: %s", self.name, name, error)
            return _Answer.SILENT if error.cause in NOT_ANSWERING else _Answer.GO_ON
        except Exception:  # the thread must go on
            logger.exception("%s: whether %s is there", self.name, name)
            return _Answer.GO_ON

    def close(self) -> None:
        """What waits for its next attempt, or would, fails with what the last one said."""
        self._closed = True
        if os.getpid() == self._pid:
            for transfer in list(self._waiting):
                self._settle(transfer)
        self.inner.close()
        if os.getpid() == self._pid and self._store is not None:
            self._questions.put(None)
            self._store.close()
