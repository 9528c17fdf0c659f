"""Lists a namespace of a shared tier, a large one in many ranges of names at once.

S3 gives a thousand names per request, one request after the other; a petabyte would take hours. Names begin with two
digits of a hash, so 256 ranges are about equally long, and each lies in another part of the bucket.

Threading: the caller's thread takes the chunks; a large namespace has ``LISTS`` threads, which end with the iterator.
Memory does not grow with the number of objects.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
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
    ready: queue.Queue[_Part | None] = queue.Queue(_QUEUED_BATCHES)
    stop = threading.Event()

    def put(part: _Part | None) -> None:
        while not stop.is_set():
            with contextlib.suppress(queue.Full):
                ready.put(part, timeout=0.1)
                return

    def names(after: str, last: str) -> Iterator[ObjectInfo]:
        for info in store.list(f"{namespace}/", start_after=after):
            if stop.is_set() or (last and info.name > last):
                return
            yield info

    def list_range(after: str, last: str) -> None:
        strangers: list[ObjectInfo] = []
        chunks = group_chunks(names(after, last), strangers.append)
        try:
            while batch := list(islice(chunks, _BATCH_CHUNKS)):
                put((batch, []))
            put(([], strangers))
        finally:
            put(None)

    with ThreadPoolExecutor(LISTS, "nixl-offload-gc") as pool:
        ranges = [pool.submit(list_range, *each) for each in ranges_of(namespace)]
        try:
            left = len(ranges)
            while left:
                part = ready.get()
                if part is None:
                    left -= 1
                    continue
                for info in part[1]:
                    others(info)
                yield from part[0]
                if any(each.done() and each.exception() for each in ranges):
                    break
            for each in ranges:
                if each.done() or not left:
                    each.result()
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)


def ranges_of(namespace: str) -> list[tuple[str, str]]:
    """Return 256 ranges that hold every name of the namespace once: behind the first name, up to the second.

    All ranks of a key are in one range. The last range has no end.
    """
    ends = [end_of(namespace, first_byte) for first_byte in range(255)]
    return list(zip(["", *ends], [*ends, ""], strict=True))
