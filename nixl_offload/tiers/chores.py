"""What a prober does to a shared store when nobody waits: delete, refresh, look again, leave a note for people.

Threading: a chore is run by one thread of the prober and read by the scheduler's once it is over.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from nixl_offload.stores.base import Store
from nixl_offload.types import Key


@dataclass(slots=True, eq=False)
class Discard:
    """Delete all shards of some chunks. Harmless whoever else uses them: it costs a recompute."""

    keys: tuple[Key, ...]
    names: tuple[str, ...]

    def run(self, store: Store) -> None:
        """Delete; what is absent already is fine."""
        store.delete(self.names)


@dataclass(slots=True, eq=False)
class Refresh:
    """Look how old chunks are, and make those young again that are older than ``older_than_s``."""

    keys: tuple[Key, ...]
    names_of: Callable[[Key], Sequence[str]]
    """All shards of a key, the one that stands for the chunk first."""
    older_than_s: float
    asked_s: float
    """On the scheduler's clock."""
    wall: Callable[[], float]
    modified_s: dict[Key, float] = field(default_factory=dict)
    """Result: when each chunk that is there was modified."""
    gone: list[Key] = field(default_factory=list)
    """Result: chunks of which a shard is missing."""
    refreshed: int = 0
    """Result."""

    def run(self, store: Store) -> None:
        """Look at each, refresh what needs it. Raises at the first that fails; what was done before is done."""
        for key in self.keys:
            names = self.names_of(key)
            info = store.head(names[0])
            if info is None:
                self.gone.append(key)
            elif self.wall() - info.modified_s <= self.older_than_s:
                self.modified_s[key] = info.modified_s
            elif all(store.refresh(name) for name in names):
                self.modified_s[key] = self.wall()
                self.refreshed += 1
            else:
                self.gone.append(key)


@dataclass(slots=True, eq=False)
class Recheck:
    """After a failed load: is the chunk there in all its parts? Then it is the reading that fails, else it was gone."""

    key: Key
    names: tuple[str, ...]
    size_bytes: int
    whole: bool = False
    """Result."""

    def run(self, store: Store) -> None:
        """Look at every shard."""
        infos = [store.head(name) for name in self.names]
        self.whole = all(info is not None and info.size_bytes == self.size_bytes for info in infos)


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
