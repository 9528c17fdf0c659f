"""Proves that every engine size holds each shard of a chunk whole, in order, and that each is written once."""

from __future__ import annotations

import hashlib
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nixl_offload.chunk.shards import LEAST_SHARD_BYTES, MOST_SHARDS, GroupShards, ShardPlan, cut, hold, make_plan
from nixl_offload.types import Key

_HEADS = st.integers(1, 64)
_KEYS = [Key(hashlib.sha256(number.to_bytes(4, "big")).digest() + bytes(4)) for number in range(4096)]


def _heads_on(rank: int, heads: int, tp: int) -> set[int]:
    """Which KV heads vLLM gives a rank."""
    if heads >= tp:
        return set(range(rank * (heads // tp), (rank + 1) * (heads // tp)))
    return {rank // (tp // heads)}


@given(heads=_HEADS, wanted=st.integers(1, 64), tp=st.integers(1, 64))
def test_a_rank_holds_the_shards_of_its_own_heads(heads: int, wanted: int, tp: int) -> None:
    """The heads of the shards that a rank is said to hold are those that vLLM gives it; else there is no plan."""
    shards = cut(wanted, [heads], 1 << 30)
    held = hold(shards, [heads], tp)
    vllm_can = heads % tp == 0 or tp % heads == 0
    if held is None:
        each = heads // shards
        whole = vllm_can and all(
            len(_heads_on(rank, heads, tp)) % each == 0 and min(_heads_on(rank, heads, tp)) % each == 0
            for rank in range(tp)
        )
        assert not whole, "a plan was possible"
        return
    assert vllm_can
    each = heads // shards
    for rank in range(tp):
        numbers = held.held_by(rank)
        assert {number * each + head for number in numbers for head in range(each)} == _heads_on(rank, heads, tp)


@given(heads=_HEADS, wanted=st.integers(1, 64), tp=st.integers(1, 64))
def test_every_shard_of_a_key_has_one_writer(heads: int, wanted: int, tp: int) -> None:
    """Over all ranks each shard is written exactly once, whatever the key."""
    held = hold(cut(wanted, [heads], 1 << 30), [heads], tp)
    if held is None:
        return
    for key in _KEYS[:16]:
        written = Counter(number for rank in range(tp) if held.writes(rank, key) for number in held.held_by(rank))
        assert written == Counter(range(held.shards))


def test_replicas_share_the_writing_evenly() -> None:
    """Of 4,096 keys each of 8 replicas writes about an eighth."""
    held = hold(1, [1], 8)
    assert held == GroupShards(1, 1, 8)
    counts = Counter(rank for key in _KEYS for rank in range(8) if held.writes(rank, key))
    assert sum(counts.values()) == len(_KEYS)
    assert all(400 < count < 620 for count in counts.values())


@given(heads=_HEADS, chunk_bytes=st.integers(1, 1 << 28))
def test_auto_looks_at_the_model_and_the_chunk(heads: int, chunk_bytes: int) -> None:
    """A power of two that divides the heads, at most 8, and no shard below 1 MiB; the largest such."""
    fits = [n for n in (1, 2, 4, 8) if heads % n == 0 and (n == 1 or chunk_bytes // n >= LEAST_SHARD_BYTES)]
    assert cut("auto", [heads], chunk_bytes) == max(fits) <= MOST_SHARDS


def test_groups_are_held_side_by_side() -> None:
    """A model with full attention of 8 heads and an MLA group, on two ranks: four shards and one."""
    plan = make_plan(8, [[8], [1]], [1 << 24, 1 << 24], 2)
    assert isinstance(plan, ShardPlan)
    assert plan.numbers(0) == (0, 1, 2, 3, 0)
    assert plan.numbers(1) == (4, 5, 6, 7, 0)
    assert [plan.layout_groups(group) for group in (0, 1)] == [range(0, 4), range(4, 5)]


@pytest.mark.parametrize(
    ("wanted", "heads", "tp", "would_do"),
    [(2, 8, 4, "`shards: 8` would do"), ("auto", 16, 16, "`shards: 16` would do"), (4, 8, 3, "no number would do")],
)
def test_there_is_no_plan_for_parts_of_shards(wanted: int, heads: int, tp: int, would_do: str) -> None:
    """A rank that would hold half a shard has none, and the reason is told, with what would be right."""
    plan = make_plan(wanted, [[heads]], [1 << 30], tp)
    assert isinstance(plan, str)
    assert f"tensor parallelism {tp}" in plan
    assert would_do in plan


def test_layers_of_a_group_may_have_other_numbers_of_heads() -> None:
    """Eight heads and four, in one group: four shards at most, and no replicas, for ranks would hold other heads."""
    assert cut(8, [8, 4], 1 << 30) == 4
    assert hold(4, [8, 4], 2) == GroupShards(4, 2, 1)
    assert hold(4, [8, 4], 8) is None


def test_what_auto_means_is_the_same_for_all_servers_that_share() -> None:
    """Another number here parts servers of two versions."""
    assert (LEAST_SHARD_BYTES, MOST_SHARDS) == (1 << 20, 8)
