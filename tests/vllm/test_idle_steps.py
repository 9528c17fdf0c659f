"""How fast an engine steps while it computes nothing and storage is at work: at once while storage makes progress, more
slowly once a tier hangs, because an idle engine must not cost a core.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from nixl_offload.vllm import connector_scheduler
from nixl_offload.vllm.connector_scheduler import IDLE_STEP_S, PATIENCE_S, STUCK_AFTER_S, STUCK_STEP_S
from nixl_offload.vllm.messages import TicketReport
from tests.vllm.manager_rig import Rig


class Steps(Rig):
    """Two stores are under way. Only pauses of the scheduler's half and the test move the clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        self.pauses: list[float] = []
        time = SimpleNamespace(monotonic=lambda: self.now_s, sleep=self._sleep)
        monkeypatch.setattr(connector_scheduler, "time", time)
        super().__init__()
        assert not self.scheduler.has_pending_push_work()
        self.stores = [self.offer(number).ticket for number in (1, 2)]

    def _sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now_s += seconds

    def pause(self, tokens: int = 0) -> list[float]:
        """Schedule a step; return the pauses that this took."""
        self.pauses = []
        self.step(total_num_scheduled_tokens=tokens)
        return self.pauses


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch, keep: Callable[[Steps], Steps]) -> Steps:
    return keep(Steps(monkeypatch))


def test_steps_slow_down_while_storage_hangs(steps: Steps) -> None:
    """Half a millisecond at first, longer without progress. A rank's report or a step with work ends that."""
    assert steps.pause(tokens=1) == [], "a step with work never waits"
    assert steps.pause() == [IDLE_STEP_S]
    steps.now_s += STUCK_AFTER_S
    assert steps.pause() == [STUCK_STEP_S]
    steps.hear()
    assert steps.pause() == [STUCK_STEP_S], "nothing was told"
    steps.hear(tickets={steps.stores[0]: TicketReport()})
    assert steps.pause() == [IDLE_STEP_S]
    steps.now_s += STUCK_AFTER_S
    assert steps.pause() == [STUCK_STEP_S]
    steps.pause(tokens=1)
    assert steps.pause() == [IDLE_STEP_S]


def test_an_idle_engine_rests_when_nothing_comes_of_it(steps: Steps) -> None:
    """It steps for work under way while ranks report something; then it stops until there is new work."""
    steps.pause(tokens=1)
    assert steps.scheduler.has_pending_push_work()
    steps.now_s += PATIENCE_S - 0.1
    steps.hear(tickets={steps.stores[0]: TicketReport()})
    steps.now_s += PATIENCE_S - 0.1
    assert steps.scheduler.has_pending_push_work(), "the other is under way"
    steps.now_s += 0.1
    assert not steps.scheduler.has_pending_push_work(), "vLLM may shut down"
    steps.pause(tokens=1)
    assert steps.scheduler.has_pending_push_work()
