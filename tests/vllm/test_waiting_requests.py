"""A request waits for storage no longer than computing takes, and costs the scheduler nothing meanwhile.

Our scheduler's half, asked as vLLM asks it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from nixl_offload.catalog import estimate
from nixl_offload.vllm.messages import TicketReport, WorkerReport
from tests.vllm import manager_rig
from tests.vllm.manager_rig import BLOCK_TOKENS, BLOCKS_PER_CHUNK, CHUNK_TOKENS

CHUNKS = 4
BLOCKS = list(range(1, (CHUNKS + 2) * BLOCKS_PER_CHUNK))
NOT_YET = (None, False)
WHOLE = (CHUNKS * CHUNK_TOKENS, True)


class Half:
    """Our half over a memory tier that has the chunks of one prompt."""

    def __init__(self) -> None:
        self.scheduler = manager_rig.scheduler_half(manager_rig.config_of(manager_rig.memory_tier(64)))
        self.scheduler.open(manager_rig.ranks())
        self.manager = self.scheduler.offload_manager
        manager_rig.ranks_open(self.manager)
        self.keys = self.arrive("first").offload_keys
        output = self.manager.prepare_store(self.keys, manager_rig.request("stores"))
        assert output is not None
        self.settle(output.store_spec)
        self.lookups = 0
        lookup = self.manager.lookup

        def counted(*arguments: Any) -> Any:
            self.lookups += 1
            return lookup(*arguments)

        self.manager.lookup = counted  # type: ignore[method-assign]

    def settle(self, spec: Any) -> None:
        self.manager.settle({spec.ticket.ticket: TicketReport()})

    def arrive(self, name: str, params: Any = None, chunks: int = CHUNKS, **sampling: Any) -> Any:
        """Add a request with the prompt; return its KV cache group."""
        request = Request(
            name,
            list(range(chunks * CHUNK_TOKENS + 5)),
            SamplingParams(max_tokens=9, extra_args={"kv_transfer_params": params}, **sampling),
            None,
            block_hasher=get_request_block_hasher(BLOCK_TOKENS, sha256),
        )
        self.scheduler.on_new_request(request)
        state = self.scheduler._req_status[name]
        state.update_offload_keys()
        return state.group_states[0]

    def ask(self, name: str) -> tuple[int | None, bool]:
        return self.scheduler.get_num_new_matched_tokens(self.scheduler._req_status[name].req, 0)

    def allocate(self, name: str, tokens: int) -> None:
        request = self.scheduler._req_status[name].req
        self.scheduler.update_state_after_alloc(request, manager_rig.allocated(BLOCKS), tokens)

    def step(self, preempted: Collection[str] = ()) -> Any:
        output = SchedulerOutput.make_empty()
        output.preempted_req_ids = set(preempted)
        return self.scheduler.build_connector_meta(output)

    def compute(self, name: str, tokens: int) -> Any:
        """Allocate and compute the first tokens of a request in a step of its own."""
        self.allocate(name, 0)
        output = SchedulerOutput.make_empty()
        arrived: Any = SimpleNamespace(req_id=name, block_ids=(BLOCKS,), num_computed_tokens=0)
        output.scheduled_new_reqs = [arrived]
        output.num_scheduled_tokens = {name: tokens}
        output.total_num_scheduled_tokens = tokens
        return self.scheduler.build_connector_meta(output)

    def complete(self, job: int) -> None:
        """The rank reports a job, and all tickets."""
        tickets = {ticket: TicketReport() for ticket in range(100)}
        report = WorkerReport(completed_jobs={job: 1}, tickets=tickets)
        self.scheduler.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=report))


@pytest.fixture
def half() -> Iterator[Half]:
    init_none_hash(sha256)
    made = Half()
    yield made
    made.scheduler.shutdown()


@pytest.fixture
def limit_s(monkeypatch: pytest.MonkeyPatch) -> float:
    """How long a request may wait while the speed of computing is unknown."""
    monkeypatch.setattr(estimate, "WAIT_S", 0.2)
    return 0.2


@pytest.fixture
def load(half: Half) -> int:
    """The job of a load of the whole prompt that is under way."""
    half.arrive("loads")
    assert half.ask("loads") == WHOLE
    half.allocate("loads", CHUNKS * CHUNK_TOKENS)
    [job] = half.step().load_jobs
    return int(job)


def test_requests_that_share_a_load_wait_for_it_and_hit(half: Half, load: int) -> None:
    half.arrive("waits")
    assert half.ask("waits") == NOT_YET
    half.complete(load)
    assert half.ask("waits") == WHOLE


def test_a_load_that_hangs_holds_those_that_share_its_chunks_no_longer_than_computing_takes(
    half: Half, load: int, limit_s: float
) -> None:
    half.arrive("waits")
    assert half.ask("waits") == NOT_YET
    time.sleep(limit_s)
    assert half.ask("waits") == (0, False)
    half.arrive("comes later")
    assert half.ask("comes later") == (0, False), "the load has been out for so long"
    half.complete(load)
    half.arrive("comes last")
    assert half.ask("comes last") == WHOLE


def test_what_lies_before_the_chunks_of_a_load_that_hangs_is_loaded(half: Half, limit_s: float) -> None:
    """The GPU's cache has the first two chunks of the request whose load hangs."""
    half.arrive("loads")
    request = half.scheduler._req_status["loads"].req
    assert half.scheduler.get_num_new_matched_tokens(request, 2 * CHUNK_TOKENS) == (2 * CHUNK_TOKENS, True)
    half.allocate("loads", 2 * CHUNK_TOKENS)
    half.step()
    half.arrive("waits")
    assert half.ask("waits") == NOT_YET
    time.sleep(limit_s)
    assert half.ask("waits") == (2 * CHUNK_TOKENS, True)


def test_a_preempted_request_whose_stores_hang_is_computed(half: Half, limit_s: float) -> None:
    """Nothing is loaded beside stores of the same request. These end later, and the engine goes on."""
    tokens = (CHUNKS + 1) * CHUNK_TOKENS
    half.arrive("preempted", chunks=CHUNKS + 1)
    assert half.ask("preempted") == WHOLE
    [job] = half.compute("preempted", tokens).store_jobs
    half.step(preempted={"preempted"})
    assert half.ask("preempted") == NOT_YET
    time.sleep(limit_s)
    assert half.ask("preempted") == (0, False)
    half.compute("preempted", CHUNK_TOKENS)
    half.complete(job)
    half.arrive("comes later", chunks=CHUNKS + 1)
    assert half.ask("comes later") == (tokens, True)


def test_a_preempted_request_that_loads_nothing_does_not_wait_for_its_stores(half: Half) -> None:
    half.scheduler.set_role(loads=False, stores=True)
    half.arrive("preempted", chunks=CHUNKS + 1)
    assert half.ask("preempted") == (0, False)
    assert half.compute("preempted", (CHUNKS + 1) * CHUNK_TOKENS).store_jobs
    half.step(preempted={"preempted"})
    assert half.ask("preempted") == (0, False)


def test_what_another_connector_brings_whole_waits_for_no_lookup(half: Half) -> None:
    half.arrive("decodes", {"do_remote_prefill": True})
    assert half.ask("decodes") == (0, False)
    assert half.lookups == 0


def test_alone_we_look_up_what_no_other_connector_will_bring(half: Half) -> None:
    half.scheduler.take_geometries(dict(enumerate(manager_rig.ranks())), is_start=True)
    half.arrive("decodes", {"do_remote_prefill": True})
    assert half.ask("decodes") == WHOLE


def test_what_is_wanted_of_a_hit_is_waited_for_no_longer_either(half: Half, limit_s: float) -> None:
    """Of windows, what is found may need none of the chunks whose load hangs, and what is worth loading may."""
    group = half.arrive("waits")

    def half_of_it(*_: object) -> int:
        half.scheduler._chunks_being_loaded.update(group.offload_keys[:1])  # type: ignore[union-attr]
        return 2 * CHUNK_TOKENS

    half.manager.decider.tokens_to_load = half_of_it  # type: ignore[method-assign]
    assert half.ask("waits") == NOT_YET
    time.sleep(limit_s)
    assert half.ask("waits") == (0, False)


def test_keys_of_a_session_are_made_anew_whenever_it_is_looked_up(half: Half) -> None:
    """VLLM discards its last token when it goes on, which may have ended a chunk."""
    group = half.arrive("session")
    right = list(group.offload_keys)
    half.scheduler._req_status["session"].req.streaming_queue = deque()
    group.offload_keys[-1] = b"of a token that was discarded"
    assert half.ask("session") == WHOLE
    assert group.offload_keys == right
