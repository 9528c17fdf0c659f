"""Proves what a rank's chain makes of its tiers' engines: who gets which chunk, what jobs and tickets are told as when
their parts end apart, and what becomes of them when tiers come, go and hang.

Engines are real but for their pumps, which the tests play.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from nixl_offload.chunk.layout import GroupLayout, KVLayout, RegionSpec
from nixl_offload.engine import chain as chain_module
from nixl_offload.engine.chain import ChainEngine
from nixl_offload.engine.jobs import MOVE_QUEUE_LIMIT_S, JobTable, TierQueue
from nixl_offload.engine.pump import TierEngine
from nixl_offload.engine.records import Chunk, Completion, make_move
from nixl_offload.engine.staging import Slot
from nixl_offload.engine.states import LANES, Lane, WorkKind
from nixl_offload.engine.streams import Fence
from nixl_offload.engine.transfer_statistics import Act, Failure, TierAccess, TierStatus
from nixl_offload.types import Key, Location, Outcome

OK, FAILED, DROPPED = Outcome.OK, Outcome.FAILED, Outcome.DROPPED
CORRUPT, TAINTED = Outcome.CORRUPT, Outcome.TAINTED
STORE, LOAD = WorkKind.STORE, WorkKind.LOAD
MEMORY, FILE, BUCKET, GONE = 0, 1, 2, 3
LOAD_TIMEOUT_S = 1000.0
BLOCK, SLOT = 4096, 8192
RELAY_OFFSETS = 10 * SLOT, 11 * SLOT
LAYOUT = KVLayout((RegionSpec(0, 1 << 20, 64, BLOCK, BLOCK),), (GroupLayout.of_pages([(0, BLOCK)]),), 1)


class Engine(TierEngine):
    """With a pump that does what the test says, when it says so."""

    def __init__(self, table: JobTable, tier: int, path: str = "host") -> None:
        super().__init__(TierQueue(table, tier, LAYOUT, store_limit_bytes=1 << 30), self._mark)
        self.path = path
        self.fences: list[Fence] = []
        self.closed_within: list[float] = []
        self.hangs: threading.Event | None = None
        self.is_broken = False
        self.drains = False

    def _mark(self) -> Fence:
        self.fences.append(_Passed())
        return self.fences[-1]

    def status(self) -> TierStatus:
        return TierStatus(self.queue.waiting(), "", TierAccess("copy", (self.path,)))

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

    def take(self) -> dict[Lane, list[Chunk]]:
        """What is queued, by lane."""
        found: dict[Lane, list[Chunk]] = {}
        for lane in LANES:
            while chunks := self.queue.take(lane, lambda _: 99):
                found.setdefault(lane, []).extend(chunks)
        return found

    def run(self, *outcomes: Outcome, error: str | None = None) -> list[Chunk]:
        """Do all that is queued: with these outcomes, or well. A host slot is told as its chunk is."""
        chunks = [chunk for lane in self.take().values() for chunk in lane]
        for chunk, outcome in zip(chunks, outcomes or (OK,) * len(chunks), strict=True):
            end(chunk, outcome, error)
        return chunks


def end(chunk: Chunk, outcome: Outcome, error: str | None = None, cause: str = "", slot: Outcome | None = None) -> None:
    """As the pump, when a batch of one chunk has ended. ``slot``: what became of its host slot; None: the same."""
    slot = slot or outcome
    chunk.end(outcome, None if outcome is OK else error, cause)
    chunk.is_kept = slot is OK
    chunk.host = Slot(0, 0, np.empty(0, dtype=np.uint8)) if slot is TAINTED else None
    assert chunk.queue is not None
    chunk.queue.table.complete([chunk], tainted=slot is TAINTED)


class _Passed:
    def done(self) -> bool:
        return True


class Rank:
    """Memory, a file and a bucket, and a tier that is not there. Time stands still unless it ``runs``."""

    def __init__(self, *, runs: bool = False) -> None:
        self.now_s = 1000.0
        self.clock = time.monotonic if runs else lambda: self.now_s
        self.chain = ChainEngine(4, RELAY_OFFSETS, load_timeout_s=LOAD_TIMEOUT_S, clock=self.clock)
        self.memory, self.file, self.bucket = self.engines = [Engine(self.chain.table, tier) for tier in range(3)]
        for tier, engine in enumerate(self.engines):
            self.chain.join(tier, engine)

    def told(self) -> Completion:
        (done,) = self.chain.finished()
        return done

    def settled(self) -> dict[int, tuple[Outcome, ...]]:
        return {done.job_id: done.outcomes for done in self.chain.settled()}


@pytest.fixture
def rank() -> Rank:
    return Rank()


def chunk(number: int, tier: int, *, host: int | None = None, position: int = 0) -> Chunk:
    location = Location(tier, number * SLOT, SLOT)
    offset = None if host is None else host * SLOT
    return Chunk(Key(bytes([number]) * 36), location, 0, np.array([number]), 0, offset, position=position)


def move(number: int, source: int, target: int) -> Chunk:
    places = [Location(tier, number * SLOT, SLOT) for tier in (source, target)]
    return make_move(Key(bytes([number]) * 36), 0, *places, memory=MEMORY)


def numbers(chunks: Sequence[Chunk]) -> list[int]:
    return [chunk.key[0] for chunk in chunks]


# -- jobs ------------------------------------------------------------------------------------------------------------


def test_a_job_of_several_tiers_is_told_when_the_last_part_has_ended(rank: Rank) -> None:
    rank.chain.submit_store(7, [chunk(1, BUCKET), chunk(2, MEMORY), chunk(3, FILE), chunk(4, BUCKET), chunk(5, FILE)])
    rank.now_s += 1.0
    assert numbers(rank.bucket.run(FAILED, OK, error="no")) == [1, 4]
    rank.now_s += 1.0
    assert numbers(rank.file.run(OK, CORRUPT, error="no")) == [3, 5]
    assert rank.chain.finished() == []
    assert rank.chain.has_jobs
    rank.now_s += 1.0
    assert numbers(rank.memory.run()) == [2]
    done = rank.told()
    assert (done.job_id, done.kind, done.outcomes) == (7, STORE, (FAILED, OK, OK, OK, CORRUPT))
    assert (done.bytes_moved, done.seconds, done.errors) == (3 * BLOCK, 3.0, ("no",))
    shares = [(share.tier, share.wanted_bytes, share.bytes_moved, share.seconds) for share in done.shares]
    assert shares == [(MEMORY, BLOCK, BLOCK, 3.0), (FILE, 2 * BLOCK, BLOCK, 2.0), (BUCKET, 2 * BLOCK, BLOCK, 1.0)]
    assert not rank.chain.has_jobs
    assert rank.chain.finished() == []


@pytest.mark.parametrize("missing", [GONE, 4, -1])
def test_chunks_of_no_tier_fail_and_the_others_go_on(rank: Rank, missing: int) -> None:
    rank.chain.submit_store(1, [chunk(1, missing), chunk(2, FILE)])
    assert rank.chain.finished() == []
    rank.file.run()
    done = rank.told()
    assert (done.outcomes, done.errors) == ((FAILED, OK), ("the tier is not available on this rank",))
    rank.chain.submit_load(2, [chunk(1, missing)])
    assert rank.told().outcomes == (FAILED,)
    moves = [move(1, missing, MEMORY), move(2, MEMORY, missing), move(3, missing, FILE), move(4, FILE, missing)]
    rank.chain.submit_moves(3, moves)
    assert rank.settled() == {3: (FAILED,) * 4}


def test_a_chunk_has_the_gravest_outcome_of_its_shards_and_without_any_it_is_there(rank: Rank) -> None:
    """Four chunks, of two, none, one and two shards; the ticket tells of the last three."""
    at = [(1, 0), (2, 0), (3, 2), (4, 3), (5, 3)]
    chunks = [chunk(number, FILE, host=number if position else None, position=position) for number, position in at]
    rank.chain.submit_load(1, chunks, 4, promotion_ticket=9, promoted=[1, 2, 3])
    assert numbers(rank.file.run(OK, CORRUPT, OK, DROPPED, FAILED)) == [1, 2, 3, 4, 5]
    assert rank.told().outcomes == (CORRUPT, OK, OK, FAILED)
    assert rank.settled() == {9: (OK, OK, FAILED)}
    rank.chain.submit_store(2, [], 2)
    rank.chain.submit_moves(3, [], 2)
    assert (rank.told().outcomes, rank.settled()) == ((OK, OK), {3: (OK, OK)})


def test_of_a_refused_job_nothing_is_done(rank: Rank) -> None:
    refused = FAILED, "its numbers do not fit"
    rank.chain.submit_load(1, [chunk(1, FILE, host=1), chunk(2, GONE)], promotion_ticket=9, refused=refused)
    done = rank.told()
    assert (done.outcomes, done.errors, done.shares) == ((FAILED, FAILED), ("its numbers do not fit",), ())
    assert rank.settled() == {9: (FAILED,)}
    assert rank.file.take() == {}


def test_a_load_is_given_on_with_its_fence_and_its_haste(rank: Rank) -> None:
    fence = _Passed()
    rank.chain.submit_load(1, [chunk(1, FILE), chunk(2, BUCKET)], expedited=True, fence=fence)
    rank.chain.submit_load(2, [chunk(3, FILE)])
    found = rank.file.take()
    assert {lane: numbers(tasks) for lane, tasks in found.items()} == {Lane.EXPEDITED_LOAD: [1], Lane.LOAD: [3]}
    assert [chunk.job.fence for chunk in found[Lane.EXPEDITED_LOAD]] == [fence]
    assert [chunk.job.fence for chunk in rank.bucket.take()[Lane.EXPEDITED_LOAD]] == [fence]


def test_an_id_that_is_live_is_not_taken_twice(rank: Rank, caplog: pytest.LogCaptureFixture) -> None:
    """The ticket of the second is settled all the same: its slots are free."""
    rank.chain.submit_load(1, [chunk(1, FILE), chunk(2, BUCKET)])
    rank.chain.submit_store(1, [chunk(3, FILE)])
    rank.chain.submit_load(1, [chunk(4, FILE, host=0), chunk(5, FILE), chunk(6, BUCKET, host=1)], promotion_ticket=8)
    rank.chain.submit_load(1, [chunk(4, FILE)])
    assert [record.message[:25] for record in caplog.records] == ["job 1 was submitted twice"] * 3
    assert rank.settled() == {8: (DROPPED, DROPPED)}
    assert (numbers(rank.file.run()), numbers(rank.bucket.run())) == ([1], [2])
    assert rank.told().outcomes == (OK, OK)


def test_what_was_moved_is_counted_by_tier_and_once(rank: Rank) -> None:
    assert rank.chain.take_work() is None
    rank.chain.submit_store(1, [chunk(1, FILE), chunk(2, BUCKET)])
    rank.chain.submit_moves(2, [move(3, FILE, MEMORY)])
    rank.chain.submit_load(3, [chunk(4, FILE, host=1)], promotion_ticket=3)
    [load] = rank.file.take()[Lane.LOAD]
    rank.bucket.run()
    rank.now_s += LOAD_TIMEOUT_S
    assert [done.job_id for done in rank.chain.finished()] == [3]
    end(load, FAILED, slot=DROPPED)
    work = rank.chain.take_work()
    assert work is not None
    assert work.payload_bytes == {Act("store", BUCKET): BLOCK}
    assert work.failures == {Failure(what, FILE, "failed", "timeout"): 1 for what in ("load", "fetch")}
    assert rank.chain.take_work() is None


# -- tickets ---------------------------------------------------------------------------------------------------------


def test_promotions_are_told_under_their_ticket_in_their_order(rank: Rank) -> None:
    """By the slots: of what is not there they are not filled."""
    chunks = [
        chunk(1, BUCKET, host=0),
        chunk(2, FILE),
        chunk(3, FILE, host=1),
        chunk(6, GONE, host=4),
        chunk(7, FILE, host=5),
    ]
    rank.chain.submit_load(1, chunks, promotion_ticket=9)
    found = rank.file.run(OK, FAILED, OK)
    assert [(chunk.key[0], chunk.host_offset) for chunk in found] == [(2, None), (3, SLOT), (7, 5 * SLOT)]
    assert rank.settled() == {}
    assert [chunk.host_offset for chunk in rank.bucket.run()] == [0]
    assert rank.told().outcomes == (OK, OK, FAILED, FAILED, OK)
    assert rank.settled() == {9: (OK, FAILED, FAILED, OK)}


def test_without_a_ticket_no_slot_is_filled(rank: Rank) -> None:
    """Nobody would be told when it is free again."""
    rank.chain.submit_load(1, [chunk(1, FILE, host=0), chunk(2, FILE)])
    assert [chunk.kind for chunk in rank.file.run()] == [LOAD, LOAD]
    assert rank.told().outcomes == (OK, OK)
    assert rank.settled() == {}


def test_a_relay_slot_serves_one_move_at_a_time_in_their_order(rank: Rank) -> None:
    rank.chain.submit_moves(1, [move(number, FILE, BUCKET) for number in range(1, 5)])
    first, second = rank.file.take()[Lane.BACKGROUND]
    assert {first.host_offset, second.host_offset} == set(RELAY_OFFSETS)
    end(first, FAILED)
    [third] = rank.file.take()[Lane.BACKGROUND]
    assert (third.key[0], third.host_offset) == (3, first.host_offset)
    end(second, OK)
    assert rank.file.take() == {}, "its slot is still in use"
    [write] = rank.bucket.take()[Lane.BACKGROUND]
    assert (write.location, write.host_offset) == (Location(BUCKET, 2 * SLOT, SLOT), second.host_offset)
    end(write, FAILED)
    end(third, OK)
    rank.file.run()
    rank.bucket.run()
    assert rank.settled() == {1: (DROPPED, FAILED, OK, OK)}
    assert not rank.chain.has_jobs


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
    rank.chain.submit_moves(1, [move(1, FILE, BUCKET)])
    [fetch] = rank.file.take()[Lane.BACKGROUND]
    end(fetch, outcome, slot=slot)
    assert rank.bucket.take() == {}
    assert rank.settled() == {1: (told,)}
    assert not rank.chain.has_jobs
    rank.chain.submit_moves(2, [move(number, FILE, BUCKET) for number in range(3)])
    assert len(rank.file.take()[Lane.BACKGROUND]) == left


def test_a_relay_that_is_given_up_keeps_its_slot_until_its_read_has_ended(rank: Rank) -> None:
    rank.chain.submit_moves(1, [move(1, FILE, BUCKET)])
    [fetch] = rank.file.take()[Lane.BACKGROUND]
    rank.now_s += LOAD_TIMEOUT_S
    assert rank.settled() == {1: (DROPPED,)}
    assert rank.chain.has_jobs
    rank.chain.submit_moves(2, [move(2, FILE, BUCKET), move(3, FILE, BUCKET)])
    assert numbers(rank.file.take()[Lane.BACKGROUND]) == [2]
    end(fetch, OK)
    assert rank.bucket.take() == {}, "nobody waits for it any more"
    assert numbers(rank.file.take()[Lane.BACKGROUND]) == [3]


def test_a_slot_that_storing_may_still_read_is_never_used_again(rank: Rank) -> None:
    for ticket, left in ((1, 1), (2, 0)):
        rank.chain.submit_moves(ticket, [move(1, FILE, BUCKET)])
        rank.file.run()
        [write] = rank.bucket.take()[Lane.BACKGROUND]
        end(write, TAINTED)
        assert rank.settled() == {ticket: (TAINTED,)}
        rank.chain.submit_moves(10 + ticket, [move(number, FILE, BUCKET) for number in range(left)])
        assert len(rank.file.run(*[FAILED] * left)) == left
        rank.settled()
    rank.chain.submit_moves(3, [move(1, FILE, BUCKET), move(2, MEMORY, BUCKET)])
    rank.bucket.run()
    assert rank.settled() == {3: (DROPPED, OK)}, "there is none left"


def test_a_slot_that_a_dead_pump_may_still_write_to_is_never_used_again(rank: Rank) -> None:
    rank.chain.submit_moves(1, [move(1, FILE, BUCKET)])
    rank.file.take()
    rank.file.queue.give_up("the disk is gone")
    assert rank.settled() == {1: (DROPPED,)}
    rank.chain.join(GONE, Engine(rank.chain.table, GONE))
    rank.chain.submit_moves(2, [move(number, BUCKET, GONE) for number in range(2, 5)])
    assert len(rank.bucket.take()[Lane.BACKGROUND]) == 1


def test_relays_that_wait_for_too_long_are_dropped_and_what_has_begun_goes_on(rank: Rank) -> None:
    """Although tiers say nothing. Each half of its way has its own time."""
    rank.chain.submit_moves(1, [move(number, FILE, BUCKET) for number in range(2)])
    rank.chain.submit_moves(2, [move(2, FILE, BUCKET)])
    first, second = rank.file.take()[Lane.BACKGROUND]
    rank.now_s += MOVE_QUEUE_LIMIT_S - 1.0
    end(first, OK)
    rank.now_s += 2.0
    assert rank.settled() == {2: (DROPPED,)}
    assert numbers(rank.bucket.run()) == [0], "it has just begun to wait there"
    end(second, OK)
    rank.now_s += MOVE_QUEUE_LIMIT_S
    assert rank.settled() == {1: (OK, DROPPED)}
    assert rank.bucket.take() == {}


# -- tiers that come and go ------------------------------------------------------------------------------------------


def test_a_tier_serves_from_when_it_joins(rank: Rank) -> None:
    engine = Engine(rank.chain.table, GONE)
    assert rank.chain.open_tiers == {MEMORY, FILE, BUCKET}
    assert rank.chain.statuses()[GONE] == TierStatus(trouble="unavailable")
    rank.chain.join(GONE, engine)
    assert rank.chain.open_tiers == {MEMORY, FILE, BUCKET, GONE}
    rank.chain.submit_store(1, [chunk(1, GONE)])
    assert [status.waiting.store_bytes for status in rank.chain.statuses()] == [0, 0, 0, BLOCK]
    assert rank.chain.statuses()[GONE].access == TierAccess("copy", ("host",))
    engine.run()
    assert rank.told().outcomes == (OK,)
    rank.chain.submit_moves(2, [move(1, MEMORY, GONE)])
    engine.run()
    assert rank.settled() == {2: (OK,)}


def test_parted_engines_are_the_callers(rank: Rank) -> None:
    assert rank.chain.part() == {MEMORY: rank.memory, FILE: rank.file, BUCKET: rank.bucket}
    assert rank.chain.open_tiers == frozenset()
    assert not any(engine.closed_within for engine in rank.engines)
    rank.chain.submit_store(1, [chunk(1, FILE)])
    assert rank.told().outcomes == (FAILED,)
    rank.chain.join(FILE, rank.file)
    assert rank.chain.open_tiers == {FILE}


# -- waiting ---------------------------------------------------------------------------------------------------------


def test_wait_drops_what_has_not_begun_in_the_tiers_of_its_jobs_and_nothing_else() -> None:
    rank = Rank(runs=True)
    rank.chain.submit_store(1, [chunk(1, FILE), chunk(2, BUCKET)])
    rank.chain.submit_store(2, [chunk(3, FILE)])
    rank.chain.submit_store(3, [chunk(4, BUCKET)])
    rank.chain.wait([1, 3, 77], 5.0)
    done = {each.job_id: each.outcomes for each in rank.chain.finished()}
    assert done == {1: (DROPPED, DROPPED), 3: (DROPPED,)}
    assert numbers(rank.file.run()) == [3]


def test_wait_has_one_limit_for_all_tiers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain_module, "WAIT_LIMIT_S", 0.3)
    rank = Rank(runs=True)
    for number, limit_s, least_s in ((1, None, 0.3), (2, 0.15, 0.15)):
        rank.chain.submit_load(number, [chunk(1, FILE), chunk(2, BUCKET)])
        rank.file.take()
        rank.bucket.take()
        began_s = time.monotonic()
        rank.chain.wait([number], limit_s)
        assert least_s <= time.monotonic() - began_s < least_s + 4.0
        assert rank.told().outcomes == (FAILED, FAILED)


# -- the end ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def running() -> Iterator[Rank]:
    rank = Rank(runs=True)
    yield rank
    for engine in rank.engines:
        if engine.hangs is not None:
            engine.hangs.set()


def test_close_ends_every_tier_within_the_deadline_and_once(running: Rank) -> None:
    running.chain.submit_store(1, [chunk(1, FILE), chunk(2, BUCKET)])
    running.chain.submit_moves(2, [move(number, FILE, BUCKET) for number in range(3)])
    running.file.take()
    for _ in range(2):
        running.chain.close(0.1)
    assert [len(engine.closed_within) for engine in running.engines] == [1, 1, 1]
    assert all(0.0 <= engine.closed_within[0] <= 0.1 for engine in running.engines)
    assert running.told().outcomes == (FAILED, DROPPED)
    assert running.settled() == {2: (DROPPED, DROPPED, DROPPED)}
    assert not running.chain.has_jobs


def test_close_sees_relays_through_as_far_as_the_deadline_allows(running: Rank) -> None:
    running.chain.submit_moves(1, [move(number, FILE, BUCKET) for number in range(4)])
    over = threading.Event()

    def serve() -> None:
        while not over.wait(0.001):
            running.file.run()
            running.bucket.run()

    server = threading.Thread(target=serve)
    server.start()
    try:
        began_s = time.monotonic()
        running.chain.close(8.0)
        assert time.monotonic() - began_s < 4.0, "it waits for them, not for the deadline"
    finally:
        over.set()
        server.join()
    assert running.settled() == {1: (OK,) * 4}
    assert all(4.0 < engine.closed_within[0] < 8.0 for engine in running.engines), "what is left of the deadline"


def test_relays_that_have_not_begun_are_dropped_at_the_deadline(running: Rank) -> None:
    """Nothing has touched their targets, which are free at once."""
    running.chain.submit_moves(1, [move(number, FILE, BUCKET) for number in range(9)])
    running.chain.close(0.0)
    assert running.settled() == {1: (DROPPED,) * 9}


def test_a_chunk_that_was_fetched_last_is_stored_no_more(running: Rank) -> None:
    """Its target was never touched, either."""
    running.bucket.drains = True
    running.chain.submit_moves(1, [move(1, BUCKET, FILE)])
    running.chain.close(0.0)
    assert running.settled() == {1: (FAILED,)}


def test_a_tier_that_does_not_close_well_or_at_all_holds_up_no_other(
    running: Rank, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What it has begun is given up: a job as FAILED, places as TAINTED."""
    monkeypatch.setattr(chain_module, "CLOSE_PATIENCE_S", 0.2)
    running.file.is_broken = True
    running.bucket.hangs = threading.Event()
    running.chain.submit_store(1, [chunk(1, FILE), chunk(2, BUCKET)])
    running.chain.submit_store(2, [chunk(3, BUCKET), chunk(4, BUCKET)])
    running.chain.submit_moves(3, [move(5, MEMORY, BUCKET)])
    begun = running.bucket.take()
    assert [numbers(chunks) for chunks in begun.values()] == [[2, 3, 4], [5]]
    began_s, others = time.monotonic(), set(threading.enumerate())
    running.chain.close(0.1)
    assert time.monotonic() - began_s >= 0.3
    [closer] = [thread for thread in set(threading.enumerate()) - others if thread.name == "nixl-offload-close"]
    assert closer.daemon, "it holds up no end of the process"
    told = {done.job_id: done for done in running.chain.finished()}
    assert {number: done.outcomes for number, done in told.items()} == {1: (DROPPED, FAILED), 2: (FAILED, FAILED)}
    assert told[1].errors == ("the engine is closed", "the engine was closed while storage hung")
    assert told[2].errors == ("the engine was closed while storage hung",)
    assert running.settled() == {3: (TAINTED,)}
    assert not running.chain.has_jobs
    for chunks in begun.values():
        for late in chunks:
            end(late, OK)
    assert (running.chain.finished(), running.settled()) == ([], {}), "what comes late changes nothing"
    assert "The engine of tier 1 did not close well" in caplog.text
