"""The table of an engine's jobs without an engine: what may wait, who is taken when, and what every end is told as.

The clock stands still: no test waits for it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from nixl_offload.chunk.layout import GroupLayout, KVLayout, RegionSpec
from nixl_offload.engine import jobs
from nixl_offload.engine.jobs import EXPIRE_EVERY_S, MOVE_QUEUE_LIMIT_S, JobTable, TierQueue
from nixl_offload.engine.records import Chunk, Completion, Job
from nixl_offload.engine.staging import Slot
from nixl_offload.engine.states import ChunkState, Lane, WorkKind
from nixl_offload.engine.streams import READY
from nixl_offload.engine.transfer_statistics import Failure
from nixl_offload.types import Key, Location, Outcome
from tests.unit.engine_rig import until
from tests.unit.rank_rig import causes_of

OK, FAILED, DROPPED, TAINTED = Outcome.OK, Outcome.FAILED, Outcome.DROPPED, Outcome.TAINTED
STORE, LOAD, PROMOTION = WorkKind.STORE, WorkKind.LOAD, WorkKind.PROMOTION
WRITE_THROUGH, FETCH = WorkKind.WRITE_THROUGH, WorkKind.FETCH
CHUNK = 4096
LOAD_TIMEOUT_S = 10.5
LAYOUT = KVLayout((RegionSpec(0, 1 << 20, 64, CHUNK, CHUNK),), (GroupLayout.of_pages([(0, CHUNK)]),) * 3, 1)
LANE_OF = {STORE: Lane.STORE, LOAD: Lane.LOAD, WRITE_THROUGH: Lane.BACKGROUND, FETCH: Lane.BACKGROUND}


class Table(JobTable):
    """Of one tier, with a clock to be set, and a limit of four chunks."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        super().__init__(clock=lambda: self.now_s, load_timeout_s=LOAD_TIMEOUT_S)
        self.queue = TierQueue(self, 0, LAYOUT, store_limit_bytes=4 * CHUNK)
        self.use([self.queue])

    def submit(self, number: int, kind: WorkKind, groups: Sequence[int] = (0,), *, promoted: bool = False) -> Job:
        """A job with a chunk in each of ``groups``."""
        offset = 0 if promoted or kind.in_background else None
        chunks = [
            Chunk(
                Key(bytes([at]) * 32 + group.to_bytes(4, "big")),
                Location(0, at * CHUNK, CHUNK),
                group,
                np.array([at]),
                0,
                offset,
                kind,
                position=at,
            )
            for at, group in enumerate(groups)
        ]
        ids = {"ticket": number} if kind.in_background else {"job_id": number, "ticket": number if promoted else 0}
        slots = range(len(groups)) if promoted else ()
        job = Job(kind, chunks, len(groups), READY, self.now_s, promoted=slots, **ids)
        self.add(job, LANE_OF[kind])
        return job

    def claim(self, kind: WorkKind, room: int = 16) -> list[Chunk]:
        return self.queue.take(LANE_OF[kind], lambda _: room)

    def told(self) -> Completion:
        (completion,) = self.drain()
        return completion

    def ended(self) -> dict[int, tuple[Outcome, ...]]:
        """The tickets that were settled."""
        return {done.job_id: done.outcomes for done in self.settled()}

    def wakes(self) -> bool:
        """Whether the pump would be woken now."""
        rung = self.queue._rung
        self.queue.sleep(0.0)
        return rung


def end(table: JobTable, *chunks: Chunk, as_: Outcome = OK, why: str | None = None, cause: str = "") -> None:
    """As the pump, when a batch has ended. A host slot is filled if the chunk is OK."""
    for chunk in chunks:
        chunk.end(as_, why, cause)
        chunk.is_kept = as_ is OK
    table.complete(chunks)


def numbers(chunks: Sequence[Chunk]) -> list[tuple[int | None, int]]:
    return [(chunk.job.job_id, chunk.group) for chunk in chunks]


def test_what_is_stored_beyond_the_limit_is_dropped_and_loads_are_not() -> None:
    table = Table()
    table.submit(1, STORE, [0] * 3)
    table.submit(2, STORE, [0] * 3)
    table.submit(3, LOAD, [0] * 9)
    table.submit(4, WRITE_THROUGH, [0] * 9)
    assert table.queue.waiting() == (9 * CHUNK, 4 * CHUNK, 9 * CHUNK)
    table.submit(5, STORE)
    assert (table.told().job_id, table.queue.waiting()[1]) == (5, 4 * CHUNK)
    end(table, *[chunk for _ in range(2) for chunk in table.claim(STORE)])
    first, second = table.drain()
    assert (first.outcomes, second.outcomes) == ((OK,) * 3, (OK, DROPPED, DROPPED))
    assert (second.bytes_moved, second.errors) == (CHUNK, ("store queue is full",))
    assert causes_of(second) == ((DROPPED, "queue_full", 2),)
    assert table.queue.waiting()[1] == 0
    table.submit(6, STORE, [0] * 4)
    assert len(table.claim(STORE)) == 4, "there is room again"


def test_chunks_of_a_group_are_taken_together_and_as_many_as_there_is_room_for() -> None:
    table = Table()
    table.submit(1, LOAD, [1, 0, 1, 0, 1])
    table.submit(2, LOAD, [1])
    assert table.claim(LOAD, room=0) == []
    assert list(table.queue.busy_lanes()) == [Lane.LOAD]
    assert [numbers(table.claim(LOAD, room)) for room in (16, 2, 16, 16)] == [
        [(1, 0)] * 2,
        [(1, 1)] * 2,
        [(1, 1)],
        [(2, 1)],
    ]
    assert table.claim(LOAD) == []
    assert list(table.queue.busy_lanes()) == []
    assert table.queue.waiting() == (0, 0, 0)


ALIKE = {"job": 1, "kind": LOAD, "group": 0, "key_group": 0}


@pytest.mark.parametrize("other", [{}, {"job": 2}, {"kind": PROMOTION}, {"group": 1}, {"key_group": 1}])
def test_only_chunks_that_are_alike_in_all_of_it_travel_together(other: dict[str, Any]) -> None:
    """A batch has one layout, and headers that name one group."""
    jobs = {number: Job(LOAD, [], 0, READY, 0.0) for number in (1, 2)}

    def chunk(number: int, *, job: int, kind: WorkKind, group: int, key_group: int) -> Chunk:
        key = Key(bytes([number]) * 32 + key_group.to_bytes(4, "big"))
        made = Chunk(key, Location(0, 0, CHUNK), group, np.array([number]), kind=kind)
        made.job = jobs[job]
        return made

    assert chunk(1, **ALIKE).travels_with(chunk(2, **{**ALIKE, **other})) is not bool(other)


def test_what_is_waited_for_goes_first_by_group_and_once() -> None:
    table = Table()
    table.submit(1, LOAD, [1, 0, 1, 0])
    table.submit(2, STORE, [0])
    assert numbers(table.claim(LOAD, room=1)) == [(1, 0)]
    table.wakes()
    waiter = threading.Thread(target=table.wait, args=([1, 2, 7], 3600.0))
    waiter.start()
    try:
        until(lambda: len(list(table.queue.busy_lanes())) == 4)
        assert table.wakes()
        assert numbers(table.queue.take(Lane.EXPEDITED_LOAD, lambda _: 16)) == [(1, 0)]
        assert numbers(table.queue.take(Lane.EXPEDITED_LOAD, lambda _: 16)) == [(1, 1)] * 2
        assert numbers(table.queue.take(Lane.URGENT_STORE, lambda _: 16)) == [(2, 0)]
        assert table.claim(LOAD) == table.claim(STORE) == []
    finally:
        table.queue.give_up("the test is over")
        waiter.join()
    table.wait([7], 3600.0)
    table.wakes()
    assert not table.wakes()


def test_loads_are_refused_as_long_as_there_is_a_reason() -> None:
    table = Table()
    table.submit(1, LOAD, [0, 0, 0])
    reasons = iter(["the drive is gone", "the drive is gone", None])
    table.queue.refuse(Lane.LOAD, lambda _: next(reasons))
    (last,) = table.claim(LOAD)
    end(table, last)
    told = table.told()
    assert told.outcomes == (FAILED, FAILED, OK)
    assert (told.errors, causes_of(told)) == (("the drive is gone",), ((FAILED, "disabled", 2),))


def test_a_chunk_goes_on_unless_it_was_given_up() -> None:
    table = Table()
    table.submit(1, STORE, [0, 0, 0])
    one, two, three = table.claim(STORE)
    assert table.advance([one, two, three], ChunkState.BORROWED) == [True] * 3
    assert table.advance([one], ChunkState.BORROWED) == [True], "it stays there"
    end(table, one, as_=FAILED, why="first", cause="io")
    end(table, one)
    assert table.advance([one, two], ChunkState.TRANSFER) == [False, True]
    with pytest.raises(RuntimeError, match="chunk of job 1 cannot go from TRANSFER to CLAIMED"):
        table.advance([two], ChunkState.CLAIMED)
    end(table, two, three)
    told = table.told()
    assert (told.outcomes, told.errors) == ((FAILED, OK, OK), ("first",)), "the first word counts"
    assert not table.has_jobs
    assert table.queue.empty()


def test_loads_that_take_too_long_fail_unless_their_blocks_are_being_written() -> None:
    table = Table()
    table.submit(1, LOAD, [0, 1, 2])
    (moving,), (writing,) = table.claim(LOAD), table.claim(LOAD)
    table.advance([writing], ChunkState.SCATTER)
    table.submit(2, STORE)
    table.now_s += 10.0
    table.submit(3, LOAD)
    table.expire()
    assert table.drain() == []
    table.now_s += 1.0
    table.expire()
    assert (moving.outcome, writing.outcome) == (FAILED, None)
    assert table.advance([moving], ChunkState.SCATTER) == [False]
    end(table, writing)
    told = table.told()
    assert (told.job_id, told.outcomes) == (1, (FAILED, OK, FAILED))
    assert causes_of(told) == ((FAILED, "timeout", 2),)
    assert told.seconds == pytest.approx(11.0)
    assert numbers(table.claim(LOAD)) == [(3, 0)]
    table.now_s += EXPIRE_EVERY_S / 2
    job = table.submit(4, LOAD)
    job.submitted_s = job.chunks[0].queued_s = 0.0
    table.expire()
    assert table.drain() == [], "looked at a moment ago"


def test_background_work_that_nothing_has_come_of_is_dropped() -> None:
    table = Table()
    table.submit(1, WRITE_THROUGH, [0, 1])
    table.submit(2, FETCH, [0])
    assert len(table.claim(WRITE_THROUGH, room=1)) == 1
    table.now_s += MOVE_QUEUE_LIMIT_S
    table.submit(3, WRITE_THROUGH)
    table.expire()
    assert table.ended() == {1: (DROPPED, DROPPED), 2: (DROPPED,)}
    work = table.take_work()
    assert work is not None
    assert work.failures[Failure("write_through", 0, "dropped", "no_time")] == 2
    assert [chunk.job.ticket for chunk in table.claim(WRITE_THROUGH)] == [3]
    assert table.queue.waiting() == (0, 0, 0)


def test_slots_are_told_of_when_nothing_touches_them_any_more() -> None:
    """The job is told before, where its blocks are served."""
    table = Table()
    table.submit(1, LOAD, [0, 0], promoted=True)
    one, two = table.claim(LOAD)
    end(table, one)
    table.now_s += LOAD_TIMEOUT_S
    table.expire()
    assert table.told().outcomes == (OK, FAILED)
    assert (table.ended(), table.has_jobs) == ({}, True)
    two.host = Slot(0, 0, np.empty(CHUNK, dtype=np.uint8))
    two.end(OK)
    table.complete([two], tainted=True)
    end(table, one, as_=FAILED)
    assert table.drain() == [], "that was told before"
    assert table.ended() == {1: (OK, TAINTED)}
    assert not table.has_jobs
    table.submit(2, LOAD, promoted=True)
    end(table, *table.claim(LOAD), as_=FAILED, why="no")
    told = table.told()
    assert (told.outcomes, table.ended()) == ((FAILED,), {2: (FAILED,)}), "at once"
    assert causes_of(told) == ((FAILED, "io", 1),), "where nothing is said of it"


@pytest.mark.parametrize("by", ["an end", "the clock"])
def test_who_waits_for_blocks_waits_for_the_last_of_them(by: str) -> None:
    """While a load writes to its blocks nothing else ends the wait, and no other job's end does."""
    table = Table()
    table.submit(1, LOAD)
    table.submit(2, LOAD)
    (task,) = table.claim(LOAD)
    if by == "an end":
        table.advance([task], ChunkState.SCATTER)
    waiter = threading.Thread(target=table.wait, args=([1, 2], 0.0 if by == "an end" else 3600.0))
    waiter.start()
    waiter.join(0.05)
    assert waiter.is_alive()
    if by == "an end":
        end(table, task)
    else:
        table.now_s += LOAD_TIMEOUT_S
        table.expire()
    waiter.join(10.0)
    assert not waiter.is_alive()
    assert {told.job_id: told.outcomes for told in table.drain()} == {
        1: (OK if by == "an end" else FAILED,),
        2: (FAILED,),
    }


def test_the_end_of_the_pump_ends_everything() -> None:
    """What waits is dropped where nobody needs it; what may still be touched is never used again."""
    table = Table()
    table.submit(1, STORE, [0, 1])
    table.submit(2, LOAD, [0, 1], promoted=True)
    table.submit(3, WRITE_THROUGH, [0, 1])
    for kind in (STORE, LOAD, WRITE_THROUGH):
        assert len(table.claim(kind)) == 1
    table.queue.give_up("the disk is gone")
    assert {told.job_id: told.outcomes for told in table.drain()} == {1: (FAILED, DROPPED), 2: (FAILED, FAILED)}
    assert table.ended() == {2: (TAINTED, FAILED), 3: (TAINTED, DROPPED)}
    table.submit(4, STORE, [0, 0])
    told = table.told()
    assert (told.outcomes, told.errors, causes_of(told)) == (
        (FAILED, FAILED),
        ("the disk is gone",),
        ((FAILED, "closed", 2),),
    )
    assert not table.has_jobs
    assert table.queue.waiting() == (0, 0, 0)


def test_blocks_that_are_needed_back_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is queued is dropped, what is being read is worthless; a load fails where nobody writes to its blocks."""
    monkeypatch.setattr(jobs, "STORE_GRACE_S", 0.0)
    table = Table()
    table.submit(1, STORE, [0, 1])
    (reading,) = table.claim(STORE)
    table.advance([reading], ChunkState.BORROWED)
    table.wait([1], 0.0)
    assert table.advance([reading], ChunkState.TRANSFER) == [False]
    end(table, reading)
    told = table.told()
    assert told.outcomes == (FAILED, DROPPED)
    assert {cause for _, cause, _ in causes_of(told)} == {"needed_back"}
    table.submit(2, LOAD, [0, 1])
    table.wait([2], 0.0)
    told = table.told()
    assert (told.outcomes, causes_of(told)) == ((FAILED, FAILED), ((FAILED, "no_answer", 2),))
    assert list(table.queue.busy_lanes()) == []
    table.submit(3, STORE)
    table.claim(STORE)
    table.wait([3], 0.0)
    assert table.told().outcomes == (DROPPED,), "nothing of it was written"
