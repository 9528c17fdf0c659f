"""Which chunks go from tier to tier, and when: write-throughs to farther tiers, prefetches and fetches into memory.

Threading: the scheduler's thread alone. No I/O, no clock.
Ownership: none. The pinned source and the WRITING target of a move that has begun belong to its ticket; the source of
a pending move may be evicted.
Failure: a pending move whose source is gone, or whose target takes nothing for ``PATIENCE_S``, is dropped and counted.
A chunk that is offered again, or asked for by another hint or request, is pending again.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import TYPE_CHECKING, Final, NamedTuple

from nixl_offload.index import State
from nixl_offload.tiers.slot_tier import SlotTier
from nixl_offload.types import Key, Location, Lookup, LookupContext

if TYPE_CHECKING:
    from nixl_offload.catalog.catalog import Catalog

PATIENCE_S: Final = 30.0
"""A pending move is dropped if it has waited this long and none to its tier has succeeded meanwhile; a prefetch, if
none of its chunks was found for this long."""
MAX_PENDING: Final = 65_536
"""Pending moves to one tier; the oldest is dropped first."""
MAX_BEGUN: Final = 128
"""Moves to one tier that begin in one step: one or two milliseconds."""
MAX_DROPPED: Final = 256
"""Pending moves that are dropped in one step for a tier that takes nothing: one or two milliseconds."""
MAX_PREFETCHES: Final = 256
"""Prefetches whose chunks are looked up; the oldest is dropped first."""
MAX_LOOKED_UP: Final = 256
"""Chunks of prefetches that are looked up in one step: a fraction of a millisecond."""
MEMORY_SHARE: Final = 0.5
"""The largest share of memory that one prefetch takes, or all fetches: more would evict its own first chunks."""
FETCHED_AT_ONCE: Final = 48
"""Chunks that may be under way into memory, however large: as many as a rank reads at a time for them."""
_MAX_LOOKED_AT: Final = 1024
_TICKETS_PER_BACKLOG: Final = 8
"""A tier's backlog is divided among at least this many tickets, so that one can settle while the rest go on."""
_READY, _EVICTING = State.READY, State.EVICTING


@dataclass(frozen=True, slots=True)
class ChainOptions:
    """How tiers work together. Bytes are per rank."""

    write_through_backlog_bytes: int = 256 << 20
    """The most that is under way to one tier."""
    memory: int | None = None
    """Position of the memory tier; None: there is none."""
    gpu_has: Callable[[Key], bool] = lambda key: False
    """Whether the GPU has a chunk that memory is to take when it leaves the GPU."""


@dataclass(slots=True, eq=False)
class _Prefetch:
    """Chunks of one KV cache group, in prompt order or, of a window, from its end; of a hint, or of a waiting hit."""

    request_id: str
    """The request id for its lookups."""
    keys: Sequence[Key]
    end_tokens: Sequence[int]
    is_prefix: bool
    limit_bytes: float
    """The most memory that it takes."""
    allowed: Collection[int] | None
    since_s: float
    next: int = 0
    taken_bytes: int = 0
    moves_left: int = 1
    """How many of its moves are pending or under way; one more while it is looked up."""


class _Pending(NamedTuple):
    """A move that waits to begin."""

    since_s: float
    prefetch: _Prefetch | None = None


class Move(NamedTuple):
    """A chunk on its way from tier to tier."""

    key: Key
    source: Location
    target: Location
    prefetch: _Prefetch | None = None
    """The prefetch that it belongs to; None: a write-through."""


class Moves:
    """Looks up what hints ask for, and begins moves as far as their targets have room."""

    def __init__(self, catalog: Catalog) -> None:
        """``catalog`` has the tiers, and knows which chunks are where."""
        self._catalog = catalog
        self._tiers = catalog.tiers
        self._options = catalog.chain
        self._memory = -1 if self._options.memory is None else self._options.memory
        self._pending: tuple[OrderedDict[Key, _Pending], ...] = tuple(OrderedDict() for _ in self._tiers)
        """By target, oldest first."""
        self.bytes_under_way: Final = [0] * len(self._tiers)
        """Bytes per rank that are on their way, by target."""
        self._moved_s = [float("-inf")] * len(self._tiers)
        """By target: when a move succeeded last."""
        self._prefetches: deque[_Prefetch] = deque()
        """Prefetches whose chunks are being looked up."""
        self.fetches: Final[dict[str, _Prefetch]] = {}
        """By request without blocks: what is read into memory for it, and what has come."""
        self._numbers = count(1)

    @property
    def has_pending(self) -> bool:
        """Whether a move or a lookup waits. If it waits too long it is dropped, so this does not last."""
        return bool(self._prefetches) or any(self._pending)

    @property
    def pending(self) -> tuple[int, ...]:
        """How many moves wait to begin, by target."""
        return tuple(len(pending) for pending in self._pending)

    def is_pending(self, key: Key) -> bool:
        """Whether a move of this chunk waits to begin."""
        return any(key in pending for pending in self._pending)

    def offer(self, chunks: Iterable[tuple[Key, Sequence[State | None]]], now_s: float) -> None:
        """Chunks were stored, or offered again: queue each for every farther tier that lacks it. With a chunk come its
        states, by tier. A tier that is evicting it lacks it, too.
        """
        pending = _Pending(now_s)
        for key, states in chunks:
            nearest = states.index(_READY)
            for target in range(nearest + 1, len(states)):
                if states[target] is None or states[target] is _EVICTING:
                    self._enqueue(target, key, pending)

    def prefetch(
        self,
        keys: Sequence[Key],
        end_tokens: Sequence[int],
        now_s: float,
        allowed: Collection[int] | None = None,
        *,
        is_prefix: bool,
        groups: int,
    ) -> None:
        """Begin to read chunks of one group into memory, in their order, from the tiers ``allowed`` (None: any).
        ``end_tokens``: where each ends in its prompt. ``is_prefix``: chunks after a missing one are of no use.
        ``groups``: how many groups of the prompt divide the memory of one prefetch.
        """
        memory = None if self._memory < 0 else self._tiers[self._memory]
        if not keys or len(self._tiers) == 1 or not isinstance(memory, SlotTier):
            return
        if len(self._prefetches) >= MAX_PREFETCHES:
            self._end(self._prefetches.popleft(), "overflow")
        name, limit_bytes = f"prefetch-{next(self._numbers)}", memory.capacity_bytes * MEMORY_SHARE / groups
        self._prefetches.append(_Prefetch(name, keys, end_tokens, is_prefix, limit_bytes, allowed, now_s))

    def fetch(self, request_id: str, keys: Sequence[Key], now_s: float, allowed: Collection[int] | None) -> bool:
        """Begin to read into memory what farther tiers have of a hit. Returns whether its request is to wait for it."""
        memory, among = self._tiers[self._memory], range(len(self._tiers)) if allowed is None else allowed
        if self._memory not in among or not isinstance(memory, SlotTier):
            return False
        usable = [at for at in among if self._tiers[at].in_use]
        found = zip(keys, memory.states(keys), self._catalog.where(keys, allowed), strict=True)
        far = [key for key, state, at in found if at in usable and state is not _READY and state is not _EVICTING]
        together = set(far).union(*(fetch.keys for fetch in self.fetches.values()))
        if sum(map(self._catalog.slot_bytes, together)) > memory.capacity_bytes * MEMORY_SHARE:
            return False
        fetch = _Prefetch(request_id, far, (), True, 0.0, allowed, now_s, len(far), moves_left=0)
        self.fetches[request_id] = fetch
        for key in far:
            self._enqueue(self._memory, key, _Pending(now_s, fetch))
        return self.awaits_fetch(request_id, now_s)

    def awaits_fetch(self, request_id: str, now_s: float) -> bool:
        """Whether chunks of a request's fetch are still to come, and it has not waited ``PATIENCE_S``."""
        fetch, memory = self.fetches.get(request_id), self._tiers[self._memory]
        while fetch is not None and fetch.next and now_s - fetch.since_s < PATIENCE_S:
            last = fetch.keys[fetch.next - 1]  # the last to come, and perhaps also fetched for another request
            if last in self._pending[self._memory] or memory.state(last) is State.WRITING:
                return True
            fetch.next -= 1
        return False

    def end_fetch(self, request_id: str) -> None:
        """Forget a fetch: its request has blocks, or has ended. What is still pending is not read."""
        if (fetch := self.fetches.pop(request_id, None)) is not None and fetch.moves_left:
            waiting = self._pending[self._memory]
            for key in [key for key in fetch.keys if key in waiting and waiting[key].prefetch is fetch]:
                self._drop(self._memory, key, "")

    def begin(self, now_s: float) -> list[list[Move]]:
        """Begin the moves that may begin now, the oldest first. Each list is one ticket, with one target."""
        if self._prefetches:
            self._look_up(now_s)
        begun: list[list[Move]] = []
        for target, pending in enumerate(self._pending):
            if pending:
                begun += self._divide(self._begin(target, now_s))
        return begun

    def settled(self, move: Move, how: str, now_s: float) -> None:
        """Record an ended move; its target and source are released. ``how``: ``ok``, ``gone``, or what failed."""
        target = move.target.tier
        self.bytes_under_way[target] -= move.target.slot_bytes
        if how == "ok":
            self._moved_s[target] = now_s
        elif target != self._memory:
            self._catalog.counts["write_through_failures", target, how] += 1
        self._moved(move.prefetch)

    def clear(self) -> None:
        """Forget pending moves. Moves under way go on until ``settled``."""
        for pending in self._pending:
            pending.clear()
        self.fetches.clear()
        while self._prefetches:
            self._catalog.forget_request(self._prefetches.popleft().request_id)

    # Lookups of prefetches

    def _look_up(self, now_s: float) -> None:
        """Look chunks up in their order, as a request would. Chunks that some tier has become pending moves."""
        asking: list[_Prefetch] = []
        looks_left = MAX_LOOKED_UP
        while self._prefetches and looks_left:
            prefetch = self._prefetches.popleft()
            looks_left, is_asking, is_over = self._advance(prefetch, now_s, looks_left)
            if is_over:
                self._end(prefetch)
            elif now_s - prefetch.since_s >= PATIENCE_S:
                self._end(prefetch, "late")
            elif is_asking:
                asking.append(prefetch)  # a bucket that is slow to answer holds up no other prefetch
            else:
                self._prefetches.appendleft(prefetch)
        self._prefetches.extend(asking)

    def _advance(self, prefetch: _Prefetch, now_s: float, looks_left: int) -> tuple[int, bool, bool]:
        """Return how many lookups are left, whether some tier is looking, and whether all chunks are known."""
        memory, is_asking = self._tiers[self._memory], False
        # A lookup in a tier that is out of use might be its trial, which is for a load.
        usable = [at for at, tier in enumerate(self._tiers) if tier.in_use]
        allowed = usable if prefetch.allowed is None else [at for at in usable if at in prefetch.allowed]
        for at in range(prefetch.next, len(prefetch.keys)):
            if not looks_left:
                return 0, is_asking, False
            looks_left -= 1
            key, context = prefetch.keys[at], LookupContext(prefetch.request_id, prefetch.end_tokens[at])
            answer = self._catalog.lookup(key, now_s, context, allowed)
            if answer is Lookup.RETRY:
                is_asking = True  # later chunks are asked about, too: a search has to know where they end
            elif answer is Lookup.MISS and prefetch.is_prefix:
                break
            elif not is_asking:
                if answer is Lookup.HIT:
                    if prefetch.taken_bytes >= prefetch.limit_bytes:
                        break
                    prefetch.taken_bytes += self._catalog.slot_bytes(key)
                    prefetch.since_s = now_s
                    if memory.state(key) is None:
                        self._enqueue(self._memory, key, _Pending(now_s, prefetch))
                    memory.touch((key,))
                prefetch.next = at + 1
        return looks_left, is_asking, not is_asking

    def _end(self, prefetch: _Prefetch, why: str = "") -> None:
        """Stop looking up its chunks. ``why``: the cause to count, if that is early."""
        if why:
            self._catalog.counts["hints", "prefetch", why] += 1
        self._catalog.forget_request(prefetch.request_id)
        self._moved(prefetch)

    def _moved(self, prefetch: _Prefetch | None) -> None:
        """A move, or the lookup, has ended. Once all of a prefix has arrived, let its end be evicted first."""
        if prefetch is not None:
            prefetch.moves_left -= 1
            if prefetch.is_prefix and not prefetch.moves_left:
                self._tiers[self._memory].touch(reversed(prefetch.keys[: prefetch.next]))

    # What waits to begin

    def _enqueue(self, target: int, key: Key, pending: _Pending) -> None:
        waiting = self._pending[target]
        if waiting.setdefault(key, pending) is pending and pending.prefetch is not None:
            pending.prefetch.moves_left += 1
        if len(waiting) > MAX_PENDING:
            self._drop(target, next(iter(waiting)), "overflow")

    def _begin(self, target: int, now_s: float) -> list[Move]:
        waiting, tier = self._pending[target], self._tiers[target]
        backlog_bytes = self._options.write_through_backlog_bytes
        begun: list[Move] = []
        over: list[tuple[Key, str]] = []
        evicted: list[Key] = []
        refused: set[int] = set()
        """Slot sizes that the tier has no room for."""
        is_blocked = False
        for (key, (since_s, prefetch)), state, nearest in self._looked_at(target):
            if state is _EVICTING:  # a pin still holds it
                if now_s - since_s >= PATIENCE_S:
                    over.append((key, "refused"))
                continue
            if state is not None:
                over.append((key, ""))
                continue
            source = nearest if prefetch is None else self._catalog.where((key,), prefetch.allowed)[0]
            if source is None or not self._tiers[source].in_use:
                over.append((key, "gone"))
                continue
            slot_bytes, bytes_under_way = self._catalog.slot_bytes(key), self.bytes_under_way[target]
            most_bytes = backlog_bytes if prefetch is None else max(backlog_bytes, FETCHED_AT_ONCE * slot_bytes)
            if bytes_under_way > 0 and bytes_under_way + slot_bytes > most_bytes:
                is_blocked = True
                break
            location = None
            if slot_bytes not in refused and self._catalog.takes(target, now_s):
                location = tier.reserve(key, slot_bytes, evicted)
            if location is None:
                is_blocked = True
                refused.add(slot_bytes)
                if prefetch is None:
                    break  # chunks after a gap are of no use
                continue
            self.bytes_under_way[target] += slot_bytes
            begun.append(Move(key, self._tiers[source].pin((key,))[0], location, prefetch))
            if len(begun) >= MAX_BEGUN:
                break
        self._catalog.note_removed(target, evicted)
        for move in begun:
            del waiting[move.key]
        for key, why in over:
            self._drop(target, key, why)
        if is_blocked and not begun:
            for key, pending in list(islice(waiting.items(), MAX_DROPPED)):
                if now_s - max(pending.since_s, self._moved_s[target]) < PATIENCE_S:
                    break
                self._drop(target, key, "refused")
        return begun

    def _looked_at(self, target: int) -> Iterator[tuple[tuple[Key, _Pending], State | None, int | None]]:
        """Yield pending moves, the oldest first, with their state in the target and the nearest tier that has them."""
        pending = list(islice(self._pending[target].items(), _MAX_LOOKED_AT))
        for first in range(0, len(pending), MAX_BEGUN):
            some = pending[first : first + MAX_BEGUN]
            keys = [key for key, _ in some]
            states, nearest = self._tiers[target].states(keys), self._catalog.where(keys, range(target))
            yield from zip(some, states, nearest, strict=True)

    def _divide(self, moves: Sequence[Move]) -> Iterator[list[Move]]:
        """Yield the moves of one ticket at a time."""
        most_bytes = self._options.write_through_backlog_bytes // _TICKETS_PER_BACKLOG
        of_ticket: list[Move] = []
        size_bytes = 0
        for move in moves:
            if of_ticket and size_bytes + move.target.slot_bytes > most_bytes:
                yield of_ticket
                of_ticket, size_bytes = [], 0
            of_ticket.append(move)
            size_bytes += move.target.slot_bytes
        if of_ticket:
            yield of_ticket

    def _drop(self, target: int, key: Key, why: str) -> None:
        """Remove a pending move. ``why``: the cause to count; empty if the tier has the chunk already."""
        prefetch = self._pending[target].pop(key).prefetch
        if why:
            self._catalog.counts["write_through_failures", target, why] += 1
        self._moved(prefetch)
