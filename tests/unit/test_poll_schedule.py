"""When a transfer is polled that moves by itself: seldom, soon after its end, and never not at all."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from nixl_offload.movers.base import MemoryKind, Mover, Op, Transfer, TransferState
from nixl_offload.movers.limits import LimitedMover
from nixl_offload.movers.poll_schedule import FIRST_LOOK_LIMIT_S, GAP_LIMIT_S, LOOK_LIMIT_S, LOOK_MIN_S, PollSchedule
from tests.contract.suites.mover_suite import KIB, MIB, MoverSuite, Rig, extents
from tests.unit.test_mover_limits import SmallMover


def follow(schedule: PollSchedule, began_s: float, took_s: float, size: int = MIB) -> tuple[int, float]:
    """Have one transfer take ``took_s``; return how often it was polled, and how late its end was known."""
    transfer, polls = Transfer(Op.READ, size), 0
    schedule.began(transfer, began_s)
    while True:
        now_s = schedule.next_s
        for since_s, each in schedule.take(now_s):
            assert (since_s, each) == (began_s, transfer)
            polls += 1
            if now_s < began_s + took_s:
                schedule.pending(each, since_s, now_s)
                continue
            schedule.ended(each, since_s, now_s)
            assert schedule.next_s == float("inf"), "nothing is in flight"
            return polls, now_s - began_s - took_s


@given(st.lists(st.floats(1e-4, 2.0), min_size=1, max_size=20))
@settings(max_examples=50)
def test_an_end_is_known_at_most_a_little_too_late(times: list[float]) -> None:
    """Whatever transfers before it took."""
    schedule, at_s = PollSchedule(), 0.0
    for took_s in times:
        _, late_s = follow(schedule, at_s, took_s)
        assert late_s <= max(FIRST_LOOK_LIMIT_S, took_s / 8 + GAP_LIMIT_S, LOOK_LIMIT_S) + LOOK_MIN_S
        at_s += 10.0


def test_a_transfer_is_polled_a_few_times_however_long_it_takes() -> None:
    """Once it is known how long they take. By size: what is larger takes longer."""
    schedule, at_s = PollSchedule(), 0.0
    for took_s, size in ((0.004, 64 * KIB), (0.1, 2 * MIB)):
        counts, late = [], []
        for _ in range(20):
            polls, late_s = follow(schedule, at_s, took_s, size)
            counts.append(polls)
            late.append(late_s)
            at_s += 1.0
        assert max(counts[10:]) <= 4
        assert max(late[10:]) <= took_s / 4


def test_one_look_serves_all_that_is_due() -> None:
    """Looks are an eighth of the usual time apart, however many are in flight."""
    schedule = PollSchedule()
    for turn in range(20):
        follow(schedule, float(turn), 0.016)
    pending = {Transfer(Op.READ, MIB): 100.0 + number * 1e-4 for number in range(64)}
    for transfer, began_s in pending.items():
        schedule.began(transfer, began_s)
    looks = 0
    while schedule.next_s < 100.1:
        now_s = schedule.next_s
        looks += 1
        for began_s, transfer in schedule.take(now_s):
            if now_s < began_s + 0.016:
                schedule.pending(transfer, began_s, now_s)
            else:
                schedule.ended(transfer, began_s, now_s)
                del pending[transfer]
    assert not pending
    assert looks <= 12


class Unpolled(SmallMover):
    """One whose threads do it all, and which counts its polls."""

    def __init__(self, in_flight: int = 8) -> None:
        super().__init__(24 * KIB, 1000, in_flight)
        self.limits = replace(self.limits, moves_unpolled=True)
        self.polls = 0

    def poll(self, transfer: Transfer) -> TransferState:
        self.polls += 1
        return super().poll(transfer)


class TestSuiteUnpolled(MoverSuite):
    """The whole contract, for a mover that is polled when its transfers may have ended."""

    def make_mover(self) -> Mover:
        return LimitedMover(Unpolled())


def test_a_look_makes_transfers_final_and_starts_what_waits(tmp_path: Path) -> None:
    """Nobody polls any of them, and most polls of a pending one ask nothing of the mover below."""
    inner = Unpolled(in_flight=1)
    rig = Rig(LimitedMover(inner), tmp_path / "data", MemoryKind.DRAM, MIB, direct_io=False)
    rows = [extents([number * 8 * KIB], 8 * KIB) for number in range(5)]
    transfers = [rig.submit(Op.READ, each, each) for each in rows]
    news, give_up_s = 0, time.monotonic() + 30
    while any(transfer.state is TransferState.PENDING for transfer in transfers):
        assert time.monotonic() < give_up_s
        quiet_s = rig.mover.look()
        assert quiet_s is not None
        news += quiet_s == 0
        time.sleep(min(quiet_s, 0.01))
    assert 1 <= news <= len(transfers)
    assert {transfer.state for transfer in transfers} == {TransferState.DONE}
    last = rig.submit(Op.READ, rows[0], rows[0])
    before = inner.polls
    for _ in range(1000):
        rig.mover.poll(last)
    assert inner.polls - before < 1000
    rig.wait(last)
    rig.close()


def test_what_moves_only_when_polled_is_polled(tmp_path: Path) -> None:
    """A look is none then."""
    rig = Rig(LimitedMover(SmallMover()), tmp_path / "data", MemoryKind.DRAM, MIB, direct_io=False)
    assert rig.mover.look() is None
    rig.close()


class Raising(Unpolled):
    """The first of whose polls raises, which no poll must."""

    def poll(self, transfer: Transfer) -> TransferState:
        if not self.polls:
            self.polls += 1
            raise RuntimeError("can't start new thread")
        return super().poll(transfer)


def test_a_poll_that_raises_costs_its_own_transfer_alone(tmp_path: Path) -> None:
    """Those that were due with it are polled all the same, and nobody waits for ever."""
    rig = Rig(LimitedMover(Raising()), tmp_path / "data", MemoryKind.DRAM, MIB, direct_io=False)
    rows = [extents([number * 8 * KIB], 8 * KIB) for number in range(5)]
    transfers = [rig.submit(Op.READ, each, each) for each in rows]
    give_up_s = time.monotonic() + 30
    while any(transfer.state is TransferState.PENDING for transfer in transfers):
        assert time.monotonic() < give_up_s
        quiet_s = rig.mover.look()
        assert quiet_s is not None
        time.sleep(min(quiet_s, 0.01))
    lost, *others = sorted(transfers, key=lambda transfer: transfer.state is TransferState.DONE)
    assert (lost.state, lost.quarantine) == (TransferState.FAILED, True)
    assert "can't start new thread" in (lost.error or "")
    assert {transfer.state for transfer in others} == {TransferState.DONE}
    rig.close()
