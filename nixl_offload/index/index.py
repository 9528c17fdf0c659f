"""The index of one tier in memory: key -> location, state and pins, for tens of millions of keys.

Threading: none; every method is called by the scheduler's thread alone. No I/O, no clock, no logging.
Memory: one dict entry, one bytes and one int object per key; everything else lies in columns that the garbage collector
does not see. docs/decisions/0003-index.md has the figures.
Failure: a method that raises has changed nothing.
"""

from __future__ import annotations

import zlib
from array import array
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from nixl_offload.errors import IndexStateError
from nixl_offload.index.policy import POLICY_NAMES, Links, Policy, make_policy
from nixl_offload.index.slot_map import SlotMap
from nixl_offload.index.states import STATE_OF_PHASE, Event, Phase, State, next_phase
from nixl_offload.types import Key, Location

_SWEPT_PER_INSERTION = 64
"""Keys of a cleared index given back with each insertion: some 15 microseconds."""


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


class _SizeClass:
    """All that belongs to one slot size."""

    __slots__ = ("counts", "policy", "slots")

    def __init__(self, slot_bytes: int, policy: Policy) -> None:
        self.slots = SlotMap(slot_bytes)
        self.policy = policy
        self.counts = [0] * len(Phase)
        """Keys per phase."""


class Index:
    """Key -> location for one tier.

    A key is absent, WRITING, READY or EVICTING (``states.py`` has every transition). What is not in that table raises
    IndexStateError, a bug of the caller. In particular a key that was dropped while held stays EVICTING until its last
    holder lets go. Until then it is a miss for lookups, and ``insert_*`` refuses it: store only what has state None.

    A location that a method returns as *freed* is no longer known here and may be reused at once.
    """

    __slots__ = (
        "_class_numbers",
        "_class_of_node",
        "_classes",
        "_keys",
        "_links",
        "_nodes",
        "_offsets",
        "_phases",
        "_pins",
        "_policy_name",
        "_tier",
        "_waste",
    )

    def __init__(self, policy: str = "lru") -> None:
        """``policy`` is ``lru`` or ``s3fifo``, one instance per size class. Raises ValueError for any other."""
        if policy not in POLICY_NAMES:
            raise ValueError(f"unknown eviction policy {policy!r}; known: {', '.join(POLICY_NAMES)}")
        self._policy_name = policy
        self._tier: int | None = None
        self._waste: list[tuple[dict[Key, int], npt.NDArray[np.object_]]] = []
        """What ``clear`` left behind, given back to the machine a few keys at a time."""
        self._reset()

    def _reset(self) -> None:
        self._nodes: dict[Key, int] = {}
        self._pins: dict[int, int] = {}
        """Node -> pins, for pinned nodes alone."""
        self._classes: list[_SizeClass] = []
        self._class_numbers: dict[int, int] = {}
        """Slot size -> place in ``_classes``."""
        self._links = Links()
        # Columns, one entry per node. The keys' is numpy's because the collector does not walk it; a list it would.
        self._keys: npt.NDArray[np.object_] = np.empty(0, dtype=object)
        self._offsets = array("q")
        self._phases = bytearray()
        self._class_of_node = array("H")

    def __len__(self) -> int:
        """Count of keys in any state."""
        return len(self._nodes)

    # Questions

    def state(self, key: Key) -> State | None:
        """What the index says about ``key``; None if absent. Does not count as a use (see ``touch``)."""
        node = self._nodes.get(key)
        if node is None:
            return None
        return STATE_OF_PHASE[self._phases[node]]

    def find(self, key: Key) -> tuple[State | None, int] | None:
        """State and offset of ``key``, None if absent: what is asked thousands of times a step, in one call."""
        node = self._nodes.get(key)
        if node is None:
            return None
        return STATE_OF_PHASE[self._phases[node]], self._offsets[node]

    def is_pinned(self, key: Key) -> bool:
        """Whether somebody holds a pin of ``key``, in whatever state it is."""
        return self._nodes.get(key, 0) in self._pins

    def location(self, key: Key) -> Location:
        """Where ``key`` rests, in any state. Raises KeyError if absent."""
        return self._location(self._nodes[key])

    def keys_between(self, start_offset: int, end_offset: int) -> list[Key]:
        """Keys in any state whose slot starts in ``[start_offset, end_offset)``, in no promised order.

        Costs about the number of slots that fit there. To reclaim an extent, ``drop`` each; those that are not freed at
        once are freed by their holders.
        """
        offsets, keys = self._offsets, self._keys
        return [
            keys[node]
            for size_class in self._classes
            for node in size_class.slots.near(start_offset, end_offset)
            if start_offset <= offsets[node] < end_offset
        ]

    def occupancy(self) -> dict[int, Occupancy]:
        """Slot size -> what is taken of it. Costs nothing per key."""
        return {
            slot_bytes: Occupancy(
                slot_bytes=slot_bytes,
                writing=(counts := self._classes[number].counts)[Phase.WRITING],
                ready=counts[Phase.READY],
                pinned=counts[Phase.PINNED],
                evicting=counts[Phase.DOOMED] + counts[Phase.LEAVING],
            )
            for slot_bytes, number in self._class_numbers.items()
        }

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

        Not a use for the policy (see ``touch``), although the last unpin puts the key at the young end of its queue.
        """
        self._apply(key, Event.PIN)
        return self.location(key)

    def unpin(self, key: Key) -> Location | None:
        """Take back one pin. Returns the freed location if this was the last pin of a dropped key."""
        last = self._pins.get(self._nodes.get(key, 0), 0) <= 1
        return self._apply(key, Event.UNPIN_LAST if last else Event.UNPIN)

    def touch(self, key: Key) -> None:
        """Count a use of a READY key, pinned or not. Ignores keys that are absent or in another state."""
        node = self._nodes.get(key)
        if node is not None and STATE_OF_PHASE[self._phases[node]] is State.READY:
            self._classes[self._class_of_node[node]].policy.touch(node)

    # Giving up

    def evict(self, slot_bytes: int) -> tuple[Key, Location] | None:
        """Choose an unpinned READY key of this slot size and remove it. Returns it with its freed location, or None."""
        number = self._class_numbers.get(slot_bytes)
        if number is None:
            return None
        node = self._classes[number].policy.victim()
        if node is None:
            return None
        key: Key = self._keys[node]
        freed = self._transition(node, Event.EVICT)
        assert freed is not None, "the table says that evict frees"
        return key, freed

    def drop(self, key: Key) -> Location | None:
        """Make a miss of ``key``, whatever its state.

        READY and unpinned: removed, the freed location is returned. Pinned or WRITING: becomes EVICTING, and the last
        ``unpin``, or ``commit`` or ``abort``, returns the location. Absent or EVICTING already: nothing happens.
        """
        if key not in self._nodes:
            return None
        return self._apply(key, Event.DROP)

    def clear(self) -> list[Location]:
        """``drop`` every key. Returns the locations that are still held; every other one is free at once.

        Costs microseconds per *held* key and a glance at a byte per key. The memory of the others comes back with later
        insertions: giving back millions of objects at one go would take as long as dropping each.
        """
        phases = np.frombuffer(bytes(self._phases), dtype=np.uint8)
        held_nodes = np.flatnonzero((phases != Phase.ABSENT) & (phases != Phase.READY)).tolist()
        held = [
            (self._keys[node], self._location(node), self._pins.get(node, 0), Phase(self._phases[node]))
            for node in held_nodes
        ]
        if self._nodes:
            self._waste.append((self._nodes, self._keys))
        self._reset()
        for key, location, pins, phase in held:
            if phase in (Phase.WRITING, Phase.DOOMED):
                self._insert(key, location, Event.INSERT_WRITING)
            else:
                self._insert(key, location, Event.INSERT_READY)
                for _ in range(pins):
                    self._apply(key, Event.PIN)
            self._apply(key, Event.DROP)
        return [location for _, location, _, _ in held]

    # Inside

    def _location(self, node: int) -> Location:
        size_class = self._classes[self._class_of_node[node]]
        assert self._tier is not None, "a node has a tier"
        return Location(self._tier, self._offsets[node], size_class.slots.slot_bytes)

    def _insert(self, key: Key, location: Location, event: Event) -> None:
        if self._waste:
            self._sweep()
        present = self._nodes.get(key)
        phase = next_phase(Phase.ABSENT if present is None else self._phases[present], event)
        self._refuse_location(location)
        number = self._class_number(location.slot_bytes)
        size_class = self._classes[number]
        node = self._links.node()
        if node >= len(self._phases):
            self._grow_columns()
        self._tier = location.tier
        self._nodes[key] = node
        self._keys[node] = key
        self._offsets[node] = location.offset
        self._class_of_node[node] = number
        self._phases[node] = phase
        size_class.slots.set(location.offset, node)
        size_class.counts[phase] += 1
        if phase == Phase.READY:
            size_class.policy.add(node)

    def _sweep(self) -> None:
        nodes, keys = self._waste[-1]
        for _ in range(min(_SWEPT_PER_INSERTION, len(nodes))):
            _, node = nodes.popitem()
            keys[node] = None
        if not nodes:
            self._waste.pop()

    def _refuse_location(self, location: Location) -> None:
        tier, offset, slot_bytes = location
        if offset < 0 or slot_bytes <= 0:
            raise IndexStateError(f"no such place: {location}")
        if self._tier is not None and tier != self._tier:
            raise IndexStateError(f"{location} in the index of tier {self._tier}")
        for size_class in self._classes:
            other_bytes = size_class.slots.slot_bytes
            if other_bytes == slot_bytes:
                clash = size_class.slots.clash(offset, self._offsets)
            else:
                clash = next(
                    (
                        node
                        for node in size_class.slots.near(offset - other_bytes + 1, offset + slot_bytes)
                        if self._offsets[node] < offset + slot_bytes and offset < self._offsets[node] + other_bytes
                    ),
                    0,
                )
            if clash:
                raise IndexStateError(f"{location} overlaps {self._location(clash)}, which is in use")

    def _class_number(self, slot_bytes: int) -> int:
        number = self._class_numbers.get(slot_bytes)
        if number is None:
            number = len(self._classes)
            self._classes.append(_SizeClass(slot_bytes, make_policy(self._policy_name, self._links, self._fingerprint)))
            self._class_numbers[slot_bytes] = number
        return number

    def _fingerprint(self, node: int) -> int:
        key: Key = self._keys[node]
        return zlib.crc32(key)

    def _grow_columns(self) -> None:
        """Give every column an entry for each node handed out, and an eighth more."""
        length = len(self._links) + len(self._links) // 8 + 64
        missing = length - len(self._phases)
        self._offsets.frombytes(bytes(missing * self._offsets.itemsize))
        self._class_of_node.frombytes(bytes(missing * self._class_of_node.itemsize))
        self._phases.extend(bytes(missing))
        keys = np.empty(length, dtype=object)
        keys[: len(self._keys)] = self._keys
        self._keys = keys

    def _apply(self, key: Key, event: Event) -> Location | None:
        node = self._nodes.get(key)
        if node is None:
            next_phase(Phase.ABSENT, event)
            return None
        return self._transition(node, event)

    def _transition(self, node: int, event: Event) -> Location | None:
        """Make one transition of the table, with all that follows from it. Returns the location if that frees it."""
        before = self._phases[node]
        after = next_phase(before, event)
        size_class = self._classes[self._class_of_node[node]]
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
        elif event is Event.DROP and before in (Phase.READY, Phase.PINNED):
            policy.remove(node)
        self._phases[node] = after
        size_class.counts[before] -= 1
        if after != Phase.ABSENT:
            size_class.counts[after] += 1
            return None
        return self._remove(node, size_class)

    def _remove(self, node: int, size_class: _SizeClass) -> Location:
        # The location is taken first: once the node is free, its columns belong to the next key.
        location = self._location(node)
        size_class.slots.clear(location.offset)
        del self._nodes[self._keys[node]]
        self._keys[node] = None
        self._links.free(node)
        return location

    # For tests

    def check(self) -> None:
        """Assert every invariant. O(n log n); for tests, at the end of each."""
        nodes = set(self._nodes.values())
        assert len(nodes) == len(self._nodes), "two keys share a node"
        counts: list[list[int]] = [[0] * len(Phase) for _ in self._classes]
        spans: list[tuple[int, int]] = []
        for key, node in self._nodes.items():
            phase = self._phases[node]
            assert self._keys[node] == key, "a node names another key"
            assert phase != Phase.ABSENT, "a key is held and absent"
            pinned = phase in (Phase.PINNED, Phase.LEAVING)
            assert (self._pins.get(node, 0) > 0) == pinned, "pins and phase disagree"
            location = self._location(node)
            assert node in self._classes[self._class_of_node[node]].slots.near(location.offset, location.offset + 1)
            spans.append((location.offset, location.offset + location.slot_bytes))
            counts[self._class_of_node[node]][phase] += 1
        assert set(self._pins) <= nodes, "a pin of a key that is gone"
        roots = self._links.in_use - len(nodes)
        assert 0 <= roots <= 2 * len(self._classes), "a node was not taken back"
        spans.sort()
        for (_, end), (start, _) in pairwise(spans):
            assert end <= start, "two keys share bytes"
        for number, size_class in enumerate(self._classes):
            assert size_class.counts == counts[number], "counts per phase are wrong"
            expected = {n for n in nodes if self._class_of_node[n] == number and self._phases[n] == Phase.READY}
            candidates: list[Any] = list(size_class.policy)
            assert len(candidates) == len(size_class.policy) == len(expected), "the policy's count is wrong"
            assert set(candidates) == expected, "the policy holds other keys than those that can be evicted"
            everywhere = set(size_class.slots.near(0, 1 << 63))
            assert everywhere == {n for n in nodes if self._class_of_node[n] == number}, "the slot map is wrong"
