"""Write-through: which chunks are *due* in which farther tier, in the order in which they were stored, and what is
pinned in memory until they are there.

Threading: the scheduler's thread alone. No I/O, no clock.
Ownership: the pins of unsaved chunks. The source (pinned) and the target (WRITING) of a move that has begun belong to
its ticket. A chunk's unsaved pin and its sources' are counted apart, so each is taken back by who took it, once.
Failure: a due chunk whose source is gone, whose target takes nothing, or whose move failed is dropped and counted; it
is due again when it is offered again.
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
"""A chunk that has been due for so long in a tier to which nothing has got through for so long is dropped."""
MAX_DUE: Final = 65_536
"""Chunks that are due in one tier; the oldest goes first."""
MAX_BEGUN: Final = 128
"""Moves to one tier that begin in one step: one or two milliseconds of it."""
MAX_GIVEN_UP: Final = 256
"""Chunks that are dropped in one step for a tier that takes nothing: a millisecond or two of it, not half a second."""
_MAX_LOOKED_AT: Final = 1024
_TICKETS_PER_BACKLOG: Final = 8
"""A tier's moves are dealt out to at least so many tickets, so that it always has some at hand."""
_READY, _EVICTING = State.READY, State.EVICTING


@dataclass(frozen=True, slots=True)
class ChainOptions:
    """How tiers work together. Bytes are per rank."""

    promote: bool = True
    """Keep in memory what is loaded from farther tiers."""
    pin_unsaved: bool = True
    """Pin chunks in memory until farther tiers have them."""
    unsaved_limit_bytes: int = 0
    """The most that is pinned so. Beyond it a chunk may be evicted before it is anywhere else."""
    move_backlog_bytes: int = 256 << 20
    """Moves in flight to one tier."""
    memory: int | None = None
    """Position of the memory tier; None: there is none."""


@dataclass(slots=True, eq=False)
class DueChunk:
    """A chunk that is due in some tier, or on its way there."""

    key: Key
    slot_bytes: int
    open: int = 0
    """Tiers where it is due or on its way."""
    pinned: bool = False


class Move(NamedTuple):
    """A move that has begun."""

    chunk: DueChunk
    source: Location
    target: Location


class WriteThrough:
    """Decides what goes on to farther tiers, and when. Sources are always nearer than their target."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        options: ChainOptions,
        *,
        slot_bytes: Callable[[Key], int],
        evicted: Callable[[int, Iterable[Key]], None],
    ) -> None:
        """``tiers`` may be replaced in place. ``evicted`` is told, by tier, what had to go for a move."""
        self._tiers = tiers
        self._options = options
        self._slot_bytes = slot_bytes
        self._evicted = evicted
        self._chunks: dict[Key, DueChunk] = {}
        self._due: tuple[OrderedDict[Key, float], ...] = tuple(OrderedDict() for _ in tiers)
        """By tier: since when chunks are due, oldest first. Each is in ``_chunks``."""
        self._moving_bytes = [0] * len(self._tiers)
        self._got_through_s = [float("-inf")] * len(self._tiers)
        self._unsaved_bytes = 0
        self._spare: OrderedDict[DueChunk, None] = OrderedDict()
        """Pinned, and in a farther tier already: unpinned when the limit is needed for those that are not."""
        self.told: Counter[tuple[int, str]] = Counter()
        """Moves by target and how they ended: an outcome; ``gone``, ``refused``, ``overflow`` where none began."""

    @property
    def has_due(self) -> bool:
        """Whether something waits to be moved. What waits in vain is dropped, so this does not last."""
        return any(self._due)

    @property
    def unsaved_bytes(self) -> int:
        """Bytes per rank that are pinned in memory for farther tiers."""
        return self._unsaved_bytes

    @property
    def due(self) -> tuple[int, ...]:
        """Chunks that are due, by tier."""
        return tuple(len(due) for due in self._due)

    @property
    def moving_bytes(self) -> tuple[int, ...]:
        """Bytes per rank that are on their way, by target."""
        return tuple(self._moving_bytes)

    def offer(self, key: Key, states: Sequence[State | None], now_s: float) -> None:
        """A chunk was stored, or offered again: it is due in each farther tier that lacks it. ``states``: by tier.

        A tier that is just giving the chunk up lacks it, too.
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
            chunk = self._chunks[key] = DueChunk(key, self._slot_bytes(key))
        for position in lacking:
            due = self._due[position]
            if key in due:
                continue
            due[key] = now_s
            chunk.open += 1
            if len(due) > MAX_DUE:
                self._drop(position, next(iter(due)), "overflow")
        if not chunk.pinned:
            self._pin(chunk, states)

    def begin(self, now_s: float) -> list[list[Move]]:
        """Begin what may begin now, in the order in which it was stored: lists for one ticket and one target each."""
        begun: list[list[Move]] = []
        for target, due in enumerate(self._due):
            if due:
                begun += self._deal(self._begin(target, now_s))
        return begun

    def ended(self, move: Move, how: str, now_s: float) -> None:
        """A move is settled, its target committed or given back, its source unpinned. ``how``: see ``told``."""
        chunk, target = move.chunk, move.target.tier
        self._moving_bytes[target] -= chunk.slot_bytes
        self.told[target, how] += 1
        is_saved = how == Outcome.OK.value
        if is_saved:
            self._got_through_s[target] = now_s
        self._close(chunk)
        if is_saved and chunk.pinned:
            self._spare[chunk] = None

    def clear(self) -> None:
        """Forget what is due, and take its pins back. Moves in flight go on and are told of by ``ended``."""
        for chunk in self._chunks.values():
            self._unpin(chunk)
        self._chunks = {}
        for due in self._due:
            due.clear()

    # Inside

    def _deal(self, moves: Iterable[Move]) -> Iterator[list[Move]]:
        most_bytes = self._options.move_backlog_bytes // _TICKETS_PER_BACKLOG
        dealt: list[Move] = []
        size_bytes = 0
        for move in moves:
            if dealt and size_bytes + move.chunk.slot_bytes > most_bytes:
                yield dealt
                dealt, size_bytes = [], 0
            dealt.append(move)
            size_bytes += move.chunk.slot_bytes
        if dealt:
            yield dealt

    def _begin(self, target: int, now_s: float) -> list[Move]:
        due, tier = self._due[target], self._tiers[target]
        moves: list[Move] = []
        over: list[tuple[Key, str]] = []
        evicted: list[Key] = []
        is_blocked = False
        for key, since_s in islice(due.items(), _MAX_LOOKED_AT):
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
            moving_bytes = self._moving_bytes[target]
            if moving_bytes and moving_bytes + chunk.slot_bytes > self._options.move_backlog_bytes:
                is_blocked = True
                break
            location = tier.reserve(key, chunk.slot_bytes, evicted)
            if location is None:
                is_blocked = True
                break
            self._moving_bytes[target] += chunk.slot_bytes
            moves.append(Move(chunk, self._tiers[source].pin(key), location))
            if len(moves) >= MAX_BEGUN:
                break
        self._evicted(target, evicted)
        for move in moves:
            del due[move.chunk.key]
        for key, why in over:
            self._drop(target, key, why)
        if is_blocked and not moves:
            self._lose_patience(target, now_s)
        return moves

    def _lose_patience(self, target: int, now_s: float) -> None:
        for key, since_s in list(islice(self._due[target].items(), MAX_GIVEN_UP)):
            if now_s - max(since_s, self._got_through_s[target]) < PATIENCE_S:
                return
            self._drop(target, key, "refused")

    def _source(self, key: Key, target: int) -> int | None:
        for position in range(target):
            tier = self._tiers[position]
            if tier.state(key) is _READY and tier.in_use:
                return position
        return None

    def _drop(self, target: int, key: Key, why: str) -> None:
        """It is not due any more. ``why`` empty: it is there."""
        del self._due[target][key]
        if why:
            self.told[target, why] += 1
        self._close(self._chunks[key])

    def _close(self, chunk: DueChunk) -> None:
        chunk.open -= 1
        if chunk.open:
            return
        if self._chunks.get(chunk.key) is chunk:  # else it is from before a reset
            del self._chunks[chunk.key]
        self._unpin(chunk)

    def _pin(self, chunk: DueChunk, states: Sequence[State | None]) -> None:
        memory, limit_bytes = self._options.memory, self._options.unsaved_limit_bytes
        if not self._options.pin_unsaved or memory is None or states[memory] is not _READY:
            return
        if chunk.slot_bytes > limit_bytes:
            return
        is_saved = _READY in states[memory + 1 :]
        while not is_saved and self._spare and self._unsaved_bytes + chunk.slot_bytes > limit_bytes:
            self._unpin(next(iter(self._spare)))
        if self._unsaved_bytes + chunk.slot_bytes > limit_bytes:
            return
        self._tiers[memory].pin(chunk.key)
        self._unsaved_bytes += chunk.slot_bytes
        chunk.pinned = True
        if is_saved:
            self._spare[chunk] = None

    def _unpin(self, chunk: DueChunk) -> None:
        if not chunk.pinned:
            return
        assert self._options.memory is not None, "pinned there"
        chunk.pinned = False
        self._unsaved_bytes -= chunk.slot_bytes
        self._spare.pop(chunk, None)
        self._tiers[self._options.memory].unpin(chunk.key)
