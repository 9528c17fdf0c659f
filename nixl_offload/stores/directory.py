"""A shared directory as a store: a name is a relative path, a file is renamed into place when it is whole and synced.

Threading: as ``base.Store``. A filesystem that hangs holds the calling thread: the kernel offers no deadline.
Directories are 0700, files 0600. Files whose names begin with a dot are drafts, never listed and never read. A symlink
in place of a file or of a listed directory is not followed.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from nixl_offload.errors import StoreError
from nixl_offload.stores.base import ObjectInfo, Store

_CAUSES: Final = {
    errno.ENOSPC: "full",
    errno.EDQUOT: "full",
    errno.EFBIG: "full",
    errno.EROFS: "readonly",
    errno.EACCES: "denied",
    errno.EPERM: "denied",
    errno.ENOENT: "missing",
    errno.ENOTDIR: "missing",
    errno.ESTALE: "unreachable",
    errno.ENOTCONN: "unreachable",
    errno.EHOSTDOWN: "unreachable",
    errno.EHOSTUNREACH: "unreachable",
    errno.ENETUNREACH: "unreachable",
    errno.ECONNREFUSED: "unreachable",
    errno.ETIMEDOUT: "timeout",
}
_ABSENT: Final = (FileNotFoundError, NotADirectoryError)
_DRAFT: Final = re.compile(r"\.(.+)\.[0-9]+-[0-9a-f]+\.[0-9]+\.tmp")
"""The name that the file is to get, the writer's mark, a number."""
_READ: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_CREATE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_MAKE_DIRECTORY_ATTEMPTS: Final = 8
"""A directory that was made for a file may be pruned, empty, before the file is in it."""


class TreeStore(Store):
    """Files below one directory, which is made when missing, once: one that vanishes later is ``unreachable``."""

    name = "tree"

    def __init__(self, directory: str) -> None:
        """``directory`` is absolute. Raises StoreError when it is not there and cannot be made."""
        self._root = directory.rstrip("/") or "/"
        self.where = self._root
        # Two machines may share the pid and the directory, so a draft's name has something of this store alone.
        self._mark = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._numbers = itertools.count()
        self._closed = False
        with self._translating("make the directory"):
            os.makedirs(self._root, mode=0o700, exist_ok=True)

    def __repr__(self) -> str:
        return f"TreeStore({self.where})"

    def head(self, name: str) -> ObjectInfo | None:
        path = self._path(name)
        with self._translating(f"look at {name}"), contextlib.suppress(*_ABSENT):
            found = os.stat(path, follow_symlinks=False)
            return ObjectInfo(name, found.st_size, found.st_mtime) if stat.S_ISREG(found.st_mode) else None
        self._check_root(f"look at {name}")
        return None

    def read_into(self, name: str, offset: int, memory: memoryview) -> None:
        path, memory, done = self._path(name), memory.cast("B"), 0
        with self._translating(f"read {name}"), contextlib.ExitStack() as opened:
            descriptor = os.open(path, _READ)
            opened.callback(os.close, descriptor)
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise StoreError(f"{self.where}: read {name}: not a file", cause="missing")
            there_bytes = found.st_size - offset
            while done < memory.nbytes <= there_bytes:
                got = os.preadv(descriptor, [memory[done:]], offset + done)
                done += got
                if not got:  # it was cut meanwhile
                    there_bytes = done
        if there_bytes < memory.nbytes:
            text = f"{memory.nbytes} bytes asked for at offset {offset}, there are {max(0, there_bytes)}"
            raise StoreError(f"{self.where}: read {name}: {text}", cause="short")

    def write(self, name: str, memory: memoryview) -> None:
        path, memory = self._path(name), memory.cast("B")
        directory, _, base = path.rpartition("/")
        draft = f"{directory}/.{base}.{self._mark}.{next(self._numbers)}.tmp"
        with self._translating(f"write {name}"), contextlib.ExitStack() as undo:
            with os.fdopen(self._create(draft, directory), "wb", buffering=0) as file:
                undo.callback(_unlink, draft)
                while memory.nbytes:
                    memory = memory[file.write(memory) :]
                os.fsync(file.fileno())
            os.rename(draft, path)
            undo.pop_all()

    def delete(self, names: Sequence[str]) -> None:
        paths = [self._path(name) for name in names]
        errors = [error for path in paths if (error := _unlink(path)) is not None]
        self._prune({path.rpartition("/")[0] for path in paths})
        if errors:
            with self._translating(f"delete {os.path.relpath(errors[0].filename, self._root)}"):
                raise errors[0]
        self._check_root("delete")

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        self._check_open()
        self._check_root(f"list {prefix}")
        with self._translating(f"list {prefix}"):
            yield from self._walk("", os.fsencode(prefix), os.fsencode(start_after))

    def refresh(self, name: str, size_bytes: int) -> bool:
        found = self.head(name)
        if found is None or found.size_bytes != size_bytes:
            return False
        with self._translating(f"refresh {name}"), contextlib.suppress(*_ABSENT):
            os.utime(self._path(name), follow_symlinks=False)  # without times: a file server takes its own clock
            return True
        self._check_root(f"refresh {name}")
        return False

    def remove_stale_drafts(self, older_than_s: float, is_ours: Callable[[str], bool] = lambda name: True) -> int:
        """Remove drafts of dead writers, return how many. Take hours: a slow writer has drafts, too.

        ``is_ours`` is asked of the name that a draft was to get: other programs make files that look like drafts.
        Raises StoreError after all were tried.
        """
        self._check_open()
        self._check_root("remove stale drafts")
        removed, newest_s = 0, time.time() - older_than_s
        errors: list[OSError] = []
        for directory, directories, files in os.walk(self._root, followlinks=False, onerror=errors.append):
            directories.sort()
            for file in files:
                path, draft = os.path.join(directory, file), _DRAFT.fullmatch(file)
                if draft is None or not is_ours(os.path.relpath(os.path.join(directory, draft[1]), self._root)):
                    continue
                try:
                    if os.stat(path, follow_symlinks=False).st_mtime < newest_s:
                        os.unlink(path)
                        removed += 1
                except OSError as error:
                    errors.append(error)
        for failed in errors:
            with self._translating("remove stale drafts"), contextlib.suppress(FileNotFoundError):  # gone meanwhile
                raise failed
        return removed

    def close(self) -> None:
        self._closed = True

    def _walk(self, above: str, prefix: bytes, start_after: bytes) -> Iterator[ObjectInfo]:
        """Yield what is in the directory ``above`` (empty, or ending in a slash), in the order of whole names.

        A directory sorts as its name and a slash, as its files' names go on so: "a-b" comes before "a/b".
        """
        try:
            with os.scandir(os.path.join(self._root, above)) as entries:
                hidden = "lost+found" if not above else ""  # of a mount point, and root's alone
                shown = [entry for entry in entries if not entry.name.startswith(".") and entry.name != hidden]
                order = sorted((os.fsencode(e.name) + b"/" * e.is_dir(follow_symlinks=False), e) for e in shown)
        except _ABSENT:
            return  # pruned while we walk
        base = os.fsencode(above)
        for last, entry in order:
            name = base + last
            if last.endswith(b"/"):
                passed = name < start_after and not start_after.startswith(name)
                if not passed and (name.startswith(prefix) or prefix.startswith(name)):
                    yield from self._walk(os.fsdecode(name), prefix, start_after)
            elif name > start_after and name.startswith(prefix):
                with contextlib.suppress(FileNotFoundError):
                    found = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(found.st_mode):
                        yield ObjectInfo(os.fsdecode(name), found.st_size, found.st_mtime)

    def _create(self, draft: str, directory: str) -> int:
        """Open a new file; make its directory where it is missing, but never the root."""
        for _ in range(_MAKE_DIRECTORY_ATTEMPTS):
            with contextlib.suppress(FileNotFoundError):
                return os.open(draft, _CREATE, 0o600)
            self._check_root("write")
            path = self._root
            for part in directory[len(self._root) :].strip("/").split("/"):
                path = f"{path}/{part}"
                with contextlib.suppress(FileExistsError, FileNotFoundError):
                    os.mkdir(path, 0o700)
        return os.open(draft, _CREATE, 0o600)

    def _prune(self, directories: set[str]) -> None:
        """Remove directories that are empty now, and those above that become so, up to the root."""
        for lowest in sorted(directories, reverse=True):
            directory = lowest
            with contextlib.suppress(OSError):
                while len(directory) > len(self._root):
                    os.rmdir(directory)
                    directory = directory.rpartition("/")[0]

    def _path(self, name: str) -> str:
        """Return the file's path. Names come from digests; one that could lead elsewhere is a bug in the caller."""
        self._check_open()
        if "\0" in name or any(not part or part.startswith(".") for part in name.split("/")):
            text = f"{self.where}: {name!r} is not a name: no empty part, none that begins with a dot"
            raise StoreError(text, cause="io")
        return f"{self._root}/{name}" if self._root != "/" else f"/{name}"

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError(f"{self.where}: the store is closed", cause="io")

    def _check_root(self, doing: str) -> None:
        """Raise ``unreachable`` when the directory itself is gone: then nothing can be said of what was in it."""
        try:
            os.stat(self._root)
        except OSError as error:
            why = os.strerror(error.errno or 0)
            text = f"{self.where}: cannot {doing}: the directory is not there ({why}); unmounted?"
            raise StoreError(text, cause="unreachable") from error

    @contextlib.contextmanager
    def _translating(self, doing: str) -> Iterator[None]:
        """Raise StoreError in place of OSError. A file is ``missing`` only where the root is there."""
        try:
            yield
        except OSError as error:
            cause = _CAUSES.get(error.errno or 0, "io")
            if cause == "missing":
                self._check_root(doing)
            why = os.strerror(error.errno) if error.errno else str(error)
            raise StoreError(f"{self.where}: cannot {doing}: {why}", cause=cause) from error


def _unlink(path: str) -> OSError | None:
    """Remove a file, return what went wrong; an absent one is fine."""
    try:
        with contextlib.suppress(*_ABSENT):
            os.unlink(path)
    except OSError as error:
        return error
    return None
