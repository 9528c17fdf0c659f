"""Our scheduler's half over vLLM's: hits that may be cut, answers that are kept, chunks that are described, what is
stored in a step. Starts no engine.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.v1.request import RequestStatus

from nixl_offload.types import Outcome
from nixl_offload.vllm import connector_scheduler
from nixl_offload.vllm.connector_scheduler import NixlOffloadScheduler
from tests.vllm import manager_rig
from tests.vllm.manager_rig import BLOCKS_PER_CHUNK, CHUNK_TOKENS, Matching, Rig, config_of, memory_tier, observe


@pytest.fixture
def matching(tmp_path: Path, keep: Callable[[Matching], Matching]) -> Callable[..., Matching]:
    return lambda stored, **options: keep(Matching(tmp_path, stored, **options))


def test_a_hit_is_all_that_is_stored_or_as_much_as_may_be_loaded(matching: Callable[[int], Matching]) -> None:
    """The limit that vLLM itself gives for other reasons, and that we give."""
    asked = matching(4)
    assert asked.question() == (4 * CHUNK_TOKENS, True)
    assert asked.question(CHUNK_TOKENS) == (3 * CHUNK_TOKENS, True)
    assert asked.question(0, 2 * CHUNK_TOKENS) == (2 * CHUNK_TOKENS, True)
    assert asked.question(0, CHUNK_TOKENS - 1) == (0, False)


def test_a_hit_that_is_slow_from_some_chunk_on_is_cut_there(matching: Callable[[int], Matching]) -> None:
    """The base class is asked again with the limit, and remembers the second answer."""
    asked = matching(4)
    asked.lose_from_memory(3)
    observe(asked.manager, 10.0, tier=1)
    for lookups in (2, 0):
        assert asked.question() == (3 * CHUNK_TOKENS, True)
        assert asked.lookups() == lookups, "nothing has changed since, so vLLM's half is not asked again"
        [group] = asked.state("request").group_states
        assert group.num_hit_chunks == 3
        assert group.offload_keys == asked.chunks
    assert asked.question(CHUNK_TOKENS + 64) == (2 * CHUNK_TOKENS - 64, True), "from within a chunk on"
    assert asked.question(2 * CHUNK_TOKENS + 64) == (0, False), "vLLM loads no less than a chunk"
    assert asked.question(3 * CHUNK_TOKENS) == (0, False), "nothing is left that is worth it"


def test_a_request_that_waits_for_room_is_looked_up_again_when_something_has_changed(
    matching: Callable[[int], Matching], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks in every step. A new lookup needs chunks that came, went or load, time, or another question."""
    asked = matching(3)

    def ask(*question: int) -> tuple[tuple[int | None, bool], int]:
        answer = asked.question(*question)
        return answer, asked.lookups()

    assert ask() == ((3 * CHUNK_TOKENS, True), 1)
    assert ask() == ((3 * CHUNK_TOKENS, True), 0)
    assert ask(CHUNK_TOKENS) == ((2 * CHUNK_TOKENS, True), 1)
    assert ask(CHUNK_TOKENS) == ((2 * CHUNK_TOKENS, True), 0)
    assert ask() == ((3 * CHUNK_TOKENS, True), 1)
    assert asked.question(0, CHUNK_TOKENS) == (CHUNK_TOKENS, True)
    store = asked.offer_keys([asked.chunks[3]])
    assert asked.question() == (None, False), "the fourth is just being stored"
    asked.report(store.ticket)
    asked.lookups()
    assert ask() == ((4 * CHUNK_TOKENS, True), 1)
    asked.store(99)
    assert ask() == ((4 * CHUNK_TOKENS, True), 0), "that is no chunk of the request"
    asked.manager.prepare_load(asked.chunks[:1], manager_rig.request("loads"))
    assert ask() == ((4 * CHUNK_TOKENS, True), 1)
    asked.allocate("request", [], loaded_tokens=0)
    assert ask() == ((4 * CHUNK_TOKENS, True), 1)
    with monkeypatch.context() as patched:
        for name, value in {"SlotTier": int, "ANSWER_S": 0.0, "LOOKUPS_PART": 0.0}.items():
            patched.setattr(connector_scheduler, name, value)
        assert ask(0, 2 * CHUNK_TOKENS) == ((2 * CHUNK_TOKENS, True), 1)
    assert ask(0, 2 * CHUNK_TOKENS) == ((2 * CHUNK_TOKENS, True), 1), "what others write may have come meanwhile"
    assert ask(0, 2 * CHUNK_TOKENS) == ((2 * CHUNK_TOKENS, True), 0)
    asked.manager.reset_cache()
    assert ask(0, 2 * CHUNK_TOKENS) == ((0, False), 1)


@pytest.mark.parametrize("end", ["has come", "fails", "request ends", "is computed", "reset"])
def test_a_long_hit_is_read_into_memory_while_its_request_waits(end: str, matching: Callable[[int], Matching]) -> None:
    """It holds no blocks meanwhile, costs no lookup, and waits no longer than there is something to wait for."""
    asked, not_yet, whole = matching(4), (None, False), (4 * CHUNK_TOKENS, True)
    moves = asked.manager.catalog.moves
    asked.lose_from_memory(1)
    observe(asked.manager, 0.2, tier=1, prefill_s=1.0)
    assert asked.question() == not_yet
    if end in ("has come", "fails"):
        tickets = asked.moves()
        assert sum(len(ticket.keys) for ticket in tickets) == 3
        asked.lookups()
        assert (asked.question(), asked.lookups()) == (not_yet, 0)
        for ticket in tickets:
            asked.report(ticket.ticket, {0: Outcome.FAILED} if end == "fails" else {})
        assert asked.question() == ((CHUNK_TOKENS, True) if end == "fails" else whole)
        assert asked.manager.where(asked.chunks[:4]) == [0, None if end == "fails" else 0, 0, 0]
    elif end == "reset":
        asked.manager.reset_cache()
        assert asked.question() == (0, False)
    elif end == "is computed":
        asked.allocate("request", range(24))
    else:
        asked.request.status = RequestStatus.FINISHED_ABORTED
        asked.step(finished_req_ids={"request"})
    assert not moves.has_pending
    assert moves.bytes_under_way == [0, 0]


def test_a_waiting_request_keeps_its_answer_however_many_others_are_evicted(keep: Callable[[Rig], Rig]) -> None:
    rig = keep(Rig(config_of(memory_tier(304))))
    rig.store(*range(300))
    rig.arrive("waits", range(4 * CHUNK_TOKENS + 1))
    rig.store_keys(rig.keys("waits"))
    assert (rig.ask("waits"), rig.lookups()) == ((4 * CHUNK_TOKENS, True), 1)
    rig.store(*range(300, 600))
    assert (rig.ask("waits"), rig.lookups()) == ((4 * CHUNK_TOKENS, True), 0)


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
    assert asked.question() == (4 * CHUNK_TOKENS, True)

    def removed() -> dict[Any, int]:
        events = list(asked.scheduler.take_events())
        gone = [event for event in events if type(event).__name__ == "BlockRemoved"]
        return {event.medium: len(event.block_hashes) for event in gone}

    blocks = 4 * BLOCKS_PER_CHUNK
    assert removed() == {}
    if memory:
        asked.lose_from_memory(0)
        assert removed() == {"CPU": blocks}
    asked.lose(asked.chunks[:4], Outcome.CORRUPT)
    assert len(tracker._pending_event_metadata) == 4
    assert removed() == {"STORAGE": blocks}
    assert tracker._pending_event_metadata == {}


@pytest.mark.parametrize("seed", range(4))
def test_requests_without_a_new_chunk_are_passed_over_and_nothing_else_is(seed: int, tmp_path: Path) -> None:
    """Step by step what is stored, and what counts as stored, is as by vLLM's own loop over all requests."""

    def go_on(name: str, build: Callable[..., dict[int, Any]]) -> list[Any]:
        chances = random.Random(seed)
        side = Matching(tmp_path / name, 2, memory=False)
        request = side.request
        request.status, request.num_computed_tokens = RequestStatus.RUNNING, 0
        [group] = side.state("request").group_states
        group.block_ids = list(range(1, 5 * BLOCKS_PER_CHUNK + 1))
        told: list[Any] = []
        while not request.is_finished():
            tokens = chances.choice([1, 1, 1, 7, CHUNK_TOKENS - 1, CHUNK_TOKENS])
            output = manager_rig.step_of({"request": tokens, "unknown": 1})
            if chances.random() < 0.05:
                output = manager_rig.step_of(finished_req_ids={"request"})
                request.status = RequestStatus.FINISHED_STOPPED
            jobs = build(side.scheduler, output).values()
            told.append([(job.src_spec.block_ids.tolist(), job.dst_spec.ticket.keys) for job in jobs])
            told.append(group.next_stored_chunk_idx)
            request.num_computed_tokens = min(request.num_computed_tokens + tokens, request.num_tokens - 1)
        side.manager.shutdown()
        return told

    ours = go_on("ours", NixlOffloadScheduler._build_store_jobs)
    assert ours == go_on("vllm", OffloadingConnectorScheduler._build_store_jobs)
    assert any(ours[::2]), "nothing was stored"
