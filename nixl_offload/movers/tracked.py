"""What movers have in common: their regions, files and transfers, and the checks before any I/O.

A subclass says how a transfer starts (``_launch``) and goes on (``_advance``). Wrappers of movers do not derive from
this.
Threading: the one thread that drives the mover. Neither threads nor NIXL survive a fork, so ``close`` does nothing in a
forked child.
"""

from __future__ import annotations

import logging
import os
import time
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Final, Generic, TypeVar

from nixl_offload.errors import MoverError
from nixl_offload.keep import keep_forever
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

_DRAIN_POLL_S: Final = 0.0002


@dataclass(slots=True, eq=False)
class FileEntry:
    """An opened file, or an object that was named."""

    fd: int
    """-1 for an object."""
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

    def __init__(
        self, name: str, memory_kinds: frozenset[MemoryKind], limits: MoverLimits, close_timeout_s: float
    ) -> None:
        self.name = name
        self.memory_kinds = memory_kinds
        self.limits = limits
        self._close_timeout_s = close_timeout_s
        self._pid = os.getpid()
        self._memories: dict[MemoryId, MemoryRegion] = {}
        self._files: dict[FileId, FileEntry] = {}
        self._in_flight: dict[Transfer, TransferT] = {}
        self._next_id = 1
        self._closed = False

    # For subclasses

    @abstractmethod
    def _launch(self, transfer: TransferT) -> None:
        """Start a transfer of one row at least. Raises MoverError if nothing was started."""

    @abstractmethod
    def _advance(self, transfer: TransferT) -> None:
        """Push a pending transfer on, and call ``_finish`` once nothing touches its memory any more."""

    def _register(self, memory: MemoryId, region: MemoryRegion) -> None:
        """Register ``region`` with the library below. Raises MoverError."""

    def _unregister(self, memory: MemoryId, region: MemoryRegion) -> None:
        """Undo ``_register``. Raises MoverError."""

    def _add_file(self, entry: FileEntry) -> FileId:
        """Register an open file, which belongs to the mover: close it before raising MoverError. Or an object."""
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

    def _release_all(self) -> None:
        """Close and deregister all at the end. What may still be in use is kept for the life of the process."""
        stuck = list(self._in_flight.values())
        for transfer in stuck:
            self._finish(transfer, f"{self.name}: still in flight when the mover was closed", quarantine=True)
        quarantined = sum(entry.in_flight for entry in self._files.values())
        if quarantined:
            logger.warning("%s: %d transfers did not end; leaking their memory and files", self.name, quarantined)
            keep_forever((self, stuck))
            return
        calls = [partial(self.close_file, file) for file in self._files]
        calls += [partial(self.unregister_memory, memory) for memory in self._memories]
        for call in calls:
            try:
                call()
            except MoverError as error:
                logger.warning("%s", error)

    # The contract

    def register_memory(self, region: MemoryRegion) -> MemoryId:
        self._check_usable()
        if region.kind not in self.memory_kinds:
            kinds = " and ".join(sorted(kind.value for kind in self.memory_kinds))
            raise MoverError(f"{self.name}: moves {kinds}, not {region.kind.value}")
        memory = MemoryId(self._new_id())
        self._register(memory, region)
        self._memories[memory] = region
        return memory

    def unregister_memory(self, memory: MemoryId) -> None:
        region = self._memory(memory)
        del self._memories[memory]
        self._unregister(memory, region)

    def adopt_file(self, fd: int, path: str, length_bytes: int, *, direct: bool) -> FileId:
        if self.limits.whole_writes:
            return super().adopt_file(fd, path, length_bytes, direct=direct)
        try:
            self._check_usable()
        except MoverError:
            os.close(fd)
            raise
        return self._add_file(FileEntry(fd, path, length_bytes, direct))

    def open_object(self, name: str, length_bytes: int) -> FileId:
        if not self.limits.whole_writes:
            return super().open_object(name, length_bytes)
        self._check_usable()
        return self._add_file(FileEntry(-1, name, length_bytes))

    def close_file(self, file: FileId) -> None:
        entry = self._pop_file(file)
        if entry.fd >= 0:
            os.close(entry.fd)

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
        entry.in_flight += 1
        self._in_flight[transfer] = transfer
        try:
            self._launch(transfer)
        except MoverError as error:
            self._finish(transfer, str(error))
            raise
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
