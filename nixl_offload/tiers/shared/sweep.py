"""Decides from listings what to delete from a shared tier so that it keeps to a size and an age.

Threading: pure, one owner; nothing here does I/O or reads a clock.

A tier may hold many millions of shards, so no name is kept. A first pass over the listing counts bytes by age
(``Ages``: some thousand numbers per namespace, however many shards there are), ``make_plan`` turns the counts into a
point in time, and a second pass over a fresh listing asks a ``Sweep`` about every chunk. What was written
between the passes is younger than that point and stays.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from nixl_offload.tiers.inspect import ChunkInfo

GRACE_S: Final = 600.0
"""Nothing younger is ever deleted: it may be part of a chunk of which other ranks are still writing theirs."""
MANIFEST_MIN_AGE_S: Final = 86_400.0
"""A namespace without shards keeps its manifest so long: its servers may not have stored anything yet."""
_MOST_BUCKETS: Final = 8192


class Totals(NamedTuple):
    """How many chunks, and what they consist of."""

    chunks: int = 0
    objects: int = 0
    size_bytes: int = 0

    def plus(self, chunks: int, objects: int, size_bytes: int) -> Totals:
        """Return the sum."""
        return Totals(self.chunks + chunks, self.objects + objects, self.size_bytes + size_bytes)


NOTHING: Final = Totals()


@dataclass(slots=True)
class Ages:
    """Chunks counted by when they were modified, in buckets of equal width, in bounded memory.

    A bucket is a second wide, which is all that a bucket store tells, until there are too many; then each becomes
    twice as wide. A year of steady writing ends in buckets of about an hour.
    """

    width_s: float = 1.0
    total: Totals = NOTHING
    oldest_s: float = math.inf
    newest_s: float = -math.inf
    _buckets: dict[int, Totals] = field(default_factory=dict)

    def add(self, chunk: ChunkInfo) -> None:
        """Count a chunk."""
        self._count(math.floor(chunk.modified_s / self.width_s), Totals(1, len(chunk.shards), chunk.size_bytes))
        self.oldest_s = min(self.oldest_s, chunk.modified_s)
        self.newest_s = max(self.newest_s, chunk.modified_s)

    def merge(self, other: Ages) -> None:
        """Count all that ``other`` has counted."""
        while self.width_s < other.width_s:
            self._widen()
        for number, totals in other._buckets.items():
            self._count(math.floor(number * other.width_s / self.width_s), totals)
        self.oldest_s = min(self.oldest_s, other.oldest_s)
        self.newest_s = max(self.newest_s, other.newest_s)

    def oldest_first(self) -> Iterator[tuple[float, Totals]]:
        """Yield for each bucket the time at which it ends (its chunks are older) and what it holds."""
        for number in sorted(self._buckets):
            yield (number + 1) * self.width_s, self._buckets[number]

    def _count(self, number: int, totals: Totals) -> None:
        self._buckets[number] = self._buckets.get(number, NOTHING).plus(*totals)
        self.total = self.total.plus(*totals)
        while len(self._buckets) > _MOST_BUCKETS:
            self._widen()

    def _widen(self) -> None:
        narrow, self._buckets = self._buckets, {}
        self.width_s *= 2
        for number, totals in narrow.items():
            wide = number // 2
            self._buckets[wide] = self._buckets.get(wide, NOTHING).plus(*totals)


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
    """What will be left, likewise."""
    over_bytes: int
    """By how much that is more than was asked for, because all the rest is too young."""


def make_plan(
    ages: Ages, *, now_s: float, max_bytes: int | None, older_than_s: float | None, grace_s: float = GRACE_S
) -> Plan:
    """Decide which chunks go so that none is older than ``older_than_s`` and ``max_bytes`` are left at most.

    The oldest go first, never one within ``grace_s`` of ``now_s``; None means no such limit.
    """
    untouchable_s = now_s - grace_s
    before_s = -math.inf if older_than_s is None else min(now_s - older_than_s, untouchable_s)
    partly_before_s, partly_bytes = before_s, 0
    excess_bytes = 0 if max_bytes is None else ages.total.size_bytes - max_bytes
    going = NOTHING
    for end_s, bucket in ages.oldest_first():
        begin_s = end_s - ages.width_s
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


def manifest_goes(ages: Ages, modified_s: float, *, now_s: float) -> bool:
    """Whether the manifest of a namespace goes: nothing is left to describe, and nobody has just begun."""
    return not ages.total.objects and modified_s < now_s - MANIFEST_MIN_AGE_S


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
