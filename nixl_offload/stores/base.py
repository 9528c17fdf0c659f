"""The contract of a store: named blobs in a bucket or a shared directory, read in ranges and written whole.

Threading: every method blocks, and may be called from any thread, several at once.
Memory: a size that storage states is never what is allocated; callers bring the memory, and the sizes that they expect.
Names are relative to the store's own prefix or directory. ``tiers.shared.naming`` builds them from digests, never from
unchecked input. Credentials come from the AWS chain and never appear in ``where``, a repr, a log line or an error.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class ObjectInfo(NamedTuple):
    """What a store tells of an object without reading it."""

    name: str
    size_bytes: int
    modified_s: float
    """Seconds since the epoch, by the store's clock: when it was written, or refreshed."""


class Store(ABC):
    """Conveniences live outside. Absence is an answer where asking is the point, else an error.

    Errors: ``StoreError`` alone, whose ``cause`` says what kind of trouble it is (see there); the foreign error is its
    ``__cause__``. Retries (with jitter) and a time limit per request are the implementation's affair: a call returns or
    raises within a few times its configured request timeout, whatever the server does.
    """

    name: str
    """Which client this is, such as ``obstore``; for logs."""
    where: str
    """What it reaches, for people: ``s3://bucket/prefix at https://…``. Without credentials."""

    @abstractmethod
    def head(self, name: str) -> ObjectInfo | None:
        """Return what is known of an object, None when there is none."""

    @abstractmethod
    def read_into(self, name: str, offset: int, memory: memoryview) -> None:
        """Fill ``memory`` with the object's bytes from ``offset`` on.

        Raises StoreError: ``missing`` (no such object), ``short`` (the object ends earlier). What ``memory`` holds
        after a failure is undefined; nothing touches it any more.
        """

    @abstractmethod
    def write(self, name: str, memory: memoryview) -> None:
        """Make ``memory`` the whole content of the object. Readers see the old content or the new, never a part."""

    @abstractmethod
    def delete(self, names: Sequence[str]) -> None:
        """Delete objects; those that are absent are fine. Raises StoreError after all were tried, naming the first."""

    @abstractmethod
    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects whose names begin with ``prefix`` and sort after ``start_after``, in name order (by bytes).

        Fetches page by page as it is consumed, and may raise StoreError at any page; go on with the last name seen.
        """

    @abstractmethod
    def refresh(self, name: str, size_bytes: int) -> bool:
        """Make an object of ``size_bytes`` as young as if it were written now.

        False: it is absent, or of another size, which no reader of it would take; then it is left as it is. Its bytes
        stay where they are, unless the storage cannot copy them there: then ``size_bytes`` of memory hold them.
        """

    @abstractmethod
    def close(self) -> None:
        """Release connections. Idempotent; calls in other threads end with StoreError or normally."""
