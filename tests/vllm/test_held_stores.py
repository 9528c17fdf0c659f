"""Stores while another connector loads within steps whose outcome is not known yet. The test steps our scheduler's half
by hand in the order of vLLM's asynchronous scheduling: a step is scheduled before the previous step has ended.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Collection
from typing import Any

import pytest
from vllm.v1.core.sched.output import KVConnectorBlockState
from vllm.v1.request import RequestStatus

from nixl_offload.vllm import serving_tiers
from nixl_offload.vllm.messages import RankStatus
from nixl_offload.vllm.vllm_scheduler import notes_of
from tests.vllm import manager_rig
from tests.vllm.manager_rig import BLOCKS_PER_CHUNK, CHUNK_TOKENS, Rig

PROMPT_CHUNKS = 8


class Steps(Rig):
    """Requests of ``PROMPT_CHUNKS`` chunks, of which nothing is stored. Each gets all its blocks when it arrives."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers = itertools.count(1)

    def begin(self, name: str, *, loaded_chunks: int = 0, blocks: Collection[int] = ()) -> list[int]:
        """Allocate a request, of which another connector loads the first chunks in its first step. ``blocks``: the
        first of those that it is given. Returns all.
        """
        request = self.arrive(name, random.Random(name).choices(range(1000), k=PROMPT_CHUNKS * CHUNK_TOKENS))
        assert self.ask(name) == (0, False)
        given = [*blocks, *itertools.islice(self._numbers, PROMPT_CHUNKS * BLOCKS_PER_CHUNK - len(blocks))]
        self.allocate(name, given)
        request.num_computed_tokens, request.status = loaded_chunks * CHUNK_TOKENS, RequestStatus.RUNNING
        return given

    def compute(self, *names: str, **fields: Any) -> list[Any]:
        """Schedule a step that computes a chunk of these requests; return the stores that go out with it."""
        jobs = self.step(dict.fromkeys(names, CHUNK_TOKENS), **fields).store_jobs.values()
        for name in names:
            self.state(name).req.num_computed_tokens += CHUNK_TOKENS
        return list(jobs)

    def storing(self, *names: str) -> set[str]:
        """The same; return the requests of which something is stored."""
        return {job.req_id for job in self.compute(*names)}

    def stored(self, name: str) -> int:
        """How many chunks of a request are in some tier, or on their way there."""
        return sum(map(self.manager.is_known, self.keys(name)))

    def refused(self) -> set[str]:
        states = self.scheduler.states()
        return {state.req.request_id for state in states if not notes_of(state.req_context).stores}


@pytest.fixture
def steps(keep: Callable[[Steps], Steps]) -> Steps:
    return keep(Steps())


def test_a_request_is_stored_once_the_step_that_loaded_it_is_known_to_have_ended_well(steps: Steps) -> None:
    """So are requests that were given blocks meanwhile: they may share the loaded blocks."""
    steps.begin("loads", loaded_chunks=2)
    assert steps.storing("loads") == set()
    steps.begin("later")
    assert steps.storing("loads", "later") == set()
    steps.hear()
    assert steps.storing("loads", "later") == {"loads", "later"}
    for name, chunks in (("loads", 5), ("later", 2)):
        [group] = steps.state(name).group_states
        assert group.next_stored_chunk_idx == chunks, "with all that was held back"


def test_a_load_of_ours_keeps_no_store_waiting(steps: Steps) -> None:
    """Its request is given blocks again, for the rest, when the load has ended."""
    request = steps.arrive("loads", random.Random(1).choices(range(1000), k=PROMPT_CHUNKS * CHUNK_TOKENS))
    steps.store_keys(steps.keys("loads")[:2])
    assert steps.ask("loads") == (2 * CHUNK_TOKENS, True)
    blocks = range(1, PROMPT_CHUNKS * BLOCKS_PER_CHUNK + 1)
    steps.allocate("loads", blocks, loaded_tokens=2 * CHUNK_TOKENS)
    steps.hear(**manager_rig.all_done(steps.step()))
    request.num_computed_tokens, request.status = 2 * CHUNK_TOKENS, RequestStatus.RUNNING
    steps.allocate("loads", blocks)
    assert steps.storing("loads") == {"loads"}


def test_steps_that_all_begin_a_load_of_another_connector_keep_no_store_waiting_for_ever(steps: Steps) -> None:
    """A request that ran before is stored in every step, each of the others once its first step has ended."""
    steps.begin("before")
    steps.compute("before")
    for number in range(6):
        steps.begin(str(number), loaded_chunks=1)
        names = [str(each) for each in range(number + 1)]
        assert steps.storing("before", *names) == {"before", *names[:-2]}
        steps.hear()


def test_stores_wait_for_tiers_that_are_opened_for_other_weights(steps: Steps) -> None:
    """A request that is computed meanwhile is stored from its first chunk on, as soon as the tiers serve."""
    steps.begin("first")
    counts = steps.manager.catalog.counts
    counts["unstored_chunks", "no_room"] = 2
    steps.manager.reopen("other weights")
    assert steps.storing("first") == set()
    manager_rig.wait_for_tiers(steps.manager)
    assert steps.manager.catalog.counts == counts, "counters go on"
    assert steps.storing("first") == set(), "the ranks have not opened theirs"
    steps.manager.take_ranks({0: RankStatus(frozenset({0}), opening=steps.manager.serving.number)})
    assert steps.storing("first") == {"first"}
    assert steps.stored("first") == 3


def test_stores_do_not_wait_for_tiers_that_take_too_long(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving_tiers, "OPENING_WAIT_S", 0.0)
    steps.begin("first")
    steps.manager.reopen("other weights")
    steps.compute("first")
    assert steps.scheduler.stores
    assert steps.stored("first") == 0


def test_one_that_ends_while_it_is_held_back_is_not_stored(steps: Steps) -> None:
    steps.begin("loads", loaded_chunks=2)
    steps.compute("loads")
    request = steps.state("loads").req
    request.status = RequestStatus.FINISHED_STOPPED
    steps.scheduler.request_finished(request)
    assert steps.compute(finished_req_ids={"loads"}) == []
    assert steps.scheduler.state_of("loads") is None


def test_a_failed_load_of_another_connector_refuses_those_that_may_run_on_it_alone(steps: Steps) -> None:
    """A request that had these blocks before is not refused, although vLLM's half still lists them for it."""
    stale = steps.begin("had them")
    steps.compute("had them")
    steps.hear()
    steps.state("had them").req.status = RequestStatus.PREEMPTED
    blocks = steps.begin("loads", loaded_chunks=2, blocks=stale[:BLOCKS_PER_CHUNK])
    steps.compute("loads")
    steps.begin("shares", blocks=blocks[: 2 * BLOCKS_PER_CHUNK])
    steps.begin("beside")
    steps.compute("loads", "shares", "beside")
    steps.hear(invalid_blocks=blocks[: 2 * BLOCKS_PER_CHUNK])
    assert steps.refused() == {"loads", "shares"}
    assert steps.storing("loads", "shares", "beside") == {"beside"}


def test_a_failed_load_of_ours_refuses_nobody(steps: Steps) -> None:
    """Its request has no blocks yet, and the request that had them before is not affected."""
    stale = steps.begin("had them")
    steps.compute("had them")
    steps.hear(invalid_blocks=stale)
    assert steps.refused() == set()
    assert steps.storing("had them") == {"had them"}


@pytest.mark.parametrize("replacement", [0, 999])
def test_no_chunk_is_stored_from_a_block_that_the_request_does_not_have_any_more(
    steps: Steps, replacement: int
) -> None:
    """It slid out of a window (vLLM's null block), or another one is in its place. The next chunk is stored."""
    blocks = steps.begin("runs")
    steps.compute()
    steps.state("runs").req.num_computed_tokens = CHUNK_TOKENS
    table = KVConnectorBlockState(
        req_ids={"runs"}, resolve_block_ids=lambda _: ([replacement, *blocks[1:]],), boundary_state_offloads={}
    )
    [job] = steps.compute("runs", kv_connector_block_state=table)
    assert job.src_spec.block_ids.tolist() == blocks[BLOCKS_PER_CHUNK : 2 * BLOCKS_PER_CHUNK]


def test_what_is_stored_of_a_request_that_has_ended_comes_from_the_blocks_of_its_end(steps: Steps) -> None:
    blocks = steps.begin("runs")
    steps.compute()
    request = steps.state("runs").req
    request.num_computed_tokens, request.status = 2 * CHUNK_TOKENS, RequestStatus.FINISHED_ABORTED
    steps.scheduler.check_blocks("runs", ([0, *blocks[1 : 2 * BLOCKS_PER_CHUNK]],))
    [job] = steps.compute(finished_req_ids={"runs"})
    assert job.src_spec.block_ids.tolist() == blocks[BLOCKS_PER_CHUNK : 2 * BLOCKS_PER_CHUNK]
