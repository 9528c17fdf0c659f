"""Which chunks wait to be read into memory before a request asks for them.

Threading: the scheduler's thread alone. No I/O, no clock.
Ownership: nothing. The source (pinned) and the slot in memory (WRITING) of a chunk on its way belong to its ticket.
Failure: what is nowhere, what memory has no room for and what could not be read is left where it is. Nobody waits.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Final, Literal, NamedTuple

from nixl_offload.tiers.base import Tier
from nixl_offload.tiers.slot_tier import SlotTier
from nixl_offload.types import Key, Location, Lookup, LookupContext

MAX_PREFETCHES: Final = 256
"""That wait; the oldest is dropped first."""
MAX_LOOKED_UP: Final = 256
"""Chunks looked up in one step: a fraction of a millisecond of it."""
MAX_BEGUN: Final = 64
"""Chunks that begin in one step."""
MEMORY_SHARE: Final = 0.5
"""Of memory, the most that one prefetch takes: more would throw out what came first."""
PATIENCE_S: Final = 30.0
"""A prefetch is dropped when it has not got on for this time: its request has come by then, or there is no room."""


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
    limit_bytes: float
    """Of memory, the most that it takes."""
    allowed: Collection[int] | None
    since_s: float
    next: int = 0
    taken_bytes: int = 0
    """Of memory: brought, or there already."""


@dataclass(slots=True)
class _Step:
    """What one step has done, and may still do."""

    now_s: float
    looks_left: int = MAX_LOOKED_UP
    begun: list[Fetch] = field(default_factory=list)
    evicted: list[Key] = field(default_factory=list)
    full: set[int] = field(default_factory=set)
    """Sizes of slots that memory has none of."""


_Progress = Literal["over", "asking", "no_room", "step_over"]
"""asking: some tier has gone to look, and the next step knows more. no_room: memory has no slot now. step_over: nothing
more begins in this step."""


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

        ``evicted`` is called, by tier, with what had to make room.
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
        """Prefetches by why they ended early: ``late``, they did not get on for too long; ``overflow``, too many
        waited."""

    @property
    def has_pending(self) -> bool:
        """Whether something waits. What waits in vain is dropped, so this does not last."""
        return bool(self._waiting)

    def add(
        self,
        keys: Sequence[Key],
        end_tokens: Sequence[int],
        now_s: float,
        allowed: Collection[int] | None = None,
        *,
        is_prefix: bool,
        groups: int,
    ) -> None:
        """Have chunks of one group read into memory from the tiers ``allowed`` (None: any), in their order.

        ``end_tokens``: where each ends in its prompt. ``is_prefix``: those behind one that is nowhere are of no use.
        ``groups``: how many groups of the prompt share what one prefetch may take of memory.
        """
        memory = None if self._memory is None else self._tiers[self._memory]
        if not keys or not isinstance(memory, SlotTier):
            return
        if len(self._waiting) >= MAX_PREFETCHES:
            self._give_up(self._waiting.popleft(), "overflow")
        name, limit_bytes = f"prefetch-{next(self._numbers)}", memory.capacity_bytes * MEMORY_SHARE / groups
        self._waiting.append(_Prefetch(name, keys, end_tokens, is_prefix, limit_bytes, allowed, now_s))

    def begin(self, now_s: float) -> list[Fetch]:
        """Begin what may begin now: sources pinned, slots in memory reserved."""
        assert self._memory is not None, "nothing waits without it"
        step = _Step(now_s)
        first: list[_Prefetch] = []
        for _ in range(len(self._waiting)):
            prefetch = self._waiting.popleft()
            progress = self._advance(prefetch, self._tiers[self._memory], step)
            if progress == "over":
                self._forget(prefetch.request_id)
                if prefetch.is_prefix:  # it is of use from its beginning: let its end be evicted first
                    for key in reversed(prefetch.keys[: prefetch.next]):
                        self._tiers[self._memory].touch(key)
            elif now_s - prefetch.since_s >= PATIENCE_S:
                self._give_up(prefetch, "late")
            elif progress == "asking":
                self._waiting.append(prefetch)  # a bucket that is slow to answer holds up none of the others
            else:
                first.append(prefetch)
                if progress == "step_over":
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

    def _give_up(self, prefetch: _Prefetch, why: str) -> None:
        self._forget(prefetch.request_id)
        self.given_up[why] += 1

    def _advance(self, prefetch: _Prefetch, memory: Tier, step: _Step) -> _Progress:
        """Look for chunks and begin to bring them."""
        is_asking = False
        for at in range(prefetch.next, len(prefetch.keys)):
            if not step.looks_left or len(step.begun) >= MAX_BEGUN:
                return "asking" if is_asking else "step_over"
            step.looks_left -= 1
            key, context = prefetch.keys[at], LookupContext(prefetch.request_id, prefetch.end_tokens[at])
            answer = self._lookup(key, step.now_s, context, prefetch.allowed)
            if answer is Lookup.RETRY:
                is_asking = True  # those behind it are asked about, too: a search wants to know how far they go
            elif answer is Lookup.MISS and prefetch.is_prefix:
                break
            elif not is_asking:
                if answer is Lookup.HIT:
                    if prefetch.taken_bytes >= prefetch.limit_bytes:
                        break
                    obstacle = self._take(prefetch, key, memory, step)
                    if obstacle is not None:
                        self._forget(prefetch.request_id)  # its next lookup has a time limit of its own
                        return obstacle
                    prefetch.since_s = step.now_s
                prefetch.next = at + 1
        return "asking" if is_asking else "over"

    def _take(self, prefetch: _Prefetch, key: Key, memory: Tier, step: _Step) -> _Progress | None:
        """Begin to bring a chunk that is somewhere. Returns what prevents it; None: nothing."""
        slot_bytes, source = self._slot_bytes(key), self._where(key, prefetch.allowed)
        if memory.state(key) is None and source is not None:
            if self._bytes_under_way and self._bytes_under_way + slot_bytes > self._backlog_bytes:
                return "step_over"
            # Not asked for again: memory may have given up chunks of other sizes, and still lacks room.
            target = None if slot_bytes in step.full else memory.reserve(key, slot_bytes, step.evicted)
            if target is None:
                step.full.add(slot_bytes)
                return "no_room"
            self._bytes_under_way += slot_bytes
            step.begun.append(Fetch(key, self._tiers[source].pin(key), target))
        else:
            memory.touch(key)
        prefetch.taken_bytes += slot_bytes
        return None
