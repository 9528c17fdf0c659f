"""Where ``nixl-offload warm`` copies to: a shared directory beside running servers, or the slabs of a stopped engine.

Threading: ``begin``, ``end`` and ``finish`` are the main thread's; ``missing_ranks`` and ``write`` may be called by
several at once, for different chunks. Ownership: a slab target holds the directory's lock until ``close``.
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
from nixl_offload.cli.common import refuse_anothers_directory
from nixl_offload.cli.warm.source import Candidate
from nixl_offload.config import DirectoryConfig, SharedDirConfig, SlabConfig
from nixl_offload.errors import ConfigError, FormatError, StoreError, TierError
from nixl_offload.identity.namespace import Namespace
from nixl_offload.index import State
from nixl_offload.stores.directory import TreeStore
from nixl_offload.tiers.os_errors import tier_error
from nixl_offload.tiers.shared.background_tasks import WriteManifest
from nixl_offload.tiers.shared.naming import manifest_name, parse_shard_name, shard_name, witness_rank
from nixl_offload.tiers.slab import other_namespaces
from nixl_offload.tiers.slab.file import SlabFile, rank_file_name
from nixl_offload.tiers.slab.tier import SlabTier
from nixl_offload.types import Key, Location, key_group

_INDEX_FLUSH_S: Final = 60.0


class Place:
    """A chunk's place, from ``begin`` to ``end``."""

    __slots__ = ("candidate", "location")

    def __init__(self, candidate: Candidate, location: Location | None) -> None:
        self.candidate = candidate
        self.location = location


class Target(ABC):
    """Receives chunks, each whole or not at all. Errors: TierError and StoreError; what was copied before stays."""

    where: str
    """The directory, for people."""
    room_bytes: int
    """What may still come, over all ranks."""

    @abstractmethod
    def begin(self, candidate: Candidate) -> Place | None:
        """Take a place. None: there is no room for it; nothing that is there is given up to make some."""

    @abstractmethod
    def missing_ranks(self, place: Place) -> Sequence[int]:
        """Return the ranks whose shards are not there, in the order in which they are to be written."""

    @abstractmethod
    def write(self, place: Place, rank: int, image: memoryview) -> None:
        """Put a verified shard in place."""

    @abstractmethod
    def end(self, place: Place, *, stored: bool) -> None:
        """All shards are there (``stored``), or nothing came and nothing writes to the place any more."""

    @abstractmethod
    def has(self, candidate: Candidate) -> bool:
        """Whether the chunk is there already, as far as that is known without asking for each shard."""

    @abstractmethod
    def finish(self, copied: Sequence[Key]) -> None:
        """Make what was copied last: ``copied`` is in order of use, the least wanted first."""

    @abstractmethod
    def close(self) -> None:
        """Let go of everything. Idempotent."""


def held_namespaces(tier: DirectoryConfig) -> set[str]:
    """Return the names of the namespaces in the tier's directory."""
    with contextlib.suppress(OSError):
        return {
            name for name in os.listdir(tier.path) if other_namespaces.last_use_s(Path(tier.path) / name) is not None
        }
    return set()


class TreeTarget(Target):
    """A directory that servers share: a file per shard, renamed into place when it is whole and synced."""

    def __init__(self, tier: SharedDirConfig, namespace: Namespace, max_bytes: int | None) -> None:
        """Count what is there. ``max_bytes``: of this namespace, over all ranks. Raises StoreError."""
        self._store = TreeStore(tier.path)
        self.where = self._store.where
        self._name = namespace.name
        used_bytes = ours_bytes = 0
        for info in self._store.list(""):
            used_bytes += info.size_bytes
            named = parse_shard_name(info.name)
            ours_bytes += info.size_bytes if named is not None and named.namespace == namespace.name else 0
        self.room_bytes = max(0, tier.capacity_bytes - used_bytes)
        if max_bytes is not None:
            self.room_bytes = max(0, min(self.room_bytes, max_bytes - ours_bytes))
        WriteManifest(manifest_name(namespace.name), namespace.manifest(), time.time).run(self._store)

    def begin(self, candidate: Candidate) -> Place | None:
        """See Target."""
        if candidate.total_bytes > self.room_bytes:
            return None
        self.room_bytes -= candidate.total_bytes
        return Place(candidate, None)

    def has(self, candidate: Candidate) -> bool:
        """See Target. Each shard has to be asked for, which ``missing_ranks`` does, many at a time."""
        return False

    def missing_ranks(self, place: Place) -> Sequence[int]:
        """See Target. The shard that servers ask for when they want to know of the chunk comes last."""
        holders = place.candidate.holders
        last = witness_rank(place.candidate.key, holders)
        missing = [rank for rank in holders if not self._has_shard(place.candidate, rank)]
        return sorted(missing, key=lambda rank: rank == last)

    def write(self, place: Place, rank: int, image: memoryview) -> None:
        """See Target."""
        self._store.write(shard_name(self._name, place.candidate.key, rank), image)

    def end(self, place: Place, *, stored: bool) -> None:
        """See Target. Shards that came without the others stay; a later run completes them."""
        if not stored:
            self.room_bytes += place.candidate.total_bytes

    def finish(self, copied: Sequence[Key]) -> None:
        """See Target. Every file is there since its rename."""

    def close(self) -> None:
        """See Target."""
        self._store.close()

    def _has_shard(self, candidate: Candidate, rank: int) -> bool:
        info = self._store.head(shard_name(self._name, candidate.key, rank))
        return info is not None and info.size_bytes == candidate.sizes[rank]


class SlabTarget(Target):
    """The slabs of all ranks of this machine, while no engine has them open: index, slots and headers as the tier's."""

    def __init__(self, tier: SlabConfig, namespace: Namespace, max_bytes: int | None, *, replace: bool) -> None:
        """Take the directory's lock and open what is there, as an engine of ``namespace`` would.

        ``replace``: namespaces of other models may be removed, as far as room is needed, as an engine would do.
        Raises TierError (an engine has it open, ...), ConfigError.
        """
        self.where = tier.path
        self._namespace = namespace
        self._ranks = namespace.fields.world_size
        self._fds: dict[int, int] = {}
        self._slabs: dict[int, SlabFile] = {}
        """By rank, of those that hold anything."""
        _refuse_what_is_not_one_slab(tier, namespace, replace=replace)
        sizes = sorted({namespace.slot_bytes(group.group_id) for group in namespace.fields.groups})
        try:
            self._tier = SlabTier.open(
                tier, position=0, namespace=namespace, slot_classes=sizes, world_size=self._ranks
            )
        except TierError as error:
            if error.cause != "locked":
                raise
            raise TierError(
                f"{str(error).partition(' Stop that engine')[0]} A slab belongs to one engine at a time: stop the "
                "server and run this again, or keep a tier of kind: shared_dir, which is warmed beside servers, or let "
                "traffic warm it: a server stores what it computes, and a memory tier in front keeps what it loads.",
                cause="locked",
            ) from error
        try:
            self._open_slabs(tier)
        except BaseException:
            self.close()
            raise
        used_bytes = sum(taken.bytes_total for taken in self._tier.occupancy().values())
        self.room_bytes = (self._tier.place.rank_bytes - used_bytes) * self._ranks
        if max_bytes is not None:
            self.room_bytes = max(0, min(self.room_bytes, max_bytes - used_bytes * self._ranks))

    def begin(self, candidate: Candidate) -> Place | None:
        """See Target."""
        size = self._ranks * candidate.slot_bytes
        if size > self.room_bytes:
            return None
        location = self._tier.reserve_unused(candidate.key, candidate.slot_bytes)
        if location is None:
            return None
        try:
            for rank in candidate.holders:
                self._slabs[rank].ensure(location.offset, location.slot_bytes)
        except TierError:
            self._tier.abort(candidate.key)
            raise
        self.room_bytes -= size
        return Place(candidate, location)

    def has(self, candidate: Candidate) -> bool:
        """See Target. What the index names must have its header on every rank; else it is forgotten."""
        if self._tier.state(candidate.key) is not State.READY:
            return False
        location = self._tier.pin(candidate.key)
        try:
            whole = all(self._has_header(rank, candidate.key, location) for rank in candidate.holders)
        finally:
            self._tier.unpin(candidate.key)
        if not whole:
            self._tier.drop(candidate.key)
            self.room_bytes += self._ranks * location.slot_bytes
        return whole

    def missing_ranks(self, place: Place) -> Sequence[int]:
        """See Target. A new slot holds nothing yet."""
        return place.candidate.holders

    def write(self, place: Place, rank: int, image: memoryview) -> None:
        """See Target."""
        assert place.location is not None
        done = 0
        try:
            while done < image.nbytes:
                done += os.pwrite(self._fds[rank], image[done:], place.location.offset + done)
        except OSError as error:
            raise tier_error(error, f"cannot write to {self._slabs[rank].path}") from error

    def end(self, place: Place, *, stored: bool) -> None:
        """See Target."""
        if stored:
            self._tier.commit(place.candidate.key)
        else:
            self._tier.abort(place.candidate.key)
            self.room_bytes += self._ranks * place.candidate.slot_bytes

    def finish(self, copied: Sequence[Key]) -> None:
        """See Target. Syncs the slabs, then has the index name the most wanted last: what is first there goes first."""
        try:
            for fd in self._fds.values():
                os.fsync(fd)
        except OSError as error:
            raise tier_error(error, f"cannot sync the slabs in {self.where}") from error
        if not self._tier.renew(copied, timeout_s=_INDEX_FLUSH_S):
            raise TierError(f"the index in {self.where} could not be written; run this again", cause="io")

    def close(self) -> None:
        """See Target."""
        fds, self._fds = self._fds, {}
        for fd in fds.values():
            os.close(fd)
        for slab in self._slabs.values():
            slab.close()
        self._tier.close()

    def _open_slabs(self, tier: SlabConfig) -> None:
        place = self._tier.place
        groups = [group.group_id for group in self._namespace.fields.groups]
        for rank in sorted({rank for group in groups for rank in self._namespace.holders(group)}):
            path = os.path.join(place.directory, rank_file_name(rank))
            slab = SlabFile(path, place.rank_bytes, place.extent_bytes, direct_io=tier.direct_io)
            slab.open()
            self._slabs[rank] = slab
            flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_DIRECT if slab.direct_io else 0)
            try:
                self._fds[rank] = os.open(path, flags)
            except OSError as error:
                raise tier_error(error, f"cannot open {path}") from error

    def _has_header(self, rank: int, key: Key, location: Location) -> bool:
        """Look at one page past O_DIRECT's needs: through the page cache, by a descriptor of its own."""
        try:
            with open(self._slabs[rank].path, "rb", buffering=0) as file:
                header = decode_header(os.pread(file.fileno(), HEADER_BYTES, location.offset))
        except (OSError, FormatError):
            return False
        return (header.namespace, header.key, header.group) == (self._namespace.rank_digest(rank), key, key_group(key))


def _refuse_what_is_not_one_slab(tier: SlabConfig, namespace: Namespace, *, replace: bool) -> None:
    """Raise ConfigError for data-parallel engines, and where others' chunks might be removed for this one's."""
    with contextlib.suppress(OSError):
        if any(_is_part(name) for name in os.listdir(tier.path)):
            raise ConfigError(
                f"{tier.path}: data-parallel engines have a slab each there, which warm does not fill; let traffic do "
                "it, or keep a tier of kind: shared_dir"
            )
    others = held_namespaces(tier) - {namespace.name}
    if others and not replace:
        raise ConfigError(
            f"{tier.path}: holds {', '.join(sorted(others))} of another model or configuration, which would be removed "
            f"as far as room is needed, as by a server of {namespace.name}; if that is meant, say --namespace "
            f"{namespace.name}"
        )


def _is_part(name: str) -> bool:
    return name.startswith("dp-") and name[3:].isdigit()


def open_target(
    tier: SlabConfig | SharedDirConfig, namespace: Namespace, max_bytes: int | None, *, replace: bool
) -> Target:
    """Open the tier for copying; arguments as for ``SlabTarget``. Raises TierError, StoreError, ConfigError."""
    refuse_anothers_directory(tier.path, "warm")
    if isinstance(tier, SharedDirConfig):
        if not os.path.isdir(tier.path) and not Path(tier.path).parent.is_dir():
            raise StoreError(f"{tier.path}: there is no such directory; is the filesystem mounted?", cause="missing")
        return TreeTarget(tier, namespace, max_bytes)
    return SlabTarget(tier, namespace, max_bytes, replace=replace)
