"""Which chunks wait to be read into memory before a request asks for them.

Threading: the scheduler's thread alone. No I/O, no clock.
Ownership: nothing. The source (pinned) and the slot in memory (WRITING) of a chunk on its way belong to its ticket.
Failure: what is nowhere, what memory has no room for and what could not be read is left where it is. Nobody waits.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import count, islice
from typing import Final, NamedTuple

from nixl_offload.tiers.base import Tier
from nixl_offload.types import Key, Location, Lookup, LookupContext

MAX_PREFETCHES: Final = 256
"""That wait; the oldest is dropped first."""
MAX_LOOKED_UP: Final = 256
"""Chunks looked up, or marked as used, in one step: a fraction of a millisecond of it."""
MAX_BEGUN: Final = 64
"""Chunks that begin in one step."""
MEMORY_SHARE: Final = 0.5
"""Of memory, the most that one prefetch takes: more would throw out what came first."""
PATIENCE_S: Final = 30.0
"""A prefetch is dropped after this time: what was foretold has come by then, or the tiers have no time for it."""


class Fetch(NamedTuple):
    """A chunk that begins its way to memory."""

    key: Key
    source: Location
    target: Location


@dataclass(slots=True, eq=False)
class _Prefetch:
    """Chunks of one KV cache group, in the order in which they are looked up."""

    request_id: str
    """What lookups are made under."""
    keys: Sequence[Key]
    end_tokens: Sequence[int]
    is_prefix: bool
    groups: int
    allowed: Collection[int] | None
    since_s: float
    next: int = 0
    taken_bytes: int = 0
    """Of memory: brought, or there already."""
    untouched: Iterator[Key] | None = None
    """What is left to be marked as used; None: not everything was looked up yet."""


@dataclass(slots=True)
class _Step:
    """What one step may do, and has done."""

    now_s: float
    limit_bytes: float
    """Of memory, the most that one prefetch takes."""
    usable_bytes: int
    """Of memory: slots that were retired do not come back."""
    looks_left: int
    begun: list[Fetch] = field(default_factory=list)
    evicted: list[Key] = field(default_factory=list)
    full: set[int] = field(default_factory=set)
    """Sizes of slots that memory has none of."""


class _Progress(Enum):
    OVER = auto()
    GOES_ON = auto()
    """In the next step: some tier has gone to look, or there is more to mark as used."""
    NO_ROOM = auto()
    """Memory has no slot now."""
    NEVER = auto()
    """Memory will never have a slot."""
    STEP_OVER = auto()
    """Nothing more begins in this step."""


class PrefetchQueue:
    """Looks chunks up as a request would, and says which of them are to be read into memory, and when."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        *,
        memory: int | None,
        backlog_bytes: int,
        slot_bytes: Callable[[Key], int],
        lookup: Callable[[Key, float, LookupContext, Collection[int] | None], Lookup],
        where: Callable[[Key, Collection[int] | None], int | None],
        forget: Callable[[str], None],
        evicted: Callable[[int, Iterable[Key]], None],
    ) -> None:
        """``lookup``, ``where`` and ``forget`` are the catalog's. ``backlog_bytes``: of chunks under way, per rank.

        ``evicted`` is told, by tier, what had to make room.
        """
        self._tiers = tiers
        self._memory = memory
        self._backlog_bytes = backlog_bytes
        self._slot_bytes = slot_bytes
        self._lookup = lookup
        self._where = where
        self._forget = forget
        self._evicted = evicted
        self._waiting: deque[_Prefetch] = deque()
        self._numbers = count(1)
        self._bytes_under_way = 0
        self.given_up: Counter[str] = Counter()
        """Prefetches by why they ended early: ``no_room``, memory will never take a chunk; ``late``, nothing came of
        them for too long; ``overflow``, too many waited."""

    @property
    def has_pending(self) -> bool:
        """Whether something waits. What waits in vain is dropped, so this does not last."""
        return bool(self._waiting)

    def add(
        self,
        keys: Sequence[Key],
        end_tokens: Sequence[int],
        now_s: float,
        allowed: Collection[int] | None,
        *,
        is_prefix: bool,
        groups: int,
    ) -> None:
        """Have chunks of one group read into memory from the tiers ``allowed`` (None: any), in their order.

        ``end_tokens``: where each ends in its prompt. ``is_prefix``: those behind one that is nowhere are of no use.
        ``groups``: how many groups of the prompt share what one prefetch may take of memory.
        """
        if self._memory is None or not keys:
            return
        if len(self._waiting) >= MAX_PREFETCHES:
            self._give_up(self._waiting.popleft(), "overflow")
        name = f"prefetch-{next(self._numbers)}"
        self._waiting.append(_Prefetch(name, keys, end_tokens, is_prefix, groups, allowed, now_s))

    def begin(self, now_s: float) -> list[Fetch]:
        """Begin what may begin now: sources pinned, slots in memory reserved."""
        assert self._memory is not None, "nothing waits without it"
        step = self._new_step(now_s)
        first: list[_Prefetch] = []
        """In the next step."""
        for _ in range(len(self._waiting)):
            prefetch = self._waiting.popleft()
            progress = self._advance(prefetch, step)
            if progress is _Progress.OVER:
                self._forget(prefetch.request_id)
            elif progress is _Progress.NEVER:
                self._give_up(prefetch, "no_room")
            elif now_s - prefetch.since_s >= PATIENCE_S:
                self._give_up(prefetch, "late")
            elif progress is _Progress.GOES_ON:
                self._waiting.append(prefetch)  # a bucket that is slow to answer holds up none of the others
            else:
                first.append(prefetch)
                if progress is _Progress.STEP_OVER:
                    break
        self._waiting.extendleft(reversed(first))
        self._evicted(self._memory, step.evicted)
        return step.begun

    def ended(self, target: Location) -> None:
        """A chunk's ticket is settled, however it ended."""
        self._bytes_under_way -= target.slot_bytes

    def clear(self) -> None:
        """Forget what waits."""
        while self._waiting:
            self._forget(self._waiting.popleft().request_id)

    # Inside

    def _new_step(self, now_s: float) -> _Step:
        assert self._memory is not None
        slots = self._tiers[self._memory].statistics().slots
        if slots is None:
            return _Step(now_s, 0, 0, MAX_LOOKED_UP)
        limit_bytes = slots.capacity_bytes * MEMORY_SHARE
        return _Step(now_s, limit_bytes, slots.capacity_bytes - slots.retired_bytes, MAX_LOOKED_UP)

    def _give_up(self, prefetch: _Prefetch, why: str) -> None:
        self._forget(prefetch.request_id)
        self.given_up[why] += 1

    def _advance(self, prefetch: _Prefetch, step: _Step) -> _Progress:
        """Go on with one."""
        if prefetch.untouched is None:
            progress = self._look_up(prefetch, step)
            if progress is not _Progress.OVER:
                return progress
            # So far each chunk was younger than those before it: a prefix is to be evicted from its end.
            known = prefetch.keys[: prefetch.next]
            prefetch.untouched = iter(known[::-1] if prefetch.is_prefix else known)
        return self._touch(prefetch.untouched, step)

    def _look_up(self, prefetch: _Prefetch, step: _Step) -> _Progress:
        """Look for chunks and begin to bring them. OVER: all of them, or as many as are of use."""
        is_asking = False
        for at in range(prefetch.next, len(prefetch.keys)):
            if not step.looks_left or len(step.begun) >= MAX_BEGUN:
                return _Progress.GOES_ON if is_asking else _Progress.STEP_OVER
            step.looks_left -= 1
            key, context = prefetch.keys[at], LookupContext(prefetch.request_id, prefetch.end_tokens[at])
            answer = self._lookup(key, step.now_s, context, prefetch.allowed)
            if answer is Lookup.RETRY:
                is_asking = True  # those behind it are asked about, too: a search wants to know how far they go
            elif answer is Lookup.MISS and prefetch.is_prefix:
                break
            elif not is_asking:
                if answer is Lookup.HIT:
                    if prefetch.taken_bytes >= step.limit_bytes / prefetch.groups:
                        break
                    obstacle = self._take(prefetch, key, step)
                    if obstacle is not None:
                        # Its next question is a new one, with a time limit of its own.
                        self._forget(prefetch.request_id)
                        return obstacle
                    prefetch.since_s = step.now_s
                prefetch.next = at + 1
        return _Progress.GOES_ON if is_asking else _Progress.OVER

    def _take(self, prefetch: _Prefetch, key: Key, step: _Step) -> _Progress | None:
        """Begin to bring a chunk that is somewhere. Returns what keeps it from that; None: nothing."""
        assert self._memory is not None
        memory, slot_bytes = self._tiers[self._memory], self._slot_bytes(key)
        source = self._where(key, prefetch.allowed)
        if memory.state(key) is None and source is not None:
            if self._bytes_under_way and self._bytes_under_way + slot_bytes > self._backlog_bytes:
                return _Progress.STEP_OVER
            # Not asked for again: memory may have given up chunks of other sizes, and still lacks room.
            target = None if slot_bytes in step.full else memory.reserve(key, slot_bytes, step.evicted)
            if target is None:
                step.full.add(slot_bytes)
                return _Progress.NO_ROOM if slot_bytes <= step.usable_bytes else _Progress.NEVER
            self._bytes_under_way += slot_bytes
            step.begun.append(Fetch(key, self._tiers[source].pin(key), target))
        else:
            memory.touch(key)
        prefetch.taken_bytes += slot_bytes
        return None

    def _touch(self, keys: Iterator[Key], step: _Step) -> _Progress:
        """Mark chunks as used."""
        assert self._memory is not None
        memory = self._tiers[self._memory]
        for key in islice(keys, step.looks_left):
            memory.touch(key)
            step.looks_left -= 1
        return _Progress.OVER if step.looks_left else _Progress.GOES_ON
