"""What a rank counts for metrics: what waits, why something failed, and how both add up.

Proves: waiting bytes come back to zero however a chunk ends; each chunk that did not end well has a cause in one word,
counted with its outcome; a statistics gives everything once, and two of them add up; samples are bounded.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from nixl_offload.chunk.layout import GroupLayout, KVLayout, RegionSpec
from nixl_offload.engine.jobs import JobTable, TierQueue
from nixl_offload.engine.records import Chunk, Job, Share
from nixl_offload.engine.states import Lane, Operation, WorkKind
from nixl_offload.engine.streams import READY
from nixl_offload.engine.transfer_statistics import MAX_SAMPLES, Act, Failure, TransferStatistics
from nixl_offload.types import Key, Location, Outcome

SIZE = 100
LAYOUT = KVLayout((RegionSpec(0, 1 << 20, 64, SIZE, SIZE),), (GroupLayout.of_pages([(0, SIZE)]),), 1)


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
    table = JobTable(clock=clock, load_timeout_s=10.0)
    table.use([TierQueue(table, 0, LAYOUT, store_limit_bytes=3 * SIZE)])
    return table


def add(table: JobTable, number: int, chunks: int, lane: Lane) -> None:
    kind = {Lane.LOAD: WorkKind.LOAD, Lane.STORE: WorkKind.STORE, Lane.BACKGROUND: WorkKind.WRITE_THROUGH}[lane]
    ids = {"ticket": number} if kind.in_background else {"job_id": number}
    ios = [
        Chunk(Key(b"k"), Location(0, 0, 4096), 0, np.zeros(1, dtype=np.int32), kind=kind, position=at)
        for at in range(chunks)
    ]
    table.add(Job(kind, ios, chunks, READY, table.clock(), **ids), lane)


def failures(table: JobTable) -> dict[tuple[str, str, str], int]:
    work = table.take_work()
    return {} if work is None else {(why.operation, why.outcome, why.cause): n for why, n in work.failures.items()}


def test_causes_of_what_was_never_begun(table: JobTable, clock: Clock) -> None:
    add(table, 1, 5, Lane.STORE)
    add(table, 2, 1, Lane.LOAD)
    add(table, 3, 1, Lane.BACKGROUND)
    add(table, 4, 1, Lane.LOAD)
    table.queues[0].refuse(Lane.LOAD, lambda chunk: "storage is out of use: io" if chunk.job.job_id == 2 else None)
    clock.now_s = 31.0
    table.expire()
    taken = table.queues[0].take(Lane.STORE, lambda chunk: 16)
    assert len(taken) == 3
    for chunk in taken:
        chunk.end(Outcome.OK)
    table.complete(taken)
    assert failures(table) == {
        ("store", "dropped", "queue_full"): 2,
        ("load", "failed", "disabled"): 1,
        ("write_through", "dropped", "no_time"): 1,
        ("load", "failed", "timeout"): 1,
    }
    assert table.queues[0].waiting() == (0, 0, 0)


def share(operation: Operation, tier: int, *, moved: int = SIZE, failed: int = 0) -> Share:
    return Share(
        operation, tier, SIZE, moved, 0.5, failures=Counter({(Outcome.FAILED, "io"): failed} if failed else {})
    )


def test_a_tally_names_operations_and_gives_everything_once() -> None:
    statistics = TransferStatistics()
    assert statistics.take() is None
    statistics.add(share("store", 0))
    statistics.add(share("load", 1, failed=2))
    statistics.add(share("write_through", 1))
    statistics.add(share("fetch", 1, moved=0, failed=1))
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
        statistics.add(share("store", 0))
    work = statistics.take()
    assert work is not None
    assert len(work.seconds[Act("store", 0)]) == MAX_SAMPLES
    assert work.payload_bytes[Act("store", 0)] == (MAX_SAMPLES + 5) * SIZE
