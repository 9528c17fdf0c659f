"""Faults that come and go by a seeded timetable: of the bucket's server, of the filesystem, of what rests on both.

Threading: one thread of its own begins and ends them. ``stop`` ends the last one and joins it.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Final

from tests.faults.conftest import SmallFilesystem
from tests.prove.files import files
from tests.s3.proxy import Answer, Cut, Delay, Fault, FaultProxy, Flip, Hold, Reset, Rule, Stall
from tests.s3.servers import RcloneServer

LASTS_S: Final = (1.0, 4.0)
PAUSE_S: Final = (0.5, 2.0)
UNTIL_ASKED_S: Final = 20.0
"""So much longer lasts what no request has met: after another fault, the bucket may not be asked for a while."""
DAMAGED: Final = 6
"""So many files, objects or places of the slab at a time."""

REQUESTS: Final[dict[str, tuple[str, Fault]]] = {
    "500": ("GET|PUT|HEAD", Answer(500, "InternalError")),
    "503": ("GET|PUT|HEAD", Answer(503, "SlowDown")),
    "403": ("GET|PUT|HEAD", Answer(403, "AccessDenied")),
    "hangs": ("GET|PUT|HEAD", Hold()),
    "GET stalls": ("GET", Stall(0.5)),
    "late": ("GET|PUT|HEAD", Delay(1.5)),
    "resets": ("GET|PUT|HEAD", Reset()),
    "resets within": ("GET", Reset("body")),
    "cut, unnoticed": ("GET", Cut(0.5, lying=True)),
    "GET flipped": ("GET", Flip(0.5)),
    "PUT flipped": ("PUT", Flip(0.5, side="request")),
}
Happening = Callable[[], AbstractContextManager[Rule | int]]
"""Gives the rule that breaks requests, or how much was broken."""
SMALL_BYTES: Final = 1 << 16
"""Files of so much are no shards."""
OFTEN: Final = 5
"""Of fewer times, a tier that is still out of use after the fault before explains that nothing asked it. In half an
hour each kind comes some nine times; in less than a quarter of one this is hardly judged."""


class Troubles:
    """Begins with the next fault when the last one is over and some time has passed."""

    def __init__(
        self,
        seed: int,
        server: RcloneServer,
        proxy: FaultProxy,
        disk: SmallFilesystem | None,
        tree: Path,
        slab: Path,
        only: str = "",
    ) -> None:
        """``disk`` holds ``tree`` and ``slab``; None: it is no filesystem of its own and cannot be filled. ``only``:
        faults with this in their names.
        """
        self._source = random.Random(f"troubles {seed}")
        self._server, self._proxy = server, proxy
        self._tree, self._slab = tree, slab
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="troubles")
        self._failed: Exception | None = None
        self.log: list[tuple[float, str]] = []
        """When each began, in ``time.monotonic`` seconds, and its name."""
        self.struck: Counter[str] = Counter()
        """How often each found something to break."""
        self.now = ""
        """Which one there is; none: a pause."""
        self._kinds: dict[str, Happening] = {
            **{f"S3 {name}": partial(proxy.inject, fault, operation=o) for name, (o, fault) in REQUESTS.items()},
            "S3 refused": partial(_lasting, proxy.go_down, proxy.come_back),
            "S3 killed": partial(_lasting, server.stop, server.start),
            "tree flipped": partial(self._damaged, tree, _flip),
            "tree cut": partial(self._damaged, tree, _cut),
            "tree deleted": partial(self._damaged, tree, Path.unlink),
            "bucket flipped": partial(self._damaged, server.directory, _flip),
            "bucket cut": partial(self._damaged, server.directory, _cut),
            "bucket emptied": partial(self._damaged, server.directory, _empty),
            "bucket deleted": partial(self._damaged, server.directory, Path.unlink),
            "tree swapped": partial(self._swapped, tree),
            "bucket swapped": partial(self._swapped, server.directory),
            "slab flipped": self._slab_flipped,
        }
        if disk is not None:
            self._kinds["disk full"] = partial(_lasting, disk.fill, disk.drain)
            self._kinds["disk read-only"] = partial(_lasting, disk.make_read_only, disk.make_writable)
        self._kinds = {name: kind for name, kind in self._kinds.items() if only in name}

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End what lasts. Raises what went wrong in the thread: then less was tried than it seems."""
        self._stopping.set()
        self._thread.join()
        if self._failed is not None:
            raise self._failed

    @property
    def idle(self) -> list[str]:
        """A sentence for each kind that broke nothing, though it came several times, or there was time for all."""
        begun = Counter(name for _, name in self.log)
        for_all = len(self.log) > 2 * len(self._kinds)
        return [
            f"{name} broke nothing, {begun[name]} times"
            for name in self._kinds
            if not self.struck[name] and (begun[name] >= OFTEN or (for_all and not begun[name]))
        ]

    def _run(self) -> None:
        try:
            while True:
                for name in self._source.sample(sorted(self._kinds), len(self._kinds)):
                    if self._stopping.wait(self._source.uniform(*PAUSE_S)):
                        return
                    with self._kinds[name]() as what:
                        self.now = name
                        self.log.append((time.monotonic(), name))
                        over = self._stopping.wait(self._source.uniform(*LASTS_S))
                        until_s = time.monotonic() + UNTIL_ASKED_S
                        while isinstance(what, Rule) and not what.hits and not over and time.monotonic() < until_s:
                            over = self._stopping.wait(PAUSE_S[0])
                    self.now = ""
                    self.struck[name] += (what.hits if isinstance(what, Rule) else what) > 0
                    if over:
                        return
        except Exception as error:  # noqa: BLE001 - raised by ``stop``
            self._failed = error

    @contextlib.contextmanager
    def _damaged(self, base: Path, how: Callable[[Path], None]) -> Iterator[int]:
        done = 0
        for path in self._some(base, DAMAGED):
            with contextlib.suppress(FileNotFoundError):
                how(path)
                done += 1
        yield done

    @contextlib.contextmanager
    def _swapped(self, base: Path) -> Iterator[int]:
        chosen, done = self._some(base, DAMAGED), 0
        for one, other in zip(chosen[::2], chosen[1::2], strict=False):
            with contextlib.suppress(FileNotFoundError):
                first, second = one.read_bytes(), other.read_bytes()
                one.write_bytes(second)
                other.write_bytes(first)
                done += 1
        yield done

    @contextlib.contextmanager
    def _slab_flipped(self) -> Iterator[int]:
        done = 0
        for path in self._slab.glob("*/rank-*.slab"):
            with path.open("r+b", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                for _ in range(DAMAGED):
                    done += _flip_at(file.fileno(), self._source.randrange(size))
                os.fsync(file.fileno())
        yield done

    def _some(self, base: Path, count: int) -> list[Path]:
        """Choose shards, by name and so by what the timetable's seed says where the same ones are there."""
        found = sorted(
            path for path, told in files(base) if not path.name.startswith(".") and told.st_size > SMALL_BYTES
        )
        return self._source.sample(found, min(count, len(found)))


def make_disk(scratch: Path, size_bytes: int) -> SmallFilesystem | None:
    """Make a filesystem of its own; None where that is not permitted."""
    try:
        return SmallFilesystem(scratch / "disk.img", scratch / "disk", size_bytes)
    except (OSError, subprocess.CalledProcessError):
        return None


@contextlib.contextmanager
def _lasting(begin: Callable[[], object], end: Callable[[], object]) -> Iterator[int]:
    begin()
    try:
        yield 1
    finally:
        end()


def _flip(path: Path) -> None:
    with path.open("r+b", buffering=0) as file:
        _flip_at(file.fileno(), os.fstat(file.fileno()).st_size // 2)


def _flip_at(descriptor: int, offset: int) -> int:
    """Flip a bit; return how many there were to flip."""
    byte = os.pread(descriptor, 1, offset)
    return os.pwrite(descriptor, bytes(each ^ 0x10 for each in byte), offset)


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _empty(path: Path) -> None:
    os.truncate(path, 0)
