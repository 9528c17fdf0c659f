"""Reads a slab's durable index from outside: beside the engine that writes it, after it ended, after it was killed.

Threading: every call opens a connection of its own and closes it. Reading creates and changes nothing on disk, not even
the log's shared memory, so whoever may read the files may look. ``drop_rows`` alone writes, and is for the holder of
the directory's lock.

An index in use has the two side files of its log beside it. It is then opened with ``readonly_shm``: a running engine's
log is respected, that of an engine that was killed is read into this process. Without them, or where the log has
nothing but a header, the file itself is complete, and nothing may create side files anew: ``immutable``.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from nixl_offload.errors import TierError
from nixl_offload.index.database import READABLE, is_damage, translate
from nixl_offload.types import Key

_ROWS_PER_READ: Final = 10_000
_SELECT: Final = f"SELECT seq, key, offset, slot_bytes FROM {READABLE}"
_ATTEMPTS: Final = 5
_PAUSE_S: Final = 0.1
_LOG_HEADER_BYTES: Final = 32
"""A log that ends with its header, as a kill may leave it, keeps SQLite waiting for a writer: ten seconds each time."""


class IndexRow(NamedTuple):
    """A chunk's location. ``seq`` grows with every put."""

    seq: int
    key: Key
    offset: int
    slot_bytes: int


class IndexReader:
    """The index at ``path``. Methods raise TierError: ``missing``, or why it cannot be read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def count(self, group: int | None = None) -> tuple[int, int]:
        """Return how many rows there are, of all KV groups or one, and the sum of their slots' bytes on one rank."""
        select = "SELECT count(*), coalesce(sum(slot_bytes), 0) FROM slot"
        if group is None:
            ((rows, size_bytes),) = self._query(select)
        else:
            ((rows, size_bytes),) = self._query(f"{select} WHERE substr(key, -4) = ?", group.to_bytes(4, "big"))
        return rows, size_bytes

    def ends(self, limit: int = 8) -> tuple[list[IndexRow], list[IndexRow]]:
        """Return the rows put first and, newest first, those put last."""
        select = f"{_SELECT} ORDER BY seq"
        return self._rows(f"{select} LIMIT ?", limit), self._rows(f"{select} DESC LIMIT ?", limit)

    def rows(self, after: int = 0) -> Iterator[IndexRow]:
        """Yield all rows behind ``after``, the first put first; what is put meanwhile may be among them or not."""
        while True:
            some = self._query(f"{_SELECT} AND seq > ? ORDER BY seq LIMIT ?", after, _ROWS_PER_READ)
            if not some:
                return
            after = some[-1][0]
            yield from _sound(some)

    def find(self, digits: str, limit: int) -> list[IndexRow]:
        """Return rows whose keys begin with these hex digits."""
        even = bytes.fromhex(digits[: len(digits) // 2 * 2])
        found = self._rows(
            f"{_SELECT} AND key >= ? AND key < ? ORDER BY key LIMIT ?",
            even,
            even + b"\xff" * (65 - len(even)),
            limit * (16 if len(digits) % 2 else 1),
        )
        return [row for row in found if row.key.hex().startswith(digits)][:limit]

    def get(self, key: Key) -> IndexRow | None:
        """Return the row of ``key``."""
        return next(iter(self._rows(f"{_SELECT} AND key = ?", key)), None)

    def at(self, offset: int) -> IndexRow | None:
        """Return the row that names the slot at ``offset``."""
        return next(iter(self._rows(f"{_SELECT} AND offset = ?", offset)), None)

    def _rows(self, statement: str, *values: object) -> list[IndexRow]:
        return list(_sound(self._query(statement, *values)))

    def _query(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        """Ask again where an engine started, ended or replaced the index between the check and the query."""
        for attempt in range(_ATTEMPTS):
            before = self._identity()
            try:
                with contextlib.closing(self._connect()) as connection:
                    found: list[tuple[Any, ...]] = connection.execute(statement, values).fetchall()
                if self._identity() == before:
                    return found
            except (sqlite3.Error, UnicodeError) as error:
                if attempt == _ATTEMPTS - 1:
                    why = translate(error, str(self.path))
                    if is_damage(error):
                        raise TierError(f"index {self.path} is damaged: {error}", cause="io") from error
                    raise why from error
            time.sleep(_PAUSE_S)
        raise TierError(f"index {self.path}: it is replaced again and again", cause="io")

    def _identity(self) -> tuple[int, ...]:
        """Return how to read the file and which file it is; its time and size too where no lock guards reading."""
        try:
            status = self.path.stat()
        except OSError as error:
            raise translate(error, str(self.path)) from error
        logged = self._has_log()
        return (logged, status.st_dev, status.st_ino) if logged else (logged, status.st_mtime_ns, status.st_size)

    def _has_log(self) -> bool:
        try:
            is_logged = os.stat(f"{self.path}-wal").st_size > _LOG_HEADER_BYTES
        except OSError:
            return False
        return is_logged and os.path.exists(f"{self.path}-shm")

    def _connect(self) -> sqlite3.Connection:
        how = "readonly_shm=1" if self._has_log() else "immutable=1"
        connection = _open(self.path, f"mode=ro&{how}", timeout_s=1.0)
        connection.text_factory = bytes
        return connection


def drop_rows(path: Path, rows: Sequence[IndexRow]) -> list[IndexRow]:
    """Delete rows that are still as they were, and return them. The caller holds the directory's lock.

    Raises TierError; then none is deleted.
    """
    try:
        with contextlib.closing(_open(path, "mode=rw", timeout_s=5.0)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            delete = "DELETE FROM slot WHERE seq = ? AND key = ? AND offset = ?"
            dropped = [row for row in rows if connection.execute(delete, row[:3]).rowcount]
            connection.execute("COMMIT")
            return dropped
    except sqlite3.Error as error:
        raise translate(error, str(path)) from error


def _open(path: Path, how: str, timeout_s: float) -> sqlite3.Connection:
    name = os.path.abspath(path).replace("%", "%25").replace("?", "%3f").replace("#", "%23")
    return sqlite3.connect(f"file:{name}?{how}", uri=True, timeout=timeout_s, isolation_level=None)


def _sound(rows: Sequence[tuple[Any, ...]]) -> Iterator[IndexRow]:
    """Skip rows whose values are not of the types that were written: a damaged page may hold anything."""
    for seq, key, offset, slot_bytes in rows:
        typed = type(key) is bytes and type(offset) is int and type(slot_bytes) is int
        if typed and len(key) > 4 and offset >= 0 and slot_bytes > 0:
            yield IndexRow(seq, Key(key), offset, slot_bytes)
