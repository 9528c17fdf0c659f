"""Whose a drive is, what a tier leaves free of it, and what it may still take: bytes, and inodes for files.

Threading: pure but for /proc and the directory itself; takes as long as its storage takes to answer.

A tier that fills a drive stops others that use it. On a Kubernetes node it is the pod that ends: the kubelet evicts
pods where less than 10 % of the node's filesystem is free, 15 % of the one with the images, or 5 % of the inodes.
"""

from __future__ import annotations

import os
from typing import Final

from nixl_offload.config import DirectoryConfig, SharedDirConfig
from nixl_offload.hardware.mounts import LOCAL, find_mount
from nixl_offload.stores.filesystem import spare_bytes, spare_files

__all__ = ["is_kept", "is_local", "kept_free", "spare_bytes", "spare_files"]

SHARED_DRIVE: Final = 0.10
"""The share that stays free where others use the drive, if the config says nothing."""
EMPTY_DIR: Final = 0.20
"""And in an emptyDir, which lies on the filesystem that the kubelet watches."""


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
