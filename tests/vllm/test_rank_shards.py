"""Shards of KV memory that vLLM lays out itself. Heads are found where vLLM puts them: the bytes equal its own
canonical mapping, for every size, with layers apart or side by side. Unknown layouts are not cut. Digests differ if the
meaning of bytes does; sizes and layouts do not change them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import LlamaConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping import derive_canonical_mappings
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.v1.core.kv_cache_planning import get_kv_cache_config_from_groups
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupRole,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.kv_offload.base import CanonicalKVCaches
from vllm.v1.worker.utils import allocate_kv_cache

from nixl_offload.chunk.layout import KVLayout, shard_groups
from nixl_offload.config import ShardCut
from nixl_offload.engine.packer import HostPacker, pages_of
from nixl_offload.engine.streams import READY
from nixl_offload.errors import LayoutError, NotSupportedError
from nixl_offload.vllm import rank_shards
from nixl_offload.vllm.kv_caches import RankCaches, chunk_blocks, layer_pages, regions_of, understood_pages
from nixl_offload.vllm.rank_shards import RankShards, cut_by_config, cut_chunks, has_replicas

Bytes = npt.NDArray[np.uint8]
BLOCKS, TOKENS, HEAD = 6, 4, 8


def full(heads: int, **fields: Any) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=TOKENS, num_kv_heads=heads, head_size=HEAD, dtype=torch.bfloat16, **fields)


def window(heads: int) -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=TOKENS, num_kv_heads=heads, head_size=HEAD, dtype=torch.bfloat16, sliding_window=64
    )


def mla() -> MLAAttentionSpec:
    return MLAAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=24, dtype=torch.bfloat16, max_tp_shards=1)


def group(spec: KVCacheSpec, *names: str) -> KVCacheGroupSpec:
    return KVCacheGroupSpec(list(names), spec)


def vllm_config(total_heads: int, tp: int = 1, rank: int = 0, layout: str = "LBHNC", **layers: Any) -> Any:
    """``layers``: the model's, by name."""
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            tensor_parallel_size=tp,
            pipeline_parallel_size=1,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
            cp_kv_cache_interleave_size=1,
            world_size=tp,
            rank=rank,
        ),
        model_config=model_config(total_heads),
        compilation_config=SimpleNamespace(static_forward_context=layers),
        speculative_config=None,
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: KVCacheLayout[layout],
            num_gpu_blocks_override=BLOCKS,
            prefix_cache_retention_interval=None,
            kv_cache_layout=layout,
        ),
        attention_config=SimpleNamespace(hisparse_config=None),
    )


def model_config(total_heads: int, **fields: Any) -> Any:
    text = LlamaConfig(num_key_value_heads=total_heads, **fields)
    return SimpleNamespace(get_total_num_kv_heads=lambda: total_heads, hf_text_config=text, use_mla=False)


class Memory:
    """One rank's KV caches as vLLM allocates and registers them."""

    def __init__(self, config: Any, groups: Sequence[KVCacheGroupSpec], kernel_block: int | None = None) -> None:
        self.vllm = config
        layout = config.cache_config.get_resolved_kv_cache_layout()
        self.config = get_kv_cache_config_from_groups(config, list(groups), 1 << 30)
        kernel_blocks = None if kernel_block is None else [kernel_block] * len(groups)
        self.caches = allocate_kv_cache(self.config, torch.device("cpu"), layout, kernel_blocks)

    def canonical(self) -> CanonicalKVCaches:
        """Return the canonical caches, as vLLM's connector passes them to a spec."""
        found: list[CanonicalKVCaches] = []
        spec: Any = SimpleNamespace(
            replicated_layout=False,
            config=SimpleNamespace(canonical_layout=False, parallel=None),
            get_worker=found.append,
        )
        OffloadingConnectorWorker(spec, self.vllm, self.config).register_kv_caches(self.caches)
        return found[0]

    def reason(self) -> str | None:
        return understood_pages(RankCaches(self.vllm, self.config, self.caches, CanonicalKVCaches([], [])))

    def cut(self, wanted: ShardCut) -> RankShards:
        return cut_chunks(RankCaches(self.vllm, self.config, self.caches, self.canonical()), wanted, BLOCKS)

    def cut_or_reason(self, wanted: ShardCut) -> RankShards | str:
        try:
            return self.cut(wanted)
        except NotSupportedError as error:
            return str(error)

    def shards(self, counts: Sequence[int]) -> tuple[KVLayout, HostPacker]:
        assert self.reason() is None
        canonical = self.canonical()
        pages = layer_pages(RankCaches(self.vllm, self.config, self.caches, canonical))
        groups = [
            cut
            for of_group, count in zip(pages, counts, strict=True)
            for cut in shard_groups([pages for _, pages in of_group.values()], count)
        ]
        layout = KVLayout(regions_of(canonical), tuple(groups), BLOCKS)
        tensors = [item.tensor.view(torch.uint8).numpy() for item in canonical.tensors]
        return layout, HostPacker(tensors, pages_of(layout))

    def write(self, model: Mapping[str, torch.Tensor], heads: slice) -> None:
        """The rank's heads of what the model has computed, of shape (blocks, heads, tokens, content)."""
        for name, cache in self.caches.items():
            mine = model[name] if model[name].shape[1] == 1 else model[name][:, heads]
            cache.copy_(mine.view(cache.dtype))


def computed(names: Sequence[str], heads: int, content: int = 2 * HEAD) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(3)
    shape = (BLOCKS, heads, TOKENS, content)
    return {name: torch.randint(0, 1 << 15, shape, dtype=torch.int16, generator=random) for name in names}


def payloads(memory: Memory, counts: Sequence[int]) -> list[Bytes]:
    """Return all blocks of one chunk, for each shard that the rank holds."""
    layout, packer = memory.shards(counts)
    made = []
    for position, each in enumerate(layout.groups):
        rows = np.zeros((BLOCKS, each.block_bytes), np.uint8)
        if each.refs:
            packer.gather_many(position, [(np.arange(BLOCKS, dtype=np.int32), rows)], READY)
        made.append(rows)
    return made


@pytest.mark.parametrize("layout", ["LBHNC", "BLHNC"])
@pytest.mark.parametrize(("total", "tp", "held"), [(8, 1, 8), (8, 1, 2), (8, 2, 2), (8, 4, 1), (4, 4, 1), (2, 4, 1)])
def test_bytes_are_those_of_vllms_canonical_pages(layout: str, total: int, tp: int, held: int) -> None:
    """All shards of all ranks, put together layer by layer, are the pages that vLLM's mapping makes of the same memory.

    ``held``: shards of each rank; with more ranks than heads, replicas.
    """
    names, heads = ["a.0", "a.1", "a.2"], max(1, total // tp)
    model = computed(names, total)
    replicas = max(1, tp // total)
    pages, shards = dict[str, Bytes](), list[Bytes]()
    for rank in range(tp):
        memory = Memory(vllm_config(total, tp, rank, layout), [group(full(heads), *names)])
        first = rank // replicas * heads
        memory.write(model, slice(first, first + heads))
        for name, mapping in derive_canonical_mappings(memory.vllm, memory.config, memory.caches).items():
            assert mapping.parallelism_agnostic, "vLLM does not certify it: nothing is compared"
            page = pages.setdefault(name, np.zeros((BLOCKS, mapping.canonical_page_size_bytes), np.uint8))
            local = memory.caches[name].contiguous().view(torch.uint8).reshape(BLOCKS, -1).numpy()
            for run in mapping.runs:
                for number in range(run.num_fragments):
                    at = run.canonical_offset + number * run.canonical_stride
                    begin = run.local_offset + number * run.local_stride
                    page[:, at : at + run.fragment_size] = local[:, begin : begin + run.fragment_size]
        found = payloads(memory, [held])
        if rank % replicas:
            assert (found[0] == shards[-1]).all(), "replicas store different bytes"
        else:
            shards += found
    assert sorted(pages) == names
    for number, name in enumerate(names):
        ours = [np.split(shard, len(names), axis=1)[number] for shard in shards]
        np.testing.assert_array_equal(np.concatenate(ours, axis=1), pages[name])


def test_pages_of_mla_are_one_shard_on_every_rank() -> None:
    """Also if the attention kernel divides blocks: a token's KV stays in one piece."""
    for kernel_block in (None, 2):
        memory = Memory(vllm_config(1, tp=4), [group(mla(), "a", "b")], kernel_block)
        model = computed(["a", "b"], 1, 24)
        for name, cache in memory.caches.items():
            cache.copy_(model[name].view(cache.dtype).reshape(cache.shape))
        (rows,) = payloads(memory, [1])
        wanted = [model[name].view(torch.uint8).reshape(BLOCKS, -1).numpy() for name in ("a", "b")]
        np.testing.assert_array_equal(rows, np.concatenate(wanted, axis=1))


def test_layers_side_by_side_are_found_where_they_are_not_by_their_names() -> None:
    """In a block vLLM puts layers of one kind together; the group names them in the model's order."""
    specs = {"a": mla(), "b": full(1), "c": mla()}
    mixed = UniformTypeKVCacheSpecs(block_size=TOKENS, kv_cache_specs=specs)
    memory = Memory(vllm_config(1, 1, 0, "BLHNC"), [group(mixed, *specs)])
    begin = {name: cache.data_ptr() for name, cache in memory.caches.items()}
    assert begin["a"] < begin["c"] < begin["b"]
    model = {**computed(["a", "c"], 1, 24), **computed(["b"], 1)}
    memory.write(model, slice(0, 1))
    (rows,) = payloads(memory, [1])
    wanted = [model[name].view(torch.uint8).reshape(BLOCKS, -1).numpy() for name in specs]
    np.testing.assert_array_equal(rows, np.concatenate(wanted, axis=1))


MAMBA = MambaSpec(block_size=TOKENS, shapes=((4, 8),), dtypes=(torch.float32,))
UNKNOWN: dict[str, tuple[Any, KVCacheSpec, str]] = {
    "tokens before heads": (vllm_config(4, layout="LBNHC"), full(4), "heads do not lie one after the other"),
    "layers between heads": (vllm_config(4, layout="BHLNC"), full(4), "heads do not lie one after the other"),
    "blocks between heads": (vllm_config(4, layout="LHBNC"), full(4), "heads do not lie one after the other"),
    "a state": (vllm_config(4), MAMBA, "MambaSpec"),
    "a kind of attention nobody has looked at": (
        vllm_config(4),
        SinkFullAttentionSpec(block_size=TOKENS, num_kv_heads=4, head_size=8, dtype=torch.bfloat16, sink_len=4),
        "SinkFullAttentionSpec",
    ),
    "scales beside heads": (
        vllm_config(4),
        full(4, kv_quant_mode=KVQuantMode.FP8_PER_TOKEN_HEAD, state_content_bytes=40),
        "scales",
    ),
    "packed values": (vllm_config(4), full(4, kv_quant_mode=KVQuantMode.NVFP4), "NVFP4"),
    "K and V apart": (vllm_config(4), full(4, num_head_slots=2, state_content_bytes=64), "shape"),
    "K and V apart, of two heads": (vllm_config(2), full(2, num_head_slots=2, state_content_bytes=32), "shape"),
    "one vector of a token, of which vLLM does not say that ranks have it alike": (
        vllm_config(1, tp=2),
        replace(mla(), max_tp_shards=None),
        "vLLM does not say that all ranks have it alike",
    ),
    "several tokens in a state": (vllm_config(4), full(4, tokens_per_state=2), "2 tokens"),
    "other heads than the model": (
        vllm_config(8, tp=2),
        full(8),
        "8 KV heads on a rank, by the model's config there are 4",
    ),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_what_is_not_understood(case: str) -> None:
    config, spec, words = UNKNOWN[case]
    memory = Memory(config, [group(spec, "layer.7", "layer.8")])
    found = memory.reason()
    assert found is not None
    assert words in found
    assert found.startswith("layer.7: ")


def test_kernel_blocks_within_a_block_are_not_understood() -> None:
    """All heads of the first block come before the heads of the second, unless there is one head. Then the kernel's own
    order within a head might still depend on its block's size.
    """
    found = Memory(vllm_config(4), [group(full(4), "a")], kernel_block=2).reason()
    assert found == "a: the attention kernel divides a block into 2"
    assert Memory(vllm_config(1), [group(full(1), "a")], kernel_block=2).reason() is not None


def test_shapes_nobody_has_looked_at() -> None:
    """Caches of several tensors, or K and V in halves of a page, as older backends had them."""
    memory = Memory(vllm_config(4), [group(full(4), "a")])
    cache: Any = memory.caches["a"]
    for pages in ([cache], cache.unflatten(3, (2, HEAD)), None):
        memory.caches = {"a": pages}
        assert "not one tensor" in str(memory.reason())


def draft(total_heads: int) -> Any:
    return SimpleNamespace(draft_model_config=model_config(total_heads))


@pytest.mark.parametrize(
    ("text", "speculative", "is_known"),
    [
        ({}, None, True),
        ({}, draft(2), True),
        ({}, draft(16), False),
        ({}, SimpleNamespace(draft_model_config=None), True),
        ({"num_global_key_value_heads": 8}, None, False),
        ({"block_configs": [{"attention": {"n_heads_in_group": 4}}]}, None, False),
        ({"num_global_key_value_heads": None}, None, True),
    ],
)
def test_replicas_only_where_all_layers_have_as_many_heads(text: Any, speculative: Any, is_known: bool) -> None:
    """A layer with 16 heads has one on each of 16 ranks, as one with 2 has: the second kind are replicas."""
    config = vllm_config(2, tp=16)
    config.model_config = model_config(2, **text)
    config.speculative_config = speculative
    found = Memory(config, [group(full(1), "a")]).reason()
    assert (found is None) == is_known
    assert is_known or "not certain that all layers have 2 KV heads" in str(found)


@pytest.fixture(autouse=True)
def _alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process here is one of several: the other ranks of a stage say what this one says."""
    monkeypatch.setattr(rank_shards, "of_all_ranks", lambda own: [own])


def cut(
    config: Any, groups: Sequence[KVCacheGroupSpec], kernel_block: int | None = None, layers: int | None = None
) -> RankShards:
    return Memory(config, groups, kernel_block).cut(ShardCut(heads=1 if len(groups) == 1 else 4, layers=layers))


def attention(scale: float) -> Any:
    backend = SimpleNamespace(get_name=lambda: "FLASH_ATTN")
    return SimpleNamespace(_k_scale_float=scale, _v_scale_float=1.0, get_attn_backend=lambda: backend)


def test_sizes_and_layouts_have_one_digest() -> None:
    made = {
        cut(
            vllm_config(4, tp, 0, layout), [group(full(max(1, 4 // tp)), "a"), group(window(max(1, 4 // tp)), "b")]
        ).digest
        for tp in (1, 2, 4, 8)
        for layout in ("LBHNC", "BLHNC")
    }
    assert len(made) == 1


def test_what_changes_bytes_changes_the_digest() -> None:
    groups = [group(full(4), "a"), group(window(4), "b")]
    digests = [
        cut(vllm_config(4), groups).digest,
        cut(vllm_config(4, a=attention(1.0)), groups).digest,
        cut(vllm_config(4, a=attention(0.5)), groups).digest,
        cut(vllm_config(4), groups[::-1]).digest,
        cut(vllm_config(4), [group(full(4), "a"), group(full(4), "b")]).digest,
        cut(vllm_config(4), [group(full(4), "a"), group(window(4), "c")]).digest,
        cut(vllm_config(4, layout="BLHNC"), [group(full(4, head_size_v=16), "a"), group(window(4), "b")]).digest,
        cut(vllm_config(8), [group(full(8), "a"), group(window(8), "b")]).digest,
        cut(vllm_config(4), [groups[0], replace(groups[1], is_eagle_group=True)]).digest,
        cut(vllm_config(4), [groups[0], replace(groups[1], role=KVCacheGroupRole.HISPARSE_INDEXER)]).digest,
        *(cut(staged(1, 0), [group(full(4), *NAMES)], layers=layers).digest for layers in (2, 3, None)),
        cut(staged(1, 0), [group(full(4), *NAMES[:5])], layers=2).digest,
    ]
    other_type = Memory(vllm_config(4), groups)
    other_type.caches = {name: cache.view(torch.float16) for name, cache in other_type.caches.items()}
    found = other_type.cut(ShardCut(heads=4))
    assert len({*digests, found.digest}) == len(digests) + 1


@pytest.mark.parametrize("tp", [1, 8])
def test_what_a_kernel_makes_of_a_block_of_mla_counts(tp: int) -> None:
    """An indexer's cache has a kernel block's scales after its tokens, so the size of kernel blocks counts."""
    spec = MLAAttentionSpec(block_size=4, num_kv_heads=1, head_size=132, dtype=torch.uint8, max_tp_shards=1)
    whole, halves = (cut(vllm_config(1, tp), [group(spec, "a.k_cache")], part).digest for part in (None, 2))
    assert whole != halves


def staged(stages: int, rank: int) -> Any:
    """The configuration of a rank of an engine with so many pipeline stages and six layers."""
    config = vllm_config(4)
    config.parallel_config.pipeline_parallel_size = stages
    config.parallel_config.rank, config.parallel_config.world_size = rank, stages
    config.model_config.get_total_num_hidden_layers = lambda: 6
    return config


def together(
    monkeypatch: pytest.MonkeyPatch, memories: Sequence[Memory], wanted: ShardCut
) -> tuple[list[Any], Callable[[], list[RankShards | str]]]:
    """Return what each rank of an engine sends the others, and a function that has all of them cut chunks with that."""
    sent: list[Any] = []

    def cut_all() -> list[RankShards | str]:
        return [memory.cut_or_reason(wanted) for memory in memories]

    monkeypatch.setattr(rank_shards, "of_all_ranks", lambda own: sent.append(own) or ["not all have sent theirs"])
    cut_all()
    monkeypatch.setattr(rank_shards, "of_all_ranks", lambda own: sent)
    return sent, cut_all


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
        memories.append(Memory(staged(3, rank), own))
    _, cut_all = together(monkeypatch, memories, ShardCut(heads=4))
    for rank, found in enumerate(cut_all()):
        assert isinstance(found, RankShards), found
        assert found.digest == one.digest
        assert (found.plan.groups, found.plan.layers.begins) == (one.plan.groups, (0, 2, 4))
        held = [(at, number) for at in range(2) for number in range(4 * rank, 4 * rank + 4)]
        assert found.plan.shards_of(rank) == held
        assert found.plan.shards == 12
        ours = [one.layout.groups[one.plan.shards_of(0).index(shard)] for shard in held]
        assert [each.block_bytes for each in found.layout.groups] == [each.block_bytes for each in ours]


def test_a_layer_of_another_stage_is_not_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example a draft model's layer, if vLLM continues the numbers of its stage."""
    config = staged(2, 1)
    memory = Memory(config, [group(full(4), *NAMES[3:], "model.layers.2.draft")])
    told: list[Any] = []
    monkeypatch.setattr(rank_shards, "of_all_ranks", lambda own: told.append(own) or [own, own])
    with pytest.raises(LayoutError, match="runs on another pipeline stage"):
        memory.cut(ShardCut(heads=4))
    assert told == ["the KV heads in the caches of rank 1 are not found"]


@pytest.mark.parametrize("layout", ["LBHNC", "BLHNC"])
def test_layers_of_a_kind_are_together_as_vllm_has_them_in_a_block(layout: str) -> None:
    """DeepSeek-V3.2 has an indexer's cache beside each layer's: a block of it stays one piece, and layers in the
    model's order, a piece for each, are not what is stored.
    """
    indexer = MLAAttentionSpec(block_size=4, num_kv_heads=1, head_size=132, dtype=torch.uint8, max_tp_shards=1)
    specs = {f"{layer}.{kind}": spec for layer in "ab" for kind, spec in (("attn", mla()), ("indexer", indexer))}
    mixed = UniformTypeKVCacheSpecs(block_size=4, kv_cache_specs=specs)
    found = cut(vllm_config(1, layout=layout), [KVCacheGroupSpec(list(specs), mixed)])
    (made,) = found.layout.groups
    assert len(made.refs) == (1 if layout == "BLHNC" else 4)
    one, other = mla().page_size_bytes, indexer.page_size_bytes
    assert [run.length for run in made.refs] == (
        [2 * (one + other)] if len(made.refs) == 1 else [one, one, other, other]
    )
    assert found.digest == cut(vllm_config(1, tp=8), [KVCacheGroupSpec(list(specs), mixed)]).digest


@pytest.mark.parametrize(
    ("total", "tp", "use_mla", "shards"),
    [
        *((4, 2, False, 0), (4, 4, False, 0), (4, 8, False, 4), (1, 1, False, 0), (1, 2, False, 1)),
        *((128, 1, True, 1), (128, 4, True, 1)),
    ],
)
def test_by_default_only_what_ranks_have_alike_is_cut(total: int, tp: int, use_mla: bool, shards: int) -> None:
    """MLA is always one shard, so servers of all sizes share it."""
    config, heads = vllm_config(total, tp), max(1, total // tp)
    config.model_config.use_mla = use_mla
    groups = [group(mla(), "a", "b")] if use_mla else [group(full(heads), "a"), group(window(heads), "b")]
    found = Memory(config, groups).cut_or_reason(ShardCut(heads="distinct"))
    if shards:
        assert isinstance(found, RankShards), found
        assert [each.head_ranges for each in found.plan.groups] == [shards] * len(groups)
        assert found.plan.groups[0].replicas == tp // shards
    else:
        assert found == "each rank has KV heads of its own"


@pytest.mark.parametrize("rank", [0, 1])
def test_what_one_rank_does_not_understand_no_rank_cuts(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """For any cause. Nor are chunks cut if ranks of one stage have different layers: their shards would differ."""
    configs = [vllm_config(1, 2), vllm_config(1, 2)]
    configs[1].parallel_config.rank = 1
    memories = [Memory(configs[0], [group(full(1), "a")]), Memory(configs[1], [group(full(1), *"ab"[: 1 + rank])])]
    sent, cut_all = together(monkeypatch, memories, ShardCut(heads="distinct"))
    if rank:
        assert cut_all() == ["ranks of one pipeline stage have other layers"] * 2
    else:
        assert all(isinstance(found, RankShards) for found in cut_all())
        whole, sent[1] = sent[1], sent[1]._replace(digests=("with scales of its own",))
        assert cut_all() == ["ranks that have the same KV heads differ in what their layers' bytes mean"] * 2
        sent[1] = whole
    sent[rank] = "rank looks the other way"
    assert cut_all() == ["rank looks the other way"] * 2


def test_context_parallelism_is_not_cut_and_leaves_fewer_replicas() -> None:
    """Ranks of such a group hold different tokens, so they are no replicas."""
    config = vllm_config(128, tp=8)
    config.model_config.use_mla = True
    for dcp, pcp, expected in ((1, 1, True), (4, 1, True), (8, 1, False), (1, 2, None)):
        config.parallel_config.decode_context_parallel_size = dcp
        config.parallel_config.prefill_context_parallel_size = pcp
        assert expected is None or has_replicas(config) is expected
        with pytest.raises(NotSupportedError, match="context parallelism") if dcp * pcp > 1 else nullcontext():
            cut_by_config(config, ShardCut(heads=8))


@pytest.mark.parametrize(
    ("model", "ranks", "groups", "blocks"),
    [((32, 8, 128), 1, 1, 1), ((32, 8, 128), 8, 1, 4), ((24, 2, 64), 1, 1, 6), ((36, 8, 64), 8, 2, 14)],
)
def test_a_small_chunk_is_a_block_or_has_256_kib_on_each_rank(model: Any, ranks: int, groups: int, blocks: int) -> None:
    layers, heads, size = model
    config, caches = vllm_config(heads, ranks), [group(full(1), str(number)) for number in range(groups)]
    config.model_config.get_head_size, config.model_config.get_num_kv_heads = lambda: size, lambda _: heads // ranks
    config.model_config.get_total_num_hidden_layers = lambda: layers
    assert chunk_blocks(1, config, Memory(config, caches).config)[0] == blocks
