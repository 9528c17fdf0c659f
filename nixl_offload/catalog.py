"""The tiers in order: every decision of the scheduler's half. What to store where, what is there, who still uses it.

Threading: called by the scheduler's thread alone. No I/O, no thread, no clock: time is passed in.
Ownership: a *ticket* is one store or load job until every rank has reported it. A location goes back to its tier only
when its ticket is settled, so nothing can be written over while a rank may still touch it, resets and aborts included.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

from nixl_offload.index import State
from nixl_offload.types import Asker, Key, Location, Lookup, Outcome

NOWHERE = Location(tier=-1, offset=-1, slot_bytes=0)
"""Stands for a chunk that is gone; a rank answers it with FAILED and the request recomputes."""

NOBODY = Asker("")
_HIT = Lookup.HIT


class Tier(Protocol):
    """What the catalog asks of a tier. None of it blocks, none of it raises for reasons of storage."""

    def state(self, key: Key) -> State | None: ...
    def reserve(self, key: Key, slot_bytes: int, evicted: list[Key]) -> Location | None:
        """Make ``key`` WRITING at a location, evicting as needed (victims are appended). None: no room."""
        ...

    def commit(self, key: Key) -> bool:
        """WRITING to READY. False when the chunk was dropped meanwhile and its location is free now."""
        ...

    def abort(self, key: Key) -> None: ...
    def pin(self, key: Key) -> Location: ...
    def unpin(self, key: Key) -> None: ...
    def touch(self, key: Key) -> None: ...
    def lookup(self, key: Key, asker: Asker, now_s: float) -> Lookup:
        """Say whether ``key`` can be loaded. RETRY: not known, and somebody goes to look once ``flush`` is called."""
        ...

    def flush(self, now_s: float) -> None:
        """The scheduler's step is over: begin what lookups have asked for, take in what was found."""
        ...

    def forget_asker(self, request_id: str) -> None:
        """No more lookups will come for this request."""
        ...

    def stored(self, keys: Sequence[Key], failed: Mapping[Key, Outcome], now_s: float) -> None:
        """A store has been settled (committed or aborted already): take note of how the storage did."""
        ...

    def loaded(self, keys: Sequence[Key], failed: Mapping[Key, Outcome], now_s: float) -> list[Key]:
        """A load has been settled (unpinned already): never serve again what failed. Returns what was dropped."""
        ...

    def clear(self) -> None:
        """Drop every chunk, at a cost that does not grow with their number."""
        ...


@dataclass(frozen=True, slots=True)
class Grant:
    """What a job may touch. ``keys[i]`` lies at ``locations[i]``."""

    ticket: int
    keys: tuple[Key, ...]
    locations: tuple[Location, ...]


@dataclass(slots=True)
class _Ticket:
    is_store: bool
    keys: tuple[Key, ...]
    locations: tuple[Location, ...]
    ranks_left: int
    opened_s: float
    failures: dict[int, Outcome] = field(default_factory=dict)

    def keys_by_tier(self) -> dict[int, list[Key]]:
        keys: dict[int, list[Key]] = {}
        for key, location in zip(self.keys, self.locations, strict=True):
            if location.tier >= 0:
                keys.setdefault(location.tier, []).append(key)
        return keys


@dataclass(frozen=True, slots=True)
class Settled:
    """How a ticket ended. ``failed`` maps a key to the worst outcome any rank reported."""

    is_store: bool
    keys: tuple[Key, ...]
    failed: Mapping[Key, Outcome]


class Catalog:
    """Decides over an ordered list of tiers, nearest the GPU first."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        *,
        world_size: int,
        slot_bytes: Callable[[Key], int],
        store_backlog_bytes: int,
        pending_limit_s: float = 2.0,
    ) -> None:
        """Build an empty set of tickets over ``tiers``.

        ``slot_bytes`` gives the slot a key needs on each rank. ``store_backlog_bytes`` bounds what is being written at
        any time, per rank: beyond it stores are dropped, never queued. ``pending_limit_s`` bounds how long a lookup
        answers PENDING for one store, and to one request, so that stuck storage cannot hold requests back.
        """
        self._tiers = tuple(tiers)
        self._world_size = world_size
        self._slot_bytes = slot_bytes
        self._store_backlog_bytes = store_backlog_bytes
        self._pending_limit_s = pending_limit_s
        self._tickets: dict[int, _Ticket] = {}
        self._numbers = count(1)
        self._writing_since: dict[Key, float] = {}
        self._held_since: dict[str, float] = {}
        """Request -> when it was told first that a chunk is being written."""
        self._backlog_bytes = 0
        self._stored: list[Key] = []
        self._removed: list[Key] = []

    @property
    def open_tickets(self) -> int:
        """Jobs that some rank has not reported yet."""
        return len(self._tickets)

    @property
    def backlog_bytes(self) -> int:
        """Bytes per rank that are reserved and not yet settled."""
        return self._backlog_bytes

    def lookup(self, key: Key, now_s: float, asker: Asker = NOBODY) -> Lookup:
        """Say whether ``key`` can be loaded, from the nearest tier that knows it.

        RETRY where a tier has to go and look: it begins at the next ``flush``, and answers within its own deadline.
        """
        pending = retry = False
        for tier in self._tiers:
            answer = tier.lookup(key, asker, now_s)
            if answer is _HIT:
                return answer
            pending = pending or answer is Lookup.PENDING
            retry = retry or answer is Lookup.RETRY
        if pending and now_s - self._writing_since.get(key, now_s) <= self._pending_limit_s:
            # Chunks of one prompt are written one after another, each pending anew.
            held_since_s = self._held_since.setdefault(asker.request_id, now_s) if asker.request_id else now_s
            if now_s - held_since_s <= self._pending_limit_s:
                return Lookup.PENDING
        return Lookup.RETRY if retry else Lookup.MISS

    def flush(self, now_s: float) -> None:
        """The scheduler's step is over: tiers begin what lookups have asked for."""
        for tier in self._tiers:
            tier.flush(now_s)

    def forget_asker(self, request_id: str) -> None:
        """No more lookups will come for this request."""
        self._held_since.pop(request_id, None)
        for tier in self._tiers:
            tier.forget_asker(request_id)

    def touch(self, keys: Iterable[Key]) -> None:
        """Mark chunks, in prefix order, as recently used, wherever they are."""
        for key in reversed(tuple(keys)):
            for tier in self._tiers:
                tier.touch(key)

    def reserve(self, keys: Iterable[Key], now_s: float) -> Grant | None:
        """Reserve room for the chunks among ``keys`` that no tier knows; for the first of them when room is short.

        Returns None when there is nothing to store. Never an error: no room means fewer keys.
        Chunks that are known count as used: vLLM offers what its own cache still had, and tells of it in no other way.
        So a prompt's beginning is not evicted to make room for its end.
        """
        keys = tuple(keys)
        self.touch(keys)
        granted: list[Key] = []
        locations: list[Location] = []
        for key in keys:
            if any(tier.state(key) is not None for tier in self._tiers) or key in self._writing_since:
                continue
            needed = self._slot_bytes(key)
            if self._backlog_bytes and self._backlog_bytes + needed > self._store_backlog_bytes:
                break
            location = self._tiers[0].reserve(key, needed, self._removed)
            if location is None:
                break
            granted.append(key)
            locations.append(location)
            self._backlog_bytes += needed
            self._writing_since[key] = now_s
        if not granted:
            return None
        return self._open(is_store=True, keys=granted, locations=locations, now_s=now_s)

    def prepare_load(self, keys: Iterable[Key], now_s: float) -> Grant:
        """Pin ``keys`` and tell where they are. A key that is gone gets ``NOWHERE``."""
        wanted = list(keys)
        locations = [self._pin(key) for key in wanted]
        return self._open(is_store=False, keys=wanted, locations=locations, now_s=now_s)

    def report(self, ticket: int, ranks: int, failures: Mapping[int, Outcome], now_s: float) -> Settled | None:
        """Take what ``ranks`` ranks say of a ticket: ``failures`` maps positions in its keys to outcomes.

        Returns how it ended once the last rank has spoken, else None. Unknown tickets are ignored.
        """
        record = self._tickets.get(ticket)
        if record is None:
            return None
        for position, outcome in failures.items():
            if record.failures.get(position) is not Outcome.CORRUPT:
                record.failures[position] = outcome
        record.ranks_left -= ranks
        if record.ranks_left > 0:
            return None
        del self._tickets[ticket]
        failed = {record.keys[position]: outcome for position, outcome in record.failures.items()}
        if record.is_store:
            self._settle_store(record, failed)
        else:
            self._settle_load(record)
        for position, keys in record.keys_by_tier().items():
            tier, among = self._tiers[position], {key: failed[key] for key in keys if key in failed}
            if record.is_store:
                tier.stored(keys, among, now_s)
            else:
                self._removed.extend(tier.loaded(keys, among, now_s))
        return Settled(record.is_store, record.keys, failed)

    def clear(self) -> None:
        """Forget every chunk, and the changes not taken yet. Locations in use come back as their tickets settle.

        What goes is not listed by ``take_changes``: there may be millions, and whoever clears knows.
        """
        for tier in self._tiers:
            tier.clear()
        self._stored, self._removed = [], []

    def take_changes(self) -> tuple[list[Key], list[Key]]:
        """Return the chunks that became loadable and those that ceased to be, since the last call."""
        changes = self._stored, self._removed
        self._stored, self._removed = [], []
        return changes

    def _open(self, *, is_store: bool, keys: Collection[Key], locations: Collection[Location], now_s: float) -> Grant:
        number = next(self._numbers)
        record = _Ticket(is_store, tuple(keys), tuple(locations), self._world_size, now_s)
        self._tickets[number] = record
        return Grant(number, record.keys, record.locations)

    def _pin(self, key: Key) -> Location:
        for tier in self._tiers:
            if tier.state(key) is State.READY:
                tier.touch(key)
                return tier.pin(key)
        return NOWHERE

    # Both go from the end of a prefix to its beginning: what is used last is evicted last, and a chunk without those
    # before it is of no use.

    def _settle_store(self, record: _Ticket, failed: Mapping[Key, Outcome]) -> None:
        stored = []
        for key, location in zip(reversed(record.keys), reversed(record.locations), strict=True):
            self._backlog_bytes -= location.slot_bytes
            self._writing_since.pop(key, None)
            tier = self._tiers[location.tier]
            if key in failed:
                tier.abort(key)
            elif tier.commit(key):
                stored.append(key)
        self._stored.extend(reversed(stored))

    def _settle_load(self, record: _Ticket) -> None:
        for key, location in zip(reversed(record.keys), reversed(record.locations), strict=True):
            if location.tier >= 0:
                self._tiers[location.tier].unpin(key)
