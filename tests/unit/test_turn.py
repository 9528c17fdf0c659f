"""Proves when the pump lets go of the interpreter: after a stretch of work, not after a wait, and never for nothing."""

from __future__ import annotations

import pytest

from nixl_offload.engine import turn
from nixl_offload.engine.turn import HOLD_S, Turn


class Time:
    """A clock that moves when it is told to, and what the thread slept."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.slept: list[float] = []

    def perf_counter(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    made = Time()
    monkeypatch.setattr(turn, "time", made)
    return made


def test_after_a_wait_nothing_is_let_go_of(clock: Time) -> None:
    each = Turn()
    clock.now_s += 2 * HOLD_S
    each.begin()
    each.pause()
    assert clock.slept == []


def test_pieces_add_up_to_a_stretch(clock: Time) -> None:
    each = Turn()
    for _ in range(10):
        clock.now_s += HOLD_S / 4.5
        each.pause()
    assert clock.slept == [0, 0]
