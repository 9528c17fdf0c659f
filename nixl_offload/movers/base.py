"""The contract of a mover: how bytes travel between registered memory and a file or object. Movers know no keys.

Threading: one thread drives a mover, the engine's pump; the mover may have threads of its own.
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
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import Final, NewType

import numpy as np
import numpy.typing as npt

from nixl_offload.errors import MoverError
from nixl_offload.stores.filesystem import REAL
from nixl_offload.types import PAGE_BYTES

logger = logging.getLogger(__name__)

LIBRARIES: Final = threading.RLock()
"""Held while a mover starts or ends a third-party library, or registers memory with it: tiers open on a thread each,
and not every library takes two such calls at once. Never held around I/O: storage that hangs would keep other tiers
closed."""

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


class Mover(ABC):
    """Moves bytes between registered memory and opened files, or objects; a mover moves one of the two.

    Errors: ``submit`` raises ``MoverError`` when nothing was started (bad ids, extents outside a region, limits).
    After ``submit`` has returned, only ``Transfer.state`` tells of failure; ``poll`` never raises.
    """

    name: str
    memory_kinds: frozenset[MemoryKind]
    limits: MoverLimits

    @abstractmethod
    def register_memory(self, region: MemoryRegion) -> MemoryId:
        """Register ``region`` whole, once. Raises MoverError (kind not supported, limits of the device)."""

    @abstractmethod
    def unregister_memory(self, memory: MemoryId) -> None:
        """Forget a region. No transfer of it may be in flight."""

    def adopt_file(self, fd: int, path: str, length_bytes: int, *, direct: bool) -> FileId:
        """Register ``[0, length_bytes)`` of a regular file that the caller has opened; no I/O, not even metadata.

        ``fd`` is open for reading, and for writing if a WRITE is to come; ``direct`` says whether it has O_DIRECT;
        ``path`` is for messages. The descriptor belongs to the mover from here on, and is closed when this raises.
        Raises MoverError; a mover of objects always does.
        """
        os.close(fd)
        raise MoverError(f"{self.name}: moves no files")

    def open_object(self, name: str, length_bytes: int) -> FileId:
        """Name an object of ``length_bytes`` in the mover's store, to be read or written. No I/O; it need not exist.

        ``name`` is relative to the mover's prefix, as in ``stores.base``. Raises MoverError; a mover of files always
        does.
        """
        raise MoverError(f"{self.name}: moves no objects")

    @abstractmethod
    def close_file(self, file: FileId) -> None:
        """Deregister and close a file or forget an object. No transfer of it may be in flight."""

    @abstractmethod
    def submit(
        self, op: Op, memory: MemoryId, memory_extents: Extents, file: FileId, file_extents: Extents
    ) -> Transfer:
        """Start one transfer. Row i of both arrays has the same length. Returns at once; does not block on I/O.

        The arrays must not change until the transfer is final. No rows at all is DONE at once. Where rows overlap
        (memory of a READ, file of a WRITE), any of them may win.
        """

    @abstractmethod
    def poll(self, transfer: Transfer) -> TransferState:
        """Push the transfer on and return its state. Must be called until final; idempotent afterwards."""

    def look(self) -> float | None:
        """Poll all transfers. Returns 0.0 if any has ended since the last look, else the seconds until the next look is
        worth while. None: this mover has no such call; poll each transfer.
        """
        return None

    @abstractmethod
    def close(self) -> None:
        """Wait for what is in flight, then release everything. Idempotent."""


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
