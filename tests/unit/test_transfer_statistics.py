"""What a rank counts for metrics: what waits, why something failed, and how both add up.

Proves: waiting bytes come back to zero however a chunk ends; each chunk that did not end well has a cause in one word,
counted with its outcome; a statistics gives everything once, and two of them add up; samples are bounded.
"""

from __future__ import annotations

import numpy as np
import pytest

from nixl_offload.engine.jobs import JobTable
from nixl_offload.engine.records import ChunkIO, Completion, Ending, Job
from nixl_offload.engine.states import Lane, WorkKind
from nixl_offload.engine.streams import READY
from nixl_offload.engine.transfer_statistics import MAX_SAMPLES, Act, Failure, TransferStatistics
from nixl_offload.types import Key, Location, Outcome

SIZE = 100


class Clock:
    """Stands still until a test moves it."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def table(clock: Clock) -> JobTable:
    return JobTable(store_queue_limit_bytes=3 * SIZE, clock=clock)


def add(table: JobTable, job_id: int, chunks: int, lane: Lane, clock: Clock) -> None:
    io = ChunkIO(Key(b"k"), Location(0, 0, 4096), 0, np.zeros(1, dtype=np.int32), 0)
    kind = {Lane.LOAD: WorkKind.LOAD, Lane.STORE: WorkKind.STORE, Lane.BACKGROUND: WorkKind.WRITE_THROUGH}[lane]
    table.add(Job(job_id, kind, READY, clock()), [(io, SIZE)] * chunks, lane)


def causes(table: JobTable) -> dict[int, list[tuple[str, str, int]]]:
    return {
        result.job_id: [(outcome.value, cause, count) for outcome, cause, count in result.causes]
        for result in table.drain()
    }


def test_causes_of_what_was_never_begun(table: JobTable, clock: Clock) -> None:
    add(table, 1, 5, Lane.STORE, clock)
    add(table, 2, 1, Lane.LOAD, clock)
    add(table, 3, 1, Lane.BACKGROUND, clock)
    add(table, 4, 1, Lane.LOAD, clock)
    table.refuse(Lane.LOAD, lambda task: "storage is out of use: io" if task.job.job_id == 2 else None)
    clock.now_s = 31.0
    table.expire_loads(timeout_s=10.0)
    taken = table.take(Lane.STORE, lambda task: 16)
    assert len(taken) == 3
    table.complete(Ending(task, Outcome.OK) for task in taken)
    assert causes(table) == {
        1: [("dropped", "queue_full", 2)],
        2: [("failed", "disabled", 1)],
        3: [("dropped", "no_time", 1)],
        4: [("failed", "timeout", 1)],
    }
    assert table.waiting_bytes() == (0, 0, 0)


def result(kind: WorkKind, *, moved: int = SIZE, failed: int = 0) -> Completion:
    troubles = ((Outcome.FAILED, "io", failed),) if failed else ()
    return Completion(1, kind, (), bytes_moved=moved, seconds=0.5, causes=troubles)


def test_a_tally_names_operations_and_gives_everything_once() -> None:
    statistics = TransferStatistics()
    assert statistics.take() is None
    statistics.add(0, result(WorkKind.STORE))
    statistics.add(1, result(WorkKind.LOAD, failed=2))
    statistics.add(1, result(WorkKind.WRITE_THROUGH))
    statistics.add(1, result(WorkKind.FETCH, moved=0, failed=1))
    work = statistics.take()
    assert work is not None
    assert work.payload_bytes == {Act("store", 0): SIZE, Act("load", 1): SIZE, Act("write_through", 1): SIZE}
    assert work.seconds == {act: [0.5] for act in work.payload_bytes}, "nothing of what brought nothing"
    assert work.failures == {Failure("load", 1, "failed", "io"): 2, Failure("fetch", 1, "failed", "io"): 1}
    assert statistics.take() is None
    both = work.merge(work)
    assert both.payload_bytes[Act("load", 1)] == 2 * SIZE
    assert both.seconds[Act("load", 1)] == [0.5, 0.5]
    assert both.failures[Failure("load", 1, "failed", "io")] == 4
    assert work.seconds[Act("load", 1)] == [0.5], "what was merged is as it was"


def test_samples_are_bounded_and_bytes_are_not_lost() -> None:
    statistics = TransferStatistics()
    for _ in range(MAX_SAMPLES + 5):
        statistics.add(0, result(WorkKind.STORE))
    work = statistics.take()
    assert work is not None
    assert len(work.seconds[Act("store", 0)]) == MAX_SAMPLES
    assert work.payload_bytes[Act("store", 0)] == (MAX_SAMPLES + 5) * SIZE
