"""The catalog over a chain of real tiers, against a plain model of the world: stores, loads, moves, landings, failures,
evictions, resets, outages and restarts, with every rank's acknowledgements in any order.

Proves, after every step: what is READY in a slab is whole on every rank, and what a load reads is the chunk that was
asked for; no place belongs to two, and a tainted one to nobody again; no tier holds more than it may; what waits for a
farther tier, pinned, and what moves there stay within their bounds; the changes told are those that happened; once
nothing is under way no pin and no reservation is left, and nothing waits for ever.

``CHAIN_MODEL_EXAMPLES=5000`` looks longer, each time elsewhere.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from nixl_offload.catalog import NOWHERE, Catalog, ChainOptions
from nixl_offload.config import FileTier as FileTierConfig
from nixl_offload.config.schema import MemoryTier as MemoryTierConfig
from nixl_offload.errors import StoreError
from nixl_offload.index import State
from nixl_offload.testing.store_suite import StoreRig, StoreSuite
from nixl_offload.tiers.file import FileTier
from nixl_offload.tiers.memory import MemoryTier
from nixl_offload.tiers.shared import SharedTier
from nixl_offload.tiers.slots import SlotTier
from nixl_offload.types import Asker, Key, Location, Lookup, Outcome, worst
from tests.model.chain_world import RANKS, SLOT_CLASSES, Bucket, Copy, ObjectStore, World, slot_bytes
from tests.unit.shared_rig import key_of, namespace_of, options

EXAMPLES = int(os.environ.get("CHAIN_MODEL_EXAMPLES", "0"))
KEYS = [key_of(number, number % 2) for number in range(26)]
FRESH = [key_of(number, number % 2) for number in range(100, 102)]
CHAINS = (
    *[("memory", "file", "shared")] * 5,
    ("memory", "file"),
    ("memory", "shared"),
    ("file", "shared"),
    ("memory",),
    ("file",),
)
SLOT_MAX = max(SLOT_CLASSES)
MEMORY_BYTES = RANKS * 2 * 4 * SLOT_MAX
"""The least that a memory tier takes: room for ten chunks."""
FILE_BYTES = 38 << 20
"""The least that a file tier takes, most of which is promised to its index: room for ten chunks, too."""
PATIENCE_S = 30.0
NAMESPACE = namespace_of(RANKS)

chains = st.tuples(st.integers(0, len(KEYS) - 1), st.integers(1, 7)).map(lambda ends: KEYS[ends[0] : sum(ends)])
any_of = st.integers(0, 10**6)
fates = st.dictionaries(
    st.integers(0, 6), st.sampled_from([Outcome.FAILED, Outcome.DROPPED, Outcome.TAINTED]), max_size=2
)
"""By position in a job, modulo its length; the rest goes well, as far as the world lets it."""

SEEN: Counter[str] = Counter()
"""What has happened, so that a model that never gets anywhere is noticed."""


@dataclass(slots=True, eq=False)
class Ticket:
    """What the model remembers of an open ticket. Aligned by position; None is the GPU."""

    kind: str
    keys: tuple[Key, ...]
    sources: tuple[Location | None, ...]
    targets: tuple[Location | None, ...]
    ranks_left: int = RANKS
    failed: dict[int, Outcome] = field(default_factory=dict)
    is_cleared: bool = False
    """The cache was reset meanwhile: what it stores is not to be served."""


@dataclass(slots=True, eq=False)
class Job:
    """One rank's part in a ticket."""

    rank: int
    kind: str
    ticket: int
    copies: list[Copy]
    outcomes: list[Outcome] | None = None
    """As the rank will report them; None: not done."""
    load: Job | None = None
    """Of a landing: the load that reads it."""


class ChainMachine(RuleBasedStateMachine):
    """Rules do what vLLM, ranks, storage, other servers and operators do. Time passes only by rule.

    What the prober's thread does is waited for, and the durable twin writes only when told: no run depends on timing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp(prefix="chain-model-"))
        self.tiers: list[MemoryTier | FileTier | SharedTier] = []

    @initialize(
        kinds=st.sampled_from(CHAINS),
        policy=st.sampled_from(["lru", "s3fifo"]),
        promote=st.sampled_from([True, True, False]),
        pin_unsaved=st.sampled_from([True, True, False]),
        unsaved_limit=st.sampled_from([0, 2 * SLOT_MAX, 5 * SLOT_MAX]),
        move_backlog=st.sampled_from([1, 3 * SLOT_MAX, 1 << 30]),
        store_backlog=st.sampled_from([3 * SLOT_MAX, 1 << 30]),
        store_after=st.sampled_from([1, 1, 1, 2]),
        stored=st.integers(0, len(KEYS)),
        is_restarted=st.booleans(),
    )
    def start(
        self,
        kinds: tuple[str, ...],
        policy: str,
        promote: bool,
        pin_unsaved: bool,
        unsaved_limit: int,
        move_backlog: int,
        store_backlog: int,
        store_after: int,
        stored: int,
        is_restarted: bool,
    ) -> None:
        """Begin with ``stored`` chunks offered, and everything at rest; or with what a restart left of that."""
        self.kinds, self.policy = kinds, policy
        self.chain = ChainOptions(
            promote=promote,
            pin_unsaved=pin_unsaved,
            unsaved_limit_bytes=unsaved_limit,
            move_backlog_bytes=move_backlog,
            memory=0 if kinds[0] == "memory" else None,
        )
        self.store_backlog, self.store_after = store_backlog, store_after
        self.world = World(kinds, NAMESPACE.name)
        self.flushed: dict[Key, Location] = {}
        """What the durable twin has on disk."""
        self.flushed_doubts: set[tuple[Key, int]] = set()
        """Of that, what may not be whole."""
        self.open_engine()
        for first in range(0, stored, 3):
            for _ in range(store_after):
                self.offer(KEYS[first : min(first + 3, stored)])
            self.move_all()
        if is_restarted:
            self.end_engine(True, [])

    def teardown(self) -> None:
        try:
            if self.tiers:
                self.come_to_rest()
                self.check_that_all_is_well_again()
        finally:
            for tier in self.tiers:
                tier.close()
            shutil.rmtree(self.path)

    # An engine's life.

    def open_engine(self) -> None:
        self.tiers = [self.open_tier(position, kind) for position, kind in enumerate(self.kinds)]
        self.slots = {position: tier for position, tier in enumerate(self.tiers) if isinstance(tier, SlotTier)}
        self.file = next((tier for tier in self.tiers if isinstance(tier, FileTier)), None)
        self.shared = next((tier for tier in self.tiers if isinstance(tier, SharedTier)), None)
        for position, tier in self.slots.items():
            self.world.begin_slab(position, tier.place.rank_bytes)
        self.catalog = Catalog(
            self.tiers,
            world_size=RANKS,
            slot_bytes=slot_bytes,
            store_backlog_bytes=self.store_backlog,
            chain=self.chain,
            store_after=self.store_after,
        )
        self.tickets: dict[int, Ticket] = {}
        self.jobs: list[Job] = []
        self.offers: Counter[Key] = Counter()
        self.tainted: list[Location] = []
        self.told = {position: set(self.ready(position)) for position in self.slots}
        """Per tier what is READY, by the changes that the catalog told."""

    def open_tier(self, position: int, kind: str) -> MemoryTier | FileTier | SharedTier:
        if kind == "memory":
            memory = MemoryTierConfig.model_validate({"kind": kind, "capacity": MEMORY_BYTES, "policy": self.policy})
            return MemoryTier.open(
                memory, position=position, namespace=NAMESPACE, slot_classes=SLOT_CLASSES, world_size=RANKS
            )
        if kind == "file":
            file = FileTierConfig.model_validate(
                {"kind": kind, "path": str(self.path / "kv"), "capacity": FILE_BYTES, "policy": self.policy}
            )
            tier = FileTier.open(
                file, position=position, namespace=NAMESPACE, slot_classes=SLOT_CLASSES, world_size=RANKS
            )
            tier._durable._batch_delay_s = 3600.0  # so that only flush and close write
            return tier
        return SharedTier(
            position,
            ObjectStore(self.world.bucket, self.world.wall),
            NAMESPACE,
            lookup=options(timeout="30s", max_keys=1000),
            ttl_s=None,
            world_size=RANKS,
            slot_bytes=slot_bytes,
            warm_start=False,
            name="Bucket",
            threads=1,
            clock=self.world.now,
            wall=self.world.wall,
        )

    def ready(self, tier: int) -> dict[Key, Location]:
        """Return what a slab's index calls READY, and where."""
        index = self.slots[tier]._index
        return {key: index.location(key) for key in index._nodes if index.state(key) is State.READY}

    def nearest(self, key: Key, allowed: Collection[int] | None) -> int | None:
        """Return the first tier, among those allowed, that says READY; one that is out of use only if no other does."""
        ready = [
            position
            for position, tier in enumerate(self.tiers)
            if (allowed is None or position in allowed) and tier.state(key) is State.READY
        ]
        return min(ready, key=lambda position: not self.tiers[position].in_use, default=None)

    def step_ends(self) -> None:
        self.catalog.flush(self.world.now_s)
        self.wait_for_threads()

    def wait_for_threads(self) -> None:
        """Let the prober finish what it was asked to do, and the healer what it looks at."""
        if self.shared is not None:
            prober = self.shared._prober
            while True:
                with prober._changed:
                    if not (
                        prober._probes
                        or prober._chores
                        or prober._chores_running
                        or prober._trial is not None
                        or prober._trial_out
                    ):
                        break
                time.sleep(0)
        if self.file is not None and self.file._healer is not None:
            self.file._healer.join()

    # What vLLM does.

    @rule(keys=chains)
    def offer(self, keys: Sequence[Key]) -> None:
        """A prompt was computed."""
        self.offers.update(keys)
        grant = self.catalog.reserve(keys, self.world.now_s)
        if grant is None:
            return
        assert len(set(grant.keys)) == len(grant.keys)
        assert set(grant.keys) <= set(keys)
        for key in grant.keys:
            assert self.nearest(key, None) is None, "stored what is there"
            assert self.offers[key] >= self.store_after, "stored too early"
        self.open_ticket("store", grant.ticket, grant.keys, [None] * len(grant.keys), grant.locations)
        SEEN["store passed over the nearest tier"] += any(location.tier > 0 for location in grant.locations)

    @rule(
        request=st.sampled_from("abc"),
        keys=chains,
        barred=st.sampled_from([(), (), (), (0,), (1,), (2,), (0, 1), (1, 2)]),
        steps=st.integers(1, 4),
        rest_is_stored=st.booleans(),
    )
    def request(
        self, request: str, keys: Sequence[Key], barred: Collection[int], steps: int, rest_is_stored: bool
    ) -> None:
        """A prompt is looked up, step by step; what is there is loaded, and the rest may be computed and stored."""
        allowed = None if not barred else [tier for tier in range(len(self.tiers)) if tier not in barred]
        for step in range(steps):
            hits: list[Key] = []
            answers = set()
            for position, key in enumerate(keys):
                asker = Asker(request, 16 * (KEYS.index(keys[0]) + position + 1))
                answer = self.catalog.lookup(key, self.world.now_s, asker, allowed=allowed)
                answers.add(answer)
                if answer is Lookup.HIT:
                    assert self.nearest(key, allowed) is not None
                    assert self.catalog.where(key, allowed) == self.nearest(key, allowed)
                    if len(hits) == position:
                        hits.append(key)
                elif answer is Lookup.MISS:
                    break
            if Lookup.RETRY not in answers or step == steps - 1:
                break
            self.step_ends()
        if hits:
            self.load(hits, allowed)
            assert NOWHERE not in self.last_load, "a hit that cannot be loaded in the same step"
        self.catalog.forget_asker(request)
        if rest_is_stored:
            self.offer(keys)

    @rule(keys=chains)
    def load_what_may_be_gone(self, keys: Sequence[Key]) -> None:
        self.load(keys, None)

    def load(self, keys: Sequence[Key], allowed: Collection[int] | None) -> None:
        nearest = [self.nearest(key, allowed) for key in keys]
        grant = self.catalog.prepare_load(keys, self.world.now_s, allowed=allowed)
        self.last_load = grant.locations
        assert grant.keys == tuple(keys)
        landings = grant.landings or (None,) * len(keys)
        landed = [position for position, landing in enumerate(landings) if landing is not None]
        assert bool(grant.landing_ticket) == bool(landed)
        for tier, location, landing in zip(nearest, grant.locations, landings, strict=True):
            assert location.tier == (-1 if tier is None else tier), "not the nearest that has it"
            if landing is not None:
                assert self.chain.promote
                assert landing.tier == self.chain.memory == 0
                assert location.tier > 0
        sources = [None if location.tier < 0 else location for location in grant.locations]
        self.open_ticket("load", grant.ticket, grant.keys, sources, [None] * len(keys))
        loads = self.jobs[-RANKS:]
        for job in loads:
            for copy, location in zip(job.copies, grant.locations, strict=True):
                copy.source = location  # NOWHERE too: a rank answers it
        if grant.landing_ticket:
            self.open_ticket(
                "landing",
                grant.landing_ticket,
                [keys[position] for position in landed],
                [None] * len(landed),
                [landings[position] for position in landed],
            )
            for load, job in zip(loads, self.jobs[-RANKS:], strict=True):
                job.load, job.copies = load, [load.copies[position] for position in landed]
                for position, copy in zip(landed, job.copies, strict=True):
                    copy.target = landings[position]

    @precondition(lambda self: self.catalog.has_moves)
    @rule()
    def begin_moves(self) -> None:
        had_moves = self.catalog.has_moves
        before = {position: dict(self.ready(position)) for position in self.slots}
        grants = self.catalog.begin_moves(self.world.now_s)
        assert had_moves or not grants, "an idle engine would not have been stepped for it"
        for grant in grants:
            for key, source, target in zip(grant.keys, grant.sources, grant.targets, strict=True):
                assert source.tier != target.tier
                assert key not in before.get(target.tier, {})
                assert all(key not in ready for tier, ready in before.items() if tier < source.tier), "a detour"
                SEEN[f"move {source.tier}{target.tier}"] += 1
            self.open_ticket("move", grant.ticket, grant.keys, grant.sources, grant.targets)

    @rule(seconds=st.sampled_from([0.0, 0.5, 3.0, PATIENCE_S + 1.0, 700.0]))
    def time_passes(self, seconds: float) -> None:
        self.step_ends()
        self.world.now_s += seconds

    # What ranks do.

    def open_ticket(
        self,
        kind: str,
        number: int,
        keys: Sequence[Key],
        sources: Sequence[Location | None],
        targets: Sequence[Location | None],
    ) -> None:
        assert number not in self.tickets
        self.tickets[number] = Ticket(kind, tuple(keys), tuple(sources), tuple(targets))
        for key, target in zip(keys, targets, strict=True):
            if target is not None:
                self.check_place(key, target)
                if self.kinds[target.tier] == "shared":
                    self.world.sure.discard(key)
        for rank in range(RANKS):
            copies = [
                Copy(key, source, target, bytearray(slot_bytes(key)))
                for key, source, target in zip(keys, sources, targets, strict=True)
            ]
            self.jobs.append(Job(rank, kind, number, copies))

    def check_place(self, key: Key, place: Location) -> None:
        assert place.slot_bytes == slot_bytes(key)
        if place.tier not in self.slots:
            return
        assert 0 <= place.offset <= self.slots[place.tier].place.rank_bytes - place.slot_bytes
        for other in self.tainted:
            assert not overlap(place, other), "a tainted place was given away"
        holders = sum(
            overlap(place, held)
            for ticket in self.tickets.values()
            for held in (*ticket.sources, *ticket.targets)
            if held is not None
        )
        assert holders == 1, "a place was given away that is in use"

    def unfinished(self) -> list[Job]:
        """Return the jobs that a rank may end next: a landing ends no sooner than its load."""
        return [
            job for job in self.jobs if job.outcomes is None and (job.load is None or job.load.outcomes is not None)
        ]

    def finished(self) -> list[Job]:
        """Return the jobs of which a rank may tell next."""
        return [job for job in self.jobs if job.outcomes is not None]

    @precondition(lambda self: self.unfinished())
    @rule(pick=any_of)
    def work(self, pick: int) -> None:
        """A rank does half of a job."""
        jobs = self.unfinished()
        job = jobs[pick % len(jobs)]
        for copy in job.copies:
            if not copy.moved and self.may_begin(copy):
                self.world.advance(job.rank, copy)

    def may_begin(self, copy: Copy) -> bool:
        if copy.source is not None and copy.source.tier < 0:
            return False
        return self.world.file_works or copy.target is None or self.kinds[copy.target.tier] != "file"

    @precondition(lambda self: self.unfinished())
    @rule(pick=any_of, fates=fates, is_told=st.booleans())
    def finish(self, pick: int, fates: Mapping[int, Outcome], is_told: bool) -> None:
        """A rank ends a job, and may tell of it at once."""
        jobs = self.unfinished()
        job = jobs[pick % len(jobs)]
        self.end(job, fates)
        if is_told:
            self.tell(job)

    @precondition(lambda self: self.finished())
    @rule(pick=any_of, many=st.integers(1, 5))
    def acknowledge(self, pick: int, many: int) -> None:
        for number in range(many):
            if done := self.finished():
                self.tell(done[(pick >> number) % len(done)])

    @precondition(lambda self: self.jobs)
    @rule(pick=any_of, fates=fates)
    def finish_all(self, pick: int, fates: Mapping[int, Outcome]) -> None:
        """Every rank ends all it has, without trouble but for one job, and tells of it."""
        troubled = self.jobs[pick % len(self.jobs)]
        while self.jobs:
            job = (self.unfinished() or self.jobs)[0]
            if job.outcomes is None:
                self.end(job, fates if job is troubled else {})
            self.tell(job)

    def all_goes_well(self) -> None:
        if self.jobs:
            self.finish_all(0, {})

    @rule()
    def move_all(self) -> None:
        """The chain keeps up."""
        for _ in range(4):
            self.all_goes_well()
            self.begin_moves()

    def end(self, job: Job, fates: Mapping[int, Outcome]) -> None:
        world, outcomes = self.world, []
        fates = {position % len(job.copies): fate for position, fate in fates.items()}
        for position, copy in enumerate(job.copies):
            fate = fates.get(position, Outcome.OK)
            if copy.source is not None and copy.source.tier < 0:
                outcome = Outcome.FAILED
            elif job.kind == "load":
                # Whoever gives a load up leaves its landing to come in later, or not at all.
                outcome = world.complete(job.rank, copy) if fate is Outcome.OK else without_place(fate)
                if fate is Outcome.OK:
                    copy.outcome = outcome
                else:
                    copy.given_up = True
            elif fate is Outcome.OK:
                outcome = copy.outcome or world.complete(job.rank, copy)
            else:
                outcome = fate
                if fate is Outcome.TAINTED:
                    world.taint(job.rank, copy)
            outcomes.append(outcome)
            SEEN[f"{job.kind} {outcome.value}"] += 1
        job.outcomes = outcomes

    def tell(self, job: Job) -> None:
        """One rank's report of one ticket arrives."""
        assert job.outcomes is not None
        self.jobs.remove(job)
        ticket = self.tickets[job.ticket]
        failures = {position: outcome for position, outcome in enumerate(job.outcomes) if outcome is not Outcome.OK}
        for position, outcome in failures.items():
            ticket.failed[position] = worst(ticket.failed.get(position, Outcome.OK), outcome)
        ticket.ranks_left -= 1
        if not ticket.ranks_left:
            del self.tickets[job.ticket]
        settled = self.catalog.report(job.ticket, 1, failures, self.world.now_s)
        self.wait_for_threads()
        assert (settled is None) == bool(ticket.ranks_left)
        if settled is not None:
            assert settled.kind == ticket.kind
            assert settled.keys == ticket.keys
            assert settled.failed == {ticket.keys[position]: outcome for position, outcome in ticket.failed.items()}
            for position, key in enumerate(ticket.keys):
                self.check_settled(ticket, key, position)

    def check_settled(self, ticket: Ticket, key: Key, position: int) -> None:
        source, target = ticket.sources[position], ticket.targets[position]
        outcome = ticket.failed.get(position, Outcome.OK)
        if target is None:
            if source is not None and source.tier not in self.slots and outcome is not Outcome.OK:
                self.world.sure.discard(key)
            if source is not None and outcome in {Outcome.FAILED, Outcome.CORRUPT}:
                assert self.tiers[source.tier].state(key) is not State.READY, "would be served again"
            return
        state = self.tiers[target.tier].state(key)
        if target.tier in self.slots:
            if self.kinds[target.tier] == "file":
                self.world.doubtful = {doubt for doubt in self.world.doubtful if doubt[0] != key}
            if outcome is Outcome.TAINTED:
                self.tainted.append(target)
            if outcome is Outcome.OK and not ticket.is_cleared:
                assert state is State.READY
                assert self.ready(target.tier)[key] == target
            else:
                assert state is None
        elif outcome is not Outcome.OK:
            assert state is None or state is State.EVICTING
        elif not ticket.is_cleared:
            assert state is State.READY
            if self.world.is_stored(key):
                self.world.sure.add(key)
            else:
                assert self.world.meddled.intersection(self.world.names(key)), "READY before every rank had stored it"

    @precondition(lambda self: self.world.late_writers)
    @rule()
    def write_late(self) -> None:
        for writer in self.world.late_writers:
            self.world.write_late(writer)
            SEEN["late write"] += 1

    # What storage, other servers and operators do.

    @rule(
        what=st.sampled_from(
            ["file fails", "bucket fails", "all works", "all works", "written", "written", "rest", "lost"]
        )
    )
    def storage(self, what: str) -> None:
        if what == "all works":
            self.world.file_works = self.world.bucket.reachable = True
        elif what == "file fails":
            self.world.file_works = False
        elif what == "bucket fails":
            self.world.bucket.reachable = False
        elif what == "written":
            self.twin_is_written()
        elif what == "rest":
            self.come_to_rest()
        elif self.file is not None:
            self.file._lost.set()  # as when another engine has taken a directory that had vanished
            SEEN["file lost"] += 1

    def twin_is_written(self) -> None:
        """The durable twin catches up."""
        if self.file is not None:
            assert self.file._durable.flush(20.0)
            self.flushed = self.ready(self.file._position)
            self.flushed_doubts = set(self.world.doubtful)
            self.world.dirty.clear()

    @rule(
        key=st.sampled_from(KEYS),
        rank=st.integers(0, RANKS - 1),
        what=st.sampled_from(["put", "delete", "cut", "flip"]),
    )
    def others(self, key: Key, rank: int, what: str) -> None:
        """Other servers store chunks, and delete or damage shards."""
        if what == "put":
            self.world.others_put(key)
        elif what == "delete":
            self.world.others_delete(key, rank)
        else:
            self.world.others_spoil(key, rank, cut=what == "cut")

    @rule(
        what=st.sampled_from(["nothing", "nothing", "nothing", "reset", "restart", "kill"]),
        progress=st.lists(st.integers(0, 2), max_size=8),
    )
    def upheaval(self, what: str, progress: Sequence[int]) -> None:
        """``progress``: how far ranks go on with what they had begun."""
        if what == "reset":
            self.reset()
        elif what != "nothing":
            self.end_engine(what == "restart", progress)

    def reset(self) -> None:
        self.check_changes()
        self.catalog.clear()
        self.wait_for_threads()
        self.world.sure.clear()
        for told in self.told.values():
            told.clear()
        for ticket in self.tickets.values():
            ticket.is_cleared = True
        for key in KEYS:
            assert self.nearest(key, None) is None
        self.twin_is_written()
        SEEN["reset"] += 1

    def end_engine(self, clean: bool, progress: Sequence[int]) -> None:
        """The engine ends, by itself or by a kill, at any moment of anything, and another begins."""
        world = self.world
        pending = {
            (target.tier, key): target
            for ticket in self.tickets.values()
            for key, target in zip(ticket.keys, ticket.targets, strict=True)
            if target is not None and self.tiers[target.tier].state(key) is State.WRITING
        }
        expected, doubts = self.flushed, set(self.flushed_doubts)
        if self.file is not None:
            position = self.file._position
            if clean:
                in_flight = self.catalog.in_flight_stores()
                assert sorted(in_flight) == sorted(pending)
                unreported = {key: target for (tier, key), target in pending.items() if tier == position}
                expected = {**self.ready(position), **unreported}
                world.dirty.clear()
                doubts = world.doubtful | {(key, target.offset) for key, target in unreported.items()}
                self.file.close([key for tier, key in in_flight if tier == position])
            else:
                self.file._durable.abandon()
        for tier in self.tiers:
            tier.close()
        # What the ranks had begun ends somewhere, after the last word of the scheduler's half.
        for number, job in enumerate(self.jobs):
            for copy in job.copies if job.outcomes is None else ():
                if copy.target is not None and self.kinds[copy.target.tier] != "memory":
                    for _ in range(progress[number % len(progress)] if progress else 0):
                        self.let_go_on(job.rank, copy)
        for number, writer in enumerate(world.late_writers):
            if progress and progress[number % len(progress)]:
                world.write_late(writer)
        world.die()
        self.open_engine()
        if self.file is not None:
            found = self.ready(self.file._position)
            assert found == expected, "the durable twin says something else than the index did"
            doubts |= {(key, place.offset) for key, place in found.items() if world.is_dirty(place)}
            world.doubtful = doubts & {(key, place.offset) for key, place in found.items()}
            self.flushed_doubts = set(world.doubtful)
            self.flushed = found
            world.dirty.clear()
            SEEN["found after a restart"] += len(found)
        SEEN["clean restart" if clean else "killed"] += 1

    def let_go_on(self, rank: int, copy: Copy) -> None:
        try:
            if self.may_begin(copy):
                if copy.moved == 1:
                    self.world.complete(rank, copy)
                else:
                    self.world.advance(rank, copy)
        except StoreError:
            pass

    # What must hold.

    def come_to_rest(self) -> None:
        """Whatever is broken: everything under way ends, nothing waits for ever, and nothing is left behind."""
        for _ in range(200):
            self.all_goes_well()
            self.begin_moves()
            self.step_ends()
            self.world.now_s += 5.0
            self.check_changes()
            if not self.tickets and not self.catalog.has_moves:
                break
        else:
            raise AssertionError(f"never at rest: {self.catalog.counts()}")
        assert self.catalog.open_tickets == 0
        assert self.catalog.backlog_bytes == 0
        assert self.catalog.counts().unsaved_bytes == 0
        for tier in self.slots.values():
            for occupancy in tier.occupancy().values():
                assert occupancy.writing == occupancy.pinned == occupancy.evicting == 0, "a pin or a place is left"
        if self.shared is not None:
            assert self.shared._presence.held == 0, "a pin or a reservation is left"
        SEEN["rest"] += 1

    def check_that_all_is_well_again(self) -> None:
        """Nothing stays broken: once storage works, what is stored gets everywhere and is served from everywhere."""
        self.world.file_works = self.world.bucket.reachable = True
        self.world.now_s += 100_000.0
        for _ in range(5):
            self.step_ends()
            self.world.now_s += 100.0
        works = [
            position
            for position, tier in enumerate(self.tiers)
            if position not in {place.tier for place in self.tainted}
            and not (isinstance(tier, FileTier) and tier._lost.is_set())
        ]
        for key in FRESH:
            for _ in range(self.store_after):
                self.offer([key])
            self.come_to_rest()
            for position in works:
                assert self.tiers[position].state(key) is State.READY, f"tier {position} did not get it"
                self.load([key], [position])
                assert self.last_load[0].tier == position
                self.come_to_rest()
        self.agrees()

    @invariant()
    def agrees(self) -> None:
        if not self.tiers:
            return
        self.check_changes()
        for position, tier in self.slots.items():
            self.check_slab(position, tier)
        if self.shared is not None:
            self.shared._presence.check()
        assert self.catalog.open_tickets == len(self.tickets)
        self.check_bounds()
        if not self.tickets and not self.catalog.has_moves:
            for tier in self.slots.values():
                assert all(o.writing == o.pinned == o.evicting == 0 for o in tier.occupancy().values())

    def check_slab(self, position: int, tier: SlotTier) -> None:
        index, allocator = tier._index, tier._allocator
        index.check()
        for key, place in self.ready(position).items():
            assert self.world.is_whole(key, place) or (key, place.offset) in self.world.doubtful, (
                f"READY in tier {position} and not whole"
            )
        places = {key: index.location(key) for key in index._nodes}
        tainted = [place for place in self.tainted if place.tier == position]
        for key, place in places.items():
            assert not any(overlap(place, other) for other in tainted), f"{key.hex()} lies in a tainted place"
        for size in SLOT_CLASSES:
            taken = sum(place.slot_bytes == size for place in (*places.values(), *tainted))
            assert allocator.used_slots(size) == taken, "a slot was lost, or given back while in use"
        assert allocator.used_bytes <= allocator.rank_bytes
        for ticket in self.tickets.values():
            for key, *held in zip(ticket.keys, ticket.sources, ticket.targets, strict=True):
                for place in held:
                    if place is not None and place.tier == position:
                        assert places.get(key) == place, "a place was given back while a rank may touch it"

    def check_bounds(self) -> None:
        storing, moving = Counter[int](), Counter[int]()
        pinned = Counter[tuple[int, Key]]()
        for ticket in self.tickets.values():
            for key, source, target in zip(ticket.keys, ticket.sources, ticket.targets, strict=True):
                if source is not None:
                    pinned[source.tier, key] += 1
                if target is not None and ticket.kind == "store":
                    storing[target.tier] += target.slot_bytes
                if target is not None and ticket.kind == "move":
                    moving[target.tier] += target.slot_bytes
        assert all(size <= max(self.store_backlog, SLOT_MAX) for size in storing.values())
        assert all(size <= max(self.chain.move_backlog_bytes, SLOT_MAX) for size in moving.values())
        unsaved = 0
        for position, tier in self.slots.items():
            for key, node in tier._index._nodes.items():
                surplus = tier._index._pins.get(node, 0) - pinned[position, key]
                assert surplus == 0 or (surplus == 1 and position == self.chain.memory and self.chain.pin_unsaved)
                unsaved += surplus * slot_bytes(key)
        assert unsaved <= self.chain.unsaved_limit_bytes
        assert unsaved == self.catalog.counts().unsaved_bytes
        SEEN["pinned unsaved"] += unsaved > 0

    def check_changes(self) -> None:
        for change in self.catalog.take_changes():
            if change.tier in self.told:
                told = self.told[change.tier]
                for key in change.keys:
                    assert (key in told) == change.removed, "told of what had not happened"
                    (told.discard if change.removed else told.add)(key)
                    SEEN["evicted or dropped"] += change.removed
        for position, told in self.told.items():
            assert told == set(self.ready(position)), "a change was not told"


def overlap(one: Location, other: Location) -> bool:
    return (
        one.tier == other.tier
        and one.offset < other.offset + other.slot_bytes
        and other.offset < one.offset + one.slot_bytes
    )


def without_place(fate: Outcome) -> Outcome:
    """What a load says of a chunk for which it did not wait: where it lands is told later."""
    return Outcome.FAILED if fate is Outcome.TAINTED else fate


def test_chain() -> None:
    SEEN.clear()
    run_state_machine_as_test(
        ChainMachine,
        settings=settings(
            max_examples=EXAMPLES or 100,
            stateful_step_count=50,
            derandomize=not EXAMPLES,
            database=None,
            report_multiple_bugs=False,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    everywhere = ["move 01", "move 02", "move 12", "move failed", "landing ok", "store tainted", "late write", "rest"]
    everywhere += ["pinned unsaved", "evicted or dropped", "reset", "clean restart", "killed", "found after a restart"]
    assert not [what for what in everywhere if not SEEN[what]], "the model does not get there"


class BucketRig(StoreRig):
    """The bucket itself is the raw access."""

    def __init__(self) -> None:
        self._bucket = Bucket()
        super().__init__(ObjectStore(self._bucket, write_s=0.002))

    def raw_set(self, contents: Mapping[str, bytes]) -> None:
        self._bucket.objects.update({name: (content, time.time()) for name, content in contents.items()})

    def raw_get(self, name: str) -> bytes | None:
        found = self._bucket.objects.get(name)
        return found and found[0]


class TestBucket(StoreSuite):
    """What the shared tier of the model rests on is a store like any other."""

    @pytest.fixture
    def rig(self) -> Iterator[StoreRig]:
        rig = BucketRig()
        yield rig
        rig.close()
