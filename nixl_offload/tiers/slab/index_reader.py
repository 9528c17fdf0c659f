"""Reads a slab's durable index from outside: beside the engine that writes it, after it ended, after it was killed.

Threading: every call opens a connection of its own and closes it. Reader and engine share the file by SQLite's locks: a
commit waits for the read in progress, so many rows are read some at a time. Reading changes nothing, but for a
transaction that a kill left half done: SQLite rolls it back, as it does for the next engine.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from nixl_offload.errors import TierError
from nixl_offload.index.database import (
    READABLE,
    UnusableError,
    is_damage,
    open_connection,
    refuse_write_ahead_log,
    translate,
)
from nixl_offload.types import Key

_ROWS_PER_READ: Final = 10_000
"""Some 20 ms."""
_SELECT: Final = f"SELECT seq, key, offset, slot_bytes FROM {READABLE}"
_ATTEMPTS: Final = 5
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

    def rows(self, after: int = 0) -> Iterator[IndexRow]:
        """Yield all rows behind ``after``, the first put first; what is put meanwhile may be among them or not."""
        while some := self._query(f"{_SELECT} AND seq > ? ORDER BY seq LIMIT ?", after, _ROWS_PER_READ):
            last = some[-1][0]
            if not isinstance(last, int) or last <= after:
                raise TierError(f"index {self.path} is damaged: its rows are out of order", cause="io")
            after = last
            yield from _sound(some)

    def find(self, digits: str, limit: int) -> list[IndexRow]:
        """Return the first rows, by key, whose keys begin with these hex digits."""
        even = bytes.fromhex(digits[: len(digits) // 2 * 2])
        found = self._query(
            f"{_SELECT} AND key >= ? AND key < ? ORDER BY key LIMIT ?",
            even,
            even + b"\xff" * (65 - len(even)),
            limit * (16 if len(digits) % 2 else 1),
        )
        return [row for row in _sound(found) if row.key.hex().startswith(digits)][:limit]

    def _query(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        """Ask again while an engine commits, or is making or replacing the index. Raises TierError."""
        failed, give_up_s = 0, time.monotonic() + _PATIENCE_S
        while True:
            try:
                refuse_write_ahead_log(str(self.path))
                with contextlib.closing(open_connection(str(self.path), timeout_s=0.0)) as connection:
                    connection.execute("PRAGMA query_only=ON")
                    return connection.execute(statement, values).fetchall()
            except FileNotFoundError as error:
                raise translate(error, str(self.path)) from error
            except (UnusableError, sqlite3.Error, UnicodeError, OSError) as error:
                why = translate(error, str(self.path))
                if why.cause == "locked" and time.monotonic() < give_up_s:
                    time.sleep(_POLL_S)
                    continue
                failed += 1
                if failed == _ATTEMPTS or why.cause == "locked":
                    if is_damage(error):
                        raise TierError(f"index {self.path} is damaged: {error}", cause="io") from error
                    raise why from error
            time.sleep(_PAUSE_S)


def _sound(rows: Sequence[tuple[Any, ...]]) -> Iterator[IndexRow]:
    """Skip rows whose values are not of the types that were written: a damaged page may hold anything."""
    for seq, key, offset, slot_bytes in rows:
        typed = type(key) is bytes and type(offset) is int and type(slot_bytes) is int
        if typed and len(key) > 4 and offset >= 0 and slot_bytes > 0:
            yield IndexRow(seq, Key(key), offset, slot_bytes)
