"""Header pages in the host slab, which the engines of several tiers share.

A store into memory leaves the checksums out. The first write-through adds them in place, because movers take an image
as one extent; and the MAC, if chunks of any tier are authenticated. Meanwhile other threads read the page: loads from
memory, and write-throughs of the same chunk to other tiers. They must not take a half-written page for damage, or send
it to storage. So a page is written once, under a lock; ``lacks_something`` looks under that lock, and ``check`` looks
again under it at a page that seems damaged. Namespace, key, group and lengths are the same before and after.

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
"""A view of a header page: shape (HEADER_BYTES,)."""


class SlotHeaders:
    """One for each host slab."""

    def __init__(self, keys: ChunkKeys | None = None) -> None:
        """``keys``: of the tiers whose chunks are authenticated, or None."""
        self._keys = keys
        self._lock = threading.Lock()

    def check(self, pages: Sequence[Page], expect: ExpectedRows) -> HeaderRows:
        """As ``check_headers``, for pages with and without checksums."""
        headers = check_headers(pages, expect, may_lack_checksums=True)
        if headers.errors:
            with self._lock:
                headers = check_headers(pages, expect, may_lack_checksums=True)
        return headers

    def lacks_something(self, page: Page) -> bool:
        """Whether a checked page must be completed before a tier gets it."""
        with self._lock:
            return self._lacks_something(page)

    def complete(self, page: Page, rows: npt.NDArray[np.uint8]) -> None:
        """Add what a page lacks, unless another thread did so first. ``rows``: the blocks from the first valid one to
        the last, contiguous uint8 of shape (n, block_bytes). Raises LayoutError as ``add_checksums``.
        """
        with self._lock:
            whole = page.copy()
        if lacks_checksums(whole):
            whole = add_checksums(whole, *payload_checksums([rows]))
        if self._keys is not None:
            whole = self._keys.signed(whole, rows)
        with self._lock:
            if self._lacks_something(page):  # else a tier may already be sending it
                page[:] = whole

    def _lacks_something(self, page: Page) -> bool:
        return lacks_checksums(page) or (self._keys is not None and not self._keys.knows(page))
