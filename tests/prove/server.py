"""A server without vLLM: the real catalog, tiers, engines, links and movers, driven as vLLM's steps drive them. A
chunk's contents follow from its number, so any server can check them.

Threading: one thread drives it; tiers and engines have their own threads, which ``close`` or a kill ends.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from nixl_offload.catalog.catalog import Catalog, LoadTicket, StoreTicket
from nixl_offload.catalog.moves import ChainOptions
from nixl_offload.config import Config, parse_config
from nixl_offload.engine import Chunk, Completion, make_move
from nixl_offload.engine.paths import RankMemory
from nixl_offload.engine.streams import device_of
from nixl_offload.errors import NixlOffloadError
from nixl_offload.identity.namespace import Namespace, make_namespace
from nixl_offload.index import State
from nixl_offload.tiers import kinds
from nixl_offload.tiers.base import Tier, TierContext
from nixl_offload.types import Key, Lookup, LookupContext, Outcome, key_group
from nixl_offload.vllm.background import BackgroundOpening, join_all
from nixl_offload.vllm.rank_tiers import RankTiers, open_host
from tests.prove.clock import CLOCK, real_s
from tests.unit import shared_rig
from tests.unit.engine_rig import CHUNK_BLOCKS, NUM_BLOCKS, SHAPES, Shape, kv_cache
from tests.unit.rank_rig import TestedRank

REGIONS: Final = NUM_BLOCKS // CHUNK_BLOCKS
"""Number of chunks that fit into the KV cache."""
BACKLOG_CHUNKS: Final = 8
STAGING_BYTES: Final = 5 << 14
"""Four slots of the default shape."""
EMPTY: Final = 0xEE
"""Fills KV blocks before a load."""
COMPUTED: Final = 0x3C
"""Fills KV blocks that are recomputed after a failed load."""
GARBAGE: Final = 0xA5
"""Fills KV blocks that the model overwrites after a store."""
HASTE_S: Final = 0.2
PATIENCE_S: Final = 30.0
"""Real time after which a wait raises DeadError."""
ANSWERED_S: Final = 20.0
"""The same for a lookup."""
STUCK_S: Final = 0.4
"""Real time without progress after which the clock is set ahead, so that time-outs expire."""
OPENING_S: Final = 1.5
"""The same while a tier is being opened. On a busy machine a shorter one would fail each of its trials."""
JUMP_S: Final = 31.0
"""More than any time-out and quarantine."""


class DeadError(Exception):
    """Something did not end in time."""


def key_of(number: int, groups: int = 2) -> Key:
    """Return the key of a chunk; the number determines its group."""
    return shared_rig.key_of(number, number % groups)


@functools.lru_cache(maxsize=512)
def payload_of(number: int, rank: int, block_bytes: int) -> npt.NDArray[np.uint8]:
    """Return the contents of a chunk's blocks on a rank: shape (CHUNK_BLOCKS, ``block_bytes``)."""
    made = np.random.default_rng((number, rank)).integers(0, 256, (CHUNK_BLOCKS, block_bytes), dtype=np.uint8)
    made.flags.writeable = False
    return made


def config_of(*tiers: dict[str, Any], staging_bytes: int = STAGING_BYTES, **fields: Any) -> Config:
    """Return a config of ``tiers``. ``staging_bytes``: per tier; may be less than the schema allows."""
    config = parse_config({"tiers": list(tiers), **fields})
    return config.model_copy(update={"staging_bytes": staging_bytes * len(config.stored)})


def tiers_of(letters: str, root: Path, slab: str, tree: str) -> list[dict[str, Any]]:
    """Return the config of tiers below ``root``: ``m`` memory, ``s`` a slab, ``t`` a shared directory. ``slab``,
    ``tree``: capacities.
    """
    made: dict[str, dict[str, Any]] = {
        "m": {"kind": "memory", "capacity": "512KiB"},
        "s": {"kind": "slab", "path": str(root / "slab"), "capacity": slab},
        "t": {"kind": "shared_dir", "path": str(root / "tree"), "capacity": tree, "lookup": {"timeout": "20s"}},
    }
    return [made[letter] for letter in letters]


class Rank:
    """One rank: KV blocks, and the real engine, link and mover of each tier that ``tiers`` has opened."""

    def __init__(self, config: Config, shape: Shape, number: int, ranks: int, mover: str) -> None:
        self.number, self._shape = number, shape
        self.tensors, self.kv, self.layout = kv_cache(shape, number)
        self.slot_bytes = max(self.layout.slot_bytes(group) for group in range(len(self.layout.groups)))
        parallel: Any = SimpleNamespace(world_size=ranks, rank=number)
        self.host = open_host(config, parallel, self.layout, self.tensors)
        self.chain = TestedRank(
            len(config.tiers),
            relay_offsets=() if self.host is None else self.host.relay_offsets,
            load_timeout_s=config.load_timeout_s,
        )
        memory = RankMemory(
            self.tensors, self.layout, device_of(self.tensors[0]), self.host, [number] * len(shape.groups)
        )
        self.tiers = RankTiers(self.chain, config, memory, number, [mover or None] * len(config.tiers))

    def fill(self, blocks: range, group: int, rows: npt.NDArray[np.uint8] | int) -> None:
        """Fill KV blocks with a payload, or every byte with one value."""
        at = 0
        for part in self._parts(blocks, group):
            part[:] = rows if isinstance(rows, int) else rows[:, at : at + part.shape[1]]
            at += part.shape[1]

    def read(self, blocks: range, group: int) -> npt.NDArray[np.uint8]:
        """Return the contents of KV blocks, one row each."""
        return np.concatenate(self._parts(blocks, group), axis=1)

    def _parts(self, blocks: range, group: int) -> list[npt.NDArray[np.uint8]]:
        return [
            self.kv[run.tensor_index][blocks.start : blocks.stop, run.page_offset : run.page_offset + run.length]
            for run in self._shape.groups[group].refs
        ]

    def close(self, drain_s: float) -> bool:
        """End threads and movers. Returns False if an opening did not end; it may still use host memory."""
        has_ended = self.tiers.close()
        self.chain.close(drain_s)
        if self.host is not None and has_ended:
            self.host.close()
        return has_ended


@dataclass(slots=True)
class Job:
    """One of vLLM's jobs, on all ranks."""

    ticket: StoreTicket | LoadTicket
    numbers: list[int]
    blocks: list[range]
    ranks_left: int
    outcomes: list[tuple[Outcome, ...]] = field(default_factory=list)
    """Outcomes by chunk, of each rank that has reported."""


class Server:
    """One run of a server. Tiers open in the background, as in vLLM's two halves; ``step`` takes them over."""

    def __init__(
        self, config: Config, *, shape: str = "two_groups", ranks: int = 1, mover: str = "", is_hasty: bool = False
    ) -> None:
        """``mover``: ``copy`` or a POSIX mover; "": the config's. ``is_hasty``: the model reuses a store's blocks at
        once, and stores that take longer are dropped.
        """
        self.config = config
        self.shape = SHAPES[shape]
        self.wrong: list[str] = []
        """Wrong contents that were found, a sentence each."""
        self.refused: list[str] = []
        """Causes of failed openings of tiers."""
        self.jobs: dict[int, Job] = {}
        """By ticket."""
        self.open_tickets: dict[int, int] = {}
        """By ticket of a promotion or write-through: how many ranks have not reported."""
        self.requests = 0
        self._guards: list[tuple[Rank, range, int]] = []
        """Rank, blocks and chunk: recomputed after a failed load, so nothing may write to them any more."""
        self._is_hasty = is_hasty
        self._is_closed = False
        self._moved_s = real_s()
        self._removed: set[tuple[int, Key]] = set()
        self._free_regions = list(range(REGIONS))
        self.ranks = [Rank(config, self.shape, number, ranks, mover) for number in range(ranks)]
        self.namespace = self._namespace()
        self.opened: dict[int, kinds.AnyTier] = {}
        self.serving: list[Tier] = [Tier() for _ in config.tiers]
        """The tiers, with a plain ``Tier`` for one that is not open on all ranks."""
        self.catalog = self._catalog()
        self._openings = {
            position: BackgroundOpening(
                functools.partial(self._open_tier, position),
                lambda tier: tier.close(),
                what=f"tier {position}",
                thread_name=f"nixl-offload-open-{position}",
            )
            for position in range(len(config.tiers))
        }

    @property
    def is_open(self) -> bool:
        """Whether every tier serves, on every rank."""
        are_open = not any(type(tier) is Tier for tier in self.serving)
        return are_open and not any(rank.tiers.is_opening for rank in self.ranks)

    # Contents of chunks.

    def key(self, number: int) -> Key:
        """Return the key of a chunk."""
        return key_of(number, len(self.shape.groups))

    def _group(self, number: int) -> int:
        return number % len(self.shape.groups)

    def _payload(self, number: int, rank: Rank) -> npt.NDArray[np.uint8]:
        return payload_of(number, rank.number, rank.layout.groups[self._group(number)].block_bytes)

    # Actions of vLLM.

    @property
    def room(self) -> int:
        """Number of chunks for which the KV cache has room now."""
        return len(self._free_regions)

    def store(self, numbers: Sequence[int]) -> None:
        """Store a computed prompt: its first ``room`` chunks at most."""
        self.requests += 1
        wanted = [self.key(number) for number in numbers[: self.room]]
        ticket = self.catalog.reserve(wanted, time.monotonic(), f"r{self.requests}")
        if ticket is None:
            return
        taken = [numbers[wanted.index(key)] for key in ticket.keys]
        blocks = self._take(len(taken))
        self.jobs[ticket.ticket] = Job(ticket, taken, blocks, len(self.ranks))
        for rank in self.ranks:
            chunks = []
            for number, key, location, place in zip(taken, ticket.keys, ticket.locations, blocks, strict=True):
                rank.fill(place, key_group(key), self._payload(number, rank))
                chunks.append(Chunk(key, location, key_group(key), _ids(place), 0))
            rank.chain.submit_store(ticket.ticket, chunks)
        for rank in self.ranks if self._is_hasty else ():
            rank.chain.wait([ticket.ticket], HASTE_S)
            for number, place in zip(taken, blocks, strict=True):
                # The model overwrites the blocks: bytes read after ``wait`` must not become the chunk.
                rank.fill(place, self._group(number), GARBAGE)

    def load(self, numbers: Sequence[int]) -> Job:
        """Begin to load chunks that a lookup found."""
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

    def look_up(self, *prompts: Sequence[int], patience_s: float = 0.3) -> list[int]:
        """Look prompts up until all are answered; return the numbers of the chunks found. Sets the clock ahead after
        ``patience_s``. Raises DeadError.
        """
        began_s, waiting, found = real_s(), [], list[int]()
        for prompt in prompts:
            self.requests += 1
            waiting.append((f"r{self.requests}", prompt))
        while True:
            unanswered = []
            for request, prompt in waiting:
                answers = []
                for position, number in enumerate(prompt):
                    context = LookupContext(request, 16 * (position + 1))
                    answers.append(self.catalog.lookup(self.key(number), time.monotonic(), context))
                    if answers[-1] is Lookup.MISS:
                        break
                if {Lookup.RETRY, Lookup.PENDING}.intersection(answers):
                    unanswered.append((request, prompt))
                else:
                    self.catalog.forget_request(request)
                    found += [number for number, answer in zip(prompt, answers, strict=False) if answer is Lookup.HIT]
            waiting = unanswered
            if not waiting:
                return found
            if real_s() > began_s + patience_s:
                CLOCK.ahead_s += 5.0
                patience_s += 0.1
            if real_s() > began_s + ANSWERED_S:
                raise DeadError(f"lookups of {waiting} were not answered")
            self.step()
            time.sleep(0.0005)

    def loaded(self, numbers: Sequence[int]) -> list[tuple[int, bool]]:
        """Load chunks that were found. Return those not evicted before, and whether all ranks loaded each."""
        if not numbers:
            return []
        job = self.load(numbers)
        self.until(lambda: not job.ranks_left, "a load")
        ended = zip(job.numbers, job.ticket.locations, zip(*job.outcomes, strict=True), strict=True)
        return [(number, set(outcomes) == {Outcome.OK}) for number, place, outcomes in ended if place.tier >= 0]

    def serve(self, numbers: Sequence[int]) -> list[int]:
        """Look a prompt up and load it; return the loaded chunks. ``wrong`` lists wrong contents."""
        found = self.look_up(numbers)
        served: list[int] = []
        for begin in range(0, len(found), REGIONS // 2):
            part = found[begin : begin + REGIONS // 2]
            if self.room < len(part):
                self.check_guards()
            served += [number for number, is_whole in self.loaded(part) if is_whole]
        return served

    def check(self, numbers: Sequence[int]) -> tuple[set[int], set[int]]:
        """Look chunks up, each alone, load and compare those found. Returns the chunks that loaded, and the chunks that
        were found but did not load.
        """
        whole: set[int] = set()
        bad: set[int] = set()
        for begin in range(0, len(numbers), REGIONS):
            self.until(lambda: not self.jobs, "jobs")
            self.check_guards()
            for number, is_whole in self.loaded(self.look_up(*([one] for one in numbers[begin : begin + REGIONS]))):
                (whole if is_whole else bad).add(number)
        self.check_guards()
        return whole, bad

    def step(self) -> None:
        """Do the work at the end of a vLLM step. Tiers with trouble on any rank are disabled."""
        self._take_opened()
        now_s = time.monotonic()
        self.catalog.on_step(now_s)
        for grant in self.catalog.begin_moves(now_s):
            self.open_tickets[grant.ticket] = len(self.ranks)
            memory = None if self.config.memory is None else 0
            for rank in self.ranks:
                moves = [
                    make_move(key, key_group(key), source, target, memory=memory)
                    for key, source, target in zip(grant.keys, grant.sources, grant.targets, strict=True)
                ]
                rank.chain.submit_moves(grant.ticket, moves)
        self._poll()
        statuses = [each for rank in self.ranks for each in enumerate(rank.chain.statuses())]
        refusing = {at for at, status in statuses if status.stores_fail}
        self.catalog.disable(refusing, {at for at, status in statuses if status.loads_fail}, time.monotonic())
        self._take_removed()

    def until(self, is_over: Callable[[], bool], what: str, timeout_s: float = PATIENCE_S) -> None:
        """Step until ``is_over``. If nothing moves, the clock is set ahead. Raises DeadError."""
        began_s = self._moved_s = real_s()
        jumps = 0
        while not is_over():
            self.step()
            if is_over():
                return
            time.sleep(0.0003)
            if real_s() > self._moved_s + (STUCK_S if self.is_open else OPENING_S):
                self._moved_s = real_s()
                CLOCK.ahead_s += JUMP_S
                jumps += 1
            if real_s() > began_s + timeout_s:
                raise DeadError(f"{what} has not ended, {jumps} time-outs later: {self.state()}")

    @property
    def is_at_rest(self) -> bool:
        """Whether nothing is under way."""
        return (
            not self.jobs
            and not self.open_tickets
            and not self.catalog.moves.has_pending
            and not self.catalog.open_tickets
            and not any(rank.chain.has_jobs for rank in self.ranks)
        )

    def state(self) -> str:
        """Describe what is under way."""
        idle = [not rank.chain.has_jobs for rank in self.ranks]
        jobs = {number: type(job.ticket).__name__ for number, job in self.jobs.items()}
        pending = self.catalog.moves.pending
        return (
            f"jobs {jobs}, tickets {self.open_tickets}, pending {pending}, ranks idle {idle}; "
            f"{'open' if self.is_open else 'not open'}, refused: {self.refused[-3:]}"
        )

    def ready(self, position: int, numbers: Sequence[int]) -> set[int]:
        """Return the given chunks that are READY in a tier."""
        return {number for number in numbers if self.serving[position].state(self.key(number)) is State.READY}

    def removed(self, position: int) -> set[Key]:
        """Return the keys that a tier has lost since the last call."""
        self._take_removed()
        removed, self._removed = self._removed, set()
        return {key for at, key in removed if at == position}

    def check_guards(self) -> None:
        """Check that nothing wrote to blocks after their load had failed, and free them."""
        for rank, blocks, number in self._guards:
            if not (rank.read(blocks, self._group(number)) == COMPUTED).all():
                self.wrong.append(f"chunk {number}: rank {rank.number} wrote to blocks after their load had failed")
        self._give_back({blocks for _, blocks, _ in self._guards})
        self._guards.clear()

    def close(self, drain_s: float = 5.0) -> bool:
        """Shut down. Returns False if an opening did not end."""
        if self._is_closed:
            return True
        self._is_closed = True
        ending = [thread for opening in self._openings.values() for thread in opening.close()]
        has_ended = True
        for rank in self.ranks:
            has_ended &= rank.close(drain_s)
        self._poll()
        has_ended &= not join_all(ending, 2.0)
        # Stores in flight may be finished: tiers keep them as hints.
        in_flight = self.catalog.in_flight_stores()
        for position, tier in self.opened.items():
            tier.close([key for at, key in in_flight if at == position])
        return has_ended

    # Inside

    def _namespace(self) -> Namespace:
        sizes = [tuple(rank.layout.slot_bytes(group) for rank in self.ranks) for group in range(len(self.shape.groups))]
        fields = shared_rig.namespace_of(len(self.ranks), "default", sizes).fields
        return make_namespace(replace(fields, blocks_per_chunk=CHUNK_BLOCKS))

    def _catalog(self) -> Catalog:
        memory, backlog_bytes = self.config.memory, BACKLOG_CHUNKS * self.ranks[0].slot_bytes
        return Catalog(
            self.serving,
            world_size=len(self.ranks),
            slot_bytes=lambda key: self.namespace.slot_bytes(key_group(key)),
            store_backlog_bytes=backlog_bytes,
            chain=ChainOptions(write_through_backlog_bytes=backlog_bytes, memory=None if memory is None else 0),
        )

    def _open_tier(self, position: int) -> kinds.AnyTier:
        context = TierContext(position, self.namespace, world_size=len(self.ranks))
        try:
            return kinds.open_tier(self.config.tiers[position], context)
        except NixlOffloadError as error:
            self.refused.append(getattr(error, "cause", "") or str(error))
            raise

    def _take_opened(self) -> None:
        for position, opening in self._openings.items() if not self.is_open else ():
            tier = opening.take()
            if tier is not None:
                self.opened[position] = tier
                for rank in self.ranks:
                    rank.tiers.open({position: tier.place}, 0)
        for rank in self.ranks:
            rank.tiers.take_opened()
        for position, opened in self.opened.items():
            is_on_all = all(position in rank.chain.open_tiers for rank in self.ranks)
            if type(self.serving[position]) is Tier and is_on_all:
                self.serving[position] = opened
                self.catalog.join(position, opened)

    def _take_removed(self) -> None:
        for change in self.catalog.take_changes():
            if change.removed:
                self._removed |= {(change.tier, key) for key in change.keys}

    def _poll(self) -> None:
        for rank in self.ranks:
            for done in rank.chain.finished():
                self._ended(rank, done)
            for settled in rank.chain.finished_tickets():
                self._report(settled)
                self.open_tickets[settled.job_id] -= 1
                if not self.open_tickets[settled.job_id]:
                    del self.open_tickets[settled.job_id]

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
            self._give_back(set(job.blocks) - {blocks for _, blocks, _ in self._guards})

    def _check_load(self, rank: Rank, number: int, place: range, outcome: Outcome) -> None:
        group = self._group(number)
        found, right = rank.read(place, group), self._payload(number, rank)
        if outcome is not Outcome.OK:
            # Zeros: refused blocks were cleared. Correct bytes: they arrived before the read was cut short. A server
            # may end between a direct read and its check.
            if not self._is_closed and not ((found == EMPTY) | (found == 0) | (found == right)).all():
                self.wrong.append(f"chunk {number}: rank {rank.number} left other bytes where a load {outcome.value}")
            rank.fill(place, group, COMPUTED)
            self._guards.append((rank, place, number))
        elif not np.array_equal(found, right):
            self.wrong.append(f"chunk {number}: rank {rank.number} loaded other bytes than were stored")

    def _report(self, done: Completion) -> None:
        self._moved_s = real_s()
        failed = {position: outcome for position, outcome in enumerate(done.outcomes) if outcome is not Outcome.OK}
        self.catalog.report(done.job_id, 1, failed, time.monotonic())

    def _take(self, count: int) -> list[range]:
        taken = [self._free_regions.pop() for _ in range(count)]
        return [range(CHUNK_BLOCKS * region, CHUNK_BLOCKS * (region + 1)) for region in taken]

    def _give_back(self, places: set[range]) -> None:
        self._free_regions += {place.start // CHUNK_BLOCKS for place in places}.difference(self._free_regions)


def _ids(blocks: range) -> npt.NDArray[np.int32]:
    return np.array(blocks, dtype=np.int32)
