"""Decides over the tiers in order, and keeps the tickets of what it has decided.

Threading: called by the scheduler's thread alone. No I/O, no thread, no clock: time is passed in.
Ownership: a *ticket* is one job until every rank has reported it. A location goes back to its tier only when its ticket
is settled, so nothing can be written over while a rank may still touch it, resets and aborts included.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import count

from nixl_offload.catalog.moves import ChainOptions, Move, Moves
from nixl_offload.catalog.placing import Placing
from nixl_offload.catalog.retention import Retention
from nixl_offload.catalog.tickets import (
    NOBODY,
    NOWHERE,
    Change,
    Counts,
    Kind,
    LoadTicket,
    MoveTicket,
    OpenTicket,
    Settled,
    StoreTicket,
)
from nixl_offload.index import State
from nixl_offload.tiers.base import Tier
from nixl_offload.types import Key, Location, Lookup, LookupContext, Outcome

_HIT, _PENDING, _RETRY = Lookup.HIT, Lookup.PENDING, Lookup.RETRY
_READY = State.READY


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
        ``store_after``: a chunk is stored when it is offered for the N-th time.
        """
        self.tiers = list(tiers)
        """Shared with the parts below, which see what ``join`` replaces."""
        self.slot_bytes = slot_bytes
        self._numbered = tuple(enumerate(self.tiers))
        self.is_chain = len(self.tiers) > 1
        """Whether ``begin_moves`` can ever begin something."""
        self._world_size = world_size
        self._pending_limit_s = pending_limit_s
        self._chain = ChainOptions() if chain is None else chain
        self._placing = Placing(
            self, backlog_bytes=store_backlog_bytes, stuck_after_s=pending_limit_s, store_after=store_after
        )
        self._moves = Moves(self, self._chain)
        self._retention = Retention(self)
        self.prefetch = self._moves.prefetch
        """Have chunks read into memory in the background: see ``Moves.prefetch``."""
        self._tickets: dict[int, OpenTicket] = {}
        self._numbers = count(1)
        self._changes: list[tuple[int, list[Key], bool]] = []
        """As ``Change``, in the order of events."""
        self._writing_since: tuple[dict[Key, float], ...] = tuple({} for _ in self.tiers)
        """By tier: what is written there under a ticket."""
        self._held_since: dict[str, float] = {}
        """Request -> when it was first answered that a chunk is being written."""
        self._not_admitted = self._no_room = self._unanswered = 0

    def join(self, position: int, tier: Tier) -> None:
        """Use ``tier`` at ``position`` from now on. The tier that stood there had nothing and took nothing."""
        self.tiers[position] = tier
        self._numbered = tuple(enumerate(self.tiers))

    def disable(self, positions: Collection[int], now_s: float) -> None:
        """Store nothing in these tiers, which some rank has disabled, and use all others again."""
        self._placing.disable(positions, now_s)

    @property
    def open_tickets(self) -> int:
        """Jobs that some rank has not reported yet."""
        return len(self._tickets)

    @property
    def has_pending_writes(self) -> bool:
        """Whether something waits to begin, or to be dropped once it has waited too long."""
        return self._moves.has_pending

    # What is there

    def lookup(
        self, key: Key, now_s: float, context: LookupContext = NOBODY, allowed: Collection[int] | None = None
    ) -> Lookup:
        """Say whether ``key`` can be loaded, from the nearest tier that knows it, among those ``allowed`` (None: all).

        RETRY where a tier has to go and look: it begins at the next ``flush``, and answers within its own deadline.
        """
        pending = retry = False
        for position, tier in self._numbered if allowed is None else self._among(allowed):
            if pending and tier.state(key) is not _READY:
                continue  # it will be in a nearer tier before a look here has ended
            answer = tier.lookup(key, context, now_s)
            if answer is _HIT:
                return answer
            if answer is _RETRY:
                retry = True
            elif answer is _PENDING and self._may_wait(self._writing_since[position].get(key, now_s), context, now_s):
                pending = True
        if pending:
            if context.request_id:
                self._held_since.setdefault(context.request_id, now_s)
            return _PENDING
        return _RETRY if retry else Lookup.MISS

    def where(self, key: Key, allowed: Collection[int] | None = None) -> int | None:
        """Return the position of the tier that would serve ``key`` now, among those ``allowed``; None: none would."""
        found = None
        for position, tier in self._numbered if allowed is None else self._among(allowed):
            if tier.state(key) is _READY:
                if tier.in_use:
                    return position
                found = position if found is None else found
        return found

    def flush(self, now_s: float) -> None:
        """A step is scheduled: end retention that is over, and have tiers look for what lookups have asked about."""
        self._retention.expire(now_s)
        for tier in self.tiers:
            tier.flush(now_s)

    def forget_request(self, request_id: str) -> None:
        """No more lookups will come for this request."""
        self._held_since.pop(request_id, None)
        for tier in self.tiers:
            tier.forget_request(request_id)

    def touch(self, keys: Iterable[Key]) -> None:
        """Mark chunks, in prefix order, as recently used, wherever they are."""
        backwards = tuple(keys)[::-1]
        for tier in self.tiers:
            touch = tier.touch
            for key in backwards:
                touch(key)

    # What may begin

    def reserve(self, keys: Iterable[Key], now_s: float, request_id: str = "") -> StoreTicket | None:
        """Reserve room for the chunks among ``keys`` that no tier has; for the first of them when room is short.

        A chunk goes to the nearest tier that takes it. Tiers that did not answer this request are left out, now and
        when the chunks go on to farther tiers, because they may have them already.
        Returns None when there is nothing to store. No room is no error: it means fewer keys.
        Known chunks count as used: vLLM reports hits in its own cache in no other way. So a prompt's beginning is not
        evicted to make room for its end. Farther tiers that lack known chunks get them written.
        """
        keys = tuple(keys)
        self.touch(keys)
        granted: list[Key] = []
        locations: list[Location] = []
        refused: set[tuple[int, int]] = set()
        is_full = False
        doubtful = tuple(position for position, tier in self._numbered if request_id and tier.doubts(request_id))
        for key in keys:
            states = self._states(key, doubtful)
            copies = states.count(_READY)
            if copies:
                if copies < len(states):
                    self._moves.offer(key, states, now_s)
                continue
            if key in self._placing:
                continue
            if not self._placing.admits(key):
                self._not_admitted += 1
                continue
            if None not in states:  # every tier writes or evicts it; there may still be room for others
                self._unanswered += bool(doubtful)
                continue
            location = None if is_full else self._placing.place(key, states, refused, now_s)
            if location is None:
                is_full = True
                self._unanswered += bool(doubtful)
                self._no_room += not doubtful
                continue
            granted.append(key)
            locations.append(location)
        if not granted:
            return None
        ticket = self._open("store", granted, locations, now_s, doubtful=doubtful)
        return StoreTicket(ticket, tuple(granted), tuple(locations))

    def prepare_load(self, keys: Iterable[Key], now_s: float, allowed: Collection[int] | None = None) -> LoadTicket:
        """Pin ``keys`` and return where they are, among the tiers ``allowed``. A key that is gone gets ``NOWHERE``.

        Chunks from farther tiers are kept in memory, as far as there is room. They have a ticket of their own, which
        may be settled long after the load.
        """
        wanted = tuple(keys)
        locations = tuple(self._pin(key, allowed) for key in wanted)
        ticket = self._open("load", wanted, locations, now_s)
        slots = self._promotion_slots(wanted, locations)
        promoted = [(key, slot) for key, slot in zip(wanted, slots, strict=True) if slot is not None]
        if not promoted:
            return LoadTicket(ticket, wanted, locations)
        promotion = self._open("promotion", [key for key, _ in promoted], [slot for _, slot in promoted], now_s)
        return LoadTicket(ticket, wanted, locations, promotion, slots)

    def begin_moves(self, now_s: float) -> list[MoveTicket]:
        """Begin moves to farther tiers and into memory: sources pinned, targets reserved. Called each step."""
        tickets = []
        for moves in self._moves.begin(now_s):
            keys, sources, targets, _ = zip(*moves, strict=True)
            kind: Kind = "prefetch" if targets[0].tier == self._chain.memory else "write_through"
            number = self._open(kind, keys, targets, now_s, moves=tuple(moves))
            tickets.append(MoveTicket(number, keys, sources, targets))
        return tickets

    # What hints ask for

    def retain(self, keys: Iterable[Key], seconds: float, now_s: float) -> None:
        """Do not evict these chunks for this time, as far as there is room: see ``retention``. 0 ends it."""
        self._retention.retain(keys, now_s + seconds, now_s)

    def drop(self, keys: Iterable[Key]) -> None:
        """Give up chunks in memory and in slabs, in their order: of a prefix its end first. Shared tiers keep them."""
        for key in keys:
            self._retention.end(key)
            for position, tier in self._numbered:
                if tier.drop(key):
                    self.removed(position, (key,))

    # What has ended

    def report(self, ticket: int, ranks: int, failures: Mapping[int, Outcome], now_s: float) -> Settled | None:
        """Take the reports of ``ranks`` ranks on a ticket: ``failures`` maps positions in its keys to outcomes.

        Returns how it ended once the last rank has reported, else None. Unknown tickets are ignored. Of a write-through
        and a prefetch, CORRUPT says that the source is damaged; other failures leave the source alone.
        """
        record = self._tickets.get(ticket)
        if record is None or not record.take(ranks, failures):
            return None
        del self._tickets[ticket]
        failed = {record.keys[position]: outcome for position, outcome in record.failures.items()}
        tiers = tuple(location.tier for location in record.locations)
        if record.kind == "load":
            self._unpin(record)
        else:
            self._settle_written(record, failed, now_s)
        for position in sorted({*tiers} - {NOWHERE.tier}):
            keys = [key for key, tier in zip(record.keys, tiers, strict=True) if tier == position]
            among = {key: failed[key] for key in keys if key in failed}
            if record.kind == "load":
                self.removed(position, self.tiers[position].loaded(keys, among, now_s))
            else:
                self.tiers[position].stored(keys, among, now_s)
        return Settled(record.kind, record.keys, failed, tiers)

    def clear(self) -> None:
        """Forget every chunk, and the changes not taken yet. Locations in use come back as their tickets settle.

        ``take_changes`` does not list them: there may be millions, and the caller knows.
        """
        self._moves.clear()
        self._retention.clear()
        self._placing.clear()
        for tier in self.tiers:
            tier.clear()
        self._changes.clear()

    # What has changed

    def removed(self, tier: int, keys: Iterable[Key]) -> None:
        """A tier has given up chunks that could be loaded until now. For the parts of the catalog."""
        keys = tuple(keys)
        self._note_change(tier, keys, removed=True)
        self._retention.dropped(tier, keys)

    @property
    def has_changes(self) -> bool:
        """Whether ``take_changes`` has something to return."""
        return bool(self._changes)

    def take_changes(self) -> list[Change]:
        """Return which chunks became loadable and which ceased to be since the last call, in that order of events."""
        changes = [Change(tier, tuple(keys), removed) for tier, keys, removed in self._changes]
        self._changes.clear()
        return changes

    def in_flight_stores(self) -> list[tuple[int, Key]]:
        """Return (tier, key) of all that is being written. At a shutdown a rank may finish it without reporting it."""
        return [
            (location.tier, key)
            for record in self._tickets.values()
            if record.kind != "load"
            for key, location in zip(record.keys, record.locations, strict=True)
            if self.tiers[location.tier].state(key) is State.WRITING
        ]

    def counts(self) -> Counts:
        """Return the figures as they are now."""
        return Counts(
            storing_bytes=self._placing.bytes_by_tier,
            write_through_bytes=self._moves.bytes_under_way,
            unsaved_bytes=self._moves.unsaved_bytes,
            pending_writes=self._moves.pending,
            write_throughs=dict(self._moves.outcomes),
            not_admitted=self._not_admitted,
            no_room=self._no_room,
            unanswered=self._unanswered,
            retained_bytes=self._retention.bytes_by_tier,
            prefetches_given_up=dict(self._moves.given_up),
        )

    # Inside

    def _among(self, allowed: Collection[int]) -> list[tuple[int, Tier]]:
        return [numbered for numbered in self._numbered if numbered[0] in allowed]

    def _states(self, key: Key, doubtful: Collection[int]) -> list[State | None]:
        """Return the state of ``key`` by tier; in those that are ``doubtful`` it counts as being written."""
        states = [tier.state(key) for tier in self.tiers]
        for position in doubtful:
            if states[position] is not _READY:
                states[position] = State.WRITING
        return states

    def _note_change(self, tier: int, keys: Sequence[Key], *, removed: bool) -> None:
        if keys and self._changes and self._changes[-1][::2] == (tier, removed):
            self._changes[-1][1].extend(keys)
        elif keys:
            self._changes.append((tier, list(keys), removed))

    def _may_wait(self, writing_since_s: float, context: LookupContext, now_s: float) -> bool:
        # Chunks of one prompt are written one after another, each pending anew.
        held_since_s = self._held_since.get(context.request_id, now_s) if context.request_id else now_s
        return now_s - min(writing_since_s, held_since_s) <= self._pending_limit_s

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
        self._tickets[number] = OpenTicket(kind, tuple(keys), tuple(locations), self._world_size, moves, doubtful)
        if kind != "load":
            for key, location in zip(keys, locations, strict=True):
                self._writing_since[location.tier][key] = now_s
        return number

    def _pin(self, key: Key, allowed: Collection[int] | None) -> Location:
        position = self.where(key, allowed)
        if position is None:
            return NOWHERE
        tier = self.tiers[position]
        tier.touch(key)
        return tier.pin(key)

    def _promotion_slots(self, keys: Sequence[Key], locations: Sequence[Location]) -> tuple[Location | None, ...]:
        """Reserve room in memory for what comes from farther, once all of ``keys`` are pinned."""
        memory = self._chain.memory
        if memory is None or not self._chain.promote:
            return (None,) * len(keys)
        tier = self.tiers[memory]
        evicted: list[Key] = []
        slots: list[Location | None] = []
        for key, location in zip(keys, locations, strict=True):
            if location.tier <= memory or tier.state(key) is not None:
                slots.append(None)
            else:
                slots.append(tier.reserve(key, self.slot_bytes(key), evicted))
        self.removed(memory, evicted)
        return tuple(slots)

    # These go from the end of a prefix to its beginning: what is used last is evicted last, and a chunk is of no use
    # without those before it.

    def _unpin(self, record: OpenTicket) -> None:
        for key, location in zip(reversed(record.keys), reversed(record.locations), strict=True):
            if location.tier >= 0:
                self.tiers[location.tier].unpin(key)

    def _settle_written(self, record: OpenTicket, failed: Mapping[Key, Outcome], now_s: float) -> None:
        ready: list[tuple[int, Key]] = []
        for position in range(len(record.keys) - 1, -1, -1):
            key, location = record.keys[position], record.locations[position]
            del self._writing_since[location.tier][key]
            tier, outcome = self.tiers[location.tier], failed.get(key)
            is_ready = False
            if outcome is Outcome.TAINTED:
                tier.retire(key)
            elif outcome is not None:
                tier.abort(key)
            else:
                is_ready = tier.commit(key)
            if is_ready:
                ready.append((location.tier, key))
            if record.kind == "store":
                self._placing.ended(key, location, now_s)
            elif record.moves:
                move, how = record.moves[position], "ok" if is_ready else "gone"
                self._release_source(move, outcome, now_s)
                self._moves.settled(move, how if outcome is None else outcome.value, now_s)
        for tier_position, key in reversed(ready):
            self._note_change(tier_position, (key,), removed=False)
            self._retention.stored(tier_position, key)
            if record.kind != "write_through" and self.is_chain:
                # What a bucket has served, and memory kept, goes on to the files between them as well.
                self._moves.offer(key, self._states(key, record.doubtful), now_s)

    def _release_source(self, move: Move, outcome: Outcome | None, now_s: float) -> None:
        """A chunk is not read from there any more. ``outcome``: of what was written, None if that is well."""
        source = self.tiers[move.source.tier]
        source.unpin(move.key)
        if outcome is Outcome.CORRUPT:
            self.removed(move.source.tier, source.loaded([move.key], {move.key: Outcome.CORRUPT}, now_s))
