"""The scheduler's beliefs about a shared store: which chunks are present, being written or absent, and for how long.

Threading: the scheduler's thread alone. No I/O, no clock: time is passed in (monotonic seconds).
Memory: some 200 bytes per chunk remembered as present, 150 per absent one.
"""

from __future__ import annotations

import math

from nixl_offload.index import Index, State
from nixl_offload.types import Key, Location

MAX_KEYS = 1_000_000
MAX_ABSENT = 100_000
_READY = State.READY
_SLOT_BYTES = 1
"""All keys have one size class, so one queue orders what to forget first."""


class Presence(Index):
    """At most ``max_keys`` chunks believed present. A new one replaces the least recently used unpinned one.

    A location's offset is a time here: the microsecond until which the belief is *fresh*. That is ``present_for_s``
    after the chunk was seen, or when the chunk expires. A stale READY key can still be pinned; the holder must then
    check the store.
    """

    __slots__ = ("_absent", "_max_keys", "_present_for_s")

    def __init__(self, *, present_for_s: float, max_keys: int) -> None:
        """``present_for_s``: no longer than chunks live."""
        super().__init__()
        self._present_for_s = present_for_s
        self._max_keys = max_keys
        self._absent: dict[Key, float] = {}
        """Key -> when it was found to be absent; in order of time."""

    # Questions

    def look(self, key: Key, now_s: float) -> tuple[State | None, bool]:
        """Return ``state`` and whether the key is READY and fresh."""
        found = self.find(key)
        if found is None:
            return None, False
        state, location = found
        return state, state is _READY and now_s * 1e6 < location.offset

    def seen_since(self, key: Key, then_s: float) -> bool:
        """Whether ``key`` was seen or stored at ``then_s`` or later, or is WRITING or EVICTING.

        False, too, for a chunk that was to expire within ``present_for_s`` when it was seen.
        """
        found = self.find(key)
        return found is not None and (found[0] is not _READY or found[1].offset >= (then_s + self._present_for_s) * 1e6)

    def missed_s(self, key: Key) -> float:
        """Return when ``key`` was last found to be absent or unusable; -inf: never, or it has been seen since."""
        return self._absent.get(key, -math.inf)

    # What became known

    def seen(self, key: Key, now_s: float, expires_s: float = math.inf) -> None:
        """Mark an existing ``key`` READY. Keys that are WRITING or EVICTING keep their state."""
        self._absent.pop(key, None)
        state = self.state(key)
        if state is _READY or (state is None and self._has_room()):
            self.insert_ready(key, self._fresh(now_s, expires_s))

    def missed(self, key: Key, now_s: float) -> bool:
        """Mark ``key`` absent. True: it was READY, and is dropped."""
        self._absent.pop(key, None)
        self._absent[key] = now_s
        if len(self._absent) > MAX_ABSENT:
            del self._absent[next(iter(self._absent))]
        return self.forget(key)

    def forget(self, key: Key) -> bool:
        """Drop a READY ``key``. False: it was not READY."""
        was_ready = self.state(key) is _READY
        if was_ready:
            self.drop(key)
        return was_ready

    # Storing

    def reserve(self, key: Key) -> bool:
        """Absent -> WRITING. False: there is no room, because all chunks are in use."""
        if not self._has_room():
            return False
        self.insert_writing(key, Location(0, 0, _SLOT_BYTES))
        self._absent.pop(key, None)
        return True

    def stored(self, key: Key, now_s: float, expires_s: float) -> bool:
        """WRITING -> READY, seen now. False: it was dropped meanwhile, and is forgotten."""
        if not self.commit(key)[1]:
            return False
        self.insert_ready(key, self._fresh(now_s, expires_s))
        return True

    def clear(self) -> None:
        """Forget everything. Keys in use are EVICTING until their holders release them."""
        self._absent.clear()
        super().clear()

    def _fresh(self, now_s: float, expires_s: float) -> Location:
        return Location(0, max(0, math.ceil(min(now_s + self._present_for_s, expires_s) * 1e6)), _SLOT_BYTES)

    def _has_room(self) -> bool:
        """Make room for one more key. False: all are in use."""
        return len(self) < self._max_keys or self.evict(_SLOT_BYTES) is not None
