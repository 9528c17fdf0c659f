"""A slab tier's directory, as the scheduler owns it: the lock, the namespace's files, and the sizes of slabs.

Threading: one owner, at start and end. While requests are served a thread may call ``is_held`` and ``extents_now``.
Ownership: the process that has a ``TierDirectory`` is the only engine on that directory.

    <path>/lock                        held while the engine runs
    <path>/dp-<i>/…                    one such root per data-parallel engine, if there are several
    <path>/<namespace>/manifest.json   for people, and to recognise the directory; its mtime is the last use
    <path>/<namespace>/index.table     the durable index
    <path>/<namespace>/rank-00000.slab one slab per rank

Other namespaces under the path count against the capacity and may be removed; nothing else is. A namespace is a
directory with such a name and a manifest that confirms it. No symbolic link is followed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import stat
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from nixl_offload.config import SlabConfig
from nixl_offload.errors import ConfigError, TierError
from nixl_offload.index.durable import max_bytes
from nixl_offload.stores.filesystem import REAL, Filesystem, children, replace_file, spare_bytes, tier_error, tree_bytes
from nixl_offload.tiers.base import TierContext
from nixl_offload.tiers.ownership import DirectoryLock, holder_of, kept_free, make_private_directory
from nixl_offload.tiers.slots import SLOTS_PER_EXTENT_MIN, choose_extent_bytes
from nixl_offload.types import PAGE_BYTES, align_up
from nixl_offload.units import format_size

logger = logging.getLogger(__name__)

MANIFEST_NAME: Final = "manifest.json"
INDEX_NAME: Final = "index.table"
NAMESPACE_NAME: Final = re.compile(r"[0-9a-f]{32}")
DP_NAME: Final = re.compile(r"dp-[0-9]+")
METADATA_SHARE: Final = 256
"""One byte in 256 is left for the filesystem's metadata of a slab: at worst a 16-byte record per 4 KiB."""
_SMALL_FILES_BYTES: Final = 256 << 10
_SMALL_FILES_PER_RANK_BYTES: Final = 2 * PAGE_BYTES
_MANIFEST_MAX_BYTES: Final = 1 << 20
_RANK_NAME: Final = re.compile(r"rank-([0-9]{5,})\.slab")
_LEFTOVER: Final = re.compile(r"\.mover-probe-[a-z0-9_]{8}|(manifest|index)\.tmp")
"""Files left by an engine that was killed while it started: a rank's probe of a mover, or a draft of the manifest."""


class TierDirectory:
    """A locked directory with room for this namespace. Made by ``open``; release it with ``close``."""

    def __init__(self, base: Path, root: Path, context: TierContext, filesystem: Filesystem) -> None:
        """Use ``open``."""
        self.root = root
        self.namespace_path = root / context.namespace.name
        self.index_path = self.namespace_path / INDEX_NAME
        self.rank_bytes = 0
        """Size of each rank's slab, in whole extents. The same for all ranks."""
        self.extent_bytes = 0
        """Size of the slab's extents. Restarts keep it while it suits the capacity."""
        self.geometry: dict[str, object] = {}
        """The facts that give offsets in the slabs their meaning, as in the manifest."""
        self._base = base
        self._context = context
        self._filesystem = filesystem
        paths = (base, root) if root != base else (base,)
        self._locks = [DirectoryLock(path / "lock", filesystem) for path in paths]
        self._kept_free = 0.0

    @classmethod
    def open(cls, config: SlabConfig, context: TierContext, *, filesystem: Filesystem = REAL) -> TierDirectory:
        """Lock the directory, make room in it, and compute the slabs' size.

        The capacity covers everything under the path: slabs of all ranks and data-parallel engines, indexes, other
        namespaces. While this namespace cannot have half of its share, or its minimum, other namespaces are removed,
        least recently used first. If the drive cannot hold the capacity and leave ``keep_free`` free, the capacity is
        lowered, so that chunks are evicted before the drive is full.

        Raises TierError (``locked`` by another engine; ``full`` when foreign files take the capacity; causes of the
        operating system) and ConfigError (capacity too small for this model; names the minimum).
        """
        base = Path(os.path.abspath(config.path))
        root = base / f"dp-{context.dp_index}" if len(context.dp_engines) > 1 else base
        directory = cls(base, root, context, filesystem)
        with ExitStack() as undo:
            undo.callback(directory.close)
            try:
                make_private_directory(root)
                for lock in directory._locks:
                    lock.acquire(shared=lock is not directory._locks[-1])
                directory._make_ready(config)
            except OSError as error:
                raise tier_error(error, f"cannot use the directory {root}") from error
            undo.pop_all()
        return directory

    @property
    def owner(self) -> str:
        """The owner's name in the lock of ``root`` while this engine holds it."""
        return self._locks[-1].owner

    def is_held(self) -> bool:
        """Return whether the directories with these paths are still locked by this engine, and the namespace exists.

        Raises OSError if the storage cannot tell.
        """
        try:
            mode = self._filesystem.stat(str(self.namespace_path)).st_mode
        except (FileNotFoundError, NotADirectoryError):
            return False
        return stat.S_ISDIR(mode) and all(lock.is_held() for lock in self._locks)

    def extents_now(self) -> int:
        """Return the extents each slab may have: those it has, if the drive has no room to grow. Raises OSError."""
        sizes = [path.stat().st_size for path in self.namespace_path.iterdir() if _RANK_NAME.fullmatch(path.name)]
        spare = spare_bytes(os.statvfs(self.namespace_path), self._kept_free)
        grows = not sizes or spare >= len(sizes) * self.extent_bytes
        return (self.rank_bytes if grows else min(sizes)) // self.extent_bytes

    def close(self) -> None:
        """Release the locks. Idempotent. The files stay for the next engine."""
        for lock in reversed(self._locks):
            lock.release()

    def _make_ready(self, config: SlabConfig) -> None:
        """Do the work of ``open`` after locking. Raises OSError, TierError, ConfigError."""
        base, context, engines = self._base, self._context, len(self._context.dp_engines)
        slot_classes, share_bytes = context.slot_classes, config.capacity_bytes // engines
        self._kept_free = kept_free(config)
        self._remove_leftovers()
        needed_bytes = least_bytes(context)
        if share_bytes < needed_bytes:
            raise ConfigError(
                f"capacity {format_size(config.capacity_bytes)} of {base} is too small for this model: slots of "
                f"{slot_classes[-1]} bytes on {context.world_size} ranks and {engines} data-parallel engines need "
                f"at least {format_size(needed_bytes * engines)}"
            )
        room_bytes = tree_bytes(base) + spare_bytes(os.statvfs(base), self._kept_free)
        if room_bytes < config.capacity_bytes:
            share_bytes = max(needed_bytes, int(room_bytes) // engines)
            logger.warning(
                "Slab tier %s: of the capacity of %s the drive has room for %s%s: no more is used until the next start",
                base,
                format_size(config.capacity_bytes),
                format_size(max(0, int(room_bytes)) >> 20 << 20),
                f", where {self._kept_free:.0%} of it stay free (keep_free)" if self._kept_free else "",
            )
        available_bytes = self._make_room(share_bytes, max(share_bytes // 2, needed_bytes))
        if available_bytes < needed_bytes:
            raise TierError(
                f"files that are not ours leave {max(0, available_bytes)} bytes of the capacity of {self.root}; at "
                f"least {needed_bytes} are needed. Move them away or raise the capacity.",
                cause="full",
            )
        rank_bytes = _rank_bytes(context, available_bytes)
        self.extent_bytes = self._extent_bytes(rank_bytes)
        self.rank_bytes = rank_bytes // self.extent_bytes * self.extent_bytes
        make_private_directory(self.namespace_path)
        self.namespace_path.chmod(0o700)
        self._trim()
        self.geometry = {
            "extent_bytes": self.extent_bytes,
            "slot_classes": slot_classes,
            "held": context.namespace.held(),  # commands find shards by it
        }
        if replicas := context.namespace.slot_replicas:
            self.geometry["replicas"] = sorted(map(list, replicas.items()))
        self._write_manifest({**context.namespace.manifest(), "slab": self.geometry})

    def _remove_leftovers(self) -> None:
        """Remove leftovers, so that they do not count against the capacity. They are nobody's: the lock is held, and
        this engine's ranks start later.
        """
        with contextlib.suppress(OSError):
            for path in self.namespace_path.iterdir():
                if _LEFTOVER.fullmatch(path.name):
                    path.unlink(missing_ok=True)

    def _make_room(self, share_bytes: int, wanted_bytes: int) -> int:
        """Remove other namespaces until this one can have ``wanted_bytes``; return the bytes that it can have."""
        base, engines, locks = self._base, self._context.dp_engines, {lock.path for lock in self._locks}
        ours = {self.namespace_path, *locks}
        others = [(*each, 1) for each in _others(self.root, ours)]
        if len(engines) > 1:
            siblings = {base / f"dp-{index}" for index in engines}
            others += [(*each, len(engines)) for each in _others(base, ours | siblings)]
        available_bytes = share_bytes - sum(-(-size_bytes // sharers) for _, size_bytes, _, sharers in others)
        removable = [
            (used_s, path, size_bytes, sharers) for path, size_bytes, used_s, sharers in others if used_s is not None
        ]
        for _, path, size_bytes, sharers in sorted(removable):
            if available_bytes >= wanted_bytes:
                break
            if not _unused(path.parent, locks):
                continue
            try:
                remove_namespace(path)
            except OSError as error:
                logger.warning("Slab tier %s: cannot remove the unused namespace %s: %s", base, path, error)
                continue
            available_bytes += -(-size_bytes // sharers)
            logger.info(
                "Slab tier %s: removed namespace %s (%.1f MiB, of another model or configuration, least recently used) "
                "to make room",
                base,
                path.name,
                size_bytes / 2**20,
            )
        return available_bytes

    def _extent_bytes(self, rank_bytes: int) -> int:
        """Keep the extent size of the last run if it still suits, because the offsets of chunks depend on it."""
        slot_classes = self._context.slot_classes
        fresh = choose_extent_bytes(rank_bytes, slot_classes)
        slab: Any = (read_manifest(self.namespace_path) or {}).get("slab")
        if not isinstance(slab, dict) or slab.get("slot_classes") != slot_classes:
            return fresh
        kept = slab.get("extent_bytes")
        if type(kept) is not int or kept < slot_classes[-1] or kept % PAGE_BYTES:
            return fresh
        enough = min(rank_bytes // fresh, SLOTS_PER_EXTENT_MIN * len(slot_classes))
        return kept if rank_bytes // kept >= enough else fresh

    def _trim(self) -> None:
        """Cut slabs to a capacity that shrank; remove slabs of ranks that no longer exist."""
        for path in self.namespace_path.iterdir():
            named = _RANK_NAME.fullmatch(path.name)
            if named is None:
                continue
            status = path.lstat()
            if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1 or int(named[1]) >= self._context.world_size:
                path.unlink()  # if it is a hard link, its other name stays
            elif status.st_size > self.rank_bytes:
                os.truncate(path, self.rank_bytes)

    def _write_manifest(self, manifest: dict[str, Any]) -> None:
        """Write the manifest atomically. If it is unchanged, only touch it, which works on a full disk too.

        It is synced before slabs are made: after a power cut, slabs without a manifest could never be removed.
        """
        path = self.namespace_path / MANIFEST_NAME
        text = json.dumps(manifest, indent=2, sort_keys=True) + "\n"
        if read_manifest(self.namespace_path) != json.loads(text):
            replace_file(REAL, path, text.encode())
        os.utime(path)


def least_bytes(context: TierContext) -> int:
    """Return the least capacity, to the MiB, with which every slot class has an extent of four slots on each rank."""
    classes = context.slot_classes
    least_rank_bytes = len(classes) * SLOTS_PER_EXTENT_MIN * classes[-1]
    available_bytes = align_up(context.world_size * least_rank_bytes, 1 << 20)
    while _rank_bytes(context, available_bytes) < least_rank_bytes:
        available_bytes += max(1 << 20, align_up(available_bytes // 64, 1 << 20))
    return available_bytes


def _rank_bytes(context: TierContext, available_bytes: int) -> int:
    """Return the share of one rank, after the index, small files and the filesystem's metadata."""
    ranks, together = context.world_size, max(context.namespace.slot_replicas.values(), default=1)
    keys = max(0, available_bytes) * together // ranks // context.slot_classes[0]
    small_files_bytes = _SMALL_FILES_BYTES + ranks * _SMALL_FILES_PER_RANK_BYTES
    slabs_bytes = available_bytes - max_bytes(keys) - small_files_bytes
    return max(0, slabs_bytes * METADATA_SHARE // (METADATA_SHARE + 1) // ranks)


def _unused(root: Path, own_locks: set[Path]) -> bool:
    """Whether no other engine holds ``root``, the parent of another namespace."""
    try:
        return root / "lock" in own_locks or holder_of(root / "lock") is None
    except TierError:
        return False


def _others(directory: Path, skip: Collection[Path]) -> Iterator[tuple[Path, int, float | None]]:
    """Yield each child of ``directory`` and its ``dp-N`` parts, except ``skip``: path, real bytes, and when an engine
    last opened it (seconds since the epoch; None if it is not a namespace). Raises OSError.
    """
    for path, is_directory in children(directory):
        if path in skip:
            continue
        used_s = last_use_s(path)
        if used_s is None and is_directory and DP_NAME.fullmatch(path.name):
            yield from _others(path, skip)
        else:
            yield path, tree_bytes(path), used_s


def read_manifest(namespace_path: Path) -> dict[str, Any] | None:
    """Return the manifest in ``namespace_path``, None if it is missing or cannot be read."""
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
    """Return when the namespace in ``path`` was last opened; None if it is not a slab's namespace or is unreadable."""
    try:
        if not NAMESPACE_NAME.fullmatch(path.name) or path.is_symlink():
            return None
        manifest = read_manifest(path)
        if manifest is None or not str(manifest.get("namespace", "")).startswith(path.name):
            return None
        if not isinstance(manifest.get("slab"), dict):  # it belongs to a shared directory, which other servers use
            return None
        return (path / MANIFEST_NAME).stat(follow_symlinks=False).st_mtime
    except OSError:
        return None


def remove_namespace(namespace_path: Path) -> None:
    """Remove a namespace, its manifest last, so that a partly removed one is still recognised. Another engine may
    remove it at the same time. Raises OSError.
    """
    manifest = namespace_path / MANIFEST_NAME
    for path, is_directory in children(namespace_path):
        if path == manifest:
            continue
        if is_directory:
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    manifest.unlink(missing_ok=True)
    with contextlib.suppress(FileNotFoundError):
        namespace_path.rmdir()
