"""Where ``nixl-offload warm`` copies to: a shared directory beside running servers, or the slabs of a stopped engine.

Threading: ``missing_ranks`` and ``write`` may be called by several threads at once, for different chunks; all else is
the main thread's. Ownership: a slab target holds the directory's lock until ``close``.
"""

from __future__ import annotations

import contextlib
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from nixl_offload.chunk.header import HEADER_BYTES, decode_header
from nixl_offload.cli.warm.source import WholeChunk
from nixl_offload.config import SharedDirConfig, SlabConfig
from nixl_offload.errors import ConfigError, FormatError, StoreError, TierError
from nixl_offload.identity.namespace import Namespace, NamespaceFields
from nixl_offload.index import State
from nixl_offload.stores.directory import TreeStore
from nixl_offload.tiers.inspect import refuse_anothers_directory
from nixl_offload.tiers.os_errors import tier_error
from nixl_offload.tiers.shared.background_tasks import WriteManifest
from nixl_offload.tiers.shared.naming import manifest_name, parse_shard_name, shard_name, witness_rank
from nixl_offload.tiers.slab import other_namespaces
from nixl_offload.tiers.slab.file import SlabFile, rank_file_name
from nixl_offload.tiers.slab.tier import SlabTier
from nixl_offload.types import Key, Location, key_group

_INDEX_FLUSH_S: Final = 60.0


class WarmTarget(ABC):
    """Receives chunks, each whole or not at all. Errors: TierError and StoreError; what was copied before stays."""

    where: str
    room_bytes: int
    """What may still come, over all ranks."""

    def has(self, chunk: WholeChunk) -> bool:
        """Whether the chunk is there, as far as that is known without asking for each shard."""
        return False

    def reserve(self, chunk: WholeChunk) -> bool:
        """Take room for a chunk. False: there is none; nothing that is there makes room."""
        if chunk.total_bytes > self.room_bytes:
            return False
        self.room_bytes -= chunk.total_bytes
        return True

    def missing_ranks(self, chunk: WholeChunk) -> Sequence[int]:
        """Return the ranks whose shards are not there, in the order in which they are to be written."""
        return chunk.holders

    @abstractmethod
    def write(self, chunk: WholeChunk, rank: int, image: memoryview) -> None:
        """Write a verified shard."""

    def settle(self, chunk: WholeChunk, *, stored: bool) -> None:
        """End what ``reserve`` began: all shards are there (``stored``), or nothing writes them any more.

        Shards that came without the others stay; a later run completes them.
        """
        if not stored:
            self.room_bytes += chunk.total_bytes

    def finish(self, copied: Sequence[Key]) -> None:  # noqa: B027 - files are durable since their rename
        """Make what was copied durable. ``copied``: the least wanted first."""

    @abstractmethod
    def close(self) -> None:
        """Release everything. Idempotent."""


class DirectoryTarget(WarmTarget):
    """A shared directory: a file per shard, renamed into place when it is whole and synced."""

    def __init__(self, tier: SharedDirConfig, namespace: Namespace, max_bytes: int | None) -> None:
        """Count what is there. ``max_bytes``: of this namespace, over all ranks. Raises StoreError."""
        if not os.path.isdir(tier.path) and not Path(tier.path).parent.is_dir():
            raise StoreError(f"{tier.path}: there is no such directory; is the filesystem mounted?", cause="missing")
        self._store = TreeStore(tier.path)
        self.where = self._store.where
        self._name = namespace.name
        used_bytes = ours_bytes = 0
        for info in self._store.list(""):
            used_bytes += info.size_bytes
            named = parse_shard_name(info.name)
            ours_bytes += info.size_bytes if named is not None and named.namespace == namespace.name else 0
        self.room_bytes = tier.capacity_bytes - used_bytes
        if max_bytes is not None:
            self.room_bytes = min(self.room_bytes, max_bytes - ours_bytes)
        WriteManifest(manifest_name(namespace.name), namespace.manifest(), time.time).run(self._store)

    def missing_ranks(self, chunk: WholeChunk) -> Sequence[int]:
        """Return them, the one last whose shard servers ask for when they want to know of the chunk."""
        found = {rank: self._store.head(shard_name(self._name, chunk.key, rank)) for rank in chunk.holders}
        missing = [rank for rank, info in found.items() if info is None or info.size_bytes != chunk.sizes[rank]]
        return sorted(missing, key=lambda rank: rank == witness_rank(chunk.key, chunk.holders))

    def write(self, chunk: WholeChunk, rank: int, image: memoryview) -> None:
        self._store.write(shard_name(self._name, chunk.key, rank), image)

    def close(self) -> None:
        self._store.close()


class SlabTarget(WarmTarget):
    """The slabs of all ranks of this machine, while no engine has them open."""

    def __init__(self, tier: SlabConfig, namespace: Namespace, max_bytes: int | None, *, replace: bool) -> None:
        """Take the directory's lock and open what is there, as an engine of ``namespace`` would.

        ``replace``: namespaces of other models may be removed where room is needed, as an engine would do.
        Raises TierError (an engine has it open, ...), ConfigError.
        """
        self.where = tier.path
        self._namespace = namespace
        if not isinstance(namespace.fields, NamespaceFields):
            raise ConfigError(
                f"{tier.path}: which rank's slab takes which shards of a chunk, only a server knows; let traffic do "
                "it, or say kind: shared_dir"
            )
        self._ranks = namespace.fields.world_size
        self._slabs: dict[int, tuple[SlabFile, int]] = {}
        """By rank, of those that hold anything: the slab, and a descriptor to write by."""
        self._locations: dict[Key, Location] = {}
        _refuse_what_is_not_one_slab(tier.path, namespace, replace=replace)
        sizes = sorted({namespace.slot_bytes(group.group_id) for group in namespace.fields.groups})
        try:
            self._tier = SlabTier.open(
                tier, position=0, namespace=namespace, slot_classes=sizes, world_size=self._ranks
            )
        except TierError as error:
            if error.cause != "locked":
                raise
            held = str(error).partition(" Stop that engine")[0]
            fix = "stop the server and run this again, or use a shared directory, which is warmed beside servers."
            raise TierError(f"{held} A slab belongs to one engine at a time: {fix}", cause="locked") from error
        try:
            for rank in {rank for group in namespace.fields.groups for rank in namespace.holders(group.group_id)}:
                self._open_slab(rank, direct_io=tier.direct_io)
        except BaseException:
            self.close()
            raise
        used_bytes = sum(taken.bytes_total for taken in self._tier.occupancy().values())
        self.room_bytes = (self._tier.place.rank_bytes - used_bytes) * self._ranks
        if max_bytes is not None:
            self.room_bytes = min(self.room_bytes, max_bytes - used_bytes * self._ranks)

    def has(self, chunk: WholeChunk) -> bool:
        """Ask the index. What it names must have its header on every rank; else it is forgotten."""
        if self._tier.state(chunk.key) is not State.READY:
            return False
        location = self._tier.pin(chunk.key)
        try:
            whole = all(self._has_header(rank, chunk.key, location) for rank in chunk.holders)
        finally:
            self._tier.unpin(chunk.key)
        if not whole:
            self._tier.drop(chunk.key)
            self.room_bytes += self._ranks * location.slot_bytes
        return whole

    def reserve(self, chunk: WholeChunk) -> bool:
        size_bytes = self._ranks * chunk.slot_bytes
        location = self._tier.reserve_unused(chunk.key, chunk.slot_bytes) if size_bytes <= self.room_bytes else None
        if location is None:
            return False
        try:
            for rank in chunk.holders:
                self._slabs[rank][0].ensure(location.offset, location.slot_bytes)
        except TierError:
            self._tier.abort(chunk.key)
            raise
        self.room_bytes -= size_bytes
        self._locations[chunk.key] = location
        return True

    def write(self, chunk: WholeChunk, rank: int, image: memoryview) -> None:
        slab, fd = self._slabs[rank]
        offset, done = self._locations[chunk.key].offset, 0
        try:
            while done < image.nbytes:
                done += os.pwrite(fd, image[done:], offset + done)
        except OSError as error:
            raise tier_error(error, f"cannot write to {slab.path}") from error

    def settle(self, chunk: WholeChunk, *, stored: bool) -> None:
        del self._locations[chunk.key]
        if stored:
            self._tier.commit(chunk.key)
        else:
            self._tier.abort(chunk.key)
            self.room_bytes += self._ranks * chunk.slot_bytes

    def finish(self, copied: Sequence[Key]) -> None:
        """Sync the slabs, then have the index name the most wanted last: an engine evicts what it names first."""
        try:
            for _, fd in self._slabs.values():
                os.fsync(fd)
        except OSError as error:
            raise tier_error(error, f"cannot sync the slabs in {self.where}") from error
        if not self._tier.renew(copied, timeout_s=_INDEX_FLUSH_S):
            raise TierError(f"the index in {self.where} could not be written; run this again", cause="io")

    def close(self) -> None:
        slabs, self._slabs = self._slabs, {}
        for slab, fd in slabs.values():
            os.close(fd)
            slab.close()
        self._tier.close()

    def _open_slab(self, rank: int, *, direct_io: bool) -> None:
        place = self._tier.place
        path = os.path.join(place.directory, rank_file_name(rank))
        slab = SlabFile(path, place.rank_bytes, place.extent_bytes, direct_io=direct_io)
        slab.open()
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_DIRECT if slab.direct_io else 0)
        try:
            self._slabs[rank] = (slab, os.open(path, flags))
        except OSError as error:
            slab.close()
            raise tier_error(error, f"cannot open {path}") from error

    def _has_header(self, rank: int, key: Key, location: Location) -> bool:
        """Read through the page cache: O_DIRECT would need aligned memory."""
        try:
            with open(self._slabs[rank][0].path, "rb", buffering=0) as file:
                header = decode_header(os.pread(file.fileno(), HEADER_BYTES, location.offset))
        except (OSError, FormatError):
            return False
        return (header.namespace, header.key, header.group) == (self._namespace.rank_digest(rank), key, key_group(key))


def held_namespaces(path: str) -> set[str]:
    """Return the names of the namespaces in a tier's directory."""
    with contextlib.suppress(OSError):
        return {name for name in os.listdir(path) if other_namespaces.last_use_s(Path(path) / name) is not None}
    return set()


def _refuse_what_is_not_one_slab(path: str, namespace: Namespace, *, replace: bool) -> None:
    """Raise ConfigError for data-parallel engines, and where other chunks might be removed for this namespace's."""
    with contextlib.suppress(OSError):
        if any(name.startswith("dp-") and name[3:].isdigit() for name in os.listdir(path)):
            what = "data-parallel engines have a slab each there, which warm does not fill"
            raise ConfigError(f"{path}: {what}; let traffic do it, or say kind: shared_dir, which they share")
    others = held_namespaces(path) - {namespace.name}
    if others and not replace:
        raise ConfigError(
            f"{path}: holds {', '.join(sorted(others))} of another model or configuration, which would be removed where"
            f" room is needed, as by a server of {namespace.name}; if that is meant, say --namespace {namespace.name}"
        )


def open_target(
    tier: SlabConfig | SharedDirConfig, namespace: Namespace, max_bytes: int | None, *, replace: bool
) -> WarmTarget:
    """Open the tier for copying; arguments as for ``SlabTarget``. Raises TierError, StoreError, ConfigError."""
    refuse_anothers_directory(tier.path)
    if tier.kind == "shared_dir":
        return DirectoryTarget(tier, namespace, max_bytes)
    return SlabTarget(tier, namespace, max_bytes, replace=replace)
