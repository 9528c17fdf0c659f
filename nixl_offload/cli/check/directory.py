"""What ``nixl-offload check`` finds of a tier in a directory: rights, filesystem, space, O_DIRECT, lock or clock.
``file_movers`` goes on with GPUDirect Storage and movers.

Threading: one thread; a daemon thread looks at the filesystem, and is left behind if that hangs. A lock is taken only
to look who holds it, no directory is made, and scratch files are removed at once. A directory that the server has still
to make is judged by the nearest one above it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import re
import shlex
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from nixl_offload.cli.check.child import ChildProcess
from nixl_offload.cli.check.file_movers import add_gds, finding_of, try_movers
from nixl_offload.cli.check.report import CheckProgress, Finding, Probe, Section, ok, unknown, warning, wrong
from nixl_offload.cli.terminal import about_size
from nixl_offload.config import DirectoryConfig, SharedDirConfig, TierConfig
from nixl_offload.errors import TierError
from nixl_offload.hardware.gds import GdsReport, gds_report
from nixl_offload.hardware.mounts import find_mount
from nixl_offload.tiers.free_space import kept_free, spare_bytes
from nixl_offload.tiers.kinds import require_apart
from nixl_offload.tiers.lock import holder_of
from nixl_offload.tiers.shared.sweep import GRACE_S
from nixl_offload.tiers.shared_dir.kind import is_kept
from nixl_offload.tiers.slab.file import may_chmod
from nixl_offload.types import PAGE_BYTES
from nixl_offload.units import format_size

T = TypeVar("T")

HANG_S: Final = 15.0
_SCRATCH: Final = ".mover-probe-"
"""Servers know the prefix and never count such files for long."""
_OURS: Final = re.compile(r"lock|[0-9a-f]{32}|dp-[0-9]+")
_NETWORK: Final = ("nfs", "nfs4", "lustre", "gpfs", "mmfs", "beegfs", "wekafs", "ceph", "cifs", "smb3", "9p")
_CLOCK_S: Final = 5.0
"""A loaded file server dates a file late."""
_FILL_SHARE: Final = 0.9
"""Of what fits: a suggested capacity leaves the filesystem some room."""
_MAX_FILES: Final = 100_000
_MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class DirectoryContext:
    """What the probes of a directory look at."""

    tier: DirectoryConfig
    has_capacity: bool = True
    """Whether the tier's capacity comes from a config; else space is not compared with it."""
    root: str = "/"
    """Stands for ``/`` in tests."""
    clock: Callable[[], float] = time.time
    nearer: Sequence[TierConfig | DirectoryConfig] = ()
    """The tiers before this one in the config."""

    @property
    def at(self) -> str:
        """The directory itself or, where it is not there, the nearest one above it."""
        path = self.tier.path
        while not os.path.lexists(path) and path != "/":
            path = os.path.dirname(path)
        return path

    @property
    def exists(self) -> bool:
        """Whether the directory itself is there."""
        return self.at == self.tier.path


def directory_section(
    context: DirectoryContext, child: ChildProcess, progress: CheckProgress, *, gpu: bool, io: bool, piece_bytes: int
) -> Section:
    """Look at a tier. ``io``: measure movers, with pieces of ``piece_bytes``."""
    tier = context.tier
    section = Section(tier.kind, f"Tier {tier.kind} {tier.path} (mover: {tier.mover})")
    section.facts = {"path": tier.path, "mover": tier.mover, "taken": None, "fastest": None, "io": None}
    progress(f"looking at {tier.path}")
    try:
        gds = within(HANG_S, lambda: _look(section, context))
    except TimeoutError:
        words = f"nothing there answers within {HANG_S:.0f} s: a network filesystem whose server is gone?"
        section.add("directory", wrong(words, f"umount -l {tier.path}, then mount it again"))
        return section
    section.facts["gds"] = {**gds._asdict(), "facts": [fact._asdict() for fact in gds.facts]}
    add_gds(section, tier, gds, gpu=gpu)
    if section.state("directory") == "wrong":
        section.add("movers", unknown("not tried: there is nowhere to write"))
    else:
        progress(f"trying movers in {context.at}", why_long="NIXL imports torch")
        try_movers(section, tier, context.at, child, gpu=gpu, io=io, piece_bytes=piece_bytes)
    return section


def within(limit_s: float, work: Callable[[], T]) -> T:
    """Return what ``work`` returns. Raises what it raises, or TimeoutError after ``limit_s``: then it goes on alone."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised again below
            result.set_exception(error)

    threading.Thread(target=run, name="nixl-offload-check", daemon=True).start()
    try:
        return result.result(limit_s)
    except FutureTimeoutError:
        raise TimeoutError from None


def _look(section: Section, context: DirectoryContext) -> GdsReport:
    section.run(DIRECTORY_PROBES[:3], context)
    gds = gds_report(context.at, root=context.root)
    if section.state("directory") != "wrong":
        section.run(DIRECTORY_PROBES[3:], context)
        section.add("O_DIRECT", _direct_io(context.tier, gds))
    return gds


def _access(context: DirectoryContext) -> Finding:
    at, quoted, me = context.at, shlex.quote(context.at), _user(os.geteuid())
    try:
        status = os.stat(at)
    except OSError as error:
        return wrong(f"{at}: {error.strerror}", f"ls -ld {quoted}; repair the link, or change path: in the config")
    if not stat.S_ISDIR(status.st_mode):
        return wrong(f"{at} is no directory", f"path: a directory, in the config (ls -ld {quoted} shows what this is)")
    owner = f"{_user(status.st_uid)}, mode {stat.S_IMODE(status.st_mode):04o}"
    try:
        with tempfile.NamedTemporaryFile(prefix=_SCRATCH, dir=at):
            pass
    except OSError as error:
        return _refused(context, error, owner, mine=status.st_uid == os.geteuid())
    if not context.exists:
        path = context.tier.path
        above = os.path.dirname(path)
        if above == at:
            return ok(f"not there yet; the server makes it (mode 0700) in {at} ({owner})")
        words = f"{path} is not there, nor is {above}: is the drive mounted? A server would make it in {at}"
        make = f"sudo install -d -m 700 -o {me} {shlex.quote(path)}"
        return warning(words, f"mount the drive, or, if {at} is right: {make}")
    if closed := _closed(at):
        words = f"{owner}; {me} can write there, but not open {closed}, which another user has left"
        return wrong(words, f"sudo chown -R {me} {quoted}")
    if status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX:
        words = f"{owner}: other users of this machine may remove what servers keep there"
        below = f"path: {os.path.join(at, 'kv')}, in the config, which the server makes with mode 0700"
        return warning(words, f"chmod 700 {quoted}" if may_chmod(status) else below)
    return ok(f"{owner}; {me} can write there")


def _refused(context: DirectoryContext, error: OSError, owner: str, *, mine: bool) -> Finding:
    at, quoted, me = context.at, shlex.quote(context.at), _user(os.geteuid())
    where = at if context.exists else f"{context.tier.path} is not there, and {at}"
    if error.errno == errno.EROFS:
        mount = find_mount(at)
        point = shlex.quote(mount.point) if mount else quoted
        return wrong(f"{where} is mounted read-only", f"mount -o remount,rw {point}; of a container: no :ro in -v")
    if error.errno in (errno.EACCES, errno.EPERM):
        fix = f"chmod u+rwx {quoted}" if mine else f"sudo chown {me} {quoted}"
        if not context.exists:
            fix = f"sudo install -d -m 700 -o {me} {shlex.quote(context.tier.path)}"
        return wrong(f"{where} belongs to {owner}; {me} cannot write there", fix)
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    fix = f"free some of it: df -hi {quoted}; du -xsh {quoted}/*" if full else f"findmnt -T {quoted}; dmesg | tail"
    return wrong(f"{where}: no file can be made there ({error.strerror})", fix)


def _apart(context: DirectoryContext) -> Finding | None:
    try:
        require_apart(context.tier, context.nearer)
    except TierError as error:
        return wrong(str(error), "path: a directory beside the other tier's, in the config")
    return None


def _closed(directory: str) -> str | None:
    """Return something that servers keep in ``directory`` and this user may not open."""
    try:
        for path in (os.path.join(directory, name) for name in os.listdir(directory) if _OURS.fullmatch(name)):
            if not os.access(path, os.R_OK | os.W_OK | (os.X_OK if os.path.isdir(path) else 0)):
                return path
    except OSError:
        return directory
    return None


def _filesystem(context: DirectoryContext) -> Finding:
    mount, quoted = find_mount(context.at, context.root), shlex.quote(context.tier.path)
    if mount is None:
        return unknown("what the directory lies on cannot be told", f"findmnt -T {quoted}")
    on = f"{mount.kind} at {mount.point}"
    if mount.kind == "overlay":
        words = f"{on}: the container's own layer, slow, gone with the container, and out of reach for a GPU"
        return warning(words, f"docker run -v /mnt/nvme/kv:{quoted}, with a directory of the host's NVMe drive")
    if mount.kind in ("tmpfs", "ramfs"):
        words = f"{on}: this is memory, counted as such, gone when the machine restarts, and out of reach for a GPU"
        return warning(words, "path: a directory on a drive; or kind: memory in place of this tier")
    if mount.kind in _NETWORK or mount.kind.startswith("fuse"):
        if context.tier.is_shared:
            return ok(f"{on}, for servers to share")
        words = f"{on}: a slab belongs to one engine of one machine, and other machines may use this path too"
        return warning(words, "kind: shared_dir, for servers that share it; else a path on a local drive")
    if mount.point == "/":
        words = f"{on} ({mount.source}): the root filesystem, which is full when the tier is; is the drive not mounted?"
        return warning(words, "mount the drive, or path: a directory on it; lsblk -f shows drives and where they are")
    local = "; only servers of this machine share it" if context.tier.is_shared else ""
    return ok(f"{on} ({mount.source}){local}")


def _eviction(context: DirectoryContext) -> Finding | None:
    tier = context.tier
    if not isinstance(tier, SharedDirConfig) or not context.has_capacity:
        return None
    if is_kept(tier, context.root):
        return ok(f"servers keep it to {format_size(tier.capacity_bytes)}; what was not used for longest goes first")
    return ok(f"by nixl-offload gc, which a timer must run, down to {format_size(tier.capacity_bytes)}")


def _space(context: DirectoryContext) -> Finding:
    space, at = os.statvfs(context.at), shlex.quote(context.at)
    if not space.f_blocks:
        return unknown("the filesystem does not tell how large it is", f"df -h {at}")
    free, whole = space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize
    if not context.has_capacity:
        return ok(f"{about_size(free)} free")
    capacity, held = context.tier.capacity_bytes, _held_bytes(context.tier.path)
    share = kept_free(context.tier, context.root)
    fits = whole if held is None else int(max(0, spare_bytes(space, share))) + held
    used = "too many files to count what they take"
    if held is not None:
        used = f"{about_size(held)} in use by what the directory holds"
    words = f"capacity {format_size(capacity)}; {about_size(free)} free of {about_size(whole)}, {used}"
    words += f"; {share:.0%} of it stay free (keep_free)" if share else ""
    if capacity <= fits:
        return ok(words)
    if isinstance(context.tier, SharedDirConfig) and is_kept(context.tier, context.root):
        return ok(f"{words}: servers evict sooner")
    fits = int(fits * _FILL_SHARE)
    if fits < _MIB:
        return wrong(f"{words}: the disk is full", f"free some of it: du -xsh {at}/*")
    unit = 1 << 30 if fits >= 10 << 30 else _MIB
    does = "storing stops when the disk is full" if context.tier.is_shared else "a server uses what fits"
    return warning(f"{words}: {does}", f"capacity: {format_size(fits // unit * unit)}")


def _held_bytes(path: str) -> int | None:
    """Return the disk space of the files below ``path``; None when there are too many to count."""
    total = number = 0
    for directory, _, names in os.walk(path):
        number += len(names)
        if number > _MAX_FILES:
            return None
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(directory, name)).st_blocks * 512
    return total


def _direct_io(tier: DirectoryConfig, gds: GdsReport) -> Finding:
    if not tier.direct_io:
        return ok("direct_io: false; reads and writes go through the page cache")
    good, words = next((fact.ok, fact.words) for fact in gds.facts if fact.name == "O_DIRECT")
    words = words if good else f"{words}: the page cache is used, which costs host memory and a copy"
    return finding_of(good, words, "path: on ext4 or xfs; or direct_io: false, if that is meant")


def _lock(context: DirectoryContext) -> Finding | None:
    if context.tier.is_shared or not context.exists:
        return None
    try:
        holder = holder_of(Path(context.tier.path, "lock"))
    except TierError as error:
        return unknown(str(error))
    if holder is None:
        return ok("free")
    words = f"held by the engine with {holder}: right if that is your server; a second one would do without this tier"
    return warning(words, "stop that engine, or give each a path of its own; kind: shared_dir is for several")


def _clock(context: DirectoryContext) -> Finding | None:
    if not context.tier.is_shared:
        return None
    try:
        # A file server takes its own clock. Files are synced and renamed into place, as chunks are.
        with tempfile.NamedTemporaryFile(prefix=_SCRATCH, dir=context.at) as file:
            file.write(bytes(PAGE_BYTES))
            file.flush()
            os.fsync(file.fileno())
            os.rename(file.name, f"{file.name}-renamed")
            os.rename(f"{file.name}-renamed", file.name)
            now_s = context.clock()
            os.utime(file.name)
            skew_s = os.stat(file.name).st_mtime - now_s
    except OSError as error:
        fix = f"mount a filesystem that syncs and renames; findmnt -T {shlex.quote(context.at)}"
        return wrong(f"a file cannot be synced and renamed: {error.strerror}", fix)
    words = f"the filesystem's clock is {abs(skew_s):.0f} s {'ahead of' if skew_s > 0 else 'behind'} this machine's"
    fix = "chronyc makestep, or timedatectl set-ntp true, here and on the file server"
    if abs(skew_s) <= _CLOCK_S:
        return ok("files are synced and renamed into place; the filesystem's clock and this machine's agree")
    if abs(skew_s) < GRACE_S:
        return warning(f"{words}: ages that nixl-offload gc goes by are off by as much", fix)
    return wrong(f"{words}: nixl-offload gc, here, may delete what was written just now", fix)


DIRECTORY_PROBES: Final[Sequence[Probe[DirectoryContext]]] = (
    ("directory", _access),
    ("apart", _apart),
    ("filesystem", _filesystem),
    # Where nothing can be written, the rest has nothing to say.
    ("space", _space),
    ("lock", _lock),
    ("eviction", _eviction),
    ("sync and clock", _clock),
)


def _user(number: int) -> str:
    """Return a user's name as commands take it."""
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)
