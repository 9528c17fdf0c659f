"""Warm start: lists a namespace in the background, so that the first requests need not look.

Threading: one daemon thread of its own lists; the scheduler's thread takes what was found, in portions. What is not
taken stops the listing rather than piling up. Neither waits for the other for longer than it takes to copy a portion.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from nixl_offload.errors import StoreError
from nixl_offload.identity.namespace import Namespace
from nixl_offload.stores.base import ObjectInfo, Store
from nixl_offload.tiers.shared.naming import end_of, parse_shard_name
from nixl_offload.types import Key, key_group

logger = logging.getLogger(__name__)

BUFFER_KEYS = 16_384
PROGRESS_S = 10.0
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
SAMPLE_CHUNKS = 4096
"""After so many it is known how many there are, within some percent: names are hashes."""


class Listed(NamedTuple):
    """A chunk of which every shard is there, each with the size that its rank writes."""

    key: Key
    modified_s: float
    """Of its oldest shard, by the store's clock."""


class Listing:
    """Goes through a namespace once. After an error it waits, and goes on behind the last name seen.

    It begins at one of 256 places in the order of names and ends there: servers that start together would all read the
    same part of a bucket at the same time. A namespace of more than ``max_keys`` chunks is left as soon as that shows:
    a part of its chunks, chosen by hash, holds hardly a whole prompt.
    """

    def __init__(
        self, store: Store, namespace: Namespace, *, name: str, max_keys: int, start: int | None = None
    ) -> None:
        """Begin at once. Ends after ``max_keys`` chunks, and says so. ``name`` opens each message. ``start``: behind
        the keys whose first byte that is; None: at random.
        """
        self.chunks = 0
        """Found so far; written by the listing thread."""
        self.objects = 0
        """Looked at so far; likewise."""
        self.done = False
        """Whether the listing has come to its end, or was told to."""
        self._store = store
        self._prefix = f"{namespace.name}/"
        self._name = name
        self._sizes = {
            group.group_id: {rank: group.slot_bytes[rank] for rank in namespace.holders(group.group_id)}
            for group in namespace.fields.groups
        }
        """By KV group, then by rank: what a whole chunk consists of."""
        self._max_keys = max_keys
        self._estimate: int | None = None
        """How many chunks there are, after ``SAMPLE_CHUNKS``."""
        self._first_byte = random.randrange(256) if start is None else start
        self._start = self._last = end_of(namespace.name, self._first_byte)
        self._is_second_part = False
        """From the beginning to ``_start``, after all that lies behind it."""
        self._found: deque[Listed] = deque()
        self._wake = threading.Event()
        """Set when there is room again, and when it is to stop."""
        self._stop = threading.Event()
        # The listing thread's own: the chunk that it is looking at.
        self._key: Key | None = None
        self._lacking: dict[int, int] = {}
        """By rank the sizes of its shards that were not seen yet."""
        self._modified_s = 0.0
        self._began_s = self._told_s = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="nixl-offload-list", daemon=True)
        self._thread.start()

    def take(self, limit: int) -> list[Listed]:
        """Return what was found since the last call, ``limit`` chunks at most. Never blocks."""
        found = self._found
        taken = [found.popleft() for _ in range(min(limit, len(found)))]
        if taken:
            self._wake.set()
        return taken

    def stop(self) -> None:
        """Look no further. What was found can still be taken."""
        self._stop.set()
        self._wake.set()

    def close(self, timeout_s: float = 1.0) -> None:
        """Stop, and wait ``timeout_s`` at most. Idempotent."""
        self.stop()
        self._thread.join(timeout_s)

    # On the listing thread.

    def _run(self) -> None:
        pause_s = FIRST_PAUSE_S
        while not self._stop.is_set():
            try:
                for info in self._rest():
                    self._take_in(info)
                    pause_s = FIRST_PAUSE_S
                    if self._stop.is_set() or self.chunks >= self._max_keys or self._is_too_large():
                        break
                else:
                    self._emit()
                break
            except StoreError as error:
                logger.info("%s: warm start goes on in %.0f s: %s", self._name, pause_s, error)
            except Exception:
                logger.exception("%s: warm start ended in an error that should not be", self._name)
                break
            self._stop.wait(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        self._tell("warm start found" if not self._stop.is_set() else "warm start stopped at", final=True)
        self.done = True

    def _rest(self) -> Iterator[ObjectInfo]:
        """Yield what was not seen yet. Raises StoreError."""
        if not self._is_second_part:
            for info in self._store.list(self._prefix, start_after=self._last):
                self._last = info.name
                yield info
            self._last, self._is_second_part = "", True
        for info in self._store.list(self._prefix, start_after=self._last):
            if info.name > self._start:
                return
            self._last = info.name
            yield info

    def _is_too_large(self) -> bool:
        """Whether there are more chunks than may be remembered, by the part of all hashes that was seen; asked once."""
        if self.chunks < SAMPLE_CHUNKS or self._estimate is not None or self._key is None:
            return False
        seen = (int.from_bytes(self._key[:4], "big") - ((self._first_byte + 1) << 24)) % (1 << 32)
        self._estimate = round(self.chunks * (1 << 32) / max(seen, 1))
        return self._estimate > self._max_keys

    def _take_in(self, info: ObjectInfo) -> None:
        self.objects += 1
        shard = parse_shard_name(info.name)
        if shard is None:
            return
        if shard.key != self._key:
            self._emit()
            sizes = self._sizes.get(key_group(shard.key))
            if sizes is None:  # a group that this model does not have
                self._key = None
                return
            self._key, self._lacking, self._modified_s = shard.key, dict(sizes), info.modified_s
        if self._lacking.get(shard.rank) == info.size_bytes:
            del self._lacking[shard.rank]
            self._modified_s = min(self._modified_s, info.modified_s)
        if time.monotonic() - self._told_s >= PROGRESS_S:
            self._told_s = time.monotonic()
            self._tell("warm start, so far", final=False)

    def _emit(self) -> None:
        """The chunk is complete, or will never be."""
        if self._key is None or self._lacking:
            return
        while len(self._found) >= BUFFER_KEYS and not self._stop.is_set():
            self._wake.clear()
            if len(self._found) >= BUFFER_KEYS:
                self._wake.wait(1.0)
        self._found.append(Listed(self._key, self._modified_s))
        self.chunks += 1

    def _tell(self, what: str, *, final: bool) -> None:
        bound = f" (no more than lookup.max_keys, {self._max_keys})" if self.chunks >= self._max_keys else ""
        if self._estimate is not None and self._estimate > self._max_keys:
            bound = (
                f" of about {self._estimate}, too many for lookup.max_keys, {self._max_keys}; requests look for theirs"
            )
        logger.info(
            "%s: %s %d chunks in %d objects, %.1f s%s%s",
            self._name,
            what,
            self.chunks,
            self.objects,
            time.monotonic() - self._began_s,
            bound,
            "" if final else "; it goes on",
        )
