"""What the scheduler believes a shared store to hold: seen, stored, being written, known to be absent; for how long.

Threading: none; the scheduler's thread alone. No I/O, no clock: time is passed in (monotonic seconds).
States, pins and the choice of what to forget are ``index.Index``'s, whose locations serve here as numbers of rows.
Memory: some 350 bytes per chunk remembered as present, 150 per absent one.
"""

from __future__ import annotations

import math
from array import array

import numpy as np

from nixl_offload.index import Index, State
from nixl_offload.types import Key, Location

MAX_KEYS = 1_000_000
MAX_ABSENT = 100_000
_READY = State.READY
_ROW_BYTES = 1
"""All rows are of one size class, so that one queue says what to forget first."""


class Presence:
    """At most ``max_keys`` chunks believed present; the least recently used unpinned one is forgotten for a new one.

    A belief is *fresh* for ``present_for_s`` after the chunk was seen, or until it expires. READY stays READY when it
    is stale: it can still be pinned, and its holder learns from a look at the store whether it is dropped.
    """

    def __init__(self, *, present_for_s: float, absent_for_s: float, max_keys: int) -> None:
        self._present_for_s = present_for_s
        self._absent_for_s = absent_for_s
        self._max_keys = max_keys
        self._absent: dict[Key, float] = {}
        """Key -> when it was missed. In order of time."""
        self._index = Index()
        self._free = array("q")
        # By row.
        self._seen_s = array("d")
        self._until_s = array("d")
        """How long the belief is fresh."""

    def __len__(self) -> int:
        return len(self._index)

    # Questions

    def state(self, key: Key) -> State | None:
        """Return what is believed of ``key``; None: nothing, or that it is absent."""
        return self._index.state(key)

    def look(self, key: Key, now_s: float) -> tuple[State | None, bool]:
        """Return ``state`` and, of a READY key, whether the belief is fresh."""
        found = self._index.find(key)
        if found is None:
            return None, False
        state, row = found
        return state, state is _READY and now_s < self._until_s[row]

    def seen_since(self, key: Key, then_s: float) -> bool:
        """Whether ``key`` is here and was seen or stored at ``then_s`` or later, or is being stored."""
        found = self._index.find(key)
        return found is not None and (found[0] is not _READY or self._seen_s[found[1]] >= then_s)

    def is_absent(self, key: Key, now_s: float) -> bool:
        """Whether ``key`` was looked for in vain not long ago."""
        return now_s < self._absent.get(key, -math.inf) + self._absent_for_s

    def missed_since(self, key: Key, then_s: float) -> bool:
        """Whether ``key`` was found to be absent, or to be of no use, at ``then_s`` or later."""
        return self._absent.get(key, -math.inf) >= then_s

    # What became known

    def seen(self, key: Key, now_s: float, expires_s: float = math.inf) -> None:
        """It is there: READY from now on, unless somebody still holds it as EVICTING."""
        self._absent.pop(key, None)
        found = self._index.find(key)
        if found is None:
            row = self._room()
            if row is None:
                return
            self._index.insert_ready(key, _place(row))
        elif found[0] is _READY:
            row = found[1]
        else:
            return
        self._believe(row, now_s, expires_s)

    def missed(self, key: Key, now_s: float) -> bool:
        """It is not there: not looked for again for ``absent_for_s``. True: it was READY, and is dropped."""
        self._absent.pop(key, None)
        self._absent[key] = now_s
        if len(self._absent) > MAX_ABSENT:
            del self._absent[next(iter(self._absent))]
        return self.drop(key)

    def drop(self, key: Key) -> bool:
        """Forget a READY ``key``. False: it was not READY."""
        if self._index.state(key) is not _READY:
            return False
        self._give_back(self._index.drop(key))
        return True

    # Storing and loading, as ``Index``

    def reserve(self, key: Key) -> bool:
        """Absent -> WRITING. False: all the room is taken by chunks in use."""
        row = self._room()
        if row is None:
            return False
        self._index.insert_writing(key, _place(row))
        self._absent.pop(key, None)
        return True

    def commit(self, key: Key, now_s: float, expires_s: float = math.inf) -> bool:
        """WRITING -> READY, seen now. False: it was dropped meanwhile and is gone."""
        row = self._index.location(key).offset
        freed = self._index.commit(key)
        if freed is not None:
            self._give_back(freed)
            return False
        self._believe(row, now_s, expires_s)
        return True

    def abort(self, key: Key) -> None:
        """WRITING -> absent."""
        self._give_back(self._index.abort(key))

    def pin(self, key: Key) -> None:
        """Do not forget a READY key until it is unpinned."""
        self._index.pin(key)

    def unpin(self, key: Key) -> None:
        """Take one pin back."""
        self._give_back(self._index.unpin(key))

    def touch(self, key: Key) -> None:
        """Mark as recently used; unknown keys are ignored."""
        self._index.touch(key)

    def clear(self) -> None:
        """Forget everything. Keys in use stay EVICTING until their holders let go."""
        held = np.array([location.offset for location in self._index.clear()], dtype=np.int64)
        self._absent.clear()
        rows = np.arange(len(self._seen_s), dtype=np.int64)
        self._free = array("q", np.setdiff1d(rows, held, assume_unique=True).tobytes())

    def _believe(self, row: int, now_s: float, expires_s: float) -> None:
        self._seen_s[row], self._until_s[row] = now_s, min(now_s + self._present_for_s, expires_s)

    def _room(self) -> int | None:
        if len(self._index) >= self._max_keys:
            victim = self._index.evict(_ROW_BYTES)
            if victim is None:
                return None
            self._give_back(victim[1])
        if self._free:
            return self._free.pop()
        self._seen_s.append(0.0)
        self._until_s.append(0.0)
        return len(self._seen_s) - 1

    def _give_back(self, freed: Location | None) -> None:
        if freed is not None:
            self._free.append(freed.offset)

    # For tests

    def check(self) -> None:
        """Assert every invariant; for tests."""
        self._index.check()
        assert len(self._index) <= self._max_keys, "more keys than allowed"
        assert len(self._absent) <= MAX_ABSENT, "more absences than allowed"
        assert len(set(self._free)) == len(self._free), "a row was given back twice"
        assert len(self._free) + len(self._index) == len(self._seen_s), "a row was not given back"

    @property
    def held(self) -> int:
        """How many keys somebody holds: being written, pinned, or given up and not let go yet."""
        return self._index.held


def _place(row: int) -> Location:
    return Location(0, row, _ROW_BYTES)
