"""Decides from listings which chunks of a shared tier to delete to enforce a size and an age.

Threading: pure, one owner; nothing here does I/O or reads a clock.

A tier may hold many millions of shards, so no names are kept. A first pass over the listing counts bytes by age
(``Ages``: at most some ten thousand numbers per namespace). ``make_plan`` turns the counts into a point in time. A
second pass, over a new listing, asks the ``Plan`` about every chunk. Chunks written between the passes are younger than
that point, and stay.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from nixl_offload.tiers.inspect import ChunkInfo

GRACE_S: Final = 600.0
"""Nothing younger is deleted, because other ranks may still be writing their shards of the chunk."""
MANIFEST_MIN_AGE_S: Final = 86_400.0
"""A namespace without shards keeps its manifest for this time, because its servers may not have stored anything yet."""
_BUCKETS_PER_DOUBLING: Final = 1024


class Totals(NamedTuple):
    """The number of chunks, objects and bytes."""

    chunks: int = 0
    objects: int = 0
    size_bytes: int = 0

    def plus(self, chunks: int, objects: int, size_bytes: int) -> Totals:
        """Return the sum."""
        return Totals(self.chunks + chunks, self.objects + objects, self.size_bytes + size_bytes)


NOTHING: Final = Totals()


class Ages:
    """Chunks counted by how long ago they were modified, in bounded memory.

    A bucket's width is 0.07 % of its chunks' age: a minute at a day, six hours at a year. All chunks younger than a
    second share one bucket.
    """

    def __init__(self, now_s: float) -> None:
        """``now_s``: the time from which ages count, in seconds since the epoch."""
        self.now_s = now_s
        self.total = NOTHING
        self._buckets: dict[int, Totals] = {}

    def add(self, chunk: ChunkInfo) -> None:
        """Count a chunk."""
        number = math.floor(_BUCKETS_PER_DOUBLING * math.log2(max(1.0, self.now_s - chunk.modified_s)))
        self._count(number, Totals(1, len(chunk.shards), chunk.size_bytes))

    def merge(self, other: Ages) -> None:
        """Add the counts of ``other``, which must have the same ``now_s``."""
        for number, totals in other._buckets.items():
            self._count(number, totals)

    def oldest_first(self) -> Iterator[tuple[float, float, Totals]]:
        """Yield each bucket's begin, its end (all its chunks are older) and its totals, oldest first."""
        for number in sorted(self._buckets, reverse=True):
            begin_s, end_s = (self.now_s - 2.0 ** (each / _BUCKETS_PER_DOUBLING) for each in (number + 1, number))
            yield begin_s, end_s if number else math.inf, self._buckets[number]

    def _count(self, number: int, totals: Totals) -> None:
        self._buckets[number] = self._buckets.get(number, NOTHING).plus(*totals)
        self.total = self.total.plus(*totals)


@dataclass(slots=True)
class Plan:
    """Which chunks of a second listing are deleted. Made by ``make_plan``; used once."""

    before_s: float
    """Chunks modified before this time are deleted."""
    partly_before_s: float
    """Chunks modified between ``before_s`` and this time count as equally old. They are deleted ..."""
    partly_bytes: int
    """... until so many more of their bytes are."""
    estimate: Totals
    """The chunks that will be deleted, to within one bucket of ``Ages`` and one chunk."""
    kept_bytes: int
    """The bytes that will be left, with the same precision."""
    over_bytes: int
    """Bytes above ``max_bytes`` that stay because they are too young."""

    def takes(self, chunk: ChunkInfo) -> bool:
        """Whether to delete ``chunk``; call once per chunk."""
        if chunk.modified_s < self.before_s:
            return True
        if chunk.modified_s < self.partly_before_s and self.partly_bytes > 0:
            self.partly_bytes -= chunk.size_bytes
            return True
        return False


def make_plan(ages: Ages, *, max_bytes: int | None, older_than_s: float | None, grace_s: float = GRACE_S) -> Plan:
    """Plan to delete all chunks older than ``older_than_s``, and more until at most ``max_bytes`` are left.

    The oldest are deleted first, and none younger than ``grace_s``. None means no limit.
    """
    untouchable_s = ages.now_s - grace_s
    before_s = -math.inf if older_than_s is None else min(ages.now_s - older_than_s, untouchable_s)
    partly_before_s, partly_bytes = before_s, 0
    excess_bytes = 0 if max_bytes is None else ages.total.size_bytes - max_bytes
    going = NOTHING
    for begin_s, end_s, bucket in ages.oldest_first():
        if end_s <= before_s:
            going = going.plus(*bucket)
        elif begin_s >= untouchable_s or going.size_bytes >= excess_bytes:
            if begin_s < before_s:
                going = going.plus(*bucket)  # the age limit lies inside this bucket; count all of it
            break
        elif going.size_bytes + bucket.size_bytes <= excess_bytes:
            going = going.plus(*bucket)
            before_s = partly_before_s = min(end_s, untouchable_s)
        else:
            partly_before_s, partly_bytes = min(end_s, untouchable_s), excess_bytes - going.size_bytes
            share = partly_bytes / bucket.size_bytes
            going = going.plus(math.ceil(bucket.chunks * share), math.ceil(bucket.objects * share), partly_bytes)
            break
    kept_bytes = ages.total.size_bytes - going.size_bytes
    over_bytes = 0 if max_bytes is None else max(0, kept_bytes - max_bytes)
    return Plan(before_s, partly_before_s, partly_bytes, going, kept_bytes, over_bytes)


def manifest_goes(ages: Ages, modified_s: float) -> bool:
    """Whether to delete a namespace's manifest: it has no shards, and is older than ``MANIFEST_MIN_AGE_S``."""
    return not ages.total.objects and modified_s < ages.now_s - MANIFEST_MIN_AGE_S
