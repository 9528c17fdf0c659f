"""The files of one rank's shards in a shared directory: every call that a hung filesystem could hold up.

Threading: any thread, several at once. Directories are 0700, files 0600; a file is written under a draft's name, which
begins with a dot, and renamed into place when it is whole and synced. The root itself is never made here: an empty
mount point must not fill the disk it lies on.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import logging
import mmap
import os
import secrets
import stat
import time
from dataclasses import dataclass
from typing import Final

from nixl_offload.errors import TierError
from nixl_offload.tiers.free_space import spare_bytes
from nixl_offload.tiers.os_errors import tier_error
from nixl_offload.tiers.slab.file import fallocate
from nixl_offload.types import PAGE_BYTES

logger = logging.getLogger(__name__)

TOUCH_AFTER_S: Final = 3600.0
"""A file that is read gets a new modification time when the old one is older: what goes first when space is made is
what was not used for longest."""
KEPT_TOUCH_S: Final = 30.0
"""Likewise, on a local drive: it may be full, and evict, within minutes, and a new time costs it microseconds."""
_MAKE_DIRECTORY_ATTEMPTS: Final = 8
"""A directory that was made for a file may be removed, empty, before the file is in it."""
_CREATE: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
"""Not blocking: a FIFO in a shard's place would hold the thread for ever."""


@dataclass(slots=True, eq=False)
class Draft:
    """A file on its way to its name."""

    path: str
    final: str
    fd: int
    """For the mover, which closes it."""
    sync_fd: int
    """The same file, for ``publish``; closed by it or by ``discard``."""
    length_bytes: int
    direct: bool
    given_up: bool = False
    """Set by whoever no longer wants it to be published."""


@dataclass(frozen=True, slots=True)
class OpenedShard:
    """A stored file, opened for reading."""

    path: str
    fd: int
    direct: bool


class TreeFiles:
    """Files below ``root``, named by ``tiers.shared.naming``. Everything raises TierError."""

    def __init__(
        self, root: str, *, direct_io: bool, touch_after_s: float = TOUCH_AFTER_S, kept_free: float = 0.0
    ) -> None:
        """``kept_free``: no file is created that would leave less than this share of the filesystem free."""
        self.root = root.rstrip("/") or "/"
        self._kept_free = kept_free
        self._direct: bool | None = None if direct_io else False
        """Whether O_DIRECT works here; None until it was tried."""
        self._touch_after_s = touch_after_s
        self._device: int | None = None
        # Machines that share the directory may share the pid.
        self._mark = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._numbers = itertools.count()

    def connect(self, directory: str) -> None:
        """Make ``directory``, a name below the root."""
        path = os.path.join(self.root, directory)
        try:
            self._make_directory(path)
        except OSError as error:
            raise tier_error(error, f"cannot make {path}") from error

    def create(self, name: str, length_bytes: int) -> Draft:
        """Create a draft of ``name`` with space for all its bytes. After a failure nothing is left of it."""
        final = os.path.join(self.root, name)
        directory, base = os.path.split(final)
        path = f"{directory}/.{base}.{self._mark}.{next(self._numbers)}.tmp"
        fd = -1
        try:
            if self._kept_free and spare_bytes(os.statvfs(self.root), self._kept_free) < length_bytes:
                raise TierError(
                    f"{self.root}: no more than the {self._kept_free:.0%} that stay free of its filesystem are left",
                    cause="full",
                )
            fd, direct = self._open(path, _CREATE, directory)
            _reserve(fd, length_bytes)
            direct = direct and self._direct_works(fd)
            return Draft(path, final, fd, os.dup(fd), length_bytes, direct)
        except BaseException as error:
            if fd >= 0:
                os.close(fd)
                with contextlib.suppress(OSError):
                    os.unlink(path)
            if isinstance(error, OSError):
                raise tier_error(error, f"cannot create {path}") from error
            raise

    def publish(self, draft: Draft) -> None:
        """Sync and rename, unless it was given up meanwhile. After a failure nothing is left of it."""
        try:
            os.fsync(draft.sync_fd)
            if draft.given_up:
                raise TierError(f"{draft.final} was given up before it was in place", cause="io")
            os.rename(draft.path, draft.final)
        except BaseException as error:
            self.discard(draft)
            if isinstance(error, OSError):
                raise tier_error(error, f"cannot put {draft.final} in place") from error
            raise
        _close(draft)

    def discard(self, draft: Draft) -> None:
        """Remove a draft; the mover's descriptor is the mover's to close. Never raises OSError."""
        _close(draft)
        with contextlib.suppress(OSError):
            os.unlink(draft.path)

    def discard_unused(self, draft: Draft) -> None:
        """Remove a draft that no mover has seen."""
        os.close(draft.fd)
        self.discard(draft)

    def discard_opened(self, shard: OpenedShard) -> None:
        """Close a shard that no mover has seen."""
        os.close(shard.fd)

    def open(self, name: str, length_bytes: int) -> OpenedShard:
        """Open a stored file. One that is not there, or is no file of ``length_bytes``, is ``missing``."""
        path = os.path.join(self.root, name)
        fd = -1
        try:
            fd, direct = self._open(path, _READ, None)
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_size != length_bytes:
                raise TierError(f"{path} is no file of {length_bytes} bytes", cause="missing")
            # io_uring answers EAGAIN for such files where the filesystem cannot do otherwise.
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_NONBLOCK)
            if time.time() - found.st_mtime > self._touch_after_s:
                with contextlib.suppress(OSError):  # a filesystem may be read-only for us
                    os.utime(fd)
            return OpenedShard(path, fd, direct and self._direct_works(fd))
        except BaseException as error:
            if fd >= 0:
                os.close(fd)
            if isinstance(error, OSError):
                if error.errno == errno.ELOOP:
                    raise TierError(f"{path} is a symbolic link", cause="missing") from error
                raise tier_error(error, f"cannot open {path}") from error
            raise

    def why(self, length_bytes: int) -> str:
        """Return the ``TierError.cause`` that would explain a failed write of ``length_bytes``."""
        try:
            space = os.statvfs(self.root)
        except OSError as error:
            return tier_error(error, "").cause
        if space.f_flag & os.ST_RDONLY:
            return "readonly"
        if spare_bytes(space, self._kept_free) < length_bytes:
            return "full"
        return "io"

    def _open(self, path: str, flags: int, make_directory: str | None) -> tuple[int, bool]:
        """Open with O_DIRECT unless that does not work here; where asked, make the directory if it is missing."""
        attempts = _MAKE_DIRECTORY_ATTEMPTS if make_directory is not None else 0
        while True:
            direct = self._direct is not False
            try:
                return os.open(path, flags | (os.O_DIRECT if direct else 0), 0o600), direct
            except FileNotFoundError:
                if make_directory is None or not attempts:
                    raise
                attempts -= 1
                self._make_directory(make_directory)
            except OSError as error:
                if not direct or error.errno != errno.EINVAL:
                    raise
                self._no_direct(error)
                with contextlib.suppress(OSError):  # some filesystems create before they refuse
                    if flags & os.O_EXCL:
                        os.unlink(path)

    def _direct_works(self, fd: int) -> bool:
        """Read one page, once: an open alone proves nothing. If that fails ``fd`` loses its O_DIRECT."""
        if self._direct is None:
            try:
                with mmap.mmap(-1, PAGE_BYTES) as page:
                    os.preadv(fd, [page], 0)
                self._direct = True
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._no_direct(error)
        if not self._direct:
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
        return bool(self._direct)

    def _no_direct(self, error: OSError) -> None:
        if self._direct is None:
            logger.warning(
                "%s: the filesystem cannot do direct I/O (%s); going on through the page cache",
                self.root,
                os.strerror(error.errno or 0),
            )
        self._direct = False

    def _make_directory(self, directory: str) -> None:
        """Make what is missing between the root and ``directory``."""
        device = os.stat(self.root).st_dev
        if self._device not in {None, device} and not os.listdir(self.root):
            raise TierError(
                f"{self.root} is empty, and on another filesystem than before: not mounted", cause="missing"
            )
        self._device = device
        path = self.root
        for part in os.path.relpath(directory, self.root).split("/"):
            path = os.path.join(path, part)
            with contextlib.suppress(FileExistsError, FileNotFoundError):
                os.mkdir(path, 0o700)


def _reserve(fd: int, length_bytes: int) -> None:
    """Give a new file its size, and real space where the filesystem can: it says "full" now, not halfway."""
    try:
        fallocate(fd, 0, 0, length_bytes)
    except OSError as error:
        if error.errno not in {errno.EOPNOTSUPP, errno.ENOSYS}:
            raise
        os.ftruncate(fd, length_bytes)


def _close(draft: Draft) -> None:
    if draft.sync_fd >= 0:
        fd, draft.sync_fd = draft.sync_fd, -1
        with contextlib.suppress(OSError):
            os.close(fd)
