"""A request waits for storage no longer than computing takes, and costs the scheduler nothing meanwhile. An engine that
computes nothing while storage is at work steps at once while storage makes progress, and more slowly once a tier hangs:
an idle engine must not cost a core.

Our scheduler's half, asked as vLLM asks it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nixl_offload.vllm import connector_scheduler, load_decision
from nixl_offload.vllm.connector_scheduler import IDLE_STEP_S, PATIENCE_S, STUCK_AFTER_S, STUCK_STEP_S
from nixl_offload.vllm.messages import TicketReport
from tests.unit.engine_rig import until
from tests.vllm import manager_rig
from tests.vllm.manager_rig import BLOCKS_PER_CHUNK, CHUNK_TOKENS, Rig

CHUNKS = 4
BLOCKS = list(range(1, (CHUNKS + 2) * BLOCKS_PER_CHUNK))
PROMPT = range(CHUNKS * CHUNK_TOKENS + 5)
OTHER_PROMPT = range(5000, 5000 + len(PROMPT))
LONG_PROMPT = range((CHUNKS + 1) * CHUNK_TOKENS + 5)
NOT_YET = (None, False)
WHOLE = (CHUNKS * CHUNK_TOKENS, True)


@pytest.fixture
def half(keep: Callable[[Rig], Rig]) -> Rig:
    """Over a memory tier that has the chunks of one prompt."""
    made = keep(Rig())
    made.arrive("first", PROMPT)
    made.store_keys(made.keys("first"))
    return made


@pytest.fixture
def limit_s(monkeypatch: pytest.MonkeyPatch) -> float:
    """How long a request may wait while the speed of computing is unknown."""
    monkeypatch.setattr(load_decision, "WAIT_S", 0.2)
    return 0.2


@pytest.fixture
def load(half: Rig) -> dict[str, Any]:
    """The report of a load of the whole prompt that is under way."""
    half.arrive("loads", PROMPT)
    assert half.ask("loads") == WHOLE
    half.allocate("loads", BLOCKS, loaded_tokens=CHUNKS * CHUNK_TOKENS)
    return manager_rig.all_done(half.step())


def compute(half: Rig, name: str, tokens: int) -> Any:
    """Allocate and compute the first tokens of a request in a step of its own."""
    half.allocate(name, BLOCKS)
    return half.step({name: tokens})


def test_requests_that_share_a_load_wait_for_it_and_hit(half: Rig, load: dict[str, Any]) -> None:
    half.arrive("waits", PROMPT)
    assert half.ask("waits") == NOT_YET
    half.hear(**load)
    assert half.ask("waits") == WHOLE


def test_a_load_that_hangs_holds_those_that_share_its_chunks_no_longer_than_computing_takes(
    half: Rig, load: dict[str, Any], limit_s: float
) -> None:
    half.arrive("waits", PROMPT)
    assert half.ask("waits") == NOT_YET
    time.sleep(limit_s)
    assert half.ask("waits") == (0, False)
    half.arrive("comes later", PROMPT)
    assert half.ask("comes later") == (0, False), "the load has been out for so long"
    half.hear(**load)
    half.arrive("comes last", PROMPT)
    assert half.ask("comes last") == WHOLE


def test_what_lies_before_the_chunks_of_a_load_that_hangs_is_loaded(half: Rig, limit_s: float) -> None:
    """The GPU's cache has the first two chunks of the request whose load hangs."""
    half.arrive("loads", PROMPT)
    assert half.ask("loads", 2 * CHUNK_TOKENS) == (2 * CHUNK_TOKENS, True)
    half.allocate("loads", BLOCKS, loaded_tokens=2 * CHUNK_TOKENS)
    half.step()
    half.arrive("waits", PROMPT)
    assert half.ask("waits") == NOT_YET
    time.sleep(limit_s)
    assert half.ask("waits") == (2 * CHUNK_TOKENS, True)


def test_a_preempted_request_whose_stores_hang_is_computed(half: Rig, limit_s: float) -> None:
    """Nothing is loaded beside stores of the same request. These end later, and the engine goes on."""
    tokens = (CHUNKS + 1) * CHUNK_TOKENS
    half.arrive("preempted", LONG_PROMPT)
    assert half.ask("preempted") == WHOLE
    stores = manager_rig.all_done(compute(half, "preempted", tokens))
    half.step(preempted_req_ids={"preempted"})
    assert half.ask("preempted") == NOT_YET
    time.sleep(limit_s)
    assert half.ask("preempted") == (0, False)
    compute(half, "preempted", CHUNK_TOKENS)
    half.hear(**stores)
    half.arrive("comes later", LONG_PROMPT)
    assert half.ask("comes later") == (tokens, True)


def test_a_preempted_request_that_loads_nothing_does_not_wait_for_its_stores(half: Rig) -> None:
    half.scheduler.set_role(loads=False, stores=True)
    half.arrive("preempted", LONG_PROMPT)
    assert half.ask("preempted") == (0, False)
    assert compute(half, "preempted", (CHUNKS + 1) * CHUNK_TOKENS).store_jobs
    half.step(preempted_req_ids={"preempted"})
    assert half.ask("preempted") == (0, False)


def test_who_waits_for_storage_does_not_wait_for_the_gpu(half: Rig, load: int) -> None:
    """Two that did would make a load worth its time that takes three times as long as computing."""
    half.arrive("other", OTHER_PROMPT)
    half.store_keys(half.keys("other"))
    manager_rig.observe(half.manager, 0.075)  # behind the load that is under way
    for name in "waits", "waits, too":
        half.arrive(name, PROMPT)
        assert half.ask(name) == NOT_YET
    assert half.ask("other") == (0, False)


def test_a_lookup_that_saves_nothing_is_not_waited_for(keep: Callable[[Rig], Rig], tmp_path: Path) -> None:
    """The request stores once it is answered."""
    half = keep(Rig(manager_rig.config_of(manager_rig.tree_tier(tmp_path))))
    manager_rig.observe(half.manager, 1.0)
    half.arrive("new", PROMPT)
    assert half.ask("new") == (0, False)
    assert not compute(half, "new", CHUNKS * CHUNK_TOKENS).store_jobs
    until(lambda: half.step({"new": CHUNKS * CHUNK_TOKENS}).store_jobs)


@pytest.mark.parametrize(("is_alone", "answer"), [(False, (0, False)), (True, WHOLE)])
def test_what_another_connector_brings_whole_waits_for_no_lookup(
    half: Rig, is_alone: bool, answer: tuple[int, bool]
) -> None:
    """Where no other connector is there to bring it, it is looked up."""
    if is_alone:
        half.scheduler.take_geometries(dict(enumerate(manager_rig.ranks())), is_start=True)
    half.arrive("decodes", PROMPT, params={"do_remote_prefill": True})
    assert half.ask("decodes") == answer


def test_what_is_wanted_of_a_hit_is_waited_for_no_longer_either(half: Rig, limit_s: float) -> None:
    """With windows, the whole hit may need no chunk whose load hangs, while the part worth loading does."""
    half.arrive("waits", PROMPT)

    def half_of_it(*_: object, **__: object) -> int:
        half.scheduler._chunks_being_loaded.update(half.keys("waits")[:1])  # type: ignore[union-attr]
        return 2 * CHUNK_TOKENS

    half.manager.decider.tokens_to_load = half_of_it  # type: ignore[method-assign]
    assert half.ask("waits") == NOT_YET
    time.sleep(limit_s)
    assert half.ask("waits") == (0, False)


def test_keys_of_a_session_are_made_anew_whenever_it_is_looked_up(half: Rig) -> None:
    """VLLM discards its last token when it goes on, which may have ended a chunk."""
    session, keys = half.arrive("session", PROMPT), half.keys("session")
    right = list(keys)
    session.streaming_queue = deque()
    keys[-1] = b"of a token that was discarded"  # type: ignore[call-overload]
    assert half.ask("session") == WHOLE
    assert keys == right


# Steps that compute nothing


class Steps(Rig):
    """Two stores are under way. Only pauses of the scheduler's half and the test move the clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        self.pauses: list[float] = []
        clock = SimpleNamespace(monotonic=lambda: self.now_s, sleep=self._sleep)
        monkeypatch.setattr(connector_scheduler, "time", clock)
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
