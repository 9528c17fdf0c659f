"""Proves when the pump lets go of the interpreter: after a stretch of work, not after a wait, and never for nothing."""

from __future__ import annotations

import time

import pytest

from nixl_offload.engine import turn
from nixl_offload.engine.turn import HOLD_S, Turn


@pytest.fixture
def let_go(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the thread slept, instead of sleeping."""
    slept: list[float] = []
    monkeypatch.setattr(turn.time, "sleep", slept.append)
    return slept


def _work() -> None:
    until_s = time.perf_counter() + 2 * HOLD_S
    while time.perf_counter() < until_s:
        pass


def test_a_stretch_of_work_ends_with_a_pause(let_go: list[float]) -> None:
    """One, and then another stretch begins."""
    each = Turn()
    _work()
    each.pause()
    assert let_go == [0]
    _work()
    each.pause()
    assert let_go == [0, 0]


def test_after_a_wait_nothing_is_let_go_of(let_go: list[float]) -> None:
    each = Turn()
    _work()
    each.begin()
    each._began_s += 3600  # however slow this machine is
    each.pause()
    assert let_go == []
