"""The contract of a store: named blobs in a bucket or a shared directory, read in ranges and written whole.

Threading: every method blocks, and may be called from any thread, several at once.
Memory: callers bring it, and the sizes that they expect; a size that storage states is never allocated.
Names are relative to the store's prefix or directory; ``tiers.shared.naming`` builds them from digests. Credentials
never appear in ``where``, a repr, a log line or an error.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class ObjectInfo(NamedTuple):
    """What a store says of an object without reading it."""

    name: str
    size_bytes: int
    modified_s: float
    """When it was written: seconds since the epoch, by the store's clock."""


class Store(ABC):
    """Raises ``StoreError`` alone, with the foreign error as its ``__cause__``.

    The implementation retries, with jitter. A call to a server ends within a few times the configured request timeout.
    """

    name: str
    """The client, for logs."""
    where: str
    """What it reaches, for people: ``s3://bucket/prefix at https://…``."""

    @abstractmethod
    def head(self, name: str) -> ObjectInfo | None:
        """Return None when the object is absent."""

    @abstractmethod
    def read_into(self, name: str, offset: int, memory: memoryview) -> None:
        """Fill ``memory`` with the object's bytes from ``offset`` on.

        Raises StoreError: ``missing`` (no such object), ``short`` (the object ends earlier). After a failure
        ``memory`` has undefined content; nothing touches it any more.
        """

    @abstractmethod
    def write(self, name: str, memory: memoryview) -> None:
        """Make ``memory`` the content of the object. Readers see the old content or the new, never a mixture."""

    @abstractmethod
    def delete(self, names: Sequence[str]) -> None:
        """Delete objects; absent ones are fine. Raises StoreError for the first failure, after all were tried."""

    @abstractmethod
    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects whose names begin with ``prefix`` and sort after ``start_after``, in name order (by bytes).

        Fetches page by page as it is consumed, and may raise StoreError at any page; go on with the last name seen.
        """

    @abstractmethod
    def close(self) -> None:
        """Release connections. Idempotent; calls in other threads end with StoreError or normally."""
