"""The index of one tier in memory: key -> location, state and pins. The least recently used key is evicted first.

Threading: none; every method is called by one thread at a time: the one that reopens a tier, then the scheduler's. No
I/O, no clock, no logging.
Memory: some 170 bytes per key, its slot included; a node of 30 TB has one or two million. The figures are in
docs/decisions/0003-index.md.
Failure: a method that raises has changed nothing.

A key that is READY and pinned has readers, one that is WRITING has a writer. What is dropped while it is held is
EVICTING until its last holder lets go::

    absent         insert_writing -> WRITING   insert_ready -> READY
    WRITING        commit -> READY             abort -> absent          drop -> EVICTING
    READY          pin -> READY, pinned        drop, evict -> absent
    READY, pinned  last unpin -> READY         drop -> EVICTING
    EVICTING       commit or abort by its writer, the last unpin by its readers -> absent
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from heapq import heappop, heappush, heapreplace
from itertools import count
from typing import Final

from nixl_offload.errors import IndexStateError
from nixl_offload.types import Key, Location

_SHARDS: Final = 128
"""Dictionaries of a slot size, by the highest bits of a key's hash, so that each is small: one that grows is copied at
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


@dataclass(slots=True)
class _Held:
    """A key that its writer or its readers hold."""

    location: Location
    pins: int = 0
    """0: its writer has it."""
    is_dropped: bool = False

    @property
    def state(self) -> State:
        if self.is_dropped:
            return State.EVICTING
        return State.READY if self.pins else State.WRITING


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

    A call that the diagram above does not have raises IndexStateError: it is a bug of the caller. An EVICTING key is a
    miss for lookups, and ``insert_*`` refuses it: store only what has state None.

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
            return held.state
        return None if self._ready(key) is None else State.READY

    def find(self, key: Key) -> tuple[State, int] | None:
        """State and offset of ``key``, None if absent: what is asked thousands of times a step, in one call."""
        held = self._held.get(key)
        if held is not None:
            return held.state, held.location.offset
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
        queue, packed = ready
        return Location(self._tier, packed & _OFFSET_MASK, queue.slot_bytes)

    # Storing

    def insert_writing(self, key: Key, location: Location) -> None:
        """Absent -> WRITING. Raises IndexStateError if the key is here in any state, EVICTING included."""
        if self.state(key) is not None:
            raise self._refusal(key, "inserted")
        self._held[key] = _Held(location)

    def insert_ready(self, key: Key, location: Location) -> None:
        """Absent -> READY, as the youngest of its size: for reopening. Raises as ``insert_writing``."""
        if self.state(key) is not None:
            raise self._refusal(key, "inserted")
        self._use(key, location)

    def commit(self, key: Key) -> Location | None:
        """WRITING -> READY, returns None; if it was dropped meanwhile it goes, and its freed location is returned."""
        held = self._written(key, "committed")
        if held.is_dropped:
            return held.location
        self._use(key, held.location)
        return None

    def abort(self, key: Key) -> Location:
        """WRITING (dropped meanwhile or not) -> absent. Returns the freed location."""
        return self._written(key, "aborted").location

    # Loading

    def pin(self, key: Key) -> Location:
        """Forbid eviction of a READY key until a matching ``unpin``; pins are counted. Returns where it rests."""
        if self.state(key) is not State.READY:
            raise self._refusal(key, "pinned")
        held = self._held.get(key)
        if held is None:
            held = self._held[key] = _Held(self._take(key))
        held.pins += 1
        return held.location

    def unpin(self, key: Key) -> Location | None:
        """Take back one pin; the last one puts the key at the young end.

        Returns the freed location if this was the last pin of a dropped key.
        """
        held = self._held.get(key)
        if held is None or not held.pins:
            raise self._refusal(key, "unpinned")
        held.pins -= 1
        if held.pins:
            return None
        del self._held[key]
        if held.is_dropped:
            return held.location
        self._use(key, held.location)
        return None

    def touch(self, key: Key) -> None:
        """Count a use of a READY key. Ignores keys that are absent or in another state."""
        ready = self._ready(key)
        if ready is not None:
            queue, packed = ready
            del queue.shards[hash(key) >> _SHARD_SHIFT][key]
            queue.use(key, next(self._uses) << _OFFSET_BITS | packed & _OFFSET_MASK)

    # Giving up

    def evict(self, slot_bytes: int) -> tuple[Key, Location] | None:
        """Remove the unpinned READY key of this slot size that was used least recently.

        Returns it with its freed location; None: there is none.
        """
        queue = self._queues.get(slot_bytes)
        key = None if queue is None else queue.oldest()
        return None if key is None else (key, self._take(key))

    def drop(self, key: Key) -> Location | None:
        """Make a miss of ``key``, in any state.

        READY and unpinned: removed, the freed location is returned. Pinned or WRITING: becomes EVICTING, and the last
        ``unpin``, or ``commit`` or ``abort``, returns the location. Absent or EVICTING already: nothing happens.
        """
        held = self._held.get(key)
        if held is not None:
            held.is_dropped = True
            return None
        return None if self._ready(key) is None else self._take(key)

    def clear(self) -> list[Location]:
        """``drop`` every key. Returns the locations that are still held; every other one is free at once.

        Costs microseconds per *held* key.
        """
        self._queues = {}
        for held in self._held.values():
            held.is_dropped = True
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

    def _use(self, key: Key, location: Location) -> None:
        """Make READY what is nowhere now."""
        queue = self._queues.get(location.slot_bytes)
        if queue is None:
            queue = self._queues[location.slot_bytes] = _Queue(location.slot_bytes)
        queue.use(key, next(self._uses) << _OFFSET_BITS | location.offset)

    def _take(self, key: Key) -> Location:
        """Remove a READY and unpinned key and return its location."""
        location = self.location(key)
        del self._queues[location.slot_bytes].shards[hash(key) >> _SHARD_SHIFT][key]
        return location

    def _written(self, key: Key, to_be: str) -> _Held:
        """Remove a key that its writer holds."""
        held = self._held.get(key)
        if held is None or held.pins:
            raise self._refusal(key, to_be)
        return self._held.pop(key)

    def _refusal(self, key: Key, to_be: str) -> IndexStateError:
        state, pins = self.state(key), self.pins(key)
        return IndexStateError(f"a key cannot be {to_be} that is {state.name if state else 'absent'}, {pins} pins")

    # For tests

    def check(self) -> None:
        """Assert every invariant. For tests, at the end of each."""
        assert len(set(self)) == len(self), "a key is in two states"
        for queue in self._queues.values():
            for number, shard in enumerate(queue.shards):
                assert all((hash(key) >> _SHARD_SHIFT) % _SHARDS == number for key in shard), "a key is astray"
                assert sorted(shard.values()) == list(shard.values()), "a key was used and not moved"
