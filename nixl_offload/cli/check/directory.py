"""Checks a tier in a directory for ``nixl-offload check``: rights, filesystem, space, clock, GPUDirect, movers.

Threading: probes of the directory run on a daemon thread with a time limit, because a network filesystem whose server
is gone blocks for ever. Movers run in the child process. Each probe removes its scratch files, and none takes the lock.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import shlex
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Final

from nixl_offload.calls import CallThreads
from nixl_offload.cli.check.child import ChildProcess, try_file_movers
from nixl_offload.cli.check.findings import Finding, mover_findings
from nixl_offload.cli.common import about_size
from nixl_offload.config import DirectoryConfig, SharedDirConfig
from nixl_offload.hardware.gds import GdsReport, gds_report
from nixl_offload.hardware.machine import LOCAL, find_mount
from nixl_offload.stores.filesystem import spare_bytes, walk
from nixl_offload.tiers.ownership import is_kept, kept_free, may_chmod
from nixl_offload.tiers.shared.sweep import GRACE_S
from nixl_offload.types import PAGE_BYTES
from nixl_offload.units import format_size

HANG_S: Final = 15.0
_SCRATCH: Final = ".mover-probe-"
"""The prefix of scratch files, as in servers' own probes of movers."""
_CLOCK_S: Final = 5.0
"""Tolerated clock difference; a busy file server sets times late."""
_FILL_SHARE: Final = 0.9
"""A suggested capacity is this share of the room that there is."""
_FILES_MAX: Final = 100_000
"""A slab has a few files. In a directory with millions of others counting them would take longer than ``HANG_S``."""


def look_at_directory(tier: DirectoryConfig, child: ChildProcess, *, gpu: bool) -> Iterator[Finding]:
    """Check a tier."""

    def probe() -> tuple[str, list[Finding], GdsReport]:
        at = nearest(tier.path)
        return at, list(directory_findings(tier)), gds_report(at)

    try:
        with closing(CallThreads("nixl-offload-check", threads=1)) as threads:
            at, found, gds = threads.start(probe).result(HANG_S)
    except TimeoutError:
        words = f"nothing there answers within {HANG_S:.0f} s: a network filesystem whose server is gone?"
        yield Finding("directory", "wrong", words, f"umount -l {tier.path}, then mount it again")
        return
    yield from found
    is_writable = found[0].state != "wrong"
    direct = next((fact for fact in gds.facts if fact.name == "O_DIRECT"), None)
    if not tier.direct_io:
        yield Finding("O_DIRECT", "ok", "direct_io: false; reads and writes go through the page cache")
    elif direct and is_writable:
        fix = None if direct.ok else "path: on ext4 or xfs; or direct_io: false, if that is meant"
        yield Finding("O_DIRECT", "ok" if direct.ok else "warning", direct.words, fix)
    yield gds_finding(tier, gds, gpu=gpu)
    if not is_writable:
        yield Finding("movers", "unknown", "not tried: there is nowhere to write")
    else:
        options = {"gpu": gpu, "threads": tier.threads, "direct_io": tier.direct_io and bool(direct and direct.ok)}
        answer = child.run(try_file_movers, choice=tier.mover, directory=at, **options)
        yield from mover_findings(tier.mover, answer)


def nearest(path: str) -> str:
    """Return ``path``, or its nearest existing parent."""
    while not os.path.lexists(path) and path != "/":
        path = os.path.dirname(path)
    return path


def directory_findings(
    tier: DirectoryConfig, *, root: str = "/", clock: Callable[[], float] = time.time
) -> Iterator[Finding]:
    """Check the directory itself. Tests pass a ``root`` in place of ``/``, and a ``clock``."""
    at = nearest(tier.path)
    access = _access(tier.path, at)
    yield access
    yield _filesystem(tier, at, root)
    if access.state == "wrong":
        return  # the other checks need to write
    yield _space(tier, at, root)
    if isinstance(tier, SharedDirConfig):
        yield _clock(at, clock)


def _access(path: str, at: str) -> Finding:
    name, quoted, me = "directory", shlex.quote(at), _user(os.geteuid())
    try:
        status = os.stat(at)
        if not stat.S_ISDIR(status.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    except OSError as error:
        fix = f"path: a directory, in the config; ls -ld {quoted} shows what this is"
        return Finding(name, "wrong", f"{at}: {error.strerror}", fix)
    owner = f"{_user(status.st_uid)}, mode {stat.S_IMODE(status.st_mode):04o}"
    install = f"sudo install -d -m 700 -o {me} {shlex.quote(path)}"
    try:
        with tempfile.NamedTemporaryFile(prefix=_SCRATCH, dir=at):
            pass
    except OSError as error:
        where, fix = f"{at}: no file can be made there", f"df -hi {quoted}; findmnt -T {quoted}; dmesg | tail"
        if error.errno == errno.EROFS:
            mount = find_mount(at)
            fix = f"mount -o remount,rw {shlex.quote(mount.point if mount else at)}; of a container: no :ro in -v"
        elif error.errno in (errno.EACCES, errno.EPERM):
            where, fix = f"{at} belongs to {owner}; {me} cannot write there", install
        return Finding(name, "wrong", f"{where} ({error.strerror})", fix)
    if at != path:
        above = os.path.dirname(path)
        if above == at:
            return Finding(name, "ok", f"not there yet; the server makes it (mode 0700) in {at} ({owner})")
        words = f"{path} is not there, nor is {above}: is the drive mounted? A server would make it in {at}"
        return Finding(name, "warning", words, f"mount the drive, or, if {at} is right: {install}")
    if status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX:
        words = f"{owner}: other users of this machine may remove what servers keep there"
        below = f"path: {os.path.join(at, 'kv')}, in the config, which the server makes with mode 0700"
        return Finding(name, "warning", words, f"chmod 700 {quoted}" if may_chmod(status) else below)
    return Finding(name, "ok", f"{owner}; {me} can write there")


def _filesystem(tier: DirectoryConfig, at: str, root: str) -> Finding:
    mount, name = find_mount(at, root), "filesystem"
    if mount is None:
        words = "what the directory lies on is not known"
        return Finding(name, "unknown", words, f"findmnt -T {shlex.quote(tier.path)}")
    on = f"{mount.kind} at {mount.point}"
    if mount.kind == "overlay":
        words = f"{on}: the container's own layer, slow, gone with the container, and out of reach for a GPU"
        fix = f"docker run -v /mnt/nvme/kv:{shlex.quote(tier.path)}, with a directory of the host's NVMe drive"
        return Finding(name, "warning", words, fix)
    if mount.kind in ("tmpfs", "ramfs"):
        words = f"{on}: this is memory, counted as such, gone when the machine restarts, and out of reach for a GPU"
        return Finding(name, "warning", words, "path: a directory on a drive; or kind: memory in place of this tier")
    if mount.kind not in LOCAL:
        if tier.is_shared:
            return Finding(name, "ok", f"{on}, for servers to share")
        words = f"{on}: a slab belongs to one engine of one machine, and other machines may use this path too"
        fix = "kind: shared_dir, for servers that share it; else a path on a local drive"
        return Finding(name, "warning", words, fix)
    if mount.point == "/":
        words = f"{on} ({mount.source}): the root filesystem, which is full when the tier is; is the drive not mounted?"
        return Finding(name, "warning", words, "mount the drive, or path: a directory on it; lsblk -f shows drives")
    return Finding(name, "ok", f"{on} ({mount.source})")


def _space(tier: DirectoryConfig, at: str, root: str) -> Finding:
    space, quoted, name = os.statvfs(at), shlex.quote(at), "space"
    if not space.f_blocks:
        return Finding(name, "unknown", "the filesystem does not tell how large it is", f"df -h {quoted}")
    free, whole = space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize
    fits, share = whole, kept_free(tier, root)
    words = f"capacity {format_size(tier.capacity_bytes)}; {about_size(free)} free of {about_size(whole)}"
    held = None if tier.is_shared else _held_bytes(tier.path)
    if held is not None:
        fits = int(max(0, spare_bytes(space, share))) + held
        words += f", {about_size(held)} in use by what the directory holds"
    words += f"; {share:.0%} of it stay free (keep_free)" if share else ""
    servers_evict = isinstance(tier, SharedDirConfig) and is_kept(tier, root)
    if tier.is_shared:
        words += f"; {'servers evict' if servers_evict else 'a timer must run nixl-offload gc'} to keep to it"
    if tier.capacity_bytes <= fits or servers_evict:
        return Finding(name, "ok", words)
    fits = int(fits * _FILL_SHARE)
    unit = 1 << 30 if fits >= 10 << 30 else 1 << 20
    if fits < unit:
        return Finding(name, "wrong", f"{words}: the disk is full", f"free some of it: du -xsh {quoted}/*")
    does = "storing stops when the disk is full" if tier.is_shared else "a server uses what fits"
    return Finding(name, "warning", f"{words}: {does}", f"capacity: {format_size(fits // unit * unit)}")


def _held_bytes(path: str) -> int | None:
    """Return the disk space of the files below ``path``; None if there are too many, or some cannot be examined."""
    with contextlib.suppress(OSError):
        found = list(islice(walk(Path(path)), 1, _FILES_MAX + 2))
        return sum(status.st_blocks * 512 for status in found) if len(found) <= _FILES_MAX else None
    return None


def _clock(at: str, clock: Callable[[], float]) -> Finding:
    name = "sync and clock"
    try:
        # A file server uses its own clock. Sync and rename a file, as for chunks.
        with tempfile.NamedTemporaryFile(prefix=_SCRATCH, dir=at) as file:
            file.write(bytes(PAGE_BYTES))
            file.flush()
            os.fsync(file.fileno())
            os.rename(file.name, f"{file.name}-renamed")
            os.rename(f"{file.name}-renamed", file.name)
            now_s = clock()
            os.utime(file.name)
            skew_s = os.stat(file.name).st_mtime - now_s
    except OSError as error:
        fix = f"mount a filesystem that syncs and renames; findmnt -T {shlex.quote(at)}"
        return Finding(name, "wrong", f"a file cannot be synced and renamed: {error.strerror}", fix)
    words = f"the filesystem's clock is {abs(skew_s):.0f} s {'ahead of' if skew_s > 0 else 'behind'} this machine's"
    fix = "chronyc makestep, or timedatectl set-ntp true, here and on the file server"
    if abs(skew_s) <= _CLOCK_S:
        return Finding(name, "ok", "files are synced and renamed into place; the clocks agree")
    if abs(skew_s) < GRACE_S:
        return Finding(name, "warning", f"{words}: ages that nixl-offload gc goes by are off by as much", fix)
    return Finding(name, "wrong", f"{words}: nixl-offload gc, here, may delete what was written just now", fix)


def gds_finding(tier: DirectoryConfig, gds: GdsReport, *, gpu: bool) -> Finding:
    """Return the finding on GPUDirect Storage. Without it, transfers are slower, but work."""
    name = "GPUDirect Storage"
    if tier.mover == "posix" or not gpu:
        words = "not used: files are moved through host memory" + ("" if gpu else ", without a GPU")
        return Finding(name, "ok", words)
    if gds.real:
        return Finding(name, "ok", gds.verdict)
    if gds.real is None:
        return Finding(name, "unknown", gds.verdict, "gdscheck -p")
    return Finding(name, "warning", gds.verdict, "what it says, or mover: posix if it is not wanted")


def _user(number: int) -> str:
    """Return a user's name, or the number if it has none."""
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)
