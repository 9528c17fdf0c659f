"""Finds the mount of a directory.

Threading: pure functions that read ``/proc`` and ``/sys``; safe anywhere. ``root`` replaces ``/`` in tests; the
directory itself is always real.
"""

from __future__ import annotations

import os
import re
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
