"""A shared directory as a store. Names are relative paths. A file is written as a draft, synced, and then renamed.

Threading: several threads at once. A filesystem that hangs blocks the calling thread: the kernel offers no deadline.
Directories are 0700, files 0600. Files whose names begin with a dot are never listed and never read; drafts have such
names. Symbolic links in place of files or listed directories are not followed. A root that vanishes is not made again:
if its filesystem is unmounted, the disk below must not be filled.
"""

from __future__ import annotations

import errno
import itertools
import logging
import math
import mmap
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

from nixl_offload.errors import StoreError
from nixl_offload.stores.base import ObjectInfo, Store
from nixl_offload.stores.filesystem import REAL, Filesystem, cause_of, spare_bytes, words_of, write_all
from nixl_offload.types import PAGE_BYTES

logger = logging.getLogger(__name__)

DRAFT: Final = re.compile(r"\.(.+)\.[0-9]+-[0-9a-f]+\.[0-9]+\.tmp")
"""A draft's name: the file's final name, the writer's mark, a number."""
_CREATE: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL
_READ: Final = os.O_RDONLY | os.O_NONBLOCK
"""O_NONBLOCK: a FIFO in place of a file would block the thread for ever."""
_ABSENT: Final = (FileNotFoundError, NotADirectoryError)
_MAKE_DIRECTORY_ATTEMPTS: Final = 8
"""Another server may remove a new directory while it is empty; then it is made again."""


@dataclass(slots=True, eq=False)
class OpenFile:
    """An open file. The caller closes ``fd``."""

    path: str
    fd: int
    size_bytes: int
    direct: bool
    """Whether it was opened with O_DIRECT."""


@dataclass(slots=True, eq=False)
class Draft(OpenFile):
    """A new file under a temporary name."""

    final: str
    sync_fd: int
    """A second descriptor, closed by ``publish`` and ``discard``."""
    is_unwanted: bool = False
    """Set by a writer that no longer waits for ``publish``."""


class TreeFiles:
    """Creates, publishes and opens files by name. Raises only StoreError.

    After a failure, a name leads to a whole file or to none, and no draft is left.
    """

    def __init__(
        self,
        root: str,
        *,
        filesystem: Filesystem = REAL,
        direct_io: bool = False,
        touch_after_s: float = math.inf,
        kept_free: float = 0.0,
    ) -> None:
        """``touch_after_s``: opening a file that is older than this renews its modification time. ``kept_free``: the
        share of the filesystem that ``create`` leaves free.
        """
        self.root = root.rstrip("/") or "/"
        self.filesystem = filesystem
        self._direct: bool | None = None if direct_io else False
        """Whether O_DIRECT works here; None until tried."""
        self._touch_after_s = touch_after_s
        self._kept_free = kept_free
        self._device: int | None = None
        # Processes on different machines may have the same pid.
        self._mark = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._numbers = itertools.count()

    def path(self, name: str) -> str:
        """Return a file's path. A name that could lead elsewhere is a bug in the caller, and raises StoreError."""
        if "\0" in name or any(not part or part.startswith(".") for part in name.split("/")):
            text = f"{self.root}: {name!r} is not a name: no empty part, none that begins with a dot"
            raise StoreError(text, cause="io")
        return os.path.join(self.root, name)

    def create(self, name: str, length_bytes: int) -> Draft:
        """Create a draft, and reserve space for all its bytes if the filesystem can."""
        final = self.path(name)
        directory, base = os.path.split(final)
        path, fd = f"{directory}/.{base}.{self._mark}.{next(self._numbers)}.tmp", -1
        with self.translating(f"create {name}"):
            try:
                if self._kept_free and spare_bytes(self.filesystem.space(self.root), self._kept_free) < length_bytes:
                    text = f"no more than the {self._kept_free:.0%} that stay free of its filesystem are left"
                    raise StoreError(f"{self.root}: {text}", cause="full")
                fd, direct = self._open(path, _CREATE, directory)
                # A full disk shows now, before a write.
                if length_bytes and not self.filesystem.allocate(fd, length_bytes):
                    self.filesystem.truncate(fd, length_bytes)
                direct = direct and self._direct_works(fd)
                return Draft(path, fd, length_bytes, direct, final, os.dup(fd))
            except BaseException:
                if fd >= 0:
                    self.filesystem.close(fd)
                    self._unlink(path)
                raise

    def publish(self, draft: Draft) -> None:
        """Sync a draft and rename it into place, unless it has become unwanted."""
        try:
            with self.translating(f"put {draft.final} in place"):
                self.filesystem.sync(draft.sync_fd)
                if draft.is_unwanted:
                    raise StoreError(f"{draft.final} was given up before it was in place", cause="io")
                self.filesystem.rename(draft.path, draft.final)
        except BaseException:
            self.discard(draft)
            raise
        self._close_sync(draft)

    def discard(self, draft: Draft) -> None:
        """Remove a draft; its ``fd`` stays open. Never raises."""
        self._close_sync(draft)
        self._unlink(draft.path)

    def abandon(self, file: OpenFile) -> None:
        """Close a file that nobody uses; remove it if it is a draft."""
        self.filesystem.close(file.fd)
        if isinstance(file, Draft):
            self.discard(file)

    def open(self, name: str, length_bytes: int | None = None) -> OpenFile:
        """Open a file. If it does not exist, or has not ``length_bytes``, the cause is ``missing``."""
        path, fd = self.path(name), -1
        with self.translating(f"open {name}"):
            try:
                fd, direct = self._open(path, _READ, None)
                found = self.filesystem.stat(fd)
                if not stat.S_ISREG(found.st_mode) or length_bytes not in (None, found.st_size):
                    wanted = "file" if length_bytes is None else f"file of {length_bytes} bytes"
                    raise StoreError(f"{path} is no {wanted}", cause="missing")
                # With O_NONBLOCK, io_uring may return EAGAIN if the filesystem has to block.
                self.filesystem.clear_flag(fd, os.O_NONBLOCK)
                if time.time() - found.st_mtime > self._touch_after_s:
                    with suppress(OSError):  # we may have no right to write
                        self.filesystem.touch(fd)
                return OpenFile(path, fd, found.st_size, direct and self._direct_works(fd))
            except BaseException as error:
                if fd >= 0:
                    self.filesystem.close(fd)
                if isinstance(error, OSError) and error.errno == errno.ELOOP:
                    raise StoreError(f"{path} is a symbolic link", cause="missing") from error
                raise

    def read_into(self, name: str, offset: int, memory: memoryview) -> None:
        """Fill ``memory`` as ``Store.read_into``; with O_DIRECT only if ``direct_io`` was asked for and can do it."""
        memory, done = memory.cast("B"), 0
        opened = self.open(name)
        there_bytes = opened.size_bytes - offset
        try:
            with self.translating(f"read {name}"):
                while done < memory.nbytes <= there_bytes:
                    try:
                        got = self.filesystem.read(opened.fd, memory[done:], offset + done)
                    except OSError as error:
                        if not opened.direct or error.errno != errno.EINVAL:
                            raise
                        opened.direct = False  # the range or the memory is not aligned
                        self.filesystem.clear_flag(opened.fd, os.O_DIRECT)
                        continue
                    done += got
                    if not got:  # the file was truncated meanwhile
                        there_bytes = done
        finally:
            self.filesystem.close(opened.fd)
        if there_bytes < memory.nbytes:
            text = f"{memory.nbytes} bytes asked for at offset {offset}, there are {max(0, there_bytes)}"
            raise StoreError(f"{self.root}: read {name}: {text}", cause="short")

    def require_root(self, doing: str) -> os.stat_result:
        """Return the root's status. Raises ``unreachable`` if the root is gone: its files may still exist."""
        try:
            return self.filesystem.stat(self.root, follow=True)
        except OSError as error:
            text = f"{self.root}: cannot {doing}: the directory is not there ({words_of(error)}); unmounted?"
            raise StoreError(text, cause="unreachable") from error

    def require_mounted(self, doing: str) -> None:
        """Raise ``unreachable`` if the root is gone, or is empty and on another filesystem than before (unmounted)."""
        device = self.require_root(doing).st_dev
        with self.translating(doing):
            if self._device not in {None, device} and not self.filesystem.list(self.root):
                text = f"{self.root} is empty, and on another filesystem than before: not mounted"
                raise StoreError(text, cause="unreachable")
        self._device = device

    def make_directory(self, directory: str) -> None:
        """Make ``directory``, a path below the root, and its missing parents."""
        self.require_mounted(f"make {directory}")
        path = self.root
        with self.translating(f"make {directory}"):
            for part in os.path.relpath(directory, self.root).split("/"):
                path = os.path.join(path, part)
                with suppress(FileExistsError, FileNotFoundError):
                    self.filesystem.make_directory(path)

    @contextmanager
    def translating(self, doing: str) -> Iterator[None]:
        """Translate OSError to StoreError. The cause is ``missing`` only if the root exists."""
        try:
            yield
        except OSError as error:
            cause = cause_of(error.errno)
            if cause == "missing":
                self.require_root(doing)
            raise StoreError(f"{self.root}: cannot {doing}: {words_of(error)}", cause=cause) from error

    def _open(self, path: str, flags: int, make_directory: str | None) -> tuple[int, bool]:
        """Open with O_DIRECT if that works here; make the directory if it is missing."""
        attempts = _MAKE_DIRECTORY_ATTEMPTS if make_directory is not None else 0
        while True:
            direct = self._direct is not False
            try:
                return self.filesystem.open(path, flags | (os.O_DIRECT if direct else 0)), direct
            except FileNotFoundError:
                if make_directory is None or not attempts:
                    raise
                attempts -= 1
                self.make_directory(make_directory)
            except OSError as error:
                if not direct or error.errno != errno.EINVAL:
                    raise
                self._note_buffered(error)
                if flags & os.O_EXCL:
                    self._unlink(path)  # some filesystems create before they refuse

    def _direct_works(self, fd: int) -> bool:
        """Test O_DIRECT once by reading a page, because an open alone proves nothing. If it fails, clear the flag."""
        if self._direct is None:
            try:
                with mmap.mmap(-1, PAGE_BYTES) as page:
                    self.filesystem.read(fd, page, 0)
                self._direct = True
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._note_buffered(error)
        if not self._direct:
            self.filesystem.clear_flag(fd, os.O_DIRECT)
        return bool(self._direct)

    def _note_buffered(self, error: OSError) -> None:
        is_news, self._direct = self._direct is None, False  # set before logging, so that other threads do not log
        if is_news:
            logger.warning(
                "%s: the filesystem cannot do direct I/O (%s); going on through the page cache",
                self.root,
                words_of(error),
            )

    def _unlink(self, path: str) -> None:
        with suppress(OSError):
            self.filesystem.unlink(path)

    def _close_sync(self, draft: Draft) -> None:
        if draft.sync_fd >= 0:
            fd, draft.sync_fd = draft.sync_fd, -1
            with suppress(OSError):
                self.filesystem.close(fd)


class TreeStore(TreeFiles, Store):
    """Files below one directory. It is made at the start if missing; if it vanishes later, it is ``unreachable``."""

    name = "tree"

    def __init__(self, directory: str, filesystem: Filesystem = REAL) -> None:
        """``directory``: an absolute path. Raises StoreError if it is missing and cannot be made."""
        super().__init__(directory, filesystem=filesystem)
        self.where = self.root
        with self.translating("make the directory"):
            os.makedirs(self.root, mode=0o700, exist_ok=True)

    def head(self, name: str) -> ObjectInfo | None:
        path = self.path(name)
        with self.translating(f"look at {name}"), suppress(*_ABSENT):
            found = self.filesystem.stat(path)
            return ObjectInfo(name, found.st_size, found.st_mtime) if stat.S_ISREG(found.st_mode) else None
        self.require_root(f"look at {name}")
        return None

    def write(self, name: str, memory: memoryview) -> None:
        draft = self.create(name, memory.nbytes)
        try:
            with self.translating(f"write {name}"):
                write_all(self.filesystem, draft.fd, memory.cast("B"))
        except BaseException:
            self.abandon(draft)
            raise
        self.filesystem.close(draft.fd)
        self.publish(draft)

    def delete(self, names: Sequence[str]) -> None:
        paths, first = [self.path(name) for name in names], None
        for path in paths:
            try:
                with self.translating(f"delete {os.path.relpath(path, self.where)}"), suppress(*_ABSENT):
                    self.filesystem.unlink(path)
            except StoreError as error:
                first = first or error
        self._prune({path.rpartition("/")[0] for path in paths})
        if first is not None:
            raise first
        self.require_root("delete")

    def list(self, directory: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        self.require_root(f"list {directory}")
        with self.translating(f"list {directory}"):
            yield from self._walk("", os.fsencode(directory), os.fsencode(start_after))

    def remove_stale_drafts(self, older_than_s: float, is_ours: Callable[[str], bool] = lambda name: True) -> int:
        """Remove drafts of dead writers; return how many. Choose an age of hours, because slow writers have drafts too.

        ``is_ours`` gets a draft's final name: other programs may make files with such names.
        Raises the first StoreError, after all were tried.
        """
        self.require_root("remove stale drafts")
        removed, newest_s, first = 0, time.time() - older_than_s, None
        directories = [""]
        while directories:
            above = directories.pop()
            try:
                with self.translating("remove stale drafts"), suppress(*_ABSENT):  # gone meanwhile
                    entries = self.filesystem.list(os.path.join(self.where, above))
                    directories += [f"{above}{name}/" for name, is_directory in entries if is_directory]
                    for name, _ in entries:
                        draft, path = DRAFT.fullmatch(name), os.path.join(self.where, above, name)
                        if draft and is_ours(above + draft[1]):
                            with suppress(FileNotFoundError):
                                if self.filesystem.stat(path).st_mtime < newest_s:
                                    self.filesystem.unlink(path)
                                    removed += 1
            except StoreError as error:
                first = first or error
        if first is not None:
            raise first
        return removed

    def close(self) -> None:
        """Do nothing: no resource is held between calls."""

    def _walk(self, above: str, prefix: bytes, start_after: bytes) -> Iterator[ObjectInfo]:
        """Yield the files in the directory ``above`` (empty, or ending in a slash), in the order of whole names.

        A directory sorts as its name with a slash, because its files' names continue like that: "a-b" < "a/b".
        """
        hidden = "lost+found" if not above else ""  # in the root of a mount; only root may read it
        try:
            entries = self.filesystem.list(os.path.join(self.where, above))
        except _ABSENT:
            return  # removed while we list
        shown = (each for each in entries if not each[0].startswith(".") and each[0] != hidden)
        for name in sorted(os.fsencode(above + name + "/" * is_directory) for name, is_directory in shown):
            if name.endswith(b"/"):
                passed = name < start_after and not start_after.startswith(name)
                if not passed and (name.startswith(prefix) or prefix.startswith(name)):
                    yield from self._walk(os.fsdecode(name), prefix, start_after)
            elif name > start_after and name.startswith(prefix):
                with suppress(FileNotFoundError):
                    text = os.fsdecode(name)
                    found = self.filesystem.stat(os.path.join(self.where, text))
                    if stat.S_ISREG(found.st_mode):
                        yield ObjectInfo(text, found.st_size, found.st_mtime)

    def _prune(self, directories: set[str]) -> None:
        """Remove directories that are empty now, and parents that become empty, below the root."""
        for lowest in sorted(directories, reverse=True):
            directory = lowest
            with suppress(OSError):
                while len(directory) > len(self.where):
                    self.filesystem.remove_directory(directory)
                    directory = directory.rpartition("/")[0]
