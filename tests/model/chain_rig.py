"""Drives an engine after another over a ``World`` as vLLM and the ranks drive it, and checks what each call may answer.

Threading: one thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from nixl_offload.index import State
from nixl_offload.types import Key, Location, Lookup, LookupContext, Outcome, worst
from tests.model.chain_engine import (
    NAMESPACE,
    Engine,
    Job,
    Setup,
    Ticket,
    check_changes,
    check_everything,
    check_nothing_is_held,
    check_place,
    check_settled,
)  # fmt: skip
from tests.model.chain_world import RANKS, Copy, World, slot_bytes
from tests.unit.shared_rig import key_of

FRESH = [key_of(number, number % 2) for number in range(1000, 1002)]
"""Keys that nobody uses until the end; one of each size."""
MOST_STEPS = 200
"""More than it takes until nothing is under way, at five seconds each."""


class ChainRig:
    """The world, the engine of the moment, and what the index has on disk."""

    def __init__(self, path: Path, setup: Setup) -> None:
        """Begin with nothing stored. ``path`` is made, and stays."""
        self.path = path
        self.world = World(setup.kinds, NAMESPACE.name)
        self.engine = Engine(setup, self.world, path)
        self.seen: Counter[str] = Counter()
        """What has happened, so that a model that never gets anywhere is noticed."""
        self.flushed: dict[Key, Location] = {}
        self.flushed_doubts: set[tuple[Key, int]] = set()
        """Of what is on disk, that which may not be whole."""

    def check(self) -> None:
        """All that holds at any time."""
        check_everything(self.engine, self.seen)

    def step_ends(self) -> None:
        """Let tiers begin, and finish, what lookups have asked for."""
        self.engine.catalog.on_step(self.world.now_s)
        self.engine.wait_for_threads()

    # What vLLM does.

    def store(self, keys: Sequence[Key]) -> None:
        """A prompt was computed."""
        engine = self.engine
        engine.offers.update(keys)
        leaving = keys[::2] if engine.is_exclusive else ()
        grant = engine.catalog.reserve(keys, self.world.now_s, leaving=leaving)
        engine.catalog.give_up([key for key in keys if key not in leaving])
        if grant is None:
            return
        assert len(set(grant.keys)) == len(grant.keys)
        assert set(grant.keys) <= set(keys)
        for key in grant.keys:
            assert engine.nearest(key) is None or (key in leaving and engine.nearest(key)), "stored what is there"
            assert engine.offers[key] >= engine.setup.store_after, "stored too early"
        self._open_ticket("store", grant.ticket, grant.keys, [None] * len(grant.keys), grant.locations)
        self.seen["store passed over the nearest tier"] += any(location.tier > 0 for location in grant.locations)

    def look_up(
        self, request: str, keys: Sequence[Key], first_end: int, allowed: Collection[int] | None
    ) -> list[Lookup]:
        """Look a prompt up as vLLM does: on after anything but a miss."""
        answers: list[Lookup] = []
        for position, key in enumerate(keys):
            context = LookupContext(request, first_end + 16 * position)
            answers.append(self.engine.catalog.lookup(key, self.world.now_s, context, allowed=allowed))
            if answers[-1] is Lookup.HIT:
                nearest = self.engine.nearest(key, allowed)
                assert nearest is not None
                assert self.engine.catalog.where((key,), allowed) == [nearest]
            elif answers[-1] is Lookup.MISS:
                break
        return answers

    def load(self, keys: Sequence[Key], allowed: Collection[int] | None) -> tuple[Location, ...]:
        """Begin a load; return from where."""
        engine = self.engine
        nearest = [engine.nearest(key, allowed) for key in keys]
        grant = engine.catalog.prepare_load(keys, self.world.now_s, allowed)
        assert grant.keys == tuple(keys)
        slots = grant.promotion_slots or (None,) * len(keys)
        promoted = [position for position, slot in enumerate(slots) if slot is not None]
        assert bool(grant.promotion_ticket) == bool(promoted)
        for tier, location, slot in zip(nearest, grant.locations, slots, strict=True):
            assert location.tier == (-1 if tier is None else tier), "not the nearest that has it"
            if slot is not None:
                assert not engine.is_exclusive
                assert slot.tier == engine.setup.chain.memory == 0
                assert location.tier > 0
        sources = [None if location.tier < 0 else location for location in grant.locations]
        self._open_ticket("load", grant.ticket, grant.keys, sources, [None] * len(keys))
        loads = engine.jobs[-RANKS:]
        for job in loads:
            for copy, location in zip(job.copies, grant.locations, strict=True):
                copy.source = location  # NOWHERE too: a rank answers it
        if promoted:
            places = [slots[position] for position in promoted]
            promoted_keys = [keys[position] for position in promoted]
            self._open_ticket("promotion", grant.promotion_ticket, promoted_keys, [None] * len(promoted), places)
            for load, job in zip(loads, engine.jobs[-RANKS:], strict=True):
                job.load, job.copies = load, [load.copies[position] for position in promoted]
                for place, copy in zip(places, job.copies, strict=True):
                    copy.target = place
        return grant.locations

    def begin_moves(self) -> None:
        """Begin pending writes."""
        engine = self.engine
        had_pending = engine.catalog.moves.has_pending
        before = {position: engine.ready(position) for position in engine.slots}
        grants = engine.catalog.begin_moves(self.world.now_s)
        assert had_pending or not grants, "an idle engine would not have been stepped for it"
        for grant in grants:
            for key, source, target in zip(grant.keys, grant.sources, grant.targets, strict=True):
                assert source.tier < target.tier
                assert key not in before.get(target.tier, {}), "it is there"
                assert all(key not in ready for tier, ready in before.items() if tier < source.tier), "a detour"
                self.seen[f"write_through {source.tier}{target.tier}"] += 1
            self._open_ticket("write_through", grant.ticket, grant.keys, grant.sources, grant.targets)

    # What ranks do.

    def unfinished(self) -> list[Job]:
        """Return the jobs that a rank may end next: a promotion ends no sooner than its load."""
        jobs = [job for job in self.engine.jobs if job.outcomes is None]
        return [job for job in jobs if job.load is None or job.load.outcomes is not None]

    def finished(self) -> list[Job]:
        """Return the jobs of which a rank may tell next."""
        return [job for job in self.engine.jobs if job.outcomes is not None]

    def work(self, job: Job) -> None:
        """A rank does half of a job."""
        for copy in job.copies:
            if not copy.moved and self._may_begin(copy):
                self.world.advance(job.rank, copy)

    def end(self, job: Job, fates: Mapping[int, Outcome]) -> None:
        """A rank does the rest. ``fates``: what fails, by position modulo the length of the job."""
        world = self.world
        fates = {position % len(job.copies): fate for position, fate in fates.items()}
        job.outcomes = []
        for position, copy in enumerate(job.copies):
            fate = fates.get(position, Outcome.OK)
            if copy.source is not None and copy.source.tier < 0:
                outcome = Outcome.FAILED
            elif job.kind == "load" and fate is not Outcome.OK:
                # Its promotion may come in later, or not at all.
                copy.given_up = True
                outcome = Outcome.FAILED if fate is Outcome.TAINTED else fate
            elif fate is Outcome.OK:
                outcome = copy.outcome = copy.outcome or world.complete(job.rank, copy)
            else:
                outcome = fate
                if fate is Outcome.TAINTED:
                    world.taint(job.rank, copy)
            job.outcomes.append(outcome)
            self.seen[f"{job.kind} {outcome.value}"] += 1

    def tell(self, job: Job) -> None:
        """One rank's report of one ticket arrives."""
        assert job.outcomes is not None
        engine = self.engine
        engine.jobs.remove(job)
        ticket = engine.tickets[job.ticket]
        failures = {position: outcome for position, outcome in enumerate(job.outcomes) if outcome is not Outcome.OK}
        for position, outcome in failures.items():
            ticket.failed[position] = worst(ticket.failed.get(position, Outcome.OK), outcome)
        ticket.ranks_left -= 1
        if not ticket.ranks_left:
            del engine.tickets[job.ticket]
        settled = engine.catalog.report(job.ticket, 1, failures, self.world.now_s)
        engine.wait_for_threads()
        assert (settled is None) == bool(ticket.ranks_left)
        if settled is not None:
            assert settled.kind == ticket.kind
            assert settled.keys == ticket.keys
            assert settled.failed == {ticket.keys[position]: outcome for position, outcome in ticket.failed.items()}
            for position in range(len(ticket.keys)):
                check_settled(engine, ticket, position)
                self._take_note(ticket, position)

    def finish_many(self, many: int, trouble: int = 0, fates: Mapping[int, Outcome] | None = None) -> None:
        """Ranks end the oldest jobs, without trouble but for one, and tell of them."""
        jobs = self.engine.jobs
        troubled = jobs[trouble % len(jobs)] if jobs else None
        for _ in range(min(many, len(jobs))):
            job = (self.unfinished() or jobs)[0]
            if job.outcomes is None:
                self.end(job, fates or {} if job is troubled else {})
            self.tell(job)

    def finish_all(self) -> None:
        """Nothing is left to ranks."""
        self.finish_many(len(self.engine.jobs))

    def keep_up(self) -> None:
        """Moves, too, though not all that were waiting."""
        for _ in range(4):
            self.finish_all()
            self.begin_moves()

    # What operators do.

    def write_index(self) -> None:
        """The index on disk catches up."""
        file = self.engine.file
        if file is not None:
            assert file._durable.flush(20.0)
            self.flushed = self.engine.ready(file._position)
            self.flushed_doubts = set(self.world.doubtful)
            self.world.dirty.clear()

    def reset(self, used: Sequence[Key]) -> None:
        """The cache is reset. ``used``: the keys there may be."""
        engine = self.engine
        check_changes(engine, self.seen)
        engine.catalog.clear()
        engine.wait_for_threads()
        self.world.sure.clear()
        for told in engine.told.values():
            told.clear()
        for ticket in engine.tickets.values():
            ticket.is_cleared = True
        assert all(engine.nearest(key) is None for key in used)
        assert not engine.catalog.moves.has_pending
        self.write_index()
        self.seen["reset"] += 1

    def restart(self, *, clean: bool, progress: Sequence[int]) -> None:
        """The engine ends, by itself or by a kill, at any moment of anything, and another begins.

        ``progress``: by how many halves ranks still go on with what they had begun.
        """
        engine, world = self.engine, self.world
        expected, doubts = self.flushed, set(self.flushed_doubts)
        if engine.file is not None and not clean:
            engine.file._durable.abandon()
        elif engine.file is not None:
            position = engine.file._position
            pending = self._pending()
            in_flight = engine.catalog.in_flight_stores()
            assert sorted(in_flight) == sorted(pending)
            unreported = {key: place for (tier, key), place in pending.items() if tier == position}
            expected = {**engine.ready(position), **unreported}
            doubts = world.doubtful | {(key, place.offset) for key, place in unreported.items()}
            world.dirty.clear()
            engine.file.close([key for tier, key in in_flight if tier == position])
            self.seen["written after the end"] += len(unreported)
        engine.close()
        for number, job in enumerate(engine.jobs if progress else ()):
            self._let_go_on(job, progress[number % len(progress)])
        for number, writer in enumerate(world.late_writers if progress else ()):
            if progress[number % len(progress)]:
                world.write_late(writer)
        world.die()
        self.engine = engine = Engine(engine.setup, world, self.path)
        if engine.file is not None:
            found = engine.ready(engine.file._position)
            assert found == expected, "the index on disk says something else than the one in memory did"
            doubts |= {(key, place.offset) for key, place in found.items() if world.is_dirty(place)}
            world.doubtful = doubts & {(key, place.offset) for key, place in found.items()}
            self.flushed, self.flushed_doubts = found, set(world.doubtful)
            world.dirty.clear()
            self.seen["found after a restart"] += len(found)
        self.seen["restart" if clean else "kill"] += 1

    def come_to_rest(self) -> None:
        """Whatever is broken: all that is under way ends, nothing waits for ever, and nothing is left behind."""
        for _ in range(MOST_STEPS):
            self.finish_all()
            self.begin_moves()
            self.step_ends()
            self.world.now_s += 5.0
            check_changes(self.engine, self.seen)
            if not self.engine.tickets and not self.engine.catalog.moves.has_pending:
                break
        else:
            raise AssertionError(f"never at rest: {self.engine.catalog.counts}")
        check_nothing_is_held(self.engine)

    def recover(self) -> None:
        """Storage works again: what is stored gets everywhere and is served from everywhere."""
        self.world.file_works = self.world.reachable = True
        self.world.now_s += 100_000.0
        for _ in range(5):
            self.step_ends()
            self.world.now_s += 100.0
        engine = self.engine
        gone = {place.tier for place in engine.tainted}
        if engine.file is not None and engine.file._lost.is_set():
            gone.add(engine.file._position)
        for key in FRESH:
            for _ in range(engine.setup.store_after):
                self.store([key])
            self.come_to_rest()
            for position, tier in enumerate(engine.tiers):
                if position not in gone and (position or not engine.is_exclusive):  # which may give it up at once
                    assert tier.state(key) is State.READY, f"tier {position} did not get it"
                    assert self.load([key], [position])[0].tier == position
                    self.come_to_rest()
        self.check()

    def forget_what_failed(self) -> None:
        """A chunk whose load failed is not found again by the next engine, if only files are asked."""
        file = self.engine.file
        if file is None:
            return
        self.load(FRESH, [file._position])
        for job in self.engine.jobs[:RANKS]:
            self.end(job, {0: Outcome.FAILED})
        self.finish_all()
        check_changes(self.engine, self.seen)
        self.restart(clean=True, progress=[])
        assert self.engine.nearest(FRESH[0], [file._position]) is None
        self.check()

    # Inside

    def _open_ticket(
        self,
        kind: str,
        number: int,
        keys: Sequence[Key],
        sources: Sequence[Location | None],
        targets: Sequence[Location | None],
    ) -> None:
        engine = self.engine
        assert number not in engine.tickets
        engine.tickets[number] = Ticket(kind, tuple(keys), tuple(sources), tuple(targets))
        for key, target in zip(keys, targets, strict=True):
            if target is not None:
                check_place(engine, key, target)
                if target.tier not in engine.slots:
                    self.world.sure.discard((target.tier, key))
        for rank in range(RANKS):
            copies = [
                Copy(key, source, target, bytearray(slot_bytes(key)))
                for key, source, target in zip(keys, sources, targets, strict=True)
            ]
            engine.jobs.append(Job(rank, kind, number, copies))

    def _may_begin(self, copy: Copy) -> bool:
        if copy.source is not None and copy.source.tier < 0:
            return False
        return self.world.file_works or copy.target is None or self.world.kinds[copy.target.tier] != "slab"

    def _take_note(self, ticket: Ticket, position: int) -> None:
        """Tell the world what it may no longer excuse, and what it must."""
        key, source, target = ticket.keys[position], ticket.sources[position], ticket.targets[position]
        outcome = ticket.failed.get(position, Outcome.OK)
        if source is not None and outcome is not Outcome.OK:
            self.world.sure.discard((source.tier, key))
        if target is None:
            return
        if outcome is Outcome.TAINTED and target.tier in self.engine.slots:
            self.engine.tainted.append(target)
        if self.world.kinds[target.tier] == "slab":
            self.world.doubtful = {doubt for doubt in self.world.doubtful if doubt[0] != key}
        elif outcome is Outcome.OK and not ticket.is_cleared and self._is_stored(key, target):
            self.world.sure.add((target.tier, key))

    def _is_stored(self, key: Key, target: Location) -> bool:
        return target.tier in self.world.buckets and self.world.is_stored(key, target.tier)

    def _pending(self) -> dict[tuple[int, Key], Location]:
        """Return what is being written under open tickets, and where."""
        return {
            (target.tier, key): target
            for ticket in self.engine.tickets.values()
            for key, target in zip(ticket.keys, ticket.targets, strict=True)
            if target is not None and self.engine.tiers[target.tier].state(key) is State.WRITING
        }

    def _let_go_on(self, job: Job, halves: int) -> None:
        """A rank writes on, untold, after the scheduler's half has ended."""
        for copy in job.copies if job.outcomes is None else ():
            if copy.target is None or self.world.kinds[copy.target.tier] == "memory" or not self._may_begin(copy):
                continue
            if halves == 2:
                self.world.complete(job.rank, copy)
            elif halves == 1 and not copy.moved:
                self.world.advance(job.rank, copy)
