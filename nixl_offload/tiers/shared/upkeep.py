"""What a shared tier does to its store when nobody waits: deletes what is bad, refreshes what expires, writes the
manifest.

Threading: ``Upkeep`` is the scheduler's thread's; the functions below it run on the prober's threads. Time is passed in
(monotonic seconds).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from nixl_offload.errors import StoreError
from nixl_offload.identity.namespace import Namespace
from nixl_offload.stores.base import Store
from nixl_offload.tiers.shared.naming import StoredShard, manifest_name, shards_of
from nixl_offload.tiers.shared.prober import Prober
from nixl_offload.types import Key

REFRESH_BATCH: Final = 64
MAX_REFRESHES: Final = 16_384
MANIFEST_RETRY_S: Final = 60.0


class Refreshed(NamedTuple):
    """What became of chunks that were to be refreshed."""

    modified_s: dict[Key, float]
    """When each chunk that is there was modified, by the store's word. Some copy an object onto itself and keep its
    time."""
    gone: list[Key]
    """Chunks of which a shard is missing, or has another size than it should."""


class Upkeep:
    """Hands tasks to the prober. The next lookup of the chunk asks again for what it refuses."""

    def __init__(
        self,
        prober: Prober,
        namespace: Namespace,
        *,
        ttl_s: float | None,
        wall: Callable[[], float],
        refreshed: Callable[[Refreshed, float], None],
    ) -> None:
        """The manifest is written at the first ``begin``. ``ttl_s`` None: nothing expires. ``refreshed`` gets what
        became of chunks, and when they were looked at.
        """
        self._prober = prober
        self._namespace = namespace
        self._ttl_s = ttl_s
        self._wall = wall
        self._refreshed = refreshed
        self._manifest_s: float | None = 0.0
        """When to write the manifest; None: it is there, or somebody is at it."""
        self._to_refresh: list[Key] = []
        self.discarding: set[Key] = set()
        """Being deleted: stored anew only afterwards, else the deletion might hit the new one."""

    @property
    def takes_refreshes(self) -> bool:
        """Whether ``refresh`` does anything."""
        return self._ttl_s is not None and len(self._to_refresh) < MAX_REFRESHES

    def refresh(self, key: Key) -> None:
        """Look at a chunk soon, and refresh it where it is old."""
        self._to_refresh.append(key)

    def discard(self, keys: Sequence[Key], *, even_whole: bool = False) -> None:
        """Delete chunks; those that are whole only with ``even_whole``, for another server has stored them."""
        keys = [key for key in keys if key not in self.discarding]
        chunks = [shards_of(self._namespace, key) for key in keys]

        def ended(_: None, error: StoreError | None) -> None:
            self.discarding.difference_update(keys)

        if keys and self._prober.do(partial(delete, chunks, even_whole), ended):
            self.discarding.update(keys)

    def begin(self, now_s: float) -> None:
        """Begin what waits."""
        if self._manifest_s is not None and now_s >= self._manifest_s:
            write = partial(write_manifest, self._namespace, self._wall)

            def ended(_: None, error: StoreError | None) -> None:
                self._manifest_s = now_s + MANIFEST_RETRY_S if error is not None else None

            if self._prober.do(write, ended):
                self._manifest_s = None
        if not self._to_refresh or self._ttl_s is None:
            return
        keys, self._to_refresh = self._to_refresh, []

        def looked_at(found: Refreshed | None, error: StoreError | None) -> None:
            if found is not None:
                self._refreshed(found, now_s)

        for start in range(0, len(keys), REFRESH_BATCH):
            chunks = {key: shards_of(self._namespace, key) for key in keys[start : start + REFRESH_BATCH]}
            if not self._prober.do(partial(refresh, chunks, self._ttl_s / 2, self._wall), looked_at):
                break

    def clear(self) -> None:
        """Refresh nothing that was to be refreshed."""
        self._to_refresh.clear()


def delete(chunks: Sequence[Sequence[StoredShard]], even_whole: bool, store: Store) -> None:
    """Delete all shards of chunks; what is absent already is fine. A chunk whose shards all have their size stays,
    unless ``even_whole``.
    """
    going = [chunk for chunk in chunks if even_whole or not is_whole(chunk, store)]
    store.delete([shard.name for chunk in going for shard in chunk])


def refresh(
    chunks: dict[Key, tuple[StoredShard, ...]], older_than_s: float, wall: Callable[[], float], store: Store
) -> Refreshed:
    """Look how old chunks are, and make those young again that are older than ``older_than_s``."""
    found = Refreshed({}, [])
    for key, shards in chunks.items():
        modified_s = _modified_s(shards[0], store)
        if modified_s is not None and wall() - modified_s > older_than_s:
            modified_s = _modified_s(shards[0], store) if all(store.refresh(*shard) for shard in shards) else None
        if modified_s is None:
            found.gone.append(key)
        else:
            found.modified_s[key] = modified_s
    return found


def is_whole(shards: Sequence[StoredShard], store: Store) -> bool:
    """Whether every shard is there with its size; what is in them only a load can tell."""
    return all(_modified_s(shard, store) is not None for shard in shards)


def write_manifest(namespace: Namespace, wall: Callable[[], float], store: Store) -> None:
    """Tell people what a namespace is, unless somebody has already. Two servers that write at once write the same but
    for the time.
    """
    name = manifest_name(namespace.name)
    if store.head(name) is None:
        content: dict[str, Any] = {**namespace.manifest(), "created_s": round(wall(), 3)}
        store.write(name, memoryview((json.dumps(content, indent=2, sort_keys=True) + "\n").encode()))


def _modified_s(shard: StoredShard, store: Store) -> float | None:
    """Return when the shard was modified, None where it is gone or has another size."""
    info = store.head(shard.name)
    return info.modified_s if info is not None and info.size_bytes == shard.size_bytes else None
