"""Whether a rank's chunks can be cut into shards by their KV heads, and how; else why not.

All ranks of an engine come to the same: it follows from vLLM's configuration and from KV caches that differ in their
heads alone. The scheduler's half makes sure of it (``identity.build_namespace``).

Threading: pure functions, called by the worker's main thread when vLLM registers the KV caches.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import get_offloading_group_ids
from vllm.v1.kv_cache_interface import AttentionSpec, MLAAttentionSpec, UniformTypeKVCacheSpecs

from nixl_offload.chunk.layout import KVLayout
from nixl_offload.chunk.shards import ShardPlan, Shards, make_plan
from nixl_offload.identity.settings import collect
from nixl_offload.vllm.kv_heads import understood_pages
from nixl_offload.vllm.rank_identity import layer_facts

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec

_OF_THE_RANK: Final = {
    "num_kv_heads": "the heads of all ranks count",
    "num_head_slots": "likewise",
    "block_stride_alignment": "what lies between blocks",
    "max_tp_shards": "who holds replicas",
    "page_size_padded": "what lies between pages",
}
"""Fields of a layer's spec that say nothing of a shard."""


@dataclass(frozen=True, slots=True)
class CutChunks:
    """How the chunks of an engine are cut."""

    plan: ShardPlan
    digest: str
    """Of the layers of the whole model, in hex: engines with other ones share nothing."""


@dataclass(frozen=True, slots=True)
class RankShards(CutChunks):
    """The same, with where the shards of this rank lie."""

    layout: KVLayout
    """With a group for each shard, in the order of ``ShardPlan.numbers``."""


def cut_chunks(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    kv_caches: Mapping[str, torch.Tensor],
    wanted: Shards,
    blocks_per_chunk: int,
) -> CutChunks | str:
    """Return how chunks are cut, or why they are not, as a clause."""
    why = _why_not(vllm_config) or understood_pages(vllm_config, kv_cache_config, kv_caches)
    if why:
        return why
    numbers = get_offloading_group_ids(kv_cache_config)
    heads: list[list[int]] = []
    sizes: list[int] = []
    for number in numbers:
        heads.append([])
        sizes.append(0)
        for spec in specs_of(kv_cache_config.kv_cache_groups[number]).values():
            assert isinstance(spec, AttentionSpec)
            page_bytes, is_divided = spec.unpadded_page_size_bytes, not isinstance(spec, MLAAttentionSpec)
            total = vllm_config.model_config.get_total_num_kv_heads() if is_divided else 1
            heads[-1].append(total)
            sizes[-1] += blocks_per_chunk * (page_bytes // spec.num_kv_heads * total if is_divided else page_bytes)
    plan = make_plan(wanted, heads, sizes, vllm_config.parallel_config.tensor_parallel_size)
    if isinstance(plan, str):
        return plan
    return CutChunks(plan, _digest(vllm_config, kv_cache_config, dict(zip(numbers, heads, strict=True)), kv_caches))


def specs_of(group: KVCacheGroupSpec) -> dict[str, KVCacheSpec]:
    """Return the spec of each layer of a group, by its name."""
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return {name: spec.kv_cache_specs[name] for name in group.layer_names}
    return dict.fromkeys(group.layer_names, spec)


def _why_not(vllm_config: VllmConfig) -> str | None:
    parallel, speculative = vllm_config.parallel_config, vllm_config.speculative_config
    if parallel.pipeline_parallel_size > 1:
        return "layers are divided among pipeline stages"
    draft = getattr(speculative, "draft_parallel_config", None)
    if draft is not None and draft.tensor_parallel_size != parallel.tensor_parallel_size:
        return "the draft model has a tensor parallelism of its own"
    return None


def _digest(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    heads: Mapping[int, Sequence[int]],
    kv_caches: Mapping[str, torch.Tensor],
) -> str:
    """Digest what makes the bytes of shards interchangeable, layer by layer. ``heads``: by group, of its layers."""
    layers = vllm_config.compilation_config.static_forward_context
    facts: list[object] = []
    for number, of_layers in heads.items():
        group = kv_cache_config.kv_cache_groups[number]
        facts.append([number, str(group.role), group.is_eagle_group])
        for (name, spec), count in zip(specs_of(group).items(), of_layers, strict=True):
            told = {path: value for path, value in collect(spec, {}).values.items() if path not in _OF_THE_RANK}
            pages = kv_caches[name]
            # Of MLA a kernel may divide a block, and an indexer's keeps its scales behind the tokens of each part.
            parts = pages.shape[0] // kv_cache_config.num_blocks
            of_layer = layer_facts(layers.get(name))
            facts.append([name, type(spec).__qualname__, told, count, str(pages.dtype), parts, of_layer])
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
