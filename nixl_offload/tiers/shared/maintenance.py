"""What a shared tier has done to its store when nobody waits: deletes what is bad, refreshes what expires, writes the
manifest. ``background_tasks`` does it, on the prober's threads.

Threading: the scheduler's thread alone. No I/O, no clock: time is passed in (monotonic seconds).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from nixl_offload.tiers.shared.background_tasks import Discard, Refresh, WriteManifest
from nixl_offload.tiers.shared.naming import StoredShard
from nixl_offload.tiers.shared.prober import Prober
from nixl_offload.types import Key

REFRESH_BATCH: Final = 64
MAX_REFRESHES: Final = 16_384
MANIFEST_RETRY_S: Final = 60.0


class Maintenance:
    """Hands tasks to the prober. What it refuses is wanted again by whoever meets the chunk next."""

    def __init__(
        self,
        prober: Prober,
        manifest: WriteManifest,
        *,
        shards_of: Callable[[Key], tuple[StoredShard, ...]],
        ttl_s: float | None,
        wall: Callable[[], float],
        now_s: float,
    ) -> None:
        """The manifest is written at the first ``begin``. ``ttl_s`` None: nothing expires."""
        self._prober = prober
        self._manifest = manifest
        self._shards_of = shards_of
        self._ttl_s = ttl_s
        self._wall = wall
        self._manifest_s: float | None = now_s
        """When to write the manifest; None: it is there, or somebody is at it."""
        self._to_refresh: list[Key] = []
        self.discarding: set[Key] = set()
        """Being deleted: stored anew only afterwards, else the deletion might hit the new one."""
        self.discarded = 0
        """Chunks deleted, ever."""

    @property
    def takes_refreshes(self) -> bool:
        """Whether ``refresh`` does anything."""
        return self._ttl_s is not None and len(self._to_refresh) < MAX_REFRESHES

    def refresh(self, key: Key) -> None:
        """Look at a chunk soon, and refresh it where it is old."""
        self._to_refresh.append(key)

    def discard(self, keys: Sequence[Key], *, even_whole: bool = False) -> None:
        """Delete chunks; those that are whole only with ``even_whole``, for another server has stored them."""
        keys = tuple(key for key in keys if key not in self.discarding)
        if keys and self._prober.do(Discard(keys, tuple(map(self._shards_of, keys)), even_whole)):
            self.discarding.update(keys)

    def begin(self, now_s: float) -> None:
        """Begin what waits."""
        if self._manifest_s is not None and now_s >= self._manifest_s and self._prober.do(self._manifest):
            self._manifest_s = None
        if not self._to_refresh or self._ttl_s is None:
            return
        keys, self._to_refresh = self._to_refresh, []
        for start in range(0, len(keys), REFRESH_BATCH):
            batch = tuple(keys[start : start + REFRESH_BATCH])
            if not self._prober.do(Refresh(batch, self._shards_of, self._ttl_s / 2, now_s, self._wall)):
                break

    def discard_ended(self, task: Discard) -> None:
        """Its chunks may be stored again."""
        self.discarding.difference_update(task.keys)
        self.discarded += task.deleted

    def manifest_failed(self, now_s: float) -> None:
        """Try again later."""
        self._manifest_s = now_s + MANIFEST_RETRY_S

    def clear(self) -> None:
        """Refresh nothing that was to be refreshed."""
        self._to_refresh.clear()
