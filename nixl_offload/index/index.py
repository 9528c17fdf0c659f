"""The index of one tier in memory: key -> location, state and pins. The least recently used key is evicted first.

Threading: none; every method is called by one thread at a time: the one that reopens a tier, then the scheduler's. No
I/O, no clock, no logging.
Memory: some 330 bytes per key; a node of 30 TB has one or two million. docs/decisions/0003-index.md has the figures.
Failure: a method that raises has changed nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from itertools import count, pairwise
from typing import Final

from nixl_offload.errors import IndexStateError
from nixl_offload.index.states import STATE_OF_PHASE, Event, Phase, State, next_phase
from nixl_offload.types import Key, Location

_SHARDS: Final = 128
"""Dictionaries of a size class, by the highest bits of a key's hash, so that each is small: one that grows is copied at
once, and ``next(iter(...))`` passes over what was removed since."""
_SHARD_SHIFT: Final = 57
"""``hash(key) >> _SHARD_SHIFT`` is -64 to 63. Not the lowest bits, by which a dictionary places its keys."""
_OFFSET_BITS: Final = 56
_OFFSET_MASK: Final = (1 << _OFFSET_BITS) - 1
_PAGE_SLOTS: Final = 1024


@dataclass(frozen=True, slots=True)
class Occupancy:
    """How many slots of one size class are taken, by what."""

    slot_bytes: int
    writing: int
    ready: int
    """Unpinned: could be evicted now."""
    pinned: int
    """READY and pinned."""
    evicting: int
    """Dropped, but still held by a writer or by readers."""

    @property
    def slots(self) -> int:
        """All slots taken."""
        return self.writing + self.ready + self.pinned + self.evicting

    @property
    def bytes_total(self) -> int:
        """All bytes taken, on each rank."""
        return self.slots * self.slot_bytes


@dataclass(slots=True)
class _Held:
    """A key that its writer or its readers hold."""

    phase: Phase
    location: Location
    pins: int = 0


class _SizeClass:
    """The slots of one size.

    Plain dictionaries of bytes and numbers: the garbage collector does not look into these, and would take 0.2 s for
    half a million keys of an OrderedDict.
    """

    __slots__ = ("_has_head", "_heads", "counts", "ready", "slot_bytes", "slots")

    def __init__(self, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self.ready: tuple[dict[Key, int], ...] = tuple({} for _ in range(_SHARDS))
        """READY and unpinned keys -> last use and offset, in one number; the least recently used first."""
        self._heads: list[tuple[int, int]] = []
        """A heap of shards, each once at most: the number of its first key, or of one that was first before, and which
        it is."""
        self._has_head = bytearray(_SHARDS)
        self.slots: dict[int, dict[int, Key]] = {}
        """Keys by ``offset // slot_bytes``, in pages. Slots that do not overlap differ in it."""
        self.counts = [0] * len(Phase)
        """Held keys by phase."""

    def place(self, offset: int, key: Key) -> None:
        number = offset // self.slot_bytes
        self.slots.setdefault(number // _PAGE_SLOTS, {})[number] = key

    def free(self, offset: int) -> None:
        number = offset // self.slot_bytes
        del self.slots[number // _PAGE_SLOTS][number]

    def near(self, start_offset: int, end_offset: int) -> Iterator[Key]:
        """Yield the keys whose offset lies in ``[start_offset, end_offset)``, and perhaps some of a slot around it."""
        first, last = start_offset // self.slot_bytes, (end_offset - 1) // self.slot_bytes
        pages = range(first // _PAGE_SLOTS, last // _PAGE_SLOTS + 1)
        for page in pages if len(pages) <= len(self.slots) else [page for page in self.slots if page in pages]:
            slots = self.slots.get(page)
            if not slots:
                continue
            for number in range(max(first, page * _PAGE_SLOTS), min(last, page * _PAGE_SLOTS + _PAGE_SLOTS - 1) + 1):
                if (key := slots.get(number)) is not None:
                    yield key

    def use(self, key: Key, packed: int) -> None:
        """Put a key at the young end."""
        number = hash(key) >> _SHARD_SHIFT
        self.ready[number][key] = packed
        if not self._has_head[number]:
            self._has_head[number] = True
            heappush(self._heads, (packed, number))

    def forget(self, key: Key) -> None:
        """Remove a READY and unpinned key."""
        del self.ready[hash(key) >> _SHARD_SHIFT][key]

    def victim(self) -> Key | None:
        """Return the least recently used of the keys that can be evicted."""
        heads = self._heads
        while heads:
            oldest, number = heads[0]
            for key, packed in self.ready[number].items():
                if packed == oldest:
                    return key
                heapreplace(heads, (packed, number))
                break
            else:
                self._has_head[number] = False
                heappop(heads)
        return None

    def occupancy(self) -> Occupancy:
        counts = self.counts
        return Occupancy(
            slot_bytes=self.slot_bytes,
            writing=counts[Phase.WRITING],
            ready=sum(map(len, self.ready)),
            pinned=counts[Phase.PINNED],
            evicting=counts[Phase.DOOMED] + counts[Phase.LEAVING],
        )


class Index:
    """Key -> location for one tier.

    A key is absent, WRITING, READY or EVICTING (``states.py`` has every transition). What is not in that table raises
    IndexStateError, a bug of the caller. In particular a key that was dropped while held stays EVICTING until its last
    holder lets go. Until then it is a miss for lookups, and ``insert_*`` refuses it: store only what has state None.

    A location that a method returns as *freed* is no longer known here and may be reused at once.
    """

    __slots__ = ("_classes", "_held", "_tier", "_uses")

    def __init__(self) -> None:
        self._tier: int | None = None
        """That of the first insertion."""
        self._classes: dict[int, _SizeClass] = {}
        """By slot size."""
        self._held: dict[Key, _Held] = {}
        """All keys but those that are READY and unpinned."""
        self._uses = count()

    def __len__(self) -> int:
        """Count of keys in any state."""
        return len(self._held) + sum(len(shard) for each in self._classes.values() for shard in each.ready)

    def __iter__(self) -> Iterator[Key]:
        """All keys in any state, in no promised order. For checks."""
        yield from self._held
        for each in self._classes.values():
            for shard in each.ready:
                yield from shard

    # Questions

    def state(self, key: Key) -> State | None:
        """What the index says about ``key``; None if absent. Does not count as a use (see ``touch``)."""
        held = self._held.get(key)
        if held is not None:
            return STATE_OF_PHASE[held.phase]
        return None if self._ready(key) is None else State.READY

    def find(self, key: Key) -> tuple[State | None, int] | None:
        """State and offset of ``key``, None if absent: what is asked thousands of times a step, in one call."""
        held = self._held.get(key)
        if held is not None:
            return STATE_OF_PHASE[held.phase], held.location.offset
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

    def keys_between(self, start_offset: int, end_offset: int) -> list[Key]:
        """Keys in any state whose slot starts in ``[start_offset, end_offset)``, in no promised order.

        Costs about the number of slots that fit there. To reclaim an extent, ``drop`` each; those that are not freed at
        once are freed by their holders.
        """
        near = (key for each in self._classes.values() for key in each.near(start_offset, end_offset))
        return [key for key in near if start_offset <= self.location(key).offset < end_offset]

    def occupancy(self) -> dict[int, Occupancy]:
        """Slot size -> what is taken of it. Costs nothing per key."""
        return {slot_bytes: each.occupancy() for slot_bytes, each in self._classes.items()}

    # Storing

    def insert_writing(self, key: Key, location: Location) -> None:
        """Absent -> WRITING.

        Raises IndexStateError if the key is here in any state (EVICTING too), if the location overlaps one in use, or
        if it is not of this index's tier (that of the first insertion).
        """
        self._insert(key, location, Event.INSERT_WRITING)

    def insert_ready(self, key: Key, location: Location) -> None:
        """Absent -> READY, as the youngest of its class: for reopening. Raises like ``insert_writing``."""
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
            each, packed = ready
            each.forget(key)
            each.use(key, next(self._uses) << _OFFSET_BITS | packed & _OFFSET_MASK)

    # Giving up

    def evict(self, slot_bytes: int) -> tuple[Key, Location] | None:
        """Choose an unpinned READY key of this slot size and remove it. Returns it with its freed location, or None."""
        each = self._classes.get(slot_bytes)
        key = None if each is None else each.victim()
        if key is None:
            return None
        freed = self._apply(key, Event.EVICT)
        assert freed is not None, "the table says that evict frees"
        return key, freed

    def drop(self, key: Key) -> Location | None:
        """Make a miss of ``key``, whatever its state.

        READY and unpinned: removed, the freed location is returned. Pinned or WRITING: becomes EVICTING, and the last
        ``unpin``, or ``commit`` or ``abort``, returns the location. Absent or EVICTING already: nothing happens.
        """
        return self._apply(key, Event.DROP)

    def clear(self) -> list[Location]:
        """``drop`` every key. Returns the locations that are still held; every other one is free at once.

        Costs microseconds per *held* key.
        """
        self._classes = {}
        for key, held in self._held.items():
            held.phase = next_phase(held.phase, Event.DROP)
            each = self._size_class(held.location.slot_bytes)
            each.counts[held.phase] += 1
            each.place(held.location.offset, key)
        return [held.location for held in self._held.values()]

    # Inside

    def _size_class(self, slot_bytes: int) -> _SizeClass:
        if slot_bytes not in self._classes:
            self._classes[slot_bytes] = _SizeClass(slot_bytes)
        return self._classes[slot_bytes]

    def _ready(self, key: Key) -> tuple[_SizeClass, int] | None:
        """Return the size class of a READY and unpinned key, and its number there; None: it is in another state."""
        number = hash(key) >> _SHARD_SHIFT
        for each in self._classes.values():
            packed = each.ready[number].get(key)
            if packed is not None:
                return each, packed
        return None

    def _location(self, each: _SizeClass, packed: int) -> Location:
        assert self._tier is not None, "what was inserted has a tier"
        return Location(self._tier, packed & _OFFSET_MASK, each.slot_bytes)

    def _insert(self, key: Key, location: Location, event: Event) -> None:
        held = self._held.get(key)
        before = held.phase if held is not None else Phase.ABSENT if self._ready(key) is None else Phase.READY
        phase = next_phase(before, event)
        self._refuse(location)
        self._tier = location.tier
        self._size_class(location.slot_bytes).place(location.offset, key)
        self._keep(key, location, phase, 0)

    def _refuse(self, location: Location) -> None:
        """Raise IndexStateError where nothing can rest: no such place, another tier, or an overlap."""
        tier, offset, slot_bytes = location
        if not 0 <= offset <= _OFFSET_MASK or slot_bytes <= 0:
            raise IndexStateError(f"no such place: {location}")
        if self._tier is not None and tier != self._tier:
            raise IndexStateError(f"{location} in the index of tier {self._tier}")
        end = offset + slot_bytes
        for each in self._classes.values():
            for key in each.near(offset - each.slot_bytes + 1, end):
                there = self.location(key)
                if there.offset < end and offset < there.offset + there.slot_bytes:
                    raise IndexStateError(f"{location} overlaps {there}, which is in use")

    def _apply(self, key: Key, event: Event) -> Location | None:
        """Make one transition of the table, with all that follows from it. Returns the location if that frees it."""
        held = self._held.get(key)
        if held is not None:
            before, location, pins = held.phase, held.location, held.pins
        elif (ready := self._ready(key)) is not None:
            before, location, pins = Phase.READY, self._location(*ready), 0
        else:
            next_phase(Phase.ABSENT, event)
            return None
        after = next_phase(before, event)
        each = self._classes[location.slot_bytes]
        if held is None:
            each.forget(key)
        else:
            del self._held[key]
            each.counts[before] -= 1
        if after != Phase.ABSENT:
            pins += (event is Event.PIN) - (event in (Event.UNPIN, Event.UNPIN_LAST))
            self._keep(key, location, after, pins)
            return None
        each.free(location.offset)
        return location

    def _keep(self, key: Key, location: Location, phase: Phase, pins: int) -> None:
        each = self._classes[location.slot_bytes]
        if phase == Phase.READY:
            each.use(key, next(self._uses) << _OFFSET_BITS | location.offset)
        else:
            self._held[key] = _Held(phase, location, pins)
            each.counts[phase] += 1

    # For tests

    def check(self) -> None:
        """Assert every invariant. O(n log n); for tests, at the end of each."""
        keys = list(self)
        assert len(set(keys)) == len(keys) == len(self), "a key is in two states"
        counts = {slot_bytes: [0] * len(Phase) for slot_bytes in self._classes}
        for held in self._held.values():
            assert held.phase not in (Phase.ABSENT, Phase.READY), "a key is held by nobody"
            assert (held.pins > 0) == (held.phase in (Phase.PINNED, Phase.LEAVING)), "pins and phase disagree"
            counts[held.location.slot_bytes][held.phase] += 1
        for slot_bytes, each in self._classes.items():
            assert each.counts == counts[slot_bytes], "counts per phase are wrong"
            for number, shard in enumerate(each.ready):
                assert all((hash(key) >> _SHARD_SHIFT) % _SHARDS == number for key in shard), "a key is astray"
                assert sorted(shard.values()) == list(shard.values()), "a key was used and not moved"
        spans = sorted((each.offset, each.offset + each.slot_bytes) for each in map(self.location, keys))
        for (_, end), (start, _) in pairwise(spans):
            assert end <= start, "two keys share bytes"
        assert sorted(self.keys_between(0, 1 << _OFFSET_BITS)) == sorted(keys), "the map of slots is wrong"
