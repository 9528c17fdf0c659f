"""What a shared tier does to its store when nobody waits: deletes what is bad, writes the manifest.

Threading: functions that block for as long as the store takes; they run on the prober's threads. They raise StoreError.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from nixl_offload.identity.namespace import Namespace
from nixl_offload.stores.base import Store
from nixl_offload.tiers.shared.naming import StoredShard, manifest_name


def delete(chunks: Sequence[Sequence[StoredShard]], even_whole: bool, store: Store) -> None:
    """Delete all shards of chunks; what is absent already is fine. A chunk whose shards all have their size stays,
    unless ``even_whole``.
    """
    going = [chunk for chunk in chunks if even_whole or not is_whole(chunk, store)]
    store.delete([shard.name for chunk in going for shard in chunk])


def is_whole(shards: Sequence[StoredShard], store: Store) -> bool:
    """Whether every shard is there with its size; what is in them only a load can tell."""
    found = ((store.head(shard.name), shard.size_bytes) for shard in shards)
    return all(info is not None and info.size_bytes == size_bytes for info, size_bytes in found)


def write_manifest(namespace: Namespace, wall: Callable[[], float], store: Store) -> None:
    """Tell people what a namespace is, unless somebody has already. Two servers that write at once write the same but
    for the time.
    """
    name = manifest_name(namespace.name)
    if store.head(name) is None:
        content: dict[str, Any] = {**namespace.manifest(), "created_s": round(wall(), 3)}
        store.write(name, memoryview((json.dumps(content, indent=2, sort_keys=True) + "\n").encode()))
