"""What a process has changed below a directory, call by call: recorded by ``record.c``, read back here.

Threading: none. The recorded process is a child with the library preloaded, which has to be so when it starts.
"""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path

_SOURCE = Path(__file__).with_name("record.c")
_RECORD = struct.Struct("<IIQqqIIII")
NEVER = 1 << 60
"""When a call ended that was under way at the end."""


class Kind(IntEnum):
    """As the enum in record.c."""

    END = 0
    WRITE = 1
    RESIZE = 2
    ALLOCATE = 3
    SYNC = 4
    CREATE = 5
    RENAME = 6
    UNLINK = 7
    MKDIR = 8
    RMDIR = 9
    LINK = 10
    MARK = 11
    NAMELESS = 12
    """A file was made that has no name, with O_TMPFILE. It may have the inode of one that was removed."""


ON_NAMES = frozenset({Kind.CREATE, Kind.RENAME, Kind.UNLINK, Kind.MKDIR, Kind.RMDIR, Kind.LINK})
_NEEDS_NO_FILE = frozenset({Kind.MKDIR, Kind.RMDIR, Kind.SYNC})
Names = dict[str, int | None]
"""Path below the root -> number of the file, None for a directory. The root itself is ""."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call that changes a file or a directory, or makes durable what was changed. Times count records of the log."""

    kind: Kind
    began: int
    ended: int
    file: int
    """A number of its own for each file that was made; of a call on names, the file that the name leads to. -1: it is
    a directory's."""
    path: str
    """Below the root; of a call on an open file, what it was called then."""
    other: str
    """The new name."""
    offset: int
    """Of RESIZE the new size."""
    length: int
    data: bytes
    flags: int


@dataclass(frozen=True, slots=True)
class History:
    """All calls in the order in which they began, and what the process said in between."""

    calls: tuple[Call, ...]
    marks: tuple[tuple[int, str], ...]

    def since(self, mark: str) -> int:
        """Return when the process said ``mark``, 0 if it never did."""
        return next((time for time, words in self.marks if words == mark), 0)


def build(directory: Path) -> Path:
    """Compile the library into ``directory``. Raises CalledProcessError with gcc's words."""
    library = directory / "librecord.so"
    command = ["gcc", "-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    command += ["-o", str(library), str(_SOURCE), "-pthread", "-ldl"]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return library


def record(library: Path, root: Path, module: str, *arguments: str) -> History:
    """Run a Python module that works below ``root``, an empty directory, and return what it did there.

    Raises CalledProcessError when it fails.
    """
    root = root.resolve()
    log = root.with_name(f"{root.name}.log")
    environment = {**os.environ, "LD_PRELOAD": str(library), "RECORD_ROOT": str(root), "RECORD_LOG": str(log)}
    checkout = str(Path(__file__).parents[3])
    environment["PYTHONPATH"] = os.pathsep.join([checkout, *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", module, str(root), *arguments]
    subprocess.run(command, check=True, env=environment, timeout=120.0)
    return read(log.read_bytes(), str(root))


def mark(words: str) -> None:
    """In the recorded process: have the log say ``words`` here. Elsewhere nothing."""
    said = getattr(ctypes.CDLL(None), "record_mark", None)
    if said is not None:
        said(words.encode())


def read(log: bytes, root: str) -> History:
    """Read a log. Calls that failed have changed nothing, and are left out; so are those on files without a name."""
    begun: dict[int, Call] = {}
    marks: list[tuple[int, str]] = []
    names: Names = {"": None}
    files: dict[int, int] = {}
    """The number of the file that has an inode now."""
    made = 0
    for time, (record, path, other, data) in enumerate(_records(log)):
        kind, number, inode, offset, length, *_, flags = record
        below = [name.removeprefix(root).strip("/") for name in (path, other)]
        if kind == Kind.MARK:
            marks.append((time, path))
        elif kind == Kind.NAMELESS:
            files.pop(inode, None)
        elif kind != Kind.END:
            file = -1
            if Kind(kind) in ON_NAMES:
                file = names.get(below[0]) or -1
            elif path and names.get(below[0], 0) is None:
                inode = 0  # a directory
            else:
                file = files.get(inode, 0)
            begun[number] = Call(Kind(kind), time, NEVER, file, below[0], below[1], offset, length, data, flags)
        elif number in begun:
            call = replace(begun[number], ended=time)
            failed = offset < 0 or (offset > 0 and call.kind not in (Kind.WRITE, Kind.CREATE))
            if failed or (call.kind is Kind.RESIZE and call.file == 0):
                del begun[number]
                continue
            if call.kind is Kind.WRITE:
                call = replace(call, data=call.data[:offset])
            if call.kind is Kind.CREATE:
                made += 1
                files[inode] = made
                call = replace(call, file=made)
            begun[number] = call
            if call.kind in ON_NAMES:
                apply_to_names(names, call)
    calls = tuple(call for call in begun.values() if call.file or call.kind in _NEEDS_NO_FILE)
    return History(tuple(sorted(calls, key=lambda call: call.began)), tuple(marks))


def apply_to_names(names: Names, call: Call) -> None:
    """Do what a call on names does, as far as the directories that it needs are there."""
    parents = [os.path.dirname(name) for name in (call.path, call.other or call.path)]
    if call.kind is Kind.UNLINK:
        if names.get(call.path) == call.file:
            del names[call.path]
    elif call.kind is Kind.RMDIR:
        if call.path in names and not any(name.startswith(f"{call.path}/") for name in names):
            del names[call.path]
    elif parents[1] not in names:
        return
    elif call.kind in (Kind.CREATE, Kind.MKDIR):
        names.setdefault(call.path, call.file if call.kind is Kind.CREATE else None)
    else:
        assert call.file > 0, f"only files get other names: {call}"
        names[call.other] = call.file
        if call.kind is Kind.RENAME and names.get(call.path) == call.file:
            del names[call.path]


def _records(log: bytes) -> Iterator[tuple[tuple[int, ...], str, str, bytes]]:
    at = 0
    while at < len(log):
        record = _RECORD.unpack_from(log, at)
        at += _RECORD.size
        parts = []
        for length in record[5:8]:
            parts.append(log[at : at + length])
            at += length
        yield record, os.fsdecode(parts[0]), os.fsdecode(parts[1]), parts[2]
