"""Lists a namespace of a shared tier, a large one in many ranges of names at once.

S3 gives a thousand names per request, one request after the other; a petabyte would take hours. Names begin with two
digits of a hash, so 256 ranges are about equally long, and each lies in another part of the bucket.

Threading: the caller's thread takes the chunks; a large namespace has ``LISTS`` daemon threads, which end with the
iterator. Memory does not grow with the number of objects.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterator
from itertools import islice
from typing import Final

from nixl_offload.stores.base import ObjectInfo, Store
from nixl_offload.tiers.inspect import ChunkInfo
from nixl_offload.tiers.shared.inspect import group_chunks
from nixl_offload.tiers.shared.naming import end_of

LISTS: Final = 16
SPLIT_OBJECTS: Final = 10_000
"""A smaller namespace is listed once, front to back: each range costs a request at least."""
_BATCH_CHUNKS: Final = 250
_QUEUED_BATCHES: Final = 64

_Part = tuple[list[ChunkInfo], list[ObjectInfo]]


def list_chunks(store: Store, namespace: str, others: Callable[[ObjectInfo], None]) -> Generator[ChunkInfo, None, None]:
    """Yield each chunk once, in no order; what is not named like a shard goes to ``others``, on the caller's thread.

    Raises StoreError at the first request that fails. Close the iterator where it is not consumed to its end.
    """
    first = list(islice(store.list(f"{namespace}/"), SPLIT_OBJECTS + 1))
    if len(first) <= SPLIT_OBJECTS:
        yield from group_chunks(first, others)
        return
    for chunks, other_objects in _Lists(store, namespace).parts():
        for info in other_objects:
            others(info)
        yield from chunks


def ranges_of(namespace: str) -> list[tuple[str, str]]:
    """Return 256 ranges that hold every name of the namespace once: behind the first name, up to the second.

    All ranks of a key are in one range. The last range has no end.
    """
    ends = [end_of(namespace, first_byte) for first_byte in range(255)]
    return list(zip(["", *ends], [*ends, ""], strict=True))


class _Lists:
    """Threads that take ranges one by one. Use once: ``parts``."""

    def __init__(self, store: Store, namespace: str) -> None:
        self._store = store
        self._namespace = namespace
        self._ranges = iter(ranges_of(namespace))
        self._lock = threading.Lock()
        """Guards the ranges."""
        self._stop = threading.Event()
        self._ready: queue.Queue[_Part | BaseException | None] = queue.Queue(_QUEUED_BATCHES)
        """None: a thread has ended."""

    def parts(self) -> Iterator[_Part]:
        """Yield what the threads have found. Raises what stopped one of them."""
        threads: list[threading.Thread] = []
        try:
            for number in range(LISTS):
                thread = threading.Thread(target=self._work, name=f"nixl-offload-gc-{number}", daemon=True)
                thread.start()
                threads.append(thread)
            left = len(threads)
            while left:
                part = self._ready.get()
                if isinstance(part, BaseException):
                    raise part
                if part is None:
                    left -= 1
                else:
                    yield part
        finally:
            self._stop.set()
            for thread in threads:
                thread.join(1.0)

    def _work(self) -> None:
        try:
            while not self._stop.is_set():
                with self._lock:
                    names = next(self._ranges, None)
                if names is None:
                    break
                self._list(*names)
        except BaseException as error:  # noqa: BLE001 - raised by ``parts``
            self._put(error)
        self._put(None)

    def _list(self, after: str, last: str) -> None:
        others: list[ObjectInfo] = []
        chunks = group_chunks(self._names(after, last), others.append)
        while True:
            found = list(islice(chunks, _BATCH_CHUNKS))
            self._put((found, others.copy()))
            others.clear()
            if len(found) < _BATCH_CHUNKS:
                return

    def _names(self, after: str, last: str) -> Iterator[ObjectInfo]:
        for info in self._store.list(f"{self._namespace}/", start_after=after):
            if self._stop.is_set() or (last and info.name > last):
                return
            yield info

    def _put(self, part: _Part | BaseException | None) -> None:
        while not self._stop.is_set():
            try:
                self._ready.put(part, timeout=0.1)
            except queue.Full:
                continue
            return
