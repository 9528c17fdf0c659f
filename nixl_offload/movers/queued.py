"""A wrapper for a client of objects that takes few at once, never tries again, and cannot tell what is simply absent.

Transfers above the limit wait here. A READ that failed is submitted again: the client reads straight into the caller's
memory and cannot do so itself, because its second answer would land behind the first one
(docs/decisions/0008-object-movers.md). WRITEs are left to the client.

Threading: one thread drives it; the store is asked on one daemon thread.
Ownership: it owns the wrapped mover and the store, and closes both.
"""

from __future__ import annotations

import logging
import os
import random
import time
from collections import Counter, deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from nixl_offload.errors import MoverError, StoreError
from nixl_offload.movers.base import Extents, FileId, MemoryId, MemoryRegion, Mover, Op, Transfer, TransferState
from nixl_offload.movers.launcher import Launcher
from nixl_offload.stores.base import Store

logger = logging.getLogger(__name__)

NOT_ANSWERING: Final = frozenset({"unreachable", "timeout", "throttled", "server"})
"""Causes of a StoreError that say nothing of the client or the object: another time the same call works."""
_LOOK_SHARE, _LOOK_MIN_S, _LOOK_MAX_S = 0.125, 0.0005, 0.01
"""Looks are this share of a transfer's usual time apart: a poll of NIXL costs as much processor time as a request."""


class _Answer(Enum):
    """What the store says of an object whose read failed."""

    GO_ON = "go on"
    """It is there, or nobody knows: try again."""
    ABSENT = "absent"
    SILENT = "silent"
    """The server does not answer the store either: leave it alone."""


@dataclass(slots=True, eq=False)
class _QueuedTransfer(Transfer):
    request: tuple[MemoryId, Extents, FileId, Extents] = field(kw_only=True)
    attempts_left: int = field(kw_only=True)
    inner: Transfer | None = None
    """The attempt that runs; between two attempts, the one that failed."""
    first_s: float = 0.0
    """When the first attempt began."""
    began_s: float = 0.0
    """When the latest did."""
    again_s: float = 0.0
    """When the next may begin."""
    answer: Future[_Answer] | None = None


class QueuedMover(Mover):
    """The contract and the limits of the wrapped mover, of which ``at_once`` transfers run at a time, in their order.

    A failed READ that left its memory alone is begun again: ``attempts`` in all, half to one and a half ``pause_s``
    apart, none later than ``within_s`` after the first. In the pause the store is asked whether the object is there. A
    READ is not tried again if the object is absent (``Transfer.missing``), or if the server does not answer.
    """

    def __init__(
        self,
        mover: Mover,
        store: Store,
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
        self._names: dict[FileId, str] = {}
        self._busy: Counter[FileId] = Counter()
        """Transfers by object."""
        self._usual_s = 0.0
        """What a transfer takes."""
        self._look_s = 0.0
        """When the next look is due."""
        self._news = False
        """Whether a transfer has ended since the last look."""
        self._asker: Launcher | None = None
        self._closed = False

    # Regions and objects: the wrapped mover's

    def register_memory(self, region: MemoryRegion) -> MemoryId:
        return self.inner.register_memory(region)

    def unregister_memory(self, memory: MemoryId) -> None:
        self.inner.unregister_memory(memory)

    def open_object(self, name: str, length_bytes: int) -> FileId:
        file = self.inner.open_object(name, length_bytes)
        self._names[file] = name
        return file

    def close_file(self, file: FileId) -> None:
        if self._busy[file]:
            raise MoverError(f"{self.name}: {file} has transfers in flight, in the queue or in quarantine")
        self.inner.close_file(file)
        self._names.pop(file, None)
        del self._busy[file]

    # Transfers

    def submit(
        self, op: Op, memory: MemoryId, memory_extents: Extents, file: FileId, file_extents: Extents
    ) -> Transfer:
        """If the wrapped mover refuses a transfer that had to wait, its state is FAILED."""
        if self._closed:
            raise MoverError(f"{self.name}: this mover is closed")
        if not len(memory_extents):
            return self.inner.submit(op, memory, memory_extents, file, file_extents)
        transfer = _QueuedTransfer(
            op,
            int(memory_extents[:, -1].sum()),
            request=(memory, memory_extents, file, file_extents),
            attempts_left=1 if op is Op.WRITE else self._attempts,
        )
        self._busy[file] += 1
        if len(self._running) >= self._at_once:
            self._waiting.append(transfer)
        elif (refused := self._begin(transfer)) is not None:
            self._settle(transfer, TransferState.FAILED, str(refused))
            raise refused
        return transfer

    def _begin(self, transfer: _QueuedTransfer) -> MoverError | None:
        """Begin an attempt. Returns the refusal, if nothing was started."""
        transfer.began_s = time.monotonic()
        transfer.first_s = transfer.first_s or transfer.began_s
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
            self._pass()
        return transfer.state

    def look(self) -> float | None:
        self._pass()
        news, self._news = self._news, False
        return 0.0 if news else max(self._look_s - time.monotonic(), 0.0)

    def _pass(self) -> None:
        now_s = time.monotonic()
        if now_s < self._look_s:
            return
        self._look_s = now_s + min(max(_LOOK_SHARE * self._usual_s, _LOOK_MIN_S), _LOOK_MAX_S)
        for transfer in tuple(self._running):
            self._advance(transfer, now_s)
        for transfer in tuple(self._resting):
            self._try_again(transfer, now_s)
        while self._waiting and len(self._running) < self._at_once:
            transfer = self._waiting.popleft()
            refused = self._begin(transfer)
            if refused is not None:
                self._settle(transfer, TransferState.FAILED, str(refused))

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
            # What ends sooner than others counts for more, so that nobody waits for slow times.
            took_s = now_s - transfer.began_s
            self._usual_s += (took_s - self._usual_s) * (0.25 if took_s < self._usual_s else 0.125)
        again_s = now_s + self._pause_s * random.uniform(0.5, 1.5)
        over = state is TransferState.DONE or inner.quarantine or inner.missing or self._closed
        if over or not transfer.attempts_left or again_s > transfer.first_s + self._within_s:
            self._settle_as_inner(transfer)
            return
        self._running.remove(transfer)
        self._resting.append(transfer)
        transfer.again_s, transfer.answer = again_s, self._ask(self._names[transfer.request[2]])

    def _try_again(self, transfer: _QueuedTransfer, now_s: float) -> None:
        """Between two attempts: begin the next, or end the transfer, once the store has answered."""
        asked, inner = transfer.answer, transfer.inner
        assert asked is not None
        assert inner is not None
        answer = asked.result() if asked.done() else None
        if now_s <= transfer.first_s + self._within_s and answer in (None, _Answer.GO_ON):
            if answer is None or now_s < transfer.again_s:
                return
            self._resting.remove(transfer)
            if self._begin(transfer) is None:
                return
        inner.missing |= answer is _Answer.ABSENT
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
            self._busy[transfer.request[2]] -= 1
        transfer.error, transfer.quarantine, transfer.state = error, quarantine, state
        self._news = True

    # Questions

    def _ask(self, name: str) -> Future[_Answer]:
        try:
            self._asker = self._asker or Launcher(f"nixl-offload-{self.name}-ask")
        except RuntimeError:  # this machine has no thread to spare now
            unknown: Future[_Answer] = Future()
            unknown.set_result(_Answer.GO_ON)
            return unknown
        return self._asker.submit(self._look_for, name)

    def _look_for(self, name: str) -> _Answer:
        try:
            return _Answer.ABSENT if self._store.head(name) is None else _Answer.GO_ON
        except Exception as error:  # noqa: BLE001 - then nobody knows
            logger.debug("%s: whether %s is there: %r", self.name, name, error)
            silent = isinstance(error, StoreError) and error.cause in NOT_ANSWERING
            return _Answer.SILENT if silent else _Answer.GO_ON

    def close(self) -> None:
        """What waits is still moved, for ``close_timeout_s`` at most. What failed is not tried again."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        for transfer in tuple(self._resting):
            self._settle_as_inner(transfer)
        end_s = time.monotonic() + self._close_timeout_s
        while (self._running or self._waiting) and time.monotonic() < end_s:
            self._pass()
            time.sleep(_LOOK_MIN_S)
        for transfer in self._waiting:
            self._settle(transfer, TransferState.FAILED, f"{self.name}: closed before it was started")
        self._waiting.clear()
        self.inner.close()
        for transfer in tuple(self._running):
            self._advance(transfer, time.monotonic())
        if self._asker is not None:
            self._asker.end(wait=False)
        self._store.close()
