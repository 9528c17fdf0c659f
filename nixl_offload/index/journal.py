"""The journal of an index: keys and locations, written to SQLite in the background, for the next start.

``DurableIndex`` is the queue and its writer, ``Database`` the file: schema, opening, one batch. ``IndexReader`` reads
the file at a start and for commands, also while vLLM writes it. SQLite's locks let a commit wait for a read in
progress, so the rows are read in pieces.

Threading: ``put`` and ``delete`` are called by one thread (the scheduler's); they append to a queue, never block on I/O
and never raise. One daemon thread owns the ``Database`` and does all writing. Any thread may call ``flush`` and
``close``. An ``IndexReader`` opens a connection for each read.
Trust: the journal may lag behind or lack rows. A row is a hint; the header in the slot decides.
Failure: storage trouble costs rows and raises nothing; it is logged once per cause, and writing resumes when it can.
Methods of ``Database`` raise sqlite3.Error, UnicodeError or OSError; a batch is written whole or not at all.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sqlite3
import stat
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Final, NamedTuple

from nixl_offload.chunk.header import MAX_KEY_BYTES
from nixl_offload.errors import TierError
from nixl_offload.keep import keep_in_children
from nixl_offload.types import Key, Location

_log = logging.getLogger(__name__)

BATCH_OPS = 1024
"""Most operations in one transaction."""

_APPLICATION_ID = 0x6E69786C
_SCHEMA_VERSION = 1
_PAGE_BYTES = 4096
_FIXED_BYTES = (192 << 10) + BATCH_OPS * 8 * (8 + _PAGE_BYTES)
"""The journal of one batch, besides small pages: a put that replaces two rows touches a leaf of each tree for each row,
and may split or merge a few, eight pages in all."""
_KEY_BYTES = 664
"""A row with the longest key takes 205 bytes in three trees. A table that is filled and emptied at random takes three
times that, because SQLite merges only pages that are two thirds empty; a sixteenth more are inner pages."""
_ROWS_PER_READ = 16_384
"""They take SQLite about 10 ms, with the GIL released, and then us about 10 ms."""
_CHECKED_BYTES = 64 << 20
"""A file up to this size (some 600,000 keys) is checked when it is opened, in 0.15 s. SQLite itself notices damage only
when it reads the damaged page, and may lose writes until then."""
_VERSIONS_AT, _ROLLBACK_JOURNAL = 18, b"\1\1"
"""Offset and value of the header bytes that mean a rollback journal."""
_NO_MAPPING = "PRAGMA mmap_size=0"
"""SQLite's default, but builds may change it."""
_ATTEMPTS: Final = 5
_PAUSE_S: Final = 0.1
_PATIENCE_S: Final = 10.0
_POLL_S: Final = 0.002
"""Poll interval for a lock. SQLite's own, 100 ms, misses the short gaps between a busy writer's commits."""

_SCHEMA = (
    "CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
    # seq grows with each put; ordered by seq, the oldest rows come first.
    "CREATE TABLE slot (seq INTEGER PRIMARY KEY, key BLOB NOT NULL UNIQUE, offset INTEGER NOT NULL UNIQUE, "
    "slot_bytes INTEGER NOT NULL)",
)
_PUT = "INSERT OR REPLACE INTO slot (key, offset, slot_bytes) VALUES (?, ?, ?)"
_DELETE = "DELETE FROM slot WHERE key = ?"

_READ = f"""
SELECT count(*), max(seq), group_concat(hex(key), ''), group_concat(length(key)), group_concat(offset),
    group_concat(slot_bytes), group_concat(seq)
FROM (
    SELECT seq, key, offset, slot_bytes FROM slot WHERE length(key) BETWEEN 5 AND {MAX_KEY_BYTES}
        AND typeof(key) = 'blob' AND typeof(offset) = 'integer' AND typeof(slot_bytes) = 'integer'
        AND offset >= 0 AND slot_bytes > 0 AND {{condition}} LIMIT ?
)"""
"""Returns many rows as one: next to a busy thread, each call into Python would wait for the GIL. SQLite types values,
not columns: a damaged page may hold values of other types, and keys of any length."""

Put = tuple[Key, int, int]
"""Key, offset, slot_bytes."""
Delete = tuple[Key]


class Row(NamedTuple):
    """The location of a chunk. ``seq`` grows with every put."""

    key: Key
    offset: int
    slot_bytes: int
    seq: int


class UnusableError(Exception):
    """The file cannot be used by this build and geometry."""


_STORAGE_ERRORS: Final = (UnusableError, sqlite3.Error, UnicodeError, OSError)
"""Exceptions of ``Database``."""


class Database:
    """At most one connection to the file at ``path``, whose directory must exist."""

    def __init__(self, path: str, geometry: Mapping[str, str]) -> None:
        self.path = path
        self._geometry = dict(geometry)
        self._connection: sqlite3.Connection | None = None
        self._file_id = (0, 0)
        keep_in_children(self)  # SQLite forbids even closing a connection in a child

    def connect(self) -> None:
        """Open the file, or create it, mode 0600. Raises UnusableError, sqlite3.Error, OSError; then it is not open."""
        # Create it here for its mode, which SQLite copies to its journal.
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise UnusableError("it is a symbolic link") from error
            raise
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
                raise UnusableError("it is no file, or has another name (a hard link)")
            os.fchmod(descriptor, 0o600)
        finally:
            os.close(descriptor)
        _refuse_write_ahead_log(self.path)
        self._file_id = _file_id(self.path)
        self._connection = _connect(self.path, timeout_s=1.0)
        try:
            self._prepare(self._connection)
        except BaseException:
            self.disconnect()
            raise

    def write(self, batch: Sequence[Put | Delete]) -> None:
        """Connect if needed and apply ``batch`` (at most ``BATCH_OPS``) in order, as one transaction."""
        if self._connection is None:
            self.connect()
        elif _file_id(self.path) != self._file_id:
            # An open file outlives its name: without this check we would go on writing to a deleted file.
            raise FileNotFoundError(errno.ENOENT, "the index was removed or replaced", self.path)
        connection = self._connection
        assert connection is not None, "connected above"
        if not batch:
            return
        connection.execute("BEGIN IMMEDIATE")
        for op in batch:
            connection.execute(_PUT if len(op) == 3 else _DELETE, op)
        connection.execute("COMMIT")

    def disconnect(self) -> None:
        """Close the connection, if there is one, rolling back what is not committed. Never raises."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        # Closing rolls back. On failing storage it may fail; then there is nothing left to do.
        with contextlib.suppress(sqlite3.Error):
            connection.close()

    def delete(self) -> None:
        """Disconnect and remove the file and its side files. Raises OSError, also if their directory is missing."""
        self.disconnect()
        # A missing directory may come back, with the file that is to be deleted.
        os.stat(os.path.dirname(os.path.abspath(self.path)))
        # The database last: its side files must not be applied to a new database of the same name.
        for name in (self.path + "-journal", self.path + "-wal", self.path + "-shm", self.path):
            if os.path.lexists(name):
                os.unlink(name)

    def _prepare(self, connection: sqlite3.Connection) -> None:
        run = connection.execute
        run(f"PRAGMA page_size={_PAGE_BYTES}")
        run("PRAGMA synchronous=FULL")
        # A spill in the middle of a transaction would sync, and lock readers out.
        run("PRAGMA cache_spill=OFF")
        run(f"PRAGMA cache_size={2 * BATCH_OPS}")
        # Do not look for tables: a damaged file may seem to have none, and its old pages would stay.
        (pages,) = run("PRAGMA page_count").fetchone()
        if not pages:
            run("BEGIN IMMEDIATE")
            for statement in _SCHEMA:
                run(statement)
            connection.executemany("INSERT INTO meta VALUES (?, ?)", self._geometry.items())
            run(f"PRAGMA application_id={_APPLICATION_ID}")
            run(f"PRAGMA user_version={_SCHEMA_VERSION}")
            run("COMMIT")
            return
        (application_id,) = run("PRAGMA application_id").fetchone()
        (version,) = run("PRAGMA user_version").fetchone()
        if (application_id, version) != (_APPLICATION_ID, _SCHEMA_VERSION):
            raise UnusableError("not an index of this version")
        if dict(run("SELECT name, value FROM meta")) != {k.encode(): v.encode() for k, v in self._geometry.items()}:
            raise UnusableError("written for another geometry")
        statements = {sql for (sql,) in run("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")}
        if statements != {sql.encode() for sql in _SCHEMA}:
            raise UnusableError("its schema is not ours")
        if pages * _PAGE_BYTES <= _CHECKED_BYTES:
            (verdict,) = run("PRAGMA quick_check(1)").fetchone()
            if verdict != b"ok":
                raise UnusableError(verdict.decode(errors="replace"))


class IndexReader:
    """Reads the index at ``path``, also while vLLM writes it, or after vLLM was killed.

    Changes nothing, except that SQLite rolls back a transaction that a kill interrupted, as it does for the next
    writer. Methods raise TierError: ``missing``, or why it cannot be read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)

    def pieces(self) -> Iterator[list[Row]]:
        """Yield all rows, thousands at a time, oldest put first. Rows that are put meanwhile may be missing."""
        last = 0
        while True:
            newest, rows = self._ask("seq > ? ORDER BY seq", last, _ROWS_PER_READ)
            if not rows:
                return
            if newest <= last:  # else the loop would not end
                raise self._damaged(sqlite3.DatabaseError("its rows are out of order"))
            last = newest
            yield rows

    def rows(self) -> Iterator[Row]:
        """Yield ``pieces`` row by row."""
        for rows in self.pieces():
            yield from rows

    def find(self, digits: str, limit: int) -> list[Row]:
        """Return up to ``limit`` rows, in order of keys, whose keys begin with these hex digits."""
        even = bytes.fromhex(digits[: len(digits) // 2 * 2])
        end = even + b"\xff" * (MAX_KEY_BYTES + 1 - len(even))
        most = limit * (16 if len(digits) % 2 else 1)
        _, found = self._ask("key >= ? AND key < ? ORDER BY key", even, end, most)
        return [row for row in found if row.key.hex().startswith(digits)][:limit]

    def _ask(self, condition: str, *values: object) -> tuple[int, list[Row]]:
        """Return rows and their highest ``seq``. Tries again while vLLM commits or recreates the file."""
        failed, give_up_s = 0, time.monotonic() + _PATIENCE_S
        while True:
            try:
                _refuse_write_ahead_log(self._path)
                with contextlib.closing(_connect(self._path, timeout_s=0.0)) as connection:
                    connection.execute("PRAGMA query_only=ON")
                    (found,) = connection.execute(_READ.format(condition=condition), values).fetchall()
                    return found[1], _parse(*found[2:]) if found[0] else []
            except FileNotFoundError as error:
                raise translate(error, self._path) from error
            except _STORAGE_ERRORS as error:
                why = translate(error, self._path)
                if why.cause == "locked" and time.monotonic() < give_up_s:
                    time.sleep(_POLL_S)
                    continue
                failed += 1
                if failed == _ATTEMPTS or why.cause == "locked":
                    raise (self._damaged(error) if is_damage(error) else why) from error
            time.sleep(_PAUSE_S)

    def _damaged(self, error: Exception) -> TierError:
        damaged = TierError(f"index {self._path} is damaged: {error}", cause="io")
        damaged.__cause__ = error
        return damaged


class DurableIndex:
    """Rows (key, offset, slot_bytes): one row per key and one key per offset; the last put wins.

    Calls take effect in order, in batches. A batch is written whole or not at all, also after kill -9. After a power
    cut the last batches may be missing.

    A database is *made anew*, deleted and filled with later calls only, if it is damaged, was written for another
    geometry, or if more than ``max_queued_ops`` calls wait because storage has long been away. The old file is not
    kept: its space is promised to chunks. Rows are lost, but none is wrong.
    """

    def __init__(self, database: Database, batch_delay_s: float, retry_interval_s: float, max_queued_ops: int) -> None:
        """Use ``open``."""
        self._batch_delay_s = batch_delay_s
        self._retry_interval_s = retry_interval_s
        self._max_queued_ops = max_queued_ops
        self._queue: deque[Put | Delete] = deque()
        """The caller appends without a lock (a deque's append is atomic); all else holds ``_changed``."""
        self._work = threading.Event()
        self._hurry = threading.Event()
        self._changed = threading.Condition()
        """Guards the next four fields."""
        self._make_anew: str | None = None
        """Why the database must be made anew, "" after ``clear``; None otherwise. Earlier calls and rows are void."""
        self._idle = False
        self._stopping = False
        self._abandoned = False
        # Used only by the writer, once it runs.
        self._database = database
        self._batch: list[Put | Delete] = []
        self._delete_first = False
        self._failing = True
        """Whether the last attempt failed, or none was made yet."""
        self._warned: set[str] = set()
        self._writer = threading.Thread(target=self._run, name="nixl-offload-index", daemon=True)

    @classmethod
    def open(
        cls,
        path: str,
        geometry: Mapping[str, str],
        *,
        batch_delay_s: float = 0.05,
        retry_interval_s: float = 5.0,
        max_queued_ops: int = 1_000_000,
    ) -> tuple[DurableIndex, Iterator[list[Row]]]:
        """Open or create the database at ``path``, whose directory must exist, and start the writer.

        ``geometry``: the facts that give offsets their meaning. Returns the journal and its rows, thousands at a time,
        oldest put first; read them before the first ``put``. Storage trouble raises nothing: rows are missing then, and
        the writer keeps trying.

        ``batch_delay_s``: how long calls are collected into a batch; a kill -9 loses these.
        ``retry_interval_s``: pause between attempts while storage fails.
        ``max_queued_ops``: limit of the queue; a queued call takes about 150 bytes.
        """
        journal = cls(Database(path, geometry), batch_delay_s, retry_interval_s, max_queued_ops)
        is_readable = journal._drain()
        journal._writer.start()
        return journal, journal._rows() if is_readable else iter(())

    # The caller's side

    def put(self, key: Key, location: Location) -> None:
        """Record that ``key`` is at ``location``. O(1), no I/O, never raises; ignored after ``close``."""
        self._enqueue((key, location.offset, location.slot_bytes))

    def delete(self, key: Key) -> None:
        """Remove the row of ``key``. O(1), no I/O, never raises; ignored after ``close``."""
        self._enqueue((key,))

    def clear(self) -> None:
        """Remove all rows. O(1), no I/O, never raises; ignored after ``close``."""
        if self._stopping:
            return
        with self._changed:
            self._queue.clear()
            self._make_anew = ""
        self._hurry.set()
        self._work.set()

    def abandon(self) -> None:
        """Write nothing more, not even queued calls: the file belongs to another process. Returns at once."""
        with self._changed:
            self._abandoned = True
            self._stopping = True
            self._queue.clear()
        self._hurry.set()
        self._work.set()

    def flush(self, timeout_s: float) -> bool:
        """Wait until all calls so far are in the database. Returns False on timeout."""
        with self._changed:
            self._idle = False
            self._hurry.set()
            self._work.set()
            return self._changed.wait_for(lambda: self._idle, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Write queued calls (one attempt), stop the writer, close the database. Idempotent.

        Returns False if not all was written in time. A writer that hangs in storage is left behind.
        """
        with self._changed:
            self._stopping = True
            self._hurry.set()
            self._work.set()
        self._writer.join(timeout_s)
        return not (self._writer.is_alive() or self._queue or self._batch or self._delete_first)

    def _enqueue(self, op: Put | Delete) -> None:
        if self._stopping:
            return
        if len(self._queue) >= self._max_queued_ops:
            with self._changed:
                self._queue.clear()
                self._make_anew = f"more than {self._max_queued_ops} changes could not be written"
        self._queue.append(op)
        if not self._work.is_set():
            self._work.set()

    # Opening

    def _rows(self) -> Iterator[list[Row]]:
        try:
            yield from IndexReader(self._database.path).pieces()
        except TierError as error:
            if isinstance(error.__cause__, Exception) and is_damage(error.__cause__):
                with self._changed:
                    self._make_anew = f"damaged: {error.__cause__}"
                    self._work.set()
            else:
                _log.warning("index %s could not be read to its end: %s", self._database.path, error)

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
            written = self._drain()
            with self._changed:
                nothing_waits = written and not self._queue and self._make_anew is None
                if nothing_waits:
                    self._idle = True
                    self._changed.notify_all()
                if self._stopping and (nothing_waits or not written):
                    break
        self._database.disconnect()

    def _drain(self) -> bool:
        """Write all queued calls. Returns False if storage fails; the current batch is kept for the next attempt."""
        made_anew = False
        while True:
            self._take_batch()
            if self._abandoned or not (self._batch or self._delete_first or self._failing):
                return True
            try:
                if self._delete_first:
                    self._database.delete()
                    self._delete_first = False
                    made_anew = True
                self._database.write(self._batch)
            except _STORAGE_ERRORS as error:
                undeletable = self._delete_first
                self._database.disconnect()
                self._note_failure(error)
                if made_anew or undeletable or not self._delete_first:
                    return False
                continue  # damaged: make it anew at once, since the process may end soon
            self._batch.clear()
            self._note_success()

    def _take_batch(self) -> None:
        with self._changed:
            reason, self._make_anew = self._make_anew, None
            if reason is not None or self._abandoned:
                self._batch.clear()
            while self._queue and len(self._batch) < BATCH_OPS:
                self._batch.append(self._queue.popleft())
        if reason is not None:
            self._delete_first = True
        if reason:
            _log.warning(
                "index %s is made anew (%s); chunks it does not name will be forgotten at the next start",
                self._database.path,
                reason,
            )

    def _note_failure(self, error: Exception) -> None:
        self._failing = True
        trouble, is_damaged = translate(error, self._database.path), is_damage(error)
        self._delete_first |= is_damaged
        cause = "damage" if is_damaged else trouble.cause
        if cause in self._warned:
            return
        self._warned.add(cause)
        if is_damaged:
            _log.warning("index %s is not usable (%s): deleted, starting empty", self._database.path, error)
        else:
            _log.warning("%s; chunks are served on, but not remembered across a restart until this ends", trouble)

    def _note_success(self) -> None:
        self._failing = False
        if self._warned:
            self._warned.clear()
            _log.info("index %s is written again", self._database.path)


def _parse(digits: bytes, *numbers: bytes) -> list[Row]:
    """Return the rows that ``_READ`` joined into one."""
    joined = bytes.fromhex(digits.decode())
    lengths, offsets, slot_bytes, seqs = (list(map(int, each.split(b","))) for each in numbers)
    keys = [Key(joined[start:end]) for start, end in pairwise(accumulate(lengths, initial=0))]
    return list(map(Row, keys, offsets, slot_bytes, seqs))


def _refuse_write_ahead_log(path: str) -> None:
    """Raise UnusableError for a file that is not in rollback-journal mode, OSError if it cannot be read.

    SQLite maps the index of a write-ahead log into memory. If the medium refuses a write to mapped memory, the process
    dies.
    """
    with open(path, "rb") as file:
        file.seek(_VERSIONS_AT)
        if file.read(len(_ROLLBACK_JOURNAL)) not in (b"", _ROLLBACK_JOURNAL) or os.path.lexists(path + "-wal"):
            raise UnusableError("it has no rollback journal, which every index of ours has")


def max_bytes(n_keys: int) -> int:
    """Return an upper bound of the bytes of file and journal with at most ``n_keys`` rows, several times the typical
    size.
    """
    return _FIXED_BYTES + n_keys * _KEY_BYTES


def is_damage(error: Exception) -> bool:
    """Whether ``error`` means that the file itself is damaged, not that storage has trouble."""
    if isinstance(error, (UnusableError, UnicodeError)):
        return True  # SQLite quotes damaged text, which Python cannot decode
    if type(error) is sqlite3.OperationalError:
        # Our statements are valid, so a logic error means a damaged schema.
        return getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_ERROR
    # sqlite3 raises subclasses of DatabaseError for everything but SQLITE_CORRUPT and SQLITE_NOTADB.
    return type(error) in (sqlite3.DatabaseError, sqlite3.IntegrityError)


def translate(error: Exception, path: str) -> TierError:
    """Return a TierError with cause ``full``, ``readonly``, ``missing``, ``locked``, ``permission`` or ``io``."""
    text = str(error)
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.ENOSPC, errno.EDQUOT) or "is full" in text:
        cause = "full"
    elif number in (errno.ENOENT, errno.ENOTDIR) or not os.path.isdir(os.path.dirname(os.path.abspath(path))):
        cause = "missing"
    elif number == errno.EROFS or "readonly" in text:
        cause = "readonly"
    elif number in (errno.EACCES, errno.EPERM):
        cause = "permission"
    elif "locked" in text:
        cause = "locked"
    else:
        cause = "io"
    translated = TierError(f"index {path}: {text}", cause=cause)
    translated.__cause__ = error
    return translated


def _connect(path: str, timeout_s: float) -> sqlite3.Connection:
    """Open the existing file, for one thread at a time; text is read as bytes. Raises sqlite3.Error."""
    name = os.path.abspath(path).replace("%", "%25").replace("?", "%3f").replace("#", "%23")
    connection = sqlite3.connect(
        f"file:{name}?mode=rw", uri=True, timeout=timeout_s, isolation_level=None, check_same_thread=False
    )
    connection.text_factory = bytes  # a damaged page may hold invalid text, which would raise
    connection.execute(_NO_MAPPING)
    return connection


def _file_id(path: str) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino
