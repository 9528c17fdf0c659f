"""Header pages in the host slab, which the engines of several tiers share.

A store into memory leaves the checksums out. The first write-through adds them in place, because movers take an image
as one extent; and the MAC, if chunks of any tier are authenticated, for the page must not change once a tier may be
sending it. Meanwhile other threads read the page: loads from memory, and write-throughs of the same chunk to other
tiers. So that none of them takes a half-written page for damage, or sends it to storage:

- ``complete`` writes a page under a lock; nobody else writes it while the chunk can be read;
- ``check`` looks again, under that lock, at a page that seems damaged;
- a write-through claims an image before it looks for checksums: it is summed once, and whole when it is sent.

Namespace, key, group and lengths are the same before and after.

Threading: safe anywhere. Nothing is summed under the lock.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from nixl_offload.chunk.authentication import ChunkKeys
from nixl_offload.chunk.checksum import payload_checksums
from nixl_offload.chunk.header import ExpectedRows, HeaderRows, add_checksums, check_headers, lacks_checksums

Page = npt.NDArray[np.uint8]
"""A header page where it lies: shape (HEADER_BYTES,)."""


class SlotHeaders:
    """One for each host slab. A claim is held by one thread, between two steps of its pump at most."""

    def __init__(self, keys: ChunkKeys | None = None) -> None:
        """``keys``: of the tiers whose chunks are authenticated; None: there is no such tier."""
        self._keys = keys
        self._lock = threading.Lock()
        self._claimed: set[int] = set()

    def check(self, pages: Sequence[Page], expect: ExpectedRows) -> HeaderRows:
        """As ``check_headers``, of pages with and without checksums."""
        headers = check_headers(pages, expect, may_lack_checksums=True)
        if headers.errors:
            with self._lock:
                headers = check_headers(pages, expect, may_lack_checksums=True)
        return headers

    def claim(self, offset: int) -> bool:
        """Claim the slot at ``offset`` unless another thread has it: nobody else completes its page until
        ``release``.
        """
        with self._lock:
            if offset in self._claimed:
                return False
            self._claimed.add(offset)
            return True

    def release(self, offset: int) -> None:
        """Give a claimed slot back."""
        with self._lock:
            self._claimed.remove(offset)

    def lacks_something(self, page: Page) -> bool:
        """Whether a page that was checked must be completed before a tier gets it."""
        return lacks_checksums(page) or (self._keys is not None and not self._keys.knows(page))

    def complete(self, page: Page, rows: npt.NDArray[np.uint8]) -> None:
        """Add what the page of a claimed slot lacks. ``rows``: uint8 of shape (n, block_bytes), contiguous, the blocks
        from the first valid one to the last. Raises LayoutError as ``add_checksums``.
        """
        whole = add_checksums(page, *payload_checksums([rows])) if lacks_checksums(page) else page
        if self._keys is not None:
            whole = self._keys.signed(whole, rows)
        with self._lock:
            page[:] = whole
