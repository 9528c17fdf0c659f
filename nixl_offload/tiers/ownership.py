"""Ownership of a tier's directory: private, apart from other tiers, locked by one engine. Also the share of its drive
that stays free.

The lock is an open file description lock (``F_OFD_SETLK``). The kernel drops it when its holder dies. Unlike other
record locks it survives closing another descriptor of the file; unlike ``flock`` it can be examined without being
taken. The lock file is not removed on release: that would race with other engines.

A tier that fills a drive stops other programs on it. On a Kubernetes node it ends the pod: the kubelet evicts pods if
less than 10 % of the node's filesystem is free, 15 % of the image filesystem, or 5 % of the inodes.

Threading: any thread; a ``DirectoryLock`` has one owner. Calls last until the storage answers.
Ownership: a lock belongs to the process that took it, and a forked child does not keep it alive.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import secrets
import socket
import stat
import struct
import time
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from nixl_offload.config import DirectoryConfig, SharedDirConfig, TierConfig
from nixl_offload.errors import StoreError, TierError
from nixl_offload.hardware.machine import LOCAL, find_mount
from nixl_offload.stores.filesystem import REAL, Filesystem, open_own, tier_error

logger = logging.getLogger(__name__)

SHARED_DRIVE: Final = 0.10
"""Default share of the filesystem that stays free if other programs use the drive."""
EMPTY_DIR: Final = 0.20
"""The same for an emptyDir, which lies on the filesystem that the kubelet watches."""
_GET_LOCK, _SET_LOCK = 36, 37
"""``F_OFD_GETLK`` and ``F_OFD_SETLK`` of Linux. A Python built with an old glibc has no names for them."""
_HINT_MAX_BYTES = 4096
_held: weakref.WeakSet[DirectoryLock] = weakref.WeakSet()


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
    """Log a warning if other users may write to ``directory``. Does nothing if it is missing."""
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
    """Whether this user may change the mode. A Kubernetes volume with an fsGroup belongs to root, not to the pod."""
    return os.geteuid() in (0, status.st_uid)


def require_directory(path: Path) -> None:
    """Raise StoreError unless ``path`` is a directory. Also raises it if the path cannot be examined."""
    try:
        if path.is_dir():
            return
        is_there = path.exists()
    except OSError as error:
        cause = "denied" if error.errno in (errno.EACCES, errno.EPERM) else "io"
        raise StoreError(f"{path}: cannot be looked at: {os.strerror(error.errno or 0)}", cause=cause) from error
    if is_there:
        raise StoreError(f"{path}: is no directory; say another path in the config", cause="unreachable")
    cause = "missing" if path.parent.is_dir() else "unreachable"
    first = " The first server makes it." if cause == "missing" else ""
    raise StoreError(f"{path}: there is no such directory; is the filesystem mounted?{first}", cause=cause)


def require_apart(config: TierConfig | DirectoryConfig, nearer: Iterable[TierConfig | DirectoryConfig]) -> None:
    """Raise TierError if the tier's directory is that of a nearer tier, or one lies in the other, after following
    symbolic links. A slab counts everything under its directory as its own.

    Blocks until the storage of both directories answers.
    """
    if not isinstance(config, DirectoryConfig):
        return
    for other in nearer:
        if isinstance(other, DirectoryConfig):
            paths = [os.path.realpath(path) for path in (config.path, other.path)]
            if os.path.commonpath(paths) in paths:
                raise TierError(
                    f"{config.path} and the directory of another tier, {other.path}, are {paths[0]} and {paths[1]}: "
                    "the same, or one in the other; allowed: directories side by side",
                    cause="locked",
                )


def kept_free(config: DirectoryConfig, root: str = "/") -> float:
    """Return the share of its filesystem that a tier leaves free. ``root`` stands for ``/`` in tests.

    The default is 0 on a network filesystem, and on a drive whose root directory holds nothing else. A mount that shows
    only a part of a filesystem (an emptyDir, a hostPath) counts as shared.
    """
    if config.keep_free_percent is not None:
        return config.keep_free_percent / 100
    mount = find_mount(config.path, root)
    if mount is None or mount.kind not in LOCAL:
        return 0.0
    if mount.top != "/":
        return EMPTY_DIR if "/kubernetes.io~empty-dir/" in mount.top else SHARED_DRIVE
    inside = os.path.relpath(os.path.realpath(config.path), mount.point).split("/")[0]
    try:
        others = set(os.listdir(mount.point)) - {inside, "lost+found"}
    except OSError:  # this user may not list it
        return SHARED_DRIVE
    return SHARED_DRIVE if others and inside != "." else 0.0


def is_local(path: str, root: str = "/") -> bool:
    """True if only this machine can use the filesystem of ``path``. Blocks until its storage answers."""
    mount = find_mount(path, root)
    return mount is not None and mount.kind in LOCAL


def is_kept(config: SharedDirConfig, root: str = "/") -> bool:
    """Whether engines evict from a shared directory to enforce its capacity. The default: if it is local.

    If they do not, ``nixl-offload gc`` enforces it.
    """
    return is_local(config.path, root) if config.evict is None else config.evict


class DirectoryLock:
    """A lock on a file. The file names its holder, for people and for ``is_held_by``."""

    def __init__(self, path: Path, filesystem: Filesystem = REAL) -> None:
        """Name the lock file; ``acquire`` takes it."""
        self.path = path
        self._filesystem = filesystem
        self.owner = secrets.token_hex(16)
        """The name in the file while this object holds the lock; constant for this object."""
        self._fd = -1
        self._identity = (0, 0)

    def acquire(self, *, shared: bool = False) -> None:
        """Take the lock without waiting. Raises TierError: ``locked`` (names the holder), or why the open failed."""
        while not self.is_held():  # the file may be replaced before it is locked
            self.release()
            try:
                self._fd, status = open_own(self._filesystem, self.path)
                fcntl.fcntl(self._fd, _SET_LOCK, _whole_file(fcntl.F_RDLCK if shared else fcntl.F_WRLCK))
            except BlockingIOError as error:
                hint = _hint(self._fd)
                self.release()
                raise TierError(f"{_in_use(self.path, hint)}.", cause="locked") from error
            except OSError as error:
                self.release()
                raise tier_error(error, f"cannot lock {self.path}") from error
            except ValueError as error:  # another thread has released it meanwhile, so the descriptor is -1
                raise TierError(f"cannot lock {self.path}: {error}", cause="io") from error
            self._identity = (status.st_dev, status.st_ino)
        _held.add(self)
        hint = {
            "owner": self.owner,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "since": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        }
        line = f"{json.dumps(hint)}\n".encode()
        try:  # overwrite, then truncate: readers take the first line
            self._filesystem.write(self._fd, memoryview(line), 0)
            self._filesystem.truncate(self._fd, len(line))
        except OSError:  # a full disk must not keep an engine from serving its chunks
            with contextlib.suppress(OSError):  # no name is better than the last holder's
                self._filesystem.truncate(self._fd, 0)

    def is_held(self) -> bool:
        """Return whether this object holds the lock of the file that has this path *now*.

        If the storage cannot tell, the file is assumed to be the same: a held lock must not be released.
        """
        if self._fd < 0:
            return False
        try:
            status = self._filesystem.stat(str(self.path))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True
        return (status.st_dev, status.st_ino) == self._identity

    def release(self) -> None:
        """Release the lock. Idempotent, even for two threads at once."""
        _held.discard(self)
        fd, self._fd = self._fd, -1  # before the close: a second close of this number could hit another file
        if fd >= 0:
            os.close(fd)


def holder_of(path: Path) -> str | None:
    """Return who holds the lock ``path`` exclusively, in words; None: nobody. Changes nothing; raises TierError."""
    hint = _holders_hint(path)
    return None if hint is None else _words(hint)


def is_held_by(path: Path, owner: str) -> bool:
    """Return whether ``owner`` holds the lock ``path`` exclusively. A holder that could not write its name counts too.

    False if nobody holds it, as on a machine without the engine's scheduler, and for ``owner`` "". Raises TierError if
    another engine holds it (``locked``), or if it cannot be read.
    """
    hint = _holders_hint(path) if owner else None
    if hint is not None and hint.get("owner", owner) != owner:
        raise TierError(_in_use(path, hint), cause="locked")
    return hint is not None


def require_lock(directory: Path, owner: str) -> None:
    """Raise TierError unless ``owner`` has locked the parent of ``directory``; ``locked``: another engine has.

    For processes on the machine of the engine's scheduler. If its lock is missing there, the path now leads to another
    directory (such as an empty mount point), or somebody has removed the files.
    """
    lock = directory.parent / "lock"
    if not is_held_by(lock, owner):
        raise TierError(f"the engine's lock {lock} is gone: deleted, moved or not mounted", cause="missing")


def _holders_hint(path: Path) -> dict[str, Any] | None:
    """Return what the exclusive holder of the lock ``path`` wrote there; None without one. Raises TierError."""
    try:
        fd = REAL.open(str(path), os.O_RDONLY | os.O_NONBLOCK)
        try:
            found = fcntl.fcntl(fd, _GET_LOCK, _whole_file(fcntl.F_RDLCK))
            return None if struct.unpack_from("h", found)[0] == fcntl.F_UNLCK else _hint(fd)
        finally:
            os.close(fd)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise tier_error(error, f"cannot look at the lock {path}") from error


def _whole_file(kind: int) -> bytes:
    """Return a ``struct flock``."""
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, 0, 0, 0)


def _hint(fd: int) -> dict[str, Any]:
    try:
        hint = json.loads(os.pread(fd, _HINT_MAX_BYTES, 0).partition(b"\n")[0])
    except (OSError, ValueError, RecursionError):
        return {}
    return hint if isinstance(hint, dict) else {}


def _in_use(path: Path, hint: dict[str, Any]) -> str:
    return (
        f"{path.parent} is in use by another engine ({_words(hint)}). "
        "Stop that engine, give this one a path of its own, or say kind: shared_dir, which engines share"
    )


def _words(hint: dict[str, Any]) -> str:
    try:
        return f"pid {int(hint['pid'])} on {str(hint['host'])[:64]!r} since {str(hint['since'])[:32]}"
    except (ValueError, KeyError, TypeError, OverflowError):
        return "which one is not known"


def _forget_after_fork() -> None:
    """Close the child's descriptors. The parent keeps the lock; an open copy would keep it after the parent's end."""
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_forget_after_fork)
