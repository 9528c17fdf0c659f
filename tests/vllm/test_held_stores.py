"""What is stored while another connector loads within steps whose outcome is not known yet: our scheduler's half,
stepped by hand in the order of vLLM's asynchronous scheduling, where a step is scheduled before the one before it has
ended.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from nixl_offload.vllm import serving_tiers
from nixl_offload.vllm.manager import Refused
from nixl_offload.vllm.messages import NOTHING, RankStatus
from tests.vllm import manager_rig
from tests.vllm.manager_rig import BLOCK_TOKENS, BLOCKS_PER_CHUNK, CHUNK_TOKENS

PROMPT_CHUNKS = 8


class Steps:
    """Requests of ``PROMPT_CHUNKS`` chunks, of which nothing is stored. Each gets all its blocks when it arrives."""

    def __init__(self) -> None:
        self.scheduler = manager_rig.scheduler_half(manager_rig.config_of(manager_rig.memory_tier(64)))
        self.scheduler.open(manager_rig.ranks())
        manager_rig.ranks_open(self.scheduler.offload_manager)
        self.requests: dict[str, Request] = {}
        self._arrived: list[Any] = []
        self._numbers = itertools.count(1)

    def arrive(self, name: str, *, loaded_chunks: int = 0, blocks: Collection[int] = ()) -> list[int]:
        """Allocate a request, of which another connector loads the first chunks in its first step. ``blocks``: the
        first of those that it is given. Returns all.
        """
        tokens = random.Random(name).choices(range(1000), k=PROMPT_CHUNKS * CHUNK_TOKENS)
        hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        request = Request(name, tokens, SamplingParams(max_tokens=9), None, block_hasher=hasher)
        self.scheduler.on_new_request(request)
        assert self.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
        given = [*blocks, *itertools.islice(self._numbers, PROMPT_CHUNKS * BLOCKS_PER_CHUNK - len(blocks))]
        self.scheduler.update_state_after_alloc(request, manager_rig.allocated(given), 0)
        request.num_computed_tokens = loaded_chunks * CHUNK_TOKENS
        request.status = RequestStatus.RUNNING
        self.requests[name] = request
        self._arrived.append(SimpleNamespace(req_id=name, block_ids=(given,), num_computed_tokens=0))
        return given

    def step(self, *names: str) -> set[str]:
        """Schedule a step that computes a chunk of these requests; return those of which something is stored."""
        output = SchedulerOutput.make_empty()
        output.scheduled_new_reqs, self._arrived = self._arrived, []
        output.num_scheduled_tokens = dict.fromkeys(names, CHUNK_TOKENS)
        output.total_num_scheduled_tokens = len(names) * CHUNK_TOKENS
        meta: Any = self.scheduler.build_connector_meta(output)
        for name in names:
            self.requests[name].num_computed_tokens += CHUNK_TOKENS
        return {job.req_id for job in meta.store_jobs.values()}

    def hear(self, invalid_blocks: Collection[int] = ()) -> None:
        """The oldest step has ended."""
        output = KVConnectorOutput(kv_connector_worker_meta=NOTHING, invalid_block_ids=set(invalid_blocks))
        self.scheduler.update_connector_output(output)

    def stored(self, name: str) -> int:
        """How many chunks of a request are in some tier, or on their way there."""
        [group] = self.scheduler._req_status[name].group_states
        return sum(map(self.scheduler.offload_manager.is_known, group.offload_keys))

    def refused(self) -> set[str]:
        states = self.scheduler._req_status.items()
        return {name for name, state in states if state.req_context.get_state(Refused) is not None}


@pytest.fixture
def steps(tmp_path: Path) -> Iterator[Steps]:
    init_none_hash(sha256)
    made = Steps()
    yield made
    made.scheduler.shutdown()


def test_a_request_is_stored_once_the_step_that_loaded_it_is_known_to_have_ended_well(steps: Steps) -> None:
    """So are those that were given blocks meanwhile: they may share what was loaded."""
    steps.arrive("loads", loaded_chunks=2)
    assert steps.step("loads") == set()
    steps.arrive("later")
    assert steps.step("loads", "later") == set()
    steps.hear()
    assert steps.step("loads", "later") == {"loads", "later"}
    for name, chunks in (("loads", 5), ("later", 2)):
        [group] = steps.scheduler._req_status[name].group_states
        assert group.next_stored_chunk_idx == chunks, "with all that was held back"


def test_steps_that_all_begin_a_load_of_another_connector_keep_no_store_waiting_for_ever(steps: Steps) -> None:
    """A request that ran before is stored in every step, each of the others once its first step has ended."""
    steps.arrive("before")
    steps.step("before")
    for number in range(6):
        steps.arrive(str(number), loaded_chunks=1)
        names = [str(each) for each in range(number + 1)]
        assert steps.step("before", *names) == {"before", *names[:-2]}
        steps.hear()


def test_stores_wait_for_tiers_that_are_opened_for_other_weights(steps: Steps) -> None:
    """The first request that comes then is stored from its first chunk on, as soon as the tiers serve."""
    manager = steps.scheduler.offload_manager
    manager.reopen("other weights")
    steps.arrive("first")
    assert steps.step("first") == set()
    manager_rig.wait_for_tiers(manager)
    assert steps.step("first") == set(), "the ranks have not opened theirs"
    manager.take_ranks({0: RankStatus(frozenset({0}), opening=manager.serving.number)})
    assert steps.step("first") == {"first"}
    assert steps.stored("first") == 3


def test_stores_do_not_wait_for_tiers_that_take_too_long(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving_tiers, "OPENING_WAIT_S", 0.0)
    steps.scheduler.offload_manager.reopen("other weights")
    steps.arrive("first")
    steps.step("first")
    assert steps.scheduler.stores
    assert steps.stored("first") == 0


def test_one_that_ends_while_it_is_held_back_is_not_stored(steps: Steps) -> None:
    steps.arrive("loads", loaded_chunks=2)
    steps.step("loads")
    request = steps.requests["loads"]
    request.status = RequestStatus.FINISHED_STOPPED
    steps.scheduler.request_finished(request)
    output = SchedulerOutput.make_empty()
    output.finished_req_ids = {"loads"}
    meta: Any = steps.scheduler.build_connector_meta(output)
    assert not meta.store_jobs
    assert "loads" not in steps.scheduler._req_status


def test_a_failed_load_of_another_connector_refuses_those_that_may_run_on_it_alone(steps: Steps) -> None:
    """Not one that had these blocks before they were given away, of which vLLM's half still knows."""
    stale = steps.arrive("had them")
    steps.step("had them")
    steps.hear()
    steps.requests["had them"].status = RequestStatus.PREEMPTED
    blocks = steps.arrive("loads", loaded_chunks=2, blocks=stale[:BLOCKS_PER_CHUNK])
    steps.step("loads")
    steps.arrive("shares", blocks=blocks[: 2 * BLOCKS_PER_CHUNK])
    steps.arrive("beside")
    steps.step("loads", "shares", "beside")
    steps.hear(blocks[: 2 * BLOCKS_PER_CHUNK])
    assert steps.refused() == {"loads", "shares"}
    assert steps.step("loads", "shares", "beside") == {"beside"}


def test_a_failed_load_of_ours_refuses_nobody(steps: Steps) -> None:
    """The request that it was for has no blocks yet, and who had them is not to blame."""
    stale = steps.arrive("had them")
    steps.step("had them")
    steps.hear(stale)
    assert steps.refused() == set()
    assert steps.step("had them") == {"had them"}


def table(*block_ids: int, request: str = "runs") -> KVConnectorBlockState:
    """Return vLLM's own block table of a step."""
    return KVConnectorBlockState(
        req_ids={request}, resolve_block_ids=lambda _: ([*block_ids],), boundary_state_offloads={}
    )


@pytest.mark.parametrize("replacement", [0, 999])
def test_no_chunk_is_stored_from_a_block_that_the_request_does_not_have_any_more(
    steps: Steps, replacement: int
) -> None:
    """It slid out of a window (vLLM's null block), or another one is in its place. The next chunk is stored."""
    blocks = steps.arrive("runs")
    steps.step()
    output = SchedulerOutput.make_empty()
    output.num_scheduled_tokens, output.total_num_scheduled_tokens = {"runs": 2 * CHUNK_TOKENS}, 2 * CHUNK_TOKENS
    output.kv_connector_block_state = table(replacement, *blocks[1:])
    meta: Any = steps.scheduler.build_connector_meta(output)
    [job] = meta.store_jobs.values()
    assert job.src_spec.block_ids.tolist() == blocks[BLOCKS_PER_CHUNK : 2 * BLOCKS_PER_CHUNK]


def test_what_is_stored_of_a_request_that_has_ended_comes_from_the_blocks_of_its_end(steps: Steps) -> None:
    blocks = steps.arrive("runs")
    steps.step()
    request = steps.requests["runs"]
    request.num_computed_tokens, request.status = 2 * CHUNK_TOKENS, RequestStatus.FINISHED_ABORTED
    steps.scheduler.check_blocks("runs", ([0, *blocks[1 : 2 * BLOCKS_PER_CHUNK]],))
    output = SchedulerOutput.make_empty()
    output.finished_req_ids = {"runs"}
    meta: Any = steps.scheduler.build_connector_meta(output)
    [job] = meta.store_jobs.values()
    assert job.src_spec.block_ids.tolist() == blocks[BLOCKS_PER_CHUNK : 2 * BLOCKS_PER_CHUNK]
