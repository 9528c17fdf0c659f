"""What befalls a side: damage to what rests there, and outages, each from its beginning to its end.

Threading: plain functions. A fault ends with its context; damage stays.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.faults.conftest import SmallFilesystem
from tests.prove.yardstick.sides import Piece
from tests.s3.proxy import Answer, Fault, FaultProxy, Hold, Reset
from tests.s3.servers import RcloneServer

REQUESTS: Final[dict[str, Fault]] = {
    "S3 500": Answer(500, "InternalError"),
    "S3 503": Answer(503, "SlowDown"),
    "S3 403": Answer(403, "AccessDenied"),
    "S3 hangs": Hold(),
    "S3 resets": Reset(),
}

Damage = Callable[[list[Piece], list[Piece]], None]
"""Damages one of a prompt's chunks; the second list are another prompt's."""


def _flip(mine: list[Piece], others: list[Piece]) -> None:
    """The highest bit of a number's exponent: what is 0.5 becomes 10^38, so it shows in any answer that uses it."""
    data = bytearray(mine[1].read())
    at = len(data) // 2 // 4 * 4 + 3
    data[at] ^= 0x40
    mine[1].write(bytes(data))


def _truncate(mine: list[Piece], others: list[Piece]) -> None:
    data = mine[1].read()
    mine[1].write(data[: len(data) // 2].ljust(0 if mine[1].is_file else len(data), b"\0"))


def _empty(mine: list[Piece], others: list[Piece]) -> None:
    mine[1].write(b"" if mine[1].is_file else bytes(mine[1].size or 0))


def _swap(mine: list[Piece], others: list[Piece]) -> None:
    """With another prompt's: two of one prompt may change places unnoticed, for their keys know their positions."""
    one, other = mine[1].read(), others[1].read()
    mine[1].write(other)
    others[1].write(one)


def _stale(mine: list[Piece], others: list[Piece]) -> None:
    mine[1].write(others[1].read())


def _delete(mine: list[Piece], others: list[Piece]) -> None:
    if mine[1].is_file:
        mine[1].path.unlink()
    else:
        _empty(mine, others)


DAMAGES: Final[dict[str, Damage]] = {
    "byte flipped": _flip,
    "truncated": _truncate,
    "emptied": _empty,
    "two swapped": _swap,
    "another prompt's": _stale,
    "deleted": _delete,
}
"""In a slab, what a file would lack is zeros."""


@dataclass
class World:
    """What outages happen to. ``disk``: None where a side is a bucket."""

    server: RcloneServer
    proxy: FaultProxy
    disk: SmallFilesystem | None
    directory: Path
    is_slab: bool = False
    """One file that is open all the time."""

    def outages(self) -> dict[str, Callable[[], AbstractContextManager[object]]]:
        """Return those that this side can meet, by name."""
        if self.disk is not None:
            made_unreadable = {} if self.is_slab else {"unreadable": self._unreadable}
            return {
                **made_unreadable,
                "read-only": self._read_only,
                "disk full": self._full,
                "directory gone": self._gone,
            }
        proxy = self.proxy
        made: dict[str, Callable[[], AbstractContextManager[object]]] = {}
        for name, fault in REQUESTS.items():
            made[name] = lambda fault=fault: proxy.inject(fault)  # type: ignore[misc]
        return {**made, "server gone": self.refused}

    @contextlib.contextmanager
    def refused(self) -> Iterator[None]:
        """Connections are refused, those that were open are reset."""
        self.proxy.go_down()
        try:
            yield
        finally:
            self.proxy.come_back()

    @contextlib.contextmanager
    def _unreadable(self) -> Iterator[None]:
        """Every read of what is stored now fails (EISDIR): to root everything is permitted."""
        away = self.directory.with_name("away")
        away.mkdir()
        files = [path for path in sorted(self.directory.rglob("*")) if path.is_file() and path.stat().st_size > 1 << 16]
        for at, path in enumerate(files):
            path.rename(away / str(at))
            path.mkdir()
        try:
            yield
        finally:
            for at, path in enumerate(files):
                with contextlib.suppress(OSError):  # who deleted it, or put something else there, keeps that
                    path.rmdir()
                    (away / str(at)).rename(path)

    @contextlib.contextmanager
    def _read_only(self) -> Iterator[None]:
        assert self.disk is not None
        self.disk.make_read_only()
        try:
            yield
        finally:
            self.disk.make_writable()

    @contextlib.contextmanager
    def _full(self) -> Iterator[None]:
        assert self.disk is not None
        self.disk.fill()
        try:
            yield
        finally:
            self.disk.drain()

    @contextlib.contextmanager
    def _gone(self) -> Iterator[None]:
        elsewhere = self.directory.with_name("elsewhere")
        self.directory.rename(elsewhere)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # who made it anew keeps it
                self.directory.rmdir()
            if self.directory.exists():
                for path in elsewhere.rglob("*"):
                    target = self.directory / path.relative_to(elsewhere)
                    if path.is_file() and not target.exists():
                        target.parent.mkdir(parents=True, exist_ok=True)
                        path.rename(target)
            else:
                elsewhere.rename(self.directory)
