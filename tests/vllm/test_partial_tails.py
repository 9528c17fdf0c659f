"""The tail of a prompt that ends within a block, which vLLM offers apart where a model keeps a state: our scheduler's
half, without an engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import eagle_proof_margin, get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.kv_offload.base import make_offload_key
from vllm.v1.kv_offload.config import OffloadingGroupConfig
from vllm.v1.request import Request

from nixl_offload.chunk.shards import uncut_plan
from nixl_offload.vllm import connector_scheduler
from nixl_offload.vllm.connector_scheduler import NixlOffloadScheduler
from nixl_offload.vllm.load_decision import LOADS_AT_ONCE
from nixl_offload.vllm.messages import LoadSample, RankGeometry, TicketReport
from tests.vllm import manager_rig
from tests.vllm.manager_rig import BLOCK_TOKENS, SLOT

HASH_TOKENS = 16
TAIL = BLOCK_TOKENS + 2 * HASH_TOKENS
STATE_GROUP, STATE_BLOCK = 1, 9


@pytest.fixture
def has_draft() -> bool:
    """Whether a draft model (EAGLE) shares the attention's KV cache group."""
    return False


@pytest.fixture
def scheduler(has_draft: bool) -> Any:
    """Attention and a state, in chunks of one block, of which vLLM also knows what lies within."""
    init_none_hash(sha256)
    offloading, caches = manager_rig.offloading_config(), manager_rig.kv_cache_config()
    offloading = replace(
        offloading,
        groups=(*offloading.groups, OffloadingGroupConfig(BLOCK_TOKENS, ("state",), STATE_GROUP)),
        cache=replace(offloading.cache, tokens_per_hash=HASH_TOKENS, blocks_per_chunk=1),
    )
    state = MambaSpec(block_size=BLOCK_TOKENS, shapes=((8, 8),), dtypes=(torch.float32,), mamba_cache_mode="align")
    caches.kv_cache_groups.append(SimpleNamespace(kv_cache_spec=state, layer_names=["state"], is_eagle_group=False))
    caches.kv_cache_groups[0].is_eagle_group = has_draft
    config = manager_rig.config_of(manager_rig.memory_tier(64))
    made = manager_rig.scheduler_half(config, offloading=offloading, caches=caches)
    assert made.config.supports_partial_tail
    geometry = RankGeometry(0, (SLOT, SLOT), f"{0:064x}", uncut_plan(1, 2), ("CPU_ATTN",), weights="ab")
    made.take_geometries({0: geometry}, is_start=True)
    manager_rig.ranks_open(made.offload_manager)
    yield made
    made.offload_manager.shutdown()


def offered_tail(scheduler: NixlOffloadScheduler, params: Any = None, computed_tokens: int = 0) -> list[int]:
    """Let vLLM offer the tail of a prompt in the request's first step; return the blocks that are stored."""
    request = Request(
        "asks",
        list(range(TAIL + 5)),
        SamplingParams(max_tokens=9, extra_args={"kv_transfer_params": params}),
        None,
        block_hasher=get_request_block_hasher(HASH_TOKENS, sha256),
    )
    scheduler.on_new_request(request)
    whole_blocks = computed_tokens // BLOCK_TOKENS * BLOCK_TOKENS
    assert scheduler.get_num_new_matched_tokens(request, whole_blocks) == (0, False)
    blocks = ([1, 2], [3, 4])
    scheduler.update_state_after_alloc(request, manager_rig.allocated(*blocks), 0)
    request.num_computed_tokens = computed_tokens
    output = SchedulerOutput.make_empty()
    arrived: Any = SimpleNamespace(req_id="asks", block_ids=blocks, num_computed_tokens=computed_tokens)
    output.scheduled_new_reqs = [arrived]
    output.num_scheduled_tokens = {"asks": 5}
    output.kv_connector_block_state = KVConnectorBlockState(
        req_ids={"asks"},
        resolve_block_ids=lambda _: blocks,
        boundary_state_offloads={"asks": [(STATE_GROUP, STATE_BLOCK, TAIL)]},
    )
    meta: Any = scheduler.build_connector_meta(output)
    tails = [job for job in meta.store_jobs.values() if list(job.src_spec.block_indices) == [1, 1]]
    return [block for job in tails for block in job.src_spec.block_ids]


@pytest.mark.parametrize(("limit", "chunks"), [(None, 2), (TAIL, 2), (TAIL - 1, 0), (1, 0), (0, 0)])
def test_a_tail_beyond_max_offload_tokens_is_not_stored_and_ends_no_engine(
    scheduler: NixlOffloadScheduler, limit: int | None, chunks: int
) -> None:
    """All tails are offered, and vLLM asserts that none lies beyond it. With a limit of 0 it would store them."""
    params = None if limit is None else {"max_offload_tokens": limit}
    assert offered_tail(scheduler, params) == [2, STATE_BLOCK][:chunks]


def test_a_tail_in_the_prefix_cache_is_no_load_of_another_connector(scheduler: NixlOffloadScheduler) -> None:
    """We are asked about whole blocks; it computes from within one on. What it offers then it offers once."""
    assert offered_tail(scheduler, computed_tokens=BLOCK_TOKENS + HASH_TOKENS) == [2, STATE_BLOCK]


def asks_for(
    scheduler: NixlOffloadScheduler, tokens: int, ends: Sequence[tuple[int, int]]
) -> tuple[Request, list[Any]]:
    """Let a request come, of whose tokens chunks are stored that end at ``ends`` of groups. Return the chunks' keys."""
    hasher = get_request_block_hasher(HASH_TOKENS, sha256)
    request = Request("asks", list(range(tokens)), SamplingParams(max_tokens=9), None, block_hasher=hasher)
    scheduler.on_new_request(request)
    keys = [make_offload_key(request.block_hashes[end // HASH_TOKENS - 1], group) for end, group in ends]
    manager = scheduler.offload_manager
    output = manager.prepare_store(keys, manager_rig.request("stores"))
    assert output is not None
    manager.settle({output.store_spec.ticket.ticket: TicketReport()})  # type: ignore[attr-defined]
    return request, keys


SHORT = 2 * HASH_TOKENS
PROOF = eagle_proof_margin(BLOCK_TOKENS, HASH_TOKENS, False)
WHOLE_AND_TAIL = [(BLOCK_TOKENS, 0), (BLOCK_TOKENS, STATE_GROUP), (TAIL, 0), (TAIL, STATE_GROUP)]
# With a draft, the key of the attention's tail covers what the draft needs behind the boundary.
WITH_DRAFT = [(SHORT + PROOF, 0), (SHORT, STATE_GROUP)]


@pytest.mark.parametrize("seconds", [0.0001, 10.0])
@pytest.mark.parametrize(
    ("has_draft", "prompt_tokens", "ends", "tokens"),
    [
        (False, TAIL + 5, WHOLE_AND_TAIL, TAIL),
        (False, SHORT + 5, [(SHORT, 0), (SHORT, STATE_GROUP)], SHORT),
        (True, SHORT + PROOF + 5, WITH_DRAFT, SHORT),
    ],
)
def test_a_hit_that_ends_within_a_block_is_loaded_where_that_is_quicker(
    scheduler: NixlOffloadScheduler, prompt_tokens: int, ends: list[tuple[int, int]], seconds: float, tokens: int
) -> None:
    request, _ = asks_for(scheduler, prompt_tokens, ends)
    manager = scheduler.offload_manager
    manager_rig.observe(manager, seconds)
    tokens = tokens if seconds < 1 else 0
    assert scheduler.get_num_new_matched_tokens(request, 0) == (tokens, tokens > 0)


def test_a_hit_waits_while_the_first_loads_are_to_tell_how_fast_the_tier_is(
    scheduler: NixlOffloadScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the next steps the answer is the same, without a look; once one of them has ended, what was found."""
    monkeypatch.setattr(connector_scheduler, "WAIT_ANSWER_S", 60.0)
    request, keys = asks_for(scheduler, TAIL + 5, WHOLE_AND_TAIL)
    manager = scheduler.offload_manager
    out = [manager.prepare_load(keys, manager_rig.request(str(number))).ticket for number in range(LOADS_AT_ONCE)]
    looks: list[Any] = []
    decide = manager.decider.tokens_to_load
    monkeypatch.setattr(
        manager.decider, "tokens_to_load", lambda *asked, **more: looks.append(asked) or decide(*asked, **more)
    )
    assert [scheduler.get_num_new_matched_tokens(request, 0) for _ in range(3)] == [(None, False)] * 3
    assert len(looks) == 1
    manager.settle({out[0].ticket: TicketReport()}, [LoadSample(0, 0.0001, False, out[0].ticket)])
    assert scheduler.get_num_new_matched_tokens(request, 0) == (TAIL, True)
