"""What movers have in common: their regions, files and transfers, and the checks before any I/O.

A subclass says how a transfer starts (``_prepare``, ``_launch``) and goes on (``_advance``). Wrappers of movers do not
derive from this.
Threading: the one thread that drives the mover. Neither threads nor NIXL survive a fork, so ``close`` does nothing in a
forked child.
"""

from __future__ import annotations

import logging
import os
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Final, Generic, TypeVar

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

logger = logging.getLogger(__name__)

T = TypeVar("T")

_DRAIN_POLL_S: Final = 0.0002


@dataclass(slots=True, eq=False)
class FileEntry:
    """An opened file, or an object that was named."""

    fd: int
    """Of a file; for an object the number that its mover knows it by."""
    path: str
    length_bytes: int
    direct: bool = False
    """With O_DIRECT."""
    in_flight: int = 0
    """Transfers that use it now. A quarantined transfer counts for ever."""


@dataclass(slots=True, eq=False)
class TrackedTransfer(Transfer):
    """A transfer with its region, its file and its extents in both."""

    region: MemoryRegion = field(kw_only=True)
    file: FileEntry = field(kw_only=True)
    mem: Extents = field(kw_only=True)
    fil: Extents = field(kw_only=True)

    def rows(self) -> Iterator[tuple[int, int, int]]:
        """Address, length and offset in the file of each row."""
        for (memory_offset, length), (offset, _) in zip(self.mem.tolist(), self.fil.tolist(), strict=True):
            yield self.region.address + memory_offset, length, offset


TransferT = TypeVar("TransferT", bound=TrackedTransfer)


class TrackedMover(Mover, Generic[TransferT]):
    """Keeps regions, files and ``_in_flight``: every transfer that is not final.

    Ids count up and never repeat, so a stale id is refused and not mistaken for another.
    """

    transfer_type: ClassVar[type[TrackedTransfer]] = TrackedTransfer

    def __init__(self, name: str, memory_kinds: frozenset[MemoryKind], limits: MoverLimits) -> None:
        self.name = name
        self.memory_kinds = memory_kinds
        self.limits = limits
        self._pid = os.getpid()
        self._memories: dict[MemoryId, MemoryRegion] = {}
        self._files: dict[FileId, FileEntry] = {}
        self._in_flight: dict[Transfer, TransferT] = {}
        self._next_id = 1
        self._closed = False

    # For subclasses

    def _prepare(self, transfer: TransferT) -> None:
        """Do what may be refused before the start. Raises MoverError."""

    @abstractmethod
    def _launch(self, transfer: TransferT) -> None:
        """Start a transfer of one row at least. Never raises: from here on ``_finish`` tells of failure."""

    @abstractmethod
    def _advance(self, transfer: TransferT) -> None:
        """Push a pending transfer on, and call ``_finish`` once nothing touches its memory any more."""

    def _add_file(self, entry: FileEntry) -> FileId:
        """Register an open file, which belongs to the mover: close it before raising MoverError."""
        file = FileId(self._new_id())
        self._files[file] = entry
        return file

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    def _check_usable(self) -> None:
        """Raise MoverError after ``close``."""
        if self._closed:
            raise MoverError(f"{self.name}: this mover is closed")

    def _may_close(self) -> bool:
        """Whether ``close`` has work to do: the first time, and not in a forked child."""
        return not self._closed and os.getpid() == self._pid

    def _memory(self, memory: MemoryId) -> MemoryRegion:
        if memory not in self._memories:
            raise MoverError(f"{self.name}: memory {memory} is not registered here")
        return self._memories[memory]

    def _file(self, file: FileId) -> FileEntry:
        if file not in self._files:
            raise MoverError(f"{self.name}: file {file} is not open here")
        return self._files[file]

    def _pop_file(self, file: FileId) -> FileEntry:
        """Remove a file without closing it. Raises MoverError while a transfer uses it."""
        entry = self._file(file)
        if entry.in_flight:
            raise MoverError(f"{self.name}: {entry.path} has {entry.in_flight} transfers in flight or quarantine")
        return self._files.pop(file)

    def _finish(self, transfer: TransferT, error: str | None, *, quarantine: bool = False) -> None:
        """Make a transfer final. A quarantined one holds its file for ever."""
        self._in_flight.pop(transfer, None)
        if not quarantine:
            transfer.file.in_flight -= 1
        transfer.error, transfer.quarantine = error, quarantine
        transfer.state = TransferState.DONE if error is None else TransferState.FAILED

    def _drain(self, timeout_s: float) -> None:
        """Poll until nothing is in flight, for ``timeout_s`` at most."""
        end_s = time.monotonic() + timeout_s
        while self._in_flight and time.monotonic() < end_s:
            for transfer in list(self._in_flight):
                self.poll(transfer)
            if self._in_flight:
                time.sleep(_DRAIN_POLL_S)

    def _abandon(self) -> None:
        """Fail and quarantine what is still in flight: the mover is being closed."""
        for transfer in list(self._in_flight.values()):
            self._finish(transfer, f"{self.name}: still in flight when the mover was closed", quarantine=True)

    def _let_go(self, release: Callable[[T], None], what: T) -> None:
        """Close or deregister at the end: an error is logged, and does not keep anything else."""
        try:
            release(what)
        except MoverError as error:
            logger.warning("%s", error)

    # The contract

    def register_memory(self, region: MemoryRegion) -> MemoryId:
        self._check_usable()
        if region.kind not in self.memory_kinds:
            kinds = " and ".join(sorted(kind.value for kind in self.memory_kinds))
            raise MoverError(f"{self.name}: moves {kinds}, not {region.kind.value}")
        memory = MemoryId(self._new_id())
        self._memories[memory] = region
        return memory

    def unregister_memory(self, memory: MemoryId) -> None:
        self._memory(memory)
        del self._memories[memory]

    def adopt_file(self, fd: int, path: str, length_bytes: int, *, direct: bool) -> FileId:
        try:
            self._check_usable()
        except MoverError:
            os.close(fd)
            raise
        return self._add_file(FileEntry(fd, path, length_bytes, direct))

    def close_file(self, file: FileId) -> None:
        os.close(self._pop_file(file).fd)

    def submit(
        self, op: Op, memory: MemoryId, memory_extents: Extents, file: FileId, file_extents: Extents
    ) -> Transfer:
        self._check_usable()
        region, entry = self._memory(memory), self._file(file)
        if not self._check_extents(op, region, memory_extents, entry, file_extents):
            return Transfer(op, 0, TransferState.DONE)
        total_bytes = int(memory_extents[:, 1].sum())
        made = self.transfer_type(op, total_bytes, region=region, file=entry, mem=memory_extents, fil=file_extents)
        transfer: TransferT = made  # type: ignore[assignment]
        self._prepare(transfer)
        entry.in_flight += 1
        self._in_flight[transfer] = transfer
        self._launch(transfer)
        return transfer

    def poll(self, transfer: Transfer) -> TransferState:
        pending = self._in_flight.get(transfer)
        if pending is not None:
            self._advance(pending)
        return transfer.state

    def _check_extents(self, op: Op, region: MemoryRegion, mem: Extents, file: FileEntry, fil: Extents) -> int:
        """Return how many rows there are. Raises MoverError for rows that must not be moved."""
        limits = self.limits
        if mem.shape != fil.shape or mem.shape[1:] != (2,) or mem[:, 1].tobytes() != fil[:, 1].tobytes():
            raise MoverError(f"{self.name}: memory and file extents must have the same lengths, row by row")
        if len(mem) > limits.max_extents_per_transfer:
            raise MoverError(f"{self.name}: {len(mem)} extents at once, at most {limits.max_extents_per_transfer}")
        if len(mem) and limits.whole_writes and op is Op.WRITE and fil.tolist() != [[0, file.length_bytes]]:
            raise MoverError(f"{self.name}: a write is one extent, all {file.length_bytes} bytes of {file.path}")
        bits = 0
        for rows, size_bytes, what in ((mem, region.length_bytes, "the memory"), (fil, file.length_bytes, file.path)):
            for row, (at, length) in enumerate(rows.tolist()):
                if at < 0 or length <= 0 or at + length > size_bytes:
                    raise MoverError(
                        f"extent {row} of {what} (offset {at}, length {length}) is outside its {size_bytes} bytes"
                    )
                if length > limits.max_extent_bytes:
                    raise MoverError(f"{self.name}: {length} bytes in one extent, at most {limits.max_extent_bytes}")
                # Or-ed together, a number off the grid leaves a bit below the alignment.
                bits |= at | length | (region.address + at if rows is mem else 0)
        if file.direct and bits & (limits.alignment_bytes - 1):
            raise MoverError(
                f"O_DIRECT needs addresses, offsets and lengths that are multiples of {limits.alignment_bytes} bytes"
            )
        return len(mem)
