"""A rank's tiers: memory and two slabs, each with its pump and the copy mover's threads, and a caller that stores,
loads, moves, waits for blocks to be free, and closes, at any time.

What must hold: every job and every ticket ends once; what is OK has exactly its bytes; blocks that were given back are
not touched any more, and what was read from them before is what was in them; relay slots and staging come back.
Nothing fails here, so nothing may fail unless it was waited for or closed.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from nixl_offload.chunk.checksum import block_checksums
from nixl_offload.chunk.header import HEADER_BYTES, Expected, check_header, verify_checksums
from nixl_offload.engine import host
from nixl_offload.engine.chain import ChainEngine
from nixl_offload.engine.jobs import JobTable
from nixl_offload.engine.pump import LEAKED, Pump
from nixl_offload.engine.slot_headers import SlotHeaders
from nixl_offload.types import Outcome
from tests.prove.races.exploring import Run, Scenario
from tests.unit.chain_rig import BUCKET, FILE, MEMORY, ChainRig
from tests.unit.engine_rig import CHUNK_BLOCKS, NAMESPACE, NUM_BLOCKS

host._huge_bytes = lambda region: 0  # half of a run's time, for a line in the log

UNTIL_S = 3.0
WAITED = {Outcome.OK, Outcome.DROPPED, Outcome.FAILED}


@dataclass(slots=True)
class _Job:
    number: int
    """Of the chunk."""
    writes: bool
    tier: int
    blocks: list[int]
    held: bool = True
    """Its blocks are its own."""


@dataclass(slots=True)
class Play:
    """A rig, and what is known of what it was asked to do."""

    rig: ChainRig
    chance: random.Random
    jobs: dict[int, _Job] = field(default_factory=dict)
    tickets: dict[int, tuple[int, int, tuple[int, ...]]] = field(default_factory=dict)
    """Ticket -> source and target tier, chunks."""
    free: list[int] = field(default_factory=lambda: list(range(NUM_BLOCKS)))
    given_back: dict[int, npt.NDArray[np.uint8]] = field(default_factory=dict)
    """Blocks that are somebody else's now, and what they hold."""
    numbers: int = 0
    is_cut_short: bool = False

    def take_blocks(self) -> list[int]:
        taken, self.free = self.free[:CHUNK_BLOCKS], self.free[CHUNK_BLOCKS:]
        return taken

    def next(self) -> int:
        self.numbers += 1
        return self.numbers - 1

    def fill(self, block_ids: list[int], rows: npt.NDArray[np.uint8]) -> None:
        at = 0
        for tensor, offset, length in self.rig.shape.groups[0].refs:
            self.rig.kv[tensor][block_ids, offset : offset + length] = rows[:, at : at + length]
            at += length

    # What a caller does.

    def store(self, tier: int) -> int:
        number, job_id, blocks = self.next(), 100 + len(self.jobs), self.take_blocks()
        self.fill(blocks, self.rig.payload(number))
        self.jobs[job_id] = _Job(number, True, tier, blocks)
        self.rig.chain.submit_store(job_id, [self.rig.chunk(number, tier, blocks)])
        return number

    def load(self, tier: int, *, promoted: bool = False, number: int | None = None) -> None:
        job_id, blocks = 100 + len(self.jobs), self.take_blocks()
        if number is None:
            number = self.next()
            self.put(tier, number)
        ticket = 0
        if promoted:
            ticket = 1000 + len(self.tickets)
            self.tickets[ticket] = (tier, MEMORY, (number,))
        self.jobs[job_id] = _Job(number, False, tier, blocks)
        chunk = self.rig.chunk(number, tier, blocks, host=number if promoted else None)
        self.rig.chain.submit_load(job_id, [chunk], promotion_ticket=ticket)

    def move(self, source: int, target: int, *, numbers: tuple[int, ...] = (), count: int = 1) -> None:
        if not numbers:
            numbers = tuple(self.next() for _ in range(count))
            for number in numbers:
                self.put(source, number)
        ticket = 1000 + len(self.tickets)
        self.tickets[ticket] = (source, target, numbers)
        self.rig.chain.submit_moves(ticket, [self.rig.move(number, source, target) for number in numbers])

    def put(self, tier: int, number: int) -> None:
        if tier == MEMORY:
            self.rig.fill_host(number)
        else:
            self.rig.put(tier, number)

    def wait(self, job_ids: list[int]) -> None:
        """Have the blocks of jobs back, and use them for something else."""
        self.rig.chain.wait(job_ids)
        for job_id in job_ids:
            job = self.jobs[job_id]
            if not job.held:
                continue
            job.held = False
            if not job.writes:
                self.rig.poll()
                assert job_id in self.rig.results, f"load {job_id} was waited for, and has not ended"
                self.check_loaded(job_id)
            noise = np.random.default_rng(job_id).integers(0, 256, self.rig.blocks(job.blocks).shape, dtype=np.uint8)
            self.fill(job.blocks, noise)
            self.given_back.update(zip(job.blocks, noise, strict=True))

    def close(self, deadline_s: float) -> None:
        self.rig.chain.close(deadline_s)
        self.rig.poll()

    # What must hold.

    def check_loaded(self, job_id: int) -> None:
        job = self.jobs[job_id]
        if self.rig.results[job_id].outcomes == (Outcome.OK,):
            same = np.array_equal(self.rig.blocks(job.blocks), self.rig.payload(job.number))
            assert same, f"load {job_id} is OK, and its blocks hold something else"

    def check(self) -> None:
        """All has ended."""
        rig = self.rig
        assert set(rig.results) == set(self.jobs), f"jobs {set(self.jobs) ^ set(rig.results)} have not ended"
        assert set(rig.settled) == set(self.tickets), f"tickets {set(self.tickets) ^ set(rig.settled)} are open"
        for job_id, job in self.jobs.items():
            (outcome,) = rig.results[job_id].outcomes
            if job.held and not self.is_cut_short:
                assert outcome is Outcome.OK, f"job {job_id} is {outcome.name}: {rig.results[job_id].errors}"
            assert outcome in WAITED, f"job {job_id} is {outcome.name}"
            if outcome is Outcome.OK and job.writes:
                self.check_stored(job.tier, job.number, f"store {job_id}")
            if job.held and not job.writes:
                self.check_loaded(job_id)
        for ticket, (_, target, numbers) in self.tickets.items():
            for number, outcome in zip(numbers, rig.settled[ticket].outcomes, strict=True):
                if outcome is Outcome.OK:
                    self.check_stored(target, number, f"ticket {ticket}")
                else:
                    assert self.is_cut_short or any(
                        not job.held and job.number == number for job in self.jobs.values()
                    ), f"ticket {ticket} is {outcome.name}"
        for block, row in self.given_back.items():
            assert np.array_equal(rig.blocks([block])[0], row), f"block {block} was given back, and written to later"

    def check_stored(self, tier: int, number: int, what: str) -> None:
        image = self.rig.host_bytes(number) if tier == MEMORY else self.rig.stored(tier, number)
        payload = self.rig.payload(number)
        found = image[HEADER_BYTES : HEADER_BYTES + payload.size].reshape(payload.shape)
        assert np.array_equal(found, payload), f"{what} is OK, and {number} in tier {tier} holds something else"
        block_bytes = payload.shape[1]
        header = check_header(
            image[:HEADER_BYTES],
            Expected(NAMESPACE, self.rig.key(number), 0, CHUNK_BLOCKS, block_bytes),
            may_lack_checksums=tier == MEMORY,
        )
        if tier != MEMORY:
            verify_checksums(header, block_checksums(payload), 0)

    def check_returned(self) -> None:
        """Nothing is held any more."""
        moves = self.rig.chain._moves
        assert len(moves._free_slots) == moves._usable_slots == len(self.rig.host.relay_offsets), "a relay slot is lost"
        assert self.rig.chain.idle(), "nothing is under way, and it says that something is"
        assert not self.rig.host.headers._claimed, "a header is claimed still"


def _play(run: Run, drive: Callable[[Play], None]) -> None:
    LEAKED.clear()
    run.expects = ("transfers did not end", "may still be touched")
    rig = ChainRig.make(run.path, staging_slots=2)
    play = Play(rig, run.random)
    drive(play)
    if not play.is_cut_short:
        rig.until(lambda: len(rig.results) + len(rig.settled) == len(play.jobs) + len(play.tickets), UNTIL_S)
        rig.until(rig.chain.idle, UNTIL_S)
        play.check_returned()
    rig.chain.close()
    rig.poll()
    play.check()
    rig.close()


def _anything(play: Play) -> None:
    """A caller that does whatever comes to its mind."""
    chance = play.chance
    tiers = (MEMORY, FILE, BUCKET)
    for _ in range(chance.randint(3, 7)):
        act = chance.randrange(8)
        if act in {0, 1}:
            play.store(chance.choice(tiers))
        elif act == 2:
            play.load(chance.choice(tiers))
        elif act == 3:
            play.load(chance.choice(tiers[1:]), promoted=True)
        elif act == 4:
            source, target = chance.sample(tiers, 2)
            play.move(source, target, count=chance.randint(1, 2))
        elif act == 5 and play.jobs:
            play.wait(chance.sample(sorted(play.jobs), chance.randint(1, len(play.jobs))))
        elif act == 6:
            time.sleep(chance.choice((0.0001, 0.0007, 0.003)))
        else:
            play.rig.poll()


def whatever(run: Run) -> None:
    _play(run, _anything)


def closing(run: Run) -> None:
    """As ``whatever``, and closed in the middle, with time for some of it or none."""

    def drive(play: Play) -> None:
        _anything(play)
        play.is_cut_short = True
        play.close(play.chance.choice((0.0, 0.0005, 0.002, 5.0)))

    _play(run, drive)


def preempting(run: Run) -> None:
    """More stores than staging has room for, and their blocks are wanted back."""

    def drive(play: Play) -> None:
        for _ in range(4):
            play.store(FILE)
        play.load(BUCKET)
        jobs = sorted(play.jobs)
        if play.chance.random() < 0.5:
            time.sleep(play.chance.choice((0.0001, 0.0005)))
        play.wait(jobs[:2])
        play.store(FILE)
        play.wait(sorted(play.jobs))

    _play(run, drive)


def same_image(run: Run) -> None:
    """A chunk that is in memory without checksums is written to two tiers and read, all at once."""

    def drive(play: Play) -> None:
        number = play.store(MEMORY)
        play.rig.until(lambda: bool(play.rig.results), UNTIL_S)
        play.move(MEMORY, FILE, numbers=(number,))
        play.move(MEMORY, BUCKET, numbers=(number,))
        play.load(MEMORY, number=number)
        play.load(MEMORY, number=number)

    _play(run, drive)


def relays(run: Run) -> None:
    """More moves between farther tiers than there are relay slots."""

    def drive(play: Play) -> None:
        play.move(FILE, BUCKET, count=3)
        play.move(BUCKET, FILE, count=2)
        play.load(FILE, promoted=True)
        if play.chance.random() < 0.3:
            play.is_cut_short = True
            play.close(play.chance.choice((0.0, 0.001)))

    _play(run, drive)


def sleeping(run: Run) -> None:
    """KV memory goes away while jobs are under way, and the tiers are opened again."""

    def drive(play: Play) -> None:
        _anything(play)
        play.is_cut_short = True
        rig = play.rig
        assert rig.chain.release(play.chance.choice((0.0, 0.001, 5.0))), "nothing hangs, and it may not sleep"
        rig.poll()
        assert rig.chain.open_tiers == frozenset()
        assert set(rig.results) == set(play.jobs), "a job has not ended, and KV memory goes away"
        assert set(rig.settled) == set(play.tickets), "a ticket is open, and KV memory goes away"
        for job in play.jobs.values():
            if not job.writes and job.held:
                play.check_loaded(next(job_id for job_id, each in play.jobs.items() if each is job))
        blocks = list(range(NUM_BLOCKS))
        noise = np.random.default_rng(5).integers(0, 256, rig.blocks(blocks).shape, dtype=np.uint8)
        play.fill(blocks, noise)
        play.given_back = dict(enumerate(noise))
        for job in play.jobs.values():
            job.held = False
        time.sleep(0.01)

    _play(run, drive)


WATCHED = (JobTable, Pump, ChainEngine, SlotHeaders)
ALLOWED = {
    "JobTable._expire_s": "both sides may look; at worst they look twice",
    "Pump._stop_by_s": "set once, before the pump is woken",
}


def _scenario(play: Callable[[Run], None], seeds: int = 1000) -> Scenario:
    return Scenario(play, early_s=0.003, seeds=seeds, watched=WATCHED, allowed=ALLOWED)


SCENARIOS = {
    "whatever": _scenario(whatever),
    "closing": _scenario(closing),
    "preempting": _scenario(preempting, 4),
    "same image": _scenario(same_image, 1),
    "relays": _scenario(relays, 8),
    "sleeping": _scenario(sleeping),
}
