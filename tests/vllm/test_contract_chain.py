"""Our scheduler's half over vLLM's: hits that may be cut, answers that are kept, chunks that are described. Starts no
engine.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from nixl_offload.engine import Work
from nixl_offload.engine.transfer_statistics import Act
from nixl_offload.types import Outcome
from nixl_offload.vllm import connector_scheduler
from nixl_offload.vllm.connector_scheduler import NixlOffloadScheduler
from nixl_offload.vllm.connector_worker import NixlConnectorWorker
from nixl_offload.vllm.messages import LoadSample, RankStatus, TicketReport
from nixl_offload.vllm.worker import NixlOffloadingWorker
from tests.vllm import manager_rig
from tests.vllm.test_contract import OFFLOADING, named


def test_a_rank_that_is_asked_twice_before_it_reports_loses_nothing() -> None:
    """What was moved is added up, and the status that it told stays in the report."""
    spec = SimpleNamespace(
        replicated_layout=False, config=SimpleNamespace(canonical_layout=False, parallel=None, groups=(None,))
    )
    worker = NixlConnectorWorker(spec, None, manager_rig.kv_cache_config())  # type: ignore[arg-type]
    act, status = Act("store", 0), RankStatus(frozenset({0}))
    works = [Work(Counter({act: size_bytes})) for size_bytes in (3, 4)]
    told: list[dict[int, RankStatus]] = [{0: status}, {}, {}]
    rank = object.__new__(NixlOffloadingWorker)
    rank._engine = SimpleNamespace(has_jobs=True)  # type: ignore[assignment]
    rank._look_s = 0.0
    rank.take_finished = list  # type: ignore[method-assign]
    rank.take_tickets = lambda: {1: {}}  # type: ignore[method-assign]
    rank.take_work = lambda: works.pop() if works else None  # type: ignore[method-assign]
    rank.take_status = lambda: told.pop(0)  # type: ignore[method-assign]
    worker.worker = rank
    worker._has_told_geometry = True
    for _ in range(3):
        worker.get_finished(set())
    report = worker.build_connector_worker_meta()
    assert report.work is not None
    assert report.work.payload_bytes == {act: 7}
    assert report.ranks == {0: status}


class Matching:
    """Our scheduler's half over a slab with ``stored`` chunks of one request's five, and what tiers take."""

    def __init__(self, path: Path, stored: int, *, memory: bool = True, is_open: bool = True) -> None:
        nearest = [manager_rig.memory_tier()] if memory else []
        config = manager_rig.config_of(*nearest, manager_rig.slab_tier(path))
        self.scheduler = manager_rig.scheduler_half(config)
        self.manager = self.scheduler.offload_manager
        self.scheduler.open(manager_rig.ranks())
        if is_open:
            manager_rig.ranks_open(self.manager)
        hashes = [number.to_bytes(32, "big") for number in range(5 * manager_rig.BLOCKS_PER_CHUNK)]
        self.request: Any = SimpleNamespace(
            request_id="request",
            num_tokens=5 * manager_rig.CHUNK_TOKENS + 1,
            num_prompt_tokens=5 * manager_rig.CHUNK_TOKENS + 1,
            block_hashes=hashes,
            all_token_ids=list(range(5 * manager_rig.CHUNK_TOKENS + 1)),
            lora_request=None,
            kv_transfer_params=None,
            kv_hints=None,
            cache_salt=None,
            mm_features=[],
            skip_reading_prefix_cache=False,
            sampling_params=None,
            streaming_queue=None,
        )
        self.scheduler.on_new_request(self.request)
        make_key = named("vllm.v1.kv_offload.base:make_offload_key")
        last = manager_rig.BLOCKS_PER_CHUNK - 1
        self.keys = [make_key(each, 0) for each in hashes[last :: manager_rig.BLOCKS_PER_CHUNK]]
        output = self.manager.prepare_store(self.keys[:stored], manager_rig.request("stores"))
        assert output is not None
        self.ticket: int = output.store_spec.ticket.ticket  # type: ignore[attr-defined]
        self.manager.settle({self.ticket: TicketReport()})

    def lose_from_memory(self, first: int) -> None:
        """Leave the chunks from ``first`` on to files alone."""
        self.manager.on_schedule_end(named("vllm.v1.kv_offload.base:ScheduleEndContext")([], []))
        self.manager.settle({move.ticket: TicketReport() for move in self.manager.take_moves()})
        context = manager_rig.request("loses", [{"medium": "CPU"}])
        ticket = self.manager.prepare_load(self.keys[first:], context).ticket
        failures = dict.fromkeys(range(len(ticket.keys)), Outcome.FAILED)
        self.manager.settle({ticket.ticket: TicketReport(1, failures)})

    def slow_files(self) -> None:
        self.manager.settle({}, [LoadSample(1, manager_rig.SLOT, 10.0, False)] * 5)
        for context_tokens in (0, 256, 512, 768, 1024):
            self.manager.decider.observe_prefill(manager_rig.CHUNK_TOKENS, context_tokens, 0.01)

    def ask(self, computed: int = 0, most: int | None = None) -> tuple[int | None, bool]:
        return self.scheduler.get_num_new_matched_tokens(self.request, computed, most)

    def lookups(self) -> int:
        """How often vLLM's half has looked the request up since the last call."""
        stats = self.scheduler.get_stats()
        if stats is None:
            return 0
        observed: dict[Any, list[float]] = stats.data["data"]["vllm:kv_offload_lookup_sync_delay_seconds"]
        return len(observed[()])


@pytest.fixture
def matching(tmp_path: Path) -> Iterator[Callable[..., Matching]]:
    made: list[Matching] = []

    def make(stored: int, **options: Any) -> Matching:
        made.append(Matching(tmp_path, stored, **options))
        return made[-1]

    yield make
    for each in made:
        each.manager.shutdown()


def test_a_hit_is_all_that_is_stored_or_as_much_as_may_be_loaded(matching: Callable[[int], Matching]) -> None:
    """The limit that vLLM itself gives for other reasons, and that we give."""
    asked = matching(4)
    chunk = manager_rig.CHUNK_TOKENS
    assert asked.ask() == (4 * chunk, True)
    assert asked.ask(chunk) == (3 * chunk, True)
    assert asked.ask(0, 2 * chunk) == (2 * chunk, True)
    assert asked.ask(0, chunk - 1) == (0, False)
    assert asked.lookups() == 4


def test_a_hit_that_is_slow_from_some_chunk_on_is_cut_there(matching: Callable[[int], Matching]) -> None:
    """The base is asked again with the limit, and what it remembers of the request is that of the second answer."""
    asked = matching(4)
    asked.lose_from_memory(3)
    asked.slow_files()
    chunk = manager_rig.CHUNK_TOKENS
    for lookups in (2, 0):
        assert asked.ask() == (3 * chunk, True)
        assert asked.lookups() == lookups, "nothing has changed since, so vLLM's half is not asked again"
        [group] = asked.scheduler._req_status["request"].group_states
        assert group.num_hit_chunks == 3
        assert group.offload_keys == asked.keys
    assert asked.ask(chunk + 64) == (2 * chunk - 64, True), "from within a chunk on"
    assert asked.ask(2 * chunk + 64) == (0, False), "vLLM loads no less than a chunk"
    assert asked.ask(3 * chunk) == (0, False), "nothing is left that is worth it"


def test_a_request_that_waits_for_room_is_looked_up_again_when_something_has_changed(
    matching: Callable[[int], Matching], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked about in every step. What counts: chunks that came, went or are being loaded, time, the question."""
    asked = matching(3)
    chunk = manager_rig.CHUNK_TOKENS

    def ask(*question: int) -> tuple[tuple[int | None, bool], int]:
        answer = asked.ask(*question)
        return answer, asked.lookups()

    assert ask() == ((3 * chunk, True), 1)
    assert ask() == ((3 * chunk, True), 0)
    assert ask(chunk) == ((2 * chunk, True), 1)
    assert ask(chunk) == ((2 * chunk, True), 0)
    assert ask() == ((3 * chunk, True), 1)
    assert asked.ask(0, chunk) == (chunk, True)
    output = asked.manager.prepare_store([asked.keys[3]], manager_rig.request("stores"))
    assert output is not None
    assert asked.ask() == (None, False), "the fourth is just being stored"
    asked.manager.settle({output.store_spec.ticket.ticket: TicketReport()})  # type: ignore[attr-defined]
    asked.lookups()
    assert ask() == ((4 * chunk, True), 1)
    asked.manager.prepare_load(asked.keys[:1], manager_rig.request("loads"))
    assert ask() == ((4 * chunk, True), 1)
    asked.scheduler.update_state_after_alloc(asked.request, manager_rig.allocated([]), 0)
    assert ask() == ((4 * chunk, True), 1)
    with monkeypatch.context() as patched:
        patched.setattr(connector_scheduler, "ANSWER_S", 0.0)
        assert ask(0, 2 * chunk) == ((2 * chunk, True), 1)
    assert ask(0, 2 * chunk) == ((2 * chunk, True), 1), "what others write may have come meanwhile"
    assert ask(0, 2 * chunk) == ((2 * chunk, True), 0)
    asked.manager.reset_cache()
    assert ask(0, 2 * chunk) == ((0, False), 1)


@pytest.mark.parametrize("memory", [True, False])
def test_a_chunk_is_described_until_the_last_tier_has_told_that_it_went(
    memory: bool, matching: Callable[..., Matching]
) -> None:
    """llm-d's indexer knows blocks by the hashes of which a description consists, and vLLM keeps that by medium: what
    is gone from memory must still be named when it goes from files, and be forgotten then.
    """
    asked = matching(4, memory=memory)
    tracker = asked.scheduler._events_tracker
    tracker.self_describing_enabled = True
    assert asked.ask() == (4 * manager_rig.CHUNK_TOKENS, True)

    def removed() -> dict[Any, int]:
        events = list(asked.scheduler.take_events())
        gone = [event for event in events if type(event).__name__ == "BlockRemoved"]
        return {event.medium: len(event.block_hashes) for event in gone}

    blocks = 4 * manager_rig.BLOCKS_PER_CHUNK
    assert removed() == {}
    if memory:
        asked.lose_from_memory(0)
        assert removed() == {"CPU": blocks}
    ticket = asked.manager.prepare_load(asked.keys[:4], manager_rig.request("loses")).ticket
    asked.manager.settle({ticket.ticket: TicketReport(1, dict.fromkeys(range(4), Outcome.CORRUPT))})
    assert len(tracker._pending_event_metadata) == 4
    assert removed() == {"STORAGE": blocks}
    assert tracker._pending_event_metadata == {}


@pytest.mark.parametrize("seed", range(4))
def test_requests_without_a_new_chunk_are_passed_over_and_nothing_else_is(seed: int, tmp_path: Path) -> None:
    """Step by step what is stored, and what counts as stored, is as by vLLM's own loop over all requests."""
    scheduler_class = named(f"{OFFLOADING}.scheduler:OffloadingConnectorScheduler")
    make_empty = named("vllm.v1.core.sched.output:SchedulerOutput.make_empty")
    finished = named("vllm.v1.request:RequestStatus.FINISHED_STOPPED")

    def go_on(name: str, build: Callable[..., dict[int, Any]]) -> list[Any]:
        chances = random.Random(seed)
        side = Matching(tmp_path / name, 2, memory=False)
        request, state = side.request, side.scheduler._req_status["request"]
        request.status, request.num_computed_tokens = None, 0
        request.is_finished = lambda: request.status is not None
        state.update_offload_keys()
        [group] = state.group_states
        group.block_ids = list(range(1, 5 * manager_rig.BLOCKS_PER_CHUNK + 1))
        told: list[Any] = []
        while not request.is_finished():
            tokens = chances.choice([1, 1, 1, 7, manager_rig.CHUNK_TOKENS - 1, manager_rig.CHUNK_TOKENS])
            output = dataclasses.replace(make_empty(), num_scheduled_tokens={"request": tokens, "unknown": 1})
            if chances.random() < 0.05:
                output = dataclasses.replace(make_empty(), finished_req_ids={"request"})
                request.status = finished
            jobs = build(side.scheduler, output).values()
            told.append([(job.src_spec.block_ids.tolist(), job.dst_spec.ticket.keys) for job in jobs])
            told.append(group.next_stored_chunk_idx)
            request.num_computed_tokens = min(request.num_computed_tokens + tokens, request.num_tokens - 1)
        side.manager.shutdown()
        return told

    ours = go_on("ours", NixlOffloadScheduler._build_store_jobs)
    assert ours == go_on("vllm", scheduler_class._build_store_jobs)
    assert any(ours[::2]), "nothing was stored"
