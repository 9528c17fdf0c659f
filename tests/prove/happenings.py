"""What befalls storage: damage to chunks at rest, and outages of a bucket's server and of a filesystem.

Threading: plain functions; an outage ends with its context, damage stays. Ownership: servers, proxies and filesystems
are the caller's.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from tests.faults.conftest import SmallFilesystem
from tests.s3.proxy import Answer, Cut, Fault, FaultProxy, Flip, Hold, Reset, Rule, Stall
from tests.s3.servers import RcloneServer

Outage = Callable[[], AbstractContextManager[Rule | None]]
"""Begins an outage. Gives the rule that breaks requests, if that is what it is: ``hits`` says how many."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A shard as it rests: a whole file, or a slot of a slab."""

    path: Path
    offset: int = 0
    size: int | None = None
    """None: the whole file."""

    @property
    def is_file(self) -> bool:
        """Whether it has a file of its own."""
        return self.size is None

    def read(self) -> bytes:
        """Return its bytes."""
        with self.path.open("rb") as file:
            file.seek(self.offset)
            return file.read() if self.size is None else file.read(self.size)

    def write(self, data: bytes) -> None:
        """Put ``data`` in its place; a file gets that length, a slot is filled up with zeros."""
        with self.path.open("r+b") as file:
            file.seek(self.offset)
            file.write(data if self.size is None else data[: self.size].ljust(self.size, b"\0"))
            if self.is_file:
                file.truncate()


def _flip(mine: Piece, other: Piece, share: float) -> None:
    """The second highest bit of the number there: what is 0.5 becomes 10^38, so it shows in any answer that uses it."""
    data = bytearray(mine.read())
    if data:  # else its file was cut before it
        data[min(len(data) - 1, int(len(data) * share) // 4 * 4 + 3)] ^= 0x40
        mine.write(bytes(data))


def _cut(mine: Piece, other: Piece, share: float) -> None:
    data = mine.read()
    mine.write(data[: int(len(data) * share)])


def _swap(mine: Piece, other: Piece, share: float) -> None:
    first, second = mine.read(), other.read()
    mine.write(second)
    other.write(first)


DAMAGES: Final[Mapping[str, Callable[[Piece, Piece, float], None]]] = {
    "flipped": _flip,
    "truncated": _cut,
    "emptied": lambda mine, other, _: _cut(mine, other, 0.0),
    "long": lambda mine, _, share: mine.write(mine.read() + os.urandom(1 + int(8192 * share))),
    "swapped": _swap,
    "another's": lambda mine, other, _: mine.write(other.read()),
    "deleted": lambda mine, *_: mine.path.unlink() if mine.is_file else mine.write(b""),
}
"""Damages the first piece, and ``swapped`` the second, too: another chunk. The number says where, as a share of the
length. What a slot of a slab cannot have, such as another length, is zeros. Raises FileNotFoundError if one is gone.
"""

REQUESTS: Final[Mapping[str, tuple[str, Fault]]] = {
    "500": ("GET|PUT|HEAD", Answer(500, "InternalError")),
    "503": ("GET|PUT|HEAD", Answer(503, "SlowDown")),
    "403": ("GET|PUT|HEAD", Answer(403, "AccessDenied")),
    "hangs": ("GET|PUT|HEAD", Hold()),
    "resets": ("GET|PUT|HEAD", Reset()),
    "GET stalls": ("GET", Stall(0.5)),
    "late": ("GET|PUT|HEAD", Hold(seconds=1.5)),
    "cut, unnoticed": ("GET", Cut(0.5, lying=True)),
    "GET flipped": ("GET", Flip(0.5)),
    "PUT flipped": ("PUT", Flip(0.5, side="request")),
}
"""What happens to requests, and to which."""


def bucket_outages(server: RcloneServer, proxy: FaultProxy) -> dict[str, Outage]:
    """Return what may happen to a bucket behind a proxy, by name."""
    made: dict[str, Outage] = {
        f"S3 {name}": partial(proxy.inject, fault, operation=operation) for name, (operation, fault) in REQUESTS.items()
    }
    return made | {
        "S3 refused": partial(lasting, proxy.go_down, proxy.come_back),
        "S3 killed": partial(lasting, server.stop, server.start),
    }


def disk_outages(disk: SmallFilesystem) -> dict[str, Outage]:
    """Return what may happen to a filesystem of its own, by name."""
    return {
        "disk full": partial(lasting, disk.fill, disk.drain),
        "read-only": partial(lasting, disk.make_read_only, disk.make_writable),
    }


@contextlib.contextmanager
def lasting(begin: Callable[[], object], end: Callable[[], object]) -> Iterator[None]:
    """Begin something that ends with the context."""
    begin()
    try:
        yield
    finally:
        end()


@contextlib.contextmanager
def directory_gone(directory: Path) -> Iterator[None]:
    """Take a directory away. What others have made there meanwhile stays; the rest comes back."""
    elsewhere = directory.with_name("elsewhere")
    directory.rename(elsewhere)
    try:
        yield
    finally:
        for path in [path for path in elsewhere.rglob("*") if path.is_file()]:
            target = directory / path.relative_to(elsewhere)
            if not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                path.rename(target)


def make_disk(scratch: Path, size_bytes: int) -> SmallFilesystem | None:
    """Make a filesystem of its own; None where that is not permitted."""
    try:
        return SmallFilesystem(scratch / "disk.img", scratch / "disk", size_bytes)
    except (OSError, subprocess.CalledProcessError):
        return None


def files(directory: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield each file below a directory with its status, but for those that others remove meanwhile."""
    for base, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):
                yield Path(base, name), Path(base, name).lstat()
