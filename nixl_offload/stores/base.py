"""The contract of a store: named blobs in a bucket or a shared directory, read in ranges and written whole.

Threading: every method blocks, and may be called from several threads at once.
Memory: callers pass memory of the size they expect. A size stated by the storage is never allocated.
Names are relative to the store's prefix or directory; ``tiers.shared.naming`` builds them from digests. Credentials
never appear in ``where``, a repr, a log line or an error.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class ObjectInfo(NamedTuple):
    """An object's metadata, as a store reports it."""

    name: str
    size_bytes: int
    modified_s: float
    """When it was written: seconds since the epoch, by the store's clock."""


class Store(ABC):
    """A client of a bucket or directory. Raises only ``StoreError``, with the foreign error as its ``__cause__``.

    The implementation retries, with jitter. A call to a server ends within a few times the configured request timeout.
    """

    name: str
    """The client's name, for logs."""
    where: str
    """The bucket or directory, for people: ``s3://bucket/prefix at https://…``."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.where})"

    @abstractmethod
    def head(self, name: str) -> ObjectInfo | None:
        """Return the object's metadata, None if it is absent."""

    @abstractmethod
    def read_into(self, name: str, offset: int, memory: memoryview) -> None:
        """Fill ``memory`` with the object's bytes from ``offset`` on.

        Raises StoreError: ``missing`` (no such object), ``short`` (the object ends earlier). After a failure
        the content of ``memory`` is undefined, and nothing writes to it any more.
        """

    @abstractmethod
    def write(self, name: str, memory: memoryview) -> None:
        """Make ``memory`` the content of the object. Readers see the old content or the new, never a mixture."""

    @abstractmethod
    def delete(self, names: Sequence[str]) -> None:
        """Delete objects; absent ones are fine. Raises StoreError for the first failure, after all were tried."""

    @abstractmethod
    def list(self, directory: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects whose names begin with ``directory`` (empty, or ending in a slash) and sort after
        ``start_after`` (not ending in one), in name order (by bytes).

        Fetches a page when it is needed. Any page may raise StoreError; to resume, pass the last name.
        """

    @abstractmethod
    def close(self) -> None:
        """Release connections. Idempotent. Calls in other threads end normally or with StoreError."""
