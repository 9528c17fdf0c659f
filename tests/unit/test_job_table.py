"""Proves what a rank's table makes of jobs: what may wait, who is taken when, what jobs and tickets are reported as
when their chunks end apart, and what becomes of them when tiers come, go and hang.

Pumps are played by the tests, and so is the clock, unless the rank ``runs``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nixl_offload.chunk.layout import GroupLayout, KVLayout, RegionSpec
from nixl_offload.engine import jobs, pump
from nixl_offload.engine.jobs import JobTable, TierQueue
from nixl_offload.engine.records import (
    LANES,
    Act,
    Chunk,
    ChunkState,
    Completion,
    Failure,
    Lane,
    TierAccess,
    TierStatus,
    make_move,
)
from nixl_offload.engine.staging import Slot
from nixl_offload.engine.streams import device_of
from nixl_offload.types import Key, Location, Outcome
from tests.unit.rank_rig import TestedRank, causes_of

OK, FAILED, DROPPED = Outcome.OK, Outcome.FAILED, Outcome.DROPPED
CORRUPT, TAINTED = Outcome.CORRUPT, Outcome.TAINTED
MEMORY, FILE, BUCKET, GONE = 0, 1, 2, 3
LOAD_TIMEOUT_S = 1000.0
BLOCK, SLOT = 4096, 8192
RELAY_OFFSETS = 10 * SLOT, 11 * SLOT
LAYOUT = KVLayout((RegionSpec(1 << 20, 64, BLOCK, BLOCK),), (GroupLayout.of_pages([(0, BLOCK)]),) * 2, 1)


class Engine:
    """A tier's engine, whose pump does what the test says, when the test says so."""

    def __init__(self, table: JobTable, tier: int) -> None:
        self.queue = TierQueue(table, tier, LAYOUT, store_limit_bytes=6 * BLOCK)
        self.closed_within: list[float] = []
        self.hangs: threading.Event | None = None
        self.is_broken = False
        self.drains = False
        self.paths = SimpleNamespace(_memory=SimpleNamespace(device=device_of(torch.empty(0))), moves_blocks=False)

    def status(self) -> TierStatus:
        return TierStatus(self.queue.waiting(), "", TierAccess("copy", ("host",)))

    def close(self, deadline_s: float = 5.0) -> None:
        self.closed_within.append(deadline_s)
        if self.hangs is not None:
            self.hangs.wait(10.0)
            return
        if self.drains:
            self.run()
        self.queue.give_up("the engine is closed")
        if self.is_broken:
            raise RuntimeError("does not close")

    def take(self, lane: Lane | None = None, room: int | Callable[[Chunk], int | str] = 99) -> list[Chunk]:
        """Take one batch of a lane; None: everything queued."""
        if lane is not None:
            return self.queue.take(lane, room if callable(room) else lambda _: room)
        return [chunk for each in LANES for chunks in iter(lambda each=each: self.take(each), []) for chunk in chunks]

    def run(self, *outcomes: Outcome, error: str | None = None) -> list[Chunk]:
        """Do all queued work with these outcomes, OK by default. A host slot ends like its chunk."""
        chunks = self.take()
        for chunk, outcome in zip(chunks, outcomes or (OK,) * len(chunks), strict=True):
            end(chunk, outcome, error)
        return chunks


def end(chunk: Chunk, outcome: Outcome, error: str | None = None, cause: str = "", slot: Outcome | None = None) -> None:
    """End a batch of one chunk, as the pump does. ``slot``: the outcome of its host slot; None: the chunk's."""
    slot = slot or outcome
    chunk.end(outcome, None if outcome is OK else error, cause)
    chunk.is_kept = slot is OK
    chunk.host_slot = Slot(0, 0, np.empty(0, np.uint8), 0) if slot is TAINTED else None
    assert chunk.queue is not None
    chunk.queue.table.complete([chunk], tainted=slot is TAINTED)


class Rank(TestedRank):
    """Memory, a file and a bucket, and a missing tier."""

    def __init__(self, *, runs: bool = False) -> None:
        self.now_s = 1000.0
        clock = time.monotonic if runs else lambda: self.now_s
        super().__init__(4, relay_offsets=RELAY_OFFSETS, load_timeout_s=LOAD_TIMEOUT_S, clock=clock)
        self.memory, self.file, self.bucket = self.engines = [Engine(self, tier) for tier in range(3)]
        for tier, engine in enumerate(self.engines):
            self.join(tier, engine)  # type: ignore[arg-type]

    def told(self) -> Completion:
        (done,) = self.finished()
        return done

    def ended(self) -> dict[int, tuple[Outcome, ...]]:
        return {done.job_id: done.outcomes for done in self.finished()}

    def tickets(self) -> dict[int, tuple[Outcome, ...]]:
        return {done.job_id: done.outcomes for done in self.finished_tickets()}


@pytest.fixture
def rank() -> Rank:
    return Rank()


def chunk(number: int, tier: int = FILE, *, group: int = 0, host: int | None = None, position: int = 0) -> Chunk:
    key, offset = Key(bytes([number]) * 32 + group.to_bytes(4, "big")), None if host is None else host * SLOT
    return Chunk(key, Location(tier, number * SLOT, SLOT), group, np.array([number]), 0, offset, position=position)


def move(number: int, source: int, target: int) -> Chunk:
    places = [Location(tier, number * SLOT, SLOT) for tier in (source, target)]
    return make_move(Key(bytes([number]) * 32 + bytes(4)), 0, *places, memory=MEMORY)


def numbers(chunks: Sequence[Chunk]) -> list[int]:
    return [chunk.key[0] for chunk in chunks]


# -- what waits, and who is taken ------------------------------------------------------------------------------------


def test_what_is_stored_beyond_the_limit_is_dropped_and_loads_are_not(rank: Rank) -> None:
    rank.submit_store(1, [chunk(n) for n in range(4)])
    rank.submit_store(2, [chunk(n) for n in range(4)])
    rank.submit_load(3, [chunk(n) for n in range(9)])
    rank.submit_moves(4, [move(n, MEMORY, FILE) for n in range(9)])
    assert rank.file.queue.waiting() == (9 * BLOCK, 6 * BLOCK, 9 * BLOCK)
    rank.file.run()
    first, second = [done for done in rank.finished() if done.job_id != 3]
    assert (first.outcomes, second.outcomes) == ((OK,) * 4, (OK, OK, DROPPED, DROPPED))
    assert (second.bytes_moved, second.errors) == (2 * BLOCK, ("store queue is full",))
    assert causes_of(second) == ((DROPPED, "queue_full", 2),)
    rank.submit_store(5, [chunk(n) for n in range(6)])
    assert len(rank.file.take()) == 6, "there is room again"


# -- how chunks, jobs and tickets end --------------------------------------------------------------------------------


def test_a_job_of_several_tiers_is_told_when_the_last_part_has_ended(rank: Rank) -> None:
    rank.submit_store(7, [chunk(1, BUCKET), chunk(2, MEMORY), chunk(3, FILE), chunk(4, BUCKET), chunk(5, FILE)])
    rank.now_s += 1.0
    assert numbers(rank.bucket.run(FAILED, OK, error="no")) == [1, 4]
    rank.now_s += 1.0
    assert numbers(rank.file.run(OK, CORRUPT, error="no")) == [3, 5]
    assert rank.finished() == []
    assert rank.has_jobs
    rank.now_s += 1.0
    assert numbers(rank.memory.run()) == [2]
    done = rank.told()
    assert (done.job_id, done.outcomes) == (7, (FAILED, OK, OK, OK, CORRUPT))
    assert (done.bytes_moved, done.seconds, done.errors) == (3 * BLOCK, 3.0, ("no",))
    shares = [(share.tier, share.bytes_moved, share.seconds) for share in done.shares]
    assert shares == [(MEMORY, BLOCK, 3.0), (FILE, BLOCK, 2.0), (BUCKET, BLOCK, 1.0)]
    assert not rank.has_jobs
    assert rank.finished() == []


@pytest.mark.parametrize("missing", [GONE, 4, -1])
def test_chunks_of_no_tier_fail_and_the_others_go_on(rank: Rank, missing: int) -> None:
    rank.submit_store(1, [chunk(1, missing), chunk(2, FILE)])
    rank.file.run()
    done = rank.told()
    assert (done.outcomes, done.errors) == ((FAILED, OK), ("the tier is not available on this rank",))
    rank.submit_load(2, [chunk(1, missing, host=4), chunk(2, FILE, host=5)], promotion_ticket=9)
    rank.file.run()
    assert (rank.told().outcomes, rank.tickets()) == ((FAILED, OK), {9: (FAILED, OK)})
    moves = [move(1, missing, MEMORY), move(2, MEMORY, missing), move(3, missing, FILE), move(4, FILE, missing)]
    rank.submit_moves(3, moves)
    assert rank.tickets() == {3: (FAILED,) * 4}


def test_a_chunk_has_the_gravest_outcome_of_its_shards_and_without_any_it_is_there(rank: Rank) -> None:
    """Four chunks, of two, none, one and two shards; the ticket tells of the last three."""
    at = [(1, 0), (2, 0), (3, 2), (4, 3), (5, 3)]
    chunks = [chunk(number, host=number if position else None, position=position) for number, position in at]
    rank.submit_load(1, chunks, 4, promotion_ticket=9, promoted=[1, 2, 3])
    assert numbers(rank.file.run(OK, CORRUPT, OK, DROPPED, FAILED)) == [1, 2, 3, 4, 5]
    assert (rank.told().outcomes, rank.tickets()) == ((CORRUPT, OK, OK, FAILED), {9: (OK, OK, FAILED)})
    rank.submit_store(2, [], 2)
    rank.submit_moves(3, [], 2)
    assert (rank.told().outcomes, rank.tickets()) == ((OK, OK), {3: (OK, OK)})


def test_a_chunk_whose_batch_forgot_it_fails(rank: Rank) -> None:
    rank.submit_load(1, [chunk(1)])
    rank.complete(rank.file.take())
    assert causes_of(rank.told()) == ((FAILED, "unexpected", 1),)


def test_of_a_refused_job_nothing_is_done(rank: Rank) -> None:
    refused = FAILED, "its numbers do not fit"
    rank.submit_load(1, [chunk(1, host=1), chunk(2, GONE)], promotion_ticket=9, refused=refused)
    done = rank.told()
    assert (done.outcomes, done.errors, done.shares) == ((FAILED, FAILED), ("its numbers do not fit",), ())
    assert (rank.tickets(), rank.file.take()) == ({9: (FAILED,)}, [])


def test_what_was_moved_is_counted_by_tier_and_once(rank: Rank) -> None:
    assert rank.take_work() is None
    rank.submit_store(1, [chunk(1, FILE), chunk(2, BUCKET)])
    rank.submit_moves(2, [move(3, FILE, MEMORY)])
    rank.submit_load(3, [chunk(4, host=1)], promotion_ticket=3)
    (load,) = rank.file.take(Lane.LOAD)
    rank.bucket.run()
    rank.now_s += LOAD_TIMEOUT_S
    assert [done.job_id for done in rank.finished()] == [3]
    end(load, FAILED, slot=DROPPED)
    work = rank.take_work()
    assert work is not None
    assert (work.payload_bytes, work.seconds) == ({Act("store", BUCKET): BLOCK}, {Act("store", BUCKET): [0.0]})
    ended = [("load", "failed"), ("fetch", "dropped")]
    assert work.failures == {Failure(what, FILE, outcome, "timeout"): 1 for what, outcome in ended}  # type: ignore[arg-type]
    assert rank.take_work() is None
    both = work.merge(work)
    assert both.payload_bytes == {Act("store", BUCKET): 2 * BLOCK}
    assert both.seconds == {Act("store", BUCKET): [0.0] * 2}
    assert set(both.failures.values()) == {2}


@pytest.mark.parametrize("is_fetch", [False, True])
@pytest.mark.parametrize(
    ("outcome", "is_given_up", "is_kept", "tainted", "has_host", "slot"),
    [
        (OK, False, True, False, True, OK),
        (OK, False, True, True, True, TAINTED),
        (FAILED, False, True, False, True, OK),  # the image is whole, though its blocks could not be served
        (FAILED, False, False, False, True, FAILED),
        (CORRUPT, False, False, False, True, CORRUPT),
        (CORRUPT, False, False, True, True, TAINTED),
        (CORRUPT, False, False, True, False, CORRUPT),  # nothing was begun with the slot
        (OK, False, False, False, True, FAILED),  # served without the slot
        (CORRUPT, True, False, False, True, FAILED),  # the caller knew it when it gave the load up
    ],
)
def test_what_is_told_of_host_slots(
    rank: Rank,
    is_fetch: bool,
    outcome: Outcome,
    is_given_up: bool,
    is_kept: bool,
    tainted: bool,
    has_host: bool,
    slot: Outcome,
) -> None:
    if is_fetch:
        rank.submit_moves(1, [move(1, FILE, MEMORY)])
    else:
        rank.submit_load(1, [chunk(1, host=1)], promotion_ticket=1)
    (taken,) = rank.file.take()
    if is_given_up:
        rank.now_s += LOAD_TIMEOUT_S
        rank.expire()
    taken.host_slot = Slot(0, 0, np.empty(0, np.uint8), 0) if has_host else None
    taken.is_kept = is_kept
    taken.end(outcome, "words", "cause")
    rank.complete([taken], tainted=tainted)
    assert rank.tickets() == {1: (slot,)}


# -- time limits and waiting -----------------------------------------------------------------------------------------


def test_loads_that_take_too_long_fail_unless_their_blocks_are_being_written(rank: Rank) -> None:
    rank.submit_load(1, [chunk(number) for number in range(3)])
    (moving,), (writing,) = rank.file.take(Lane.LOAD, 1), rank.file.take(Lane.LOAD, 1)
    rank.advance([writing], ChunkState.SCATTER)
    rank.now_s += LOAD_TIMEOUT_S - 0.5
    rank.submit_load(2, [chunk(8)])
    assert rank.finished() == []
    rank.now_s += 1.0
    assert rank.finished() == [], "vLLM would take back blocks that are still written"
    assert rank.advance([moving], ChunkState.SCATTER) == []
    end(writing, OK)
    told = rank.told()
    assert (told.job_id, told.outcomes, causes_of(told)) == (1, (FAILED, OK, FAILED), ((FAILED, "timeout", 2),))
    assert numbers(rank.file.take(Lane.LOAD)) == [8]


@pytest.mark.parametrize("by", ["an end", "the clock"])
def test_who_waits_for_blocks_waits_for_the_last_of_them(rank: Rank, by: str) -> None:
    """While a load writes to the blocks the wait goes on, even if other jobs end."""
    rank.submit_load(1, [chunk(1)])
    rank.submit_load(2, [chunk(2)])
    (first,) = rank.file.take(Lane.LOAD)
    if by == "an end":
        rank.advance([first], ChunkState.SCATTER)
    waiter = threading.Thread(target=rank.wait, args=([1, 2], 0.0 if by == "an end" else 3600.0))
    waiter.start()
    waiter.join(0.05)
    assert waiter.is_alive()
    if by == "an end":
        end(first, OK)
    else:
        rank.now_s += LOAD_TIMEOUT_S
        rank.expire()
    waiter.join(10.0)
    assert not waiter.is_alive()
    assert rank.ended() == {1: (OK if by == "an end" else FAILED,), 2: (FAILED,)}


def test_blocks_that_are_needed_back_are_given_back(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queued chunks are dropped, and the data of reads in progress too. A load fails if nobody writes to its blocks."""
    monkeypatch.setattr(jobs, "STORE_GRACE_S", 0.0)
    rank.submit_store(1, [chunk(1), chunk(2)])
    (reading,) = rank.file.take(Lane.STORE, 1)
    rank.advance([reading], ChunkState.BORROWED)
    rank.wait([1], 0.0)
    assert rank.advance([reading], ChunkState.TRANSFER) == []
    end(reading, OK)
    told = rank.told()
    assert told.outcomes == (FAILED, DROPPED)
    assert {cause for _, cause, _ in causes_of(told)} == {"needed_back"}
    rank.submit_load(2, [chunk(1), chunk(2)])
    rank.wait([2], 0.0)
    told = rank.told()
    assert (told.outcomes, causes_of(told)) == ((FAILED, FAILED), ((FAILED, "no_answer", 2),))
    assert not any(rank.file.queue.lanes.values())
    rank.submit_store(3, [chunk(1)])
    rank.file.take()
    rank.wait([3], 0.0)
    assert rank.told().outcomes == (DROPPED,), "nothing of it was written"


def test_wait_drops_what_has_not_begun_in_the_tiers_of_its_jobs_and_nothing_else() -> None:
    rank = Rank(runs=True)
    rank.submit_store(1, [chunk(1, FILE), chunk(2, BUCKET)])
    rank.submit_store(2, [chunk(3, FILE)])
    rank.submit_store(3, [chunk(4, BUCKET)])
    rank.wait([1, 3, 77], 5.0)
    assert rank.ended() == {1: (DROPPED, DROPPED), 3: (DROPPED,)}
    assert numbers(rank.file.run()) == [3]


# -- moves between two farther tiers ---------------------------------------------------------------------------------


def test_a_relay_slot_serves_one_move_at_a_time_in_their_order(rank: Rank) -> None:
    rank.submit_moves(1, [move(number, FILE, BUCKET) for number in range(1, 5)])
    first, second = rank.file.take()
    assert {first.host_offset, second.host_offset} == set(RELAY_OFFSETS)
    end(first, FAILED)
    (third,) = rank.file.take()
    assert (third.key[0], third.host_offset) == (3, first.host_offset)
    end(second, OK)
    assert rank.file.take() == [], "its slot is still in use"
    (write,) = rank.bucket.take()
    assert (write.location, write.host_offset) == (Location(BUCKET, 2 * SLOT, SLOT), second.host_offset)
    end(write, FAILED)
    end(third, OK)
    rank.file.run()
    rank.bucket.run()
    assert rank.tickets() == {1: (DROPPED, FAILED, OK, OK)}
    assert not rank.has_jobs


@pytest.mark.parametrize(
    ("outcome", "slot", "told", "left"),
    [
        (FAILED, FAILED, DROPPED, 2),
        (CORRUPT, CORRUPT, CORRUPT, 2),
        (DROPPED, DROPPED, DROPPED, 2),
        (FAILED, TAINTED, DROPPED, 1),
        (OK, TAINTED, DROPPED, 1),
        (FAILED, OK, DROPPED, 2),
    ],
)
def test_what_was_not_fetched_leaves_its_target_alone(
    rank: Rank, outcome: Outcome, slot: Outcome, told: Outcome, left: int
) -> None:
    """The target is not to blame, and may be used again at once. A slot that may still be written to may not: nor may
    the image in it be trusted that came too late.
    """
    rank.submit_moves(1, [move(1, FILE, BUCKET)])
    (fetch,) = rank.file.take()
    end(fetch, outcome, slot=slot)
    assert (rank.bucket.take(), rank.tickets(), rank.has_jobs) == ([], {1: (told,)}, False)
    rank.submit_moves(2, [move(number, FILE, BUCKET) for number in range(3)])
    assert len(rank.file.take()) == left


def test_a_relay_that_is_given_up_keeps_its_slot_until_its_read_has_ended(rank: Rank) -> None:
    rank.submit_moves(1, [move(1, FILE, BUCKET)])
    (fetch,) = rank.file.take()
    rank.now_s += LOAD_TIMEOUT_S
    assert (rank.tickets(), rank.has_jobs) == ({1: (DROPPED,)}, True)
    rank.submit_moves(2, [move(2, FILE, BUCKET), move(3, FILE, BUCKET)])
    assert numbers(rank.file.take()) == [2]
    end(fetch, OK)
    assert rank.bucket.take() == [], "nobody waits for it any more"
    assert numbers(rank.file.take()) == [3]


@pytest.mark.parametrize("by", ["a store", "a dead pump"])
def test_a_relay_slot_that_may_still_be_touched_is_never_used_again(rank: Rank, by: str) -> None:
    rank.join(GONE, Engine(rank, GONE))  # type: ignore[arg-type]
    rank.submit_moves(1, [move(1, FILE, BUCKET)])
    if by == "a store":
        rank.file.run()
        end(*rank.bucket.take(), TAINTED)
    else:
        rank.file.take()
        rank.file.queue.give_up("the disk is gone")
    assert rank.tickets() == {1: (TAINTED if by == "a store" else DROPPED,)}
    rank.submit_moves(2, [move(number, BUCKET, GONE) for number in range(2)])
    (read,) = rank.bucket.take()
    end(read, FAILED, slot=TAINTED)
    rank.submit_moves(3, [move(1, BUCKET, GONE), move(2, MEMORY, BUCKET)])
    rank.bucket.run()
    assert rank.tickets() == {2: (DROPPED, DROPPED), 3: (DROPPED, OK)}, "there is none left"


# -- the end ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def running() -> Iterator[Rank]:
    rank = Rank(runs=True)
    yield rank
    for engine in rank.engines:
        if engine.hangs is not None:
            engine.hangs.set()


def test_a_chunk_that_was_fetched_last_is_stored_no_more(running: Rank) -> None:
    """Nor was its target ever touched."""
    running.bucket.drains = True
    running.submit_moves(1, [move(1, BUCKET, FILE)])
    running.close(0.0)
    assert running.tickets() == {1: (FAILED,)}


def test_a_tier_that_does_not_close_well_or_at_all_holds_up_no_other(
    running: Rank, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its unfinished work is given up: jobs as FAILED, locations as TAINTED."""
    monkeypatch.setattr(pump, "CLOSE_PATIENCE_S", 0.2)
    running.file.is_broken = True
    running.bucket.hangs = threading.Event()
    running.submit_store(1, [chunk(1, FILE), chunk(2, BUCKET)])
    running.submit_store(2, [chunk(3, BUCKET), chunk(4, BUCKET)])
    running.submit_moves(3, [move(5, MEMORY, BUCKET)])
    begun = running.bucket.take()
    began_s, others = time.monotonic(), set(threading.enumerate())
    running.close(0.1)
    assert time.monotonic() - began_s >= 0.3
    [closer] = [thread for thread in set(threading.enumerate()) - others if thread.name == "nixl-offload-close"]
    assert closer.daemon, "it holds up no end of the process"
    told = {done.job_id: done for done in running.finished()}
    assert {number: done.outcomes for number, done in told.items()} == {1: (DROPPED, FAILED), 2: (FAILED, FAILED)}
    assert told[1].errors == ("the engine is closed", "the engine was closed while storage hung")
    assert running.tickets() == {3: (TAINTED,)}
    assert not running.has_jobs
    for late in begun:
        end(late, OK)
    assert (running.finished(), running.finished_tickets()) == ([], []), "what comes late changes nothing"
    assert "The engine of tier 1 did not close well" in caplog.text
