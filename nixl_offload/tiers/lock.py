"""One engine per directory: a lock that the kernel drops when its holder dies, however it dies.

It is an open file description lock (``F_OFD_SETLK``): unlike other record locks it stays when another descriptor of
the file is closed, and unlike ``flock`` it can be looked at without being taken.

Threading: no lock of its own; one owner per object. Ownership: a lock belongs to the process that took it, and a forked
child does not keep it alive. The file stays behind when the lock is released, for removing it would race with others.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import socket
import stat
import struct
import time
import weakref
from pathlib import Path
from typing import Any

from nixl_offload.errors import TierError
from nixl_offload.stores.filesystem import tier_error

_HINT_MAX_BYTES = 4096
_held: weakref.WeakSet[DirectoryLock] = weakref.WeakSet()


class DirectoryLock:
    """A lock on a file. The file's content says who holds it: for people, and for ``is_held_by`` while it is held."""

    def __init__(self, path: Path) -> None:
        """Name the lock file; ``acquire`` takes it."""
        self.path = path
        self.owner = secrets.token_hex(16)
        """What the file says while this object holds it, each time the same."""
        self._fd = -1
        self._identity = (0, 0)

    def acquire(self, *, shared: bool = False) -> None:
        """Take the lock at once. Raises TierError: ``locked`` (says by whom), or why the file cannot be opened."""
        while not self.is_held():  # the file may be replaced before it is locked
            self.release()
            try:
                self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
                status = os.fstat(self._fd)
                if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
                    self.release()
                    raise TierError(f"{self.path} is no file, or has another name (a hard link); remove it", cause="io")
                os.fchmod(self._fd, 0o600)
                fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _whole_file(fcntl.F_RDLCK if shared else fcntl.F_WRLCK))
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
            os.pwrite(self._fd, line, 0)
            os.ftruncate(self._fd, len(line))
        except OSError:  # a full disk must not keep an engine from serving what it has
            with contextlib.suppress(OSError):  # rather nothing than what the last holder wrote
                os.ftruncate(self._fd, 0)

    def is_held(self) -> bool:
        """Say whether this object holds the lock *on the file that bears the name now*.

        Where storage does not say which file that is, it is taken to be the same: what is held must not be let go.
        """
        if self._fd < 0:
            return False
        try:
            status = self.path.stat(follow_symlinks=False)
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


def _holders_hint(path: Path) -> dict[str, Any] | None:
    """Return what the holder of the lock ``path`` wrote there, None when nobody holds it alone. Raises TierError."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise tier_error(error, f"cannot look at the lock {path}") from error
    try:
        found = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _whole_file(fcntl.F_RDLCK))
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
