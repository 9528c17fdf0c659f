"""What else lies under a tier's root: other namespaces, which count against capacity and may be removed, and the rest.

Threading: functions over the filesystem, called by the holder of the tier's lock.
Deletes only what it recognises: a directory named like a namespace whose manifest names the same namespace. Follows no
symbolic link.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import stat
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final, NamedTuple

MANIFEST_NAME: Final = "manifest.json"
INDEX_NAME: Final = "index.sqlite"
_MANIFEST_MAX_BYTES: Final = 1 << 20
NAMESPACE_NAME: Final = re.compile(r"[0-9a-f]{32}")
DP_NAME: Final = re.compile(r"dp-[0-9]+")


class OtherNamespace(NamedTuple):
    """A whole namespace of another model or configuration."""

    path: Path
    size_bytes: int
    used_s: float
    """When an engine last opened it, seconds since the epoch."""


class Survey(NamedTuple):
    """What was found: namespaces that may go, and bytes that are not ours to remove."""

    namespaces: list[OtherNamespace]
    other_bytes: int


def survey(directory: Path, skip: Collection[Path]) -> Survey:
    """Measure everything in ``directory`` except ``skip``, looking for namespaces there and in its ``dp-N`` parts.

    Raises OSError. What vanishes meanwhile counts nothing.
    """
    namespaces: list[OtherNamespace] = []
    other_bytes = 0
    for path in _children(directory):
        if path in skip:
            continue
        used_s = last_use_s(path)
        if used_s is not None:
            namespaces.append(OtherNamespace(path, tree_bytes(path), used_s))
        elif DP_NAME.fullmatch(path.name) and _is_directory(path):
            part = survey(path, skip)
            namespaces.extend(part.namespaces)
            other_bytes += part.other_bytes
        else:
            other_bytes += tree_bytes(path)
    return Survey(namespaces, other_bytes)


def read_manifest(namespace_path: Path) -> dict[str, Any] | None:
    """Return the manifest in ``namespace_path``, None when there is none that can be read."""
    try:
        fd = os.open(namespace_path / MANIFEST_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                return None
            manifest = json.loads(file.read(_MANIFEST_MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    return manifest if isinstance(manifest, dict) else None


def last_use_s(path: Path) -> float | None:
    """Return when the namespace in ``path`` was last opened; None when it is none that we wrote, or cannot be seen."""
    try:
        if not NAMESPACE_NAME.fullmatch(path.name) or not _is_directory(path):
            return None
        manifest = read_manifest(path)
        if manifest is None or not str(manifest.get("namespace", "")).startswith(path.name):
            return None
        if not isinstance(manifest.get("slab"), dict):  # a shared directory's, and other servers' as well
            return None
        return (path / MANIFEST_NAME).stat(follow_symlinks=False).st_mtime
    except OSError:
        return None


def remove(namespace_path: Path) -> None:
    """Remove a namespace; its manifest goes last, so that remains are still recognised. Raises OSError, but not where
    another engine removes it at the same time and is quicker.
    """
    manifest = namespace_path / MANIFEST_NAME
    for path in _children(namespace_path):
        if path == manifest:
            continue
        if _is_directory(path):
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    manifest.unlink(missing_ok=True)
    with contextlib.suppress(FileNotFoundError):
        namespace_path.rmdir()


def tree_bytes(path: Path) -> int:
    """Return the real bytes (allocated blocks) of a file or of a whole directory, links not followed."""
    try:
        status = path.stat(follow_symlinks=False)
    except FileNotFoundError:
        return 0
    size_bytes = status.st_blocks * 512
    if stat.S_ISDIR(status.st_mode):
        size_bytes += sum(tree_bytes(child) for child in _children(path))
    return size_bytes


def _children(directory: Path) -> list[Path]:
    try:
        with os.scandir(directory) as entries:
            return [Path(entry.path) for entry in entries]
    except FileNotFoundError:
        return []


def _is_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()
