"""Proves for any fault of mover or slab: each chunk gets one outcome, no KV block of a packed group sees unverified
bytes, no memory is reused under I/O, storing resumes after trouble, and the engine's caller never waits for ever.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nixl_offload.engine import jobs, pump
from nixl_offload.engine.paths import QUARANTINE_S
from nixl_offload.movers.base import Op, Transfer
from nixl_offload.movers.threaded import CopyMover
from nixl_offload.types import Outcome
from tests.contract.suites.faulty_mover import Fault, FaultKind, FaultyMover
from tests.faults.conftest import warnings_of
from tests.unit.engine_rig import NUM_BLOCKS, SHAPES, Clock, HangingSlab, RaisingMover, Rig, faulty, rigs, until

OK, FAILED, CORRUPT, DROPPED = Outcome.OK, Outcome.FAILED, Outcome.CORRUPT, Outcome.DROPPED
Make = Callable[..., Rig]
make = pytest.fixture(rigs)


# -- the mover fails ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", [Op.READ, Op.WRITE])
@pytest.mark.parametrize("shape", ["per_layer", "direct_blocks", "direct_per_layer"])
@pytest.mark.parametrize("kind", [FaultKind.SHORT, FaultKind.CORRUPT])
def test_a_lying_mover_is_found_out(make: Make, shape: str, kind: FaultKind, op: Op) -> None:
    """Short or damaged, in either direction, and said to be DONE: CORRUPT at the load, at the latest."""
    for slot, amount in enumerate((0, 100, 4096, 8000)):
        mover = faulty()
        rig = make(shape, mover)
        if op is Op.READ:
            assert rig.store(1, [rig.chunk(slot, [1, 2, 3, 4])]) == (OK,)
            rig.close()
            mover = faulty()
            rig = make(shape, mover)  # a fresh engine: its staging has never seen the chunk
        # Of a direct chunk the header page is the first transfer, and the payload the last.
        nth = (SHAPES[shape].direct and amount >= 4096) + 0
        mover.script = [Fault(nth, kind, op=op, amount=amount)]
        if op is Op.WRITE:
            assert rig.store(1, [rig.chunk(slot, [1, 2, 3, 4])]) == (OK,)
            rig.close()
            rig = make(shape)
        rig.wipe(0xEE)
        assert rig.load(2, [rig.chunk(slot, [5, 6, 7, 8])]) == (CORRUPT,)
        if not rig.shape.direct:
            assert set(rig.bytes_of(range(NUM_BLOCKS))) == {0xEE}
        rig.close()


def test_quarantined_slots_are_never_used_again(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """When the last one is gone, everything fails with one error and nobody waits."""
    mover = faulty()
    rig = make("per_layer", mover, staging_slots=3)
    assert rig.store(0, [rig.chunk(0, [1, 2, 3, 4])]) == (OK,)
    for job in range(1, 4):
        mover.script = [Fault(len(mover.submitted), FaultKind.FAIL, quarantine=True)]
        assert rig.load(job, [rig.chunk(0, [5, 6, 7, 8])]) == (FAILED,)
        mover.script = []
        assert rig.load(10 + job, [rig.chunk(0, [5, 6, 7, 8])]) == ((OK,) if job < 3 else (FAILED,))
    rig.wipe(0xEE)
    submitted = len(mover.submitted)
    assert rig.load(20, [rig.chunk(0, [5, 6, 7, 8])] * 50) == (FAILED,) * 50
    assert rig.store(21, [rig.chunk(0, [5, 6, 7, 8])]) == (FAILED,)
    rig.engine.wait([20, 21])
    assert len(mover.submitted) == submitted
    assert warnings_of(caplog, "No staging memory is left") == 1
    (status,) = rig.engine.statuses()
    assert (status.trouble, status.loads_fail, status.stores_fail) == ("staging", True, True)


# -- storage hangs --------------------------------------------------------------------------------------------------


def test_a_packed_load_is_given_up_but_its_memory_is_not(make: Make) -> None:
    """After the timeout: FAILED, the slot stays away until the transfer is final, and late bytes reach no KV block."""
    clock, mover = Clock(), faulty()
    rig = make("per_layer", mover, clock=clock, staging_slots=2)
    assert rig.store(0, [rig.chunk(0, [1, 2, 3, 4])]) == (OK,)
    mover.script = [Fault(n, FaultKind.STUCK, op=Op.READ) for n in range(2)]
    rig.engine.submit_load(1, [rig.chunk(0, [5, 6, 7, 8])] * 4)
    until(lambda: mover.submitted.count(Op.READ) == 2)
    assert rig.engine.finished() == []
    clock.ahead_s += 31
    assert rig.collect(1).outcomes == (FAILED,) * 4
    assert "did not answer" in rig.collect(1).errors[0]
    rig.wipe(0xEE)
    rig.engine.submit_load(2, [rig.chunk(0, [9, 10, 11, 12])])
    time.sleep(0.02)
    assert mover.submitted.count(Op.READ) == 2, "a slot was reused under a transfer that is not final"
    mover.release()
    assert rig.collect(2).outcomes == (OK,)
    assert set(rig.bytes_of([5, 6, 7, 8])) == {0xEE}
    assert rig.store(3, [rig.chunk(1, [5, 6, 7, 8])]) == (OK,)


@pytest.mark.parametrize("op", [Op.WRITE, Op.READ])
def test_what_may_still_be_written_to_is_never_given_up(make: Make, op: Op) -> None:
    """A store's location, and the blocks of a direct load: both end when their transfers do."""
    clock, mover = Clock(), faulty()
    rig = make("direct_blocks", mover, clock=clock)
    assert rig.store(0, [rig.chunk(0, [1, 2, 3, 4])]) == (OK,)
    begun = mover.submitted.count(op)
    mover.script = [Fault(begun + 1, FaultKind.STUCK, op=op)]
    submit = rig.engine.submit_store if op is Op.WRITE else rig.engine.submit_load
    submit(1, [rig.chunk(0, [5, 6, 7, 8])])
    until(lambda: mover.submitted.count(op) == begun + 2)
    clock.ahead_s += 3600
    time.sleep(0.1)
    assert rig.engine.finished() == []
    mover.release()
    assert rig.collect(1).outcomes == (OK,)
    if op is Op.READ:
        assert rig.bytes_of([5, 6, 7, 8]) == rig.bytes_of([1, 2, 3, 4])


def test_a_quarantined_direct_load_keeps_its_blocks_and_ends_the_direct_path(make: Make) -> None:
    clock, mover = Clock(), faulty()
    rig = make("direct_blocks", mover, clock=clock)
    assert rig.store(0, [rig.chunk(0, [1, 2, 3, 4])]) == (OK,)
    mover.script = [Fault(1, FaultKind.FAIL, op=Op.READ, quarantine=True)]
    rig.engine.submit_load(1, [rig.chunk(0, [5, 6, 7, 8])])
    until(lambda: mover.submitted.count(Op.READ) == 2)
    time.sleep(0.05)
    assert rig.engine.finished() == []
    # From now on through staging: one transfer for header and payload.
    wanted = rig.bytes_of([1, 2, 3, 4])
    assert rig.load(2, [rig.chunk(0, [9, 10, 11, 12])]) == (OK,)
    assert rig.bytes_of([9, 10, 11, 12]) == wanted
    assert mover.submitted.count(Op.READ) == 3
    clock.ahead_s += QUARANTINE_S
    assert rig.collect(1).outcomes == (FAILED,)


def test_wait_gives_up_a_direct_store_that_hangs(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine goes on; the store can only end as FAILED, and not before the mover has let go of its location."""
    monkeypatch.setattr(jobs, "WAIT_LIMIT_S", 0.05)
    mover = faulty(Fault(1, FaultKind.STUCK))
    rig = make("direct_blocks", mover)
    rig.engine.submit_store(1, [rig.chunk(0, [1, 2, 3, 4])])
    until(lambda: len(mover.submitted) == 2)
    began_s = time.monotonic()
    rig.engine.wait([1])
    assert time.monotonic() - began_s < 20
    assert rig.engine.finished() == []
    rig.wipe(0xEE)
    mover.release()
    assert rig.collect(1).outcomes == (FAILED,)
    assert rig.load(2, [rig.chunk(0, [5, 6, 7, 8])]) == (CORRUPT,)


def test_wait_gives_up_what_a_hanging_pump_has_not_gathered(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The look at a dead mount hangs after the chunk was claimed: it is DROPPED, and nothing is written later."""
    monkeypatch.setattr(jobs, "WAIT_LIMIT_S", 0.05)
    clock, mover = Clock(), faulty()
    slab = HangingSlab(tmp_path / "kv" / "hanging.slab", 1 << 22, 1 << 20)
    slab.open()
    rig = make("per_layer", mover, slab=slab, clock=clock)
    slab.hang = threading.Event()
    clock.ahead_s += 2
    try:
        rig.engine.submit_store(1, [rig.chunk(0, [1, 2, 3, 4])])
        waiter = threading.Thread(target=rig.engine.wait, args=([1],))
        waiter.start()
        waiter.join(20)
        assert not waiter.is_alive()
        assert rig.collect(1).outcomes == (DROPPED,)
        assert mover.submitted == []
    finally:
        slab.hang.set()
    assert rig.store(2, [rig.chunk(1, [1, 2, 3, 4])]) == (OK,)
    assert mover.submitted == [Op.WRITE]


@pytest.mark.parametrize("shape", ["per_layer", "direct_blocks"])
def test_a_quarantined_store_keeps_its_location(make: Make, shape: str) -> None:
    """FAILED frees the location, so it is reported after late writes must have ended. The blocks are free at once."""
    clock, mover = Clock(), faulty(Fault(0, FaultKind.FAIL, op=Op.WRITE, quarantine=True))
    rig = make(shape, mover, clock=clock)
    rig.engine.submit_store(1, [rig.chunk(0, [1, 2, 3, 4])])
    until(lambda: mover.submitted)
    began_s = time.monotonic()
    rig.engine.wait([1], limit_s=20.0)
    assert time.monotonic() - began_s < 10
    time.sleep(0.05)
    assert rig.engine.finished() == []
    clock.ahead_s += QUARANTINE_S
    assert rig.collect(1).outcomes == (FAILED,)


class CrashingMover(FaultyMover):
    """Has a bug in the submit with the number ``crash_at``."""

    crash_at = -1

    def submit(self, *request: Any) -> Transfer:
        if len(self.submitted) == self.crash_at:
            raise RuntimeError("a bug in submit")
        return super().submit(*request)


def test_a_direct_load_that_crashes_keeps_its_blocks_until_its_siblings_end(make: Make) -> None:
    """FAILED frees the KV blocks. Reported while a sibling is in flight, late bytes would be written to them."""
    mover = CrashingMover(CopyMover())
    rig = make("direct_per_layer", mover)
    assert rig.store(0, [rig.chunk(0, [1, 2, 3, 4])]) == (OK,)
    done = len(mover.submitted)
    mover.script, mover.crash_at = [Fault(done + 1, FaultKind.STUCK)], done + 2
    rig.engine.submit_load(1, [rig.chunk(0, [5, 6, 7, 8])])
    until(lambda: len(mover.submitted) == done + 2)
    time.sleep(0.05)
    assert rig.engine.finished() == []
    mover.release()
    assert rig.collect(1).outcomes == (FAILED,)


def test_deadlines_hold_while_something_always_moves(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    mover = faulty(Fault(0, FaultKind.STUCK, every=True))
    rig = make("per_layer", mover)
    push = pump.TierEngine._push
    monkeypatch.setattr(pump.TierEngine, "_push", lambda self: push(self) or not time.sleep(0.001))
    rig.engine.submit_store(1, [rig.chunk(0, [1, 2, 3, 4])])
    until(lambda: len(mover.submitted) == 1)
    rig.engine.close(0.05)
    assert not rig.engine._thread.is_alive()
    assert rig.collect(1).outcomes == (FAILED,)


# -- bugs below us --------------------------------------------------------------------------------------------------


def test_a_mover_that_raises_in_poll_loses_its_slot_only(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    mover = RaisingMover(CopyMover())
    rig = make("per_layer", mover, staging_slots=4)
    wanted = rig.bytes_of([1, 2, 3, 4])
    assert rig.store(0, [rig.chunk(0, [1, 2, 3, 4])]) == (OK,)
    mover.error = RuntimeError("poll must not raise")
    assert rig.load(1, [rig.chunk(0, [5, 6, 7, 8])]) == (FAILED,)
    mover.error = None
    assert rig.load(2, [rig.chunk(0, [5, 6, 7, 8])]) == (OK,)
    assert rig.bytes_of([5, 6, 7, 8]) == wanted
    assert "poll must not raise" in caplog.text
    assert "3 of 4 left" in caplog.text


@pytest.mark.parametrize("times", [1, 20, 10**9])
def test_a_pump_that_stumbles_goes_on_or_fails_everything(
    make: Make, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """An exception outside any chunk: the loop survives it; if it never ends, nobody waits for it."""
    rig = make("per_layer")
    assert rig.store(0, [rig.chunk(0, [1, 2, 3, 4])]) == (OK,)
    left = [times]

    push = pump.TierEngine._push

    def stumble(stumbling: pump.TierEngine) -> bool:
        moved = push(stumbling)
        if left[0]:
            left[0] -= 1
            raise RuntimeError("a bug in the pump")
        return moved

    with monkeypatch.context() as patched:
        patched.setattr(pump.TierEngine, "_push", stumble)
        rig.engine.submit_load(1, [rig.chunk(0, [5, 6, 7, 8])])
        assert rig.collect(1).outcomes == (OK,)
        until(lambda: not left[0] or not rig.engine._thread.is_alive())
    rig.engine.submit_load(2, [rig.chunk(0, [5, 6, 7, 8])])
    rig.engine.wait([2])
    assert rig.collect(2).outcomes == ((OK,) if times < 100 else (FAILED,))


def test_even_a_dead_pump_leaves_nobody_waiting(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    mover = RaisingMover(CopyMover())
    rig = make("per_layer", mover)
    assert rig.store(0, [rig.chunk(0, [1, 2, 3, 4])]) == (OK,)
    mover.error = SystemExit(3)
    rig.engine.submit_load(1, [rig.chunk(0, [5, 6, 7, 8])])
    rig.engine.wait([1])
    assert rig.collect(1).outcomes == (FAILED,)
    rig.engine.submit_store(2, [rig.chunk(0, [5, 6, 7, 8])])
    rig.engine.submit_load(3, [rig.chunk(0, [5, 6, 7, 8])] * 3)
    rig.engine.wait([2, 3])
    assert rig.collect(2).outcomes == (FAILED,)
    assert rig.collect(3).outcomes == (FAILED,) * 3
    assert warnings_of(caplog, "The pump thread ended") == 1
    (status,) = rig.engine.statuses()
    assert (status.trouble, status.loads_fail, status.stores_fail) == ("closed", True, True)
    assert status.access is not None, "a sleep must know that late I/O may touch KV memory"
    mover.error = None


@pytest.mark.parametrize("shape", ["per_layer", "two_groups", "direct_per_layer"])
def test_hundreds_of_jobs_under_random_faults(make: Make, shape: str) -> None:
    """Every job ends exactly once. Chunks that are OK are right; packed blocks that are not OK are untouched."""
    rng = np.random.default_rng(11)
    clock, mover = Clock(), faulty()
    kinds = [FaultKind.FAIL, FaultKind.LATE, FaultKind.CORRUPT, FaultKind.SHORT, FaultKind.REFUSE]
    for nth in np.flatnonzero(rng.random(6000) < 0.08):
        kind = kinds[int(rng.integers(len(kinds)))]
        mover.script.append(Fault(int(nth), kind, amount=int(rng.integers(0, 20 if kind is FaultKind.LATE else 4000))))
    rig = make(shape, mover, clock=clock, staging_slots=4)
    wanted = {n: rig.bytes_of(range(4 * n, 4 * n + 4)) for n in range(5)}
    pristine = [rows.copy() for rows in rig.kv]
    tally = dict.fromkeys(Outcome, 0)
    job = 0
    for _ in range(60):
        clock.ahead_s += 61  # so that a failed write does not keep storing out of use for the rest of the test
        numbers = rng.permutation(5).tolist()
        stores = range(job, job + 3)
        for store in stores:
            rig.engine.submit_store(store, [rig.chunk(n, range(4 * n, 4 * n + 4)) for n in numbers])
        rig.engine.wait(stores)
        for store in stores:
            for outcome in rig.collect(store).outcomes:
                tally[outcome] += 1
        for rows in rig.kv:
            rows[20:] = 0xEE
        rig.engine.submit_load(job + 3, [rig.chunk(n, range(20 + 4 * n, 24 + 4 * n)) for n in range(3)])
        rig.engine.submit_load(job + 4, [rig.chunk(n, range(20 + 4 * n, 24 + 4 * n)) for n in range(3, 5)])
        outcomes = rig.collect(job + 3).outcomes + rig.collect(job + 4).outcomes
        for n, outcome in enumerate(outcomes):
            tally[outcome] += 1
            found = rig.bytes_of(range(20 + 4 * n, 24 + 4 * n))
            if outcome is OK:
                assert found == wanted[n]
            elif not rig.shape.direct:
                assert set(found) == {0xEE}
        job += 5
    for rows, before in zip(rig.kv, pristine, strict=True):
        assert (rows[:20] == before[:20]).all()
    assert len(rig.results) == 300
    assert all(tally[outcome] for outcome in (OK, FAILED, CORRUPT)), tally
    until(rig.engine.idle)


def test_what_cannot_begin_fails_and_the_next_begins(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make("per_layer")
    with monkeypatch.context() as patched:
        patched.setattr(rig.engine.paths, "route", lambda chunk: 1 / 0)
        assert rig.store(1, [rig.chunk(n, [1, 2, 3, 4]) for n in range(3)]) == (FAILED,) * 3
    assert rig.collect(1).errors == ("unexpected ZeroDivisionError",)
    assert rig.store(2, [rig.chunk(0, [1, 2, 3, 4])]) == (OK,)


def test_what_was_left_behind_outlives_the_interpreter() -> None:
    """NIXL, destroyed with a GET in flight, now and then ended the process by SIGSEGV when the answer came."""
    mover = "type('Mover', (), {'__del__': lambda self: print('destroyed', flush=True)})()"
    script = f"from nixl_offload.engine import pump; pump.leak(({mover},))"
    ended = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=60)
    assert ended.stdout == ""


def test_what_does_not_close_is_kept(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody knows what it would still write to."""
    leaked: list[object] = []
    monkeypatch.setattr(pump, "leak", leaked.append)
    rig = make("per_layer")
    with monkeypatch.context() as patched:
        patched.setattr(rig.link, "close", lambda: 1 / 0)
        rig.engine.close()
    assert leaked == [rig.engine.paths]
    assert "Closing links and movers failed" in caplog.text
