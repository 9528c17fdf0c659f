"""A server without vLLM: the real catalog and tiers, and ranks with their real engines, links and movers, driven as
vLLM's steps drive them. What a chunk holds follows from its number, so any server can tell what it must be.

Threading: one thread drives it; tiers and engines have threads of their own. ``close`` ends them, a kill as well.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nixl_offload.catalog import Catalog, ChainOptions, LoadTicket, StoreTicket
from nixl_offload.config import Config, parse_config
from nixl_offload.engine import Chunk, Completion, make_move
from nixl_offload.identity.namespace import Namespace, make_namespace
from nixl_offload.index import State
from nixl_offload.tiers import kinds
from nixl_offload.tiers.base import Tier, TierContext
from nixl_offload.types import Key, Lookup, LookupContext, Outcome, key_group
from tests.prove.rank import STAGING_SLOTS, Rank
from tests.unit import shared_rig
from tests.unit.engine_rig import CHUNK_BLOCKS, NUM_BLOCKS, SHAPES

REGIONS = NUM_BLOCKS // CHUNK_BLOCKS
"""Chunks that the KV cache holds."""
BACKLOG_CHUNKS = 8
EMPTY = 0xEE
"""What KV blocks are full of before a load."""
COMPUTED = 0x3C
"""What they are full of when a load has failed and they were computed anew."""
GARBAGE = 0xA5
"""What the model writes once a store has let go of them."""
HASTE_S = 0.2
CLOSE_S = 5.0
PATIENCE_S = 30.0
"""Real time after which something counts as dead."""


class DeadError(Exception):
    """What should have ended has not."""


def key_of(number: int, groups: int = 2) -> Key:
    """Return the key of a chunk; its group goes by its number."""
    return shared_rig.key_of(number, number % groups)


@functools.lru_cache(maxsize=512)
def payload_of(number: int, rank: int, block_bytes: int) -> npt.NDArray[np.uint8]:
    """Return what a chunk's blocks hold on a rank, as rows: shape (CHUNK_BLOCKS, ``block_bytes``)."""
    made = np.random.default_rng((number, rank)).integers(0, 256, (CHUNK_BLOCKS, block_bytes), dtype=np.uint8)
    made.flags.writeable = False
    return made


def config_of(*tiers: dict[str, Any], **fields: Any) -> Config:
    """Return a config over ``tiers``."""
    return parse_config({"staging": "1MiB", "tiers": list(tiers), **fields})


@dataclass(slots=True)
class Job:
    """A job of vLLM's on all ranks."""

    ticket: StoreTicket | LoadTicket
    numbers: list[int]
    blocks: list[range]
    ranks_left: int
    outcomes: list[tuple[Outcome, ...]] = field(default_factory=list)
    """Of each rank that has told, by chunk."""


@dataclass(slots=True)
class Guard:
    """KV blocks that were computed anew after a load had failed: nothing may write to them any more."""

    rank: Rank
    blocks: range
    group: int
    number: int


class Server:
    """From its start to its end."""

    is_hasty = False
    """Whether the model wants the blocks of a store back at once: what storage has no time for then is dropped."""

    def __init__(
        self,
        config: Config,
        *,
        shape: str = "two_groups",
        ranks: int = 1,
        mover: str = "",
        tenant: str = "default",
        staging_slots: int = STAGING_SLOTS,
    ) -> None:
        """Open everything, or raise what keeps it from that, with nothing left open. ``mover`` as for ``Rank``."""
        self.config = config
        self.shape = SHAPES[shape]
        self.wrong: list[str] = []
        """What came that is not what was asked for, a sentence each."""
        self.unanswered = 0
        self.jobs: dict[int, Job] = {}
        """By ticket."""
        self.open_tickets: dict[int, int] = {}
        """Of promotions and write-throughs: how many ranks have not told."""
        self.guards: list[Guard] = []
        self.requests = 0
        self._free_regions = list(range(REGIONS))
        self.ranks = [
            Rank(config, self.shape, number, ranks, mover=mover, staging_slots=staging_slots) for number in range(ranks)
        ]
        self.layout = self.ranks[0].layout
        self.namespace = self._namespace(tenant)
        self.opened: dict[int, kinds.AnyTier] = {}
        self.serving: list[Tier] = [Tier() for _ in config.tiers]
        """The tiers; a plain ``Tier`` for each that is not open on all ranks."""
        self.catalog = self._catalog()
        self._begin()

    # What chunks are.

    def key(self, number: int) -> Key:
        """Return the key of a chunk."""
        return key_of(number, len(self.shape.groups))

    def payload(self, number: int, rank: int) -> npt.NDArray[np.uint8]:
        """Return what a chunk's blocks hold on a rank."""
        return payload_of(number, rank, self.layout.groups[self.group(number)].block_bytes)

    def group(self, number: int) -> int:
        """Return the KV cache group of a chunk."""
        return number % len(self.shape.groups)

    # What vLLM does.

    @property
    def room(self) -> int:
        """Chunks for which the KV cache has room now."""
        return len(self._free_regions)

    def store(self, numbers: Sequence[int]) -> list[int]:
        """A prompt was computed. Returns the chunks that are taken, at most ``room``."""
        self.requests += 1
        wanted = [self.key(number) for number in numbers[: self.room]]
        ticket = self.catalog.reserve(wanted, time.monotonic(), f"r{self.requests}")
        if ticket is None:
            return []
        taken = [numbers[wanted.index(key)] for key in ticket.keys]
        blocks = self._take(len(taken))
        self.jobs[ticket.ticket] = Job(ticket, taken, blocks, len(self.ranks))
        for rank in self.ranks:
            chunks = []
            for number, key, location, place in zip(taken, ticket.keys, ticket.locations, blocks, strict=True):
                rank.fill(place, key_group(key), self.payload(number, rank.number))
                chunks.append(Chunk(key, location, key_group(key), _ids(place), 0))
            rank.chain.submit_store(ticket.ticket, chunks)
        for rank in self.ranks if self.is_hasty else ():
            rank.chain.wait([ticket.ticket], HASTE_S)
            for number, place in zip(taken, blocks, strict=True):
                # The model writes on: what is read from here after ``wait`` must never be taken for the chunk.
                rank.fill(place, self.group(number), GARBAGE)
        return taken

    def load(self, numbers: Sequence[int]) -> Job:
        """Begin to load what was found."""
        keys = [self.key(number) for number in numbers]
        ticket = self.catalog.prepare_load(keys, time.monotonic())
        blocks = self._take(len(keys))
        job = self.jobs[ticket.ticket] = Job(ticket, list(numbers), blocks, len(self.ranks))
        slots = ticket.promotion_slots or (None,) * len(keys)
        if ticket.promotion_ticket:
            self.open_tickets[ticket.promotion_ticket] = len(self.ranks)
        for rank in self.ranks:
            for place, key in zip(blocks, keys, strict=True):
                rank.fill(place, key_group(key), EMPTY)
            chunks = [
                Chunk(key, location, key_group(key), _ids(place), 0, None if slot is None else slot.offset)
                for key, location, place, slot in zip(keys, ticket.locations, blocks, slots, strict=True)
            ]
            rank.chain.submit_load(ticket.ticket, chunks, promotion_ticket=ticket.promotion_ticket)
        return job

    def ask(self, numbers: Sequence[int], timeout_s: float = 20.0) -> dict[int, Lookup]:
        """Look chunks up, each as a request of its own, until all is answered or ``timeout_s`` have passed."""
        answers: dict[int, Lookup] = {}
        until_s, waiting = time.monotonic() + timeout_s, list(numbers)
        while waiting and time.monotonic() < until_s:
            now_s = time.monotonic()
            for number in waiting:
                answers[number] = self.catalog.lookup(self.key(number), now_s, LookupContext(f"request {number}"))
            self.step()
            waiting = [number for number in waiting if answers[number] in (Lookup.RETRY, Lookup.PENDING)]
            if waiting:
                time.sleep(0.0005)
        self.unanswered += len(waiting)
        for number in numbers:
            self.catalog.forget_request(f"request {number}")
        return answers

    def loaded(self, numbers: Sequence[int]) -> list[tuple[int, bool]]:
        """Load what was found; return the chunks, and whether all ranks have them; without those evicted before."""
        if not numbers:
            return []
        job = self.load(numbers)
        self.until(lambda: not job.ranks_left, "a load")
        ended = zip(job.numbers, job.ticket.locations, zip(*job.outcomes, strict=True), strict=True)
        return [(number, set(outcomes) == {Outcome.OK}) for number, place, outcomes in ended if place.tier >= 0]

    def check(self, numbers: Sequence[int]) -> tuple[set[int], set[int]]:
        """Look chunks up, load what is found, and compare. Returns what is whole, and what was found but not whole.

        What lookups have not answered within their time counts as neither, and as ``unanswered``.
        """
        whole: set[int] = set()
        bad: set[int] = set()
        for begin in range(0, len(numbers), REGIONS):
            self.until(lambda: not self.jobs, "jobs")
            self.check_guards()
            answers = self.ask(numbers[begin : begin + REGIONS])
            for number, is_whole in self.loaded([number for number, answer in answers.items() if answer is Lookup.HIT]):
                (whole if is_whole else bad).add(number)
        self.check_guards()
        return whole, bad

    def step(self) -> None:
        """The end of a step of vLLM's: everything that may go on does."""
        now_s = time.monotonic()
        self.catalog.flush(now_s)
        for grant in self.catalog.begin_moves(now_s):
            self.open_tickets[grant.ticket] = len(self.ranks)
            memory = None if self.config.memory is None else 0
            for rank in self.ranks:
                moves = [
                    make_move(key, key_group(key), source, target, memory=memory)
                    for key, source, target in zip(grant.keys, grant.sources, grant.targets, strict=True)
                ]
                rank.chain.submit_moves(grant.ticket, moves)
        self.poll()

    def poll(self) -> None:
        """Take what ranks have to tell."""
        for rank in self.ranks:
            for done in rank.chain.finished():
                self._ended(rank, done)
            for settled in rank.chain.settled():
                self._report(settled)
                self.open_tickets[settled.job_id] -= 1
                if not self.open_tickets[settled.job_id]:
                    del self.open_tickets[settled.job_id]

    def until(self, is_over: Callable[[], bool], what: str, timeout_s: float = PATIENCE_S) -> None:
        """Step until something is over. Raises DeadError when ``timeout_s`` have passed."""
        until_s = time.monotonic() + timeout_s
        while not is_over():
            if time.monotonic() > until_s:
                raise DeadError(f"not over within {timeout_s:.0f} s: {what}; {self.state()}")
            self.step()
            time.sleep(0.0005)

    @property
    def is_at_rest(self) -> bool:
        """Whether nothing is under way."""
        return (
            not self.jobs
            and not self.open_tickets
            and not self.catalog.has_pending_writes
            and not self.catalog.open_tickets
            and not any(rank.chain.has_jobs for rank in self.ranks)
        )

    def state(self) -> str:
        """Say what is under way."""
        idle = [not rank.chain.has_jobs for rank in self.ranks]
        jobs = {number: type(job.ticket).__name__ for number, job in self.jobs.items()}
        pending = self.catalog.counts().pending_writes
        return f"jobs {jobs}, tickets {self.open_tickets}, pending {pending}, ranks idle {idle}"

    def ready(self, position: int, numbers: Sequence[int]) -> set[int]:
        """Return which of these chunks a tier calls READY."""
        return {number for number in numbers if self.serving[position].state(self.key(number)) is State.READY}

    def check_guards(self) -> None:
        """Nothing has written to blocks after their load had failed. They are free again."""
        for guard in self.guards:
            if not (guard.rank.read(guard.blocks, guard.group) == COMPUTED).all():
                self.wrong.append(
                    f"chunk {guard.number}: rank {guard.rank.number} wrote to blocks after their load had failed"
                )
        self._give_back({guard.blocks for guard in self.guards})
        self.guards.clear()

    def close(self) -> None:
        """End as a shutdown does."""
        for rank in self.ranks:
            rank.close(CLOSE_S)
        self._close_tiers()

    # Inside

    def _namespace(self, tenant: str) -> Namespace:
        sizes = [tuple(rank.layout.slot_bytes(group) for rank in self.ranks) for group in range(len(self.shape.groups))]
        fields = shared_rig.namespace_of(len(self.ranks), tenant, sizes).fields
        return make_namespace(replace(fields, blocks_per_chunk=CHUNK_BLOCKS))

    def _catalog(self) -> Catalog:
        memory, backlog_bytes = self.config.memory, BACKLOG_CHUNKS * self.ranks[0].slot_bytes
        return Catalog(
            self.serving,
            world_size=len(self.ranks),
            slot_bytes=lambda key: self.namespace.slot_bytes(key_group(key)),
            store_backlog_bytes=backlog_bytes,
            chain=ChainOptions(
                promote=memory is not None,
                unsaved_limit_bytes=0 if memory is None else memory.capacity_bytes // len(self.ranks) // 4,
                write_through_backlog_bytes=backlog_bytes,
                memory=None if memory is None else 0,
            ),
        )

    def _begin(self) -> None:
        """Open all tiers, on all ranks."""
        try:
            for position in range(len(self.serving)):
                tier = self.opened[position] = self._open_tier(position)
                for rank in self.ranks:
                    rank.chain.join(position, rank.open(position, tier.place))
                self._join(position)
        except BaseException:
            self.close()
            raise

    def _open_tier(self, position: int) -> kinds.AnyTier:
        context = TierContext(position, self.namespace, world_size=len(self.ranks))
        return kinds.open_tier(self.config.tiers[position], context)

    def _join(self, position: int) -> None:
        self.serving[position] = self.opened[position]
        self.catalog.join(position, self.opened[position])

    def _close_tiers(self) -> None:
        """What ranks have finished and not told is a hint that tiers take along."""
        self.poll()
        in_flight = self.catalog.in_flight_stores()
        for position, tier in self.opened.items():
            tier.close([key for at, key in in_flight if at == position])

    def _ended(self, rank: Rank, done: Completion) -> None:
        job = self.jobs[done.job_id]
        job.outcomes.append(done.outcomes)
        if isinstance(job.ticket, LoadTicket):
            for number, place, outcome in zip(job.numbers, job.blocks, done.outcomes, strict=True):
                self._check_load(rank, number, place, outcome)
        job.ranks_left -= 1
        self._report(done)
        if not job.ranks_left:
            del self.jobs[done.job_id]
            self._give_back(set(job.blocks) - {guard.blocks for guard in self.guards})

    def _check_load(self, rank: Rank, number: int, place: range, outcome: Outcome) -> None:
        group = self.group(number)
        found, right = rank.read(place, group), self.payload(number, rank.number)
        if outcome is not Outcome.OK:
            # Zeros: where what was read and refused had been. What is right may have come before it was cut short.
            if not ((found == EMPTY) | (found == 0) | (found == right)).all():
                self.wrong.append(f"chunk {number}: rank {rank.number} left other bytes where a load {outcome.value}")
            rank.fill(place, group, COMPUTED)
            self.guards.append(Guard(rank, place, group, number))
        elif not np.array_equal(found, right):
            self.wrong.append(f"chunk {number}: rank {rank.number} loaded other bytes than were stored")

    def _report(self, done: Completion) -> None:
        failed = {position: outcome for position, outcome in enumerate(done.outcomes) if outcome is not Outcome.OK}
        self.catalog.report(done.job_id, 1, failed, time.monotonic())

    def _take(self, count: int) -> list[range]:
        taken = [self._free_regions.pop() for _ in range(count)]
        return [range(CHUNK_BLOCKS * region, CHUNK_BLOCKS * (region + 1)) for region in taken]

    def _give_back(self, places: set[range]) -> None:
        self._free_regions += {place.start // CHUNK_BLOCKS for place in places}.difference(self._free_regions)


def _ids(blocks: range) -> npt.NDArray[np.int32]:
    return np.array(blocks, dtype=np.int32)


def slab(path: Path, capacity: str | int = "40MiB") -> dict[str, Any]:
    """Return the config of a slab tier. Most of 40 MiB is promised to the index; what is left holds some 200 chunks."""
    return {"kind": "slab", "path": str(path), "capacity": capacity}


def tree(path: Path, capacity: str | int = "64MiB", **lookup: str) -> dict[str, Any]:
    """Return the config of a shared directory."""
    return {"kind": "shared_dir", "path": str(path), "capacity": capacity, "lookup": {"timeout": "20s", **lookup}}


def memory(capacity: str | int = "512KiB") -> dict[str, Any]:
    """Return the config of a memory tier."""
    return {"kind": "memory", "capacity": capacity}
