"""What a directory lies on: its mount, its block device, and what that is made of.

Threading: pure functions that read ``/proc`` and ``/sys``; safe anywhere. ``root`` stands for ``/`` in tests; the
directory itself is always a real one.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Final, NamedTuple

from nixl_offload.hardware.files import beneath, names, read

LOCAL: Final = ("ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "bcachefs", "zfs", "overlay", "tmpfs", "ramfs")
"""Filesystems that belong to one machine."""
_ESCAPE: Final = re.compile(r"\\([0-7]{3})")


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

    def option(self, name: str) -> str | None:
        """Return ``ordered`` for ``data`` of ``data=ordered``; "" for a word alone; None where it is not said."""
        return next((value for word, _, value in (each.partition("=") for each in self.options) if word == name), None)


@dataclass(frozen=True, slots=True)
class BlockDevice:
    """A block device, and those below it that it is made of."""

    name: str
    """``nvme0n1p2``, ``md0``"""
    kind: str
    """Of the disk: ``nvme``, ``nvmeof``, ``raid0`` (1, 5 ...), ``lvm``, ``crypt``, ``multipath``, ``dm``, ``other``."""
    members: tuple[BlockDevice, ...] = ()

    @property
    def words(self) -> str:
        """Return ``md0 (raid0 of nvme0n1, nvme1n1)``."""
        of = ", ".join(member.words for member in self.members)
        return f"{self.name} ({self.kind} of {of})" if of else self.name

    def drives(self) -> tuple[BlockDevice, ...]:
        """Return what it is made of in the end."""
        return tuple(drive for member in self.members for drive in member.drives()) or (self,)


def find_mount(directory: str, root: str = "/") -> Mount | None:
    """Return the mount that ``directory`` lies on; None when the system does not tell."""
    real = os.path.realpath(directory)
    found = None
    for mount in filter(None, map(_mount, (read(root, "/proc/self/mountinfo") or "").splitlines())):
        inside = real == mount.point or real.startswith(mount.point.rstrip("/") + "/")
        # Of mounts on the same point the last one covers the others.
        if inside and (found is None or len(mount.point) >= len(found.point)):
            found = mount
    return found


def find_device(mount: Mount, root: str = "/") -> BlockDevice | None:
    """Return the block device under ``mount``; None when it has none or the system does not tell."""
    if mount.device.startswith("0:"):
        return None
    path = beneath(root, f"/sys/dev/block/{mount.device}")
    return _device(os.path.realpath(path)) if os.path.exists(path) else None


def _mount(line: str) -> Mount | None:
    fields, _, rest = line.partition(" - ")
    words, tail = fields.split(), rest.split()
    if len(words) < 6 or len(tail) < 2:
        return None
    texts = (words[4], tail[1], words[3])
    point, source, top = (_ESCAPE.sub(lambda match: chr(int(match[1], 8)), text) for text in texts)
    return Mount(point, tail[0], source, tuple(",".join([words[5], *tail[2:3]]).split(",")), words[2], top)


def _device(path: str) -> BlockDevice:
    disk = os.path.dirname(path) if os.path.exists(os.path.join(path, "partition")) else path
    slaves = os.path.join(disk, "slaves")
    members = tuple(_device(os.path.realpath(os.path.join(slaves, each))) for each in names("/", slaves))
    return BlockDevice(os.path.basename(path), _kind(disk), members)


def _kind(disk: str) -> str:
    def text(name: str) -> str:
        return (read("/", os.path.join(disk, name)) or "").strip()

    name = os.path.basename(disk)
    if name.startswith("nvme"):
        return "nvme" if text("device/transport") in ("", "pcie") else "nvmeof"
    if name.startswith("md"):
        return text("md/level") or "raid"
    if name.startswith("dm-"):
        maker = text("dm/uuid").partition("-")[0].lower()
        return {"lvm": "lvm", "crypt": "crypt", "mpath": "multipath"}.get(maker, "dm")
    return "other"
