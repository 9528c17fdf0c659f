"""What every mover must know of its regions and files, and the checks that all movers make alike before any I/O.

Threading: none; belongs to the one thread that drives its mover. Opens and closes file descriptors, moves no bytes.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from nixl_offload.errors import MoverError
from nixl_offload.movers.base import (
    Extents,
    FileId,
    MemoryId,
    MemoryRegion,
    Mover,
    MoverLimits,
    Op,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

_DRAIN_POLL_S = 0.0002


@dataclass(slots=True, eq=False)
class MemoryEntry:
    """A registered region."""

    region: MemoryRegion
    in_flight: int = 0
    """Transfers that own part of it now; a quarantined one never gives its share back."""


@dataclass(slots=True, eq=False)
class FileEntry:
    """An opened file, or an object that was named."""

    fd: int
    """Of a file; for an object whatever number its mover knows it by."""
    path: str
    length_bytes: int
    direct: bool = False
    """With O_DIRECT."""
    in_flight: int = 0


def open_file(mover: Mover, path: str, length_bytes: int, *, direct_io: bool) -> FileId:
    """Open an existing regular file for reading and writing, and have ``mover`` register ``[0, length_bytes)``.

    Never creates, never truncates. A filesystem that refuses O_DIRECT is used buffered, with one line in the log.
    Raises MoverError.
    """
    flags = os.O_RDWR | os.O_CLOEXEC
    try:
        try:
            fd, direct = os.open(path, flags | (os.O_DIRECT if direct_io else 0)), direct_io
        except OSError as error:
            if not direct_io or error.errno != errno.EINVAL:
                raise
            fd, direct = os.open(path, flags), False
            logger.warning("%s: this filesystem refuses O_DIRECT; reading and writing through the page cache", path)
    except OSError as error:
        raise MoverError(f"cannot open {path} for reading and writing: {error.strerror}") from error
    return mover.adopt_file(fd, path, length_bytes, direct=direct)


def check_adopted(fd: int, path: str) -> None:
    """Raise MoverError, and close ``fd``, unless it is a regular file's."""
    try:
        mode = os.fstat(fd).st_mode
    except OSError as error:
        if error.errno != errno.EBADF:  # by now that number may be somebody else's
            os.close(fd)
        raise MoverError(f"cannot use {path}: {error.strerror}") from error
    if not stat.S_ISREG(mode):
        os.close(fd)
        raise MoverError(f"cannot use {path}: not a regular file")


def fork_message(mover: str, pid: int) -> str:
    """The sentence for a mover made in ``pid`` and used in a fork of it."""
    return f"{mover}: made in process {pid}, used in its fork {os.getpid()}; make the mover in the process that uses it"


def check_usable(mover: str, pid: int, is_closed: bool) -> None:
    """Raise MoverError in a fork of ``pid``, where the mover was made, and after it is closed."""
    if os.getpid() != pid:
        raise MoverError(fork_message(mover, pid))
    if is_closed:
        raise MoverError(f"{mover}: this mover is closed")


def drain(in_flight: Collection[T], poll: Callable[[T], object], timeout_s: float) -> None:
    """Poll what is in flight until nothing is, ``timeout_s`` at most. ``poll`` takes out of it what is final."""
    deadline_s = time.monotonic() + timeout_s
    while in_flight and time.monotonic() < deadline_s:
        for transfer in list(in_flight):
            poll(transfer)
        if in_flight:
            time.sleep(_DRAIN_POLL_S)


def copy_extents(extents: Extents, what: str) -> Extents:
    """Return a copy, for the caller may go on changing its own. Raises MoverError unless the shape is (n, 2)."""
    array = np.array(extents, dtype=np.int64, order="C")
    if array.ndim != 2 or array.shape[1] != 2:
        raise MoverError(f"extents of {what} must have shape (n, 2), not {array.shape}")
    return array


def total_bytes(extents: Extents) -> int:
    """The sum of their lengths."""
    return int(extents[0, 1]) if len(extents) == 1 else int(extents[:, 1].sum())


class HandleTable:
    """Regions and files by id. Ids count up and never repeat: a stale one is refused, not mistaken for another."""

    def __init__(self, mover: str) -> None:
        self._mover = mover
        self._next_id = 1
        self.memories: dict[MemoryId, MemoryEntry] = {}
        self.files: dict[FileId, FileEntry] = {}

    def add_memory(self, entry: MemoryEntry) -> MemoryId:
        """File ``entry`` under a new id."""
        memory = MemoryId(self._next_id)
        self._next_id += 1
        self.memories[memory] = entry
        return memory

    def add_file(self, entry: FileEntry) -> FileId:
        """File ``entry`` under a new id."""
        file = FileId(self._next_id)
        self._next_id += 1
        self.files[file] = entry
        return file

    def memory(self, memory: MemoryId) -> MemoryEntry:
        """Look up; raises MoverError for an unknown id."""
        entry = self.memories.get(memory)
        if entry is None:
            raise MoverError(f"{self._mover}: memory {memory} is not registered here")
        return entry

    def file(self, file: FileId) -> FileEntry:
        """Look up; raises MoverError for an unknown id."""
        entry = self.files.get(file)
        if entry is None:
            raise MoverError(f"{self._mover}: file {file} is not open here")
        return entry

    def pop_memory(self, memory: MemoryId) -> MemoryEntry:
        """Remove; raises MoverError for an unknown id or while a transfer owns part of it."""
        entry = self.memory(memory)
        if entry.in_flight:
            raise MoverError(f"{self._mover}: memory {memory} has {entry.in_flight} transfers in flight or quarantine")
        del self.memories[memory]
        return entry

    def pop_file(self, file: FileId) -> FileEntry:
        """Remove, without closing; raises MoverError for an unknown id or while a transfer uses it."""
        entry = self.file(file)
        if entry.in_flight:
            raise MoverError(f"{self._mover}: {entry.path} has {entry.in_flight} transfers in flight or quarantine")
        del self.files[file]
        return entry

    def check(
        self,
        limits: MoverLimits,
        op: Op,
        memory: MemoryId,
        memory_extents: Extents,
        file: FileId,
        file_extents: Extents,
    ) -> tuple[MemoryEntry, Extents, FileEntry, Extents]:
        """Everything that makes ``submit`` refuse, limits included; returns the looked-up sides. Raises MoverError."""
        m, f = self.memory(memory), self.file(file)
        mem, fil = copy_extents(memory_extents, f"memory {memory}"), copy_extents(file_extents, f.path)
        if len(mem) > limits.max_extents_per_transfer:
            raise MoverError(f"{self._mover}: {len(mem)} extents at once, at most {limits.max_extents_per_transfer}")
        if mem[:, 1].tobytes() != fil[:, 1].tobytes():
            raise MoverError(f"{self._mover}: memory and file extents must have the same lengths, row by row")
        if not len(mem):
            return m, mem, f, fil
        if limits.whole_writes and op is Op.WRITE and fil.tolist() != [[0, f.length_bytes]]:
            raise MoverError(
                f"{self._mover}: a write is one extent and the whole of {f.path}, all its {f.length_bytes} bytes"
            )
        bits = 0
        for rows, length_bytes, what in (
            (mem, m.region.length_bytes, f"memory {memory}"),
            (fil, f.length_bytes, f.path),
        ):
            for row, (at, length) in enumerate(rows.tolist()):
                if at < 0 or length <= 0 or at + length > length_bytes:
                    raise MoverError(
                        f"extent {row} of {what} (offset {at}, length {length}) is outside its {length_bytes} bytes"
                    )
                if length > limits.max_extent_bytes:
                    raise MoverError(f"{self._mover}: {length} bytes in one extent, at most {limits.max_extent_bytes}")
                # Or-ed together, what is off the grid has a bit below the alignment.
                bits |= at | length | (m.region.address + at if rows is mem else 0)
        if f.direct and bits & (limits.alignment_bytes - 1):
            raise MoverError(
                f"O_DIRECT needs addresses, offsets and lengths that are multiples of {limits.alignment_bytes} bytes"
            )
        return m, mem, f, fil
