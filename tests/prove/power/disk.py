"""What may be on a disk after the power went, given what was written, synced and renamed until then.

Certain is what a sync has covered: data of a file that were written before ``fsync`` of it began, names in a directory
before ``fsync`` of that began. Of everything else any part may be there, in any order:

- of the data of a file any whole calls, pages or sectors, each of them; a file may be as long as a write made it
  without having what was written, but zeros, or what lay on the disk before;
- of the names, on a filesystem with a journal (ext4, xfs), all up to some point, and at least those before any
  ``fsync``; on others any of them.

Threading: none. Pure.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final, Literal

from tests.prove.power.recording import NEVER, ON_NAMES, Call, History, Kind, Names, apply_to_names

PAGE, SECTOR = 4096, 512
PUNCH_HOLE, KEEP_SIZE = 2, 1
Naming = Literal["journal", "any"]
Part = frozenset[int] | None
"""Of a write: which units of it are there; None: all."""


@dataclass(frozen=True)
class Disk:
    """A disk after a crash: files by their path below the root, and directories."""

    files: Mapping[str, bytes]
    directories: tuple[str, ...]
    crashed: int
    """The time of the crash."""
    words: str
    """How to see it again."""
    sure: frozenset[str] = frozenset()
    """Files that all disks of this crash have, with the same content."""

    @cached_property
    def digest(self) -> bytes:
        """Equal for equal disks."""
        made = hashlib.sha256("\0".join(self.directories).encode())
        for path in sorted(self.files):
            made.update(f"\0{path}\0{len(self.files[path])}\0".encode() + self.files[path])
        return made.digest()

    def lay_out(self, root: Path) -> None:
        """Make these files below ``root``, a new directory."""
        root.mkdir(mode=0o700)
        for directory in self.directories:
            (root / directory).mkdir(mode=0o700, exist_ok=True)
        for path, content in self.files.items():
            fd = os.open(root / path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            os.write(fd, content)
            os.close(fd)


class Crash:
    """All that is certain, and all that is not, when the power goes. ``since``: what was done before is safe."""

    def __init__(self, history: History, at: int, naming: Naming, since: int = 0) -> None:
        """``at``: calls that have begun before may have been done."""
        self._at = at
        self._naming = naming
        begun = [call for call in history.calls if call.began < at]
        syncs = [call for call in begun if call.kind is Kind.SYNC and call.ended < at]
        synced: dict[int | str, int] = {}
        """When the last sync of a file, or a directory, began."""
        for sync in syncs:
            what = sync.file if sync.file > 0 else sync.path
            synced[what] = max(sync.began, synced.get(what, 0))
        any_sync = max([sync.began for sync in syncs], default=0)

        def is_certain(call: Call) -> bool:
            if call.ended < since:
                return True
            if call.kind not in ON_NAMES:
                is_durable = call.kind is Kind.WRITE and call.flags and call.ended < at
                return bool(is_durable) or call.ended < synced.get(call.file, 0)
            if naming == "journal" and call.ended < any_sync:
                return True
            parents = {os.path.dirname(name) for name in (call.path, call.other or call.path)}
            return all(call.ended < synced.get(parent, 0) for parent in parents)

        self._names = [(call, is_certain(call)) for call in begun if call.kind in ON_NAMES]
        data = [call for call in begun if call.kind in (Kind.WRITE, Kind.RESIZE, Kind.ALLOCATE)]
        self._data = [(call, is_certain(call)) for call in data]
        self._loose_names = [at for at, (_, certain) in enumerate(self._names) if not certain]
        self._loose_data = [at for at, (_, certain) in enumerate(self._data) if not certain]

    def whole(self) -> Disk:
        """Return the disk on which everything is."""
        return self._disk(frozenset(self._loose_names), dict.fromkeys(self._loose_data), ", nothing lost")

    def sample(self, choose: random.Random, old: Sequence[bytes], words: str) -> Disk:
        """Return a disk that lacks some names, and of each file some calls, pages or sectors, in one of several ways.
        ``old``: what may lie where a file is longer than what was written.
        """
        if self._naming == "journal":
            names = frozenset(self._loose_names[: choose.randint(0, len(self._loose_names))])
        else:
            odds = choose.choice([0.1, 0.5, 0.9, 1.0])
            names = frozenset(at for at in self._loose_names if choose.random() < odds)
        unit = choose.choice([PAGE, SECTOR])
        data, sizes = dict[int, Part](), set[int]()
        calls_of: dict[int, list[int]] = {}
        for at in self._loose_data:
            calls_of.setdefault(self._data[at][0].file, []).append(at)
        for _, positions in sorted(calls_of.items()):
            self._choose(choose, positions, unit, data)
            if choose.random() < 0.3:
                sizes |= {at for at in positions if choose.random() < 0.5}
        rest = choose.choice([b"\0", choose.choice(old) if old else b"\0"])
        return self._disk(names, data, words, unit, sizes, rest)

    def _choose(self, choose: random.Random, positions: Sequence[int], unit: int, data: dict[int, Part]) -> None:
        """Add to ``data`` which calls on a file were done."""
        way, one, odds = choose.choice(_WAYS), choose.randrange(len(positions)), choose.choice([0.1, 0.5, 0.9])
        for number, at in enumerate(positions):
            units = range(-(-len(self._data[at][0].data) // unit) + 1)
            some = frozenset(one for one in units if choose.random() < odds)
            if way == "units":
                data[at] = some
            elif way == "lately torn":
                data[at] = some if number >= len(positions) - 3 else None
            elif (
                way == "all"
                or (way == "calls" and choose.random() < odds)
                or (way == "up to one" and number < one)
                or (way == "all but one" and number != one)
                or (way == "only one" and number == one)
            ):
                data[at] = None
            elif number == one and way != "none" and choose.random() < 0.5:
                data[at] = some

    def _disk(
        self,
        names: frozenset[int],
        data: Mapping[int, Part],
        words: str,
        unit: int = PAGE,
        sizes: Collection[int] = (),
        rest: bytes = b"\0",
    ) -> Disk:
        """Return the disk on which of the uncertain calls these were done.

        ``data``: position of a call -> which of its units. ``sizes``: writes of which the length of the file is there,
        however little of what they wrote; ``rest``: what lies there then.
        """
        found = self._found(names)
        files = {path: self._content(file, data, unit, sizes, rest) for path, file in found.items() if file is not None}
        directories = tuple(sorted(path for path, file in found.items() if file is None and path))
        words = f"crash at {self._at}, names: {self._naming}{words}"
        return Disk(files, directories, self._at, words, self._sure)

    @cached_property
    def _sure(self) -> frozenset[str]:
        """The files that are on each of these disks, with the same content."""
        loose = [self._names[at][0] for at in self._loose_names]
        named = {name for call in loose for name in (call.path, call.other) if name}
        written = {self._data[at][0].file for at in self._loose_data}
        return frozenset(
            path
            for path, file in self._found(frozenset()).items()
            if file is not None
            and file not in written
            and not any(path == name or path.startswith(f"{name}/") for name in named)
        )

    def _found(self, names: frozenset[int]) -> Names:
        """Return the names when of the uncertain calls on them these were done."""
        found: Names = {"": None}
        for at, (call, certain) in enumerate(self._names):
            if certain or at in names:
                apply_to_names(found, call)
        return found

    def _content(self, file: int, data: Mapping[int, Part], unit: int, sizes: Collection[int], rest: bytes) -> bytes:
        content = bytearray()
        for at, (call, certain) in enumerate(self._data):
            if call.file == file:
                if certain or at in data:
                    _apply(content, call, None if certain else data[at], unit, rest)
                if at in sizes and call.kind is Kind.WRITE:
                    _extend(content, call.offset + len(call.data), rest)
        return bytes(content)


_WAYS: Final = ("all", "none", "calls", "units", "up to one", "all but one", "only one", "lately torn")


def end_of(history: History) -> int:
    """Return a time after which nothing was done."""
    said = [time for time, _ in history.marks]
    return 1 + max(time for call in history.calls for time in (call.began, call.ended, *said) if time < NEVER)


def samples(history: History, since: int, seed: str) -> Iterator[Disk]:
    """Yield disks without end, names kept either way: at any time, and as often just before a sync ends, when most may
    be lost.
    """
    choose, last = random.Random(seed), end_of(history)
    syncs = [call.ended for call in history.calls if call.kind is Kind.SYNC and since < call.ended < NEVER]
    old = [call.data for call in history.calls if call.kind is Kind.WRITE and len(call.data) >= PAGE]
    for number in itertools.count():
        at = choose.choice([choose.randint(since, last), choose.choice([*syncs, last])])
        naming: Naming = choose.choice(["journal", "any"])
        yield Crash(history, at, naming, since).sample(choose, old, f", sample {number} of {seed!r}")


def _extend(content: bytearray, end: int, rest: bytes) -> None:
    if end > len(content):
        missing = end - len(content)
        content.extend((rest * (missing // len(rest) + 1))[:missing])


def _apply(content: bytearray, call: Call, part: Part, unit: int, rest: bytes) -> None:
    if call.kind is Kind.RESIZE:
        if part is None or part:
            del content[call.offset :]
            _extend(content, call.offset, b"\0")
        return
    if call.kind is Kind.ALLOCATE:
        end = call.offset + call.length
        if part is not None and not part:
            return
        if call.flags & PUNCH_HOLE:
            end = min(end, len(content))
            content[call.offset : end] = bytes(max(0, end - call.offset))
        elif not call.flags & KEEP_SIZE:
            _extend(content, end, b"\0")
        return
    first = call.offset // unit
    for start in range(first * unit, call.offset + len(call.data), unit):
        if part is not None and start // unit - first not in part:
            continue
        begin, end = max(start, call.offset), min(start + unit, call.offset + len(call.data))
        _extend(content, begin, rest)
        content[begin:end] = call.data[begin - call.offset : end - call.offset]
