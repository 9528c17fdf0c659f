"""The index of one tier in memory: key -> location, state and pins, for tens of millions of keys.

Threading: none; every method is called by one thread at a time: the one that reopens a tier, then the scheduler's. No
I/O, no clock, no logging.
Memory: columns by *node*, a small number that a key has while it is here (``key_table.py``); no Python object per key.
docs/decisions/0003-index.md has the figures.
Failure: a method that raises has changed nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from nixl_offload.errors import IndexStateError
from nixl_offload.index.key_table import KeyTable
from nixl_offload.index.links import Links
from nixl_offload.index.places import Places
from nixl_offload.index.policy import POLICY_NAMES, Policy, make_policy
from nixl_offload.index.rows import Rows
from nixl_offload.index.size_class import Occupancy, SizeClass
from nixl_offload.index.states import STATE_OF_PHASE, Event, Phase, State, next_phase
from nixl_offload.types import Key, Location

_GROWTH = 4096
"""Most nodes that the columns grow by at a time: some microseconds."""


class Index:
    """Key -> location for one tier.

    A key is absent, WRITING, READY or EVICTING (``states.py`` has every transition). What is not in that table raises
    IndexStateError, a bug of the caller. In particular a key that was dropped while held stays EVICTING until its last
    holder lets go. Until then it is a miss for lookups, and ``insert_*`` refuses it: store only what has state None.

    A location that a method returns as *freed* is no longer known here and may be reused at once.
    """

    __slots__ = (
        "_find",
        "_keys",
        "_links",
        "_phases",
        "_pins",
        "_places",
        "_policy_name",
    )

    def __init__(self, policy: str = "lru") -> None:
        """``policy`` is ``lru`` or ``s3fifo``, one instance per size class. Raises ValueError for any other."""
        if policy not in POLICY_NAMES:
            raise ValueError(f"unknown eviction policy {policy!r}; known: {', '.join(POLICY_NAMES)}")
        self._policy_name = policy
        self._reset()

    def _reset(self, tier: int | None = None) -> None:
        self._keys = KeyTable()
        self._find = self._keys.find
        """Key -> node, 0 if absent."""
        self._links = Links()
        self._places = Places(self._new_policy, tier)
        self._phases = bytearray(1)
        """By node; node 0 is ABSENT for ever."""
        self._pins: dict[int, int] = {}
        """Node -> pins, for pinned nodes alone."""

    def __len__(self) -> int:
        """Count of keys in any state."""
        return len(self._keys)

    def __iter__(self) -> Iterator[Key]:
        """All keys in any state, in no promised order. For checks."""
        return iter(self._keys)

    # Questions

    def state(self, key: Key) -> State | None:
        """What the index says about ``key``; None if absent. Does not count as a use (see ``touch``)."""
        return STATE_OF_PHASE[self._phases[self._find(key)]]

    def find(self, key: Key) -> tuple[State | None, int] | None:
        """State and offset of ``key``, None if absent: what is asked thousands of times a step, in one call."""
        node = self._find(key)
        return (STATE_OF_PHASE[self._phases[node]], self._places.offsets[node]) if node else None

    def is_pinned(self, key: Key) -> bool:
        """Whether somebody holds a pin of ``key``, in whatever state it is."""
        return self._find(key) in self._pins

    def pins(self, key: Key) -> int:
        """Count of pins of ``key``, in whatever state it is."""
        return self._pins.get(self._find(key), 0)

    def location(self, key: Key) -> Location:
        """Where ``key`` rests, in any state. Raises KeyError if absent."""
        node = self._find(key)
        if not node:
            raise KeyError(key)
        return self._places.location(node)

    def keys_between(self, start_offset: int, end_offset: int) -> list[Key]:
        """Keys in any state whose slot starts in ``[start_offset, end_offset)``, in no promised order.

        Costs about the number of slots that fit there. To reclaim an extent, ``drop`` each; those that are not freed at
        once are freed by their holders.
        """
        return [self._keys.key(node) for node in self._places.between(start_offset, end_offset)]

    def occupancy(self) -> dict[int, Occupancy]:
        """Slot size -> what is taken of it. Costs nothing per key."""
        return {taken.slot_bytes: taken for taken in (group.occupancy() for group in self._places.classes)}

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

    def insert_many(self, tier: int, rows: Rows) -> None:
        """``insert_ready`` each row, in their order, at a sixth of the cost. Raises like it, and changes nothing then.

        Also raises for keys of several lengths, which can only be inserted singly.
        """
        count = len(rows.keys)
        if not count:
            return
        self._places.refuse_many(tier, rows)
        first = len(self._links)
        self._grow_columns(first + count)
        if not self._keys.add_many(rows.keys, first):
            raise IndexStateError("a key is here already, or is of another length")
        self._links.new_nodes(count)
        self._phases[first : first + count] = bytes([Phase.READY]) * count
        nodes = np.arange(first, first + count, dtype=np.uint32)
        for size_class, its_nodes in self._places.put_many(nodes, tier, rows):
            size_class.counts[Phase.READY] += len(its_nodes)
            size_class.policy.add_many(its_nodes)

    def commit(self, key: Key) -> Location | None:
        """WRITING -> READY, returns None; if it was dropped meanwhile it goes, and its freed location is returned."""
        return self._apply(self._find(key), Event.COMMIT)

    def abort(self, key: Key) -> Location:
        """WRITING (dropped meanwhile or not) -> absent. Returns the freed location."""
        freed = self._apply(self._find(key), Event.ABORT)
        assert freed is not None, "the table says that abort frees"
        return freed

    # Loading

    def pin(self, key: Key) -> Location:
        """Forbid eviction of a READY key until a matching ``unpin``; pins are counted. Returns where it rests.

        Not a use for the policy (see ``touch``), although the last unpin puts the key at the young end of its queue.
        """
        node = self._find(key)
        self._apply(node, Event.PIN)
        return self._places.location(node)

    def unpin(self, key: Key) -> Location | None:
        """Take back one pin. Returns the freed location if this was the last pin of a dropped key."""
        node = self._find(key)
        last = self._pins.get(node, 0) <= 1
        return self._apply(node, Event.UNPIN_LAST if last else Event.UNPIN)

    def touch(self, key: Key) -> None:
        """Count a use of a READY key, pinned or not. Ignores keys that are absent or in another state."""
        node = self._find(key)
        if STATE_OF_PHASE[self._phases[node]] is State.READY:
            self._places.size_class(node).policy.touch(node)

    # Giving up

    def evict(self, slot_bytes: int) -> tuple[Key, Location] | None:
        """Choose an unpinned READY key of this slot size and remove it. Returns it with its freed location, or None."""
        size_class = self._places.class_of_size(slot_bytes)
        node = None if size_class is None else size_class.policy.victim()
        if node is None:
            return None
        key = self._keys.key(node)
        freed = self._transition(node, Event.EVICT)
        assert freed is not None, "the table says that evict frees"
        return key, freed

    def drop(self, key: Key) -> Location | None:
        """Make a miss of ``key``, whatever its state.

        READY and unpinned: removed, the freed location is returned. Pinned or WRITING: becomes EVICTING, and the last
        ``unpin``, or ``commit`` or ``abort``, returns the location. Absent or EVICTING already: nothing happens.
        """
        return self._apply(self._find(key), Event.DROP)

    def clear(self) -> list[Location]:
        """``drop`` every key. Returns the locations that are still held; every other one is free at once.

        Costs microseconds per *held* key and a glance at a byte per key.
        """
        phases = np.frombuffer(bytes(self._phases), dtype=np.uint8)
        held_nodes = np.flatnonzero((phases != Phase.ABSENT) & (phases != Phase.READY)).tolist()
        held = [
            (self._keys.key(node), self._places.location(node), self._pins.get(node, 0), Phase(self._phases[node]))
            for node in held_nodes
        ]
        self._reset(self._places.tier)
        for key, location, pins, phase in held:
            if phase in (Phase.WRITING, Phase.DOOMED):
                self._insert(key, location, Event.INSERT_WRITING)
            else:
                self._insert(key, location, Event.INSERT_READY)
                for _ in range(pins):
                    self.pin(key)
            self.drop(key)
        return [location for _, location, *_ in held]

    # Inside

    def _new_policy(self, slot_bytes: int) -> Policy:
        return make_policy(self._policy_name, self._links, self._fingerprint)

    def _insert(self, key: Key, location: Location, event: Event) -> None:
        phase = next_phase(self._phases[self._find(key)], event)
        self._places.refuse(location)
        node = self._links.node()
        if node >= len(self._phases):
            self._grow_columns(node + min(_GROWTH, 64 + node // 8))
        self._keys.add(key, node)
        self._phases[node] = phase
        size_class = self._places.put(node, location)
        size_class.counts[phase] += 1
        if phase == Phase.READY:
            size_class.policy.add(node)

    def _fingerprint(self, node: int) -> int:
        return hash(self._keys.key(node)) & 0xFFFFFFFF

    def _grow_columns(self, nodes: int) -> None:
        """Give every column entries for the nodes up to this one, and for those that were handed out meanwhile."""
        missing = max(nodes, len(self._links)) + 1 - len(self._phases)
        if missing <= 0:
            return
        self._phases.extend(bytes(missing))
        self._places.grow(missing)
        self._keys.grow(len(self._phases) - 1)

    def _apply(self, node: int, event: Event) -> Location | None:
        if not node:
            next_phase(Phase.ABSENT, event)
            return None
        return self._transition(node, event)

    def _transition(self, node: int, event: Event) -> Location | None:
        """Make one transition of the table, with all that follows from it. Returns the location if that frees it."""
        before = self._phases[node]
        after = next_phase(before, event)
        size_class = self._places.size_class(node)
        policy = size_class.policy
        if event is Event.PIN:
            self._pins[node] = self._pins.get(node, 0) + 1
            if after != before:
                policy.park(node)
        elif event is Event.UNPIN:
            self._pins[node] -= 1
        elif event is Event.UNPIN_LAST:
            del self._pins[node]
            if after == Phase.READY:
                policy.unpark(node)
        elif event is Event.COMMIT and after == Phase.READY:
            policy.add(node)
        elif event is Event.DROP:
            policy.remove(node)
        self._phases[node] = after
        size_class.counts[before] -= 1
        if after != Phase.ABSENT:
            size_class.counts[after] += 1
            return None
        return self._remove(node, size_class)

    def _remove(self, node: int, size_class: SizeClass) -> Location:
        # The location is taken first: once the node is free, its columns belong to the next key.
        location = self._places.location(node)
        size_class.slots.clear(location.offset)
        self._keys.remove(node)
        self._links.free(node)
        return location

    # For tests

    def check(self) -> None:
        """Assert every invariant. O(n log n); for tests, at the end of each."""
        self._keys.check()
        classes = self._places.classes
        number_of = {id(size_class): number for number, size_class in enumerate(classes)}
        nodes = {self._find(key) for key in self._keys}
        assert len(nodes) == len(self._keys), "two keys share a node"
        counts: list[list[int]] = [[0] * len(Phase) for _ in classes]
        spans: list[tuple[int, int]] = []
        for node in nodes:
            phase = self._phases[node]
            assert phase != Phase.ABSENT, "a key is held and absent"
            pinned = phase in (Phase.PINNED, Phase.LEAVING)
            assert (self._pins.get(node, 0) > 0) == pinned, "pins and phase disagree"
            location, size_class = self._places.location(node), self._places.size_class(node)
            assert node in size_class.slots.near(location.offset, location.offset + 1)
            spans.append((location.offset, location.offset + location.slot_bytes))
            counts[number_of[id(size_class)]][phase] += 1
        assert set(self._pins) <= nodes, "a pin of a key that is gone"
        roots = self._links.in_use - len(nodes)
        assert 0 <= roots <= 2 * len(classes), "a node was not taken back"
        spans.sort()
        for (_, end), (start, _) in pairwise(spans):
            assert end <= start, "two keys share bytes"
        for number, size_class in enumerate(classes):
            assert size_class.counts == counts[number], "counts per phase are wrong"
            its_nodes = {n for n in nodes if self._places.size_class(n) is size_class}
            expected = {n for n in its_nodes if self._phases[n] == Phase.READY}
            candidates: list[Any] = list(size_class.policy)
            assert len(candidates) == len(size_class.policy) == len(expected), "the policy's count is wrong"
            assert set(candidates) == expected, "the policy holds other keys than those that can be evicted"
            everywhere = set(size_class.slots.near(0, 1 << 63))
            assert everywhere == its_nodes, "the slot map is wrong"
