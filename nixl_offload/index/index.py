"""The index of one tier in memory: key -> location, state and pins. The least recently used key is evicted first.

Threading: none. One thread at a time calls the methods: first the one that reopens a tier, then the scheduler's. No
I/O, no clock, no logging.
Memory: about 170 bytes per key, with its slot; a node of 30 TB has one or two million keys
(docs/decisions/0003-index.md).
Failure: a method that raises has changed nothing, but for the keys before the one that it names in a list.

A READY and pinned key has readers; a WRITING key has a writer. A key that is dropped while they hold it is EVICTING
until the last of them is done::

    absent insert_writing -> WRITING insert_ready -> READY
    WRITING commit -> READY abort -> absent drop -> EVICTING
    READY pin -> READY, pinned drop, evict -> absent
    READY, pinned last unpin -> READY drop -> EVICTING
    EVICTING commit or abort by its writer, the last unpin by its readers -> absent
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from heapq import heappop, heappush, heapreplace
from itertools import count
from typing import Final

from nixl_offload.errors import IndexStateError
from nixl_offload.types import Key, Location

_DICTS: Final = 256
"""Dictionaries per slot size, chosen by a key's first byte. Small ones are faster: a growing dictionary is copied at
once, and ``next(iter(...))`` steps over every removed entry."""
_OFFSET_BITS: Final = 56
_OFFSET_MASK: Final = (1 << _OFFSET_BITS) - 1


class State(Enum):
    """The state of a key in an index."""

    WRITING = auto()
    """Reserved; its bytes are being written."""
    READY = auto()
    """May be pinned and read."""
    EVICTING = auto()
    """Given up, but still held by a writer or readers. A miss; it cannot be stored again until it is gone."""


@dataclass(slots=True)
class _Held:
    """A key that its writer or readers hold."""

    location: Location
    pins: int = 0
    """0: its writer holds it."""
    is_dropped: bool = False

    @property
    def state(self) -> State:
        if self.is_dropped:
            return State.EVICTING
        return State.READY if self.pins else State.WRITING


class _Queue:
    """READY and unpinned keys of one slot size, by their last use.

    Plain dictionaries of bytes and numbers, which the garbage collector skips. It would take 0.2 s for half a million
    keys of an OrderedDict.
    """

    __slots__ = ("_has_head", "_heads", "dicts", "slot_bytes")

    def __init__(self, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self.dicts: tuple[dict[Key, int], ...] = tuple({} for _ in range(_DICTS))
        """Key -> last use and offset, packed in one number. The least recently used key of each comes first."""
        self._heads: list[tuple[int, int]] = []
        """A heap of (packed number, dictionary), at most one for each. The number is that of its first key, now or
        earlier."""
        self._has_head = bytearray(_DICTS)

    def use(self, key: Key, packed: int) -> None:
        """Make a key the most recently used."""
        number = key[0]
        self.dicts[number][key] = packed
        if not self._has_head[number]:
            self._has_head[number] = True
            heappush(self._heads, (packed, number))

    def oldest(self) -> Key | None:
        """Return the least recently used key."""
        heads = self._heads
        while heads:
            oldest, number = heads[0]
            for key, packed in self.dicts[number].items():
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

    A transition that is not in the diagram above raises IndexStateError: it is a bug of the caller. An EVICTING key is
    a miss for lookups, and ``insert_*`` refuses it: store only keys with state None.

    A location that a method returns as *freed* is forgotten here and may be reused at once. The caller ensures that
    locations do not overlap.
    """

    __slots__ = ("_held", "_queues", "_tier", "_uses")

    def __init__(self, tier: int = 0) -> None:
        """``tier``: the tier of every location."""
        self._tier = tier
        self._queues: dict[int, _Queue] = {}
        """By slot size in bytes."""
        self._held: dict[Key, _Held] = {}
        """All keys except READY and unpinned ones."""
        self._uses = count()

    def __len__(self) -> int:
        """Number of keys, in any state."""
        return len(self._held) + sum(sum(map(len, queue.dicts)) for queue in self._queues.values())

    def __iter__(self) -> Iterator[Key]:
        """Yield all keys, in any state and order. For checks."""
        yield from self._held
        for queue in self._queues.values():
            for keys in queue.dicts:
                yield from keys

    # Questions

    def states(self, keys: Iterable[Key]) -> list[State | None]:
        """Return the state of each key, None if absent. Does not count as a use (see ``touch``)."""
        found: list[State | None] = []
        held, queues, ready = self._held, [queue.dicts for queue in self._queues.values()], State.READY
        for key in keys:
            if key in held:
                found.append(held[key].state)
                continue
            for dicts in queues:
                if key in dicts[key[0]]:
                    found.append(ready)
                    break
            else:
                found.append(None)
        return found

    def state(self, key: Key) -> State | None:
        """Return the state of one key."""
        return self.states((key,))[0]

    def find(self, key: Key) -> tuple[State, Location] | None:
        """Return state and location of ``key``, None if absent."""
        held = self._held.get(key)
        if held is not None:
            return held.state, held.location
        for queue in self._queues.values():
            packed = queue.dicts[key[0]].get(key)
            if packed is not None:
                return State.READY, Location(self._tier, packed & _OFFSET_MASK, queue.slot_bytes)
        return None

    def pins(self, key: Key) -> int:
        """Return the number of pins of ``key``, in any state."""
        held = self._held.get(key)
        return 0 if held is None else held.pins

    def location(self, key: Key) -> Location:
        """Return the location of ``key``, in any state. Raises KeyError if absent."""
        found = self.find(key)
        if found is None:
            raise KeyError(key)
        return found[1]

    # Storing

    def insert_writing(self, key: Key, location: Location) -> None:
        """Absent -> WRITING. Raises IndexStateError if the key is here in any state, EVICTING included."""
        if self.find(key) is not None:
            raise self._refusal(key, "inserted")
        self._held[key] = _Held(location)

    def insert_ready(self, key: Key, location: Location) -> None:
        """Absent or READY -> READY at this location, of the same slot size, as the most recently used. Raises
        IndexStateError for a key in another state.
        """
        held = self._held.get(key)
        if held is None:
            self._take(key)
            self._use(key, location)
        elif held.state is State.READY:
            held.location = location
        else:
            raise self._refusal(key, "inserted")

    def commit(self, key: Key) -> tuple[Location, bool]:
        """WRITING -> READY. Returns the location, and False if it is freed: the key was dropped meanwhile."""
        held = self._written(key, "committed")
        if not held.is_dropped:
            self._use(key, held.location)
        return held.location, not held.is_dropped

    def abort(self, key: Key) -> Location:
        """WRITING, or dropped meanwhile -> absent. Returns the freed location."""
        return self._written(key, "aborted").location

    # Loading

    def pin(self, keys: Iterable[Key]) -> list[Location]:
        """Forbid eviction of READY keys until a matching ``unpin``; pins are counted. Returns their locations."""
        locations = []
        for key in keys:
            held = self._held.get(key)
            if held is None and (location := self._take(key)) is not None:
                held = self._held[key] = _Held(location)
            elif held is None or held.is_dropped or not held.pins:
                raise self._refusal(key, "pinned")
            held.pins += 1
            locations.append(held.location)
        return locations

    def unpin(self, keys: Iterable[Key]) -> list[Location]:
        """Remove one pin of each key. With the last one a key becomes the most recently used.

        Returns the freed locations: those of dropped keys that lost their last pin.
        """
        freed = []
        for key in keys:
            held = self._held.get(key)
            if held is None or not held.pins:
                raise self._refusal(key, "unpinned")
            held.pins -= 1
            if held.pins:
                continue
            del self._held[key]
            if held.is_dropped:
                freed.append(held.location)
            else:
                self._use(key, held.location)
        return freed

    def touch(self, keys: Iterable[Key]) -> None:
        """Count a use of each READY key, in their order. Ignores keys that are absent or in another state."""
        queues = list(self._queues.values())
        for key in keys:
            for queue in queues:
                packed = queue.dicts[key[0]].pop(key, None)
                if packed is not None:
                    queue.use(key, next(self._uses) << _OFFSET_BITS | packed & _OFFSET_MASK)
                    break

    # Giving up

    def evict(self, slot_bytes: int) -> tuple[Key, Location] | None:
        """Remove the unpinned READY key of this slot size that was used least recently.

        Returns the key and its freed location; None if there is no such key.
        """
        queue = self._queues.get(slot_bytes)
        key = None if queue is None else queue.oldest()
        location = None if key is None else self._take(key)
        return (key, location) if key is not None and location is not None else None

    def drop(self, key: Key) -> Location | None:
        """Make ``key`` a miss, in any state.

        READY and unpinned: removed; returns the freed location. Pinned or WRITING: becomes EVICTING; the last
        ``unpin``, or ``commit`` or ``abort``, returns the location. Absent or EVICTING: nothing happens.
        """
        held = self._held.get(key)
        if held is not None:
            held.is_dropped = True
            return None
        return self._take(key)

    def clear(self) -> None:
        """``drop`` every key, in microseconds per *held* key. All other locations are free at once."""
        self._queues = {}
        for held in self._held.values():
            held.is_dropped = True

    # Inside

    def _use(self, key: Key, location: Location) -> None:
        """Insert a key, absent or just removed, as READY."""
        queue = self._queues.get(location.slot_bytes)
        if queue is None:
            queue = self._queues[location.slot_bytes] = _Queue(location.slot_bytes)
        queue.use(key, next(self._uses) << _OFFSET_BITS | location.offset)

    def _take(self, key: Key) -> Location | None:
        """Remove a READY and unpinned key and return its location; None if it is in another state."""
        for queue in self._queues.values():
            packed = queue.dicts[key[0]].pop(key, None)
            if packed is not None:
                return Location(self._tier, packed & _OFFSET_MASK, queue.slot_bytes)
        return None

    def _written(self, key: Key, to_be: str) -> _Held:
        """Remove and return a key that its writer holds."""
        held = self._held.get(key)
        if held is None or held.pins:
            raise self._refusal(key, to_be)
        return self._held.pop(key)

    def _refusal(self, key: Key, to_be: str) -> IndexStateError:
        state, pins = self.state(key), self.pins(key)
        return IndexStateError(f"a key cannot be {to_be} that is {state.name if state else 'absent'}, {pins} pins")
