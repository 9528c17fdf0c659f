"""Digests of files, remembered from one start to the next in a small JSON file beside the tier.

A file is known by device, inode, size and both of its times, on this machine. The change time makes that safe: the
kernel sets it at every write, and nobody can set it back. So files are remembered only on filesystems that keep a
change time, and a file that was changed just before it was read is not remembered.

Threading: a ``WeightsCache`` belongs to one thread; several processes may use one directory. Nothing here raises for
storage: if the cache cannot be read or written, the files are read again. A cache that belongs to another user, that
others can write to, or that is damaged is ignored and replaced.

    <directory>/.weights-cache.json    digests by file, oldest first
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import re
import socket
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from nixl_offload.config import Config
from nixl_offload.identity.weights_files import ModelFile

CACHE_PREFIX: Final = ".weights-cache"
"""Names of these files, which may lie in a slab's directory; some 50 KiB at most."""

_VERSION: Final = 1
"""Of this file, and of how a file is summed."""
_ENTRIES_MAX: Final = 512
_SIZE_MIN_BYTES: Final = 1 << 20
"""Smaller files are read each time: that costs as little as looking them up."""
_MAX_BYTES: Final = 1 << 20
_SETTLED_S: Final = 2.0
"""The coarsest time on disk. A file that was changed more recently could change again without a trace."""
_MODE_OTHERS_WRITE: Final = 0o022
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_KEEP_CHANGE_TIMES: Final = {
    0x01021994,  # tmpfs
    0x00C36400,  # ceph
    0x0BD00BD0,  # lustre
    0x19830326,  # beegfs
    0x2FC12FC1,  # zfs
    0x47504653,  # gpfs
    0x6969,  # nfs
    0x9123683E,  # btrfs
    0xCA451A4E,  # bcachefs
    0xEF53,  # ext4
    0xF2F52010,  # f2fs
    0x58465342,  # xfs
}
"""Filesystems that keep change times, by their numbers in statfs. Images (squashfs, erofs) are not among them, nor
filesystems that may hide one (overlay, FUSE): the files of two models may agree in every number if two images were made
with fixed times."""

_libc = ctypes.CDLL(None)


def cache_directory_of(config: Config) -> Path | None:
    """Return where digests are remembered: beside a slab, else in the user's cache; None: there is no such place."""
    for tier in config.directories:
        if not tier.is_shared:
            return Path(tier.path)
    cache = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(cache):
        cache = os.path.expanduser("~/.cache")
    return Path(cache) / "nixl-offload" if os.path.isabs(cache) else None


class WeightsCache:
    """Digests of files by what ``stat`` says of them."""

    def __init__(self, directory: Path | None, host: str | None = None) -> None:
        """``directory`` is made, with mode 0700, when there is something to remember; None: remember nothing.

        ``host`` names the machine that devices and inodes belong to; by default this one.
        """
        self._directory = directory
        self._host = host or _host()
        self._known: dict[str, str] = {}

    def refresh(self) -> None:
        """Read again what is remembered."""
        self._known = {} if self._directory is None else _read(self._directory / f"{CACHE_PREFIX}.json")

    def get(self, file: ModelFile) -> str | None:
        """Return the digest of ``file``, as of the last ``refresh``; None when it is not known."""
        return self._known.get(self._key(file))

    def add(self, digests: Mapping[ModelFile, str], listed_s: float) -> None:
        """Remember the digests of files that were listed at ``listed_s``, seconds since the epoch."""
        if self._directory is None:
            return
        fresh = {self._key(file): digest for file, digest in digests.items() if _may_be_kept(file, listed_s)}
        if not fresh:
            return
        self.refresh()
        merged = {key: digest for key, digest in self._known.items() if key not in fresh} | fresh
        self._known = dict(list(merged.items())[-_ENTRIES_MAX:])
        with contextlib.suppress(OSError):
            _make_private(self._directory)
            _write(self._directory, {"version": _VERSION, "files": self._known})

    def _key(self, file: ModelFile) -> str:
        # Devices and inodes are numbers of one machine, and a home directory may be shared by many.
        known_by = (self._host, file.device, file.inode, file.size_bytes, file.mtime_ns, file.ctime_ns)
        return hashlib.sha256("\0".join(map(str, known_by)).encode()).hexdigest()[:32]


def _may_be_kept(file: ModelFile, listed_s: float) -> bool:
    changed_s = max(file.mtime_ns, file.ctime_ns) / 1e9
    return file.size_bytes >= _SIZE_MIN_BYTES and changed_s < listed_s - _SETTLED_S and keeps_change_time(file.path)


def keeps_change_time(path: str) -> bool:
    """Whether ``path`` lies on a filesystem where the change time of a file can be relied upon."""
    buffer = ctypes.create_string_buffer(512)  # struct statfs, which begins with f_type, a long
    if _libc.statfs(os.fsencode(path), buffer) != 0:
        return False
    return ctypes.c_long.from_buffer(buffer).value in _KEEP_CHANGE_TIMES


def _host() -> str:
    """Name this machine. A container has no machine-id of its own, and another hostname each time."""
    for path in ("/etc/machine-id", "/proc/sys/kernel/random/boot_id"):
        with contextlib.suppress(OSError, UnicodeError):
            if name := Path(path).read_text().strip():
                return name
    return socket.gethostname()


def _make_private(directory: Path) -> None:
    if not directory.is_dir():
        _make_private(directory.parent)
        directory.mkdir(0o700, exist_ok=True)


def _read(path: Path) -> dict[str, str]:
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with open(path, "rb", opener=lambda name, _: os.open(name, flags)) as file:
            status = os.fstat(file.fileno())
            others_write = status.st_uid != os.geteuid() or status.st_mode & _MODE_OTHERS_WRITE
            if not stat.S_ISREG(status.st_mode) or others_write:
                return {}
            document = json.loads(file.read(_MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(document, dict) or document.get("version") != _VERSION:
        return {}
    files = document.get("files")
    if not isinstance(files, dict) or not all(isinstance(it, str) and _DIGEST.fullmatch(it) for it in files.values()):
        return {}
    return files


def _write(directory: Path, document: Mapping[str, object]) -> None:
    """Replace the cache file. Two writers at once may leave half a file, which readers ignore. Raises OSError."""
    draft = directory / f"{CACHE_PREFIX}.tmp"
    draft.unlink(missing_ok=True)
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(json.dumps(document).encode())
    draft.replace(directory / f"{CACHE_PREFIX}.json")
