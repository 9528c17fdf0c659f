"""This machine's mounts, its free memory, the cores that helper threads may use, and a token that identifies it.

Threading: functions read ``/proc`` and ``/sys`` and are safe anywhere; ``unbound`` is for a thread that starts threads.
``root`` replaces ``/`` in tests; a directory whose mount is wanted is always real.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

LOCAL: Final = ("ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "bcachefs", "zfs", "overlay", "tmpfs", "ramfs")
"""Filesystems that belong to one machine."""


class Mount(NamedTuple):
    """A line of ``mountinfo``."""

    point: str
    kind: str
    """``ext4``, ``nfs4``, ``fuse.sshfs`` ..."""
    source: str
    options: tuple[str, ...]
    """Options of the mount and of the filesystem."""
    device: str
    """``major:minor``; major is 0 if there is no block device."""
    top: str = "/"
    """The directory of the filesystem that is mounted at ``point``; not its root in a bind mount."""


def find_mount(directory: str, root: str = "/") -> Mount | None:
    """Return the mount of ``directory``; None if unknown."""
    real = os.path.realpath(directory)
    found = None
    for line in read(root, "/proc/self/mountinfo").splitlines():
        fields, _, rest = line.partition(" - ")
        words, tail = fields.split(), rest.split()
        if len(words) < 6 or len(tail) < 2:
            continue
        texts = (words[4], tail[1], words[3])
        point, source, top = (re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), text) for text in texts)
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        # A later mount on the same point covers the earlier ones.
        if inside and (found is None or len(point) >= len(found.point)):
            found = Mount(
                point, tail[0], source, (*words[5].split(","), *",".join(tail[2:3]).split(",")), words[2], top
            )
    return found


def beneath(root: str, path: str) -> str:
    """Return an absolute ``path`` with ``root`` in place of ``/``."""
    return path if root == "/" else os.path.join(root, path.lstrip("/"))


def read(root: str, path: str) -> str:
    """Return a file's text; "" if it cannot be read."""
    try:
        return Path(beneath(root, path)).read_text("utf-8", "replace")
    except OSError:
        return ""


def names(root: str, path: str) -> list[str]:
    """Return the sorted names in a directory; none if it cannot be read."""
    try:
        return sorted(os.listdir(beneath(root, path)))
    except OSError:
        return []


_NO_LIMIT_BYTES = 1 << 60
"""Control groups version 1 express "no limit" by a number of about the size of an address space."""
_GROUPS = "/sys/fs/cgroup"


class Room(NamedTuple):
    """``available_bytes`` may be allocated before the kernel kills something; ``limited_by`` names the limit."""

    available_bytes: int
    limited_by: str

    @property
    def usable_bytes(self) -> int:
        """What a rank may take now: a part is left for what the engine allocates later."""
        return self.available_bytes - min(self.available_bytes // 16, 2 << 30)


def room(root: str = "/") -> Room:
    """Return the tightest limit.

    Page cache counts as available, as in ``MemAvailable``: the kernel reclaims it first.
    """
    fields = _fields(root, "/proc/meminfo")
    kib = fields.get("MemAvailable:", fields.get("MemFree:", _NO_LIMIT_BYTES >> 10))
    found = [Room(kib << 10, "the machine (MemAvailable)")]
    for line in read(root, "/proc/self/cgroup").splitlines():
        number, controllers, path = (*line.split(":", 2), "", "")[:3]
        if number == "0" and not controllers:
            for mount in (_GROUPS, f"{_GROUPS}/unified"):
                found += _left(root, mount, path, "memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            found += _left(root, f"{_GROUPS}/memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
    return min(found, key=lambda each: each.available_bytes)


def _left(root: str, mount: str, path: str, limit: str, usage: str, total: str) -> Iterator[Room]:
    """Yield the room of the group ``path`` and of each group above it. In a container the mount may be the group."""
    inner = Path(mount, path.strip("/"))
    for group in (each for each in (inner, *inner.parents) if each.is_relative_to(mount)):
        limit_bytes, used_bytes = (read(root, f"{group}/{name}").strip() for name in (limit, usage))
        # A limit may be "max".
        if limit_bytes.isdigit() and used_bytes.isdigit() and int(limit_bytes) < _NO_LIMIT_BYTES:
            statistics = _fields(root, f"{group}/memory.stat")
            cached = sum(statistics.get(f"{total}{kind}", 0) for kind in ("inactive_file", "active_file"))
            left_bytes = int(limit_bytes) - max(0, int(used_bytes) - cached)
            yield Room(max(0, left_bytes), f"the control group ({group}/{limit})")


def _fields(root: str, path: str) -> dict[str, int]:
    """Return the first two words of each line whose second word is a number."""
    words = [line.split() for line in read(root, path).splitlines()]
    return {word[0]: int(word[1]) for word in words if len(word) > 1 and word[1].isdigit()}


BINDING = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PROC_BIND")
"""Variables that vLLM's CPU backend sets for workers. They bind the main thread to the model's first core."""


@contextmanager
def unbound() -> Iterator[None]:
    """If OpenMP has bound the caller to one core, let threads started inside use all cores of the parent process.

    Else they would share that core with the model's first thread, and all others wait for it. Raises nothing itself. An
    operator's affinity (``taskset``, a control group) still holds, since the parent has it too.
    """
    own, wide = set[int](), set[int]()
    with suppress(OSError, AttributeError):  # not each system has affinities
        own, wide = os.sched_getaffinity(0), os.sched_getaffinity(os.getppid())
    is_bound = any(name in os.environ for name in BINDING) and len(own) == 1 and own < wide
    if not is_bound:
        yield
        return
    with suppress(OSError):
        os.sched_setaffinity(0, wide)
    try:
        yield
    finally:
        with suppress(OSError):
            os.sched_setaffinity(0, own)


def machine_token() -> str:
    """Return a token that is equal for processes of one machine, mount namespace, root and user; "" if unknown.

    Equal tokens mean that a path names the same file in both processes, and that both may open the same files.
    """
    try:
        root = os.stat("/")
        facts = [
            Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            os.readlink("/proc/self/ns/mnt"),
            os.readlink("/proc/self/ns/user"),
            os.uname().nodename,  # machines restored from one image share a boot id
            f"{root.st_dev}:{root.st_ino}",
            f"{os.geteuid()}:{os.getegid()}",
        ]
    except OSError:
        return ""
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()
