"""The filesystem calls of tiers in files, and the cause that each errno stands for.

Threading: any thread. A call blocks until the storage answers, which may be for ever.
Callers take a ``Filesystem`` argument; tests pass one that fails, hangs or lies (``tests/hostile.py``).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import math
import mmap
import os
import resource
import stat
from collections.abc import Iterator
from pathlib import Path
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
    """One system call per method. Each raises OSError. Symbolic links are followed only with ``follow``."""

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

    def allocate(self, fd: int, length_bytes: int, offset: int = 0) -> bool:
        """Allocate space for a range of a file, and grow the file to it. Return False if the filesystem cannot."""
        try:
            fallocate(fd, 0, offset, length_bytes)
        except OSError as error:
            if error.errno not in {errno.EOPNOTSUPP, errno.ENOSYS}:
                raise
            return False
        return True

    def truncate(self, fd: int, length_bytes: int) -> None:
        """Set a file's size."""
        os.ftruncate(fd, length_bytes)

    def sync(self, fd: int) -> None:
        """Wait until the storage has all data of a file."""
        os.fsync(fd)

    def clear_flag(self, fd: int, flag: int) -> None:
        """Clear a flag such as O_DIRECT of an open file."""
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~flag)

    def stat(self, target: str | int, *, follow: bool = False) -> os.stat_result:
        """Return the status of a path or a descriptor. ``follow``: follow symbolic links."""
        return os.fstat(target) if isinstance(target, int) else os.stat(target, follow_symlinks=follow)

    def space(self, target: str | int) -> os.statvfs_result:
        """Return the size and free space of the filesystem of a path or a descriptor."""
        return os.statvfs(target)

    def list(self, directory: str) -> list[tuple[str, bool]]:
        """Return the entries of a directory, in any order: name, and whether it is a directory."""
        with os.scandir(directory) as entries:
            return [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]

    def touch(self, target: str | int) -> None:
        """Set a file's modification time to now, by the clock of its storage."""
        os.utime(target) if isinstance(target, int) else os.utime(target, follow_symlinks=False)

    def make_directory(self, path: str) -> None:
        """Make a directory, 0700. Its parent must exist."""
        os.mkdir(path, 0o700)

    def remove_directory(self, path: str) -> None:
        """Remove an empty directory."""
        os.rmdir(path)

    def rename(self, source: str, target: str) -> None:
        """Rename a file, replacing any file at ``target``."""
        os.rename(source, target)

    def unlink(self, path: str) -> None:
        """Remove a file."""
        os.unlink(path)


REAL: Final = Filesystem()


def open_own(filesystem: Filesystem, path: Path) -> tuple[int, os.stat_result]:
    """Open a file of our own to read and write it, made if it is missing; return its descriptor and status. It is 0600.

    Raises OSError, and TierError for anything but a file with one name.
    """
    fd = filesystem.open(str(path), os.O_RDWR | os.O_CREAT)
    try:
        status = filesystem.stat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
            raise TierError(f"{path} is no file, or has another name (a hard link); remove it", cause="io")
        if stat.S_IMODE(status.st_mode) != 0o600:
            os.fchmod(fd, 0o600)
    except BaseException:
        filesystem.close(fd)
        raise
    return fd, status


def write_all(filesystem: Filesystem, fd: int, content: memoryview, offset: int = 0) -> None:
    """Write ``content``, which is bytes, at ``offset``. Raises OSError; a part may be written then."""
    done = 0
    while done < content.nbytes:
        done += filesystem.write(fd, content[done:], offset + done)


def replace_file(filesystem: Filesystem, path: Path, content: bytes) -> None:
    """Write a file anew, 0600, and sync it. Readers see the old content or the new. Raises OSError.

    The draft has the suffix ``.tmp``. Anything of its name, or of the file's, is replaced.
    """
    draft = str(path.with_suffix(".tmp"))
    with contextlib.suppress(FileNotFoundError):
        filesystem.unlink(draft)
    fd = filesystem.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        os.fchmod(fd, 0o600)  # under any umask
        write_all(filesystem, fd, memoryview(content))
        filesystem.sync(fd)
    finally:
        filesystem.close(fd)
    filesystem.rename(draft, str(path))
    directory = filesystem.open(str(path.parent), os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some filesystems cannot sync directories
            filesystem.sync(directory)
    finally:
        filesystem.close(directory)


def children(directory: Path) -> list[tuple[Path, bool]]:
    """Return what a directory holds, in any order, and whether each is a directory and no link; empty if it is missing.
    Raises OSError.
    """
    try:
        return [(directory / name, is_directory) for name, is_directory in REAL.list(str(directory))]
    except FileNotFoundError:
        return []


def walk(path: Path) -> Iterator[os.stat_result]:
    """Yield the status of a file, or of a directory and all below it, except what vanishes meanwhile. Links are not
    followed. Raises OSError.
    """
    try:
        status = path.stat(follow_symlinks=False)
    except FileNotFoundError:
        return
    yield status
    if stat.S_ISDIR(status.st_mode):
        for child, _ in children(path):
            yield from walk(child)


def tree_bytes(path: Path) -> int:
    """Return the allocated bytes of all that ``walk`` finds. Raises OSError."""
    return sum(status.st_blocks * 512 for status in walk(path))


def fallocate(fd: int, mode: int, offset: int, length_bytes: int) -> None:
    """Call fallocate itself. glibc's posix_fallocate may emulate it by writing to every block, even over data."""
    while _libc.fallocate(fd, mode, offset, length_bytes) != 0:
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))


def cause_of(error_number: int | None) -> str:
    """Return an error's ``cause`` for an errno; ``io`` if it has no cause of its own."""
    return _CAUSES.get(error_number or 0, "io")


def words_of(error: OSError) -> str:
    """Return the operating system's message, with the limit if the process has too many open files."""
    words = os.strerror(error.errno) if error.errno else str(error)
    if error.errno == errno.EMFILE:
        words += f" (RLIMIT_NOFILE, ulimit -n: {resource.getrlimit(resource.RLIMIT_NOFILE)[0]})"
    return words


def tier_error(error: OSError, doing: str) -> TierError:
    """Translate ``error``; ``doing`` says what failed ("cannot open /x"). Callers raise the result ``from error``."""
    return TierError(f"{doing}: {words_of(error)}", cause=cause_of(error.errno))


def spare_bytes(space: os.statvfs_result, kept_free: float) -> float:
    """Return the free bytes above the share ``kept_free``; infinite if the filesystem does not report its size."""
    return (space.f_bavail - kept_free * space.f_blocks) * space.f_frsize if space.f_blocks else math.inf


def spare_files(space: os.statvfs_result, kept_free: float) -> float:
    """Return the free inodes above the share ``kept_free``; infinite if the filesystem does not report them."""
    return space.f_favail - kept_free * space.f_files if space.f_files else math.inf
