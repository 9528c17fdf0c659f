"""Proves that every engine size holds each shard of a chunk whole, in order, and that each is written once."""

from __future__ import annotations

import hashlib
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nixl_offload.chunk.shards import (
    ONE_RANGE,
    GroupShards,
    LayerCut,
    ShardPlan,
    cut,
    cut_layers,
    hold,
    make_plan,
)
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
    shards = cut(wanted, [heads])
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
    held = hold(cut(wanted, [heads]), [heads], tp)
    if held is None:
        return
    for key in _KEYS[:16]:
        written = Counter(number for rank in range(tp) if held.writes(rank, key) for number in held.held_by(rank))
        assert written == Counter(range(held.head_ranges))


@given(heads=st.lists(_HEADS, min_size=1, max_size=2), tp=st.integers(1, 64))
def test_distinct_gives_no_rank_more_than_one_shard(heads: list[int], tp: int) -> None:
    """A KV head each, which is on as many ranks as vLLM copies it to; else there is no plan."""
    plan = make_plan("distinct", [[each] for each in heads], [[True]] * len(heads), tp)
    if isinstance(plan, str):
        assert any(tp % each for each in heads)
        return
    for group, each in zip(plan.groups, heads, strict=True):
        assert (group.head_ranges, group.per_rank, group.ranks) == (each, 1, tp)
        for rank in range(tp):
            assert set(group.held_by(rank)) == _heads_on(rank, each, tp)


@given(
    data=st.data(), tp=st.sampled_from([1, 2, 4]), heads=st.lists(st.sampled_from([1, 4, 8]), min_size=1, max_size=3)
)
def test_every_shard_of_every_range_of_layers_is_held(data: st.DataObject, tp: int, heads: list[int]) -> None:
    """By the stage that has its layers, by as many ranks as there are replicas, and nowhere else."""
    layers = data.draw(st.integers(1, 12))
    begins = sorted(data.draw(st.sets(st.integers(1, max(1, layers - 1)), max_size=4)) - {layers})
    wanted = list(pairwise([0, *begins, layers]))
    own = list(pairwise([0, *(begin for begin in begins if data.draw(st.booleans())), layers]))
    cut_at = cut_layers(wanted, own)
    assert cut_at is not None
    assert cut_at.begins == (0, *begins)
    there = [[data.draw(st.booleans()) for _ in wanted] for _ in heads]
    for each in there:
        each[data.draw(st.integers(0, len(wanted) - 1))] = True
    plan = make_plan(8, [[each] for each in heads], there, tp, cut_at)
    assert isinstance(plan, ShardPlan)
    assert plan.ranks == tp * len(own)
    for group, of_group in enumerate(there):
        holders = Counter(number for rank in range(plan.ranks) for number in plan.held(rank, group))
        shards, replicas = plan.groups[group].head_ranges, plan.groups[group].replicas
        there_are = {
            at * plan.per_range + head for at, is_there in enumerate(of_group) if is_there for head in range(shards)
        }
        assert holders == Counter(dict.fromkeys(there_are, replicas))
        assert max(holders) < plan.shards
        for rank in range(plan.ranks):
            begin, end = own[rank // tp]
            assert all(begin <= cut_at.begins[number // plan.per_range] < end for number in plan.held(rank, group))
    for rank in range(plan.ranks):
        positions = [at for group in range(len(heads)) for at in plan.layout_groups(rank, group)]
        assert positions == list(range(len(plan.numbers(rank))))


def test_a_stage_holds_whole_ranges() -> None:
    """Or the layers are not cut so; a stage without layers holds none."""
    two, four = [(0, 4), (4, 8)], [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert cut_layers(four, two) == LayerCut((0, 2, 4, 6), (range(2), range(2, 4)))
    assert cut_layers(two, four) is None
    assert cut_layers(two, [(0, 4), (4, 4), (4, 8)]) == LayerCut((0, 4), (range(1), range(1, 1), range(1, 2)))
    assert cut_layers(two, [(0, 8), (8, 8)]) == LayerCut((0, 4), (range(2), range(2, 2)))
    assert cut_layers([(0, 0), (0, 8)], [(0, 8)]) == ONE_RANGE


@pytest.mark.parametrize(
    ("wanted", "heads", "tp", "would_do"),
    [
        (2, 8, 4, "`shards: 8` would do"),
        (2, 8, 16, "`shards: 8` would do"),
        (4, 8, 3, "no number would do"),
    ],
)
def test_there_is_no_plan_for_parts_of_shards(wanted: int, heads: int, tp: int, would_do: str) -> None:
    """A rank that would hold half a shard has none, and the reason is told, with what would be right."""
    plan = make_plan(wanted, [[heads]], [[True]], tp)
    assert isinstance(plan, str)
    assert f"tensor parallelism {tp}" in plan
    assert would_do in plan


def test_replicas_share_the_writing_evenly() -> None:
    """Of 4,096 keys each of 8 replicas writes about an eighth."""
    held = hold(1, [1], 8)
    assert held == GroupShards(1, 1, 8)
    counts = Counter(rank for key in _KEYS for rank in range(8) if held.writes(rank, key))
    assert sum(counts.values()) == len(_KEYS)
    assert all(400 < count < 620 for count in counts.values())
