"""The suite over every index and policy that we have."""

from __future__ import annotations

from nixl_offload.index import Index
from tests.contract.suites.index_suite import IndexSuite


class TestLruIndex(IndexSuite):
    """The index in memory, evicting the least recently used."""

    def make_index(self) -> Index:
        """Return a new, empty index."""
        return Index("lru")


class TestS3FifoIndex(IndexSuite):
    """The index in memory, evicting by S3-FIFO."""

    def make_index(self) -> Index:
        """Return a new, empty index."""
        return Index("s3fifo")
