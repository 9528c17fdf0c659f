"""Between the handshake and the first job every rank opens its tiers: told once, in the background, and reported.

First the scheduler's half, without an engine; the test says what the ranks report. ``test_rank_worker`` has the ranks'
side. Then vLLM's engine core with two ranks, whose opening is slow.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_offload.base import LookupResult

from examples.demo.model import ModelShape, write_model
from nixl_offload.vllm import rank_opening
from nixl_offload.vllm import worker as worker_module
from nixl_offload.vllm.manager import NixlOffloadManager
from nixl_offload.vllm.messages import RankStatus, StepMetadata, WorkerReport
from tests.vllm import manager_rig
from tests.vllm.pipeline_rig import CHUNK_TOKENS, PlayedEngine, played, vllm_config_of
from tests.vllm.test_contract_chain import Matching

HIT = (4 * manager_rig.CHUNK_TOKENS, True)


@pytest.fixture
def restarted(tmp_path: Path) -> Iterator[Callable[[], Matching]]:
    """A scheduler's half over a slab in which an earlier one has stored four chunks of a request's five."""
    made: list[Matching] = []

    def make() -> Matching:
        first = Matching(tmp_path, 4, memory=False)
        first.manager.shutdown()
        made.append(Matching(tmp_path, 0, memory=False, is_open=False))
        return made[-1]

    yield make
    for each in made:
        each.manager.shutdown()


def step(asked: Matching) -> Any:
    return asked.scheduler.build_connector_meta(SchedulerOutput.make_empty())


def hear(asked: Matching, *ranks: RankStatus) -> None:
    report = WorkerReport(ranks=dict(enumerate(ranks)))
    asked.scheduler.update_connector_output(SimpleNamespace(kv_connector_worker_meta=report))  # type: ignore[arg-type]


def test_the_first_request_after_a_start_waits_for_the_ranks_and_hits(restarted: Callable[[], Matching]) -> None:
    """An engine without requests steps on its own, so that the ranks hear where the tiers are before one comes."""
    asked = restarted()
    assert asked.scheduler.has_pending_push_work()
    assert asked.ask() == (None, False)
    told = step(asked)
    assert isinstance(told, StepMetadata)
    assert told.places is not None
    assert len(told.places) == 1
    assert not isinstance(step(asked), StepMetadata), "told once"
    assert asked.ask() == (None, False)
    assert asked.manager.is_waiting()
    hear(asked, RankStatus(True))
    assert asked.ask() == HIT
    assert not asked.scheduler.has_pending_push_work()


def test_a_request_waits_only_so_long(restarted: Callable[[], Matching], monkeypatch: pytest.MonkeyPatch) -> None:
    """Then it is computed, and nothing of it is stored; those that come later hit."""
    asked = restarted()
    assert asked.ask() == (None, False)
    monkeypatch.setattr(rank_opening, "RANKS_WAIT_S", 0.0)
    assert asked.ask() == (0, False)
    output = asked.manager.prepare_store(asked.keys[4:], manager_rig.request())
    assert output is not None
    assert output.keys_to_store == []
    step(asked)
    hear(asked, RankStatus(True))
    assert asked.ask() == HIT


def test_a_rank_that_cannot_open_turns_offloading_off(
    restarted: Callable[[], Matching], caplog: pytest.LogCaptureFixture
) -> None:
    """Whether it says so before it is told where the tiers are, or after."""
    asked = restarted()
    for _ in range(2):
        hear(asked, RankStatus(False))
        assert asked.ask() == (0, False)
        step(asked)
    assert asked.manager.lookup(asked.keys[0], manager_rig.request()) is LookupResult.MISS
    assert not asked.scheduler.has_pending_push_work()
    assert caplog.text.count("no tier could be opened on rank 0") == 1


def test_all_ranks_must_be_open(tmp_path: Path) -> None:
    config = manager_rig.config_of(manager_rig.slab_tier(tmp_path))
    manager = NixlOffloadManager(manager_rig.offloading_config(2), config, manager_rig.vllm_config(2))
    manager.take_ranks({1: RankStatus(True)})  # of a stage without layers: it has nothing to open
    manager.open(manager_rig.ranks(2))
    assert manager.holds_requests()
    assert manager.has_pending_work()
    manager.take_ranks({0: RankStatus(True)})
    assert not manager.holds_requests()
    assert not manager.has_pending_work()
    manager.shutdown()


def test_a_reset_while_ranks_open_forgets_what_was_stored(restarted: Callable[[], Matching]) -> None:
    asked = restarted()
    asked.manager.reset_cache()
    step(asked)
    hear(asked, RankStatus(True))
    assert asked.ask() == (0, False)


DEADLINE_S = 60.0
PROMPTS = [random.Random(seed).choices(range(512), k=3 * CHUNK_TOKENS + 20) for seed in range(2)]
FULL_TOKENS = [3 * CHUNK_TOKENS] * len(PROMPTS)


class SlowEngine(PlayedEngine):
    """Two ranks, each with some layers. Measures how long its longest step took."""

    longest_step_s = 0.0

    def __init__(self, directory: Path) -> None:
        shape = ModelShape(layers=12, hidden=64, heads=2, kv_heads=1, intermediate=64, vocab=512, max_tokens=2048)
        model = write_model(directory / "model", shape)
        tier = {"kind": "slab", "path": str(directory / "slab"), "capacity": "64MiB"}
        stages = ("FFF", "FF")
        super().__init__(vllm_config_of(model, stages, {"staging": "8MiB", "tiers": [tier]}), stages)
        step = self.core.step_fn

        def measured() -> Any:
            began_s = time.monotonic()
            try:
                return step()
            finally:
                self.longest_step_s = max(self.longest_step_s, time.monotonic() - began_s)

        self.core.step_fn = measured


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """While it is not set, no rank gets its tiers open."""
    gate, open_engine = threading.Event(), worker_module.open_engine

    def opening(*arguments: Any) -> Any:
        assert gate.wait(DEADLINE_S)
        return open_engine(*arguments)

    monkeypatch.setattr(worker_module, "open_engine", opening)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with played():
        yield gate
    gate.set()


def test_a_slow_opening_holds_no_step_and_costs_no_hit(tmp_path: Path, gate: threading.Event) -> None:
    gate.set()
    first = SlowEngine(tmp_path)
    assert first.generate(PROMPTS) == [0, 0]
    first.close()
    gate.clear()
    second = SlowEngine(tmp_path)
    threading.Timer(2.0, gate.set).start()
    assert second.generate(PROMPTS) == FULL_TOKENS
    assert second.longest_step_s < 1.0
    assert second.wrong() == []
    second.close()


def test_an_opening_that_hangs_costs_hits_and_no_more(
    tmp_path: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests are answered, the engine comes to rest and shuts down, and its slab can be opened anew."""
    monkeypatch.setattr(rank_opening, "RANKS_WAIT_S", 0.2)
    monkeypatch.setattr(worker_module, "CLOSE_OPENING_S", 0.1)
    engine = SlowEngine(tmp_path)
    for _ in range(2):
        assert engine.generate(PROMPTS) == [0, 0]
        assert engine.core.reset_prefix_cache()
    assert engine.longest_step_s < 1.0
    assert engine.moved("store") == [0, 0]
    engine.close()
    gate.set()
    again = SlowEngine(tmp_path)
    again.settle()
    assert again.generate(PROMPTS) == [0, 0]
    assert all(again.moved("store"))
    again.close()
