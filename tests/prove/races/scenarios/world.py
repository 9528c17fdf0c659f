"""An engine of one rank, both halves: the catalog over memory, a slab and a shared directory, with the threads of all
three, and a caller that stores, looks up, loads, preempts, gives requests up, resets, sleeps and shuts down.

Memory has room for four chunks, so promotions meet evictions. What must hold: a load that is OK has exactly the bytes
that its keys stand for, and where nothing fails it is OK; blocks that were given back are not touched; and once nothing
is under way every chunk that is READY is whole where it is said to be, and no ticket, pin, slot or place on its way is
left.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from nixl_offload.catalog import Catalog, ChainOptions
from nixl_offload.catalog.tickets import Settled
from nixl_offload.chunk.header import HEADER_BYTES, Expected, check_header
from nixl_offload.config import SlabConfig
from nixl_offload.config.schema import MemoryConfig
from nixl_offload.engine import Chunk, Engine, host, make_move
from nixl_offload.engine.chain import ChainEngine
from nixl_offload.engine.host import HostSlab
from nixl_offload.engine.jobs import JobTable, TierQueue
from nixl_offload.engine.memory_tier import MemoryEngine
from nixl_offload.engine.pump import LEAKED, Pump
from nixl_offload.engine.slot_headers import SlotHeaders
from nixl_offload.engine.tier_engine import TierEngine
from nixl_offload.index import State
from nixl_offload.index.durable import DurableIndex
from nixl_offload.movers.copy import CopyMover
from nixl_offload.movers.tracked import ExtentTransfer
from nixl_offload.stores.directory import TreeStore
from nixl_offload.tiers.memory.tier import MemoryTier
from nixl_offload.tiers.shared.maintenance import Maintenance
from nixl_offload.tiers.shared.naming import shard_name
from nixl_offload.tiers.shared.presence import Presence
from nixl_offload.tiers.shared.prober import Prober
from nixl_offload.tiers.shared.tier import SharedTier
from nixl_offload.tiers.shared_dir.calls import CallThreads
from nixl_offload.tiers.shared_dir.link import TreeLink
from nixl_offload.tiers.slab.file import SlabFile
from nixl_offload.tiers.slab.link import SlabLink
from nixl_offload.tiers.slab.tier import SlabTier
from nixl_offload.types import Key, Location, Lookup, LookupContext, Outcome
from tests.prove.races.exploring import Run, Scenario
from tests.unit.engine_rig import CHUNK_BLOCKS, NUM_BLOCKS, SHAPES, kv_cache
from tests.unit.shared_rig import namespace_of, options

host._huge_bytes = lambda region: 0  # half of a run's time, for a line in the log

MEMORY, SLAB, TREE = 0, 1, 2
MEMORY_SLOTS = 4
STEP_S = 0.002
REST_S = 60.0
KEYS = 7


@dataclass(slots=True)
class _Job:
    ticket: int
    request: str
    keys: tuple[Key, ...]
    places: tuple[Location, ...]
    blocks: list[int]
    writes: bool
    held: bool = True
    waited_for: bool = False
    """What waits for a job may cut it short."""


@dataclass
class World:
    """Built by ``make``."""

    path: Path
    chance: random.Random
    fails: bool = True
    """Whether something is done that loads may fail of."""
    jobs: dict[int, _Job] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    under_way: set[int] = field(default_factory=set)
    """Tickets that the rank has to settle."""
    read_by: dict[int, int] = field(default_factory=dict)
    """Free blocks of requests that were given up: which store may still read them."""
    free: list[int] = field(default_factory=lambda: list(range(NUM_BLOCKS)))
    given_back: dict[int, npt.NDArray[np.uint8]] = field(default_factory=dict)
    retired: Counter[int] = field(default_factory=Counter)
    """By tier: slots that something may still touch, which nobody gets any more."""
    number: int = 0
    requests: int = 0
    is_closed: bool = False

    def __post_init__(self) -> None:
        self.tensors, self.kv, self.layout = kv_cache(SHAPES["per_layer"], 1)
        self.slot = self.layout.slot_bytes(0)
        self.namespace = namespace_of(1, sizes=[(self.slot,)])
        self.host = HostSlab(
            memory_bytes=MEMORY_SLOTS * self.slot,
            relay_slots=2,
            slot_bytes=self.slot,
            progress=lambda done, total: None,
        )
        (self.path / "tree").mkdir()
        self.tiers = [self._memory(), self._slab(), self._tree()]
        self.catalog = Catalog(
            self.tiers,
            world_size=1,
            slot_bytes=lambda key: self.slot,
            store_backlog_bytes=64 * self.slot,
            chain=ChainOptions(
                memory=MEMORY, unsaved_limit_bytes=2 * self.slot, write_through_backlog_bytes=3 * self.slot
            ),
        )
        self.links: list[SlabLink | TreeLink] = []
        self.chain = ChainEngine(3, self.host.relay_offsets)
        self.open()

    def _memory(self) -> MemoryTier:
        config = MemoryConfig.model_validate({"kind": "memory", "capacity": MEMORY_SLOTS * self.slot})
        return MemoryTier.open(
            config, position=MEMORY, namespace=self.namespace, slot_classes=[self.slot], world_size=1
        )

    def _slab(self) -> SlabTier:
        config = SlabConfig.model_validate({"kind": "slab", "path": str(self.path / "slab"), "capacity": 38 << 20})
        return SlabTier.open(config, position=SLAB, namespace=self.namespace, slot_classes=[self.slot], world_size=1)

    def _tree(self) -> SharedTier:
        return SharedTier(
            TREE,
            TreeStore(str(self.path / "tree")),
            self.namespace,
            lookup=options(timeout="200ms"),
            ttl_s=None,
            name="Tree",
            threads=2,
        )

    def open(self) -> None:
        """Open the rank's half of all tiers."""
        digest = self.namespace.rank_digests[0]
        common = {
            "table": self.chain.table,
            "tensors": self.tensors,
            "layout": self.layout,
            "host": self.host,
            "rank_namespace": digest,
        }
        place = self.tiers[SLAB].place
        self.slab = SlabFile(Path(place.directory, "rank0.slab"), place.rank_bytes, place.extent_bytes, direct_io=False)
        self.slab.open()
        links = [
            SlabLink(self.slab, CopyMover(2), time.monotonic),
            TreeLink(
                str(self.path / "tree"), self.namespace.name, 0, CopyMover(2), direct_io=False, clock=time.monotonic
            ),
        ]
        self.links += links
        engines: list[TierEngine] = [MemoryEngine(**common)]
        for tier, link in enumerate(links, 1):
            engines.append(Engine(**common, link=link, tier=tier, staging_bytes=2 * self.slot))
        for tier, engine in enumerate(engines):
            self.chain.join(tier, engine)

    # Keys and bytes.

    def key(self, number: int) -> Key:
        return Key(number.to_bytes(32, "little") + bytes(4))

    def payload(self, key: Key) -> npt.NDArray[np.uint8]:
        shape = CHUNK_BLOCKS, self.layout.groups[0].block_bytes
        return np.random.default_rng(list(key[:2])).integers(0, 256, shape, dtype=np.uint8)

    def fill(self, blocks: list[int], rows: npt.NDArray[np.uint8]) -> None:
        for tensor in range(3):
            self.kv[tensor][blocks] = rows[:, tensor * 1536 : (tensor + 1) * 1536]

    def rows(self, blocks: list[int]) -> npt.NDArray[np.uint8]:
        return np.concatenate([self.kv[tensor][blocks] for tensor in range(3)], axis=1)

    # What vLLM does.

    def step(self) -> None:
        """The end of a step: what has ended is reported, what waits begins."""
        self.report()
        now_s = time.monotonic()
        self.catalog.flush(now_s)
        if not self.is_closed:
            for ticket in self.catalog.begin_write_throughs(now_s):
                self.under_way.add(ticket.ticket)
                triples = zip(ticket.keys, ticket.sources, ticket.targets, strict=True)
                self.chain.submit_moves(
                    ticket.ticket, [make_move(key, 0, source, target, memory=MEMORY) for key, source, target in triples]
                )

    def report(self) -> None:
        """Tell the catalog what has ended."""
        now_s = time.monotonic()
        for done in self.chain.finished():
            assert done.job_id not in self.done, f"job {done.job_id} has ended twice"
            self.done.add(done.job_id)
            job = self.jobs[done.job_id]
            self.check_loaded(job, done.outcomes)
            failures = {at: outcome for at, outcome in enumerate(done.outcomes) if outcome is not Outcome.OK}
            settled = self.catalog.report(job.ticket, 1, failures, now_s)
            assert settled is not None, f"the ticket of job {done.job_id} was settled before"
            self.count_retired(settled)
            self.catalog.forget_request(job.request)
            self.read_by = {block: number for block, number in self.read_by.items() if number != done.job_id}
            if job.held:
                job.held = False
                self.free += job.blocks
        for done in self.chain.settled():
            assert done.job_id in self.under_way, f"ticket {done.job_id} is settled, and was not open"
            self.under_way.remove(done.job_id)
            failures = {at: outcome for at, outcome in enumerate(done.outcomes) if outcome is not Outcome.OK}
            settled = self.catalog.report(done.job_id, 1, failures, now_s)
            assert settled is not None, "a ticket was settled before"
            self.count_retired(settled)

    def count_retired(self, settled: Settled) -> None:
        for key, tier in zip(settled.keys, settled.tiers, strict=True):
            self.retired[tier] += settled.kind != "load" and settled.failed.get(key) is Outcome.TAINTED

    def check_loaded(self, job: _Job, outcomes: tuple[Outcome, ...]) -> None:
        if job.writes or not job.held:
            return
        for at, (key, place, outcome) in enumerate(zip(job.keys, job.places, outcomes, strict=True)):
            is_gone = place.tier < 0  # evicted between lookup and load
            assert outcome is Outcome.OK or is_gone or job.waited_for or self.fails, (
                f"nothing fails, and a load from tier {place.tier} is {outcome.name}"
            )
            blocks = job.blocks[at * CHUNK_BLOCKS : (at + 1) * CHUNK_BLOCKS]
            if outcome is Outcome.OK:
                assert np.array_equal(self.rows(blocks), self.payload(key)), (
                    f"wrong bytes were loaded for {key[:1].hex()}"
                )

    def take_blocks(self, chunks: int) -> list[int] | None:
        count = chunks * CHUNK_BLOCKS
        if count > len(self.free):
            return None
        taken, self.free = self.free[:count], self.free[count:]
        self.wait([self.read_by[block] for block in taken if block in self.read_by])
        for block in taken:
            self.read_by.pop(block, None)
            self.check_given_back(block)
        return taken

    def chunks(
        self, keys: tuple[Key, ...], places: tuple[Location, ...], blocks: list[int], slots: tuple
    ) -> list[Chunk]:
        made = []
        for at, (key, place) in enumerate(zip(keys, places, strict=True)):
            ids = np.array(blocks[at * CHUNK_BLOCKS : (at + 1) * CHUNK_BLOCKS], dtype=np.int32)
            slot = slots[at] if slots else None
            made.append(Chunk(key, place, 0, ids, 0, None if slot is None else slot.offset))
        return made

    def store(self, keys: list[Key]) -> None:
        blocks = self.take_blocks(len(keys))
        if blocks is None:
            return
        request = self.new_request()
        ticket = self.catalog.reserve(keys, time.monotonic(), request)
        if ticket is None:
            self.free += blocks
            return
        used = blocks[: len(ticket.keys) * CHUNK_BLOCKS]
        self.free += blocks[len(used) :]
        for at, key in enumerate(ticket.keys):
            self.fill(used[at * CHUNK_BLOCKS : (at + 1) * CHUNK_BLOCKS], self.payload(key))
        self.number += 1
        self.jobs[self.number] = _Job(ticket.ticket, request, ticket.keys, ticket.locations, used, writes=True)
        self.chain.submit_store(self.number, self.chunks(ticket.keys, ticket.locations, used, ()))

    def new_request(self) -> str:
        self.requests += 1
        return f"request {self.requests}"

    def look_up(self, keys: list[Key], steps: int) -> tuple[str, list[Key]]:
        """Ask for a prefix, step by step, and give up after so many. Return the request, and what is there."""
        request = self.new_request()
        hits: list[Key] = []
        for _ in range(steps):
            answers = []
            for at, key in enumerate(keys):
                answers.append(self.catalog.lookup(key, time.monotonic(), LookupContext(request, 16 * (at + 1))))
                if answers[-1] is Lookup.MISS:
                    break
            self.step()
            if not {Lookup.RETRY, Lookup.PENDING} & set(answers):
                hits = [key for key, answer in zip(keys, answers, strict=False) if answer is Lookup.HIT]
                break
            time.sleep(STEP_S)
        return request, hits

    def load(self, request: str, keys: list[Key]) -> None:
        blocks = self.take_blocks(len(keys)) if keys else None
        if blocks is None:
            self.catalog.forget_request(request)
            return
        ticket = self.catalog.prepare_load(keys, time.monotonic())
        self.number += 1
        self.jobs[self.number] = _Job(ticket.ticket, request, ticket.keys, ticket.locations, blocks, writes=False)
        if ticket.promotion_ticket:
            self.under_way.add(ticket.promotion_ticket)
        chunks = self.chunks(ticket.keys, ticket.locations, blocks, ticket.promotion_slots)
        self.chain.submit_load(self.number, chunks, promotion_ticket=ticket.promotion_ticket)

    @property
    def live(self) -> list[int]:
        """Jobs that have not ended, of requests that have not been given up."""
        return [number for number, job in self.jobs.items() if number not in self.done and job.held]

    def abort(self) -> None:
        """Give up a request. A load's blocks stay its own until it has ended; those of a store are free at once, and
        it is waited for when somebody else gets one of them.
        """
        number = self.chance.choice(self.live) if self.live else 0
        if not number:
            return
        job = self.jobs[number]
        self.catalog.forget_request(job.request)
        if job.writes:
            job.held = False
            self.read_by.update(dict.fromkeys(job.blocks, number))
            self.free = job.blocks + self.free

    def wait(self, numbers: list[int]) -> None:
        for number in numbers:
            self.jobs[number].waited_for = True
        self.chain.wait(numbers)

    def preempt(self) -> None:
        """Take the blocks of some jobs back, and use them for something else."""
        live = self.live
        if not live:
            return
        chosen = self.chance.sample(live, self.chance.randint(1, len(live)))
        self.wait(chosen)
        self.report()
        for number in chosen:
            job = self.jobs[number]
            if number not in self.done:
                assert job.writes, f"load {number} was waited for, and has not ended"
                job.held = False
                noise = np.random.default_rng(number).integers(0, 256, self.rows(job.blocks).shape, dtype=np.uint8)
                self.fill(job.blocks, noise)
                self.given_back.update(zip(job.blocks, noise, strict=True))
                self.free += job.blocks

    def check_given_back(self, block: int) -> None:
        row = self.given_back.pop(block, None)
        assert row is None or np.array_equal(self.rows([block])[0], row), "a block was given back, and written to later"

    # The end.

    def rest(self) -> None:
        """Let all that is under way end."""
        end_s = time.monotonic() + REST_S
        while self.catalog.open_tickets or self.catalog.has_pending_writes or self.chain.has_jobs:
            assert time.monotonic() < end_s, f"never at rest: {self.catalog.counts()}"
            self.step()
            time.sleep(0.02)
        assert not self.under_way

    def check(self) -> None:
        """Nothing is under way: nothing is held, and what is READY is whole."""
        counts = self.catalog.counts()
        assert self.catalog.backlog_bytes == counts.unsaved_bytes == 0, "bytes on their way are left"
        assert not any(counts.pending_writes)
        for position, tier in enumerate(self.tiers[:TREE]):
            tier._index.check()
            for occupancy in tier.occupancy().values():
                assert occupancy.writing == occupancy.pinned == occupancy.evicting == 0, "a pin or a place is left"
            taken = len(list(tier._index))
            used = tier._allocator.used_slots(self.slot)
            retired = self.retired[position]
            assert used == taken + retired, f"{used} slots are used for {taken} chunks, {retired} are retired"
        tree = self.tiers[TREE]._presence
        tree.check()
        assert tree.held == 0, "a pin or a reservation is left"
        for number in range(KEYS):
            key = self.key(number)
            for position, tier in enumerate(self.tiers):
                if tier.state(key) is State.READY:
                    self.check_whole(key, position)
        for block in list(self.given_back):
            self.check_given_back(block)

    def check_whole(self, key: Key, position: int) -> None:
        if position == TREE:
            name = self.path / "tree" / shard_name(self.namespace.name, key, 0)
            raw = name.read_bytes() if name.exists() else b""
        else:
            place = self.tiers[position]._index.location(key)
            if position == MEMORY:
                raw = self.host.slot(place.offset, self.slot).memory.tobytes()
            else:
                with Path(self.slab.path).open("rb") as file:
                    file.seek(place.offset)
                    raw = file.read(self.slot)
        payload = self.payload(key)
        digest = self.namespace.rank_digests[0]
        assert len(raw) >= HEADER_BYTES + payload.nbytes, f"tier {position} calls a chunk READY that is not there"
        expected = Expected(digest, key, 0, CHUNK_BLOCKS, self.layout.groups[0].block_bytes)
        check_header(raw[:HEADER_BYTES], expected, may_lack_checksums=position == MEMORY)
        same = raw[HEADER_BYTES : HEADER_BYTES + payload.nbytes] == payload.tobytes()
        assert same, f"tier {position} calls a chunk READY that is not whole"

    def close(self) -> None:
        self.chain.close(self.chance.choice((0.0, 0.001, 5.0)))
        self.report()
        assert set(self.jobs) == self.done, "jobs have not ended"
        assert not self.under_way, "tickets are open"
        assert not self.catalog.open_tickets, "the catalog has open tickets"
        self.is_closed = True
        for tier in self.tiers:
            tier.close()
        for link in self.links:  # a pump that was cut short leaves its own open: something may still use it
            link.mover.close()
            link.close()
        self.host.close()


def _play(run: Run, drive: Callable[[World], None], *, fails: bool = True) -> None:
    LEAKED.clear()
    run.expects = ("transfers did not end", "may still be touched", "places are given up")
    world = World(run.path, run.random, fails)
    drive(world)
    world.rest()
    world.check()
    world.close()


def _some(world: World, count: int) -> None:
    """What requests do."""
    chance = world.chance
    for _ in range(count):
        first = chance.randrange(KEYS - 2)
        keys = [world.key(number) for number in range(first, min(KEYS, first + chance.randint(1, 3)))]
        act = chance.randrange(7)
        if act <= 1:
            world.store(keys)
        elif act <= 3:
            world.load(*world.look_up(keys, chance.randint(1, 20)))
        elif act == 4:
            world.preempt()
        elif act == 5:
            world.abort()
        else:
            time.sleep(chance.choice((0.0003, 0.002, 0.05)))
        if chance.random() < 0.7:
            world.step()


def serving(run: Run) -> None:
    _play(run, lambda world: _some(world, 10), fails=False)


def promoting(run: Run) -> None:
    """All keys are stored, then loaded from wherever they are while others push them out of memory."""

    def drive(world: World) -> None:
        for number in range(KEYS):
            world.store([world.key(number)])
            world.step()
            if number % 3 == 2:
                time.sleep(0.02)
                world.step()
        world.rest()
        for _ in range(4):
            first = world.chance.randrange(KEYS - 1)
            world.load(*world.look_up([world.key(first), world.key(first + 1)], 30))
            if world.chance.random() < 0.5:
                world.step()
            if world.chance.random() < 0.2:
                world.abort()
        world.preempt()

    _play(run, drive, fails=False)


def resetting(run: Run) -> None:
    """The cache is reset while loads, stores and write-throughs are under way."""

    def drive(world: World) -> None:
        for _ in range(2):
            _some(world, 5)
            world.catalog.clear()
            for number in range(KEYS):
                assert world.catalog.where(world.key(number)) is None, "served after a reset"
        _some(world, 4)

    _play(run, drive)


def failing(run: Run) -> None:
    """The shared directory goes away while lookups, stores and loads are under way, and comes back."""

    def drive(world: World) -> None:
        _some(world, 4)
        os.rename(world.path / "tree", world.path / "gone")
        _some(world, 4)
        os.rename(world.path / "gone", world.path / "tree")
        _some(world, 2)

    _play(run, drive)


def sleeping(run: Run) -> None:
    """KV memory goes away, and comes back, while something is under way."""

    def drive(world: World) -> None:
        _some(world, 5)
        assert world.chain.release(world.chance.choice((0.001, 5.0)))
        world.report()
        assert world.done == set(world.jobs), "a job has not ended, and KV memory goes away"
        LEAKED.clear()
        world.open()
        _some(world, 4)

    _play(run, drive)


def ending(run: Run) -> None:
    """It is shut down in the middle."""
    LEAKED.clear()
    run.expects = ("transfers did not end", "may still be touched", "places are given up")
    world = World(run.path, run.random)
    _some(world, world.chance.randint(1, 8))
    world.close()


WATCHED = (
    CallThreads, Catalog, ChainEngine, CopyMover, DurableIndex, Engine, ExtentTransfer, HostSlab, JobTable, Maintenance,
    MemoryEngine, MemoryTier, Presence, Prober, Pump, SharedTier, SlabFile, SlabLink, SlabTier, SlotHeaders, TierQueue,
    TreeLink, TreeStore,
)  # fmt: skip
"""What several threads use, and what the scheduler's thread has to have for itself."""
ALLOWED = {
    "CallThreads._calls": "counted for a status while the pump replaces the list: it may be a moment old",
    "CallThreads.ended_s": "set by whichever thread has ended a call: of two that end at once either will do",
    "JobTable._expire_s": "both sides may look; at worst they look twice",
    "Pump._stop_by_s": "set once, before the pump is woken",
    "SlabTier._extents": "how far the drive lets slabs grow: a moment old is as if the drive had been asked then",
    "Prober.since_s": "set by the scheduler's thread when everything is forgotten: searches that are out are given up",
}


def _scenario(play: Callable[[Run], None]) -> Scenario:
    return Scenario(play, early_s=0.003, seeds=1000, watched=WATCHED, allowed=ALLOWED)


SCENARIOS = {
    "serving": _scenario(serving),
    "promoting": _scenario(promoting),
    "resetting": _scenario(resetting),
    "failing": _scenario(failing),
    "sleeping": _scenario(sleeping),
    "ending": _scenario(ending),
}
