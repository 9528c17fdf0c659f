"""How fast an engine steps that has nothing to compute while storage is at work: at once where somebody waits and
something comes of it, at leisure where a tier hangs, for an idle engine must not cost a core.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler as vllm_scheduler
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput

from nixl_offload.vllm import connector_scheduler
from nixl_offload.vllm.idling import IDLE_STEP_S, PATIENCE_S, STUCK_AFTER_S, STUCK_STEP_S
from nixl_offload.vllm.messages import TicketReport, WorkerReport
from tests.vllm import manager_rig


class Steps:
    """Our scheduler's half, stepped by hand over a clock that only its own pauses and the test move."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        self.pauses: list[float] = []
        monkeypatch.setattr(
            connector_scheduler, "time", SimpleNamespace(monotonic=lambda: self.now_s, sleep=self._sleep)
        )
        monkeypatch.setattr(
            vllm_scheduler.OffloadingConnectorScheduler,
            "build_connector_meta",
            lambda *_: OffloadingConnectorMetadata({}, {}),
        )
        config = manager_rig.config_of(manager_rig.memory_tier(), manager_rig.slab_tier(path))
        self.scheduler = manager_rig.scheduler_half(config)
        self.manager = self.scheduler.offload_manager
        self.scheduler.open(manager_rig.ranks())
        manager_rig.ranks_open(self.manager)

    def _sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now_s += seconds

    def step(self, tokens: int = 0) -> list[float]:
        """Schedule a step; return the pauses that this took."""
        self.pauses = []
        output = SchedulerOutput.make_empty()
        output.total_num_scheduled_tokens = tokens
        self.scheduler.build_connector_meta(output)
        return self.pauses

    def hear(self, **report: Any) -> None:
        self.scheduler.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=WorkerReport(**report)))


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Steps]:
    made = Steps(tmp_path, monkeypatch)
    yield made
    made.manager.shutdown()


def _store(steps: Steps, number: int) -> int:
    key = manager_rig.key(number)
    output = steps.manager.prepare_store([key], manager_rig.request("stores"))
    assert output is not None
    ticket: int = output.store_spec.ticket.ticket  # type: ignore[attr-defined]
    return ticket


def test_steps_slow_down_while_storage_hangs(steps: Steps) -> None:
    """Half a millisecond at first, longer once nothing has come of it; a word of a rank or a step of work ends that."""
    ticket, _ = _store(steps, 1), _store(steps, 2)
    assert steps.step(tokens=1) == [], "a step with work never waits"
    assert steps.step() == [IDLE_STEP_S]
    steps.now_s += STUCK_AFTER_S
    assert steps.step() == [STUCK_STEP_S]
    steps.hear()
    assert steps.step() == [STUCK_STEP_S], "nothing was told"
    steps.hear(tickets={ticket: TicketReport()})
    assert steps.step() == [IDLE_STEP_S]
    steps.now_s += STUCK_AFTER_S
    assert steps.step() == [STUCK_STEP_S]
    steps.step(tokens=1)
    assert steps.step() == [IDLE_STEP_S]


def test_an_idle_engine_rests_when_nothing_comes_of_it(steps: Steps) -> None:
    """It steps on for what is under way as long as ranks have something to tell, then no more, until there is work."""
    assert not steps.scheduler.has_pending_push_work()
    first, _ = _store(steps, 1), _store(steps, 2)
    steps.step(tokens=1)
    assert steps.scheduler.has_pending_push_work()
    steps.now_s += PATIENCE_S - 0.1
    steps.hear(tickets={first: TicketReport()})
    steps.now_s += PATIENCE_S - 0.1
    assert steps.scheduler.has_pending_push_work(), "the other is under way"
    steps.now_s += 0.1
    assert not steps.scheduler.has_pending_push_work(), "vLLM may shut down"
    steps.step(tokens=1)
    assert steps.scheduler.has_pending_push_work()
