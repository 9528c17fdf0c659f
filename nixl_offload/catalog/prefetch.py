"""Which chunks wait to be read into memory before a request asks for them.

Threading: the scheduler's thread alone. No I/O, no clock.
Ownership: nothing. The source (pinned) and the slot in memory (WRITING) of a chunk on its way belong to its ticket.
Failure: what is nowhere, what memory has no room for and what could not be read is left where it is. Nobody waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import count
from typing import Final, NamedTuple

from nixl_offload.tiers.base import Tier
from nixl_offload.types import Key, Location, Lookup, LookupContext

MAX_PREFETCHES: Final = 256
"""That wait; the oldest is dropped first."""
MAX_LOOKED_UP: Final = 256
"""Chunks looked up in one step: a fraction of a millisecond of it."""
MAX_BEGUN: Final = 64
"""Chunks that begin in one step."""
MEMORY_SHARE: Final = 0.5
"""Of memory, the most that one prefetch takes: more would throw out what it has brought first."""
PATIENCE_S: Final = 30.0
"""A prefetch is dropped after this time: what was foretold has come by then, or the tiers have no time for it."""


class PrefetchKey(NamedTuple):
    """A chunk to be read into memory, and the token at which it ends in its prompt."""

    key: Key
    end_token: int


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
    chunks: Sequence[PrefetchKey]
    is_prefix: bool
    allowed: Collection[int] | None
    since_s: float
    next: int = 0
    taken_bytes: int = 0
    """Of memory: brought, or there already."""


class _Progress(Enum):
    OVER = "over"
    ASKING = "asking"
    """Some tier has gone to look."""
    WAITING = "waiting"
    """For room, or for the next step."""


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

    @property
    def has_pending(self) -> bool:
        """Whether something waits. What waits in vain is dropped, so this does not last."""
        return bool(self._waiting)

    def add(
        self, chunks: Sequence[PrefetchKey], now_s: float, allowed: Collection[int] | None, *, is_prefix: bool
    ) -> None:
        """Have chunks of one group read into memory from the tiers ``allowed`` (None: any), in their order.

        ``is_prefix``: those behind one that is nowhere are of no use.
        """
        if self._memory is None or not chunks:
            return
        if len(self._waiting) >= MAX_PREFETCHES:
            self._forget(self._waiting.popleft().request_id)
        name = f"prefetch-{next(self._numbers)}"
        self._waiting.append(_Prefetch(name, chunks, is_prefix, allowed, now_s))

    def begin(self, now_s: float) -> list[Fetch]:
        """Begin what may begin now: sources pinned, slots in memory reserved."""
        begun: list[Fetch] = []
        if self._memory is None:
            return begun
        evicted: list[Key] = []
        left = MAX_LOOKED_UP
        for _ in range(len(self._waiting)):
            prefetch = self._waiting.popleft()
            looked_up, progress = self._advance(prefetch, left, now_s, begun, evicted)
            left -= looked_up
            if progress is _Progress.OVER or now_s - prefetch.since_s >= PATIENCE_S:
                self._forget(prefetch.request_id)
            elif progress is _Progress.ASKING:
                self._waiting.append(prefetch)  # a bucket that is slow to answer holds up none of the others
            else:
                self._forget(prefetch.request_id)  # its next question is a new one, with a time limit of its own
                self._waiting.appendleft(prefetch)
                break
        self._evicted(self._memory, evicted)
        return begun

    def ended(self, target: Location) -> None:
        """A chunk's ticket is settled, however it ended."""
        self._bytes_under_way -= target.slot_bytes

    def clear(self) -> None:
        """Forget what waits."""
        while self._waiting:
            self._forget(self._waiting.popleft().request_id)

    # Inside

    def _advance(
        self, prefetch: _Prefetch, limit: int, now_s: float, begun: list[Fetch], evicted: list[Key]
    ) -> tuple[int, _Progress]:
        """Go on with one. Returns how many chunks were looked up, and how it stands."""
        looked_up, is_asking, limit_bytes = 0, False, self._limit_bytes()
        for at in range(prefetch.next, len(prefetch.chunks)):
            if looked_up >= limit or len(begun) >= MAX_BEGUN:
                return looked_up, _Progress.ASKING if is_asking else _Progress.WAITING
            chunk = prefetch.chunks[at]
            looked_up += 1
            context = LookupContext(prefetch.request_id, chunk.end_token)
            answer = self._lookup(chunk.key, now_s, context, prefetch.allowed)
            if answer is Lookup.RETRY:
                is_asking = True  # those behind it are asked about, too: a search wants to know how far they go
            elif answer is Lookup.MISS and prefetch.is_prefix:
                break
            elif not is_asking:
                if answer is Lookup.HIT:
                    if prefetch.taken_bytes >= limit_bytes:
                        break
                    if not self._take(prefetch, chunk.key, begun, evicted):
                        return looked_up, _Progress.WAITING
                    prefetch.since_s = now_s
                prefetch.next = at + 1
        if is_asking:
            return looked_up, _Progress.ASKING
        self._touch(prefetch.chunks[: prefetch.next], prefetch)
        return looked_up, _Progress.OVER

    def _take(self, prefetch: _Prefetch, key: Key, begun: list[Fetch], evicted: list[Key]) -> bool:
        """Begin to bring a chunk that is somewhere. False: there is no room for it now."""
        assert self._memory is not None
        memory, slot_bytes = self._tiers[self._memory], self._slot_bytes(key)
        source = self._where(key, prefetch.allowed)
        if memory.state(key) is None and source is not None:
            if self._bytes_under_way and self._bytes_under_way + slot_bytes > self._backlog_bytes:
                return False
            target = memory.reserve(key, slot_bytes, evicted)
            if target is None:
                return False
            self._bytes_under_way += slot_bytes
            begun.append(Fetch(key, self._tiers[source].pin(key), target))
        else:
            memory.touch(key)
        prefetch.taken_bytes += slot_bytes
        return True

    def _touch(self, chunks: Sequence[PrefetchKey], prefetch: _Prefetch) -> None:
        """Have a prefix evicted from its end. So far each chunk was younger than those before it."""
        assert self._memory is not None
        for chunk in reversed(chunks) if prefetch.is_prefix else chunks:
            self._tiers[self._memory].touch(chunk.key)

    def _limit_bytes(self) -> float:
        assert self._memory is not None
        slots = self._tiers[self._memory].statistics().slots
        return 0.0 if slots is None else slots.capacity_bytes * MEMORY_SHARE
