"""What ``nixl-offload check`` says of a tier's directory: may this user write there, on what does it lie, how much
room has it, who holds it; of a shared one, whether renames, syncs and clocks are as they should be.

Threading: one thread. Takes no lock and makes no directory; scratch files are removed before the line is told. Where
the directory is yet to be made by the server, what it would be made in is looked at instead.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import mmap
import os
import pwd
import re
import shlex
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from nixl_offload.cli.check.lines import Line, ok, unknown, warning, wrong
from nixl_offload.cli.terminal import about_size
from nixl_offload.config import DirectoryConfig
from nixl_offload.hardware.files import beneath
from nixl_offload.hardware.mounts import Mount, find_mount
from nixl_offload.tiers.shared.sweep import GRACE_S
from nixl_offload.types import PAGE_BYTES
from nixl_offload.units import format_size

SCRATCH: Final = ".mover-probe-"
"""Servers know the name: they make files of that kind, too, and their capacity never counts them for long."""
_OURS: Final = re.compile(r"lock|[0-9a-f]{32}|dp-[0-9]+")
_SHARED_KINDS: Final = ("nfs", "nfs4", "lustre", "gpfs", "mmfs", "beegfs", "wekafs", "ceph", "cifs", "smb3", "9p")
_IN_MEMORY: Final = ("tmpfs", "ramfs")
_CLOCK_S: Final = 5.0
"""Clocks that differ by less are left alone: a loaded file server dates a file late."""
_MOST_FILES: Final = 100_000
"""Counted of what the directory holds; of more, its size is not told."""
_MIB: Final = 1 << 20


class Place(NamedTuple):
    """Where a tier's files are, or will be."""

    path: str
    """What the config says."""
    standing: str
    """The directory itself, or, while it is yet to be made, the nearest one above."""

    @property
    def is_there(self) -> bool:
        """Whether the directory itself exists."""
        return self.path == self.standing


def find_place(path: str) -> Place:
    """Return the directory, or the nearest one above it that is there."""
    standing = path
    while not os.path.lexists(standing) and standing != "/":
        standing = os.path.dirname(standing)
    return Place(path, standing)


def access_line(place: Place) -> Line:
    """Try to make a file there; say who owns it and what would let this user write."""
    name = "directory"
    quoted = shlex.quote(place.standing)
    try:
        status = os.stat(place.standing)
    except OSError as error:
        return wrong(
            name, f"{place.standing}: {error.strerror}", f"ls -ld {quoted}; mend the link, or path: in the config"
        )
    if not stat.S_ISDIR(status.st_mode):
        mend = f"mv {quoted} {quoted}.old, or give another path: in the config"
        return wrong(name, f"{place.standing} is no directory", mend)
    whose = f"{_user(status.st_uid)}, mode {stat.S_IMODE(status.st_mode):04o}"
    try:
        descriptor, scratch = tempfile.mkstemp(prefix=SCRATCH, dir=place.standing)
    except OSError as error:
        return _refused(name, place, status, whose, error)
    os.close(descriptor)
    os.unlink(scratch)
    if not place.is_there:
        return ok(name, f"not there yet; the server makes it (mode 0700) in {place.standing} ({whose})")
    closed = _closed_to_us(place.path)
    if closed is not None:
        words = f"{whose}; {user_name()} can write there, but not open {closed}, which another user has left"
        return wrong(name, words, f"sudo chown -R {user_name()} {quoted}")
    others = stat.S_IMODE(status.st_mode) & 0o022
    if others and not status.st_mode & stat.S_ISVTX:
        words = f"{whose}: others on this machine may remove what servers keep there"
        return warning(name, words, f"chmod 700 {quoted}")
    return ok(name, f"{whose}; {user_name()} can write there")


def _closed_to_us(directory: str) -> str | None:
    """Return one of the things that servers keep in ``directory`` and this user may not open; None: all is open."""
    try:
        with os.scandir(directory) as entries:
            for entry in itertools.islice(entries, _MOST_FILES):
                if _OURS.fullmatch(entry.name):
                    enter = os.X_OK if entry.is_dir(follow_symlinks=False) else 0
                    if not os.access(entry.path, os.R_OK | os.W_OK | enter):
                        return entry.path
    except OSError:
        return directory
    return None


def filesystem_lines(place: Place, tier: DirectoryConfig, root: str = "/") -> Iterator[Line]:
    """Yield what the directory lies on, and whether that keeps what is stored. ``root`` stands for ``/`` in tests."""
    name = "filesystem"
    mount = find_mount(place.standing, root)
    quoted = shlex.quote(tier.path)
    if mount is None:
        yield unknown(name, "what the directory lies on cannot be told", f"findmnt -T {quoted}")
        return
    on = f"{mount.kind} at {mount.point}"
    if mount.kind == "overlay":
        words = (
            f"{on}: the container's own layer. What is stored is gone with the container, it is slow, and no GPU "
            "reaches it directly"
        )
        yield warning(name, words, f"docker run -v /mnt/nvme/kv:{quoted}, with a directory of the host's NVMe drive")
    elif mount.kind in _IN_MEMORY:
        words = f"{on}: this is memory, counted as such, gone when the machine restarts, and no GPU reaches it directly"
        yield warning(name, words, "path: a directory on a drive; or kind: memory in place of this tier")
    elif mount.kind in _SHARED_KINDS or mount.kind.startswith("fuse"):
        if tier.kind == "slab":
            words = f"{on}: a slab belongs to one engine of one machine, and here other machines may look for theirs"
            yield warning(name, words, "kind: shared_dir, for servers that share it; else a path on a local drive")
        else:
            yield ok(name, f"{on}, shared by servers as kind: shared_dir means it")
    elif _spins(mount, root):
        yield warning(name, f"{on}: a spinning disk; loading may be slower than computing", "path: on an NVMe drive")
    else:
        shared = "; on a local disk only servers of this machine share it" * (tier.kind == "shared_dir")
        yield ok(name, f"{on} ({mount.source}){shared}")


def space_line(place: Place, capacity_bytes: int | None) -> Line:
    """Say what the filesystem has left, against the capacity (None: not known)."""
    name = "space"
    try:
        space = os.statvfs(place.standing)
    except OSError as error:
        return unknown(name, f"cannot be told: {error.strerror}", f"df -h {shlex.quote(place.standing)}")
    if not space.f_blocks:
        return unknown(name, "the filesystem does not tell how large it is", f"df -h {shlex.quote(place.standing)}")
    free = space.f_bavail * space.f_frsize
    if capacity_bytes is None:
        return ok(name, f"{about_size(free)} free")
    held = _held_bytes(place.path) if place.is_there else 0
    holds = "" if not held else f", {about_size(held)} in use by what it holds"
    words = f"capacity {format_size(capacity_bytes)}; {about_size(free)} free{holds}"
    if held is None:
        whole = space.f_blocks * space.f_frsize
        if capacity_bytes <= whole:
            return ok(name, f"{words}, on a filesystem of {about_size(whole)}; too many files to count what they take")
        fits = int(whole * 0.95) // _MIB * _MIB
        return warning(name, f"{words}, on a filesystem of {about_size(whole)}", f"capacity: {_about_below(fits)}")
    if free + held >= capacity_bytes:
        return ok(name, words)
    fits = (free + held) // _MIB * _MIB
    if fits < _MIB:
        return wrong(name, f"{words}: the disk is full", f"free some of it: du -xsh {shlex.quote(place.standing)}/*")
    return warning(name, f"{words}: storing stops when the disk is full", f"capacity: {_about_below(fits)}")


def direct_io_line(place: Place, tier: DirectoryConfig) -> Line:
    """Write and read a page past the page cache, aligned as servers do it."""
    name = "O_DIRECT"
    if not tier.direct_io:
        return ok(name, "direct_io: false; reads and writes go through the page cache")
    try:
        descriptor, path = tempfile.mkstemp(prefix=SCRATCH, dir=place.standing)
    except OSError as error:
        return unknown(name, f"not tried: no file can be made there ({error.strerror})")
    try:
        with mmap.mmap(-1, PAGE_BYTES) as page:
            direct = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
            try:
                os.pwrite(direct, page, 0)
                os.preadv(direct, [page], 0)
            finally:
                os.close(direct)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            return unknown(name, "not tried: the disk is full")
        words = f"does not work there ({error.strerror}): the page cache is used, which costs host memory and a copy"
        return warning(name, words, "path: on ext4 or xfs; or direct_io: false, if that is meant")
    finally:
        os.close(descriptor)
        os.unlink(path)
    return ok(name, f"works with our alignment of {PAGE_BYTES} bytes")


def lock_line(place: Place, root: str = "/") -> Line | None:
    """Say which engine holds a slab's directory. The lock itself is left alone: a server that starts now needs it."""
    name = "lock"
    path = os.path.join(place.path, "lock")
    try:
        status = os.stat(path, follow_symlinks=False)
    except OSError:
        return ok(name, "no engine has used the directory yet") if place.is_there else None
    held_by = _holders(status, root)
    hint = _hint(path)
    if held_by:
        since = f", since {hint['since']}" if hint.get("pid") in held_by and "since" in hint else ""
        who = " and ".join(map(str, sorted(held_by)))
        words = f"held by the engine with pid {who}{since}: right if that is your server; a second one would not start"
        return warning(
            name, words, f"if it is not wanted: kill {' '.join(map(str, sorted(held_by)))}; else give each a path"
        )
    host = str(hint.get("host", ""))[:64]
    if host and host != socket.gethostname():
        words = f"last used by pid {hint.get('pid')} on {host!r}; whether it still runs cannot be told from here"
        return unknown(name, words, "look there, if a server does not start for it")
    return ok(name, "free")


def tree_lines(place: Place, clock: Callable[[], float] = time.time) -> Iterator[Line]:
    """Yield whether files can be synced and renamed into place, and how the filesystem's clock goes."""
    name = "rename and sync"
    quoted = shlex.quote(place.standing)
    paths: list[str] = []
    try:
        descriptor, draft = tempfile.mkstemp(prefix=SCRATCH, dir=place.standing)
        paths = [draft, f"{draft}-renamed"]
        try:
            os.write(descriptor, bytes(PAGE_BYTES))
            os.fsync(descriptor)
            now_s = clock()
            os.rename(draft, paths[1])
            os.utime(paths[1])  # a file server takes its own clock, as when a chunk is refreshed
            written_s = os.stat(paths[1]).st_mtime
        finally:
            os.close(descriptor)
    except OSError as error:
        if not paths:
            yield unknown(name, f"not tried: no file can be made there ({error.strerror})")
            return
        yield wrong(
            name, f"{error.strerror}", f"mount a filesystem that renames and syncs at {quoted}; findmnt -T {quoted}"
        )
        return
    finally:
        for path in paths:
            with contextlib.suppress(OSError):
                os.unlink(path)
    yield ok(name, "files are synced and renamed into place")
    skew_s = written_s - now_s
    words = f"the filesystem's clock is {abs(skew_s):.0f} s {'ahead of' if skew_s > 0 else 'behind'} this machine's"
    mend = "chronyc makestep, or timedatectl set-ntp true, here and on the file server"
    if abs(skew_s) <= _CLOCK_S:
        yield ok("clock", "the filesystem's and this machine's agree")
    elif abs(skew_s) < GRACE_S:
        yield warning("clock", f"{words}: ages that nixl-offload gc goes by are off by as much", mend)
    else:
        yield wrong("clock", f"{words}: nixl-offload gc, here, may delete what was written just now", mend)


def _refused(name: str, place: Place, status: os.stat_result, whose: str, error: OSError) -> Line:
    """Say why no file can be made, and what would change that."""
    quoted = shlex.quote(place.standing)
    where = place.standing if place.is_there else f"{place.path} is not there, and {place.standing}"
    if error.errno == errno.EROFS:
        mount = find_mount(place.standing)
        point = shlex.quote(mount.point) if mount else quoted
        mend = f"mount -o remount,rw {point}; of a container: docker run -v without :ro"
        return wrong(name, f"{where} is mounted read-only", mend)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return wrong(name, f"{where}: {error.strerror}", f"free some of it: du -xsh {quoted}/*")
    if error.errno in (errno.EACCES, errno.EPERM):
        me = user_name()
        words = f"{where} belongs to {whose}; {me} cannot write there"
        if not place.is_there:
            path = shlex.quote(place.path)
            return wrong(name, words, f"sudo install -d -m 700 -o {me} {path}")
        mine = status.st_uid == os.geteuid()
        return wrong(name, words, f"chmod u+rwx {quoted}" if mine else f"sudo chown {me} {quoted}")
    return wrong(name, f"{where}: no file can be made there ({error.strerror})", f"findmnt -T {quoted}; dmesg | tail")


def _spins(mount: Mount, root: str) -> bool:
    """Whether the mount's disk is one of platters. Only SCSI's names count: virtual disks say so of themselves too."""
    block = os.path.realpath(beneath(root, f"/sys/dev/block/{mount.device}"))
    disk = block if os.path.isdir(os.path.join(block, "queue")) else os.path.dirname(block)
    if not os.path.basename(disk).startswith("sd"):
        return False
    try:
        with open(os.path.join(disk, "queue/rotational"), encoding="ascii") as file:
            return file.read().strip() == "1"
    except OSError:
        return False


def _held_bytes(path: str) -> int | None:
    """Return what the directory takes on disk; None when there are too many files to count."""
    total = files = 0
    for directory, _, names in os.walk(path):
        for each in names:
            files += 1
            if files > _MOST_FILES:
                return None
            with contextlib.suppress(OSError):
                total += os.stat(os.path.join(directory, each), follow_symlinks=False).st_blocks * 512
    return total


def _about_below(size_bytes: int) -> str:
    """Return a size for a config, rounded down to what people write."""
    for unit, unit_bytes in (("TiB", 1 << 40), ("GiB", 1 << 30)):
        if size_bytes >= 10 * unit_bytes:
            return f"{size_bytes // unit_bytes}{unit}"
    return format_size(size_bytes)


def _holders(status: os.stat_result, root: str) -> set[int]:
    """Return who holds a flock on a file, as far as the kernel tells: engines of other containers are not shown."""
    found: set[int] = set()
    with contextlib.suppress(OSError), open(beneath(root, "/proc/locks"), encoding="ascii") as file:
        for line in file:
            words = line.split()
            # "1: FLOCK  ADVISORY  WRITE 4242 fd:01:1234 0 EOF"; "-> " marks one that waits.
            if len(words) < 6 or words[1] != "FLOCK":
                continue
            major, minor, inode = words[5].split(":")
            device = os.makedev(int(major, 16), int(minor, 16))
            if int(inode) == status.st_ino and device == status.st_dev and int(words[4]) > 0:
                found.add(int(words[4]))
    return found


def _hint(path: str) -> dict[str, object]:
    """Return what the lock file says of its last holder; nothing where it cannot be read."""
    try:
        with open(path, encoding="utf-8") as file:
            hint = json.loads(file.read(4096))
    except (OSError, ValueError):
        return {}
    return hint if isinstance(hint, dict) else {}


def user_name() -> str:
    """Return the name of the user that this process is, as commands take it."""
    return _user(os.geteuid())


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)
