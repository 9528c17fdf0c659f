"""Decides over the tiers in order, and keeps a ticket for each decision.

Threading: called by the scheduler's thread alone. No I/O, no thread, no clock: time is passed in.
Ownership: a *ticket* is one job until every rank has reported it. A location goes back to its tier only when its ticket
is settled. So nothing is overwritten while a rank may still touch it, not even after a reset or an abort.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import count
from typing import Final, Literal, NamedTuple

from nixl_offload.catalog.moves import ChainOptions, Move, Moves
from nixl_offload.index import State
from nixl_offload.tiers.base import Tier
from nixl_offload.tiers.slot_tier import MemoryTier, SlotTier
from nixl_offload.types import Key, Location, Locations, Lookup, LookupContext, Outcome, worst

TRIAL_S: Final = 10.0
"""A disabled tier gets one chunk in this time: ranks look at their storage again when they store."""
FIRST_TRIAL_S: Final = 2.0
"""The first one sooner: many failures are short."""
MAX_OFFERED: Final = 1 << 18
"""Chunks whose offers are counted, some 150 bytes each. The chunk not offered for longest is forgotten first."""
NOWHERE: Final = Location(tier=-1, offset=-1, slot_bytes=0)
"""The location of a chunk that is gone. Ranks report FAILED for it, and the request recomputes."""
NOBODY: Final = LookupContext("")

_KEYS_AT_ONCE: Final = 512
"""Keys of a prefix that are looked up before it is seen that one of them is missing."""
_HIT, _PENDING, _RETRY = Lookup.HIT, Lookup.PENDING, Lookup.RETRY
_READY = State.READY

Kind = Literal["store", "load", "promotion", "write_through", "prefetch"]
"""store: KV blocks to a tier. load: a tier to KV blocks. promotion: what a load from a farther tier leaves in memory.
write_through: a tier to a farther one. prefetch: a farther tier to memory, before a load."""


@dataclass(frozen=True, slots=True)
class StoreTicket:
    """Chunks to store: ``keys[i]`` goes to ``locations[i]``."""

    ticket: int
    """Its number; 0: the catalog does not know it, and ignores reports on it."""
    keys: tuple[Key, ...]
    locations: tuple[Location, ...]


@dataclass(frozen=True, slots=True)
class LoadTicket:
    """Chunks to load, ``keys[i]`` from ``locations[i]``, and slots in memory for those promoted from farther tiers."""

    ticket: int
    keys: tuple[Key, ...]
    locations: tuple[Location, ...]
    promotion_ticket: int = 0
    """Ticket of the chunks that have a promotion slot, in their order; 0: none has."""
    promotion_slots: tuple[Location | None, ...] = ()
    """By position in ``keys``; empty when none has one."""


@dataclass(frozen=True, slots=True)
class MoveTicket:
    """Chunks that go from tier to tier: ``keys[i]`` from ``sources[i]`` to ``targets[i]``. The targets are all of one
    tier: a farther one, or, for a prefetch, memory.
    """

    ticket: int
    keys: tuple[Key, ...]
    sources: tuple[Location, ...]
    targets: tuple[Location, ...]


class Settled(NamedTuple):
    """How a ticket ended."""

    kind: Kind
    keys: tuple[Key, ...]
    failed: Mapping[Key, Outcome]
    """The worst outcome that any rank reported."""
    tiers: tuple[int, ...]
    """By position: the tier that was written to, or, for a load, read from; -1 for a chunk that was gone."""


class Change(NamedTuple):
    """Chunks that became loadable from a tier, or ceased to be: the source of vLLM's events."""

    tier: int
    keys: list[Key]
    removed: bool


@dataclass(slots=True)
class _OpenTicket:
    """A ticket that some rank has not reported yet."""

    kind: Kind
    keys: tuple[Key, ...]
    locations: tuple[Location, ...]
    """Locations that are written, or, by a load, read."""
    ranks_left: int
    moves: tuple[Move, ...]
    """For a write-through or a prefetch: its moves, by position."""
    doubtful: tuple[int, ...]
    """For a store: tiers that may have the chunks already."""
    failures: dict[int, Outcome] = field(default_factory=dict)
    """By position: the worst that any rank has reported."""


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
        chain: ChainOptions | None = None,
        store_after: int = 1,
    ) -> None:
        """Build an empty set of tickets over ``tiers``.

        ``slot_bytes`` gives the slot a key needs on each rank. ``store_backlog_bytes`` bounds what is being stored at
        any time, per rank and tier: beyond it stores are dropped, never queued. ``pending_limit_s`` bounds how long a
        lookup answers PENDING for one store, and to one request, so that stuck storage cannot hold requests back.
        ``store_after``: a chunk is stored when it is offered for the N-th time; 1 or more.
        """
        self.tiers = list(tiers)
        """Shared with ``moves``, which sees what ``join`` replaces."""
        self.slot_bytes = slot_bytes
        self.chain: Final = ChainOptions() if chain is None else chain
        self.is_chain: Final = len(self.tiers) > 1
        """Whether ``begin_moves`` can ever begin something."""
        self._numbered = tuple(enumerate(self.tiers))
        self._world_size = world_size
        self._store_backlog_bytes = store_backlog_bytes
        self._pending_limit_s = pending_limit_s
        self._store_after = store_after
        self.counts: Counter[tuple[str | int, ...]] = Counter()
        """Counts chunks not stored or moved, by the name of a metric, then its labels; an int is a tier's position."""
        self.moves: Final = Moves(self)
        self.changes: list[Change] = []
        """The changes that ``take_changes`` would return."""
        self.version = 0
        """Counts what ``recent`` was given."""
        self.recent: Final[deque[Collection[Key]]] = deque(maxlen=256)
        """Chunks whose answers may have changed, the latest last. Changes by other servers are not among them."""
        self._tickets: dict[int, _OpenTicket] = {}
        self._numbers = count(1)
        self._writing_since: tuple[dict[Key, float], ...] = tuple({} for _ in self.tiers)
        """By tier: chunks that a ticket writes there, and since when."""
        self._held_since: dict[str, float] = {}
        """Request -> when it was first answered that a chunk is being written."""
        # Stores
        self._storing: set[Key] = set()
        self.storing_bytes: Final = [0] * len(self.tiers)
        """Bytes per rank that are being stored from KV blocks, by tier."""
        self._ended_s = [0.0] * len(self.tiers)
        """By tier: when a store was settled last, or begun while there was none."""
        self._next_trial_s: dict[int, float] = {}
        """By disabled tier: when it gets its next chunk."""
        self._offers: OrderedDict[int, int] = OrderedDict()
        """Counts by the hash of a key, the latest offer last. Keys with equal hashes may share a count."""

    def join(self, position: int, tier: Tier) -> None:
        """Use ``tier`` at ``position`` from now on. The tier that stood there had nothing and took nothing."""
        self.tiers[position] = tier
        self._numbered = tuple(enumerate(self.tiers))

    def disable(self, positions: Collection[int], unreadable: Collection[int], now_s: float) -> None:
        """Store nothing in ``positions``, tiers to which the stores of some rank fail, and load nothing from
        ``unreadable``, but for trials. All other tiers are in use again.
        """
        self._next_trial_s = {at: self._next_trial_s.get(at, now_s + FIRST_TRIAL_S) for at in positions}
        for position, tier in self._numbered:
            tier.ranks_load = position not in unreadable

    def takes(self, position: int, now_s: float) -> bool:
        """Whether to store in this tier now. True for a disabled tier means a trial; the next follows after TRIAL_S."""
        trial_s = self._next_trial_s.get(position)
        if trial_s is None:
            return True
        if now_s >= trial_s:
            self._next_trial_s[position] = now_s + TRIAL_S
        return now_s >= trial_s

    @property
    def open_tickets(self) -> int:
        """How many tickets some rank has not reported yet."""
        return len(self._tickets)

    # What is there

    def lookup(
        self, key: Key, now_s: float, context: LookupContext = NOBODY, allowed: Collection[int] | None = None
    ) -> Lookup:
        """Say whether ``key`` can be loaded, from the nearest tier that knows it, among those ``allowed`` (None: all).

        RETRY if a tier has to look first: it begins at the next ``on_step``, and answers within its own deadline.
        """
        pending = retry = False
        for position, tier in self._among(allowed):
            if pending and tier.state(key) is not _READY:
                continue  # it will be in a nearer tier before a look here has ended
            answer = tier.lookup(key, context, now_s)
            if answer is _HIT:
                return answer
            if answer is _RETRY:
                retry = True
            elif answer is _PENDING and self._may_wait(self._writing_since[position].get(key, now_s), context, now_s):
                pending = True
                if position == self.chain.memory:
                    break  # it comes from the GPU or a farther tier, which need not read it twice
        if pending:
            if context.request_id:
                self._held_since.setdefault(context.request_id, now_s)
            return _PENDING
        return _RETRY if retry else Lookup.MISS

    def leading_hits(self, keys: Sequence[Key], allowed: Collection[int] | None = None) -> int:
        """Return how many of ``keys``, from the first on, can be loaded for sure: slots have them, and none is on its
        way to memory. ``lookup`` says HIT for each; it may do so for the next key, too.
        """
        coming = () if self.chain.memory is None else self._writing_since[self.chain.memory]
        slots = [at for at, tier in self._among(allowed) if isinstance(tier, SlotTier)]
        for first in range(0, len(keys), _KEYS_AT_ONCE):
            piece = keys[first : first + _KEYS_AT_ONCE]
            found = [None if key in coming else at for key, at in zip(piece, self.where(piece, slots), strict=True)]
            if None in found:
                return first + found.index(None)
        return len(keys)

    def where(self, keys: Sequence[Key], allowed: Collection[int] | None = None) -> list[int | None]:
        """Return the position of the tier that would serve each key now, among those ``allowed``; None: none would."""
        found: list[int | None] = [None] * len(keys)
        for position, tier in sorted(self._among(allowed), key=lambda numbered: not numbered[1].in_use):
            left = [at for at, place in enumerate(found) if place is None]
            for at, state in zip(left, tier.states([keys[at] for at in left]), strict=True):
                if state is _READY:
                    found[at] = position
        return found

    def on_step(self, now_s: float) -> None:
        """A step is scheduled: let tiers look for chunks that lookups have asked about."""
        for tier in self.tiers:
            tier.on_step(now_s)

    def forget_request(self, request_id: str) -> None:
        """No more lookups will come for this request."""
        self._held_since.pop(request_id, None)
        for tier in self.tiers:
            tier.forget_request(request_id)

    # What may begin

    def reserve(
        self, keys: Iterable[Key], now_s: float, request_id: str = "", leaving: Collection[Key] = ()
    ) -> StoreTicket | None:
        """Reserve room for the chunks among ``keys`` that no tier has; for the first of them when room is short.

        A chunk goes to the nearest tier that takes it. Tiers that did not answer this request are left out, now and
        when the chunks go on to farther tiers, because they may have them already.
        Returns None when there is nothing to store. Lack of room is no error: it means fewer keys.
        ``leaving``: memory takes these even if a farther tier has them, because they leave the GPU.
        Chunks that tiers have count as used: only this call reports hits in vLLM's own cache. So a prompt's beginning
        is not evicted to make room for its end. They are also written to farther tiers that lack them.
        """
        keys = tuple(keys)
        granted: list[Key] = []
        locations: list[Location] = []
        refused: set[tuple[int, int]] = set()
        evicted: list[list[Key]] = [[] for _ in self.tiers]
        is_full = False
        doubtful = tuple(position for position, tier in self._numbered if request_id and not tier.answered(request_id))
        found = list(zip(keys, self._states(keys, doubtful), strict=True))
        if ready := [each for each in found if _READY in each[1]]:  # before a reservation can evict them
            for tier in self.tiers:
                tier.touch([key for key, _ in reversed(ready)])
            self.moves.offer(ready, now_s)
        for key, states in found:
            if _READY in (states[:1] if key in leaving else states) or key in self._storing:
                continue
            if not self._admits(key):
                self.counts["unstored_chunks", "not_admitted"] += 1
                continue
            location = None
            if None in states and not is_full:  # else every tier writes or evicts it
                location = self._reserve_nearest(key, states, refused, evicted, now_s)
                is_full = location is None and _READY not in states
            if location is not None:
                granted.append(key)
                locations.append(location)
            elif doubtful:
                self.counts["unstored_chunks", "unanswered"] += 1
            elif None in states:
                self.counts["unstored_chunks", "no_room"] += 1
        for position, gone in enumerate(evicted):
            self.note_removed(position, gone)
        if not granted:
            return None
        ticket = self._open("store", granted, locations, now_s, doubtful=doubtful)
        return StoreTicket(ticket, tuple(granted), Locations(locations))

    def prepare_load(self, keys: Iterable[Key], now_s: float, allowed: Collection[int] | None = None) -> LoadTicket:
        """Pin ``keys`` and return where they are, among the tiers ``allowed``. A key that is gone gets ``NOWHERE``.

        Chunks from farther tiers are promoted to memory, as far as there is room. They have a ticket of their own,
        which may be settled long after the load.
        """
        wanted = tuple(keys)
        locations, places = [NOWHERE] * len(wanted), self.where(wanted, allowed)
        for position in {place for place in places if place is not None}:
            there = [at for at, place in enumerate(places) if place == position]
            for at, location in zip(there, self.tiers[position].pin([wanted[at] for at in there]), strict=True):
                locations[at] = location
        ticket = self._open("load", wanted, locations, now_s)
        slots = self._reserve_promotions(wanted, locations)
        promoted = [(key, slot) for key, slot in zip(wanted, slots, strict=True) if slot is not None]
        if not promoted:
            return LoadTicket(ticket, wanted, Locations(locations))
        promotion = self._open("promotion", [key for key, _ in promoted], [slot for _, slot in promoted], now_s)
        return LoadTicket(ticket, wanted, Locations(locations), promotion, tuple(slots))

    def begin_moves(self, now_s: float) -> list[MoveTicket]:
        """Begin moves to farther tiers and into memory: sources pinned, targets reserved. Called each step."""
        tickets = []
        for moves in self.moves.begin(now_s):
            keys, sources, targets, _ = zip(*moves, strict=True)
            kind: Kind = "prefetch" if targets[0].tier == self.chain.memory else "write_through"
            number = self._open(kind, keys, targets, now_s, moves=tuple(moves))
            tickets.append(MoveTicket(number, keys, Locations(sources), Locations(targets)))
        return tickets

    # What has ended

    def report(self, ticket: int, ranks: int, failures: Mapping[int, Outcome], now_s: float) -> Settled | None:
        """Take the reports of ``ranks`` ranks on a ticket: ``failures`` maps positions in its keys to outcomes.

        Returns how it ended once the last rank has reported, else None. Unknown tickets are ignored. Of a fetch
        for a request that waits, failures are the source's, as of a load; of other moves only CORRUPT is.
        """
        record = self._tickets.get(ticket)
        if record is None:
            return None
        for position, outcome in failures.items():
            if 0 <= position < len(record.keys) and outcome is not Outcome.OK:
                record.failures[position] = worst(outcome, record.failures.get(position, Outcome.OK))
        record.ranks_left -= ranks
        if record.ranks_left > 0:
            return None
        del self._tickets[ticket]
        failed = {record.keys[position]: outcome for position, outcome in record.failures.items()}
        tiers = tuple(location.tier for location in record.locations)
        if record.kind != "load":
            self._settle_written(record, now_s)
        for position in sorted({*tiers} - {NOWHERE.tier}):
            keys = [key for key, tier in zip(record.keys, tiers, strict=True) if tier == position]
            among = {key: failed[key] for key in keys if key in failed}
            if record.kind == "load":
                self._note_recent(keys)
                self.tiers[position].unpin(reversed(keys))
                self.note_removed(position, self.tiers[position].after_load(keys, among, now_s))
            else:
                self.tiers[position].after_store(keys, among, now_s)
        return Settled(record.kind, record.keys, failed, tiers)

    def give_up(self, keys: Sequence[Key]) -> None:
        """Let memory drop chunks that it takes once they leave the GPU, but those that a farther tier waits for."""
        memory = self.tiers[self.chain.memory or 0]
        if isinstance(memory, MemoryTier):
            self.note_removed(self.chain.memory or 0, memory.give_up(keys, self.moves.is_pending))

    def clear(self) -> None:
        """Forget every chunk, and the changes not taken yet. Locations in use come back as their tickets settle.

        ``take_changes`` does not list the forgotten chunks: there may be millions, and the caller knows.
        """
        self.moves.clear()
        self._offers.clear()
        for tier in self.tiers:
            tier.clear()
        self.changes.clear()

    # What has changed

    def note_removed(self, tier: int, keys: Iterable[Key]) -> None:
        """Record that a tier has given up loadable chunks. For the parts of the catalog."""
        self._note_change(tier, tuple(keys), removed=True)

    def take_changes(self) -> list[Change]:
        """Return which chunks became loadable, or ceased to be, since the last call, in the order of events."""
        changes, self.changes = self.changes, []
        return changes

    def in_flight_stores(self) -> list[tuple[int, Key]]:
        """Return (tier, key) of all chunks being written. At a shutdown a rank may finish one without reporting it."""
        return [
            (position, key)
            for position, writing in enumerate(self._writing_since)
            for key in writing
            if self.tiers[position].state(key) is State.WRITING
        ]

    # Inside: what is there

    def _among(self, allowed: Collection[int] | None) -> Sequence[tuple[int, Tier]]:
        return self._numbered if allowed is None else [each for each in self._numbered if each[0] in allowed]

    def _states(self, keys: Sequence[Key], doubtful: Collection[int]) -> Iterator[Sequence[State | None]]:
        """Yield each key's states, by tier. In ``doubtful`` tiers a key counts as WRITING unless it is READY."""
        states = [tier.states(keys) for tier in self.tiers]
        for at in doubtful:
            states[at] = [state if state is _READY else State.WRITING for state in states[at]]
        return zip(*states, strict=True)

    def _may_wait(self, writing_since_s: float, context: LookupContext, now_s: float) -> bool:
        # A prompt's chunks are written one after another, each PENDING in turn: so the request has a limit, too.
        held_since_s = self._held_since.get(context.request_id, now_s) if context.request_id else now_s
        return now_s - min(writing_since_s, held_since_s) <= self._pending_limit_s

    def _note_recent(self, keys: Sequence[Key]) -> None:
        if keys:
            self.recent.append(keys)
            self.version += 1

    def _note_change(self, tier: int, keys: Sequence[Key], *, removed: bool) -> None:
        self._note_recent(keys)
        if keys and self.changes and self.changes[-1][::2] == (tier, removed):
            self.changes[-1].keys.extend(keys)
        elif keys:
            self.changes.append(Change(tier, list(keys), removed))

    # Inside: where stores go

    def _admits(self, key: Key) -> bool:
        """Count an offer of ``key``, and say whether it is to be stored."""
        if self._store_after == 1:
            return True
        offers = self._offers.pop(hash(key), 0) + 1
        self._offers[hash(key)] = offers
        if len(self._offers) > MAX_OFFERED:
            self._offers.popitem(last=False)
        return offers >= self._store_after

    def _reserve_nearest(
        self,
        key: Key,
        states: Sequence[State | None],
        refused: set[tuple[int, int]],
        evicted: Sequence[list[Key]],
        now_s: float,
    ) -> Location | None:
        """Make ``key`` WRITING in the nearest tier that takes it. None: none does. ``states``: of the key, by tier.

        A tier with a full backlog is busy: the chunk is dropped, never queued. But the tier is skipped if no store to
        it has ended for ``pending_limit_s``. A tier is also skipped if it has no room, or if a rank has disabled it. A
        slab that is the farthest tier is not: its ranks refuse, and look at it again. ``refused``: pairs of tier and
        slot size without room; ``evicted``: by tier, chunks that made room. The caller keeps both.
        """
        needed = self.slot_bytes(key)
        for position, tier in self._numbered:
            # A tier that still holds the key, EVICTING or WRITING, cannot take it a second time.
            if states[position] is not None or (position, needed) in refused:
                continue
            may_skip = position + 1 < len(self.tiers) or not isinstance(tier, SlotTier)
            if may_skip and not self.takes(position, now_s):
                continue  # a shared tier would get the shards of the ranks that can store, and keep them
            storing_bytes = self.storing_bytes[position]
            if storing_bytes and storing_bytes + needed > self._store_backlog_bytes:
                if now_s - self._ended_s[position] <= self._pending_limit_s:
                    return None
                continue
            location = tier.reserve(key, needed, evicted[position])
            if location is None:
                refused.add((position, needed))
                continue
            if not storing_bytes:
                self._ended_s[position] = now_s
            self.storing_bytes[position] += needed
            self._storing.add(key)
            return location
        return None

    def _reserve_promotions(self, keys: Sequence[Key], locations: Sequence[Location]) -> list[Location | None]:
        """Reserve slots in memory for chunks from farther tiers. All of ``keys`` must be pinned already."""
        slots: list[Location | None] = [None] * len(keys)
        memory = self.chain.memory
        if memory is None:
            return slots
        tier = self.tiers[memory]
        if isinstance(tier, MemoryTier) and tier.is_exclusive:
            return slots  # the GPU has them now, and memory takes them when they leave it
        evicted: list[Key] = []
        for at, key in enumerate(keys):
            if locations[at].tier > memory and tier.state(key) is None:
                slots[at] = tier.reserve(key, self.slot_bytes(key), evicted)
        self.note_removed(memory, evicted)
        return slots

    # Inside: tickets. They are settled from the end of a prefix to its beginning, so that its end is evicted first: a
    # chunk is of no use without those before it.

    def _open(
        self,
        kind: Kind,
        keys: Sequence[Key],
        locations: Sequence[Location],
        now_s: float,
        moves: tuple[Move, ...] = (),
        doubtful: tuple[int, ...] = (),
    ) -> int:
        number = next(self._numbers)
        self._tickets[number] = _OpenTicket(kind, tuple(keys), tuple(locations), self._world_size, moves, doubtful)
        if kind != "write_through":
            self._note_recent(self._tickets[number].keys)
        if kind != "load":
            for key, location in zip(keys, locations, strict=True):
                self._writing_since[location.tier][key] = now_s
        return number

    def _settle_written(self, record: _OpenTicket, now_s: float) -> None:
        for position in sorted({location.tier for location in record.locations}):
            tier, writing = self.tiers[position], self._writing_since[position]
            here = [at for at in range(len(record.keys) - 1, -1, -1) if record.locations[at].tier == position]
            for at in here:
                del writing[record.keys[at]]
                if (outcome := record.failures.get(at)) is not None:
                    (tier.retire if outcome is Outcome.TAINTED else tier.abort)(record.keys[at])
            ready = tier.commit([record.keys[at] for at in here if at not in record.failures])
            ready.reverse()
            self._note_change(position, ready, removed=False)
            if record.kind == "store":
                self._storing.difference_update([record.keys[at] for at in here])
                self.storing_bytes[position] -= sum(record.locations[at].slot_bytes for at in here)
                self._ended_s[position] = now_s
            elif record.moves:
                self._settle_moves(record, here, frozenset(ready), now_s)
            if record.kind != "write_through" and self.is_chain:
                # A chunk promoted from a bucket to memory goes on to the tiers between them, too.
                self.moves.offer(zip(ready, self._states(ready, record.doubtful), strict=True), now_s)

    def _settle_moves(self, record: _OpenTicket, here: Iterable[int], ready: Set[Key], now_s: float) -> None:
        for at in here:
            move, outcome = record.moves[at], record.failures.get(at)
            source = self.tiers[move.source.tier]
            source.unpin((move.key,))
            is_fetch = move.prefetch is not None and move.prefetch.request_id in self.moves.fetches
            if outcome is Outcome.CORRUPT or (outcome and is_fetch):
                self.note_removed(move.source.tier, source.after_load([move.key], {move.key: outcome}, now_s))
            self.moves.settled(move, outcome.value if outcome else "ok" if move.key in ready else "gone", now_s)
            if move.source.tier == self.chain.memory and move.key in ready and self.chain.gpu_has(move.key):
                self.give_up((move.key,))
