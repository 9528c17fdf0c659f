"""What a directory lies on: its mount, and the block devices below that.

Threading: pure functions that read ``/proc`` and ``/sys``; safe anywhere. ``root`` stands for ``/`` in tests; the
directory itself is always a real one.
"""

from __future__ import annotations

import os
import re
from typing import Final, NamedTuple

from nixl_offload.hardware.files import beneath, names, read

LOCAL: Final = ("ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "bcachefs", "zfs", "overlay", "tmpfs", "ramfs")
"""Filesystems that belong to one machine."""


class Mount(NamedTuple):
    """A line of ``mountinfo``."""

    point: str
    kind: str
    """``ext4``, ``nfs4``, ``fuse.sshfs`` ..."""
    source: str
    options: tuple[str, ...]
    """The mount's and the filesystem's."""
    device: str
    """``major:minor``; 0 as major where there is no block device."""
    top: str = "/"
    """The directory of the filesystem that is seen at ``point``; another than its root in a bind mount."""


class BlockDevice(NamedTuple):
    """A block device, and those below it that it is made of."""

    name: str
    """``nvme0n1p2``, ``md0``"""
    kind: str
    """Of the disk: ``nvme``, ``nvmeof``, ``raid0`` (1, 5 ...), ``dm`` (LVM, dm-crypt, multipath), ``other``."""
    members: tuple[BlockDevice, ...]

    @property
    def words(self) -> str:
        """Return ``md0 (raid0 of nvme0n1, nvme1n1)``."""
        of = ", ".join(member.words for member in self.members)
        return f"{self.name} ({self.kind} of {of})" if of else self.name


def find_mount(directory: str, root: str = "/") -> Mount | None:
    """Return the mount that ``directory`` lies on; None when the system does not tell."""
    real = os.path.realpath(directory)
    found = None
    for line in (read(root, "/proc/self/mountinfo") or "").splitlines():
        fields, _, rest = line.partition(" - ")
        words, tail = fields.split(), rest.split()
        if len(words) < 6 or len(tail) < 2:
            continue
        texts = (words[4], tail[1], words[3])
        point, source, top = (re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), text) for text in texts)
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        # Of mounts on the same point the last one covers the others.
        if inside and (found is None or len(point) >= len(found.point)):
            found = Mount(
                point, tail[0], source, (*words[5].split(","), *",".join(tail[2:3]).split(",")), words[2], top
            )
    return found


def find_device(mount: Mount, root: str = "/") -> BlockDevice | None:
    """Return the block device under ``mount``; None when it has none or the system does not tell."""
    path = beneath(root, f"/sys/dev/block/{mount.device}")
    return _device(os.path.realpath(path)) if not mount.device.startswith("0:") and os.path.exists(path) else None


def _device(path: str) -> BlockDevice:
    disk = os.path.dirname(path) if os.path.exists(os.path.join(path, "partition")) else path
    slaves = os.path.join(disk, "slaves")
    members = tuple(_device(os.path.realpath(os.path.join(slaves, each))) for each in names("/", slaves))
    kind, name = "other", os.path.basename(disk)
    if name.startswith("nvme"):
        transport = (read("/", os.path.join(disk, "device/transport")) or "").strip()
        kind = "nvme" if transport in ("", "pcie") else "nvmeof"
    elif name.startswith("md"):
        kind = (read("/", os.path.join(disk, "md/level")) or "").strip() or "raid"
    elif name.startswith("dm-"):
        kind = "dm"
    return BlockDevice(os.path.basename(path), kind, members)
