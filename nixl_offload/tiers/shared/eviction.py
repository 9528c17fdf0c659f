"""Enforces the capacity of a shared directory while engines write there. For drives that engines of one machine share.

Threading: a daemon thread for each tier. One engine holds the directory's lock and evicts. The others keep trying to
lock it, so that one of them takes over when the holder ends, even by a crash.
After a failure: a deleted chunk costs a recompute, and the next pass counts the rest again. If the filesystem's locks
do not work, several engines evict at once; they choose the same chunks.

A pass lists the directory, twice if chunks must go. ``nixl-offload gc`` does the same, with the same plan.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Final

from nixl_offload.errors import StoreError, TierError
from nixl_offload.stores.directory import TreeStore
from nixl_offload.stores.filesystem import spare_bytes, spare_files
from nixl_offload.tiers.inspect import ChunkInfo
from nixl_offload.tiers.ownership import DirectoryLock
from nixl_offload.tiers.shared.inspect import group_chunks
from nixl_offload.tiers.shared.naming import is_ours, manifest_name, parse_manifest_name
from nixl_offload.tiers.shared.sweep import Ages, make_plan

logger = logging.getLogger(__name__)

LOCK_NAME: Final = ".evict.lock"
"""Listings omit names that begin with a dot."""
STEPS: Final = 64
"""A pass begins when the filesystem has lost 1/64 of the directory's limit since the last pass, or has no room to
spare. If the pass finds less than 1/64 of the limit free, it deletes until 2/64 are."""
LOOK_S: Final = 1.0
"""How often the free space is checked and the lock is tried."""
PASS_S: Final = 60.0
"""A pass begins at least this often, because a filesystem may report its free space late."""
REST: Final = 20
"""Without such a loss, a pass begins no sooner than after this many times the duration of the last one."""
STALE_DRAFT_S: Final = 3600.0
"""Older drafts belong to writers that died. They are searched for this often."""
CLOCK_S: Final = 3600.0
"""Chunks dated further than this in the future were used before a clock was set back. They go first; else they would
stay until that date, and chunks in use would go instead."""
_PAUSE_CHUNKS: Final = 16
_PAUSE_S: Final = 200e-6
"""Every 16 chunks (some 0.2 ms of work), the thread pauses so that the scheduler gets the GIL."""


class Eviction:
    """Evicts on a thread from construction until ``close``."""

    def __init__(self, store: TreeStore, capacity_bytes: int, *, name: str, kept_free: float = 0.0) -> None:
        """The caller keeps ``store``. ``name`` begins each message. ``kept_free``: the share of the filesystem that
        stays free.
        """
        self.evicted = 0
        """Chunks deleted since the start; written by the thread."""
        self._store = store
        self._capacity_bytes = capacity_bytes
        self._kept_free = kept_free
        self._limit_bytes = capacity_bytes
        """Bytes that the directory may hold, as of the last pass."""
        self._name = name
        self._lock = DirectoryLock(Path(store.where, LOCK_NAME))
        self._free_bytes = self._lost_bytes = 0
        """Free space at the last look, and the sum of its decreases since the last pass began."""
        self._pass_s = self._drafts_s = float("-inf")
        """When the last pass began, and when drafts were last searched for."""
        self._took_s = 0.0
        """Duration of the last pass."""
        self._has_warned = False
        """Whether this outage was logged."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nixl-offload-evict", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float = 1.0) -> None:
        """Stop the thread, waiting ``timeout_s`` at most. Idempotent."""
        self._stop.set()
        self._thread.join(timeout_s)

    # On the thread.

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                try:
                    if self._holds():
                        self._look()
                except (StoreError, TierError, OSError) as error:
                    if not self._has_warned:
                        logger.warning("%s: nothing is evicted: %s", self._name, error)
                    self._has_warned = True
                except Exception:
                    logger.exception("%s: eviction met an error that should not be; it goes on", self._name)
                self._stop.wait(LOOK_S)
        finally:
            self._lock.release()

    def _holds(self) -> bool:
        """Whether this engine is the one that evicts. Raises StoreError, TierError."""
        self._store.require_mounted("evict")
        if not self._lock.is_held():
            try:
                self._lock.acquire()
            except TierError as error:
                if error.cause == "locked":
                    return False
                if error.cause != "full":  # no inode is free for the lock file: a pass without the lock makes room
                    raise
            self._pass_s = self._drafts_s = float("-inf")
        return True

    def _look(self) -> None:
        """Begin a pass if it is time. Raises StoreError, OSError."""
        space, now_s = self._store.filesystem.space(self._store.where), time.monotonic()
        free_bytes = space.f_bavail * space.f_frsize
        self._lost_bytes += max(0, self._free_bytes - free_bytes)  # space that others free does not count against it
        self._free_bytes = free_bytes
        is_short = spare_bytes(space, self._kept_free) <= 0 or spare_files(space, self._kept_free) <= 0
        is_early = now_s - self._pass_s < max(0.0 if is_short else PASS_S, REST * self._took_s)
        if is_early and self._lost_bytes < self._limit_bytes // STEPS:
            return
        self._lost_bytes, self._pass_s = 0, now_s
        evicted, self._limit_bytes = shrink(
            self._store, self._capacity_bytes, kept_free=self._kept_free, stopped=self._stop.is_set
        )
        self.evicted += evicted
        self._has_warned = False
        self._took_s = time.monotonic() - now_s
        if now_s - self._drafts_s >= STALE_DRAFT_S:
            self._drafts_s = now_s
            self._store.remove_stale_drafts(STALE_DRAFT_S, is_ours)


def shrink(
    store: TreeStore, capacity_bytes: int, *, kept_free: float = 0.0, stopped: Callable[[], bool] = bool
) -> tuple[int, int]:
    """If chunks take more than 63/64 of the limit, delete the least recently used ones down to 62/64.

    The limit is ``capacity_bytes``, or less if the filesystem has less room without the share ``kept_free``. Room is
    counted in bytes, and in files of the average size here. Ends early when ``stopped``. Returns how many chunks were
    deleted, and the limit in bytes. Raises OSError. Raises StoreError if a file cannot be deleted, after deleting the
    other files.
    """
    space, ages = store.filesystem.space(store.where), Ages(time.time())
    latest_s = ages.now_s + CLOCK_S
    for chunk in _chunks(store, stopped, latest_s):
        ages.add(chunk)
    file_bytes = ages.total.size_bytes / max(1, ages.total.objects)
    by_files = file_bytes * spare_files(space, kept_free) if file_bytes else math.inf
    room_bytes = ages.total.size_bytes + min(spare_bytes(space, kept_free), by_files)
    limit_bytes = max(0, int(min(capacity_bytes, room_bytes)))
    step_bytes = limit_bytes // STEPS
    if stopped() or ages.total.size_bytes <= limit_bytes - step_bytes:
        return 0, limit_bytes
    left_bytes = limit_bytes - 2 * step_bytes
    plan = make_plan(ages, max_bytes=left_bytes, older_than_s=None, grace_s=0.0)
    evicted, fault = 0, None
    for chunk in _chunks(store, stopped, latest_s):
        if plan.takes(chunk):
            evicted += 1
            try:
                store.delete([shard.place for shard in chunk.shards])
            except StoreError as error:
                fault = error
    logger.debug("%s: %d chunks evicted; it held %.1f GiB", store.where, evicted, ages.total.size_bytes / 2**30)
    if fault is not None:
        raise fault
    return evicted, limit_bytes


def _chunks(store: TreeStore, stopped: Callable[[], bool], latest_s: float) -> Iterator[ChunkInfo]:
    """Yield all chunks, until ``stopped``. Raises StoreError, OSError.

    A chunk dated after ``latest_s`` counts as very old.
    Only namespaces are listed: other directories may hold many foreign files, or be unreadable (lost+found).
    """
    names = sorted(name for name, _ in store.filesystem.list(store.where))
    names = [name for name in names if parse_manifest_name(manifest_name(name))]
    listing = chain.from_iterable(store.list(f"{name}/") for name in names)
    for number, chunk in enumerate(group_chunks(listing)):
        if not number % _PAUSE_CHUNKS:
            if stopped():
                return
            time.sleep(_PAUSE_S)
        if chunk.modified_s <= latest_s:
            yield chunk
        else:
            yield ChunkInfo(chunk.key, tuple(shard._replace(modified_s=0.0) for shard in chunk.shards))
