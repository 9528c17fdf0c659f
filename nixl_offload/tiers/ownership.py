"""Whose a tier's directory is: private, apart from other tiers, locked by one engine; and how much of its drive it may
take.

The lock is an open file description lock (``F_OFD_SETLK``), which the kernel drops when its holder dies, however it
dies. Unlike other record locks it stays when another descriptor of the file is closed, and unlike ``flock`` it can be
looked at without being taken. The file stays behind when the lock is released: removing it would race with others.

A tier that fills a drive stops others that use it. On a Kubernetes node it is the pod that ends: the kubelet evicts
pods where less than 10 % of the node's filesystem is free, 15 % of the one with the images, or 5 % of the inodes.

Threading: any thread; a ``DirectoryLock`` has one owner. Calls take as long as the storage takes to answer.
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
from nixl_offload.hardware.mounts import LOCAL, find_mount
from nixl_offload.stores.filesystem import REAL, Filesystem, tier_error

logger = logging.getLogger(__name__)

SHARED_DRIVE: Final = 0.10
"""The share that stays free where others use the drive, if the config says nothing."""
EMPTY_DIR: Final = 0.20
"""And in an emptyDir, which lies on the filesystem that the kubelet watches."""
_GET_LOCK, _SET_LOCK = 36, 37
"""``F_OFD_GETLK`` and ``F_OFD_SETLK`` of Linux: a Python that was built with an old glibc has no names for them."""
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


def require_directory(path: Path) -> None:
    """Raise StoreError where there is no directory, nothing can be in it, or where that cannot be found out."""
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
    """Raise TierError where the directory of a tier is that of a nearer one, or one lies in the other, by symbolic
    links: the config's text does not tell. A slab counts all that lies under its directory as its own.

    Takes as long as both directories' storage takes to answer.
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

    A network filesystem is not watched. A drive is the tier's alone where nothing else lies in its root; what
    a container sees of a larger filesystem (an emptyDir, a hostPath) is not.
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
    except OSError:  # not for this user to see
        return SHARED_DRIVE
    return SHARED_DRIVE if others and inside != "." else 0.0


def is_local(path: str, root: str = "/") -> bool:
    """Whether no other machine has a directory, by its filesystem. Takes as long as its storage takes to answer."""
    mount = find_mount(path, root)
    return mount is not None and mount.kind in LOCAL


def is_kept(config: SharedDirConfig, root: str = "/") -> bool:
    """Whether engines keep a shared directory to its capacity: as the config says, or because no other machine has it.

    Elsewhere ``nixl-offload gc`` does.
    """
    return is_local(config.path, root) if config.evict is None else config.evict


class DirectoryLock:
    """A lock on a file. The file's content says who holds it: for people, and for ``is_held_by`` while it is held."""

    def __init__(self, path: Path, filesystem: Filesystem = REAL) -> None:
        """Name the lock file; ``acquire`` takes it."""
        self.path = path
        self._filesystem = filesystem
        self.owner = secrets.token_hex(16)
        """What the file says while this object holds it, each time the same."""
        self._fd = -1
        self._identity = (0, 0)

    def acquire(self, *, shared: bool = False) -> None:
        """Take the lock at once. Raises TierError: ``locked`` (says by whom), or why the file cannot be opened."""
        while not self.is_held():  # the file may be replaced before it is locked
            self.release()
            try:
                self._fd = self._filesystem.open(str(self.path), os.O_RDWR | os.O_CREAT)
                status = self._filesystem.stat(self._fd)
                if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
                    self.release()
                    raise TierError(f"{self.path} is no file, or has another name (a hard link); remove it", cause="io")
                os.fchmod(self._fd, 0o600)
                fcntl.fcntl(self._fd, _SET_LOCK, _whole_file(fcntl.F_RDLCK if shared else fcntl.F_WRLCK))
            except BlockingIOError as error:
                hint = _hint(self._fd)
                self.release()
                raise TierError(f"{_in_use(self.path, hint)}.", cause="locked") from error
            except OSError as error:
                self.release()
                raise tier_error(error, f"cannot lock {self.path}") from error
            except ValueError as error:  # another thread has let go meanwhile, so there is no descriptor
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
        try:  # over what was there, then cut off the rest: readers take the first line
            self._filesystem.write(self._fd, memoryview(line), 0)
            self._filesystem.truncate(self._fd, len(line))
        except OSError:  # a full disk must not keep an engine from serving what it has
            with contextlib.suppress(OSError):  # rather nothing than what the last holder wrote
                self._filesystem.truncate(self._fd, 0)

    def is_held(self) -> bool:
        """Say whether this object holds the lock *on the file that bears the name now*.

        Where storage does not say which file that is, it is taken to be the same: what is held must not be let go.
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
        """Let go. Idempotent, also for two threads at once."""
        _held.discard(self)
        fd, self._fd = self._fd, -1  # first: a second ``close`` of the number could be of another file
        if fd >= 0:
            os.close(fd)


def holder_of(path: Path) -> str | None:
    """Say who holds the lock ``path`` alone, None when nobody does. Changes nothing; raises TierError."""
    hint = _holders_hint(path)
    return None if hint is None else _words(hint)


def is_held_by(path: Path, owner: str) -> bool:
    """Say whether ``owner`` holds the lock ``path`` alone, or somebody who could not write its name.

    False where nobody does, as on a machine without the engine's scheduler, and with ``owner`` "". Raises TierError
    while another holds it (``locked``), or if it cannot be read.
    """
    hint = _holders_hint(path) if owner else None
    if hint is not None and hint.get("owner", owner) != owner:
        raise TierError(_in_use(path, hint), cause="locked")
    return hint is not None


def require_lock(directory: Path, owner: str) -> None:
    """Raise TierError where ``owner`` has not locked the directory above ``directory``; ``locked``: another has.

    For processes on the machine of the engine's scheduler: without its lock the path leads elsewhere than the scheduler
    went, as to an empty mount point, or somebody has removed what was there.
    """
    lock = directory.parent / "lock"
    if not is_held_by(lock, owner):
        raise TierError(f"the engine's lock {lock} is gone: deleted, moved or not mounted", cause="missing")


def _holders_hint(path: Path) -> dict[str, Any] | None:
    """Return what the holder of the lock ``path`` wrote there, None when nobody holds it alone. Raises TierError."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise tier_error(error, f"cannot look at the lock {path}") from error
    try:
        found = fcntl.fcntl(fd, _GET_LOCK, _whole_file(fcntl.F_RDLCK))
        return None if struct.unpack_from("h", found)[0] == fcntl.F_UNLCK else _hint(fd)
    except OSError as error:
        raise tier_error(error, f"cannot look at the lock {path}") from error
    finally:
        os.close(fd)


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
    """Close a child's copies: closing one descriptor of several drops no lock, keeping it open would prolong it."""
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_forget_after_fork)
