"""One rank's slab on disk: one file, real space under every slot before it is written, and a cheap look at its health.

Threading: one owner, the engine's pump thread. Calls do metadata I/O (milliseconds; see ``ensure``), never payload.
Ownership: owns the file's descriptor. The directory's lock is the scheduler's (``directory.py``): here it is looked
at, so that a directory which another engine has taken is left alone.
The mover opens the same path by itself. A file that is deleted stays readable; nothing more is stored in it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import stat
from collections.abc import Generator
from pathlib import Path
from typing import Final

from nixl_offload.errors import LayoutError, TierError
from nixl_offload.stores.filesystem import REAL, Filesystem, spare_bytes, tier_error
from nixl_offload.tiers.lock import is_held_by
from nixl_offload.types import PAGE_BYTES

logger = logging.getLogger(__name__)

_ZEROS: Final = bytes(1 << 20)
ZEROS_STEP_BYTES: Final = 64 << 20
"""What is written at a time while the file grows by zeros; loads of the tier go on between."""


def rank_file_name(rank: int) -> str:
    """Return the name of a rank's slab within its namespace's directory."""
    return f"rank-{rank:05d}.slab"


def make_private_directory(directory: Path) -> None:
    """Make ``directory`` and its missing parents, each 0700 under any umask. Raises OSError."""
    missing = []
    while not directory.is_dir():
        missing.append(directory)
        directory = directory.parent
    for child in reversed(missing):
        child.mkdir(0o700, exist_ok=True)
        child.chmod(0o700)


def warn_of_others(directory: str) -> None:
    """Log a warning where others than this user may make, rename and remove files. Says nothing of one that is away."""
    with contextlib.suppress(OSError):
        status = os.stat(directory)
        mode = stat.S_IMODE(status.st_mode)
        if mode & (stat.S_IWGRP | stat.S_IWOTH):
            logger.warning(
                "%s: others than this server's user can write there (mode %04o), and change what models say: %s",
                directory,
                mode,
                "make it 0700" if may_chmod(status) else "set path to a directory below, which the server makes 0700",
            )


def may_chmod(status: os.stat_result) -> bool:
    """Whether this user may. A volume of Kubernetes with an fsGroup is root's, and its pod's user is not."""
    return os.geteuid() in (0, status.st_uid)


def require_lock(directory: Path, owner: str) -> None:
    """Raise TierError where ``owner`` has not locked the directory above ``directory``; ``locked``: another has.

    For processes on the machine of the engine's scheduler: without its lock the path leads elsewhere than the scheduler
    went, as to an empty mount point, or somebody has removed what was there.
    """
    lock = directory.parent / "lock"
    if not is_held_by(lock, owner):
        raise TierError(f"the engine's lock {lock} is gone: deleted, moved or not mounted", cause="missing")


class SlabFile:
    """The file behind ``[0, rank_bytes)`` of one rank. Make, then ``open``.

    ``direct_io`` asks for O_DIRECT; after ``open`` the attribute ``direct_io`` says whether the filesystem does it.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        rank_bytes: int,
        extent_bytes: int,
        *,
        direct_io: bool = True,
        owner: str = "",
        is_locked_here: bool = False,
        kept_free: float = 0.0,
        filesystem: Filesystem = REAL,
    ) -> None:
        """Remember the geometry, which is that of the allocator. Nothing is touched before ``open``.

        ``owner``: who may hold the lock of the directory above that of the file (``SlabPlace.owner``); "": anybody.
        ``is_locked_here``: nothing is made before it does (``SlabPlace.is_locked_here``). ``kept_free``: the file does
        not grow where less than this share of the filesystem would be left free.
        """
        self.path = Path(path)
        self.rank_bytes = rank_bytes
        self.extent_bytes = extent_bytes
        self.direct_io = False
        self._filesystem = filesystem
        self._kept_free = kept_free
        self._owner = owner
        self._wants_direct_io = direct_io
        self._is_known_buffered = self._is_known_slow = False
        """Whether the log says that the filesystem cannot do direct I/O, and that it cannot preallocate."""
        self._fd = -1
        self._identity = (0, 0)
        self._is_locked_here = is_locked_here
        self._backed = bytearray(-(-rank_bytes // extent_bytes))
        """By extent: 1 where it is known to have real space."""
        self._is_growing = False

    def open(self) -> None:
        """Open or create the file (0600, directories 0700). What is there stays, except beyond ``rank_bytes``.

        Raises TierError; ``locked``: the directory is another engine's, whose files are left as they are; ``missing``:
        the engine's lock must be there and is not, so nothing is made. After a failure the file is closed and ``open``
        may be tried again.
        """
        self.close()
        try:
            if self._is_locked_here:
                require_lock(self.path.parent, self._owner)
            else:
                self._check_lock()
            make_private_directory(self.path.parent)
            self._fd = self._filesystem.open(str(self.path), os.O_RDWR | os.O_CREAT)
            status = self._filesystem.stat(self._fd)
            if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
                raise TierError(f"{self.path} is no file, or has another name (a hard link); remove it", cause="io")
            self._check_lock()  # it may be in a directory that another engine has made meanwhile
            if stat.S_IMODE(status.st_mode) != 0o600:
                os.fchmod(self._fd, 0o600)
            if status.st_size > self.rank_bytes:
                self._filesystem.truncate(self._fd, self.rank_bytes)
            self._backed = bytearray(len(self._backed))
            self.direct_io = self._wants_direct_io and self._direct_io_works(status.st_size)
        except OSError as error:
            self.close()
            raise tier_error(error, f"cannot open the slab {self.path}") from error
        except TierError:
            self.close()
            raise
        self._identity = (status.st_dev, status.st_ino)

    def close(self) -> None:
        """Close the descriptor. Idempotent; the bytes stay."""
        if self._fd >= 0:
            self._filesystem.close(self._fd)
            self._fd = -1

    def ensure(self, offset: int, length_bytes: int) -> Generator[None, None, None]:
        """Put real space under ``[offset, offset + length_bytes)``, whole extents at a time, before it is written.

        Afterwards the file's size covers the range and a write into it cannot meet a full disk, except on filesystems
        that copy on write. Costs nothing for extents known to be backed, else one fallocate. Where the filesystem has
        none, the file grows by zeros to the end of the extent, ``ZEROS_STEP_BYTES`` between two yields.
        Raises LayoutError (outside the slab) and TierError; then the file is no longer than before.
        """
        end = offset + length_bytes
        if offset < 0 or length_bytes <= 0 or end > self.rank_bytes:
            raise LayoutError(f"[{offset}, {end}) is outside the slab's {self.rank_bytes} bytes")
        first, last = offset // self.extent_bytes, (end - 1) // self.extent_bytes
        while (extent := self._backed.find(0, first, last + 1)) >= 0:
            if self._is_growing:  # for another chunk; were this one to fail, it would cut off what that one has written
                yield
                continue
            self._is_growing = True
            try:
                yield from self._back(extent)
                self._backed[extent] = 1
            finally:
                self._is_growing = False

    def check(self) -> None:
        """Raise TierError where storing cannot work now. A full drive is no reason: what has space can be written.

        ``missing``: the path is gone, or leads to another file than the one opened. ``locked``: the directory is
        another engine's.
        """
        self._check_lock()
        try:
            probe = self._filesystem.open(str(self.path), os.O_RDWR)
            try:
                status = self._filesystem.stat(probe)
            finally:
                self._filesystem.close(probe)
        except OSError as error:
            raise tier_error(error, f"cannot use {self.path}") from error
        if self._fd < 0 or (status.st_dev, status.st_ino) != self._identity:
            raise TierError(f"{self.path} is another file than the one that was opened", cause="missing")

    def _back(self, extent: int) -> Generator[None, None, None]:
        """Preallocate one extent. Raises TierError, and leaves the file as long as it was."""
        start = extent * self.extent_bytes
        end = min(start + self.extent_bytes, self.rank_bytes)
        self.check()
        size = self._filesystem.stat(self._fd).st_size
        needed_bytes = end - max(start, size)
        try:
            if needed_bytes > 0 and spare_bytes(self._filesystem.space(self._fd), self._kept_free) < needed_bytes:
                raise OSError(errno.ENOSPC, "")  # rather than take a drive's last blocks from others
            try:
                self._filesystem.allocate(self._fd, end - start, start)
            except OSError as error:
                if error.errno not in {errno.EOPNOTSUPP, errno.ENOSYS}:
                    raise
                yield from self._write_zeros(size, end)
        except OSError as error:
            with contextlib.suppress(OSError):  # where nothing may be changed, nothing was taken
                self._filesystem.truncate(self._fd, size)
            kept = f" and leave {self._kept_free:.0%} of the drive free" if self._kept_free else ""
            raise tier_error(error, f"cannot reserve {needed_bytes} bytes in {self.path}{kept}") from error

    def _write_zeros(self, size: int, end: int) -> Generator[None, None, None]:
        """Grow the file to ``end``. What lies below its ``size`` was written once. Raises OSError."""
        if not self._is_known_slow:
            self._is_known_slow = True
            logger.warning(
                "%s: this filesystem cannot preallocate; the file grows by zeros, which costs time", self.path
            )
        while size < end:
            step_end = min(size + ZEROS_STEP_BYTES, end)
            while size < step_end:
                size += self._filesystem.write(self._fd, memoryview(_ZEROS)[: step_end - size], size)
            yield

    def _check_lock(self) -> None:
        """Raise TierError where another engine has locked the directory."""
        is_held_by(self.path.parent.parent / "lock", self._owner)

    def _direct_io_works(self, size: int) -> bool:
        """Read one page with O_DIRECT, for an open alone proves nothing. A fresh file gets it written so before."""
        fd = -1
        try:
            fd = self._filesystem.open(str(self.path), os.O_RDWR | os.O_DIRECT)
            with mmap.mmap(-1, PAGE_BYTES) as page:
                if not size:
                    try:
                        self._filesystem.write(fd, page, 0)
                    except OSError as error:
                        if error.errno == errno.EINVAL:
                            raise
                        # Else the disk is full, say: then the read has to do.
                self._filesystem.read(fd, page, 0)
        except OSError as error:
            if not self._is_known_buffered:
                self._is_known_buffered = True
                why = os.strerror(error.errno or 0)
                logger.warning(
                    "%s: the filesystem cannot do direct I/O (%s); going on through the page cache", self.path, why
                )
            return False
        finally:
            if fd >= 0:
                self._filesystem.close(fd)
        return True
