"""The filesystem under tiers in files: the calls that they make to the operating system, and what each errno means.

Threading: any thread. A call blocks for as long as the storage takes to answer, which may be for ever.
What makes such calls takes a ``Filesystem``; tests pass one that fails, hangs or lies (``tests/hostile.py``).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import math
import mmap
import os
import resource
from typing import Final

from nixl_offload.errors import TierError

_CAUSES: Final = {
    errno.ENOSPC: "full",
    errno.EDQUOT: "full",
    errno.EFBIG: "full",
    errno.EROFS: "readonly",
    errno.ENOENT: "missing",
    errno.ENOTDIR: "missing",
    errno.ESTALE: "missing",
    errno.ENODEV: "missing",
    errno.ENXIO: "missing",
    errno.EACCES: "permission",
    errno.EPERM: "permission",
    errno.EMFILE: "files",
    errno.ENFILE: "files",
    errno.ENOTCONN: "unreachable",
    errno.EHOSTDOWN: "unreachable",
    errno.EHOSTUNREACH: "unreachable",
    errno.ENETUNREACH: "unreachable",
    errno.ECONNREFUSED: "unreachable",
    errno.ETIMEDOUT: "unreachable",
}
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_libc.fallocate.restype = ctypes.c_int


class Filesystem:
    """One system call a method. Each raises OSError. Symbolic links are not followed unless it says so."""

    def open(self, path: str, flags: int) -> int:
        """Return a descriptor; a new file is 0600."""
        return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)

    def close(self, fd: int) -> None:
        """Close a descriptor."""
        os.close(fd)

    def read(self, fd: int, memory: memoryview | mmap.mmap, offset: int) -> int:
        """Read at ``offset``. Returns the bytes read; 0 at the end of the file."""
        return os.preadv(fd, [memory], offset)

    def write(self, fd: int, memory: memoryview | mmap.mmap, offset: int) -> int:
        """Write at ``offset``. Returns the bytes written."""
        return os.pwrite(fd, memory, offset)

    def allocate(self, fd: int, length_bytes: int, offset: int = 0) -> None:
        """Put real space under a range of a file, and make the file as long. Raises EOPNOTSUPP: it cannot."""
        fallocate(fd, 0, offset, length_bytes)

    def truncate(self, fd: int, length_bytes: int) -> None:
        """Give a file this size."""
        os.ftruncate(fd, length_bytes)

    def sync(self, fd: int) -> None:
        """Return when the storage has all that was written."""
        os.fsync(fd)

    def clear_flag(self, fd: int, flag: int) -> None:
        """Take a flag such as O_DIRECT from an open file."""
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~flag)

    def stat(self, target: str | int, *, follow: bool = False) -> os.stat_result:
        """Look at a path or a descriptor. ``follow``: symbolic links."""
        return os.fstat(target) if isinstance(target, int) else os.stat(target, follow_symlinks=follow)

    def space(self, target: str | int) -> os.statvfs_result:
        """Return how much the filesystem of a path or a descriptor has, and what is free of it."""
        return os.statvfs(target)

    def list(self, directory: str) -> list[tuple[str, bool]]:
        """Return what is in a directory, in any order: names, and which of them are directories."""
        with os.scandir(directory) as entries:
            return [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]

    def touch(self, target: str | int) -> None:
        """Make a file as young as if it were written now, by the clock of its storage."""
        os.utime(target) if isinstance(target, int) else os.utime(target, follow_symlinks=False)

    def make_directory(self, path: str) -> None:
        """Make a directory, 0700. Those above it must be there."""
        os.mkdir(path, 0o700)

    def remove_directory(self, path: str) -> None:
        """Remove an empty directory."""
        os.rmdir(path)

    def rename(self, source: str, target: str) -> None:
        """Give a file another name, in place of what had it."""
        os.rename(source, target)

    def unlink(self, path: str) -> None:
        """Remove a file."""
        os.unlink(path)


REAL: Final = Filesystem()


def fallocate(fd: int, mode: int, offset: int, length_bytes: int) -> None:
    """Make the system call itself: glibc's posix_fallocate would emulate it by touching every block, over data too."""
    while _libc.fallocate(fd, mode, offset, length_bytes) != 0:
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))


def cause_of(error_number: int | None) -> str:
    """Return the ``cause`` of errors that an errno stands for; ``io`` for all that has no word of its own."""
    return _CAUSES.get(error_number or 0, "io")


def words_of(error: OSError) -> str:
    """Return what the operating system says, and the limit where a process has reached its own."""
    words = os.strerror(error.errno) if error.errno else str(error)
    if error.errno == errno.EMFILE:
        words += f" (RLIMIT_NOFILE, ulimit -n: {resource.getrlimit(resource.RLIMIT_NOFILE)[0]})"
    return words


def tier_error(error: OSError, doing: str) -> TierError:
    """Translate ``error``; ``doing`` says in a few words what failed ("cannot open /x"). Raise it ``from error``."""
    return TierError(f"{doing}: {words_of(error)}", cause=cause_of(error.errno))


def spare_bytes(space: os.statvfs_result, kept_free: float) -> float:
    """Return the bytes that may be taken so that ``kept_free`` stays free; infinite if the filesystem does not tell."""
    return (space.f_bavail - kept_free * space.f_blocks) * space.f_frsize if space.f_blocks else math.inf


def spare_files(space: os.statvfs_result, kept_free: float) -> float:
    """Return the same of files, which end where the inodes do."""
    return space.f_favail - kept_free * space.f_files if space.f_files else math.inf
