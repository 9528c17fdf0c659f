"""Moves between tiers on one rank: what became of the chunks of each ticket, and the slots in which a chunk waits that
goes from one farther tier to another.

Threading: everything here is called by the engine's one caller, as ``chain.ChainEngine`` is; nothing blocks.
Ownership: a relay slot belongs to one move until nothing reads or writes it any more; one that something may still
write to is never used again.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Protocol

import numpy as np

from nixl_offload.engine.records import ChunkIO, Completion
from nixl_offload.engine.states import WorkKind
from nixl_offload.types import Key, Location, Outcome

logger = logging.getLogger(__name__)

RELAY_WAIT_S = 30.0
"""How long a move waits for a relay slot, or in the queue of its target; then it is DROPPED: storage that hangs holds
no ticket open that has not touched it."""

NO_BLOCKS = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class MoveIO:
    """One chunk that goes from one tier to another on this rank."""

    key: Key
    group: int
    """Position in ``KVLayout.groups``."""
    source: Location
    target: Location
    """A location of the memory tier is a byte offset in the host slab."""


class MovingEngine(Protocol):
    """The side of a ``tier_engine.TierEngine`` that moves are made by."""

    def submit_background(self, job_id: int, chunks: Sequence[ChunkIO], kind: WorkKind) -> None:
        """Queue a store from, or a fetch to, host slots."""


class RelayHost(Protocol):
    """What is needed of ``host.HostSlab``."""

    @property
    def relay_offsets(self) -> Sequence[int]:
        """Offsets in the host slab of the slots for moves between farther tiers."""


@dataclass(slots=True, eq=False)
class _MoveTicket:
    """The chunks of one ticket and what is known of them."""

    number: int
    kind: WorkKind
    sizes: tuple[int, ...]
    began_s: float
    outcomes: list[Outcome | None]
    unsettled: int


@dataclass(slots=True, eq=False)
class _TicketPart:
    """What one engine does of a ticket in one job. ``positions``: of its chunks in the ticket."""

    ticket: _MoveTicket
    positions: tuple[int, ...]


@dataclass(slots=True, eq=False)
class _Relay:
    """One chunk between two farther tiers: waiting, being fetched, or being stored."""

    ticket: _MoveTicket
    position: int
    move: MoveIO
    since_s: float
    slot: int = -1
    """Offset of its relay slot; -1 while it waits for one."""


class Moves:
    """The open tickets of one rank. Each is settled exactly once, whatever fails.

    Jobs that begin here have negative ids, so that they never meet vLLM's in an engine's table.
    """

    def __init__(
        self,
        engines: Sequence[MovingEngine | None],
        relay_offsets: Sequence[int],
        *,
        memory: int | None,
        clock: Callable[[], float],
        empty_groups: Collection[int] = (),
    ) -> None:
        """``empty_groups``: of which this rank has no layer. See ``chain.ChainEngine`` for the rest."""
        self._engines = engines
        self._memory = memory
        self._empty_groups = empty_groups
        self._clock = clock
        self._ids = count(-1, -1)
        self._open: dict[_MoveTicket, None] = {}
        self._results: list[Completion] = []
        self._stores: dict[int, _TicketPart] = {}
        self._promotions: dict[tuple[int, int], _TicketPart] = {}
        """By tier and job: completions tell of these as ``slots``."""
        self._waiting: deque[_Relay] = deque()
        self._fetching: dict[int, _Relay] = {}
        self._storing: dict[int, _Relay] = {}
        self._free_slots = list(reversed(relay_offsets))
        self._usable_slots = len(relay_offsets)

    @property
    def relaying(self) -> bool:
        """Whether a relay slot is in use. A move waits for one only while others use them all."""
        return bool(self._fetching or self._storing)

    @property
    def idle(self) -> bool:
        """Whether no ticket is open, no result waits to be taken, and no relay slot is in use."""
        return not self._open and not self._results and not self.relaying

    def take(self) -> list[Completion]:
        """Return the tickets that were settled since the last call."""
        results, self._results = self._results, []
        return results

    # -- what begins ------------------------------------------------------------------------------------------------

    def open(self, number: int, kind: WorkKind, sizes: Sequence[int]) -> _MoveTicket:
        """Open a ticket for chunks of ``sizes`` bytes; with none of them it is settled at once."""
        ticket = _MoveTicket(number, kind, tuple(sizes), self._clock(), [None] * len(sizes), len(sizes))
        self._open[ticket] = None
        if not sizes:
            self._emit(ticket)
        return ticket

    def expect_promotions(self, tier: int, job_id: int, ticket: _MoveTicket, positions: Collection[int]) -> None:
        """A load of ``tier`` is about to be submitted whose promotions are ``positions`` of ``ticket``."""
        self._promotions[tier, job_id] = _TicketPart(ticket, tuple(positions))

    def submit(self, number: int, moves: Sequence[MoveIO]) -> None:
        """Begin the moves of a ticket: see ``chain.ChainEngine.submit_moves``."""
        kind = WorkKind.FETCH if moves and moves[0].target.tier == self._memory else WorkKind.WRITE_THROUGH
        ticket = self.open(number, kind, [move.target.slot_bytes for move in moves])
        stores: dict[int, list[int]] = {}
        fetches: dict[int, list[int]] = {}
        for position, move in enumerate(moves):
            source, target = move.source.tier, move.target.tier
            if move.group in self._empty_groups:
                self.settle(ticket, position, Outcome.OK)
            elif source == target or not self._moves(source) or not self._moves(target):
                self.settle(ticket, position, Outcome.FAILED)
            elif source == self._memory:
                stores.setdefault(target, []).append(position)
            elif target == self._memory:
                fetches.setdefault(source, []).append(position)
            else:
                self._waiting.append(_Relay(ticket, position, move, ticket.began_s))
        for tier, positions in stores.items():
            chunks = [_chunk(moves[at], moves[at].target, moves[at].source.offset) for at in positions]
            job_id = next(self._ids)
            self._stores[job_id] = _TicketPart(ticket, tuple(positions))
            self._submit(tier, job_id, chunks, WorkKind.WRITE_THROUGH)
        for tier, positions in fetches.items():
            chunks = [_chunk(moves[at], moves[at].source, moves[at].target.offset) for at in positions]
            job_id = next(self._ids)
            self.expect_promotions(tier, job_id, ticket, positions)
            self._submit(tier, job_id, chunks, WorkKind.FETCH)
        self.step()

    def settle(self, ticket: _MoveTicket, position: int, outcome: Outcome) -> None:
        """Give a chunk of a ticket its outcome; the first one counts."""
        if ticket.outcomes[position] is not None:
            return
        ticket.outcomes[position] = outcome
        ticket.unsettled -= 1
        if not ticket.unsettled:
            self._emit(ticket)

    # -- what ends --------------------------------------------------------------------------------------------------

    def completed(self, tier: int, done: Completion) -> None:
        """An engine has completed a job, or tells of host slots that one was to fill."""
        if done.ends_job:
            self._ended(done.job_id, done.outcomes)
        if done.slots:
            relay = self._fetching.pop(done.job_id, None)
            part = self._promotions.pop((tier, done.job_id), None)
            if relay is not None:
                self._relay_fetched(relay, done.slots[0])
            elif part is not None:
                self._settle_part(part, done.slots)

    def _ended(self, job_id: int, outcomes: Sequence[Outcome]) -> None:
        """A job has ended, perhaps one that began here."""
        part = self._stores.pop(job_id, None)
        if part is not None:
            self._settle_part(part, outcomes)
            return
        relay = self._fetching.get(job_id)
        if relay is not None:
            # Told before the slot is free: storage may answer much later, but nothing will come of it.
            if outcomes[0] is not Outcome.OK:
                self.settle(relay.ticket, relay.position, _unfetched(outcomes[0]))
            return
        relay = self._storing.pop(job_id, None)
        if relay is not None:
            self.settle(relay.ticket, relay.position, outcomes[0])
            self._free(relay, tainted=outcomes[0] is Outcome.TAINTED)

    def step(self) -> None:
        """Give free relay slots to the moves that wait, and drop those that have waited for too long."""
        if not self._waiting:
            return
        limit_s = self._clock() - RELAY_WAIT_S
        while self._waiting:
            relay = self._waiting[0]
            if relay.since_s <= limit_s or not self._usable_slots:
                self.settle(relay.ticket, relay.position, Outcome.DROPPED)
            elif self._free_slots:
                relay.slot = self._free_slots.pop()
                job_id = next(self._ids)
                self._fetching[job_id] = relay
                chunk = _chunk(relay.move, relay.move.source, relay.slot)
                self._submit(relay.move.source.tier, job_id, [chunk], WorkKind.FETCH)
            else:
                return
            self._waiting.popleft()

    def drop_waiting(self) -> None:
        """Give up what waits for a relay slot."""
        while self._waiting:
            relay = self._waiting.popleft()
            self.settle(relay.ticket, relay.position, Outcome.DROPPED)

    def give_up(self) -> None:
        """Settle what no engine will ever tell of: TAINTED."""
        self.drop_waiting()
        for ticket in list(self._open):
            logger.error("Ticket %d was never settled by its engines; its places are given up", ticket.number)
            for position in range(len(ticket.outcomes)):
                self.settle(ticket, position, Outcome.TAINTED)
        self._usable_slots -= len(self._fetching) + len(self._storing)
        self._stores.clear()
        self._promotions.clear()
        self._fetching.clear()
        self._storing.clear()

    # -- inside -----------------------------------------------------------------------------------------------------

    def _relay_fetched(self, relay: _Relay, outcome: Outcome) -> None:
        known = relay.ticket.outcomes[relay.position] is not None
        if outcome is not Outcome.OK:
            self.settle(relay.ticket, relay.position, _unfetched(outcome))
        if known or outcome is not Outcome.OK:
            self._free(relay, tainted=outcome is Outcome.TAINTED)
            return
        job_id = next(self._ids)
        self._storing[job_id] = relay
        chunk = _chunk(relay.move, relay.move.target, relay.slot)
        self._submit(relay.move.target.tier, job_id, [chunk], WorkKind.WRITE_THROUGH)

    def _free(self, relay: _Relay, *, tainted: bool) -> None:
        if tainted:
            self._usable_slots -= 1
            logger.error("A relay slot may still be touched; retired, %d left", self._usable_slots)
        else:
            self._free_slots.append(relay.slot)
        self.step()

    def _moves(self, tier: int) -> bool:
        """Whether this rank has ``tier``."""
        return 0 <= tier < len(self._engines) and self._engines[tier] is not None

    def _submit(self, tier: int, job_id: int, chunks: Sequence[ChunkIO], kind: WorkKind) -> None:
        engine = self._engines[tier]
        assert engine is not None, "refused when the moves were submitted"
        engine.submit_background(job_id, chunks, kind)

    def _settle_part(self, part: _TicketPart, outcomes: Sequence[Outcome]) -> None:
        for position, outcome in zip(part.positions, outcomes, strict=True):
            self.settle(part.ticket, position, outcome)

    def _emit(self, ticket: _MoveTicket) -> None:
        del self._open[ticket]
        outcomes = tuple(outcome or Outcome.FAILED for outcome in ticket.outcomes)
        ok_bytes = sum(size for size, outcome in zip(ticket.sizes, outcomes, strict=True) if outcome is Outcome.OK)
        seconds = self._clock() - ticket.began_s
        self._results.append(Completion(ticket.number, ticket.kind, outcomes, bytes_moved=ok_bytes, seconds=seconds))


def _unfetched(outcome: Outcome) -> Outcome:
    """What to tell of a relayed move whose source gave no chunk: the target, never touched, is not to blame."""
    return outcome if outcome is Outcome.CORRUPT else Outcome.DROPPED


def _chunk(move: MoveIO, farther: Location, host_offset: int) -> ChunkIO:
    """The image of a move between its host slot and a farther tier."""
    return ChunkIO(move.key, farther, move.group, NO_BLOCKS, 0, host_offset)
