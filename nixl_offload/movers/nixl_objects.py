"""A mover by NIXL's OBJ plugin: objects and the memory of host or device.

The plugin takes few transfers at once and cannot tell that an object is absent. It repeats writes, but not reads: it
reads into the caller's memory, and a second answer would land after the first (docs/decisions/0008-object-movers.md).
So transfers above a limit wait here. A failed read is repeated, unless a store has no such object or does not answer.

Threading: driven by one thread. From the first failed read until ``close``, a few daemon threads ask the store.
Ownership: it owns the store. A handle in flight is never released: see ``movers.nixl``.
"""

from __future__ import annotations

import itertools
import logging
import random
import time
from collections import deque
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Literal

from nixl_offload.calls import CallThreads
from nixl_offload.errors import MoverError, StoreError
from nixl_offload.movers.base import OBJECT_LIMITS, FileEntry, FileId, Op
from nixl_offload.movers.nixl import AgentMover, NixlPlugin, NixlTransfer
from nixl_offload.stores.base import Store

logger = logging.getLogger(__name__)

NOT_ANSWERING: Final = frozenset({"unreachable", "timeout", "throttled", "server"})
"""Causes of a StoreError that is not due to client or object: the same call may work later."""
ATTEMPTS: Final = 3
PAUSE_S: Final = 0.1
"""Mean pause before a read is repeated."""
WITHIN_S: Final = 3.0
"""No attempt begins later than this after the first one."""
ASKING_THREADS: Final = 4
_LOOK_SHARE, _LOOK_MIN_S, _LOOK_MAX_S = 0.125, 0.0005, 0.01
"""Polls are this share of a transfer's usual time apart: polling NIXL takes as much CPU time as a request."""

_object_numbers = itertools.count(1)
"""Never used twice: NIXL finds an object by its number, and a second name of a number would silently win."""


@dataclass(slots=True, eq=False)
class _ObjectTransfer(NixlTransfer):
    attempts: int = 0
    """Attempts so far."""
    first_s: float = 0.0
    """When the first attempt began."""
    began_s: float = 0.0
    """When the latest attempt began."""
    failure: str = ""
    """Of the latest attempt."""
    again_s: float = 0.0
    """When the next attempt may begin."""
    answer: Literal["", "go on", "absent", "silent"] = ""
    """The store's answer. go on: the object exists, or nobody knows; absent; silent: the store does not answer either.
    Empty: not asked or not answered yet."""


class NixlObjectMover(AgentMover):
    """One agent with the OBJ plugin. At most ``at_once`` transfers run; the rest waits in order.

    A transfer is quarantined if its start fails midway, or if it does not end within ``close_timeout_s`` of ``close``.
    Once the mover is closed, failed reads are not repeated.
    """

    transfer_type = _ObjectTransfer

    def __init__(self, plugin: NixlPlugin, store: Store, *, at_once: int, close_timeout_s: float = 30.0) -> None:
        limits = replace(OBJECT_LIMITS, tells_short_reads=False)
        super().__init__(plugin, limits=limits, close_timeout_s=close_timeout_s)
        self.store = store
        self._at_once = at_once
        self._numbers: dict[FileEntry, int] = {}
        self._waiting: deque[_ObjectTransfer] = deque()
        self._running: set[_ObjectTransfer] = set()
        self._resting: set[_ObjectTransfer] = set()
        """Transfers between two attempts."""
        self._askers = CallThreads("nixl-offload-obj-ask", ASKING_THREADS)
        self._usual_s = 0.0
        """The usual duration of a transfer."""
        self._look_s = 0.0
        """When the next poll is due."""
        self._news = False
        """Whether a transfer has ended since the last ``poll_all``."""

    def _register_file(self, file: FileId, entry: FileEntry) -> None:
        number = next(_object_numbers)
        descriptor = (0, entry.length_bytes, number, self._plugin.key_prefix + entry.path)
        self._register_as(file, entry.path, "OBJ", descriptor, self._plugin.plugin)
        self._numbers[entry] = number

    def _unregister_file(self, file: FileId, entry: FileEntry) -> None:
        del self._numbers[entry]
        super()._unregister_file(file, entry)

    # Transfers

    def _launch(self, transfer: _ObjectTransfer) -> None:
        self._waiting.append(transfer)
        self._begin_waiting()

    def _begin_waiting(self) -> None:
        while self._waiting and len(self._running) < self._at_once:
            self._attempt(self._waiting.popleft())

    def _attempt(self, transfer: _ObjectTransfer) -> None:
        """Begin an attempt."""
        transfer.began_s = time.monotonic()
        transfer.first_s = transfer.first_s or transfer.began_s
        transfer.attempts += 1
        try:
            self._prepare(transfer, "OBJ", self._numbers[transfer.file])
        except MoverError as error:
            self._finish(transfer, str(error))
            return
        self._running.add(transfer)
        self._note(transfer, self._begin(transfer), transfer.began_s)

    def _advance(self, transfer: _ObjectTransfer) -> None:
        self._pass()

    def poll_all(self) -> float | None:
        self._pass()
        news, self._news = self._news, False
        return 0.0 if news else max(self._look_s - time.monotonic(), 0.0)

    def _pass(self) -> None:
        """Advance all transfers if a poll is due."""
        now_s = time.monotonic()
        if now_s < self._look_s:
            return
        self._look_s = now_s + min(max(_LOOK_SHARE * self._usual_s, _LOOK_MIN_S), _LOOK_MAX_S)
        for transfer in tuple(self._running):
            self._note(transfer, self._check(transfer), now_s)
        for transfer in tuple(self._resting):
            if self._closed or now_s > transfer.first_s + WITHIN_S or transfer.answer in ("absent", "silent"):
                self._resting.remove(transfer)
                transfer.missing = transfer.answer == "absent"
                self._finish(transfer, transfer.failure)
            elif transfer.answer and now_s >= transfer.again_s:
                self._resting.remove(transfer)
                self._attempt(transfer)
        self._begin_waiting()

    def _note(self, transfer: _ObjectTransfer, state: str | None, now_s: float) -> None:
        """Handle the state of an attempt: PROC, DONE, or why it failed; None: it is FAILED already."""
        if state is None or state == "PROC":
            return
        if state == "DONE":
            # Shorter times weigh more, so that polls do not become rare.
            took_s = now_s - transfer.began_s
            self._usual_s += (took_s - self._usual_s) * (0.25 if took_s < self._usual_s else 0.125)
            self._finish(transfer, None)
            return
        transfer.failure = self._failure(transfer, state)
        transfer.again_s = now_s + PAUSE_S * random.uniform(0.5, 1.5)
        is_last = transfer.op is Op.WRITE or transfer.attempts == ATTEMPTS or self._closed
        if is_last or transfer.again_s > transfer.first_s + WITHIN_S:
            self._finish(transfer, transfer.failure)
            return
        self._running.remove(transfer)
        self._release(transfer)
        transfer.answer = ""
        self._resting.add(transfer)
        self._askers.start(partial(self._ask, transfer))
        if not self._askers.keep_up():  # no thread can be started now
            transfer.answer = "go on"

    def _ask(self, transfer: _ObjectTransfer) -> None:
        """Ask the store about the object of a failed read, on a thread."""
        try:
            transfer.answer = "absent" if self.store.head(transfer.file.path) is None else "go on"
        except Exception as error:  # noqa: BLE001 - then nobody knows
            logger.debug("%s: whether %s is there: %r", self.name, transfer.file.path, error)
            is_silent = isinstance(error, StoreError) and error.cause in NOT_ANSWERING
            transfer.answer = "silent" if is_silent else "go on"

    def _finish(self, transfer: Any, error: str | None, *, quarantine: bool = False) -> None:
        self._running.discard(transfer)
        self._news = True
        super()._finish(transfer, error, quarantine=quarantine)

    def _shut(self) -> None:
        for transfer in (*self._waiting, *self._resting):  # nothing of them is in flight
            self._finish(transfer, transfer.failure or f"{self.name}: closed before it was started")
        self._waiting.clear()
        self._resting.clear()
        self._askers.close(0.0)
        self.store.close()
