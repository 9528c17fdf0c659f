"""The contract of movers, which move bytes between registered memory and a file or object. Movers know no keys.

``Mover`` keeps regions, files and transfers, and checks them before any I/O. A subclass starts a transfer (``_launch``)
and advances it (``_advance``).
Threading: one thread drives a mover, the engine's pump; the mover may have threads of its own. Neither threads nor NIXL
survive a fork, so ``close`` does nothing in a forked child.
Ownership: between ``submit`` and a final ``poll`` the memory of a transfer belongs to the mover. A final state means
that nothing will touch that memory any more. If a mover cannot promise this of a failure, it sets ``quarantine``.
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
from nixl_offload.stores.filesystem import REAL, Filesystem
from nixl_offload.types import PAGE_BYTES

logger = logging.getLogger(__name__)

LIBRARIES: Final = threading.RLock()
"""Held while a mover starts or ends a third-party library or registers memory with it. Tiers open in parallel, and some
libraries cannot take two such calls at once. Never held during I/O: hung storage would keep other tiers closed."""

POLL_S: Final = 0.0002
"""Poll interval of blocking waits for a transfer."""
MAX_IO_BYTES: Final = (2 << 30) - PAGE_BYTES
"""The kernel's limit of one read or write."""

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
    """The kind of a region's memory."""

    DRAM = "dram"
    VRAM = "vram"


class TransferState(Enum):
    """PENDING until all I/O has ended; DONE and FAILED are final."""

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
    """Limits of one transfer. Any number of transfers may be in flight."""

    alignment_bytes: int = 1
    """Offsets, lengths and addresses must be multiples of this if the file has O_DIRECT; 1 = no limit."""
    max_extent_bytes: int = MAX_IO_BYTES
    """Largest single extent."""
    max_extents_per_transfer: int = 65_536
    whole_writes: bool = False
    """A WRITE is one extent from offset 0 and replaces the whole target: parts of objects cannot be overwritten."""
    tells_short_reads: bool = True
    """If False, a READ past the end of the target may be DONE with the end of its memory untouched."""


FILE_LIMITS: Final = MoverLimits(alignment_bytes=PAGE_BYTES)
OBJECT_LIMITS: Final = MoverLimits(max_extents_per_transfer=1, whole_writes=True)
"""Limits of object movers: one object per transfer. NIXL reports no error per object, and the siblings of a failed
object would go on writing."""


@dataclass(slots=True, eq=False)
class Transfer:
    """One operation in flight. ``submit`` returns it; only the mover changes it."""

    op: Op
    bytes_total: int
    state: TransferState = TransferState.PENDING
    error: str | None = None
    """Why it failed; None unless FAILED."""
    quarantine: bool = False
    """FAILED, and late I/O may still touch its memory, which must never be reused."""
    missing: bool = False
    """FAILED because the target does not exist, if the mover can tell. Storage is not to blame."""


@dataclass(slots=True, eq=False)
class FileEntry:
    """An opened file or a named object."""

    fd: int
    """-1 for an object."""
    path: str
    length_bytes: int
    direct: bool = False
    """The file has O_DIRECT."""
    in_flight: int = 0
    """Transfers that use it. A quarantined transfer counts for ever."""


@dataclass(slots=True, eq=False)
class TrackedTransfer(Transfer):
    """A transfer with its region, its file and its extents in both."""

    region: MemoryRegion = field(kw_only=True)
    file: FileEntry = field(kw_only=True)
    mem: Extents = field(kw_only=True)
    fil: Extents = field(kw_only=True)

    def rows(self) -> Iterator[tuple[int, int, int]]:
        """Yield address, length and file offset of each row."""
        for (memory_offset, length), (offset, _) in zip(self.mem.tolist(), self.fil.tolist(), strict=True):
            yield self.region.address + memory_offset, length, offset


class Mover:
    """Moves bytes between registered memory and either opened files or objects.

    Errors: ``submit`` raises ``MoverError`` if nothing was started (bad ids, extents outside a region, limits). Later
    failures appear only in ``Transfer.state``; ``poll`` never raises. Ids never repeat, so a stale id is refused.
    """

    transfer_type: ClassVar[type[TrackedTransfer]] = TrackedTransfer
    """The type of transfers that ``_launch`` and ``_advance`` receive."""

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
        """All transfers that are not final."""
        self._next_id = 1
        self._closed = False

    # The contract

    def register_memory(self, region: MemoryRegion) -> MemoryId:
        """Register a whole region, once. Raises MoverError (kind not supported, limits of the device)."""
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
        """Register ``[0, length_bytes)`` of an opened regular file. No I/O, not even metadata.

        ``fd``: open for reading, and for writing if WRITEs follow. ``direct``: whether it has O_DIRECT. ``path``: for
        messages. The mover owns ``fd`` from here on, even if this raises. Raises MoverError; an object mover always.
        """
        try:
            if self.limits.whole_writes:
                raise MoverError(f"{self.name}: moves no files")
            return self._add_file(FileEntry(fd, path, length_bytes, direct))
        except MoverError:
            os.close(fd)
            raise

    def open_object(self, name: str, length_bytes: int) -> FileId:
        """Register an object of ``length_bytes`` in the mover's store. No I/O; it need not exist.

        ``name`` is relative to the mover's prefix, as in ``stores.base``. Raises MoverError; a file mover always does.
        """
        if not self.limits.whole_writes:
            raise MoverError(f"{self.name}: moves no objects")
        return self._add_file(FileEntry(-1, name, length_bytes))

    def close_file(self, file: FileId) -> None:
        """Deregister and close a file, or forget an object. No transfer of it may be in flight."""
        entry = self._file(file)
        if entry.in_flight:
            raise MoverError(f"{self.name}: {entry.path} has {entry.in_flight} transfers in flight or quarantine")
        del self._files[file]
        try:
            self._unregister_file(file, entry)
        finally:
            if entry.fd >= 0:
                os.close(entry.fd)

    def submit(
        self, op: Op, memory: MemoryId, memory_extents: Extents, file: FileId, file_extents: Extents
    ) -> Transfer:
        """Start one transfer. Row i of both arrays has the same length. Returns at once; does not block on I/O.

        The arrays must not change until the transfer is final. A transfer without rows is DONE at once. If rows overlap
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
        """Advance the transfer and return its state. Call it until the state is final; then it is idempotent."""
        pending = self._in_flight.get(transfer)
        if pending is not None:
            self._advance(pending)
        return transfer.state

    def poll_all(self) -> float | None:
        """Poll all transfers. Returns 0.0 if any has ended since the last call, else the seconds until the next call
        makes sense. Returns None if the mover has no such call; then poll each transfer.
        """
        return None

    def close(self) -> None:
        """Wait a limited time for transfers in flight, then release everything. Idempotent."""
        if self._closed or os.getpid() != self._pid:  # the parent closes what a forked child has inherited
            return
        self._closed = True
        self._drain(self._close_timeout_s)
        self._shut()
        self._release_all()

    # For subclasses

    def _launch(self, transfer: Any) -> None:
        """Start a transfer of at least one row. Raises MoverError if nothing was started."""
        raise NotImplementedError

    def _advance(self, transfer: Any) -> None:
        """Advance a pending transfer; call ``_finish`` once nothing touches its memory any more."""
        raise NotImplementedError

    def _register(self, memory: MemoryId, region: MemoryRegion) -> None:
        """Register ``region`` with the third-party library. Raises MoverError."""

    def _unregister(self, memory: MemoryId, region: MemoryRegion) -> None:
        """Undo ``_register``. Raises MoverError."""

    def _register_file(self, file: FileId, entry: FileEntry) -> None:
        """Register a file or an object with the third-party library. Raises MoverError."""

    def _unregister_file(self, file: FileId, entry: FileEntry) -> None:
        """Undo ``_register_file``. Raises MoverError."""

    def _shut(self) -> None:
        """End threads and transfers that have not ended in time. Called once, by ``close``."""

    # Inside

    def _add_file(self, entry: FileEntry) -> FileId:
        self._check_usable()
        file = FileId(self._new_id())
        self._register_file(file, entry)
        self._files[file] = entry
        return file

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    def _check_usable(self) -> None:
        """Raise MoverError after ``close``."""
        if self._closed:
            raise MoverError(f"{self.name}: this mover is closed")

    def _memory(self, memory: MemoryId) -> MemoryRegion:
        if memory not in self._memories:
            raise MoverError(f"{self.name}: memory {memory} is not registered here")
        return self._memories[memory]

    def _file(self, file: FileId) -> FileEntry:
        if file not in self._files:
            raise MoverError(f"{self.name}: file {file} is not open here")
        return self._files[file]

    def _finish(self, transfer: Any, error: str | None, *, quarantine: bool = False) -> None:
        """Make a transfer final. A quarantined transfer holds its file for ever."""
        self._in_flight.pop(transfer, None)
        if not quarantine:
            transfer.file.in_flight -= 1
        transfer.error, transfer.quarantine = error, quarantine
        transfer.state = TransferState.DONE if error is None else TransferState.FAILED

    def _drain(self, timeout_s: float) -> None:
        """Poll until nothing is in flight, at most for ``timeout_s``."""
        end_s = time.monotonic() + timeout_s
        while self._in_flight and time.monotonic() < end_s:
            for transfer in list(self._in_flight):
                self.poll(transfer)
            if self._in_flight:
                time.sleep(POLL_S)

    def _release_all(self) -> None:
        """Close and deregister everything. If transfers may still run, keep all of it for the life of the process."""
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
        """Return the number of rows. Raises MoverError for invalid rows."""
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
                # An unaligned number leaves a bit below the alignment.
                bits |= at | length | (region.address + at if rows is mem else 0)
        if file.direct and bits & (limits.alignment_bytes - 1):
            raise MoverError(
                f"O_DIRECT needs addresses, offsets and lengths that are multiples of {limits.alignment_bytes} bytes"
            )
        return len(mem)


class LateError(MoverError):
    """A transfer did not end in time: it may still touch its memory."""


def move(mover: Mover, submit: Callable[[], Transfer], limit_s: float) -> float:
    """Return the seconds that a transfer takes, with its submission: some movers do their I/O there. Raises MoverError;
    LateError if its memory may still be touched.
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


def open_file(mover: Mover, path: str, length_bytes: int, *, direct_io: bool, filesystem: Filesystem = REAL) -> FileId:
    """Open an existing regular file for reading and writing, and register ``[0, length_bytes)`` with ``mover``.

    Never creates or truncates. If the filesystem refuses O_DIRECT, I/O is buffered; the log says so. Raises MoverError.
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
    try:
        if not stat.S_ISREG(filesystem.stat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        filesystem.clear_flag(fd, os.O_NONBLOCK)  # io_uring returns EAGAIN for such files on some devices
    except OSError as error:
        os.close(fd)
        raise MoverError(f"cannot use {path}: {error.strerror}") from error
    return mover.adopt_file(fd, path, length_bytes, direct=direct)


def close_if_idle(mover: Mover, file: FileId) -> bool:
    """Close a file. False if transfers use it: it stays open until the next try, or until the mover closes."""
    try:
        mover.close_file(file)
    except MoverError as error:
        logger.debug("%s: a file stays open: %s", mover.name, error)
        return False
    return True
