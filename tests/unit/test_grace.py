"""Proves how long stores may take when their KV blocks are to be reused: until their step ends, then 5 ms to find a
slot, then the time of a gather. Time is simulated: it passes only while the engine's caller waits.
"""

from __future__ import annotations

import threading
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
LAYOUT = KVLayout((RegionSpec(1 << 20, 64, 4096, 4096),), (GroupLayout.of_pages([(0, 4096)]),), 1)


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


class Broken:
    """The fence of a device that has failed."""

    def done(self) -> bool:
        """See Fence."""
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


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


HELD_S = STORE_GRACE_S + FENCE_POLL_S + 1e-9
"""How long a store without a slot holds the next step after its own has ended, at most."""


@pytest.mark.parametrize(
    ("steps_s", "chunks", "taken", "held_s", "ended"),
    [
        # A slot is free, and the gather comes behind the step.
        ([0.080], 1, (1, 0.001, 0.081), (0.081, 0.081), [OK]),
        # Staging has two slots left. Their gather takes longer than the grace, and cannot be stopped.
        ([0.010], 5, (2, 0.002, 0.018), (0.018, 0.018), [OK] * 2 + [DROPPED] * 3),
        # No slot is free. Once such waits had steps of 20 ms, and cost 20 to 60 ms for nothing.
        *(([step_s], 3, None, (step_s, step_s + HELD_S), [DROPPED] * 3) for step_s in (0.0, 0.0199, 0.5)),
        # Tiers share the grace. Once each held up the step in turn.
        ([0.040, 0.030, 0.020, 0.010], 1, None, (0.045, 0.040 + HELD_S), [DROPPED] * 4),
        # A step that never ends holds nobody for ever.
        ([1e6], 1, None, (LIMIT_S, LIMIT_S + HELD_S), [DROPPED]),
        # A device that has failed: an error of ``wait`` would end the engine. The device's next use reports it.
        ([None], 1, None, (STORE_GRACE_S, STORE_GRACE_S), [DROPPED]),
    ],
)
def test_a_wait_lasts_until_the_step_ends_then_5_ms_then_a_gather(
    world: World,
    steps_s: list[float | None],
    chunks: int,
    taken: tuple[int, float, float] | None,
    held_s: tuple[float, float],
    ended: list[Outcome],
) -> None:
    """``steps_s``: when the step of each tier's store ends. ``taken``: how many chunks get a slot, when, and when they
    are gathered.
    """
    assert STORE_GRACE_S <= 0.005
    table, gathers = world.table(len(steps_s)), list[Chunk]()
    for tier, step_s in enumerate(steps_s):
        add(table, tier, Broken() if step_s is None else world.step(step_s), chunks, tier)
    if taken is not None:
        count, taken_s, gathered_s = taken
        world.after(taken_s, lambda: gathers.extend(take(table, count)))
        world.after(gathered_s, lambda: gathered(table, gathers))
    least_s, most_s = held_s
    assert least_s - 1e-9 <= world.wait(table, range(len(steps_s))) <= most_s + 1e-9
    assert outcomes(table) == ended
    assert take(table) == [], "nothing is left in the queue"


def test_tiers_that_read_on_share_the_limit_and_are_given_up_then(world: World) -> None:
    """A mover's reads cannot be stopped; the data that it writes is worthless."""
    table, chunks = world.table(3), []
    for at in range(3):
        add(table, at, READY, tier=at)
        chunks += take(table, lane=Lane.STORE, tier=at)
    table.advance(chunks, ChunkState.BORROWED)
    assert world.wait(table, range(3)) == pytest.approx(LIMIT_S)
    assert [chunk.state for chunk in chunks] == [ChunkState.DISOWNED] * 3


def test_a_store_that_is_waited_for_is_claimed_once(world: World) -> None:
    """It is in two lanes then. If gathered twice, it would read blocks that another request has by then."""
    table, taken = world.table(), []
    add(table, 1, READY, chunks=3)

    def claim() -> None:
        taken.extend(take(table))
        assert take(table, lane=Lane.STORE) == []
        gathered(table, taken)

    world.after(0.001, claim)
    world.wait(table)
    assert outcomes(table) == [OK] * 3
    assert len(taken) == 3
