"""The durable index of a slab: which chunk each slot holds, in a file, for the next start.

The file is a table with a row for each slot. A row is overwritten in place when its slot gets or loses a chunk, so
there is no log and no recovery. docs/format.md has the bytes. ``DurableIndex`` writes; ``IndexReader`` reads at a start
and for commands, also while vLLM writes.

Threading: ``put``, ``delete`` and ``clear`` are called by one thread (the scheduler's); they append to a queue, never
block on I/O and never raise. One daemon thread writes. Any thread may call ``flush``, ``abandon`` and ``close``.
Trust: the file may lag behind or lack rows, and a row that is torn or damaged is skipped. A row is a hint; the header
in the slot decides.
Failure: storage trouble costs rows and raises nothing; it is logged once per cause, and writing resumes when it can.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import stat
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from heapq import nsmallest
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from nixl_offload.chunk.checksum import block_checksum
from nixl_offload.chunk.header import MAX_KEY_BYTES
from nixl_offload.errors import TierError
from nixl_offload.stores.filesystem import REAL, Filesystem, replace_file, tier_error, write_all
from nixl_offload.types import PAGE_BYTES, Key, Location, align_up

_log = logging.getLogger(__name__)

_MAGIC: Final = b"nixl-offload index 1\n"
_DIGEST_AT: Final = 32
_ROW: Final = struct.Struct(f"<QQQQH6x{MAX_KEY_BYTES}s24x")
"""Checksum of the rest, time of the put in ns, offset, slot_bytes, length of the key, key. All zero: a free slot."""
_COLUMNS: Final = np.dtype(
    {"names": ["put_ns", "key_bytes"], "formats": ["<u8", "<u2"], "offsets": [8, 32], "itemsize": 128}
)
_FREE: Final = bytes(_ROW.size)
_READ_BYTES: Final = 2 << 20
_ROWS_PER_PIECE: Final = 16_384
_READ_FLAGS: Final = os.O_RDONLY | os.O_NONBLOCK  # a FIFO of that name must not be waited for


class Row(NamedTuple):
    """The location of a chunk."""

    key: Key
    offset: int
    slot_bytes: int
    put_ns: int
    """When it was put, by the clock of the machine."""


class _NotOursError(Exception):
    """The file of that name is no index of this geometry."""


class IndexReader:
    """Reads the index at ``path``, also while vLLM writes it, or after vLLM was killed. Changes nothing.

    Methods raise TierError: ``missing``, or why it cannot be read.
    """

    def __init__(self, path: str | os.PathLike[str], filesystem: Filesystem = REAL) -> None:
        self._path = os.fspath(path)
        self._filesystem = filesystem

    def rows(self) -> Iterator[Row]:
        """Yield all rows, oldest put first."""
        table = self._read()
        order = np.argsort(table.view(_COLUMNS)["put_ns"].ravel(), kind="stable")
        for first in range(0, len(order), _ROWS_PER_PIECE):  # in pieces, because each is copied
            yield from _parse(table[order[first : first + _ROWS_PER_PIECE]])

    def find(self, digits: str, limit: int) -> list[Row]:
        """Return up to ``limit`` rows, in order of keys, whose keys begin with these hex digits."""
        return nsmallest(limit, (row for row in self.rows() if row.key.hex().startswith(digits)))

    def check(self) -> None:
        """Raise TierError if it cannot be read."""
        with self._opened():
            pass

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        try:
            fd = self._filesystem.open(self._path, _READ_FLAGS)
            try:
                _require_ours(self._filesystem, fd)
                yield fd
            finally:
                self._filesystem.close(fd)
        except OSError as error:
            raise tier_error(error, f"index {self._path}") from error
        except _NotOursError as error:
            raise TierError(f"index {self._path} is damaged: {error}", cause="io") from error

    def _read(self) -> npt.NDArray[np.uint8]:
        """Return the rows in use, in the order of their slots."""
        found, memory = [np.empty((0, _ROW.size), np.uint8)], bytearray(_READ_BYTES)
        with self._opened() as fd:
            at = _next_data(fd, PAGE_BYTES)
            while got := self._filesystem.read(fd, memoryview(memory), at) // _ROW.size * _ROW.size:
                rows = np.frombuffer(memory, np.uint8, got).reshape(-1, _ROW.size)
                found.append(rows[rows.view(_COLUMNS)["key_bytes"].ravel() > 0])
                at = _next_data(fd, at + got)
        return np.concatenate(found)


class DurableIndex:
    """Which chunk each slot holds. The last ``put`` or ``delete`` of a slot wins.

    Calls take effect in batches. After kill -9 the last batch may be missing or written in part; after a power cut any
    of the last rows may be. The file is *made anew*, empty but for later calls, if it was deleted or damaged, or was
    written for another geometry. The old file is not kept: its space is promised to chunks.
    """

    def __init__(
        self,
        path: str,
        unit_bytes: int,
        n_slots: int,
        geometry: Mapping[str, object],
        *,
        batch_delay_s: float = 0.05,
        retry_interval_s: float = 5.0,
        filesystem: Filesystem = REAL,
    ) -> None:
        """Start the writer of the file at ``path``, whose directory must exist. See ``rows`` for what it holds.

        ``unit_bytes``: the smallest slot size; offsets of slots are at least this far apart, and below ``n_slots``
        times this. ``geometry``: the facts that give offsets their meaning, in types of JSON.

        ``batch_delay_s``: how long calls are collected into a batch; a kill -9 loses these. ``retry_interval_s``: pause
        between attempts while storage fails.
        """
        self._path = path
        self._unit_bytes = unit_bytes
        self._n_slots = n_slots
        self._batch_delay_s = batch_delay_s
        self._retry_interval_s = retry_interval_s
        self._filesystem = filesystem
        digest = hashlib.sha256(json.dumps([unit_bytes, dict(geometry)], sort_keys=True).encode()).digest()
        self._header = (_MAGIC.ljust(_DIGEST_AT, b"\0") + digest).ljust(PAGE_BYTES, b"\0")
        self._queue: deque[Row] = deque()
        """The caller appends without a lock (a deque's append is atomic); all else holds ``_changed``."""
        self._work = threading.Event()
        self._hurry = threading.Event()
        self._changed = threading.Condition()
        """Guards the next four fields."""
        self._clear = False
        """Whether all rows until now are void, and the writer does not know yet."""
        self._idle = False
        self._stopping = False
        self._abandoned = False
        # Used only by the writer, once it runs.
        self._rows: dict[int, Row] = {}
        """By number: what is to be written. A free slot has no key."""
        self._must_make = False
        """Whether the file must be made anew before ``_rows`` are written."""
        self._was_there = False
        """Whether the file has been opened before."""
        self._failing = True
        """Whether the last attempt failed, or none was made yet."""
        self._warned: set[str] = set()
        self._write()
        self._writer = threading.Thread(target=self._run, name="nixl-offload-index", daemon=True)
        self._writer.start()

    # The caller's side

    def rows(self) -> Iterator[Row]:
        """Yield the rows of an earlier run, oldest put first; call it before the first ``put``. Storage trouble raises
        nothing: rows are missing then.
        """
        if self._failing:
            return
        try:
            yield from IndexReader(self._path, self._filesystem).rows()
        except TierError as error:
            _log.warning("index %s could not be read to its end: %s", self._path, error)

    def put(self, key: Key, location: Location) -> None:
        """Record that ``key`` is at ``location``. O(1), no I/O, never raises; ignored after ``close``."""
        self._enqueue(Row(key, location.offset, location.slot_bytes, time.time_ns()))

    def delete(self, location: Location) -> None:
        """Record that the slot at ``location`` is free. O(1), no I/O, never raises; ignored after ``close``."""
        self._enqueue(Row(Key(b""), location.offset, 0, 0))

    def clear(self) -> None:
        """Remove all rows. O(1), no I/O, never raises; ignored after ``close``."""
        with self._changed:
            if self._stopping:
                return
            self._queue.clear()
            self._clear = True
        self._wake()

    def abandon(self) -> None:
        """Write nothing more, not even queued calls: the file belongs to another process. Returns at once."""
        with self._changed:
            self._abandoned = True
            self._stopping = True
        self._wake()

    def flush(self, timeout_s: float) -> bool:
        """Wait until all calls so far are in the file. Returns False on timeout."""
        with self._changed:
            self._idle = False
            self._wake()
            return self._changed.wait_for(lambda: self._idle, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Write queued calls (one attempt) and stop the writer. Idempotent.

        Returns False if not all was written in time. A writer that hangs in storage is left behind.
        """
        with self._changed:
            self._stopping = True
        self._wake()
        self._writer.join(timeout_s)
        return not (self._writer.is_alive() or self._queue or self._rows or self._clear or self._must_make)

    def _enqueue(self, row: Row) -> None:
        if self._stopping:
            return
        self._queue.append(row)
        if not self._work.is_set():
            self._work.set()

    def _wake(self) -> None:
        self._hurry.set()
        self._work.set()

    # The writer's side

    def _run(self) -> None:
        while True:
            if self._failing:
                self._hurry.wait(self._retry_interval_s)
            else:
                self._work.wait()
                self._hurry.wait(self._batch_delay_s)
            self._work.clear()
            self._hurry.clear()
            written = self._write()
            with self._changed:
                nothing_waits = written and not self._queue and not self._clear
                if nothing_waits:
                    self._idle = True
                    self._changed.notify_all()
                if self._stopping and (nothing_waits or not written):
                    return

    def _write(self) -> bool:
        """Write all queued calls. Returns False if storage fails; they are kept for the next attempt."""
        with self._changed:
            if self._clear:
                self._clear, self._must_make = False, True
                self._rows.clear()
            while self._queue:  # also while storage fails, so that each slot waits with one row
                row = self._queue.popleft()
                if (number := row.offset // self._unit_bytes) < self._n_slots:
                    self._rows[number] = row
            if self._abandoned:
                self._rows.clear()
                return True
        if not (self._rows or self._must_make or self._failing):
            return True
        try:
            if self._must_make:
                self._make()
                self._must_make = False
            self._write_rows()
        except OSError as error:
            self._note_failure(tier_error(error, f"index {self._path}"))
            return False
        self._rows.clear()
        self._note_success()
        return True

    def _write_rows(self) -> None:
        """Write the rows in place, into a file that is made anew if it is not ours. Raises OSError."""
        fd = self._open()
        try:
            if self._filesystem.stat(fd).st_size > (most_bytes := _row_at(self._n_slots)):
                self._filesystem.truncate(fd, most_bytes)
            for number, row in sorted(self._rows.items()):
                write_all(self._filesystem, fd, memoryview(_packed(row)), _row_at(number))
            if self._rows:
                self._filesystem.sync(fd)
        finally:
            self._filesystem.close(fd)

    def _open(self) -> int:
        try:
            fd = self._filesystem.open(self._path, os.O_RDWR | os.O_NONBLOCK)
            try:
                _require_ours(self._filesystem, fd, self._header)
            except BaseException:
                self._filesystem.close(fd)
                raise
        except (OSError, _NotOursError) as error:
            if isinstance(error, OSError) and error.errno not in (errno.ENOENT, errno.ELOOP):
                raise
            is_missing = isinstance(error, FileNotFoundError)
            self._make()
            if self._was_there or not is_missing:
                why = "it was deleted" if is_missing else error
                _log.warning(
                    "index %s is made anew (%s); chunks it named are forgotten at the next start", self._path, why
                )
            fd = self._filesystem.open(self._path, os.O_RDWR)
        self._was_there = True
        return fd

    def _make(self) -> None:
        """Replace anything of that name by an empty index. Raises OSError."""
        replace_file(self._filesystem, Path(self._path), self._header)

    def _note_failure(self, trouble: TierError) -> None:
        self._failing = True
        if trouble.cause not in self._warned:
            self._warned.add(trouble.cause)
            _log.warning("%s; chunks are served on, but not remembered across a restart until this ends", trouble)

    def _note_success(self) -> None:
        self._failing = False
        if self._warned:
            self._warned.clear()
            _log.info("index %s is written again", self._path)


def max_bytes(n_slots: int) -> int:
    """Return the largest size of the index of ``n_slots`` slots of the smallest size, with its draft."""
    return PAGE_BYTES + align_up(_row_at(n_slots))


def _require_ours(files: Filesystem, fd: int, header: bytes = b"") -> None:
    """Raise _NotOursError unless an open file is an index, with this header if one is given. Raises OSError."""
    status = files.stat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        raise _NotOursError("it is no file, or has another name (a hard link)")
    found = bytearray(PAGE_BYTES)
    files.read(fd, memoryview(found), 0)
    if not found.startswith(_MAGIC):
        raise _NotOursError("it does not begin as an index")
    if header and found != header:
        raise _NotOursError("it is of another geometry")


def _row_at(number: int) -> int:
    return PAGE_BYTES + number * _ROW.size


def _packed(row: Row) -> bytes:
    if not row.key:
        return _FREE
    data = _ROW.pack(0, row.put_ns, row.offset, row.slot_bytes, len(row.key), row.key)
    return struct.pack("<Q", block_checksum(memoryview(data)[8:])) + data[8:]


def _parse(table: npt.NDArray[np.uint8]) -> Iterator[Row]:
    """Yield the rows whose checksums are right."""
    for data in map(bytes, table):
        checksum, put_ns, offset, slot_bytes, key_bytes, key = _ROW.unpack(data)
        if checksum == block_checksum(memoryview(data)[8:]) and 4 < key_bytes <= MAX_KEY_BYTES and slot_bytes:
            yield Row(Key(key[:key_bytes]), offset, slot_bytes, put_ns)


def _next_data(fd: int, at: int) -> int:
    """Return the beginning of the first row from ``at`` on that is not in a hole of the file, or its end."""
    try:
        found = os.lseek(fd, at, os.SEEK_DATA)
    except OSError as error:
        if error.errno == errno.ENXIO:
            return os.fstat(fd).st_size
        raise
    return max(at, found // PAGE_BYTES * PAGE_BYTES)
