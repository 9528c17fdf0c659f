"""Proves what the pump does between its looks at storage: how long it sleeps, which batches it moves on, what it
reports of those that end well, badly or not at all, and which memory is free then. Time is played: the pump's own
thread runs, and stops each time that it would sleep.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nixl_offload.chunk.layout import GroupLayout, KVLayout, RegionSpec
from nixl_offload.engine import pump
from nixl_offload.engine.jobs import JobTable, TierQueue
from nixl_offload.engine.paths import Batch, InFlight, RateLog, Steps, Stretch
from nixl_offload.engine.pump import CROWD, STEP_ALL_S, Pauses, TierEngine
from nixl_offload.engine.records import Chunk, Completion, Failure, Job, WorkKind
from nixl_offload.engine.staging import Slot, SlotPool
from nixl_offload.engine.streams import READY, Fence
from nixl_offload.movers.base import MemoryRegion, Op, Transfer, TransferState
from nixl_offload.types import Key, Location, Outcome
from tests.unit.rank_rig import causes_of

OK, FAILED, DROPPED, TAINTED = Outcome.OK, Outcome.FAILED, Outcome.DROPPED, Outcome.TAINTED
STORE, LOAD = WorkKind.STORE, WorkKind.LOAD
PROMOTION, WRITE_THROUGH, FETCH = WorkKind.PROMOTION, WorkKind.WRITE_THROUGH, WorkKind.FETCH
PAUSES = Pauses(poll_s=1.0, slow_poll_s=8.0, slow_after_s=50.0)
CHUNK = 4096
LAYOUT = KVLayout((RegionSpec(0, 1 << 20, 64, CHUNK, CHUNK),), (GroupLayout.of_pages([(0, CHUNK)]),), 1)
LOAD_TIMEOUT_S = 500.0
PATIENCE_S = 10.0


class PlayedQueue(TierQueue):
    """A real one, but whoever would sleep tells for how long, and goes on when it is told to."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.is_played = True
        self.pauses: queue.Queue[float | None] = queue.Queue()
        self.goes_on: queue.Queue[None] = queue.Queue()
        table = JobTable(clock=lambda: self.now_s, load_timeout_s=LOAD_TIMEOUT_S)
        super().__init__(table, 0, LAYOUT, store_limit_bytes=1 << 30)
        table.use([self])

    def sleep(self, seconds: float | None) -> None:
        self.pauses.put(seconds)
        if self.is_played:
            self.goes_on.get(timeout=PATIENCE_S)
        else:
            super().sleep(None if seconds is None else 0.001)


class Slots(SlotPool[Slot]):
    """Two staging slots."""

    def __init__(self) -> None:
        slots = [Slot(index, index * CHUNK, np.empty(CHUNK, dtype=np.uint8)) for index in range(2)]
        super().__init__(MemoryRegion(0, 2 * CHUNK), slots)


class CountedStretch(Stretch):
    """Writes down when the interpreter may be had: each piece of work counts as a long one."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events

    def begin(self) -> None:
        self.events.append("begin")

    def pause(self) -> None:
        self.events.append("pause")


class Paths:
    """What the pump drives: batches that wait until ``end`` is called of them, or do what ``does`` says."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.stretch: Stretch = CountedStretch(self.events)
        self.complaints = RateLog(lambda: 0.0)
        self.mover = self
        self.limit = 16
        self.quiet_s: float | None = None
        self.does: Callable[[Batch], Steps] = self.wait
        self.is_broken = False
        self.begun: list[Batch] = []
        self.steps: list[Batch] = []
        self.abandoned: list[Batch] = []
        self.over: list[Batch] = []
        self.closed = 0

    def room(self, chunk: Chunk, in_flight: InFlight) -> int:
        return self.limit

    def begin(self, chunks: list[Chunk]) -> Batch:
        if self.is_broken:
            raise ValueError("no batch today")
        plan: Any = SimpleNamespace()
        batch = Batch(chunks, chunks[0].kind, plan, ())
        batch.steps = self.does(batch)
        self.begun.append(batch)
        return batch

    def look(self) -> float | None:
        return self.quiet_s

    def abandon(self, batch: Batch, error: str | None) -> None:
        self.abandoned.append(batch)
        self.events.append("end")

    def close(self) -> None:
        self.closed += 1
        if self.is_broken:
            raise ValueError("does not close")

    def wait(self, batch: Batch) -> Steps:
        while batch not in self.over:
            self.step(batch)
            yield
        self.step(batch)
        for chunk in batch.alive:
            chunk.end(OK)

    def step(self, batch: Batch) -> None:
        self.steps.append(batch)
        self.events.append("step")

    def stepped(self) -> list[Batch]:
        """Those that were moved on since the last call."""
        steps, self.steps = self.steps, []
        return steps


class World:
    """A pump that has gone to sleep, with nothing to do."""

    def __init__(self) -> None:
        self.queue, self.paths = PlayedQueue(), Paths()
        self.table = self.queue.table
        paths: Any = self.paths
        self.engine = TierEngine(self.queue, paths, name="nixl-offload-played", pauses=PAUSES)
        self.first_pause = self.queue.pauses.get(timeout=PATIENCE_S)

    def next(self, seconds: float = 0.0) -> float | None:
        """Wake the pump so much later; return for how long it sleeps then."""
        self.queue.now_s += seconds
        self.queue.goes_on.put(None)
        return self.queue.pauses.get(timeout=PATIENCE_S)

    def submit(self, number: int, kind: WorkKind, chunks: int = 1) -> None:
        """Without waking the pump."""
        offset = 0 if kind.has_ticket else None
        places = [(Key(bytes([at]) * 32 + bytes(4)), Location(0, at * CHUNK, CHUNK)) for at in range(chunks)]
        made = [Chunk(key, place, 0, np.array([at]), 0, offset, None, at) for at, (key, place) in enumerate(places)]
        for chunk in made:
            chunk.kind = kind
        of_job = WRITE_THROUGH if kind.in_background else LOAD if kind is PROMOTION else kind
        ids = {"ticket": number if kind.has_ticket else 0, "job_id": None if kind.in_background else number}
        self.table.submit(Job(of_job, made, chunks, READY, promoted=range(chunks), **ids))

    def begin(self, number: int, kind: WorkKind, chunks: int = 1) -> Batch:
        """Submit a job that is one batch; return that when the pump has slept next."""
        self.submit(number, kind, chunks)
        self.next()
        return self.paths.begun[-1]

    def end(self, *batches: Batch) -> None:
        """Have them end in the next step."""
        self.paths.over += batches
        for batch in batches:
            for transfer in batch.transfers:
                transfer.state = TransferState.DONE
        self.next()

    def told(self) -> Completion:
        (completion,) = self.table.finished()
        return completion

    def settled(self) -> dict[int, tuple[Outcome, ...]]:
        return {done.job_id: done.outcomes for done in self.table.settled()}

    def stop(self, deadline_s: float = 0.0) -> None:
        self.queue.is_played = False
        self.queue.goes_on.put(None)
        self.engine.close(deadline_s, patience_s=PATIENCE_S)


@pytest.fixture(autouse=True)
def leaked(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What is never freed; the tests do free it."""
    leaked: list[object] = []
    monkeypatch.setattr(pump, "leak", leaked.append)
    return leaked


@pytest.fixture
def world(caplog: pytest.LogCaptureFixture) -> Iterator[World]:
    made = World()
    yield made
    made.stop()
    assert "stumbled" not in "".join(record.message for record in caplog.get_records("call"))


def transfers(count: int) -> list[Transfer]:
    return [Transfer(Op.READ, CHUNK) for _ in range(count)]


# -- how long it sleeps ---------------------------------------------------------------------------------------------


def test_it_sleeps_without_end_when_nothing_is_in_flight(world: World) -> None:
    assert world.first_pause is None
    world.submit(1, LOAD)
    assert world.next(3 * PAUSES.slow_after_s) == PAUSES.poll_s, "what has just begun is looked at soon"
    world.paths.over += world.paths.begun
    assert world.next() is None
    assert world.told().outcomes == (OK,)


def test_it_sleeps_longer_with_many_in_flight_and_when_nothing_has_moved_for_long(world: World) -> None:
    batches = [world.begin(number, LOAD) for number in range(CROWD)]
    assert world.next() == PAUSES.poll_s
    batches.append(world.begin(CROWD, LOAD))
    assert world.next() == 2 * PAUSES.poll_s
    assert world.next(PAUSES.slow_after_s - 0.001) == 2 * PAUSES.poll_s
    assert world.next(0.001) == PAUSES.slow_poll_s
    world.end(batches[0])
    assert world.next() == PAUSES.poll_s


def test_it_sleeps_until_the_mover_may_have_news(world: World) -> None:
    """At most as long as while nothing moves, and no less than between polls. Nothing is looked at meanwhile."""
    batch = world.begin(1, LOAD)
    batch.transfers = transfers(1)
    world.paths.quiet_s = 3.0
    assert world.next(STEP_ALL_S) == 3.0
    world.paths.stepped()
    for quiet_s, pause_s in ((0.5, 1.0), (20.0, 8.0)):
        world.paths.quiet_s = quiet_s
        assert world.next() == pause_s
        assert world.paths.stepped() == []
    assert world.next(STEP_ALL_S) == 8.0
    assert world.paths.stepped() == [batch], "it may have been given up"


# -- what begins ----------------------------------------------------------------------------------------------------


def test_a_load_that_comes_while_stores_begin_overtakes_those_that_have_not(world: World) -> None:
    """Where each is over with its first step, as a copy is."""

    def at_once(batch: Batch) -> Steps:
        if len(world.paths.begun) == 1:
            world.submit(2, LOAD)
        for chunk in batch.alive:
            chunk.end(OK)
        yield from ()

    world.paths.does, world.paths.limit = at_once, 1
    world.submit(1, STORE, 3)
    world.next()
    assert [batch.kind for batch in world.paths.begun] == [STORE, LOAD, STORE, STORE]


def test_what_cannot_begin_fails_and_the_next_begins(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.paths.is_broken = True
    world.submit(1, PROMOTION, 2)
    world.submit(2, FETCH)
    world.next()
    told = world.told()
    assert (told.outcomes, told.errors) == ((FAILED,) * 2, ("unexpected ValueError",))
    assert causes_of(told) == ((FAILED, "unexpected", 2),)
    assert world.settled() == {1: (FAILED,) * 2, 2: (FAILED,)}
    assert "no batch today" in caplog.text
    world.paths.is_broken = False
    world.end(world.begin(3, LOAD))
    assert world.told().outcomes == (OK,)


# -- what ends ------------------------------------------------------------------------------------------------------


def hold(batch: Batch, pool: Slots) -> Chunk:
    """Have the first chunk of a batch lie in a staging slot, and in a host slot if its kind of work has one."""
    slot = pool.acquire()
    assert slot is not None
    chunk = batch.chunks[0]
    chunk.pool, chunk.slot = pool, slot
    chunk.host = slot if batch.kind.fills_slot or batch.kind.in_background else None
    return chunk


class NeverDone:
    """A fence of a device that is out of order."""

    def done(self) -> bool:
        return False


def pending(batch: Batch) -> None:
    batch.transfers = transfers(1)


def fenced(batch: Batch) -> None:
    fence: Fence = NeverDone()
    batch.fences = [fence]


def quarantined(batch: Batch) -> None:
    batch.transfers = transfers(1)
    batch.transfers[0].state, batch.transfers[0].quarantine = TransferState.FAILED, True


def nothing(batch: Batch) -> None:
    """Nothing is under way."""


@pytest.mark.parametrize(
    ("kind", "under_way", "outcome", "slot", "usable"),
    [
        (STORE, nothing, FAILED, None, 2),
        (STORE, pending, FAILED, None, 1),
        (WRITE_THROUGH, nothing, FAILED, None, 2),
        (WRITE_THROUGH, pending, TAINTED, None, 1),
        (WRITE_THROUGH, fenced, TAINTED, None, 1),
        (WRITE_THROUGH, quarantined, FAILED, None, 1),
        (FETCH, nothing, FAILED, FAILED, 2),
        (FETCH, pending, FAILED, TAINTED, 1),
        (FETCH, quarantined, FAILED, TAINTED, 1),
        (PROMOTION, pending, FAILED, TAINTED, 1),
    ],
)
def test_a_batch_that_crashes_gives_back_what_nothing_touches_any_more(
    world: World,
    leaked: list[object],
    caplog: pytest.LogCaptureFixture,
    kind: WorkKind,
    under_way: Callable[[Batch], None],
    outcome: Outcome,
    slot: Outcome | None,
    usable: int,
) -> None:
    """What may still be written to is never used again, nor freed."""
    pool = Slots()

    def crash(batch: Batch) -> Steps:
        hold(batch, pool)
        under_way(batch)
        yield
        raise KeyError("a bug")

    world.paths.does = crash
    world.submit(1, kind)
    world.next()
    if not kind.in_background:
        told = world.told()
        assert (told.outcomes, told.errors) == ((outcome,), ("unexpected KeyError",))
    assert world.settled() == ({1: (slot or outcome,)} if kind is not STORE else {})
    work = world.table.take_work()
    assert work is not None
    assert list(work.failures) == [Failure(kind.operation, 0, outcome.value, "unexpected")]
    assert (pool.usable, pool.free) == (usable, usable)
    [batch] = world.paths.begun
    assert world.paths.abandoned == [batch]
    assert leaked == ([] if usable == 2 else [(world.paths, batch)])
    assert "a bug" in caplog.text
    assert world.next() is None


def test_chunks_that_were_forgotten_fail_and_the_others_keep_their_outcome(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    def forgetful(batch: Batch) -> Steps:
        batch.chunks[0].end(OK)
        yield

    world.paths.does = forgetful
    world.submit(1, LOAD, 2)
    world.next()
    told = world.told()
    assert told.outcomes == (OK, FAILED)
    assert (told.errors, causes_of(told)) == (("unexpected RuntimeError",), ((FAILED, "unexpected", 1),))
    assert "without an outcome" in caplog.text


def test_others_may_have_the_interpreter_between_two_pieces_of_work(world: World) -> None:
    """Of batches that go on, end and begin; and after a sleep another stretch begins."""

    def pieces() -> int:
        """How many there were since the last call, each but the first after a pause."""
        events = [event for event in world.paths.events if event != "begin"]
        assert world.paths.events[0] == "begin"
        del world.paths.events[:]
        count, paused = 0, True
        for event in events:
            if event == "pause":
                paused = True
                continue
            assert paused, events
            count, paused = count + 1, False
        return count

    batches = [world.begin(number, STORE) for number in range(3)]
    pieces()
    world.next()
    assert pieces() == 3
    world.end(*batches)
    assert pieces() == 6, "a step and an end of each"
    world.paths.limit = 1
    world.submit(4, STORE, 3)
    world.next()
    assert pieces() == 9, "three steps of each before the next sleep"
    world.end(*world.paths.begun[3:])


# -- when it stumbles, and its end -----------------------------------------------------------------------------------


def some_steps(count: int, each: Callable[[], None] = lambda: None) -> Callable[[Batch], Steps]:
    """What a batch does that has so many steps before its end."""

    def steps(batch: Batch) -> Steps:
        for _ in range(count):
            each()
            yield
        for chunk in batch.alive:
            chunk.end(OK)

    return steps


def test_it_finishes_what_is_there_before_it_ends(world: World, leaked: list[object]) -> None:
    """Also what had no room yet; and then it does not wait for its deadline."""
    world.paths.does = some_steps(5)
    world.begin(1, LOAD)
    world.paths.limit = 1
    world.submit(2, STORE, 3)
    world.stop(PATIENCE_S)
    assert not world.engine._thread.is_alive()
    assert [told.outcomes for told in world.table.finished()] == [(OK,), (OK,) * 3]
    assert (world.paths.closed, leaked) == (1, [])


def test_a_deadline_ends_what_does_not_end_and_its_memory_is_kept(
    world: World, leaked: list[object], caplog: pytest.LogCaptureFixture
) -> None:
    """Host slots that something may still touch are TAINTED, those that nothing was begun with are not."""
    stuck = [world.begin(1, WRITE_THROUGH, 2), world.begin(2, FETCH), world.begin(3, STORE), world.begin(4, LOAD)]
    stuck.append(world.begin(6, STORE))
    for batch in stuck[:3]:
        hold(batch, Slots())
    stuck[4].chunks[0].host = stuck[0].chunks[0].host  # as in memory, where a store fills one
    world.paths.limit = 0
    world.submit(5, WRITE_THROUGH)
    world.stop(0.0)
    told = world.table.finished()
    assert {done.job_id: done.outcomes for done in told} == {3: (FAILED,), 4: (FAILED,), 6: (TAINTED,)}
    assert world.settled() == {1: (TAINTED, TAINTED), 2: (TAINTED,), 5: (DROPPED,)}
    assert {done.errors for done in told} == {("the engine is closed",)}
    assert {cause for done in told for _, cause, _ in causes_of(done)} == {"closed"}
    assert leaked == [(world.paths, stuck)]
    assert world.paths.closed == 0
    assert "5 transfers did not end" in caplog.text


def test_what_does_not_close_is_kept(world: World, leaked: list[object], caplog: pytest.LogCaptureFixture) -> None:
    world.paths.is_broken = True
    world.stop()
    assert leaked == [world.paths]
    assert "Closing links and movers failed" in caplog.text
