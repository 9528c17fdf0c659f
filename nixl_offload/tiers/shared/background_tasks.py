"""What a prober does to a shared store when nobody waits: delete, refresh, look again, leave a note for people.

Threading: a task is run by one thread of the prober and read by the scheduler's once it is over.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from nixl_offload.stores.base import Store
from nixl_offload.tiers.shared.naming import StoredShard
from nixl_offload.types import Key


@dataclass(slots=True, eq=False)
class Discard:
    """Delete all shards of some chunks. Harmless whoever else uses them: it costs a recompute."""

    keys: tuple[Key, ...]
    chunks: tuple[tuple[StoredShard, ...], ...]
    """The shards of each."""
    even_whole: bool
    """Delete a chunk although all its shards have their size. Else such a chunk stays: another server stored it."""
    deleted: int = 0
    """Result: chunks."""

    def run(self, store: Store) -> None:
        """Delete; what is absent already is fine."""
        going = [chunk for chunk in self.chunks if self.even_whole or not _is_whole(store, chunk)]
        store.delete([shard.name for chunk in going for shard in chunk])
        self.deleted = len(going)


@dataclass(slots=True, eq=False)
class Refresh:
    """Look how old chunks are, and make those young again that are older than ``older_than_s``."""

    keys: tuple[Key, ...]
    shards_of: Callable[[Key], Sequence[StoredShard]]
    """All shards of a key, the one that stands for the chunk first."""
    older_than_s: float
    asked_s: float
    """On the scheduler's clock."""
    wall: Callable[[], float]
    modified_s: dict[Key, float] = field(default_factory=dict)
    """Result: when each chunk that is there was modified, by the store's word."""
    gone: list[Key] = field(default_factory=list)
    """Result: chunks of which a shard is missing, or has another size than it should."""
    refreshed: int = 0
    """Result: how many the store says are young now. Some copy an object onto itself and keep its time."""

    def run(self, store: Store) -> None:
        """Look at each, refresh what needs it. Raises at the first that fails; what was done before is done."""
        for key in self.keys:
            shards = self.shards_of(key)
            modified_s = self._modified_s(store, shards[0])
            if modified_s is not None and self._is_old(modified_s):
                done = all(store.refresh(*shard) for shard in shards)
                modified_s = self._modified_s(store, shards[0]) if done else None
                self.refreshed += modified_s is not None and not self._is_old(modified_s)
            if modified_s is None:
                self.gone.append(key)
            else:
                self.modified_s[key] = modified_s

    def _is_old(self, modified_s: float) -> bool:
        return self.wall() - modified_s > self.older_than_s

    @staticmethod
    def _modified_s(store: Store, shard: StoredShard) -> float | None:
        """Return when the shard was modified, None where it is gone or has another size."""
        info = store.head(shard.name)
        return info.modified_s if info is not None and info.size_bytes == shard.size_bytes else None


@dataclass(slots=True, eq=False)
class Recheck:
    """After a failed load: is the chunk there in all its parts? Then it is the reading that fails, else it was gone."""

    key: Key
    shards: tuple[StoredShard, ...]
    whole: bool = False
    """Result."""

    def run(self, store: Store) -> None:
        """Look at every shard."""
        self.whole = _is_whole(store, self.shards)


@dataclass(slots=True, eq=False)
class WriteManifest:
    """Tell people what a namespace is, unless somebody has already."""

    name: str
    manifest: dict[str, Any]
    wall: Callable[[], float]

    def run(self, store: Store) -> None:
        """Write it if absent. Two servers that write at once write the same but for the time."""
        if store.head(self.name) is None:
            content = {**self.manifest, "created_s": round(self.wall(), 3)}
            store.write(self.name, memoryview((json.dumps(content, indent=2, sort_keys=True) + "\n").encode()))


def _is_whole(store: Store, shards: Sequence[StoredShard]) -> bool:
    """Whether every shard is there with its size; what is in them only a load can tell. Raises StoreError."""
    for shard in shards:
        info = store.head(shard.name)
        if info is None or info.size_bytes != shard.size_bytes:
            return False
    return True
