"""Proves how long stores may take when their KV blocks are to be reused: until their step ends, then 5 ms to find a
slot, then the time of a gather. Time is simulated: it passes only while the engine's caller waits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence

import numpy as np
import pytest

from nixl_offload.chunk.layout import GroupLayout, KVLayout, RegionSpec
from nixl_offload.engine.jobs import FENCE_POLL_S, STORE_GRACE_S, JobTable, TierQueue
from nixl_offload.engine.records import Chunk, ChunkState, Job, Lane, WorkKind
from nixl_offload.engine.streams import READY, Fence
from nixl_offload.types import Key, Location, Outcome

OK, DROPPED = Outcome.OK, Outcome.DROPPED
LIMIT_S = 2.0
LAYOUT = KVLayout((RegionSpec(0, 1 << 20, 64, 4096, 4096),), (GroupLayout.of_pages([(0, 4096)]),), 1)


class World:
    """A clock that advances only in waits, and the events at its times."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self._plans: list[tuple[float, Callable[[], None]]] = []

    def clock(self) -> float:
        return self.now_s

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        self._plans.append((100.0 + seconds, act))
        self._plans.sort(key=lambda plan: plan[0])

    def step(self, seconds: float) -> Fence:
        """The fence of a step that ends at that time."""
        return _Step(self, 100.0 + seconds)

    def pass_time(self, seconds: float) -> None:
        """Advance the clock, at most to the next event."""
        until_s = self.now_s + seconds
        if self._plans and self._plans[0][0] <= until_s:
            self.now_s, act = self._plans.pop(0)
            act()
        else:
            self.now_s = until_s

    def table(self, tiers: int = 1) -> JobTable:
        """A table whose callers wait in simulated time."""
        table = JobTable(clock=self.clock)
        table.use(TierQueue(table, tier, LAYOUT, store_limit_bytes=1 << 20) for tier in range(tiers))
        table._progress = _PlayedCondition(self, table._lock)  # type: ignore[assignment]
        return table

    def wait(self, table: JobTable, job_ids: Collection[int] = (1,)) -> float:
        """Return how long the caller waited, in simulated seconds."""
        began_s = self.now_s
        table.wait(job_ids, LIMIT_S)
        return self.now_s - began_s


class _Step:
    def __init__(self, world: World, ends_s: float) -> None:
        self._world, self._ends_s = world, ends_s

    def done(self) -> bool:
        """See Fence."""
        return self._world.now_s >= self._ends_s


class _PlayedCondition:
    """As ``threading.Condition``, in the time of a world."""

    def __init__(self, world: World, lock: threading.Lock) -> None:
        self._world, self._lock = world, lock

    def wait(self, timeout: float) -> None:
        """Wait without the lock, as a real condition."""
        self._lock.release()
        try:
            self._world.pass_time(timeout)
        finally:
            self._lock.acquire()

    def wait_for(self, predicate: Callable[[], bool], timeout: float = 1e9) -> bool:
        ends_s = self._world.now_s + timeout
        while not predicate():
            if self._world.now_s >= ends_s:
                return False
            self.wait(ends_s - self._world.now_s)
        return True

    def notify_all(self) -> None:
        return


def add(table: JobTable, job_id: int, step: Fence, chunks: int = 1, tier: int = 0) -> None:
    """Queue a store."""
    made = [
        Chunk(Key(bytes(36)), Location(tier, 0, 4096), 0, np.zeros(1, dtype=np.int32), position=at)
        for at in range(chunks)
    ]
    table.submit(Job(WorkKind.STORE, made, chunks, step, job_id))


def take(table: JobTable, count: int = 16, lane: Lane = Lane.URGENT_STORE, tier: int = 0) -> list[Chunk]:
    """Take stores as a pump with this many slots."""
    return table.queues[tier].take(lane, lambda _: count)


def gathered(table: JobTable, chunks: Sequence[Chunk], outcome: Outcome = OK) -> None:
    """As the pump: the blocks are gathered, and will be written."""
    table.advance(chunks, ChunkState.TRANSFER)
    for chunk in chunks:
        chunk.end(outcome)
    table.complete(chunks)


def outcomes(table: JobTable) -> list[Outcome]:
    return [outcome for done in table.finished() for outcome in done.outcomes]


@pytest.fixture
def world() -> World:
    return World()


def test_a_step_that_runs_long_costs_no_store(world: World) -> None:
    """A slot is free, and the gather comes behind the step."""
    table = world.table()
    add(table, 1, world.step(0.080))
    chunks: list[Chunk] = []
    world.after(0.001, lambda: chunks.extend(take(table)))
    world.after(0.081, lambda: gathered(table, chunks))
    assert world.wait(table, [1]) == pytest.approx(0.081)
    assert outcomes(table) == [OK]


@pytest.mark.parametrize("step_s", [0.0, 0.0199, 0.5])
def test_without_a_slot_the_next_step_begins_5_ms_after_this_one_has_ended(world: World, step_s: float) -> None:
    """Once the wait had steps of 20 ms that began anywhere within the step, and cost 20 to 60 ms for nothing."""
    table = world.table()
    add(table, 1, world.step(step_s), chunks=3)
    assert step_s <= world.wait(table, [1]) <= step_s + STORE_GRACE_S + FENCE_POLL_S + 1e-9
    assert outcomes(table) == [DROPPED] * 3
    assert STORE_GRACE_S <= 0.005


def test_tiers_without_slots_share_the_5_ms(world: World) -> None:
    """Once each tier held up the step in turn."""
    table = world.table(4)
    for at in range(4):
        add(table, at, world.step(0.010 * (4 - at)), tier=at)
    held_s = world.wait(table, range(4))
    assert 0.040 + STORE_GRACE_S <= held_s <= 0.040 + STORE_GRACE_S + FENCE_POLL_S + 1e-9
    assert outcomes(table) == [DROPPED] * 4


def test_what_has_a_slot_is_gathered_and_the_rest_dropped(world: World) -> None:
    """Staging has two slots left; their gather takes longer than the grace, and cannot be stopped."""
    table = world.table()
    add(table, 1, world.step(0.010), chunks=5)
    chunks: list[Chunk] = []
    world.after(0.002, lambda: chunks.extend(take(table, 2)))
    world.after(0.018, lambda: gathered(table, chunks))
    assert world.wait(table, [1]) == pytest.approx(0.018)
    assert outcomes(table) == [OK, OK, DROPPED, DROPPED, DROPPED]
    assert take(table) == [], "nothing is left in the queue"


def test_a_step_that_never_ends_holds_nobody_for_ever(world: World) -> None:
    table = world.table()
    add(table, 1, world.step(1e6))
    assert world.wait(table, [1]) <= LIMIT_S + STORE_GRACE_S + FENCE_POLL_S + 1e-9
    assert outcomes(table) == [DROPPED]


def test_tiers_that_read_on_share_the_limit_and_are_given_up_then(world: World) -> None:
    """A mover's reads cannot be stopped; the data that it writes is worthless."""
    table, chunks = world.table(3), []
    for at in range(3):
        add(table, at, READY, tier=at)
        chunks += take(table, lane=Lane.STORE, tier=at)
    table.advance(chunks, ChunkState.BORROWED)
    assert world.wait(table, range(3)) == pytest.approx(LIMIT_S)
    assert [chunk.state for chunk in chunks] == [ChunkState.DISOWNED] * 3


class Broken:
    """The fence of a device that has failed."""

    def done(self) -> bool:
        """See Fence."""
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_a_device_out_of_order_drops_the_store_and_raises_nothing(world: World) -> None:
    """An error of ``wait`` would end the engine. The next use of the device will report the failure."""
    table = world.table()
    add(table, 1, Broken())
    assert world.wait(table, [1]) == pytest.approx(STORE_GRACE_S)
    assert outcomes(table) == [DROPPED]


def test_a_load_that_is_expedited_and_waited_for_is_claimed_once() -> None:
    """It is in its lane twice then. If read twice, it would write to its blocks after its request has them."""
    table = JobTable(clock=time.monotonic)
    table.use([TierQueue(table, 0, LAYOUT, store_limit_bytes=1 << 20)])
    chunks = [
        Chunk(Key(bytes([at]) * 32 + bytes(4)), Location(0, at * 4096, 4096), 0, np.array([at], dtype=np.int32))
        for at in range(3)
    ]
    table.submit(Job(WorkKind.LOAD, chunks, 3, READY, 1, is_expedited=True))
    waiter = threading.Thread(target=table.wait, args=([1], 30.0))
    waiter.start()
    give_up_s = time.monotonic() + 30.0
    while len(table.queues[0].lanes[Lane.EXPEDITED_LOAD]) < 6 and time.monotonic() < give_up_s:
        time.sleep(0.001)
    taken = take(table, lane=Lane.EXPEDITED_LOAD)
    gathered(table, taken)
    waiter.join()
    assert [int(chunk.block_ids[0]) for chunk in taken] == [0, 1, 2]
    assert take(table, lane=Lane.EXPEDITED_LOAD) == []
