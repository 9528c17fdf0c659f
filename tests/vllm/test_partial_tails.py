"""The tail of a prompt that ends within a block, which vLLM offers apart where a model keeps a state: our scheduler's
half, without an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.core.kv_cache_utils import eagle_proof_margin
from vllm.v1.core.sched.output import KVConnectorBlockState
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.kv_offload.base import OffloadKey, make_offload_key
from vllm.v1.kv_offload.config import OffloadingGroupConfig

from nixl_offload.vllm import connector_scheduler
from nixl_offload.vllm.load_decision import LOADS_AT_ONCE
from nixl_offload.vllm.messages import LoadSample, TicketReport
from tests.vllm import manager_rig
from tests.vllm.manager_rig import BLOCK_TOKENS, Rig

HASH_TOKENS = 16
TAIL = BLOCK_TOKENS + 2 * HASH_TOKENS
STATE_GROUP, STATE_BLOCK = 1, 9


class Tails(Rig):
    """Attention and a state, in chunks of one block, of which vLLM also knows what lies within."""

    def __init__(self, *, has_draft: bool = False) -> None:
        """``has_draft``: whether a draft model (EAGLE) shares the attention's KV cache group."""
        offloading, caches = manager_rig.offloading_config(), manager_rig.kv_cache_config()
        offloading = replace(
            offloading,
            groups=(*offloading.groups, OffloadingGroupConfig(BLOCK_TOKENS, ("state",), STATE_GROUP)),
            cache=replace(offloading.cache, tokens_per_hash=HASH_TOKENS, blocks_per_chunk=1),
        )
        state = MambaSpec(block_size=BLOCK_TOKENS, shapes=((8, 8),), dtypes=(torch.float32,), mamba_cache_mode="align")
        caches.kv_cache_groups.append(SimpleNamespace(kv_cache_spec=state, layer_names=["state"], is_eagle_group=False))
        caches.kv_cache_groups[0].is_eagle_group = has_draft
        super().__init__(offloading=offloading, caches=caches)
        geometries = dict(enumerate(manager_rig.ranks(groups=2)))
        self.scheduler.take_geometries(geometries, is_start=True)  # no other connector is beside ours
        assert self.scheduler.config.supports_partial_tail

    def offered_tail(self, params: Any = None, computed_tokens: int = 0) -> list[int]:
        """Let vLLM offer the tail of a prompt in the request's first step; return the blocks that are stored."""
        request = self.arrive("asks", range(TAIL + 5), params=params)
        assert self.ask("asks", computed_tokens // BLOCK_TOKENS * BLOCK_TOKENS) == (0, False)
        request.num_computed_tokens = computed_tokens
        blocks = ([1, 2], [3, 4])
        self.allocate("asks", *blocks)
        state = KVConnectorBlockState(
            req_ids={"asks"},
            resolve_block_ids=lambda _: blocks,
            boundary_state_offloads={"asks": [(STATE_GROUP, STATE_BLOCK, TAIL)]},
        )
        jobs = self.step({"asks": 5}, kv_connector_block_state=state).store_jobs.values()
        tails = [job for job in jobs if list(job.src_spec.block_indices) == [1, 1]]
        return [block for job in tails for block in job.src_spec.block_ids]

    def arrive_stored(self, tokens: int, ends: Sequence[tuple[int, int]]) -> list[OffloadKey]:
        """Let a request come, of whose tokens chunks are stored that end at ``ends`` of groups. Return their keys."""
        hashes = self.arrive("asks", range(tokens)).block_hashes
        keys = [make_offload_key(hashes[end // HASH_TOKENS - 1], group) for end, group in ends]
        self.store_keys(keys)
        return keys


@pytest.fixture
def tails(keep: Callable[[Tails], Tails]) -> Tails:
    return keep(Tails())


@pytest.mark.parametrize(("limit", "chunks"), [(None, 2), (TAIL, 2), (TAIL - 1, 0), (1, 0), (0, 0)])
def test_a_tail_beyond_max_offload_tokens_is_not_stored_and_ends_no_engine(
    tails: Tails, limit: int | None, chunks: int
) -> None:
    """All tails are offered, and vLLM asserts that none lies beyond it. With a limit of 0 it would store them."""
    params = None if limit is None else {"max_offload_tokens": limit}
    assert tails.offered_tail(params) == [2, STATE_BLOCK][:chunks]


def test_a_tail_in_the_prefix_cache_is_no_load_of_another_connector(tails: Tails) -> None:
    """We are asked about whole blocks; it computes from within one on. What it offers then it offers once."""
    assert tails.offered_tail(computed_tokens=BLOCK_TOKENS + HASH_TOKENS) == [2, STATE_BLOCK]


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
    keep: Callable[[Tails], Tails],
    has_draft: bool,
    prompt_tokens: int,
    ends: list[tuple[int, int]],
    seconds: float,
    tokens: int,
) -> None:
    tails = keep(Tails(has_draft=has_draft))
    tails.arrive_stored(prompt_tokens, ends)
    manager_rig.observe(tails.manager, seconds)
    assert tails.ask("asks") == ((tokens, True) if seconds < 1 else (0, False))


def test_a_hit_waits_while_the_first_loads_are_to_tell_how_fast_the_tier_is(
    tails: Tails, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the next steps the answer is the same, without a look; once one of them has ended, what was found."""
    monkeypatch.setattr(connector_scheduler, "WAIT_ANSWER_S", 60.0)
    keys = tails.arrive_stored(TAIL + 5, WHOLE_AND_TAIL)
    manager = tails.manager
    out = [manager.prepare_load(keys, manager_rig.request(str(number))).ticket for number in range(LOADS_AT_ONCE)]
    looks: list[Any] = []
    decide = manager.decider.tokens_to_load
    monkeypatch.setattr(
        manager.decider, "tokens_to_load", lambda *asked, **more: looks.append(asked) or decide(*asked, **more)
    )
    assert [tails.ask("asks") for _ in range(3)] == [(None, False)] * 3
    assert len(looks) == 1
    manager.settle({out[0].ticket: TicketReport()}, [LoadSample(0, 0.0001, False, out[0].ticket)])
    assert tails.ask("asks") == (TAIL, True)
