"""What a tree or a bucket holds: by listing it through its store, names taken apart by ``tiers.naming``.

Threading: as ``inventory``; the store is owned here. Servers go on meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from nixl_offload.cli.gc.collect import list_namespaces, read_manifest
from nixl_offload.cli.inventory.base import Chunk, Held, Inventory, Measure, Shard
from nixl_offload.stores.base import ObjectInfo, Store
from nixl_offload.tiers.shared.naming import parse_manifest_name, parse_shard_name
from nixl_offload.types import Key


class SharedInventory(Inventory):
    """A bucket, or a shared directory."""

    def __init__(self, store: Store, *, kind: str, capacity_bytes: int | None) -> None:
        """Own ``store`` from here on."""
        self.store = store
        self.kind = kind
        self.where = store.where
        self.capacity_bytes = capacity_bytes

    def namespaces(self) -> Iterator[Held]:
        """See Inventory."""
        self.foreign = 0

        def count(info: ObjectInfo) -> None:
            self.foreign += 1

        for name in list_namespaces(self.store, count):
            yield Held(name, read_manifest(self.store, name))

    def measure(self, held: Held) -> Measure:
        """See Inventory. Lists the namespace. A chunk is as old as its youngest shard."""
        chunks = shards = size_bytes = 0
        oldest_s, newest_s = math.inf, -math.inf
        for chunk in self.chunks(held):
            chunks, shards, size_bytes = chunks + 1, shards + len(chunk.shards), size_bytes + chunk.size_bytes
            modified_s = max(shard.modified_s or 0.0 for shard in chunk.shards)
            oldest_s, newest_s = min(oldest_s, modified_s), max(newest_s, modified_s)
        if not chunks:
            return Measure(0, 0, 0, None, None)
        return Measure(chunks, shards, size_bytes, oldest_s, newest_s)

    def chunks(self, held: Held, after: str = "") -> Iterator[Chunk]:
        """See Inventory. In the order of keys; what else lies in the namespace counts as foreign."""
        return self._grouped(self.store.list(f"{held.name}/", start_after=after), held)

    def find(self, held: Held, digits: str, limit: int) -> Sequence[Chunk]:
        """See Inventory."""
        found: list[Chunk] = []
        for chunk in self._grouped(self.store.list(f"{held.name}/{digits[:2]}/{digits}"), held):
            found.append(chunk)
            if len(found) == limit:
                break
        return found

    def look_again(self, held: Held, chunk: Chunk) -> Chunk | None:
        """See Inventory."""
        digits = chunk.key.hex()
        return next(iter(self._grouped(self.store.list(f"{held.name}/{digits[:2]}/{digits}."), held)), None)

    def read_into(self, shard: Shard, offset: int, memory: memoryview) -> None:
        """See Inventory."""
        self.store.read_into(shard.place, offset, memory)

    def created_s(self, chunk: Chunk) -> float | None:
        """See Inventory. When it was written or refreshed."""
        return max((shard.modified_s for shard in chunk.shards if shard.modified_s is not None), default=None)

    def used_bytes(self) -> int | None:
        """See Inventory. The chunks alone count."""
        return None

    def delete(self, chunk: Chunk) -> None:
        """Delete all shards of a chunk. Raises StoreError."""
        self.store.delete([shard.place for shard in chunk.shards])

    def close(self) -> None:
        """See Inventory."""
        self.store.close()

    def _grouped(self, listing: Iterator[ObjectInfo], held: Held) -> Iterator[Chunk]:
        key: Key | None = None
        shards: list[ObjectInfo] = []
        for info in listing:
            name = parse_shard_name(info.name)
            if name is None or len(name.key) <= 4:
                self.foreign += parse_manifest_name(info.name) != held.name
                continue
            if name.key != key:
                if key is not None:
                    yield _chunk(key, shards)
                key, shards = name.key, []
            shards.append(info)
        if key is not None:
            yield _chunk(key, shards)


def _chunk(key: Key, infos: Sequence[ObjectInfo]) -> Chunk:
    shards = []
    for info in infos:
        name = parse_shard_name(info.name)
        assert name is not None, "listed as a shard"
        shards.append(Shard(name.rank, info.name, info.size_bytes, 0, info.modified_s))
    return Chunk(key, tuple(shards), infos[-1].name)
