"""Files below one directory, each written as a draft and renamed into place when it is whole and synced.

Threading: any thread, several at once; a filesystem that hangs holds the calling thread.
Directories are 0700, files 0600. Draft names begin with a dot. The root is never made here: an empty mount point must
not fill the disk below it.
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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

from nixl_offload.errors import StoreError
from nixl_offload.stores.filesystem import REAL, Filesystem, cause_of, spare_bytes, words_of
from nixl_offload.types import PAGE_BYTES

logger = logging.getLogger(__name__)

DRAFT: Final = re.compile(r"\.(.+)\.[0-9]+-[0-9a-f]+\.[0-9]+\.tmp")
"""The name that the file is to get, the writer's mark, a number."""
_CREATE: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL
_READ: Final = os.O_RDONLY | os.O_NONBLOCK
"""Not blocking: a FIFO in a file's place would hold the thread for ever."""
_MAKE_DIRECTORY_ATTEMPTS: Final = 8
"""A directory that was made for a file may be removed, empty, before the file is in it."""


@dataclass(slots=True, eq=False)
class OpenFile:
    """An open file. Whoever it is for closes ``fd``."""

    path: str
    fd: int
    size_bytes: int
    direct: bool
    """Whether it was opened with O_DIRECT."""


@dataclass(slots=True, eq=False)
class Draft(OpenFile):
    """A new file on the way to its name."""

    final: str
    sync_fd: int
    """The same file, for ``publish``, which closes it, as ``discard`` does."""
    is_unwanted: bool = False
    """Set by a writer that no longer waits for ``publish``."""


class TreeFiles:
    """Creates, publishes and opens files by name. Raises StoreError alone.

    After a failure still holds: a name leads to a whole file or to none, and no draft is left.
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
        """``touch_after_s``: a file that is opened and older gets a new modification time. ``kept_free``: nothing is
        created that would leave less than this share of the filesystem free.
        """
        self.root = root.rstrip("/") or "/"
        self.filesystem = filesystem
        self._direct: bool | None = None if direct_io else False
        """Whether O_DIRECT works here; None until it was tried."""
        self._touch_after_s = touch_after_s
        self._kept_free = kept_free
        self._device: int | None = None
        # Machines that share the directory may share the pid.
        self._mark = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._numbers = itertools.count()

    def path(self, name: str) -> str:
        """Return a file's path. Names come from digests; one that could lead elsewhere is a bug in the caller."""
        if "\0" in name or any(not part or part.startswith(".") for part in name.split("/")):
            text = f"{self.root}: {name!r} is not a name: no empty part, none that begins with a dot"
            raise StoreError(text, cause="io")
        return os.path.join(self.root, name)

    def create(self, name: str, length_bytes: int) -> Draft:
        """Create a draft with space for all its bytes, where the filesystem can reserve it."""
        final = self.path(name)
        directory, base = os.path.split(final)
        path, fd = f"{directory}/.{base}.{self._mark}.{next(self._numbers)}.tmp", -1
        with self.translating(f"create {name}"):
            try:
                if self._kept_free and spare_bytes(self.filesystem.space(self.root), self._kept_free) < length_bytes:
                    text = f"no more than the {self._kept_free:.0%} that stay free of its filesystem are left"
                    raise StoreError(f"{self.root}: {text}", cause="full")
                fd, direct = self._open(path, _CREATE, directory)
                self._allocate(fd, length_bytes)
                direct = direct and self._direct_works(fd)
                return Draft(path, fd, length_bytes, direct, final, os.dup(fd))
            except BaseException:
                if fd >= 0:
                    self.filesystem.close(fd)
                    self._unlink(path)
                raise

    def publish(self, draft: Draft) -> None:
        """Sync a draft and rename it into place, unless it is unwanted by now."""
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
        """Remove a draft, whose ``fd`` stays open. Never raises."""
        self._close_sync(draft)
        self._unlink(draft.path)

    def abandon(self, file: OpenFile) -> None:
        """Close a file that nobody has taken; remove it if it is a draft."""
        self.filesystem.close(file.fd)
        if isinstance(file, Draft):
            self.discard(file)

    def open(self, name: str, length_bytes: int | None = None) -> OpenFile:
        """Open a file. One that is not there, or is no file of ``length_bytes``, is ``missing``."""
        path, fd = self.path(name), -1
        with self.translating(f"open {name}"):
            try:
                fd, direct = self._open(path, _READ, None)
                found = self.filesystem.stat(fd)
                if not stat.S_ISREG(found.st_mode) or length_bytes not in (None, found.st_size):
                    wanted = "file" if length_bytes is None else f"file of {length_bytes} bytes"
                    raise StoreError(f"{path} is no {wanted}", cause="missing")
                # io_uring answers EAGAIN for such files where the filesystem cannot do otherwise.
                self.filesystem.clear_flag(fd, os.O_NONBLOCK)
                if time.time() - found.st_mtime > self._touch_after_s:
                    with suppress(OSError):  # a filesystem may be read-only for us
                        self.filesystem.touch(fd)
                return OpenFile(path, fd, found.st_size, direct and self._direct_works(fd))
            except BaseException as error:
                if fd >= 0:
                    self.filesystem.close(fd)
                if isinstance(error, OSError) and error.errno == errno.ELOOP:
                    raise StoreError(f"{path} is a symbolic link", cause="missing") from error
                raise

    def require_root(self, doing: str) -> os.stat_result:
        """Raise ``unreachable`` where the root is gone: then nothing can be said of what was in it."""
        try:
            return self.filesystem.stat(self.root, follow=True)
        except OSError as error:
            text = f"{self.root}: cannot {doing}: the directory is not there ({words_of(error)}); unmounted?"
            raise StoreError(text, cause="unreachable") from error

    def require_mounted(self, doing: str) -> None:
        """As ``require_root``, and where the root is empty and on another filesystem than before: not mounted."""
        device = self.require_root(doing).st_dev
        with self.translating(doing):
            if self._device not in {None, device} and not self.filesystem.list(self.root):
                text = f"{self.root} is empty, and on another filesystem than before: not mounted"
                raise StoreError(text, cause="unreachable")
        self._device = device

    def make_directory(self, directory: str) -> None:
        """Make what is missing between the root and ``directory``, a path."""
        self.require_mounted(f"make {directory}")
        path = self.root
        with self.translating(f"make {directory}"):
            for part in os.path.relpath(directory, self.root).split("/"):
                path = os.path.join(path, part)
                with suppress(FileExistsError, FileNotFoundError):
                    self.filesystem.make_directory(path)

    @contextmanager
    def translating(self, doing: str) -> Iterator[None]:
        """Raise StoreError in place of OSError. A file is ``missing`` only where the root is there."""
        try:
            yield
        except OSError as error:
            cause = cause_of(error.errno)
            if cause == "missing":
                self.require_root(doing)
            raise StoreError(f"{self.root}: cannot {doing}: {words_of(error)}", cause=cause) from error

    def _open(self, path: str, flags: int, make_directory: str | None) -> tuple[int, bool]:
        """Open with O_DIRECT unless that does not work here; make the directory where it is missing."""
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
        """Read one page, once: an open alone proves nothing. If that fails ``fd`` loses its O_DIRECT."""
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
        if self._direct is None:
            logger.warning(
                "%s: the filesystem cannot do direct I/O (%s); going on through the page cache",
                self.root,
                words_of(error),
            )
        self._direct = False

    def _allocate(self, fd: int, length_bytes: int) -> None:
        """Give a new file its size, and real space where the filesystem can: it says "full" now, not halfway."""
        try:
            if length_bytes:
                self.filesystem.allocate(fd, length_bytes)
        except OSError as error:
            if error.errno not in {errno.EOPNOTSUPP, errno.ENOSYS}:
                raise
            self.filesystem.truncate(fd, length_bytes)

    def _unlink(self, path: str) -> None:
        with suppress(OSError):
            self.filesystem.unlink(path)

    def _close_sync(self, draft: Draft) -> None:
        if draft.sync_fd >= 0:
            fd, draft.sync_fd = draft.sync_fd, -1
            with suppress(OSError):
                self.filesystem.close(fd)
