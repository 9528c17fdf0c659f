"""Write-through: which chunks wait to be written to which farther tier, in the order in which they were stored, and
which are pinned in memory until then.

Threading: the scheduler's thread alone. No I/O, no clock.
Ownership: the pins of unsaved chunks. The source (pinned) and the target (WRITING) of a write-through that has begun
belong to its ticket. Unsaved pins and source pins are counted separately. The holder of a pin removes it, once.
Failure: a pending write whose source is gone, whose target takes nothing, or that failed is dropped and counted. It is
pending again when the chunk is offered again.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final, NamedTuple

from nixl_offload.index import State
from nixl_offload.tiers.base import Tier
from nixl_offload.types import Key, Location, Outcome

PATIENCE_S: Final = 30.0
"""A pending write is dropped if it has waited this long and its tier has finished no write-through meanwhile."""
MAX_PENDING: Final = 65_536
"""Pending writes to one tier; the oldest is dropped first."""
MAX_BEGUN: Final = 128
"""Writes to one tier that begin in one step: one or two milliseconds of it."""
MAX_DROPPED: Final = 256
"""Pending writes that are dropped in one step for a tier that takes nothing: a millisecond or two of it."""
_MAX_LOOKED_AT: Final = 1024
_TICKETS_PER_BACKLOG: Final = 8
"""The backlog of a tier is divided among at least so many tickets, so that one can settle while others go on."""
_READY, _EVICTING = State.READY, State.EVICTING


@dataclass(frozen=True, slots=True)
class ChainOptions:
    """How tiers work together. Bytes are per rank."""

    promote: bool = True
    """Keep in memory what is loaded from farther tiers."""
    pin_unsaved: bool = True
    """Pin chunks in memory until a farther tier has them."""
    unsaved_limit_bytes: int = 0
    """The most that is pinned so. Beyond it a chunk may be evicted before it is anywhere else."""
    write_through_backlog_bytes: int = 256 << 20
    """Of write-throughs under way to one tier."""
    memory: int | None = None
    """Position of the memory tier; None: there is none."""


@dataclass(slots=True, eq=False)
class PendingChunk:
    """A chunk that waits to be written to some tier, or is on its way there."""

    key: Key
    slot_bytes: int
    open_writes: int = 0
    """Tiers to which its write is pending or under way."""
    pinned: bool = False


class WriteThrough(NamedTuple):
    """One that has begun."""

    chunk: PendingChunk
    source: Location
    target: Location


class WriteThroughQueue:
    """Decides what goes on to farther tiers, and when. Sources are always nearer than their target."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        options: ChainOptions,
        *,
        slot_bytes: Callable[[Key], int],
        evicted: Callable[[int, Iterable[Key]], None],
    ) -> None:
        """``tiers`` may be replaced in place. ``evicted`` is called, by tier, with what had to make room."""
        self._tiers = tiers
        self._options = options
        self._slot_bytes = slot_bytes
        self._evicted = evicted
        self._chunks: dict[Key, PendingChunk] = {}
        self._pending: tuple[OrderedDict[Key, float], ...] = tuple(OrderedDict() for _ in tiers)
        """By target: since when each chunk waits, oldest first. Each is in ``_chunks``."""
        self._bytes_under_way = [0] * len(self._tiers)
        self._written_s = [float("-inf")] * len(self._tiers)
        self._unsaved_bytes = 0
        self.outcomes: Counter[tuple[int, str]] = Counter()
        """Counts by target and how a write ended: an outcome, or ``gone``, ``refused`` or ``overflow``."""

    @property
    def has_pending(self) -> bool:
        """Whether some write is pending. What waits in vain is dropped, so this does not last."""
        return any(self._pending)

    @property
    def unsaved_bytes(self) -> int:
        """Bytes per rank that are pinned in memory for farther tiers."""
        return self._unsaved_bytes

    @property
    def pending(self) -> tuple[int, ...]:
        """Pending writes, by target."""
        return tuple(len(waiting) for waiting in self._pending)

    @property
    def bytes_under_way(self) -> tuple[int, ...]:
        """Bytes per rank that are on their way, by target."""
        return tuple(self._bytes_under_way)

    def offer(self, key: Key, states: Sequence[State | None], now_s: float) -> None:
        """A chunk was stored, or offered again: it is to be written to each farther tier that lacks it.

        ``states``: of the chunk, by tier. A tier that is just giving it up lacks it, too.
        """
        nearest = states.index(_READY)
        lacking = [
            position
            for position in range(nearest + 1, len(states))
            if states[position] is None or states[position] is _EVICTING
        ]
        if not lacking:
            return
        chunk = self._chunks.get(key)
        if chunk is None:
            chunk = self._chunks[key] = PendingChunk(key, self._slot_bytes(key))
        for position in lacking:
            pending = self._pending[position]
            if key in pending:
                continue
            pending[key] = now_s
            chunk.open_writes += 1
            if len(pending) > MAX_PENDING:
                self._drop(position, next(iter(pending)), "overflow")
        if not chunk.pinned:
            self._pin(chunk, states)

    def begin(self, now_s: float) -> list[list[WriteThrough]]:
        """Begin the writes that may begin now, oldest stored first. Each list is one ticket, with one target."""
        begun: list[list[WriteThrough]] = []
        for target, pending in enumerate(self._pending):
            if pending:
                begun += self._divide(self._begin(target, now_s))
        return begun

    def settled(self, write: WriteThrough, how: str, now_s: float) -> None:
        """Its target is committed or given back, its source unpinned. ``how``: as in ``outcomes``."""
        chunk, target = write.chunk, write.target.tier
        self._bytes_under_way[target] -= chunk.slot_bytes
        self.outcomes[target, how] += 1
        is_saved = how == Outcome.OK.value
        if is_saved:
            self._written_s[target] = now_s
        self._close(chunk)
        if is_saved:
            self._unpin(chunk)

    def clear(self) -> None:
        """Forget what is pending, and take its pins back. What is under way goes on, until ``settled``."""
        for chunk in self._chunks.values():
            self._unpin(chunk)
        self._chunks = {}
        for pending in self._pending:
            pending.clear()

    # Inside

    def _divide(self, writes: Iterable[WriteThrough]) -> Iterator[list[WriteThrough]]:
        """Yield the writes of one ticket at a time."""
        most_bytes = self._options.write_through_backlog_bytes // _TICKETS_PER_BACKLOG
        of_ticket: list[WriteThrough] = []
        size_bytes = 0
        for write in writes:
            if of_ticket and size_bytes + write.chunk.slot_bytes > most_bytes:
                yield of_ticket
                of_ticket, size_bytes = [], 0
            of_ticket.append(write)
            size_bytes += write.chunk.slot_bytes
        if of_ticket:
            yield of_ticket

    def _begin(self, target: int, now_s: float) -> list[WriteThrough]:
        pending, tier = self._pending[target], self._tiers[target]
        begun: list[WriteThrough] = []
        over: list[tuple[Key, str]] = []
        evicted: list[Key] = []
        is_blocked = False
        for key, since_s in islice(pending.items(), _MAX_LOOKED_AT):
            state = tier.state(key)
            if state is _EVICTING:  # somebody holds it still
                if now_s - since_s >= PATIENCE_S:
                    over.append((key, "refused"))
                continue
            if state is not None:
                over.append((key, ""))
                continue
            source = self._source(key, target)
            if source is None:
                over.append((key, "gone"))
                continue
            chunk = self._chunks[key]
            bytes_under_way = self._bytes_under_way[target]
            if bytes_under_way and bytes_under_way + chunk.slot_bytes > self._options.write_through_backlog_bytes:
                is_blocked = True
                break
            location = tier.reserve(key, chunk.slot_bytes, evicted)
            if location is None:
                is_blocked = True
                break
            self._bytes_under_way[target] += chunk.slot_bytes
            begun.append(WriteThrough(chunk, self._tiers[source].pin(key), location))
            if len(begun) >= MAX_BEGUN:
                break
        self._evicted(target, evicted)
        for write in begun:
            del pending[write.chunk.key]
        for key, why in over:
            self._drop(target, key, why)
        if is_blocked and not begun:
            self._drop_overdue(target, now_s)
        return begun

    def _drop_overdue(self, target: int, now_s: float) -> None:
        for key, since_s in list(islice(self._pending[target].items(), MAX_DROPPED)):
            if now_s - max(since_s, self._written_s[target]) < PATIENCE_S:
                return
            self._drop(target, key, "refused")

    def _source(self, key: Key, target: int) -> int | None:
        for position in range(target):
            tier = self._tiers[position]
            if tier.state(key) is _READY and tier.in_use:
                return position
        return None

    def _drop(self, target: int, key: Key, why: str) -> None:
        """Remove a pending write. ``why``: the outcome to count; empty if the tier has the chunk already."""
        del self._pending[target][key]
        if why:
            self.outcomes[target, why] += 1
        self._close(self._chunks[key])

    def _close(self, chunk: PendingChunk) -> None:
        chunk.open_writes -= 1
        if chunk.open_writes:
            return
        if self._chunks.get(chunk.key) is chunk:  # else it is from before a reset
            del self._chunks[chunk.key]
        self._unpin(chunk)

    def _pin(self, chunk: PendingChunk, states: Sequence[State | None]) -> None:
        memory, limit_bytes = self._options.memory, self._options.unsaved_limit_bytes
        if not self._options.pin_unsaved or memory is None or states[memory] is not _READY:
            return
        if _READY in states[memory + 1 :] or self._unsaved_bytes + chunk.slot_bytes > limit_bytes:
            return
        self._tiers[memory].pin(chunk.key)
        self._unsaved_bytes += chunk.slot_bytes
        chunk.pinned = True

    def _unpin(self, chunk: PendingChunk) -> None:
        if not chunk.pinned:
            return
        assert self._options.memory is not None, "pinned there"
        chunk.pinned = False
        self._unsaved_bytes -= chunk.slot_bytes
        self._tiers[self._options.memory].unpin(chunk.key)
