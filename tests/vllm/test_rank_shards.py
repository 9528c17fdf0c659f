"""Proves that what parts two engines' shards is in their digest, over KV memory that vLLM lays out itself, and that
sizes and layouts are not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    KVCacheGroupRole,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
)

from nixl_offload.config import ShardCut
from nixl_offload.errors import LayoutError
from nixl_offload.vllm import rank_shards
from nixl_offload.vllm.rank_shards import RankShards, cut_by_config, cut_chunks, has_replicas
from tests.vllm.test_kv_heads import BLOCKS, Memory, full, group, mla, vllm_config, window


@pytest.fixture(autouse=True)
def _alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process here is one of several: the other ranks of a stage tell what this one tells."""
    monkeypatch.setattr(rank_shards, "of_all_ranks", lambda own: [own])


def engine(total: int, tp: int = 1, layout: str = "LBHNC", layers: Mapping[str, Any] | None = None) -> Any:
    config = vllm_config(total, tp, 0, layout)
    config.parallel_config.pipeline_parallel_size = 1
    config.compilation_config = SimpleNamespace(static_forward_context=layers or {})
    return config


def cut(
    config: Any, groups: Sequence[KVCacheGroupSpec], kernel_block: int | None = None, layers: int | None = None
) -> RankShards:
    memory = Memory(config, groups, kernel_block)
    wanted = ShardCut(heads=1 if len(groups) == 1 else 4, layers=layers)
    found = cut_chunks(config, memory.config, memory.caches, memory.canonical(), wanted, BLOCKS)
    assert isinstance(found, RankShards), found
    return found


def attention(scale: float) -> Any:
    backend = SimpleNamespace(get_name=lambda: "FLASH_ATTN")
    return SimpleNamespace(_k_scale_float=scale, _v_scale_float=1.0, get_attn_backend=lambda: backend)


def test_sizes_and_layouts_have_one_digest() -> None:
    made = {
        cut(engine(4, tp, layout), [group(full(max(1, 4 // tp)), "a"), group(window(max(1, 4 // tp)), "b")]).digest
        for tp in (1, 2, 4, 8)
        for layout in ("LBHNC", "BLHNC")
    }
    assert len(made) == 1


def test_what_changes_bytes_changes_the_digest() -> None:
    groups = [group(full(4), "a"), group(window(4), "b")]
    digests = [
        cut(engine(4), groups).digest,
        cut(engine(4, layers={"a": attention(1.0)}), groups).digest,
        cut(engine(4, layers={"a": attention(0.5)}), groups).digest,
        cut(engine(4), groups[::-1]).digest,
        cut(engine(4), [group(full(4), "a"), group(full(4), "b")]).digest,
        cut(engine(4), [group(full(4), "a"), group(window(4), "c")]).digest,
        cut(engine(4, layout="BLHNC"), [group(full(4, head_size_v=16), "a"), group(window(4), "b")]).digest,
        cut(engine(8), [group(full(8), "a"), group(window(8), "b")]).digest,
        cut(engine(4), [groups[0], replace(groups[1], is_eagle_group=True)]).digest,
        cut(engine(4), [groups[0], replace(groups[1], role=KVCacheGroupRole.HISPARSE_INDEXER)]).digest,
    ]
    assert len(set(digests)) == len(digests)


def test_the_type_of_the_memory_counts_beside_that_of_the_spec() -> None:
    config = engine(4)
    memory = Memory(config, [group(full(4), "a")])
    other = {name: cache.view(torch.float16) for name, cache in memory.caches.items()}
    found = cut_chunks(config, memory.config, other, memory.canonical(), ShardCut(heads=1), BLOCKS)
    assert isinstance(found, RankShards), found
    assert found.digest != cut(config, [group(full(4), "a")]).digest


@pytest.mark.parametrize("tp", [1, 8])
def test_what_a_kernel_makes_of_a_block_of_mla_counts(tp: int) -> None:
    """An indexer keeps the scales of a kernel's block behind its tokens: another kernel block is another order."""
    spec = MLAAttentionSpec(block_size=4, num_kv_heads=1, head_size=132, dtype=torch.uint8, max_tp_shards=1)
    whole, halves = (cut(engine(1, tp), [group(spec, "a.k_cache")], part).digest for part in (None, 2))
    assert whole != halves


def staged(stages: int, rank: int) -> Any:
    """The configuration of a rank of an engine with so many pipeline stages and six layers."""
    config = engine(4)
    config.parallel_config.pipeline_parallel_size = stages
    config.parallel_config.rank, config.parallel_config.world_size = rank, stages
    config.model_config.get_total_num_hidden_layers = lambda: 6
    return config


NAMES = [f"model.layers.{number}.attn" for number in range(6)]
DRAFTS = ["model.layers.6.attn", "draft_model.layers.0.attn"]


def test_stages_come_to_what_one_of_one_stage_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same plan but for who holds what, and the same digest; drafts are with the last layers."""
    groups = [group(full(4), *NAMES[::2], *DRAFTS), group(window(4), *NAMES[1::2])]
    one = cut(staged(1, 0), groups, layers=3)
    assert [len(each.refs) for each in one.layout.groups] == [1] * 8 + [3] * 4 + [1] * 12
    memories = []
    for rank in range(3):
        names = NAMES[2 * rank : 2 * rank + 2] + (DRAFTS if rank == 2 else [])
        own = [group(each.kv_cache_spec, *(name for name in each.layer_names if name in names)) for each in groups]
        memories.append((staged(3, rank), Memory(staged(3, rank), own)))
    told: list[Any] = []
    wanted = ShardCut(heads=4)

    def ask() -> list[RankShards | str]:
        return [
            cut_chunks(config, memory.config, memory.caches, memory.canonical(), wanted, BLOCKS)
            for config, memory in memories
        ]

    monkeypatch.setattr(rank_shards, "of_all_ranks", lambda own: told.append(own) or ["not all have told"])
    ask()
    monkeypatch.setattr(rank_shards, "of_all_ranks", lambda own: told)
    for rank, found in enumerate(ask()):
        assert isinstance(found, RankShards), found
        assert found.digest == one.digest
        assert (found.plan.groups, found.plan.layers.begins) == (one.plan.groups, (0, 2, 4))
        assert found.plan.numbers(rank) == tuple(range(4 * rank, 4 * rank + 4)) * 2
        assert found.plan.shards == 12
        ours = [one.layout.groups[one.plan.numbers(0).index(number)] for number in found.plan.numbers(rank)]
        assert [each.block_bytes for each in found.layout.groups][:4] == [each.block_bytes for each in ours][:4]


def test_other_layers_of_a_range_have_another_digest() -> None:
    groups = [group(full(4), *NAMES)]
    digests = [
        cut(staged(1, 0), groups, layers=2).digest,
        cut(staged(1, 0), groups, layers=3).digest,
        cut(staged(1, 0), groups).digest,
        cut(staged(1, 0), [group(full(4), *NAMES[:5])], layers=2).digest,
    ]
    assert len(set(digests)) == len(digests)


def test_a_layer_of_another_stage_is_not_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of a draft model whose number vLLM counts on from its stage's."""
    config = staged(2, 1)
    memory = Memory(config, [group(full(4), *NAMES[3:], "model.layers.2.draft")])
    told: list[Any] = []
    monkeypatch.setattr(rank_shards, "of_all_ranks", lambda own: told.append(own) or [own, own])
    with pytest.raises(LayoutError, match="runs on another pipeline stage"):
        cut_chunks(config, memory.config, memory.caches, memory.canonical(), ShardCut(heads=4), BLOCKS)
    assert told == ["the KV heads in the caches of rank 1 are not found"]


@pytest.mark.parametrize("layout", ["LBHNC", "BLHNC"])
def test_layers_of_a_kind_are_together_as_vllm_has_them_in_a_block(layout: str) -> None:
    """DeepSeek-V3.2 has an indexer's cache beside each layer's: a block of it stays one piece, and layers in the
    model's order, a piece for each, are not what is stored.
    """
    indexer = MLAAttentionSpec(block_size=4, num_kv_heads=1, head_size=132, dtype=torch.uint8, max_tp_shards=1)
    specs = {f"{layer}.{kind}": spec for layer in "ab" for kind, spec in (("attn", mla()), ("indexer", indexer))}
    mixed = UniformTypeKVCacheSpecs(block_size=4, kv_cache_specs=specs)
    found = cut(engine(1, layout=layout), [KVCacheGroupSpec(list(specs), mixed)])
    (made,) = found.layout.groups
    assert len(made.refs) == (1 if layout == "BLHNC" else 4)
    one, other = mla().page_size_bytes, indexer.page_size_bytes
    assert [run.length for run in made.refs] == (
        [2 * (one + other)] if len(made.refs) == 1 else [one, one, other, other]
    )
    assert found.digest == cut(engine(1, tp=8), [KVCacheGroupSpec(list(specs), mixed)]).digest


@pytest.mark.parametrize(("total", "tp", "shards"), [(4, 2, 0), (4, 4, 0), (4, 8, 4), (1, 1, 0), (1, 2, 1)])
def test_by_default_only_what_ranks_have_alike_is_cut(total: int, tp: int, shards: int) -> None:
    config = engine(total, tp)
    memory = Memory(config, [group(full(max(1, total // tp)), "a"), group(window(max(1, total // tp)), "b")])
    found = cut_chunks(config, memory.config, memory.caches, memory.canonical(), ShardCut(heads="distinct"), BLOCKS)
    assert has_replicas(config) == bool(shards)
    if shards:
        assert isinstance(found, RankShards), found
        assert [each.head_ranges for each in found.plan.groups] == [shards] * 2
        assert found.digest == cut(config, [group(full(1), "a"), group(window(1), "b")]).digest
    else:
        assert found == "each rank has KV heads of its own"


@pytest.mark.parametrize("tp", [1, 4])
def test_mla_is_one_shard_by_default_whatever_the_size(tp: int) -> None:
    config = engine(128, tp)
    config.model_config.use_mla = True
    memory = Memory(config, [group(mla(), "a", "b")])
    found = cut_chunks(config, memory.config, memory.caches, memory.canonical(), ShardCut(heads="distinct"), BLOCKS)
    assert isinstance(found, RankShards), found
    assert (found.plan.shards, found.plan.numbers(tp - 1), found.plan.groups[0].replicas) == (1, (0,), tp)


@pytest.mark.parametrize("rank", [0, 1])
def test_what_one_rank_does_not_understand_no_rank_cuts(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """Whatever is wrong there; nor where ranks of a stage have other layers, which would be other shards."""
    configs = [engine(1, 2), engine(1, 2)]
    configs[1].parallel_config.rank = 1
    memories = [Memory(configs[0], [group(full(1), "a")]), Memory(configs[1], [group(full(1), *"ab"[: 1 + rank])])]
    told: list[Any] = []

    def ask() -> list[RankShards | str]:
        return [
            cut_chunks(config, memory.config, memory.caches, memory.canonical(), ShardCut(heads="distinct"), BLOCKS)
            for config, memory in zip(configs, memories, strict=True)
        ]

    monkeypatch.setattr(rank_shards, "of_all_ranks", lambda own: told.append(own) or ["not all have told"])
    ask()
    monkeypatch.setattr(rank_shards, "of_all_ranks", lambda own: told)
    if rank:
        assert ask() == ["ranks of one pipeline stage have other layers"] * 2
    else:
        assert all(isinstance(found, RankShards) for found in ask())
        whole, told[1] = told[1], told[1]._replace(digests=("with scales of its own",))
        assert ask() == ["ranks that have the same KV heads differ in what their layers' bytes mean"] * 2
        told[1] = whole
    told[rank] = "rank looks the other way"
    assert ask() == ["rank looks the other way"] * 2


def test_context_parallelism_is_told_first() -> None:
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        config = engine(4)
        setattr(config.parallel_config, name, 2)
        assert "context parallelism" in str(cut_by_config(config, ShardCut(heads=8)))


def test_context_parallelism_leaves_fewer_replicas() -> None:
    """Ranks of such a group have other tokens of what would be alike."""
    config = engine(128, tp=8)
    config.model_config.use_mla = True
    for dcp, expected in ((1, True), (4, True), (8, False)):
        config.parallel_config.decode_context_parallel_size = dcp
        assert has_replicas(config) is expected
