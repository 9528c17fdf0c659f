"""The table of an engine's jobs without an engine: what may wait, who is taken when, and what every end is told as.

The clock stands still: no test waits for it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from nixl_offload.engine.jobs import EXPIRE_EVERY_S, MOVE_QUEUE_LIMIT_S, JobTable
from nixl_offload.engine.records import ChunkIO, Completion, Ending, Job, Task, travel_together
from nixl_offload.engine.states import ChunkState, Lane, WorkKind
from nixl_offload.engine.streams import READY
from nixl_offload.types import Key, Location, Outcome

OK, FAILED, DROPPED, TAINTED = Outcome.OK, Outcome.FAILED, Outcome.DROPPED, Outcome.TAINTED
STORE, LOAD, PROMOTION = WorkKind.STORE, WorkKind.LOAD, WorkKind.PROMOTION
WRITE_THROUGH, FETCH = WorkKind.WRITE_THROUGH, WorkKind.FETCH
CHUNK = 4096
LANE_OF = {STORE: Lane.STORE, LOAD: Lane.LOAD, WRITE_THROUGH: Lane.BACKGROUND, FETCH: Lane.BACKGROUND}


class Table(JobTable):
    """With a clock to be set, and a limit of four chunks."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        super().__init__(store_queue_limit_bytes=4 * CHUNK, clock=lambda: self.now_s)

    def submit(self, number: int, kind: WorkKind, groups: Sequence[int] = (0,), *, promoted: bool = False) -> Job:
        """A job with a chunk in each of ``groups``."""
        job = Job(number, kind, READY, self.now_s)
        offset = 0 if promoted or kind.in_background else None
        chunks = [
            ChunkIO(
                Key(bytes([at]) * 32 + group.to_bytes(4, "big")),
                Location(0, at * CHUNK, CHUNK),
                group,
                np.array([at]),
                0,
                offset,
            )
            for at, group in enumerate(groups)
        ]
        self.add(job, [(io, CHUNK) for io in chunks], LANE_OF[kind])
        return job

    def claim(self, kind: WorkKind, room: int = 16) -> list[Task]:
        return self.take(LANE_OF[kind], lambda _: room)

    def told(self) -> Completion:
        (completion,) = self.drain()
        return completion

    def wakes(self) -> bool:
        """Whether the pump would be woken now."""
        woken = self._woken
        self.sleep(0.0)
        return woken


def numbers(tasks: Sequence[Task]) -> list[tuple[int, int]]:
    return [(task.job.job_id, task.io.group) for task in tasks]


def test_what_is_stored_beyond_the_limit_is_dropped_and_loads_are_not() -> None:
    table = Table()
    table.submit(1, STORE, [0] * 3)
    table.submit(2, STORE, [0] * 3)
    table.submit(3, LOAD, [0] * 9)
    table.submit(4, WRITE_THROUGH, [0] * 9)
    assert table.waiting_bytes() == (9 * CHUNK, 4 * CHUNK, 9 * CHUNK)
    table.submit(5, STORE)
    assert (table.told().job_id, table.waiting_bytes()[1]) == (5, 4 * CHUNK)
    table.complete([Ending(task, OK) for _ in range(2) for task in table.claim(STORE)])
    first, second = table.drain()
    assert (first.outcomes, second.outcomes) == ((OK,) * 3, (OK, DROPPED, DROPPED))
    assert (second.bytes_moved, second.errors) == (CHUNK, ("store queue is full",))
    assert second.causes == ((DROPPED, "queue_full", 2),)
    assert table.waiting_bytes()[1] == 0
    table.submit(6, STORE, [0] * 4)
    assert len(table.claim(STORE)) == 4, "there is room again"


def test_chunks_of_a_group_are_taken_together_and_as_many_as_there_is_room_for() -> None:
    table = Table()
    table.submit(1, LOAD, [1, 0, 1, 0, 1])
    table.submit(2, LOAD, [1])
    assert table.claim(LOAD, room=0) == []
    assert list(table.busy_lanes()) == [Lane.LOAD]
    assert [numbers(table.claim(LOAD, room)) for room in (16, 2, 16, 16)] == [
        [(1, 0)] * 2,
        [(1, 1)] * 2,
        [(1, 1)],
        [(2, 1)],
    ]
    assert table.claim(LOAD) == []
    assert list(table.busy_lanes()) == []
    assert table.waiting_bytes() == (0, 0, 0)


ALIKE = {"job": 1, "kind": LOAD, "group": 0, "key_group": 0}


@pytest.mark.parametrize("other", [{}, {"job": 2}, {"kind": PROMOTION}, {"group": 1}, {"key_group": 1}])
def test_only_chunks_that_are_alike_in_all_of_it_travel_together(other: dict[str, Any]) -> None:
    """A batch has one layout, and headers that name one group."""
    jobs = {number: Job(number, LOAD, READY, 0.0) for number in (1, 2)}

    def task(number: int, *, job: int, kind: WorkKind, group: int, key_group: int) -> Task:
        key = Key(bytes([number]) * 32 + key_group.to_bytes(4, "big"))
        return Task(jobs[job], ChunkIO(key, Location(0, 0, CHUNK), group, np.array([number]), 0), kind, CHUNK)

    assert travel_together(task(1, **ALIKE), task(2, **{**ALIKE, **other})) is not bool(other)


def test_a_job_of_no_chunks_ends_at_once() -> None:
    table = Table()
    table.submit(1, LOAD, [])
    told = table.told()
    assert (told.outcomes, told.slots, told.ends_job) == ((), (), True)
    assert table.idle()


def test_what_is_waited_for_goes_first_by_group_and_once() -> None:
    table = Table()
    table.submit(1, LOAD, [1, 0, 1, 0])
    table.submit(2, STORE, [0])
    assert numbers(table.claim(LOAD, room=1)) == [(1, 0)]
    table.wakes()
    assert [job.job_id for job in table.expedite([1, 2, 7])] == [1, 2]
    assert table.wakes()
    assert list(table.busy_lanes()) == [Lane.URGENT_STORE, Lane.EXPEDITED_LOAD, Lane.LOAD, Lane.STORE]
    assert table.expedite([7]) == []
    assert not table.wakes()
    assert numbers(table.take(Lane.EXPEDITED_LOAD, lambda _: 16)) == [(1, 0)]
    assert numbers(table.take(Lane.EXPEDITED_LOAD, lambda _: 16)) == [(1, 1)] * 2
    assert numbers(table.take(Lane.URGENT_STORE, lambda _: 16)) == [(2, 0)]
    assert table.claim(LOAD) == table.claim(STORE) == []


def test_loads_are_refused_as_long_as_there_is_a_reason() -> None:
    table = Table()
    table.submit(1, LOAD, [0, 0, 0])
    reasons = iter(["the drive is gone", "the drive is gone", None])
    table.refuse(Lane.LOAD, lambda _: next(reasons))
    (last,) = table.claim(LOAD)
    table.complete([Ending(last, OK)])
    told = table.told()
    assert told.outcomes == (FAILED, FAILED, OK)
    assert (told.errors, told.causes) == (("the drive is gone",), ((FAILED, "disabled", 2),))


def test_a_chunk_goes_on_unless_it_was_given_up() -> None:
    table = Table()
    table.submit(1, STORE, [0, 0, 0])
    one, two, three = table.claim(STORE)
    assert table.advance([one, two, three], ChunkState.BORROWED) == [True] * 3
    assert table.advance([one], ChunkState.BORROWED) == [True], "it stays there"
    table.complete([Ending(one, FAILED, "first", "io"), Ending(one, OK)])
    assert table.advance([one, two], ChunkState.TRANSFER) == [False, True]
    with pytest.raises(RuntimeError, match="chunk of job 1 cannot go from TRANSFER to CLAIMED"):
        table.advance([two], ChunkState.CLAIMED)
    table.complete([Ending(two, OK), Ending(three, OK)])
    told = table.told()
    assert (told.outcomes, told.errors) == ((FAILED, OK, OK), ("first",)), "the first word counts"
    assert table.idle()
    assert table.empty()


def test_loads_that_take_too_long_fail_unless_their_blocks_are_being_written() -> None:
    table = Table()
    table.submit(1, LOAD, [0, 1, 2])
    (moving,), (writing,) = table.claim(LOAD), table.claim(LOAD)
    table.advance([writing], ChunkState.SCATTER)
    table.submit(2, STORE)
    table.now_s += 10.0
    table.submit(3, LOAD)
    table.expire_loads(10.5)
    assert table.drain() == []
    table.now_s += 1.0
    table.expire_loads(10.5)
    assert (moving.outcome, writing.outcome) == (FAILED, None)
    assert table.advance([moving], ChunkState.SCATTER) == [False]
    table.complete([Ending(writing, OK)])
    told = table.told()
    assert (told.job_id, told.outcomes) == (1, (FAILED, OK, FAILED))
    assert told.causes == ((FAILED, "timeout", 2),)
    assert told.seconds == pytest.approx(11.0)
    assert numbers(table.claim(LOAD)) == [(3, 0)]
    table.now_s += EXPIRE_EVERY_S / 2
    table.submit(4, LOAD)
    table.expire_loads(0.0)
    assert table.drain() == [], "looked at a moment ago"


def test_background_work_that_nothing_has_come_of_is_dropped() -> None:
    table = Table()
    table.submit(1, WRITE_THROUGH, [0, 1])
    table.submit(2, FETCH, [0])
    assert len(table.claim(WRITE_THROUGH, room=1)) == 1
    table.now_s += MOVE_QUEUE_LIMIT_S
    table.submit(3, WRITE_THROUGH)
    table.expire_loads(3600.0)
    first, second = table.drain()
    assert (first.outcomes, second.outcomes, second.slots) == ((DROPPED, DROPPED), (DROPPED,), (DROPPED,))
    assert first.causes == ((DROPPED, "no_time", 2),)
    assert numbers(table.claim(WRITE_THROUGH)) == [(3, 0)]
    assert table.waiting_bytes() == (0, 0, 0)


def test_slots_are_told_of_when_nothing_touches_them_any_more() -> None:
    table = Table()
    table.submit(1, LOAD, [0, 0], promoted=True)
    one, two = table.claim(LOAD)
    table.complete([Ending(one, OK, slot=OK), Ending(two, FAILED, "late", "io")])
    told = table.told()
    assert (told.outcomes, told.slots, told.ends_job) == ((OK, FAILED), None, True)
    assert not table.idle()
    table.complete([Ending(two, OK, slot=TAINTED), Ending(one, OK, slot=FAILED)])
    later = table.told()
    assert (later.outcomes, later.slots, later.ends_job) == ((), (OK, TAINTED), False)
    assert (later.bytes_moved, later.seconds) == (0, 0.0), "that was told before"
    assert table.idle()
    table.submit(2, LOAD, promoted=True)
    table.complete([Ending(task, FAILED, "no", slot=FAILED) for task in table.claim(LOAD)])
    told = table.told()
    assert (told.outcomes, told.slots, told.ends_job) == ((FAILED,), (FAILED,), True), "at once"
    assert told.causes == ((FAILED, "io", 1),), "where nothing is said of it"


def test_of_a_chunk_that_fills_no_slot_no_slot_is_told() -> None:
    """Though the pump tells of one, where it does not know any more what it had begun."""
    table = Table()
    table.submit(1, LOAD)
    (task,) = table.claim(LOAD)
    table.complete([Ending(task, FAILED, "crashed", "unexpected", FAILED)])
    assert table.told().slots == ()
    assert table.idle()


@pytest.mark.parametrize("by", ["an end", "the clock"])
def test_who_waits_for_blocks_waits_for_the_last_of_them(by: str) -> None:
    """While a load writes to its blocks nothing else ends the wait, and no other job's end does."""
    table = Table()
    jobs = [table.submit(1, LOAD), table.submit(2, LOAD)]
    (task,) = table.claim(LOAD)
    if by == "an end":
        table.advance([task], ChunkState.SCATTER)
    waiter = threading.Thread(target=table.await_blocks, args=(jobs, 0.0 if by == "an end" else 3600.0))
    waiter.start()
    waiter.join(0.05)
    assert waiter.is_alive()
    if by == "an end":
        table.complete([Ending(task, OK)])
    else:
        table.now_s += EXPIRE_EVERY_S
        table.expire_loads(0.0)
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
    table.give_up("the disk is gone")
    ended = {told.job_id: (told.outcomes, told.slots) for told in table.drain()}
    assert ended == {
        1: ((FAILED, DROPPED), ()),
        2: ((FAILED, FAILED), (TAINTED, FAILED)),
        3: ((TAINTED, DROPPED), ()),
    }
    table.submit(4, STORE, [0, 0])
    told = table.told()
    assert (told.outcomes, told.errors, told.causes) == (
        (FAILED, FAILED),
        ("the disk is gone",),
        ((FAILED, "closed", 2),),
    )
    assert table.idle()
    assert table.waiting_bytes() == (0, 0, 0)


def test_blocks_that_are_needed_back_are_given_back() -> None:
    """What is queued is dropped, what is being read is worthless; a load fails where nobody writes to its blocks."""
    table = Table()
    store = table.submit(1, STORE, [0, 1])
    (reading,) = table.claim(STORE)
    table.await_slots([store], table.now_s)
    table.advance([reading], ChunkState.BORROWED)
    table._give_up(reading, "its blocks were needed", "no_answer")
    assert table.advance([reading], ChunkState.TRANSFER) == [False]
    table.complete([Ending(reading, OK)])
    told = table.told()
    assert told.outcomes == (FAILED, DROPPED)
    assert {cause for _, cause, _ in told.causes} == {"needed_back"}
    load = table.submit(2, LOAD, [0, 1])
    table.await_slots([load], table.now_s)
    table.await_blocks([load], 0.0)
    told = table.told()
    assert (told.outcomes, told.causes) == ((FAILED, FAILED), ((FAILED, "no_answer", 2),))
    assert list(table.busy_lanes()) == []
    store = table.submit(3, STORE)
    table.claim(STORE)
    table.await_blocks([store], 0.0)
    assert table.told().outcomes == (DROPPED,), "nothing of it was written"
