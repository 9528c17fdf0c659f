"""Which chunks are worth storing: those that were asked for often enough. One-time prompts stay out.

Threading: the scheduler's thread alone. No clock.
Memory: 9 bytes per chunk remembered, some 9 MB, and nothing where every chunk is admitted.
"""

from __future__ import annotations

from array import array

from nixl_offload.types import Key

MAX_CHUNKS = 1 << 20
"""Chunks remembered, about."""
_WAYS = 16
_MOST = 255


class Admission:
    """Counts how often a chunk was offered, and admits it from the ``store_after``-th time on.

    Of a chunk it keeps 64 bits of its hash, in one of many short rows that each forget what they saw longest ago: close
    to one long queue, and no object per chunk. Two chunks with the same 64 bits would share a count, and no more.
    """

    def __init__(self, store_after: int, max_chunks: int = MAX_CHUNKS) -> None:
        """``store_after`` 1 admits everything. ``max_chunks`` is rounded up to a power of two, 16 at least."""
        if not 1 <= store_after <= _MOST:
            raise ValueError(f"store_after must be 1 to {_MOST}, not {store_after}")
        self._store_after = store_after
        self._rows = max(1, (1 << (max_chunks - 1).bit_length()) // _WAYS)
        self._digests = array("Q")
        self._counts = array("B")
        self.clear()

    def admits(self, key: Key) -> bool:
        """Count an offer of ``key``, and say whether it is to be stored."""
        if self._store_after == 1:
            return True
        digest = hash(key) & 0xFFFF_FFFF_FFFF_FFFF or 1
        first = digest % self._rows * _WAYS
        digests, counts = self._digests, self._counts
        row = digests[first : first + _WAYS]
        try:
            place = row.index(digest)
            seen = counts[first + place]
        except ValueError:
            place, seen = _WAYS - 1, 0
        # The youngest first.
        digests[first + 1 : first + place + 1] = row[:place]
        counts[first + 1 : first + place + 1] = counts[first : first + place]
        digests[first], counts[first] = digest, min(seen + 1, _MOST)
        return seen + 1 >= self._store_after

    def clear(self) -> None:
        """Forget every chunk."""
        if self._store_after > 1:
            self._digests = array("Q", bytes(8 * self._rows * _WAYS))
            self._counts = array("B", bytes(self._rows * _WAYS))
