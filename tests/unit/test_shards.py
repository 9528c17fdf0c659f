"""Proves that every engine size holds each shard of a chunk whole, in order, and that each is written once."""

from __future__ import annotations

import hashlib
from collections import Counter
from itertools import pairwise
from math import gcd
from typing import Any

import pytest
from hypothesis import given, strategies as st

from nixl_offload.chunk.shards import ONE_RANGE, LayerCut, cut_layers, make_plan
from nixl_offload.errors import NotSupportedError
from nixl_offload.types import Key

_HEADS = st.integers(1, 64)
_KEYS = [Key(hashlib.sha256(number.to_bytes(4, "big")).digest() + bytes(4)) for number in range(4096)]


def _heads_on(rank: int, heads: int, tp: int) -> set[int]:
    """Which KV heads vLLM gives a rank."""
    if heads >= tp:
        return set(range(rank * (heads // tp), (rank + 1) * (heads // tp)))
    return {rank // (tp // heads)}


@given(heads=_HEADS, wanted=st.integers(1, 64) | st.just("distinct"), tp=st.integers(1, 64))
def test_a_rank_holds_the_shards_of_its_own_heads(heads: int, wanted: Any, tp: int) -> None:
    """The heads of the shards that a rank is said to hold are those that vLLM gives it; else there is no plan. Over all
    ranks each shard of a key is written once. ``distinct``: a KV head each.
    """
    ranges = heads if wanted == "distinct" else gcd(wanted, heads)
    each, vllm_can = heads // ranges, heads % tp == 0 or tp % heads == 0
    on_rank = [_heads_on(rank, heads, tp) for rank in range(tp)] if vllm_can else []
    try:
        [group] = make_plan(wanted, [[heads]], [[True]], tp).groups
    except NotSupportedError:
        whole = all(len(heads) % each == 0 and min(heads) % each == 0 for heads in on_rank)
        single = wanted != "distinct" or all(len(heads) == 1 for heads in on_rank)
        assert not (vllm_can and whole and single), "a plan was possible"
        return
    assert (vllm_can, group.head_ranges, group.ranks) == (True, ranges, tp)
    for rank, wanted_heads in enumerate(on_rank):
        assert {number * each + head for number in group.held_by(rank) for head in range(each)} == wanted_heads
        assert wanted != "distinct" or len(wanted_heads) == 1
    for key in _KEYS[:16]:
        written = Counter(number for rank in range(tp) if group.writes(rank, key) for number in group.held_by(rank))
        assert written == Counter(range(ranges))


@given(
    data=st.data(), tp=st.sampled_from([1, 2, 4]), heads=st.lists(st.sampled_from([1, 4, 8]), min_size=1, max_size=3)
)
def test_every_shard_of_every_range_of_layers_is_held(data: st.DataObject, tp: int, heads: list[int]) -> None:
    """By as many ranks of the stage with its layers as there are replicas, and by no other rank."""
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


def test_a_stage_holds_whole_ranges() -> None:
    """Otherwise there is no such cut. A stage without layers holds no range."""
    two, four = [(0, 4), (4, 8)], [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert cut_layers(four, two) == LayerCut((0, 2, 4, 6), (range(2), range(2, 4)))
    assert cut_layers(two, four) is None
    assert cut_layers(two, [(0, 4), (4, 4), (4, 8)]) == LayerCut((0, 4), (range(1), range(1, 1), range(1, 2)))
    assert cut_layers(two, [(0, 8), (8, 8)]) == LayerCut((0, 4), (range(2), range(2, 2)))
    assert cut_layers([(0, 0), (0, 8)], [(0, 8)]) == ONE_RANGE


@pytest.mark.parametrize(
    ("wanted", "heads", "tp", "would_do"),
    [(2, 8, 4, "`shards: 8` would do"), (2, 8, 16, "`shards: 8` would do"), (4, 8, 3, "no number would do")],
)
def test_there_is_no_plan_for_parts_of_shards(wanted: int, heads: int, tp: int, would_do: str) -> None:
    """If a rank would hold half a shard there is no plan; the reason names a number that works."""
    with pytest.raises(NotSupportedError, match=f"tensor parallelism {tp} .*{would_do}"):
        make_plan(wanted, [[heads]], [[True]], tp)


def test_replicas_share_the_writing_evenly() -> None:
    """Of 4,096 keys each of 8 replicas writes about an eighth."""
    plan = make_plan("distinct", [[1]], [[True]], 8)
    counts = Counter(rank for key in _KEYS for rank in range(8) if plan.groups[0].writes(rank, key))
    assert sum(counts.values()) == len(_KEYS)
    assert all(400 < count < 620 for count in counts.values())
