"""Proves what a rank's chain makes of its tiers' engines: who gets which chunk, what jobs and tickets are told as when
their parts end apart, and what becomes of them when tiers come, go and hang.

Engines are real but for their pumps, which the tests play.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from nixl_offload.chunk.layout import GroupLayout, KVLayout, RegionSpec
from nixl_offload.engine import chain as chain_module
from nixl_offload.engine.chain import ChainEngine, MoveIO
from nixl_offload.engine.jobs import JobTable
from nixl_offload.engine.records import ChunkIO, Completion, Ending, Share, Task
from nixl_offload.engine.states import LANES, Lane, WorkKind
from nixl_offload.engine.streams import Fence
from nixl_offload.engine.tier_engine import TierEngine
from nixl_offload.engine.transfer_statistics import Act, Failure, TierAccess, TierStatus, Waiting
from nixl_offload.types import Key, Location, Outcome

OK, FAILED, DROPPED = Outcome.OK, Outcome.FAILED, Outcome.DROPPED
CORRUPT, TAINTED = Outcome.CORRUPT, Outcome.TAINTED
STORE, LOAD = WorkKind.STORE, WorkKind.LOAD
MEMORY, FILE, BUCKET, GONE = 0, 1, 2, 3
NO_LAYER = 1
BLOCK, SLOT = 4096, 8192
LAYOUT = KVLayout(
    (RegionSpec(0, 1 << 20, 64, BLOCK, BLOCK),), (GroupLayout.of_pages([(0, BLOCK)]), GroupLayout.of_pages([])), 1
)


class Engine(TierEngine):
    """With a pump that does what the test says, when it says so."""

    def __init__(self, clock: Callable[[], float], path: str = "host") -> None:
        super().__init__(LAYOUT, self._mark, clock)
        self._table = JobTable(store_queue_limit_bytes=1 << 30, clock=clock)
        self._load_timeout_s = 1000.0
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
        return TierStatus(Waiting(*self._table.waiting_bytes()), "", TierAccess("copy", (self.path,)))

    def close(self, deadline_s: float = 5.0) -> None:
        self.closed_within.append(deadline_s)
        if self.hangs is not None:
            self.hangs.wait(10.0)
            return
        if self.drains:
            self.run()
        self._table.give_up("the engine is closed")
        if self.is_broken:
            raise RuntimeError("does not close")

    def take(self) -> dict[Lane, list[Task]]:
        """What is queued, by lane."""
        found: dict[Lane, list[Task]] = {}
        for lane in LANES:
            while tasks := self._table.take(lane, lambda _: 99):
                found.setdefault(lane, []).extend(tasks)
        return found

    def run(self, *outcomes: Outcome, error: str | None = None) -> list[Task]:
        """Do all that is queued: with these outcomes, or well. A host slot is told as its chunk is."""
        tasks = [task for lane in self.take().values() for task in lane]
        each = outcomes or (OK,) * len(tasks)
        self._table.complete(
            Ending(task, outcome, None if outcome is OK else error, "", outcome if task.kind.fills_slot else None)
            for task, outcome in zip(tasks, each, strict=True)
        )
        return tasks


class _Passed:
    def done(self) -> bool:
        return True


class Relay:
    """Two relay slots."""

    relay_offsets = (10 * SLOT, 11 * SLOT)


class Rank:
    """Memory, a file and a bucket, and a tier that is not there. Time stands still unless it ``runs``."""

    def __init__(self, *, runs: bool = False) -> None:
        self.now_s = 1000.0
        self.clock = time.monotonic if runs else lambda: self.now_s
        self.memory, self.file, self.bucket = self.engines = [Engine(self.clock) for _ in range(3)]
        self.chain = ChainEngine(
            [*self.engines, None], Relay(), memory=MEMORY, empty_groups=[NO_LAYER], clock=self.clock
        )

    def told(self) -> Completion:
        (done,) = self.chain.finished()
        return done

    def settled(self) -> dict[int, tuple[Outcome, ...]]:
        return {done.job_id: done.outcomes for done in self.chain.settled()}


@pytest.fixture
def rank() -> Rank:
    return Rank()


def chunk(number: int, tier: int, *, group: int = 0, host: int | None = None) -> ChunkIO:
    location = Location(tier, number * SLOT, SLOT)
    offset = None if host is None else host * SLOT
    return ChunkIO(Key(bytes([number]) * 32 + group.to_bytes(4, "big")), location, group, np.array([number]), 0, offset)


def move(number: int, source: int, target: int) -> MoveIO:
    return MoveIO(Key(bytes(36)), 0, Location(source, number * SLOT, SLOT), Location(target, number * SLOT, SLOT))


def numbers(tasks: Sequence[Task]) -> list[int]:
    return [int(task.io.block_ids[0]) for task in tasks]


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
    assert done.shares == (Share(MEMORY, BLOCK, 3.0), Share(FILE, BLOCK, 2.0), Share(BUCKET, BLOCK, 1.0))
    assert rank.chain.idle()
    assert rank.chain.finished() == []


def test_a_job_of_one_tier_is_told_as_its_engine_tells_it(rank: Rank) -> None:
    rank.chain.submit_load(7, [chunk(1, FILE), chunk(2, FILE)])
    rank.now_s += 2.0
    rank.file.run(OK, FAILED, error="no")
    assert rank.told() == Completion(
        7, LOAD, (OK, FAILED), (), BLOCK, 2.0, ("no",), ((FAILED, "io", 1),), (Share(FILE, BLOCK, 2.0),)
    )


@pytest.mark.parametrize("missing", [GONE, 4, -1])
def test_chunks_of_no_tier_fail_those_of_no_layer_are_there_and_the_others_go_on(rank: Rank, missing: int) -> None:
    rank.chain.submit_store(1, [chunk(1, missing), chunk(2, FILE), chunk(3, FILE, group=NO_LAYER)])
    assert rank.chain.finished() == []
    rank.file.run()
    done = rank.told()
    assert (done.outcomes, done.errors) == ((FAILED, OK, OK), ("the tier is not available on this rank",))
    rank.chain.submit_load(2, [chunk(1, missing)])
    assert rank.told().outcomes == (FAILED,)
    rank.chain.submit_load(3, [chunk(1, FILE, group=NO_LAYER), chunk(2, missing, group=NO_LAYER)])
    done = rank.told()
    assert (done.outcomes, done.errors) == ((OK, OK), ())
    rank.chain.submit_store(4, [chunk(1, FILE, group=NO_LAYER), chunk(2, FILE)])
    assert numbers(rank.file.run()) == [2]
    assert rank.told().outcomes == (OK, OK)


def test_a_load_is_given_on_with_its_fence_and_its_haste(rank: Rank) -> None:
    fence = _Passed()
    rank.chain.submit_load(1, [chunk(1, FILE), chunk(2, BUCKET)], expedited=True, fence=fence)
    rank.chain.submit_load(2, [chunk(3, FILE)])
    found = rank.file.take()
    assert {lane: numbers(tasks) for lane, tasks in found.items()} == {Lane.EXPEDITED_LOAD: [1], Lane.LOAD: [3]}
    assert [task.job.fence for task in found[Lane.EXPEDITED_LOAD]] == [fence]
    assert [task.job.fence for task in rank.bucket.take()[Lane.EXPEDITED_LOAD]] == [fence]


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


def test_what_is_asked_of_it_is_true_in_every_state(rank: Rank) -> None:
    def stands() -> tuple[bool, bool]:
        return rank.chain.has_jobs, rank.chain.idle()

    assert stands() == (False, True)
    rank.chain.submit_store(1, [chunk(1, FILE)])
    assert stands() == (True, False)
    rank.chain.submit_moves(9, [move(1, FILE, MEMORY)])
    rank.file.run()
    assert rank.settled() == {9: (OK,)}
    assert stands() == (True, False), "there is something to tell"
    assert rank.told().outcomes == (OK,)
    assert stands() == (False, True)
    rank.chain.submit_moves(2, [move(1, FILE, MEMORY)])
    assert stands() == (True, False)
    rank.file.run()
    assert rank.chain.finished() == []
    assert stands() == (True, False)
    assert rank.settled() == {2: (OK,)}
    assert stands() == (False, True)
    rank.file.submit_store(3, [chunk(1, FILE)])
    assert stands() == (False, False), "an engine has something of its own"


def test_results_are_seen_by_whoever_asks_first(rank: Rank) -> None:
    """Of tickets by those who ask for jobs, and of jobs by those who ask for tickets."""
    rank.chain.submit_moves(1, [move(1, MEMORY, FILE)])
    rank.chain.submit_store(2, [chunk(2, BUCKET)])
    rank.file.run()
    rank.bucket.run()
    assert rank.settled() == {1: (OK,)}
    assert rank.told().job_id == 2
    rank.chain.submit_moves(3, [move(1, MEMORY, FILE)])
    rank.file.run()
    assert rank.chain.finished() == []
    assert rank.settled() == {3: (OK,)}


def test_what_was_moved_is_counted_by_tier_and_once(rank: Rank) -> None:
    assert rank.chain.take_work() is None
    rank.chain.submit_store(1, [chunk(1, FILE), chunk(2, BUCKET)])
    rank.chain.submit_moves(2, [move(3, FILE, MEMORY)])
    rank.chain.submit_load(3, [chunk(4, FILE, host=1)], promotion_ticket=3)
    [load] = [task for tasks in [rank.file.take()] for task in tasks[Lane.LOAD]]
    rank.file.jobs.complete([Ending(load, FAILED, "no", "timeout")])
    rank.bucket.run()
    rank.chain.finished()
    rank.file.jobs.complete([Ending(load, FAILED, slot=DROPPED)])
    rank.chain.finished()
    work = rank.chain.take_work()
    assert work is not None
    assert work.payload_bytes == {Act("store", BUCKET): BLOCK}
    assert work.failures == {Failure("load", FILE, "failed", "timeout"): 1}
    assert rank.chain.take_work() is None


# -- tickets ---------------------------------------------------------------------------------------------------------


def test_promotions_are_told_under_their_ticket_in_their_order(rank: Rank) -> None:
    """By the slots: of what this rank has no layer they are filled, of what is not there or in memory they are not."""
    chunks = [
        chunk(1, BUCKET, host=0),
        chunk(2, FILE),
        chunk(3, FILE, host=1),
        chunk(4, MEMORY, host=2),
        chunk(5, FILE, group=NO_LAYER, host=3),
        chunk(6, GONE, host=4),
        chunk(7, FILE, host=5),
    ]
    rank.chain.submit_load(1, chunks, promotion_ticket=9)
    assert [task.io.host_offset for task in rank.memory.run()] == [None]
    found = rank.file.run(OK, FAILED, OK)
    assert [(int(task.io.block_ids[0]), task.io.host_offset) for task in found] == [(2, None), (3, SLOT), (7, 5 * SLOT)]
    assert rank.settled() == {}
    assert [task.io.host_offset for task in rank.bucket.run()] == [0]
    assert rank.told().outcomes == (OK, OK, FAILED, OK, OK, FAILED, OK)
    assert rank.settled() == {9: (OK, FAILED, FAILED, OK, FAILED, OK)}


def test_without_a_ticket_no_slot_is_filled(rank: Rank, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody would be told when it is free again."""
    rank.chain.submit_load(1, [chunk(1, FILE, host=0), chunk(2, FILE)])
    assert [task.io.host_offset for task in rank.file.run()] == [None, None]
    assert rank.told().outcomes == (OK, OK)
    assert "no ticket" in caplog.text
    assert rank.settled() == {}
    caplog.clear()
    rank.chain.submit_load(2, [chunk(2, FILE)])
    assert not caplog.records


def test_relays_go_on_with_each_look(rank: Rank) -> None:
    rank.chain.submit_moves(1, [move(number, FILE, BUCKET) for number in range(3)])
    for _ in range(2):
        rank.file.run()
        assert rank.chain.finished() == []
        rank.bucket.run()
        rank.chain.finished()
    assert rank.settled() == {1: (OK, OK, OK)}


def test_relays_that_wait_for_too_long_are_dropped_although_engines_say_nothing(rank: Rank) -> None:
    rank.chain.submit_moves(1, [move(number, FILE, BUCKET) for number in range(2)])
    rank.chain.submit_moves(2, [move(2, FILE, BUCKET)])
    rank.file.take()
    rank.now_s += 100.0
    assert rank.settled() == {2: (DROPPED,)}


# -- tiers that come and go ------------------------------------------------------------------------------------------


def test_a_tier_serves_from_when_it_joins(rank: Rank) -> None:
    engine = Engine(rank.clock)
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


def test_a_fence_is_of_the_compute_stream_and_of_no_tier_none(rank: Rank) -> None:
    fence = rank.chain.compute_fence()
    assert fence is not None
    assert [fence] == [each for engine in rank.engines for each in engine.fences]
    assert ChainEngine([None, rank.file]).compute_fence() is rank.file.fences[-1]
    assert ChainEngine([None]).compute_fence() is None


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


def test_wait_has_one_limit_for_all_tiers_and_a_least_of_it_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain_module, "WAIT_LIMIT_S", 0.2)
    monkeypatch.setattr(chain_module, "WAIT_LEAST_S", 0.1)
    rank = Rank(runs=True)
    for number, limit_s, least_s in ((1, None, 0.3), (2, 0.05, 0.15)):
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
    assert running.chain.idle()


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
    """What it alone could tell of is given up: a job as FAILED, places as TAINTED."""
    monkeypatch.setattr(chain_module, "CLOSE_PATIENCE_S", 0.2)
    running.file.is_broken = True
    running.bucket.hangs = threading.Event()
    running.chain.submit_store(1, [chunk(1, FILE), chunk(2, BUCKET)])
    running.chain.submit_store(2, [chunk(3, BUCKET), chunk(4, BUCKET)])
    running.chain.submit_moves(3, [move(5, MEMORY, BUCKET)])
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
    assert "The engine of tier 1 did not close well" in caplog.text


def test_tiers_that_hang_are_waited_for_together(running: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain_module, "CLOSE_PATIENCE_S", 0.1)
    for engine in running.engines:
        engine.hangs = threading.Event()
    began_s = time.monotonic()
    running.chain.close(0.0)
    assert 0.1 <= time.monotonic() - began_s < 2.5


def test_where_no_thread_can_be_had_tiers_are_closed_one_after_the_other(
    running: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    running.chain.close(0.1)
    assert [len(engine.closed_within) for engine in running.engines] == [1, 1, 1]


@pytest.mark.parametrize(
    ("path", "hangs", "is_left", "may_go"),
    [
        ("host", False, False, True),
        ("direct", False, False, True),
        ("direct", True, False, False),
        ("direct", False, True, False),
        ("host", True, True, True),
    ],
)
def test_kv_memory_may_go_unless_a_direct_transfer_has_not_ended(
    running: Rank, monkeypatch: pytest.MonkeyPatch, path: str, hangs: bool, is_left: bool, may_go: bool
) -> None:
    """Now, or earlier: then it was left behind. Either way there is no tier afterwards, and any may join again."""
    monkeypatch.setattr(chain_module, "CLOSE_PATIENCE_S", 0.05)
    monkeypatch.setattr(chain_module, "LEAKED", [object()] * is_left)
    running.file.path = path
    if hangs:
        running.file.hangs = threading.Event()
    assert running.chain.release(0.0) is may_go
    assert running.chain.open_tiers == frozenset()
    running.chain.join(BUCKET, running.bucket)
    assert running.chain.open_tiers == {BUCKET}
    assert running.chain.statuses()[FILE].trouble == "unavailable"
