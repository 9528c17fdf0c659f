"""Inspects a slab's directory: every namespace in it, also of data-parallel engines, by their durable indexes.

Threading: as ``tiers.inspect``. An inspector works beside a running engine (``index.durable``). An index lags behind
the engine by a moment, and a row is a hint until the header in the slot confirms it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from nixl_offload.chunk.header import HEADER_BYTES, decode_header
from nixl_offload.config import SlabConfig
from nixl_offload.errors import FormatError, StoreError, TierError
from nixl_offload.identity.namespace import manifest_fits
from nixl_offload.index.durable import IndexReader, Row
from nixl_offload.stores.directory import TreeFiles
from nixl_offload.stores.filesystem import children, tier_error, tree_bytes
from nixl_offload.tiers.inspect import ChunkInfo, Inspector, NamespaceInfo, ShardInfo, printable
from nixl_offload.tiers.ownership import holder_of, require_directory
from nixl_offload.tiers.slab.directory import DP_NAME, INDEX_NAME, NAMESPACE_NAME, last_use_s, read_manifest
from nixl_offload.tiers.slab.file import rank_file_name
from nixl_offload.tiers.slots import SlotPlaces
from nixl_offload.types import key_group


class SlabInspector(Inspector):
    """The inspector of a slab's directory. Nothing stays open between calls."""

    kind = "slab"
    exclusive: ClassVar[bool] = True

    def __init__(self, config: SlabConfig) -> None:
        """Raises StoreError if there is no such directory."""
        self.base = Path(config.path)
        self._files = TreeFiles(config.path, direct_io=True)
        self.where = str(self.base)
        self.capacity_bytes = config.capacity_bytes
        require_directory(self.base)

    def namespaces(self) -> Iterator[NamespaceInfo]:
        """Yield the namespaces. Raises TierError if the directory cannot be read."""
        self.other_objects = 0
        parts = [
            path.name for path, is_directory in _sorted(self.base) if is_directory and DP_NAME.fullmatch(path.name)
        ]
        for part in ["", *parts]:
            for path, is_directory in _sorted(self.base / part):
                if not is_directory or not NAMESPACE_NAME.fullmatch(path.name):
                    self.other_objects += path.name != "lock" and (bool(part) or path.name not in parts)
                    continue
                manifest = read_manifest(path)
                namespace = NamespaceInfo(
                    path.name,
                    manifest if manifest_fits(manifest, path.name) else None,
                    part=part,
                    used_s=last_use_s(path),
                )
                namespace.trouble = self._trouble(namespace)
                yield namespace

    def chunks(self, namespace: NamespaceInfo) -> Iterator[ChunkInfo]:
        if namespace.trouble is None:
            yield from map(_Slots(self.base, namespace).chunk, self._index(namespace).rows())

    def find(self, namespace: NamespaceInfo, digits: str, limit: int) -> Sequence[ChunkInfo]:
        if namespace.trouble is not None:
            return []
        return [_Slots(self.base, namespace).chunk(row) for row in self._index(namespace).find(digits, limit)]

    def in_use(self, namespace: NamespaceInfo) -> str | None:
        """Return which engine has locked the whole directory or this part of it; safe to print."""
        part = namespace.part
        holder = holder_of(self.base / "lock") or (holder_of(self.base / part / "lock") if part else None)
        return printable(holder, limit=200)

    def read_into(self, shard: ShardInfo, offset: int, memory: memoryview) -> None:
        path = os.path.relpath(shard.place.rpartition("@")[0], self.base)
        self._files.read_into(path, shard.offset + offset, memory)

    def created_s(self, chunk: ChunkInfo) -> float | None:
        """Return the time in the header of the first rank's shard; None if the header is not this chunk's."""
        if not chunk.shards:
            return None
        content = bytearray(HEADER_BYTES)
        try:
            self.read_into(chunk.shards[0], 0, memoryview(content))
            header = decode_header(content)
        except (StoreError, FormatError):
            return None
        return float(header.created_s) if header.key == chunk.key else None

    def used_bytes(self) -> int | None:
        """Return the bytes of all files in the directory; the capacity covers foreign ones too. Raises TierError."""
        try:
            # The directory itself may be a link; links inside it are not followed.
            return tree_bytes(self.base.resolve())
        except OSError as error:
            raise tier_error(error, f"{self.where}: cannot be measured") from error

    def close(self) -> None:
        """Nothing stays open."""

    def _index(self, namespace: NamespaceInfo) -> IndexReader:
        return IndexReader(self.base / namespace.path / INDEX_NAME)

    def _trouble(self, namespace: NamespaceInfo) -> str | None:
        try:
            self._index(namespace).check()
        except TierError as error:
            return "no index: its chunks are not known" if error.cause == "missing" else str(error)
        return None if namespace.shards else "no manifest that fits: nobody knows where its shards lie"


class _Piece(NamedTuple):
    """A shard in a slot of a rank's slab."""

    rank: int
    offset: int
    """Bytes from the start of the slot."""
    shard: int
    size_bytes: int


class _Slots:
    """Where the shards of a namespace lie in slabs, by its manifest. Anybody may have written the manifest."""

    def __init__(self, base: Path, namespace: NamespaceInfo) -> None:
        self._directory = base / namespace.path
        self._namespace = namespace
        slab = namespace.manifest.get("slab") if namespace.manifest else None
        self._slab: dict[str, Any] = slab if isinstance(slab, dict) else {}
        self._places = _places(self._slab)
        self._pieces = cache(self._pieces_of)

    def chunk(self, row: Row) -> ChunkInfo:
        """Return the chunk that a row of the index names."""
        shards: dict[str, ShardInfo] = {}  # replicas that share a copy give the same place, which is listed once
        for piece in self._pieces(key_group(row.key)):
            rank, begin = piece.rank, row.offset
            if self._places is not None:
                rank, begin = self._places.find(piece.rank, row.offset, row.slot_bytes)
            offset = begin + piece.offset
            place = f"{self._directory / rank_file_name(rank)}@{offset}"
            shards[place] = ShardInfo(piece.shard, place, piece.size_bytes, offset, None)
        return ChunkInfo(row.key, tuple(shards.values()), row.put_ns)

    def _pieces_of(self, group: int) -> list[_Piece]:
        """Return the shards that each rank holds of a chunk of the group."""
        namespace, pieces = self._namespace, list[_Piece]()
        if group not in namespace.groups:
            return pieces
        for rank, numbers in enumerate(_held(self._slab, namespace.groups.index(group), namespace.shards or 0)):
            offset = 0
            for shard in numbers:
                size_bytes = namespace.shard_bytes(group, shard) or 0
                pieces.append(_Piece(rank, offset, shard, size_bytes))
                offset += size_bytes
        return pieces


def _held(slab: dict[str, Any], group: int, shards: int) -> list[list[int]]:
    """Return by rank the numbers of its shards of a group; empty if the manifest cannot be true."""
    try:
        held = [list(numbers) for numbers in slab["held"][group]]
    except (KeyError, IndexError, TypeError):
        return []
    return held if all(type(n) is int and 0 <= n < shards for numbers in held for n in numbers) else []


def _places(slab: dict[str, Any]) -> SlotPlaces | None:
    """Return the places of slots if replicas share copies; None if each rank has its own."""
    try:
        replicas = {int(size): int(number) for size, number in slab.get("replicas", [])}
        extent_bytes = int(slab["extent_bytes"])
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    positive = all(number > 0 for number in (extent_bytes, *replicas, *replicas.values()))
    return SlotPlaces(extent_bytes, extent_bytes, replicas) if positive and replicas else None


def _sorted(directory: Path) -> list[tuple[Path, bool]]:
    try:
        return sorted(children(directory))
    except OSError as error:
        raise tier_error(error, f"{directory}: cannot be listed") from error
