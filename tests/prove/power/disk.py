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
from typing import Literal

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
    told: str
    """How to see it again, in words."""
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
        self.at = at
        self.naming = naming
        begun = [call for call in history.calls if call.began < at]
        syncs = [call for call in begun if call.kind is Kind.SYNC and call.ended < at]
        synced_files: dict[int, int] = {}
        synced_directories: dict[str, int] = {}
        for sync in syncs:
            if sync.file > 0:
                synced_files[sync.file] = max(sync.began, synced_files.get(sync.file, 0))
            else:
                synced_directories[sync.path] = max(sync.began, synced_directories.get(sync.path, 0))
        any_sync = max([sync.began for sync in syncs], default=0)

        def is_certain(call: Call) -> bool:
            if call.ended < since:
                return True
            if call.kind not in ON_NAMES:
                is_durable = call.kind is Kind.WRITE and call.flags and call.ended < at
                return bool(is_durable) or call.ended < synced_files.get(call.file, 0)
            if naming == "journal" and call.ended < any_sync:
                return True
            parents = {os.path.dirname(name) for name in (call.path, call.other or call.path)}
            return all(call.ended < synced_directories.get(parent, 0) for parent in parents)

        self.names = [(call, is_certain(call)) for call in begun if call.kind in ON_NAMES]
        data = [call for call in begun if call.kind in (Kind.WRITE, Kind.RESIZE, Kind.ALLOCATE)]
        self.data = [(call, is_certain(call)) for call in data]
        self.loose_names = [at for at, (_, certain) in enumerate(self.names) if not certain]
        self.loose_data = [at for at, (_, certain) in enumerate(self.data) if not certain]

    @cached_property
    def sure(self) -> frozenset[str]:
        """The files that are on each of these disks, with the same content."""
        loose = [self.names[at][0] for at in self.loose_names]
        named = {name for call in loose for name in (call.path, call.other) if name}
        written = {self.data[at][0].file for at in self.loose_data}
        return frozenset(
            path
            for path, file in self._found(frozenset()).items()
            if file is not None
            and file not in written
            and not any(path == name or path.startswith(f"{name}/") for name in named)
        )

    def all_names(self) -> list[frozenset[int]]:
        """Return each set of uncertain calls on names that may have been done, or of very many those that lack, or
        have, two of them at most.
        """
        if self.naming == "journal":
            return [frozenset(self.loose_names[:count]) for count in range(len(self.loose_names) + 1)]
        return _subsets(self.loose_names)

    def disk(
        self,
        names: frozenset[int],
        data: Mapping[int, Part],
        *,
        unit: int = PAGE,
        sizes: frozenset[int] = frozenset(),
        rest: bytes = b"\0",
        told: str = "",
    ) -> Disk:
        """Return the disk on which of the uncertain calls these were done.

        ``data``: position of a call -> which of its units. ``sizes``: writes of which the length of the file is there,
        however little of what they wrote; ``rest``: what lies there then.
        """
        found = self._found(names)
        files = {path: self._content(file, data, unit, sizes, rest) for path, file in found.items() if file is not None}
        directories = tuple(sorted(path for path, file in found.items() if file is None and path))
        return Disk(files, directories, self.at, f"crash at {self.at}, names: {self.naming}{told}", self.sure)

    def _found(self, names: frozenset[int]) -> Names:
        """Return the names when of the uncertain calls on them these were done."""
        found: Names = {"": None}
        for at, (call, certain) in enumerate(self.names):
            if certain or at in names:
                apply_to_names(found, call)
        return found

    def _content(self, file: int, data: Mapping[int, Part], unit: int, sizes: Collection[int], rest: bytes) -> bytes:
        """Return what a file holds: see ``disk``."""
        content = bytearray()
        for at, (call, certain) in enumerate(self.data):
            if call.file == file:
                if certain or at in data:
                    _apply(content, call, None if certain else data[at], unit, rest)
                if at in sizes and call.kind is Kind.WRITE:
                    _extend(content, call.offset + len(call.data), rest)
        return bytes(content)

    def whole(self) -> Disk:
        """Return the disk on which everything is."""
        return self.disk(frozenset(self.loose_names), dict.fromkeys(self.loose_data), told=", nothing lost")


def crash_times(history: History, since: int = 0) -> list[int]:
    """Return the times between which no choice is lost: just before a sync ends, and the end. What may be there at any
    other time may also be there at the next of these.
    """
    ends = [call.ended for call in history.calls if call.kind is Kind.SYNC and since < call.ended < NEVER]
    said = [time for time, _ in history.marks]
    last = max(time for call in history.calls for time in (call.began, call.ended, *said) if time < NEVER)
    return [*sorted(ends), last + 1]


def whole_calls(crash: Crash) -> Iterator[Disk]:
    """Yield the disks with each set of names and each set of whole calls on data; of very many sets those described in
    ``_subsets``, each with all names, and all data with each set of names.
    """
    every_name, every_data = crash.all_names(), _subsets(crash.loose_data)
    most_names = frozenset(crash.loose_names)
    pairs = itertools.chain(
        ((most_names, data) for data in every_data),
        ((names, frozenset(crash.loose_data)) for names in every_name),
        ((names, frozenset[int]()) for names in every_name),
    )
    if len(every_name) * len(every_data) <= 4096:
        pairs = itertools.chain(itertools.product(every_name, every_data))
    for names, data in pairs:
        told = f", names {sorted(names)} of {len(crash.names)}, calls {sorted(data)} of {len(crash.data)}"
        yield crash.disk(names, dict.fromkeys(data), told=told)


def samples(history: History, naming: Naming, since: int, seed: str) -> Iterator[Disk]:
    """Yield disks without end: at any time, of each file some calls, pages or sectors, in one of several ways."""
    choose = random.Random(seed)
    last = crash_times(history, since)[-1]
    old = [call.data for call in history.calls if call.kind is Kind.WRITE and len(call.data) >= PAGE]
    for number in itertools.count():
        crash = Crash(history, choose.randint(since, last), naming, since)
        if naming == "journal":
            names = frozenset(crash.loose_names[: choose.randint(0, len(crash.loose_names))])
        else:
            odds = choose.choice([0.1, 0.5, 0.9, 1.0])
            names = frozenset(at for at in crash.loose_names if choose.random() < odds)
        unit = choose.choice([PAGE, SECTOR])
        data: dict[int, Part] = {}
        sizes: set[int] = set()
        ways = {file: choose.choice(_WAYS) for file in {call.file for call, _ in crash.data}}
        calls_of: dict[int, list[int]] = {}
        for at in crash.loose_data:
            calls_of.setdefault(crash.data[at][0].file, []).append(at)
        for file, positions in sorted(calls_of.items()):
            _choose(choose, ways[file], positions, crash, unit, data)
            if choose.random() < 0.3:
                sizes |= {at for at in positions if choose.random() < 0.5}
        rest = choose.choice([b"\0", choose.choice(old) if old else b"\0"])
        told = f", sample {number} of {seed!r}"
        yield crash.disk(names, data, unit=unit, sizes=frozenset(sizes), rest=rest, told=told)


_WAYS = ("all", "none", "calls", "units", "up to one", "all but one", "only one", "lately torn")


def _choose(
    choose: random.Random, way: str, positions: Sequence[int], crash: Crash, unit: int, data: dict[int, Part]
) -> None:
    """Add to ``data`` which calls on a file were done."""
    one = choose.randrange(len(positions))
    odds = choose.choice([0.1, 0.5, 0.9])
    for number, at in enumerate(positions):
        call = crash.data[at][0]
        units = range(-(-len(call.data) // unit) + 1)
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


def _subsets(items: Sequence[int], most: int = 9) -> list[frozenset[int]]:
    """Return all subsets of up to ``most`` items; of more those up to some item, those with two of the last ``most``
    missing, and those of one or two of the last.
    """
    if len(items) <= most:
        return [frozenset(some) for count in range(len(items) + 1) for some in itertools.combinations(items, count)]
    found = {frozenset(items[:count]): None for count in range(len(items) + 1)}
    lately = items[-most:]
    for count in (1, 2):
        for some in itertools.combinations(lately, count):
            found[frozenset(items) - frozenset(some)] = None
            found[frozenset(some)] = None
    for count in range(1, len(items)):
        found[frozenset(items[: count - 1]) | frozenset(items[count : count + 1])] = None
    return list(found)


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
