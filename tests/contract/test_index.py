"""The index passes its suite."""

from __future__ import annotations

from nixl_offload.index import Index
from tests.contract.suites.index_suite import IndexSuite


class TestIndex(IndexSuite):
    """The index in memory."""

    def make_index(self) -> Index:
        """Return a new, empty index."""
        return Index()
