"""A wrapper for a client of objects that takes few at once, never tries again, and cannot tell what is simply absent.

What comes on top waits here. A READ that failed is submitted again: a client that reads straight into the caller's
memory cannot do so itself, as the second answer would land behind what the first one left there
(docs/decisions/0008-object-movers.md). WRITEs are left to the client.

Threading: one thread drives it; questions to the store are asked on one daemon thread.
Ownership: it owns the wrapped mover and the store, and closes both.
"""

from __future__ import annotations

import logging
import os
import queue
import random
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from nixl_offload.errors import MoverError, StoreError
from nixl_offload.movers.base import Extents, FileId, MemoryId, MemoryRegion, Mover, Op, Transfer, TransferState
from nixl_offload.movers.handles import check_usable, copy_extents, fork_message, total_bytes
from nixl_offload.stores.base import Store

logger = logging.getLogger(__name__)

NOT_ANSWERING: Final = frozenset({"unreachable", "timeout", "throttled", "server"})
"""Causes of a StoreError that say nothing of the client or the object: another time the same call works."""
_LOOK_SHARE: Final = 0.125
"""Looks are this share of a transfer's usual time apart: a poll costs as much processor time as a request."""
_LOOK_MIN_S: Final = 0.0005
_LOOK_MAX_S: Final = 0.01


class _Answer(Enum):
    """What the store says of an object whose read failed."""

    GO_ON = "go on"
    """It is there, or nobody knows: try again."""
    ABSENT = "absent"
    SILENT = "silent"
    """The server does not answer the store either: leave it alone."""


@dataclass(slots=True, eq=False)
class _Lookup:
    name: str
    answer: _Answer | None = None


@dataclass(slots=True, eq=False)
class _QueuedTransfer(Transfer):
    request: tuple[MemoryId, Extents, FileId, Extents] = field(kw_only=True)
    attempts_left: int = field(kw_only=True)
    inner: Transfer | None = None
    """The attempt that runs; between two, the one that failed."""
    first_s: float = 0.0
    began_s: float = 0.0
    """When the first attempt was begun, and this one."""
    again_s: float = 0.0
    """When the next may begin."""
    question: _Lookup | None = None


class QueuedMover(Mover):
    """The contract and the limits of the wrapped mover, of which ``at_once`` transfers run at a time, in their order.

    A failed READ that left its memory alone is begun again: ``attempts`` in all, half to one and a half ``pause_s``
    apart, none later than ``within_s`` after the first. In the pause ``store`` is asked whether the object is there:
    what is absent (``Transfer.missing``), or has a server that does not answer, is not tried again.
    """

    def __init__(
        self,
        mover: Mover,
        store: Store | None = None,
        *,
        at_once: int,
        attempts: int = 3,
        pause_s: float = 0.1,
        within_s: float = 3.0,
        close_timeout_s: float = 30.0,
    ) -> None:
        self.name = mover.name
        self.memory_kinds = mover.memory_kinds
        self.limits = mover.limits
        self.inner = mover
        self._store = store
        self._at_once = at_once
        self._attempts = attempts
        self._pause_s = pause_s
        self._within_s = within_s
        self._close_timeout_s = close_timeout_s
        self._pid = os.getpid()
        self._waiting: deque[_QueuedTransfer] = deque()
        self._running: list[_QueuedTransfer] = []
        self._resting: list[_QueuedTransfer] = []
        """Between two attempts."""
        self._busy: Counter[int] = Counter()
        """Transfers by memory and by object."""
        self._names: dict[FileId, str] = {}
        self._usual_s = 0.0
        self._look_s = 0.0
        """When it is worth while to look again."""
        self._news = False
        self._questions: queue.SimpleQueue[_Lookup | None] = queue.SimpleQueue()
        self._asker: threading.Thread | None = None
        self._closed = False

    # Regions and objects: the wrapped mover's, kept while a transfer of theirs waits

    def register_memory(self, region: MemoryRegion) -> MemoryId:
        return self.inner.register_memory(region)

    def unregister_memory(self, memory: MemoryId) -> None:
        self._check_idle(memory)
        self.inner.unregister_memory(memory)
        del self._busy[memory]

    def open_object(self, name: str, length_bytes: int) -> FileId:
        file = self.inner.open_object(name, length_bytes)
        self._names[file] = name
        return file

    def close_file(self, file: FileId) -> None:
        self._check_idle(file)
        self.inner.close_file(file)
        self._names.pop(file, None)
        del self._busy[file]

    def _check_idle(self, handle: int) -> None:
        if self._busy[handle]:
            raise MoverError(f"{self.name}: {handle} has transfers in flight, in the queue or in quarantine")

    # Transfers

    def submit(
        self, op: Op, memory: MemoryId, memory_extents: Extents, file: FileId, file_extents: Extents
    ) -> Transfer:
        """What is refused by the wrapped mover is FAILED if it had to wait, and raises MoverError if not."""
        check_usable(self.name, self._pid, self._closed)
        in_memory, in_file = copy_extents(memory_extents, "memory"), copy_extents(file_extents, "the object")
        if not len(in_memory):
            return self.inner.submit(op, memory, in_memory, file, in_file)
        request, attempts = (memory, in_memory, file, in_file), 1 if op is Op.WRITE else self._attempts
        transfer = _QueuedTransfer(op, total_bytes(in_memory), request=request, attempts_left=attempts)
        self._busy.update((memory, file))
        if len(self._running) >= self._at_once:
            self._waiting.append(transfer)
            return transfer
        refused = self._begin(transfer)
        if refused is not None:
            self._settle(transfer, TransferState.FAILED, str(refused))
            raise refused
        return transfer

    def _begin(self, transfer: _QueuedTransfer) -> MoverError | None:
        """Begin an attempt. Returns the refusal, if nothing was started."""
        now_s = time.monotonic()
        transfer.first_s, transfer.began_s = transfer.first_s or now_s, now_s
        transfer.attempts_left -= 1
        try:
            transfer.inner = self.inner.submit(transfer.op, *transfer.request)
        except MoverError as error:
            return error
        except Exception as error:  # noqa: BLE001 - only a MoverError promises that nothing was started
            self._settle(transfer, TransferState.FAILED, f"{self.name}: {error!r}", quarantine=True)
        else:
            self._running.append(transfer)
        return None

    def poll(self, transfer: Transfer) -> TransferState:
        """Pushes all on."""
        if transfer.state is TransferState.PENDING:
            if os.getpid() != self._pid:
                transfer.error, transfer.quarantine = fork_message(self.name, self._pid), True
                transfer.state = TransferState.FAILED
            else:
                self._pass()
        return transfer.state

    def look(self) -> float | None:
        if os.getpid() != self._pid:
            return None
        self._pass()
        news, self._news = self._news, False
        return 0.0 if news else max(self._look_s - time.monotonic(), 0.0)

    def _pass(self) -> None:
        now_s = time.monotonic()
        if now_s < self._look_s:
            return
        for transfer in tuple(self._running):
            self._advance(transfer, now_s)
        for transfer in tuple(self._resting):
            self._go_on(transfer, now_s)
        while self._waiting and len(self._running) < self._at_once:
            transfer = self._waiting.popleft()
            refused = self._begin(transfer)
            if refused is not None:
                self._settle(transfer, TransferState.FAILED, str(refused))
        self._look_s = now_s + min(max(_LOOK_SHARE * self._usual_s, _LOOK_MIN_S), _LOOK_MAX_S)

    def _advance(self, transfer: _QueuedTransfer, now_s: float) -> None:
        inner = transfer.inner
        assert inner is not None, "it runs"
        try:
            state = self.inner.poll(inner)
        except Exception as error:  # noqa: BLE001 - a poll must not raise: here it would cost all others
            self._settle(transfer, TransferState.FAILED, f"{self.name}: {error!r}", quarantine=True)
            return
        if state is TransferState.PENDING:
            return
        if state is TransferState.DONE:
            # What ends sooner than others counts for more: nobody shall wait for slow times.
            took_s = now_s - transfer.began_s
            self._usual_s += (took_s - self._usual_s) * (0.25 if took_s < self._usual_s else 0.125)
        again_s = now_s + self._pause_s * random.uniform(0.5, 1.5)
        over = state is TransferState.DONE or inner.quarantine or inner.missing or self._closed
        if over or not transfer.attempts_left or again_s > transfer.first_s + self._within_s:
            self._settle_as_inner(transfer)
            return
        self._running.remove(transfer)
        self._resting.append(transfer)
        transfer.again_s, transfer.question = again_s, None
        name = self._names.get(transfer.request[2])
        if self._store is not None and name is not None:
            transfer.question = _Lookup(name)
            self._ask(transfer.question)

    def _go_on(self, transfer: _QueuedTransfer, now_s: float) -> None:
        """Between two attempts: begin the next, if there is to be one."""
        answer = transfer.question.answer if transfer.question is not None else _Answer.GO_ON
        if now_s <= transfer.first_s + self._within_s and answer in (None, _Answer.GO_ON):
            if answer is None or now_s < transfer.again_s:
                return
            self._resting.remove(transfer)
            if self._begin(transfer) is None:
                return
        if answer is _Answer.ABSENT:
            assert transfer.inner is not None
            transfer.inner.missing = True
        self._settle_as_inner(transfer)

    def _settle_as_inner(self, transfer: _QueuedTransfer) -> None:
        """End it as its last attempt ended."""
        inner = transfer.inner
        assert inner is not None
        transfer.missing = inner.missing
        self._settle(transfer, inner.state, inner.error, quarantine=inner.quarantine)

    def _settle(
        self, transfer: _QueuedTransfer, state: TransferState, error: str | None, *, quarantine: bool = False
    ) -> None:
        for among in (self._running, self._resting):
            if transfer in among:
                among.remove(transfer)
        if not quarantine:
            self._busy.subtract((transfer.request[0], transfer.request[2]))
        transfer.error, transfer.quarantine, transfer.state = error, quarantine, state
        self._news = True

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
        """What waits is still moved, for ``close_timeout_s`` at most. What failed is not tried again."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        for transfer in tuple(self._resting):
            self._settle_as_inner(transfer)
        deadline_s = time.monotonic() + self._close_timeout_s
        while (self._running or self._waiting) and time.monotonic() < deadline_s:
            self._pass()
            time.sleep(_LOOK_MIN_S)
        for transfer in self._waiting:
            self._settle(transfer, TransferState.FAILED, f"{self.name}: closed before it was started")
        self._waiting.clear()
        self.inner.close()
        for transfer in tuple(self._running):
            self._advance(transfer, time.monotonic())
        if self._store is not None:
            self._questions.put(None)
            self._store.close()
