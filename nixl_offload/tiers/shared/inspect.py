"""Inspects a shared directory or a bucket by listing it through its store. Servers may use it at the same time.

Threading: as ``tiers.inspect``. Ownership: the inspector closes its store.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Final

from nixl_offload.errors import StoreError
from nixl_offload.identity.namespace import manifest_fits
from nixl_offload.stores.base import ObjectInfo, Store
from nixl_offload.tiers.inspect import ChunkInfo, Inspector, NamespaceInfo, ShardInfo
from nixl_offload.tiers.shared.naming import manifest_name, parse_manifest_name, parse_shard_name
from nixl_offload.types import Key

_MANIFEST_MAX_BYTES: Final = 1 << 20


class SharedInspector(Inspector):
    """The inspector of shared directories and buckets."""

    store: Store

    def __init__(self, store: Store, *, kind: str, capacity_bytes: int | None) -> None:
        self.store = store
        self.kind = kind
        self.where = store.where
        self.capacity_bytes = capacity_bytes

    def namespaces(self) -> Iterator[NamespaceInfo]:
        """Yield each namespace once, listing at most one page of each."""
        self.other_objects, after = 0, ""
        while True:
            found = None
            for info in self.store.list("", start_after=after):
                first, slash, _ = info.name.partition("/")
                found = parse_manifest_name(manifest_name(first)) if slash else None
                if found:
                    break
                self.other_objects += 1
            if not found:
                return
            yield NamespaceInfo(found, read_manifest(self.store, found))
            after = f"{found}0"  # "0" follows "/", so this sorts right after all objects of the namespace

    def chunks(self, namespace: NamespaceInfo) -> Iterator[ChunkInfo]:
        """Yield chunks in the order of their keys."""

        def count(info: ObjectInfo) -> None:
            self.other_objects += parse_manifest_name(info.name) != namespace.name

        return group_chunks(self.store.list(f"{namespace.name}/"), count)

    def find(self, namespace: NamespaceInfo, digits: str, limit: int) -> Sequence[ChunkInfo]:
        found = group_chunks(self.store.list(f"{namespace.name}/{digits[:2]}/"))
        return list(islice((chunk for chunk in found if chunk.key.hex().startswith(digits)), limit))

    def read_into(self, shard: ShardInfo, offset: int, memory: memoryview) -> None:
        self.store.read_into(shard.place, offset, memory)

    def close(self) -> None:
        self.store.close()


def group_chunks(
    listing: Iterable[ObjectInfo], others: Callable[[ObjectInfo], None] | None = None
) -> Iterator[ChunkInfo]:
    """Group a listing in name order into chunks; objects not named like a shard go to ``others``.

    The shards of a key are consecutive in a listing, so only one chunk is held at a time.
    """
    current: tuple[str, Key] | None = None
    shards: list[ShardInfo] = []
    for info in listing:
        name = parse_shard_name(info.name)
        if name is None or len(name.key) <= 4:
            if others is not None:
                others(info)
            continue
        if (name.namespace, name.key) != current:
            if current is not None:
                yield ChunkInfo(current[1], tuple(shards))
            current, shards = (name.namespace, name.key), []
        shards.append(ShardInfo(name.shard, info.name, info.size_bytes, 0, info.modified_s))
    if current is not None:
        yield ChunkInfo(current[1], tuple(shards))


def read_manifest(store: Store, namespace: str) -> dict[str, Any] | None:
    """Return the namespace's manifest, None if it is missing or does not fit the namespace. Anybody may have written
    it. Raises StoreError.
    """
    name = manifest_name(namespace)
    info = store.head(name)
    if info is None or info.size_bytes > _MANIFEST_MAX_BYTES:
        return None
    content = bytearray(info.size_bytes)
    try:
        store.read_into(name, 0, memoryview(content))
        manifest: Any = json.loads(content)
    except StoreError as exc:
        if exc.cause in ("missing", "short"):  # deleted or replaced since the ``head``
            return None
        raise
    except (ValueError, RecursionError):
        return None
    return manifest if manifest_fits(manifest, namespace) else None
