"""Proves for any fault of a tier: every job and every ticket of the chain ends exactly once, no host slot is reported
free while bytes may move in it, a tier that hangs delays no other, and it holds a bounded number of chunks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from nixl_offload.engine import Chunk, WorkKind, direct, link_paths, make_move, pump
from nixl_offload.engine.jobs import MOVE_QUEUE_LIMIT_S
from nixl_offload.movers.base import Op
from nixl_offload.movers.threaded import CopyMover
from nixl_offload.types import Outcome
from tests.contract.suites.faulty_mover import Fault, FaultKind, FaultyMover
from tests.unit.chain_rig import BUCKET, FILE, MEMORY, ChainRig, blocks_of, chain_rigs
from tests.unit.engine_rig import NUM_BLOCKS, HangingSlab, RaisingMover, faulty
from tests.unit.link_rig import Watched

OK, FAILED, CORRUPT, DROPPED, TAINTED = (Outcome.OK, Outcome.FAILED, Outcome.CORRUPT, Outcome.DROPPED, Outcome.TAINTED)
Make = Callable[..., ChainRig]
LOAD_TIMEOUT_S = 30.0
make = pytest.fixture(chain_rigs)


def stuck(op: Op | None = None) -> FaultyMover:
    """Never ends anything until it is released."""
    return faulty(Fault(0, FaultKind.STUCK, op=op, every=True))


def quiet(rig: ChainRig, *, tickets: int | None = None) -> None:
    """Give what should not happen time to happen."""
    known = len(rig.settled) if tickets is None else tickets
    for _ in range(20):
        time.sleep(0.002)
        rig.poll()
    assert len(rig.settled) == known


# -- landings -------------------------------------------------------------------------------------------------------


def test_a_load_that_is_given_up_lands_when_its_read_ends(make: Make) -> None:
    """The load is FAILED at the timeout and touches no KV block. The slot is reported after the last byte, as OK."""
    mover = faulty(Fault(0, FaultKind.STUCK, op=Op.READ))
    rig = make(mover)
    rig.put(FILE, 0)
    before = rig.blocks(range(NUM_BLOCKS))
    rig.chain.submit_load(1, [rig.chunk(0, FILE, blocks_of(0), host=0)], promotion_ticket=1)
    rig.until(lambda: Op.READ in mover.submitted)
    rig.clock.ahead_s += LOAD_TIMEOUT_S + 1
    assert rig.collect(1).outcomes == (FAILED,)
    quiet(rig, tickets=0)
    assert not rig.chain.idle()
    mover.release()
    assert rig.settle(1).outcomes == (OK,)
    assert np.array_equal(rig.host_bytes(0), rig.image(0))
    assert np.array_equal(rig.blocks(range(NUM_BLOCKS)), before)


def test_a_quarantined_batch_taints_the_slots_of_all_its_chunks(make: Make) -> None:
    """Nobody knows which of them late I/O is for. From then on each chunk goes alone, so that this happens once."""
    mover = faulty(Fault(0, FaultKind.FAIL, op=Op.READ, quarantine=True))
    rig = make(mover)
    for number in range(3):
        rig.put(FILE, number)
    chunks = [rig.chunk(number, FILE, blocks_of(number), host=number) for number in range(3)]
    before = len(pump.LEAKED)
    assert rig.load(1, chunks, ticket=1) == (FAILED,) * 3
    assert rig.settle(1).outcomes == (TAINTED,) * 3
    assert mover.submitted == [Op.READ]
    mover.script = [Fault(2, FaultKind.FAIL, op=Op.READ, quarantine=True)]
    chunks = [rig.chunk(number, FILE, blocks_of(number), host=10 + number) for number in range(3)]
    assert rig.load(2, chunks, ticket=2) == (OK, FAILED, OK)
    assert rig.settle(2).outcomes == (OK, TAINTED, OK)
    del pump.LEAKED[before:]


def test_what_a_mover_that_raises_may_still_touch_is_tainted(make: Make) -> None:
    """It never says that its transfers are over: the slot of a fetch is not used again, nor is the place of a write."""
    mover = RaisingMover(CopyMover())
    rig = make(mover)
    rig.put(FILE, 0)
    rig.fill_host(1)
    mover.error = RuntimeError("poll must not raise")
    assert rig.moves(1, [rig.move(0, FILE, MEMORY), rig.move(1, MEMORY, FILE)]) == (TAINTED, TAINTED)
    mover.error = None
    rig.clock.ahead_s += 2  # the file tier tries again
    assert rig.moves(2, [rig.move(0, FILE, MEMORY), rig.move(1, MEMORY, FILE)]) == (OK, OK)


# -- a tier that hangs ----------------------------------------------------------------------------------------------


def in_flight(rig: ChainRig, number: int) -> tuple[int, int]:
    """Chunks of stores, and of background work, that a tier's pump has in flight."""
    engine = rig.engines[number]
    assert engine is not None
    return engine.in_flight.stores, engine.in_flight.background


def test_what_goes_into_memory_overtakes_write_throughs(make: Make) -> None:
    bucket = stuck()
    rig = make(CopyMover(), bucket)
    for number in range(16):
        rig.fill_host(number)
    rig.chain.submit_moves(1, [rig.move(number, MEMORY, BUCKET) for number in range(16)])
    rig.until(lambda: in_flight(rig, BUCKET) == (0, link_paths.MAX_BACKGROUND))
    rig.chain.submit_moves(2, [rig.move(0, BUCKET, MEMORY)] * 32, kind=WorkKind.FETCH)
    rig.until(lambda: in_flight(rig, BUCKET) == (0, link_paths.MAX_BACKGROUND + 32))
    bucket.release()
    assert {len(rig.settle(ticket).outcomes) for ticket in (1, 2)} == {16, 32}


def test_a_tier_that_hangs_delays_no_other_and_holds_a_bounded_share(make: Make) -> None:
    """With a bucket that answers nothing for minutes: stores, loads, landings and moves of the other tiers go on, its
    own moves are dropped but for those in flight, and when it answers again everything ends.
    """
    bucket = stuck()
    rig = make(CopyMover(), bucket)
    for number in range(8):
        rig.fill_host(number)
        rig.put(FILE, number)
    hung = [rig.move(number % 8, MEMORY, BUCKET) for number in range(64)]
    relayed = [rig.move(number % 8, FILE, BUCKET) for number in range(64)]
    rig.chain.submit_moves(1, hung)
    rig.chain.submit_moves(2, relayed)
    rig.chain.submit_store(3, [rig.chunk(number, BUCKET, blocks_of(number)) for number in range(4)])
    rig.chain.submit_load(4, [rig.chunk(9, BUCKET, blocks_of(9), host=9)], promotion_ticket=4)
    rig.until(lambda: in_flight(rig, BUCKET) == (4, link_paths.MAX_BACKGROUND))
    for turn in range(5):
        job, ticket = 100 + 2 * turn, 100 + 2 * turn
        assert rig.store(job, [rig.chunk(20, FILE, blocks_of(0))]) == (OK,)
        assert rig.load(job + 1, [rig.chunk(0, FILE, blocks_of(7), host=10)], ticket) == (OK,)
        assert rig.settle(ticket).outcomes == (OK,)
        assert rig.moves(ticket + 1, [rig.move(2, MEMORY, FILE), rig.move(3, FILE, MEMORY)]) == (OK, OK)
        assert rig.results[job].seconds < 10
        assert rig.results[job + 1].seconds < 10
        assert rig.settled[ticket + 1].seconds < 10
    assert in_flight(rig, BUCKET) == (4, link_paths.MAX_BACKGROUND), "more in flight than the bound"
    assert not {1, 2} & rig.settled.keys()
    rig.clock.ahead_s += max(MOVE_QUEUE_LIMIT_S, LOAD_TIMEOUT_S) + 1
    assert rig.collect(4).outcomes == (FAILED,)
    relays = rig.settle(2).outcomes
    assert set(relays) == {DROPPED}
    quiet(rig)
    assert 1 not in rig.settled, "a place that may still be written to was told free"
    assert in_flight(rig, BUCKET) == (4, link_paths.MAX_BACKGROUND)
    bucket.release()
    outcomes = rig.settle(1).outcomes
    assert outcomes.count(OK) == link_paths.MAX_BACKGROUND
    assert outcomes.count(DROPPED) == 64 - link_paths.MAX_BACKGROUND
    assert rig.collect(3).outcomes == (OK,) * 4
    assert rig.settle(4).outcomes == (FAILED,)
    # The relay slots are free again.
    assert rig.moves(5, [rig.move(number, FILE, BUCKET) for number in range(4)]) == (OK,) * 4
    assert rig.chain.idle()


@pytest.mark.parametrize("op", [Op.WRITE, Op.READ])
def test_moves_that_hang_leave_room_for_loads_and_stores_of_their_own_tier(make: Make, op: Op) -> None:
    """As many as may fly hang, write-throughs or prefetches; what requests need goes on beside and before them."""
    mover = faulty(Fault(0, FaultKind.STUCK, op=op))
    rig = make(mover)
    rig.put(FILE, 20)
    for number in range(12):
        rig.fill_host(number)
        rig.put(FILE, number)
    way = (MEMORY, FILE) if op is Op.WRITE else (FILE, MEMORY)
    rig.chain.submit_moves(1, [rig.move(number, *way) for number in range(12)])
    rig.until(lambda: bool(mover.submitted))
    assert rig.load(3, [rig.chunk(20, FILE, blocks_of(1), host=15)] * 16, ticket=3) == (OK,) * 16
    if op is Op.WRITE:
        rig.until(lambda: in_flight(rig, FILE) == (0, link_paths.MAX_BACKGROUND))
        assert rig.store(2, [rig.chunk(21 + number, FILE, blocks_of(0)) for number in range(4)]) == (OK,) * 4
        assert in_flight(rig, FILE) == (0, link_paths.MAX_BACKGROUND)
    assert 1 not in rig.settled
    mover.release()
    assert rig.settle(1).outcomes == (OK,) * 12
    assert np.array_equal(rig.host_bytes(7), rig.image(7))


# -- the end --------------------------------------------------------------------------------------------------------


def test_close_while_a_tier_hangs_settles_everything(make: Make) -> None:
    """Within the deadline and the patience; what may still be touched is TAINTED, what never began is DROPPED."""
    bucket = stuck()
    rig = make(CopyMover(), bucket)
    for number in range(12):
        rig.fill_host(number)
        rig.put(FILE, number)
    rig.chain.submit_moves(1, [rig.move(number, MEMORY, BUCKET) for number in range(12)])
    rig.chain.submit_moves(2, [rig.move(number, FILE, BUCKET) for number in range(4)])
    rig.chain.submit_moves(3, [rig.move(0, MEMORY, FILE)])
    rig.chain.submit_load(4, [rig.chunk(13, BUCKET, blocks_of(0), host=13)], promotion_ticket=4)
    rig.chain.submit_load(5, [rig.chunk(14, FILE, blocks_of(0), host=14)], promotion_ticket=5)
    rig.until(lambda: bucket.submitted.count(Op.READ) == 1)
    rig.until(lambda: in_flight(rig, BUCKET) == (0, link_paths.MAX_BACKGROUND))
    rig.settle(3)
    rig.settle(5)
    leaked = len(pump.LEAKED)
    began_s = time.monotonic()
    rig.chain.close(0.3)
    assert time.monotonic() - began_s < 0.3 + pump.CLOSE_PATIENCE_S + 10
    rig.poll()
    assert rig.settled[1].outcomes == (TAINTED,) * link_paths.MAX_BACKGROUND + (DROPPED,) * 4
    assert set(rig.settled[2].outcomes) == {DROPPED}
    assert rig.settled[3].outcomes == (OK,)
    assert (rig.results[4].outcomes, rig.settled[4].outcomes) == ((FAILED,), (TAINTED,))
    assert (rig.results[5].outcomes, rig.settled[5].outcomes) == ((CORRUPT,), (CORRUPT,))
    assert len(pump.LEAKED) == leaked + 1
    assert rig.chain.idle()


@pytest.mark.parametrize(
    ("shape", "is_late", "may_go"),
    [("direct_blocks", False, False), ("direct_blocks", True, False), ("per_layer", False, True)],
)
def test_a_transfer_that_hangs_keeps_kv_memory_if_it_may_touch_it(
    make: Make, monkeypatch: pytest.MonkeyPatch, shape: str, is_late: bool, may_go: bool
) -> None:
    """On the direct path it writes there, also when new loads go through staging because it is late. Through staging it
    does not. Afterwards tiers may be opened again.
    """
    if is_late:
        monkeypatch.setattr(direct, "LATE_S", 0.0)
    monkeypatch.setattr(pump, "LEAKED", [])
    mover = stuck()
    rig = make(mover, shape=shape)
    assert rig.store(1, [rig.chunk(1, MEMORY, blocks_of(1))]) == (OK,)
    rig.chain.submit_load(2, [rig.chunk(0, FILE, blocks_of(0))])
    rig.until(lambda: bool(mover.submitted))
    engines = list(rig.engines)
    if is_late:
        rig.until(lambda: "direct" not in str(rig.chain.statuses()[FILE].access))
        for engine in engines:
            for plan in engine.paths.plans if engine is not None else ():
                plan.path = plan.packed
    assert rig.chain.release(0.1) is may_go
    rig.poll()
    assert rig.results[2].outcomes == (FAILED,)
    assert not rig.chain.open_tiers
    assert rig.load(3, [rig.chunk(1, MEMORY, blocks_of(1))]) == (FAILED,)
    assert len(pump.LEAKED) == 1
    pump.LEAKED.clear()
    assert rig.chain.release(0.1), "there is nothing left"
    engine = engines[MEMORY]
    assert engine is not None
    rig.chain.join(MEMORY, engine)
    assert rig.chain.open_tiers == {MEMORY}


def test_a_pump_that_hangs_in_a_system_call_holds_nobody_up(make: Make) -> None:
    """``submit``, ``wait``, ``finished``, ``settled`` and ``close`` return; moves that have not begun are dropped."""
    rig = make(slab_class=HangingSlab)
    slab = rig.slabs[0]
    assert isinstance(slab, HangingSlab)
    rig.put(FILE, 5)
    rig.put(BUCKET, 6)
    rig.fill_host(0)
    rig.fill_host(1)
    slab.hang = threading.Event()
    try:
        rig.chain.submit_moves(1, [rig.move(0, MEMORY, FILE)])
        time.sleep(0.05)
        rig.chain.submit_moves(2, [rig.move(1, MEMORY, FILE), rig.move(5, FILE, MEMORY)])
        rig.chain.submit_load(3, [rig.chunk(5, FILE, blocks_of(0), host=7)], promotion_ticket=3)
        rig.chain.submit_store(4, [rig.chunk(8, FILE, blocks_of(0)), rig.chunk(8, BUCKET, blocks_of(0))])
        rig.chain.wait([4])
        assert rig.moves(5, [rig.move(6, BUCKET, MEMORY)]) == (OK,)
        rig.clock.ahead_s += max(MOVE_QUEUE_LIMIT_S, LOAD_TIMEOUT_S) + 1
        assert rig.settle(2).outcomes == (DROPPED, DROPPED)
        assert rig.collect(3).outcomes == (FAILED,)
        assert rig.settle(3).outcomes == (FAILED,)
        assert rig.collect(4).outcomes[0] is DROPPED
        began_s = time.monotonic()
        rig.chain.close(0.1)
        assert time.monotonic() - began_s < 0.1 + pump.CLOSE_PATIENCE_S + 10
        assert rig.settle(1).outcomes == (TAINTED,)
        assert rig.chain.idle()
    finally:
        slab.hang.set()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_death_of_a_pump_settles_its_tickets_and_no_others(make: Make) -> None:
    """Slots and places that its transfers may still touch are TAINTED; the other tier works on."""
    mover = RaisingMover(CopyMover(), [Fault(0, FaultKind.STUCK, every=True)])
    rig = make(mover)
    for number in range(4):
        rig.put(FILE, number)
        rig.put(BUCKET, number)
        rig.fill_host(number)
    rig.chain.submit_moves(1, [rig.move(0, MEMORY, FILE), rig.move(1, FILE, MEMORY), rig.move(2, FILE, BUCKET)])
    rig.chain.submit_load(
        2, [rig.chunk(3, FILE, blocks_of(0), host=9), rig.chunk(3, BUCKET, [4, 5, 6, 7])], promotion_ticket=2
    )
    rig.until(lambda: len(mover.submitted) == 3)  # both reads of the ticket are one
    mover.error = KeyboardInterrupt()
    assert rig.settle(1).outcomes == (TAINTED, TAINTED, DROPPED)
    assert rig.collect(2).outcomes == (FAILED, OK)
    assert rig.settle(2).outcomes == (TAINTED,)
    assert rig.moves(3, [rig.move(0, MEMORY, FILE), rig.move(1, FILE, MEMORY)]) == (FAILED, FAILED)
    assert rig.moves(4, [rig.move(0, MEMORY, BUCKET), rig.move(3, BUCKET, MEMORY)]) == (OK, OK)
    # One of the two relay slots is lost with the pump, and is not used for what the other tier still could do.
    assert rig.moves(5, [rig.move(3, BUCKET, FILE)]) == (FAILED,)
    mover.error = None
    mover.release()
    assert rig.chain.idle()


@pytest.mark.parametrize("seed", range(6))
def test_no_slot_is_told_free_under_a_transfer_whatever_fails(make: Make, seed: int) -> None:
    """Random loads that land and moves of all kinds over two tiers that fail, delay, hang, quarantine and refuse. Slots
    are used again as soon as they are reported free, and never after TAINTED. A chunk reported OK is there, byte for
    byte.
    """
    rng = np.random.default_rng(seed)
    movers = [Watched(CopyMover()), Watched(CopyMover())]
    kinds = [FaultKind.FAIL, FaultKind.LATE, FaultKind.REFUSE, FaultKind.STUCK]
    for mover in movers:
        mover.script = [
            Fault(int(nth), kinds[rng.integers(4)], amount=int(rng.integers(20)), quarantine=bool(rng.integers(4) == 0))
            for nth in rng.choice(np.arange(10, 120), 30, replace=False)
        ]
    rig = make(*movers, relay_slots=3)
    free, expected = list(range(16)), {}
    for number in range(8):
        rig.put(FILE, number)
        rig.put(BUCKET, number)

    def take_settled() -> None:
        rig.poll()
        for ticket in [ticket for ticket in expected if ticket in rig.settled]:
            slots = expected.pop(ticket)
            for (slot, number), outcome in zip(slots, rig.settled[ticket].outcomes, strict=True):
                if outcome is OK and number is not None:
                    assert np.array_equal(rig.host_bytes(slot), rig.image(number))
                if outcome is not TAINTED and slot is not None:
                    free.append(slot)

    for turn in range(1, 90):
        take_settled()
        tier = (FILE, BUCKET)[rng.integers(2)]
        numbers = [int(number) for number in rng.integers(0, 8, int(rng.integers(1, 4)))]
        kind = rng.integers(4)
        if kind == 3:
            # Places 8 to 23 are written, each by one move at a time; those of open tickets may not be chosen again.
            source, place = (FILE + BUCKET) - tier, 8 + turn % 16
            move = make_move(rig.key(numbers[0]), 0, rig.at(source, numbers[0]), rig.at(tier, place), memory=MEMORY)
            rig.chain.submit_moves(turn, [move])
            expected[turn] = [(None, None)]
            continue
        if len(free) < len(numbers):
            rig.clock.ahead_s += 3
            time.sleep(0.002)
            continue
        slots = [free.pop(0) for _ in numbers]
        pairs = list(zip(slots, numbers, strict=True))
        if kind == 0:
            chunks = [
                Chunk(rig.key(n), rig.at(tier, n), 0, np.arange(4, dtype=np.int32), 0, slot * rig.slot_bytes)
                for slot, n in pairs
            ]
            rig.chain.submit_load(turn, chunks, promotion_ticket=turn)
        elif kind == 1:
            moves = [
                make_move(rig.key(n), 0, rig.at(tier, n), rig.at(MEMORY, slot), memory=MEMORY) for slot, n in pairs
            ]
            rig.chain.submit_moves(turn, moves)
        else:
            for slot, n in pairs:
                rig.host_bytes(slot)[:] = rig.image(n)
            moves = [
                make_move(rig.key(n), 0, rig.at(MEMORY, slot), rig.at(tier, 24 + n), memory=MEMORY) for slot, n in pairs
            ]
            rig.chain.submit_moves(turn, moves)
            pairs = [(slot, None) for slot in slots]
        expected[turn] = pairs
        if rng.integers(3) == 0:
            time.sleep(0.001)
    for mover in movers:
        mover.release()

    def over() -> bool:
        rig.clock.ahead_s += 0.5  # quarantines of stores end
        take_settled()
        return not expected and rig.chain.idle()

    rig.until(over)
    assert sum(mover.overlaps for mover in movers) == 0
    assert any(mover.submitted for mover in movers)
