"""Decides from listings what to delete from a shared tier so that it keeps to a size and an age.

Threading: pure, one owner; nothing here does I/O or reads a clock.

A tier may hold many millions of shards, so no name is kept. A first pass over the listing counts bytes by age
(``Ages``: at most some ten thousand numbers per namespace), ``make_plan`` turns the counts into a
point in time, and a second pass over a fresh listing asks a ``Sweep`` about every chunk. What was written
between the passes is younger than that point and stays.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from nixl_offload.tiers.inspect import ChunkInfo

GRACE_S: Final = 600.0
"""Nothing younger is ever deleted: it may be part of a chunk of which other ranks are still writing theirs."""
MANIFEST_MIN_AGE_S: Final = 86_400.0
"""A namespace without shards keeps its manifest for this time: its servers may not have stored anything yet."""
_BUCKETS_PER_DOUBLING: Final = 1024


class Totals(NamedTuple):
    """How many chunks, and what they consist of."""

    chunks: int = 0
    objects: int = 0
    size_bytes: int = 0

    def plus(self, chunks: int, objects: int, size_bytes: int) -> Totals:
        """Return the sum."""
        return Totals(self.chunks + chunks, self.objects + objects, self.size_bytes + size_bytes)


NOTHING: Final = Totals()


class Ages:
    """Chunks counted by how long ago they were modified, in bounded memory.

    A bucket is 0.07 % as wide as its chunks are old: a minute for those of a day, six hours for those of a year. Chunks
    younger than a second share one.
    """

    def __init__(self, now_s: float) -> None:
        """``now_s``: that by which ages count, in seconds since the epoch."""
        self.now_s = now_s
        self.total = NOTHING
        self.oldest_s = math.inf
        self.newest_s = -math.inf
        self._buckets: dict[int, Totals] = {}

    def add(self, chunk: ChunkInfo) -> None:
        """Count a chunk."""
        number = math.floor(_BUCKETS_PER_DOUBLING * math.log2(max(1.0, self.now_s - chunk.modified_s)))
        counted = Totals(1, len(chunk.shards), chunk.size_bytes)
        self._buckets[number] = self._buckets.get(number, NOTHING).plus(*counted)
        self.total = self.total.plus(*counted)
        self.oldest_s = min(self.oldest_s, chunk.modified_s)
        self.newest_s = max(self.newest_s, chunk.modified_s)

    def merge(self, other: Ages) -> None:
        """Count all that ``other`` has counted, by the same ``now_s``."""
        for number, totals in other._buckets.items():
            self._buckets[number] = self._buckets.get(number, NOTHING).plus(*totals)
        self.total = self.total.plus(*other.total)
        self.oldest_s = min(self.oldest_s, other.oldest_s)
        self.newest_s = max(self.newest_s, other.newest_s)

    def oldest_first(self) -> Iterator[tuple[float, float, Totals]]:
        """Yield for each bucket the times at which it begins and ends (its chunks are older) and what it holds."""
        for number in sorted(self._buckets, reverse=True):
            begin_s, end_s = (self.now_s - 2.0 ** (each / _BUCKETS_PER_DOUBLING) for each in (number + 1, number))
            yield begin_s, end_s if number else math.inf, self._buckets[number]


@dataclass(frozen=True, slots=True)
class Plan:
    """Which chunks go. Make one with ``make_plan``."""

    before_s: float
    """Chunks modified earlier go."""
    partly_before_s: float
    """Of those modified later than ``before_s`` but earlier than this, which count as equally old ..."""
    partly_bytes: int
    """... so many go that this is reached."""
    estimate: Totals
    """What will go, to within one bucket of ``Ages`` and one chunk."""
    kept_bytes: int
    """What will be left, as exactly."""
    over_bytes: int
    """By how much that is more than was asked for, because all the rest is too young."""


def make_plan(ages: Ages, *, max_bytes: int | None, older_than_s: float | None, grace_s: float = GRACE_S) -> Plan:
    """Decide which chunks go so that none is older than ``older_than_s`` and ``max_bytes`` are left at most.

    The oldest go first, never one younger than ``grace_s``; None means no such limit.
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
                going = going.plus(*bucket)  # lies across the age limit; counted whole
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
    """Whether the manifest of a namespace goes: nothing is left to describe, and nobody has just begun."""
    return not ages.total.objects and modified_s < ages.now_s - MANIFEST_MIN_AGE_S


class Sweep:
    """Answers, chunk by chunk of a second listing, whether it goes by the plan."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._partly_left_bytes = plan.partly_bytes

    def takes(self, chunk: ChunkInfo) -> bool:
        """Whether ``chunk`` goes; to be asked once per chunk."""
        if chunk.modified_s < self._plan.before_s:
            return True
        if chunk.modified_s < self._plan.partly_before_s and self._partly_left_bytes > 0:
            self._partly_left_bytes -= chunk.size_bytes
            return True
        return False
