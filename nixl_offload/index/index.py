"""The index of one tier in memory: key -> location, state and pins. The least recently used key is evicted first.

Threading: none; every method is called by one thread at a time: the one that reopens a tier, then the scheduler's. No
I/O, no clock, no logging.
Memory: some 200 bytes per key; a node of 30 TB has one or two million. docs/decisions/0003-index.md has the figures.
Failure: a method that raises has changed nothing.

``State`` is what callers see. ``Phase`` is finer: it also says who holds the slot, its writer or its readers, so
that the table of transitions needs no conditions beside it::

                       insert_writing
    ABSENT ──────────────────────────────▶ WRITING ──drop──▶ DOOMED
      │  ▲ ▲                                │  │               │
      │  │ └──────────── abort ─────────────┘  │ commit        │ commit, abort
      │  │                                     ▼               ▼
      └──┼── insert_ready ──────────────────▶ READY          ABSENT
         └── drop, evict ──────────────────── │  ▲
                                          pin ▼  │ last unpin
                                            PINNED ──drop──▶ LEAVING ──last unpin──▶ ABSENT
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, IntEnum, auto
from heapq import heappop, heappush, heapreplace
from itertools import count
from typing import Final

from nixl_offload.errors import IndexStateError
from nixl_offload.types import Key, Location

_SHARDS: Final = 128
"""Dictionaries of a size class, by the highest bits of a key's hash, so that each is small: one that grows is copied at
once, and ``next(iter(...))`` passes over what was removed since."""
_SHARD_SHIFT: Final = 57
"""``hash(key) >> _SHARD_SHIFT`` is -64 to 63. Not the lowest bits, by which a dictionary places its keys."""
_OFFSET_BITS: Final = 56
_OFFSET_MASK: Final = (1 << _OFFSET_BITS) - 1


class State(Enum):
    """What an index says about a key it holds."""

    WRITING = auto()
    """Reserved; its bytes are on their way."""
    READY = auto()
    """May be pinned and read."""
    EVICTING = auto()
    """Given up, but a writer or readers still hold its slot: a miss, and it cannot be stored anew until it is gone."""


class Phase(IntEnum):
    """Where a key stands, holders included."""

    ABSENT = 0
    WRITING = 1
    DOOMED = 2
    """Dropped while being written: goes as soon as the writer reports, whether it succeeded or not."""
    READY = 3
    """Unpinned: the only phase from which a key can be evicted."""
    PINNED = 4
    LEAVING = 5
    """Dropped while pinned: goes with the last unpin."""


class Event(IntEnum):
    """What can happen to a key."""

    INSERT_WRITING = 0
    INSERT_READY = 1
    COMMIT = 2
    ABORT = 3
    PIN = 4
    UNPIN = 5
    """An unpin that leaves other pins."""
    UNPIN_LAST = 6
    DROP = 7
    EVICT = 8


_TRANSITIONS: dict[Phase, dict[Event, Phase]] = {
    Phase.ABSENT: {Event.INSERT_WRITING: Phase.WRITING, Event.INSERT_READY: Phase.READY, Event.DROP: Phase.ABSENT},
    Phase.WRITING: {Event.COMMIT: Phase.READY, Event.ABORT: Phase.ABSENT, Event.DROP: Phase.DOOMED},
    Phase.DOOMED: {Event.COMMIT: Phase.ABSENT, Event.ABORT: Phase.ABSENT, Event.DROP: Phase.DOOMED},
    Phase.READY: {Event.PIN: Phase.PINNED, Event.DROP: Phase.ABSENT, Event.EVICT: Phase.ABSENT},
    Phase.PINNED: {
        Event.PIN: Phase.PINNED,
        Event.UNPIN: Phase.PINNED,
        Event.UNPIN_LAST: Phase.READY,
        Event.DROP: Phase.LEAVING,
    },
    Phase.LEAVING: {Event.UNPIN: Phase.LEAVING, Event.UNPIN_LAST: Phase.ABSENT, Event.DROP: Phase.LEAVING},
}
_TABLE: tuple[tuple[Phase | None, ...], ...] = tuple(
    tuple(_TRANSITIONS[phase].get(event) for event in Event) for phase in Phase
)
_STATES = (None, State.WRITING, State.EVICTING, State.READY, State.READY, State.EVICTING)
"""By ``Phase``."""


def _next_phase(phase: Phase, event: Event) -> Phase:
    """Return the phase that ``event`` leads to. Raises IndexStateError where the table has no entry."""
    after = _TABLE[phase][event]
    if after is None:
        allowed = ", ".join(e.name.lower() for e in _TRANSITIONS[phase])
        raise IndexStateError(f"{event.name.lower()} of a key that is {phase.name.lower()}; allowed: {allowed}")
    return after


@dataclass(slots=True)
class _Held:
    """A key that its writer or its readers hold."""

    phase: Phase
    location: Location
    pins: int = 0


class _Queue:
    """READY and unpinned keys of one slot size, by their last use.

    Plain dictionaries of bytes and numbers: the garbage collector does not look into these, and would take 0.2 s for
    half a million keys of an OrderedDict.
    """

    __slots__ = ("_has_head", "_heads", "shards", "slot_bytes")

    def __init__(self, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self.shards: tuple[dict[Key, int], ...] = tuple({} for _ in range(_SHARDS))
        """Key -> last use and offset, in one number; in each the least recently used first."""
        self._heads: list[tuple[int, int]] = []
        """A heap of shards, each once at most: the number of its first key, or of one that was first before, and which
        it is."""
        self._has_head = bytearray(_SHARDS)

    def use(self, key: Key, packed: int) -> None:
        """Put a key at the young end."""
        number = hash(key) >> _SHARD_SHIFT
        self.shards[number][key] = packed
        if not self._has_head[number]:
            self._has_head[number] = True
            heappush(self._heads, (packed, number))

    def forget(self, key: Key) -> None:
        del self.shards[hash(key) >> _SHARD_SHIFT][key]

    def oldest(self) -> Key | None:
        """Return the least recently used key."""
        heads = self._heads
        while heads:
            oldest, number = heads[0]
            for key, packed in self.shards[number].items():
                if packed == oldest:
                    return key
                heapreplace(heads, (packed, number))
                break
            else:
                self._has_head[number] = False
                heappop(heads)
        return None


class Index:
    """Key -> location for one tier.

    A key is absent, WRITING, READY or EVICTING. A call that the table of transitions does not have raises
    IndexStateError: it is a bug of the caller. A key that was dropped while held stays EVICTING until its last holder
    lets go. Until then it is a miss for lookups, and ``insert_*`` refuses it: store only what has state None.

    A location that a method returns as *freed* is no longer known here and may be reused at once. That no two
    locations overlap is the caller's to see to.
    """

    __slots__ = ("_held", "_queues", "_tier", "_uses")

    def __init__(self, tier: int = 0) -> None:
        """``tier``: that of every location."""
        self._tier = tier
        self._queues: dict[int, _Queue] = {}
        """By slot size."""
        self._held: dict[Key, _Held] = {}
        """All keys but those that are READY and unpinned."""
        self._uses = count()

    def __len__(self) -> int:
        """Count of keys in any state."""
        return len(self._held) + sum(len(shard) for queue in self._queues.values() for shard in queue.shards)

    def __iter__(self) -> Iterator[Key]:
        """All keys in any state, in no promised order. For checks."""
        yield from self._held
        for queue in self._queues.values():
            for shard in queue.shards:
                yield from shard

    # Questions

    @property
    def held(self) -> int:
        """Count of keys that a writer or readers hold. For checks."""
        return len(self._held)

    def state(self, key: Key) -> State | None:
        """What the index says about ``key``; None if absent. Does not count as a use (see ``touch``)."""
        held = self._held.get(key)
        if held is not None:
            return _STATES[held.phase]
        return None if self._ready(key) is None else State.READY

    def find(self, key: Key) -> tuple[State | None, int] | None:
        """State and offset of ``key``, None if absent: what is asked thousands of times a step, in one call."""
        held = self._held.get(key)
        if held is not None:
            return _STATES[held.phase], held.location.offset
        ready = self._ready(key)
        return None if ready is None else (State.READY, ready[1] & _OFFSET_MASK)

    def pins(self, key: Key) -> int:
        """Count of pins of ``key``, in any state."""
        held = self._held.get(key)
        return 0 if held is None else held.pins

    def location(self, key: Key) -> Location:
        """Where ``key`` rests, in any state. Raises KeyError if absent."""
        held = self._held.get(key)
        if held is not None:
            return held.location
        ready = self._ready(key)
        if ready is None:
            raise KeyError(key)
        return self._location(*ready)

    # Storing

    def insert_writing(self, key: Key, location: Location) -> None:
        """Absent -> WRITING. Raises IndexStateError if the key is here in any state, EVICTING included."""
        self._insert(key, location, Event.INSERT_WRITING)

    def insert_ready(self, key: Key, location: Location) -> None:
        """Absent -> READY, as the youngest of its size: for reopening. Raises as ``insert_writing``."""
        self._insert(key, location, Event.INSERT_READY)

    def commit(self, key: Key) -> Location | None:
        """WRITING -> READY, returns None; if it was dropped meanwhile it goes, and its freed location is returned."""
        return self._apply(key, Event.COMMIT)

    def abort(self, key: Key) -> Location:
        """WRITING (dropped meanwhile or not) -> absent. Returns the freed location."""
        freed = self._apply(key, Event.ABORT)
        assert freed is not None, "the table says that abort frees"
        return freed

    # Loading

    def pin(self, key: Key) -> Location:
        """Forbid eviction of a READY key until a matching ``unpin``; pins are counted. Returns where it rests.

        The last unpin puts the key at the young end.
        """
        self._apply(key, Event.PIN)
        return self._held[key].location

    def unpin(self, key: Key) -> Location | None:
        """Take back one pin. Returns the freed location if this was the last pin of a dropped key."""
        return self._apply(key, Event.UNPIN_LAST if self.pins(key) <= 1 else Event.UNPIN)

    def touch(self, key: Key) -> None:
        """Count a use of a READY key. Ignores keys that are absent or in another state."""
        ready = self._ready(key)
        if ready is not None:
            queue, packed = ready
            queue.forget(key)
            queue.use(key, next(self._uses) << _OFFSET_BITS | packed & _OFFSET_MASK)

    # Giving up

    def evict(self, slot_bytes: int) -> tuple[Key, Location] | None:
        """Choose an unpinned READY key of this slot size and remove it. Returns it with its freed location, or None."""
        queue = self._queues.get(slot_bytes)
        key = None if queue is None else queue.oldest()
        if key is None:
            return None
        freed = self._apply(key, Event.EVICT)
        assert freed is not None, "the table says that evict frees"
        return key, freed

    def drop(self, key: Key) -> Location | None:
        """Make a miss of ``key``, in any state.

        READY and unpinned: removed, the freed location is returned. Pinned or WRITING: becomes EVICTING, and the last
        ``unpin``, or ``commit`` or ``abort``, returns the location. Absent or EVICTING already: nothing happens.
        """
        return self._apply(key, Event.DROP)

    def clear(self) -> list[Location]:
        """``drop`` every key. Returns the locations that are still held; every other one is free at once.

        Costs microseconds per *held* key.
        """
        self._queues = {}
        for held in self._held.values():
            held.phase = _next_phase(held.phase, Event.DROP)
        return [held.location for held in self._held.values()]

    # Inside

    def _ready(self, key: Key) -> tuple[_Queue, int] | None:
        """Return the queue of a READY and unpinned key, and its number there; None: it is in another state."""
        number = hash(key) >> _SHARD_SHIFT
        for queue in self._queues.values():
            packed = queue.shards[number].get(key)
            if packed is not None:
                return queue, packed
        return None

    def _location(self, queue: _Queue, packed: int) -> Location:
        return Location(self._tier, packed & _OFFSET_MASK, queue.slot_bytes)

    def _insert(self, key: Key, location: Location, event: Event) -> None:
        held = self._held.get(key)
        before = held.phase if held is not None else Phase.ABSENT if self._ready(key) is None else Phase.READY
        self._keep(key, location, _next_phase(before, event), 0)

    def _apply(self, key: Key, event: Event) -> Location | None:
        """Make one transition of the table, with all that follows from it. Returns the location if that frees it."""
        held = self._held.get(key)
        queue = None
        if held is not None:
            before, location, pins = held.phase, held.location, held.pins
        elif (ready := self._ready(key)) is not None:
            queue = ready[0]
            before, location, pins = Phase.READY, self._location(*ready), 0
        else:
            _next_phase(Phase.ABSENT, event)
            return None
        after = _next_phase(before, event)
        if queue is None:
            del self._held[key]
        else:
            queue.forget(key)
        if after == Phase.ABSENT:
            return location
        pins += (event is Event.PIN) - (event in (Event.UNPIN, Event.UNPIN_LAST))
        self._keep(key, location, after, pins)
        return None

    def _keep(self, key: Key, location: Location, phase: Phase, pins: int) -> None:
        if phase != Phase.READY:
            self._held[key] = _Held(phase, location, pins)
            return
        queue = self._queues.get(location.slot_bytes)
        if queue is None:
            queue = self._queues[location.slot_bytes] = _Queue(location.slot_bytes)
        queue.use(key, next(self._uses) << _OFFSET_BITS | location.offset)

    # For tests

    def check(self) -> None:
        """Assert every invariant. For tests, at the end of each."""
        assert len(set(self)) == len(self), "a key is in two states"
        for held in self._held.values():
            assert held.phase not in (Phase.ABSENT, Phase.READY), "a key is held by nobody"
            assert (held.pins > 0) == (held.phase in (Phase.PINNED, Phase.LEAVING)), "pins and phase disagree"
        for queue in self._queues.values():
            for number, shard in enumerate(queue.shards):
                assert all((hash(key) >> _SHARD_SHIFT) % _SHARDS == number for key in shard), "a key is astray"
                assert sorted(shard.values()) == list(shard.values()), "a key was used and not moved"
