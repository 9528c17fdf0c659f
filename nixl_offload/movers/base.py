"""The contract of a mover: how bytes travel between registered memory and a file or object. Movers know no keys.

``Mover`` keeps regions, files and transfers, and checks them before any I/O. A subclass says how a transfer starts
(``_launch``) and goes on (``_advance``).
Threading: one thread drives a mover, the engine's pump; the mover may have threads of its own. Neither threads nor NIXL
survive a fork, so ``close`` does nothing in a forked child.
Ownership: between ``submit`` and a final ``poll`` the memory of a transfer belongs to the mover. A final state means
that nothing will touch that memory any more. If a mover cannot promise this for a failed transfer, it sets
``quarantine``.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, ClassVar, Final, NewType

import numpy as np
import numpy.typing as npt

from nixl_offload.errors import MoverError
from nixl_offload.keep import keep_forever
from nixl_offload.stores.filesystem import REAL
from nixl_offload.types import PAGE_BYTES

logger = logging.getLogger(__name__)

LIBRARIES: Final = threading.RLock()
"""Held while a mover starts or ends a third-party library, or registers memory with it: tiers open on a thread each,
and not every library takes two such calls at once. Never held around I/O: storage that hangs would keep other tiers
closed."""

POLL_S: Final = 0.0002
"""How often a transfer is looked at that somebody waits for."""
MAX_IO_BYTES: Final = (2 << 30) - PAGE_BYTES
"""The kernel moves no more in one read or write."""

MemoryId = NewType("MemoryId", int)
FileId = NewType("FileId", int)

Extents = npt.NDArray[np.int64]
"""Shape (n, 2): ``[:, 0]`` byte offset in a registered memory region or an opened file, ``[:, 1]`` length in bytes."""


class Op(Enum):
    """Direction, seen from memory."""

    __hash__ = object.__hash__  # Enum's own is Python code

    READ = "read"
    """File to memory."""
    WRITE = "write"
    """Memory to file."""


class MemoryKind(Enum):
    """What kind of memory a region is."""

    DRAM = "dram"
    VRAM = "vram"


class TransferState(Enum):
    """PENDING until the last byte; DONE and FAILED are final."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class MemoryRegion:
    """A contiguous piece of memory. The caller keeps it alive until ``close`` or ``unregister_memory``."""

    address: int
    length_bytes: int
    kind: MemoryKind = MemoryKind.DRAM
    device_id: int = 0


@dataclass(frozen=True, slots=True)
class MoverLimits:
    """What one transfer may look like. Any number of them may be in flight."""

    alignment_bytes: int = 1
    """Offsets, lengths and addresses must be multiples of this when a file is opened with ``direct_io``; 1 = none."""
    max_extent_bytes: int = MAX_IO_BYTES
    """Largest single extent."""
    max_extents_per_transfer: int = 65_536
    whole_writes: bool = False
    """A WRITE is one extent from offset 0 and becomes the whole target: objects have no parts to overwrite."""
    tells_short_reads: bool = True
    """Where False, a READ past what the target really holds may be DONE with the end of its memory untouched."""


OBJECT_LIMITS: Final = MoverLimits(max_extents_per_transfer=1, whole_writes=True)
"""Of a mover of objects. NIXL reports no error per object, and the siblings of a failed one would go on writing: so one
object per transfer."""


@dataclass(slots=True, eq=False)
class Transfer:
    """One operation in flight. Handed out by ``submit``; only the mover writes it."""

    op: Op
    bytes_total: int
    state: TransferState = TransferState.PENDING
    error: str | None = None
    """Why it failed, in words; None unless FAILED."""
    quarantine: bool = False
    """FAILED, and late I/O may still touch its memory: never reuse that memory."""
    missing: bool = False
    """FAILED because the target is not there, where the mover can tell: nothing is wrong with the storage."""


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


class Mover:
    """Moves bytes between registered memory and opened files, or objects; a mover moves one of the two.

    Errors: ``submit`` raises ``MoverError`` when nothing was started (bad ids, extents outside a region, limits).
    After ``submit`` has returned, only ``Transfer.state`` tells of failure; ``poll`` never raises.
    Ids count up and never repeat, so a stale id is refused and not mistaken for another.
    """

    transfer_type: ClassVar[type[TrackedTransfer]] = TrackedTransfer
    """What ``_launch`` and ``_advance`` are given."""

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
        self._in_flight: dict[Transfer, Any] = {}
        """Every transfer that is not final."""
        self._next_id = 1
        self._closed = False

    # The contract

    def register_memory(self, region: MemoryRegion) -> MemoryId:
        """Register ``region`` whole, once. Raises MoverError (kind not supported, limits of the device)."""
        self._check_usable()
        if region.kind not in self.memory_kinds:
            kinds = " and ".join(sorted(kind.value for kind in self.memory_kinds))
            raise MoverError(f"{self.name}: moves {kinds}, not {region.kind.value}")
        memory = MemoryId(self._new_id())
        self._register(memory, region)
        self._memories[memory] = region
        return memory

    def unregister_memory(self, memory: MemoryId) -> None:
        """Forget a region. No transfer of it may be in flight."""
        region = self._memory(memory)
        del self._memories[memory]
        self._unregister(memory, region)

    def adopt_file(self, fd: int, path: str, length_bytes: int, *, direct: bool) -> FileId:
        """Register ``[0, length_bytes)`` of a regular file that the caller has opened; no I/O, not even metadata.

        ``fd`` is open for reading, and for writing if a WRITE is to come; ``direct`` says whether it has O_DIRECT;
        ``path`` is for messages. The descriptor belongs to the mover from here on, and is closed when this raises.
        Raises MoverError; a mover of objects always does.
        """
        try:
            if self.limits.whole_writes:
                raise MoverError(f"{self.name}: moves no files")
            self._check_usable()
        except MoverError:
            os.close(fd)
            raise
        return self._add_file(FileEntry(fd, path, length_bytes, direct))

    def open_object(self, name: str, length_bytes: int) -> FileId:
        """Name an object of ``length_bytes`` in the mover's store, to be read or written. No I/O; it need not exist.

        ``name`` is relative to the mover's prefix, as in ``stores.base``. Raises MoverError; a mover of files always
        does.
        """
        if not self.limits.whole_writes:
            raise MoverError(f"{self.name}: moves no objects")
        self._check_usable()
        return self._add_file(FileEntry(-1, name, length_bytes))

    def close_file(self, file: FileId) -> None:
        """Deregister and close a file or forget an object. No transfer of it may be in flight."""
        entry = self._pop_file(file)
        if entry.fd >= 0:
            os.close(entry.fd)

    def submit(
        self, op: Op, memory: MemoryId, memory_extents: Extents, file: FileId, file_extents: Extents
    ) -> Transfer:
        """Start one transfer. Row i of both arrays has the same length. Returns at once; does not block on I/O.

        The arrays must not change until the transfer is final. No rows at all is DONE at once. Where rows overlap
        (memory of a READ, file of a WRITE), any of them may win.
        """
        self._check_usable()
        region, entry = self._memory(memory), self._file(file)
        if not self._check_extents(op, region, memory_extents, entry, file_extents):
            return Transfer(op, 0, TransferState.DONE)
        total_bytes = int(memory_extents[:, 1].sum())
        transfer = self.transfer_type(op, total_bytes, region=region, file=entry, mem=memory_extents, fil=file_extents)
        entry.in_flight += 1
        self._in_flight[transfer] = transfer
        try:
            self._launch(transfer)
        except MoverError as error:
            self._finish(transfer, str(error))
            raise
        return transfer

    def poll(self, transfer: Transfer) -> TransferState:
        """Push the transfer on and return its state. Must be called until final; idempotent afterwards."""
        pending = self._in_flight.get(transfer)
        if pending is not None:
            self._advance(pending)
        return transfer.state

    def look(self) -> float | None:
        """Poll all transfers. Returns 0.0 if any has ended since the last look, else the seconds until the next look is
        worth while. None: this mover has no such call; poll each transfer.
        """
        return None

    def close(self) -> None:
        """Wait for what is in flight, for a limited time, then release everything. Idempotent."""
        raise NotImplementedError

    # For subclasses

    def _launch(self, transfer: Any) -> None:
        """Start a transfer of one row at least. Raises MoverError if nothing was started."""
        raise NotImplementedError

    def _advance(self, transfer: Any) -> None:
        """Push a pending transfer on, and call ``_finish`` once nothing touches its memory any more."""
        raise NotImplementedError

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

    def _finish(self, transfer: Any, error: str | None, *, quarantine: bool = False) -> None:
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
                time.sleep(POLL_S)

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


class LateError(MoverError):
    """A transfer that was not waited for to its end: it may still touch its memory."""


def move(mover: Mover, submit: Callable[[], Transfer], limit_s: float) -> float:
    """Return the seconds that a transfer takes, its submission included: some movers do their I/O there. Raises
    MoverError, a LateError where its memory may still be touched.
    """
    began_s = time.monotonic()
    transfer = submit()
    while mover.poll(transfer) is TransferState.PENDING:
        if time.monotonic() - began_s > limit_s:
            raise LateError(f"storage did not answer for {limit_s:.0f} s")
        time.sleep(POLL_S)
    if transfer.state is TransferState.FAILED:
        raise (LateError if transfer.quarantine else MoverError)(transfer.error or "failed")
    return max(time.monotonic() - began_s, 1e-9)


def open_file(mover: Mover, path: str, length_bytes: int, *, direct_io: bool) -> FileId:
    """Open an existing regular file for reading and writing, and have ``mover`` register ``[0, length_bytes)``.

    Never creates, never truncates. A filesystem that refuses O_DIRECT is used buffered, with one line in the log.
    Raises MoverError.
    """
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK
    direct = direct_io
    try:
        try:
            fd = os.open(path, flags | (os.O_DIRECT if direct else 0))
        except OSError as error:
            if not direct or error.errno != errno.EINVAL:
                raise
            fd, direct = os.open(path, flags), False
            logger.warning("%s: this filesystem refuses O_DIRECT; reading and writing through the page cache", path)
    except OSError as error:
        raise MoverError(f"cannot open {path} for reading and writing: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise MoverError(f"cannot use {path}: not a regular file")
    REAL.clear_flag(fd, os.O_NONBLOCK)  # io_uring answers EAGAIN for such files on some devices
    return mover.adopt_file(fd, path, length_bytes, direct=direct)


def close_if_idle(mover: Mover, file: FileId) -> bool:
    """Close a file. False while transfers use it: it stays open until the next try, or until the mover closes."""
    try:
        mover.close_file(file)
    except MoverError as error:
        logger.debug("%s: a file stays open: %s", mover.name, error)
        return False
    return True
