"""Reads a slab's durable index from outside: beside the engine that writes it, after it ended, after it was killed.

Threading: every call opens a connection of its own and closes it. Reading creates and changes nothing beside the index,
so whoever may read the files may look. ``drop_rows`` alone writes, and is for the holder of the directory's lock.

Reader and engine share the file by SQLite's locks: a commit waits for the read in progress, so many rows are read
some at a time. Where a kill left a transaction half done, only a writer can read the file; a private copy is read then.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import stat
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from nixl_offload.errors import TierError
from nixl_offload.index.database import READABLE, UnusableError, is_damage, refuse_write_ahead_log, translate
from nixl_offload.types import Key

_ROWS_PER_READ: Final = 10_000
_ROWS_PER_COUNT: Final = 100_000
"""Both take some 20 ms."""
_SELECT: Final = f"SELECT seq, key, offset, slot_bytes FROM {READABLE}"
_COUNT: Final = """
SELECT max(seq), coalesce(sum(wanted), 0), coalesce(sum(wanted * slot_bytes), 0)
FROM (
    SELECT seq, slot_bytes, ? IS NULL OR substr(key, -4) = ? AS wanted FROM slot WHERE seq > ? ORDER BY seq LIMIT ?
)"""
_ATTEMPTS: Final = 5
_REFUSED_BEFORE_COPYING: Final = 2
"""A commit that begins just now can look, for a moment, like one that a kill has cut short."""
_PAUSE_S: Final = 0.1
_PATIENCE_S: Final = 10.0
_POLL_S: Final = 0.002
"""Of a lock. SQLite itself asks every 100 ms, and beside a busy engine misses the short times between commits."""


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
        ending = None if group is None else group.to_bytes(4, "big")
        rows, size_bytes, after = 0, 0, 0
        with _Source(self.path) as source:
            while True:
                ((last, n_found, found_bytes),) = source.query(_COUNT, ending, ending, after, _ROWS_PER_COUNT)
                if last is None:
                    return rows, size_bytes
                rows, size_bytes, after = rows + n_found, size_bytes + found_bytes, self._grown(last, after)

    def ends(self, limit: int = 8) -> tuple[list[IndexRow], list[IndexRow]]:
        """Return the rows put first and, newest first, those put last."""
        select = f"{_SELECT} ORDER BY seq"
        return self._rows(f"{select} LIMIT ?", limit), self._rows(f"{select} DESC LIMIT ?", limit)

    def rows(self, after: int = 0) -> Iterator[IndexRow]:
        """Yield all rows behind ``after``, the first put first; what is put meanwhile may be among them or not."""
        with _Source(self.path) as source:
            while some := source.query(f"{_SELECT} AND seq > ? ORDER BY seq LIMIT ?", after, _ROWS_PER_READ):
                after = self._grown(some[-1][0], after)
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

    def _grown(self, seq: object, after: int) -> int:
        """Return ``seq``, behind which to read on: in a damaged file it may be one from before, again and again."""
        if not isinstance(seq, int) or seq <= after:
            raise TierError(f"index {self.path} is damaged: its rows are out of order", cause="io")
        return seq

    def _rows(self, statement: str, *values: object) -> list[IndexRow]:
        with _Source(self.path) as source:
            return list(_sound(source.query(statement, *values)))


class _Source:
    """What is read: the index itself, or from the moment when that needs a writer a private copy."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._copy: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._copy is not None:
            self._copy.cleanup()

    def query(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        """Ask again while an engine commits, or is making or replacing the index. Raises TierError."""
        failed, refused, give_up_s = 0, 0, time.monotonic() + _PATIENCE_S
        while True:
            try:
                refuse_write_ahead_log(str(self._path))
                if self._copy is None and refused == _REFUSED_BEFORE_COPYING:
                    self._copy = self._make_copy()
                with contextlib.closing(self._connect()) as connection:
                    found: list[tuple[Any, ...]] = connection.execute(statement, values).fetchall()
                    return found
            except FileNotFoundError as error:
                raise translate(error, str(self._path)) from error
            except (UnusableError, sqlite3.Error, UnicodeError, OSError) as error:
                why = translate(error, str(self._path))
                if why.cause == "locked" and time.monotonic() < give_up_s:
                    time.sleep(_POLL_S)
                    continue
                failed += 1
                refused += why.cause == "readonly"
                if failed == _ATTEMPTS or why.cause == "locked":
                    if is_damage(error):
                        raise TierError(f"index {self._path} is damaged: {error}", cause="io") from error
                    raise why from error
            time.sleep(_PAUSE_S)

    def _connect(self) -> sqlite3.Connection:
        if self._copy is None:
            connection = _open(self._path, "mode=ro", timeout_s=0.0)
        else:
            connection = _open(Path(self._copy.name, self._path.name), "mode=rw", timeout_s=0.0)
        connection.text_factory = bytes
        return connection

    def _make_copy(self) -> tempfile.TemporaryDirectory[str]:
        copy = tempfile.TemporaryDirectory(prefix="nixl-offload-index-")
        try:
            for _ in range(_ATTEMPTS):
                before = self._state()
                for name, found in before.items():
                    target = Path(copy.name, os.path.basename(name))
                    target.unlink(missing_ok=True)
                    with contextlib.suppress(FileNotFoundError):
                        if found:
                            shutil.copyfile(name, target, follow_symlinks=False)
                if self._state() == before:
                    return copy
            raise TierError(f"index {self._path}: it changes while it is copied", cause="io")
        except BaseException:
            copy.cleanup()
            raise

    def _state(self) -> dict[str, tuple[int, ...]]:
        """Return the files that make up the index and, of each that is there, what tells whether it has changed."""
        state: dict[str, tuple[int, ...]] = {}
        for name in (f"{self._path}{end}" for end in ("", "-journal")):
            state[name] = ()
            with contextlib.suppress(FileNotFoundError):
                status = os.lstat(name)
                if not stat.S_ISREG(status.st_mode):
                    raise TierError(f"index {name}: it is no file", cause="io")
                state[name] = (status.st_ino, status.st_mtime_ns, status.st_size)
        return state


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
