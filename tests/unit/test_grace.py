"""Proves what ``wait`` gives a queued store: as long as its step still runs, and a grace after that; never more."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from nixl_offload.engine.jobs import JobTable
from nixl_offload.engine.records import ChunkIO, Ending, Job
from nixl_offload.engine.states import ChunkState, Lane, WorkKind
from nixl_offload.engine.streams import Fence
from nixl_offload.types import Key, Location, Outcome

GRACE_S = 0.05


class Step:
    """The fence of a step that ends when it is told to, or after so many looks."""

    def __init__(self, looks: int | None = None) -> None:
        self._looks = looks
        self._over = threading.Event()

    def done(self) -> bool:
        """See Fence."""
        if self._looks is not None:
            self._looks -= 1
            if self._looks < 0:
                self._over.set()
        return self._over.is_set()


def _table(step: Fence) -> JobTable:
    table = JobTable(store_queue_limit_bytes=1 << 20, clock=time.monotonic)
    io = ChunkIO(Key(bytes(36)), Location(0, 0, 4096), 0, np.zeros(1, dtype=np.int32), 0)
    table.add(Job(1, WorkKind.STORE, step, time.monotonic()), [(io, 4096)], Lane.STORE)
    return table


def _seconds(call: Callable[[], None]) -> float:
    began_s = time.monotonic()
    call()
    return time.monotonic() - began_s


def test_a_step_that_runs_longer_than_the_grace_costs_no_store() -> None:
    """The step ends after the fourth look; then a pump takes the chunk, within the grace."""
    step = Step(looks=3)
    table = _table(step)

    def pump() -> None:
        while not step._over.is_set():
            time.sleep(0.001)
        (task,) = table.take(Lane.URGENT_STORE, lambda task: 1)
        assert table.advance([task], ChunkState.TRANSFER) == [True]
        table.complete([Ending(task, Outcome.OK)])

    thread = threading.Thread(target=pump)
    thread.start()
    took_s = _seconds(lambda: table.wait_source_free([1], GRACE_S, 30.0))
    thread.join()
    (result,) = table.drain()
    assert result.outcomes == (Outcome.OK,)
    assert took_s >= 3 * GRACE_S


@pytest.mark.parametrize("looks", [0, 2])
def test_storage_without_time_gets_one_grace_after_the_step(looks: int) -> None:
    """Nobody takes the chunk."""
    table = _table(Step(looks=looks))
    took_s = _seconds(lambda: table.wait_source_free([1], GRACE_S, 30.0))
    (result,) = table.drain()
    assert result.outcomes == (Outcome.DROPPED,)
    assert (looks + 1) * GRACE_S <= took_s < 15.0


def test_a_step_that_never_ends_holds_nobody_for_ever() -> None:
    table = _table(Step())
    took_s = _seconds(lambda: table.wait_source_free([1], GRACE_S, 0.3))
    (result,) = table.drain()
    assert result.outcomes == (Outcome.DROPPED,)
    assert took_s < 15.0


def test_a_load_that_is_expedited_and_waited_for_is_claimed_once() -> None:
    """It stands in its lane twice then; read twice, its blocks would be written after its request has them."""
    table = JobTable(store_queue_limit_bytes=1 << 20, clock=time.monotonic)
    chunks = [
        ChunkIO(Key(bytes([at]) * 32 + bytes(4)), Location(0, at * 4096, 4096), 0, np.array([at], dtype=np.int32), 0)
        for at in range(3)
    ]
    job = Job(1, WorkKind.LOAD, Step(looks=0), time.monotonic())
    table.add(job, [(io, 4096) for io in chunks], Lane.EXPEDITED_LOAD)
    waiter = threading.Thread(target=table.wait_source_free, args=([1], GRACE_S, 30.0))
    waiter.start()
    give_up_s = time.monotonic() + 30.0
    while len(table._lanes[Lane.EXPEDITED_LOAD]) < 6 and time.monotonic() < give_up_s:
        time.sleep(0.001)
    taken = table.take(Lane.EXPEDITED_LOAD, lambda task: 16)
    table.complete([Ending(task, Outcome.OK) for task in taken])
    waiter.join()
    assert [int(task.io.block_ids[0]) for task in taken] == [0, 1, 2]
    assert table.take(Lane.EXPEDITED_LOAD, lambda task: 16) == []


class Broken:
    """The fence of a device that is out of order."""

    def done(self) -> bool:
        """See Fence."""
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_a_device_out_of_order_drops_the_store_and_raises_nothing() -> None:
    """What ``wait`` raises ends the engine; whoever uses the device next will say so, if it is so."""
    table = _table(Broken())
    table.wait_source_free([1], GRACE_S, 30.0)
    (result,) = table.drain()
    assert result.outcomes == (Outcome.DROPPED,)
