"""What movers that move bytes in this process have in common: their regions, files and transfers in flight.

A subclass says how a transfer starts (``_make``, ``_launch``) and how it goes on (``_advance``); all that refuses a
call before any I/O stands here. Wrappers around movers do not derive from it.
Threading: the one thread that drives the mover. Neither threads nor NIXL survive a fork, so in a forked child every
call refuses and ``close`` does nothing.
"""

from __future__ import annotations

import logging
import os
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from nixl_offload.errors import MoverError
from nixl_offload.movers.base import (
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
    check_usable,
    fork_message,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class TrackedTransfer(Transfer):
    """A transfer with the region and the file that it holds until it is final."""

    memory: MemoryEntry = field(kw_only=True)
    file: FileEntry = field(kw_only=True)


@dataclass(slots=True, eq=False)
class ExtentTransfer(TrackedTransfer):
    """One that keeps its extents, for threads that move them one by one."""

    mem: Extents = field(kw_only=True)
    fil: Extents = field(kw_only=True)

    def rows(self) -> Iterator[tuple[int, int, int]]:
        """Address, length and offset in the file of each row."""
        address = self.memory.region.address
        for (memory_offset, length), (offset, _) in zip(self.mem.tolist(), self.fil.tolist(), strict=True):
            yield address + memory_offset, length, offset


TransferT = TypeVar("TransferT", bound=TrackedTransfer)


class TrackedMover(Mover, Generic[TransferT]):
    """Keeps the tables and the checks. ``_in_flight`` has every transfer that is not final."""

    def __init__(self, name: str, memory_kinds: frozenset[MemoryKind], limits: MoverLimits) -> None:
        self.name = name
        self.memory_kinds = memory_kinds
        self.limits = limits
        self._pid = os.getpid()
        self._table = HandleTable(name)
        self._in_flight: dict[Transfer, TransferT] = {}
        self._closed = False

    # For subclasses

    @abstractmethod
    def _make(self, op: Op, memory: MemoryEntry, mem: Extents, file: FileEntry, fil: Extents) -> TransferT:
        """Return a transfer of checked extents, one row at least. Raises MoverError when it cannot be started."""

    @abstractmethod
    def _launch(self, transfer: TransferT) -> None:
        """Start it. Never raises: from here on failure is told by ``_finish``."""

    @abstractmethod
    def _advance(self, transfer: TransferT) -> None:
        """Push a pending transfer on, and call ``_finish`` once nothing touches its memory any more."""

    def _add_file(self, entry: FileEntry) -> FileId:
        """Register an open file, which belongs to the mover: close it before raising MoverError."""
        return self._table.add_file(entry)

    def _check_usable(self) -> None:
        """Raise MoverError in a fork and after ``close``."""
        check_usable(self.name, self._pid, self._closed)

    def _let_go(self, release: Callable[[T], None], what: T) -> None:
        """Close or deregister at the end: an error is logged, and keeps nothing else from being let go."""
        try:
            release(what)
        except MoverError as error:
            logger.warning("%s", error)

    def _finish(self, transfer: TransferT, error: str | None, *, quarantine: bool = False) -> None:
        """Make a transfer final. A quarantined one holds its region and file for ever."""
        self._in_flight.pop(transfer, None)
        if not quarantine:
            transfer.memory.in_flight -= 1
            transfer.file.in_flight -= 1
        transfer.error, transfer.quarantine = error, quarantine
        transfer.state = TransferState.DONE if error is None else TransferState.FAILED

    def _abandon(self) -> None:
        """Fail and quarantine what is still in flight: the mover is being closed."""
        for transfer in list(self._in_flight.values()):
            self._finish(transfer, f"{self.name}: still in flight when the mover was closed", quarantine=True)

    # The contract

    def register_memory(self, region: MemoryRegion) -> MemoryId:
        self._check_usable()
        if region.kind not in self.memory_kinds:
            kinds = " and ".join(sorted(kind.value for kind in self.memory_kinds))
            raise MoverError(f"{self.name}: moves {kinds}, not {region.kind.value}")
        if region.length_bytes <= 0:
            raise MoverError(f"{self.name}: an empty memory region")
        return self._table.add_memory(MemoryEntry(region))

    def unregister_memory(self, memory: MemoryId) -> None:
        self._table.pop_memory(memory)

    def adopt_file(self, fd: int, path: str, length_bytes: int, *, direct: bool) -> FileId:
        try:
            self._check_usable()
        except MoverError:
            os.close(fd)
            raise
        check_adopted(fd, path)
        return self._add_file(FileEntry(fd, path, length_bytes, direct))

    def close_file(self, file: FileId) -> None:
        os.close(self._table.pop_file(file).fd)

    def submit(
        self, op: Op, memory: MemoryId, memory_extents: Extents, file: FileId, file_extents: Extents
    ) -> Transfer:
        self._check_usable()
        m, mem, f, fil = self._table.check(self.limits, op, memory, memory_extents, file, file_extents)
        if not len(mem):
            return Transfer(op, 0, TransferState.DONE)
        transfer = self._make(op, m, mem, f, fil)
        m.in_flight += 1
        f.in_flight += 1
        self._in_flight[transfer] = transfer
        self._launch(transfer)
        return transfer

    def poll(self, transfer: Transfer) -> TransferState:
        pending = self._in_flight.get(transfer)
        if pending is None:
            return transfer.state
        if os.getpid() != self._pid:  # the parent's goes on
            transfer.error, transfer.quarantine = fork_message(self.name, self._pid), True
            transfer.state = TransferState.FAILED
            del self._in_flight[transfer]
            return transfer.state
        self._advance(pending)
        return transfer.state
