"""Which chunks are worth storing: those that were asked for often enough. One-time prompts stay out.

Threading: the scheduler's thread alone. No clock.
Memory: some 150 bytes per chunk remembered, 40 MB at most, and nothing where every chunk is admitted.
"""

from __future__ import annotations

from collections import OrderedDict

from nixl_offload.types import Key

MAX_CHUNKS = 1 << 18
"""Chunks remembered; what was not offered for longest is forgotten first."""


class Admission:
    """Counts how often a chunk was offered, and admits it from the ``store_after``-th time on.

    It remembers 64 bits of a chunk's hash: two chunks with the same ones would share a count, and no more.
    """

    def __init__(self, store_after: int, max_chunks: int = MAX_CHUNKS) -> None:
        """``store_after`` 1 admits everything."""
        if store_after < 1:
            raise ValueError(f"store_after must be 1 or more, not {store_after}")
        self._store_after = store_after
        self._max_chunks = max_chunks
        self._offers: OrderedDict[int, int] = OrderedDict()
        """By hash, the latest offer last."""

    def admits(self, key: Key) -> bool:
        """Count an offer of ``key``, and say whether it is to be stored."""
        if self._store_after == 1:
            return True
        digest = hash(key)
        offers = self._offers.pop(digest, 0) + 1
        self._offers[digest] = offers
        if len(self._offers) > self._max_chunks:
            self._offers.popitem(last=False)
        return offers >= self._store_after

    def clear(self) -> None:
        """Forget every chunk."""
        self._offers.clear()
