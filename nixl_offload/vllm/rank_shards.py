"""Whether an engine's chunks can be cut into shards, how, and where those of this rank lie; else why not.

All ranks of an engine come to the same: each tells the others what it has, or why it does not understand that. The
scheduler's half makes sure of it (``identity.build_namespace``).

Threading: called by the worker's main thread when vLLM registers the KV caches, on all ranks, where it waits for the
others.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import torch
import torch.distributed
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import get_offloading_group_ids
from vllm.distributed.parallel_state import GroupCoordinator, get_pp_group, get_tp_group
from vllm.v1.kv_cache_interface import KVCacheSpec, MLAAttentionSpec

from nixl_offload.chunk.layout import GroupLayout, HeadPages, KVLayout, shard_groups
from nixl_offload.chunk.shards import LayerCut, ShardPlan, make_plan
from nixl_offload.config import ShardCut
from nixl_offload.errors import LayoutError
from nixl_offload.identity.settings import collect
from nixl_offload.vllm.kv_caches import layers_of, regions_of
from nixl_offload.vllm.kv_heads import layer_cut, layer_pages, range_of, understood_pages
from nixl_offload.vllm.rank_identity import layer_facts

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.kv_offload.base import CanonicalKVCaches

_T = TypeVar("_T")

_OF_THE_RANK: Final = {
    "num_kv_heads": "the heads of all ranks count",
    "num_head_slots": "the heads of all ranks count",
    "block_stride_alignment": "what lies between blocks",
    "max_tp_shards": "who holds replicas",
    "page_size_padded": "what lies between pages",
}
"""Fields of a layer's spec that say nothing of a shard."""


@dataclass(frozen=True, slots=True)
class RankShards:
    """How the chunks of an engine are cut, and where the shards of this rank lie."""

    plan: ShardPlan
    digest: str
    """Of the layers of the whole model, in hex: engines with other ones share nothing."""
    layout: KVLayout
    """With a group for each shard, in the order of ``ShardPlan.numbers``."""


class _Told(NamedTuple):
    """What a rank tells the others of its pipeline stage."""

    heads: tuple[tuple[int, ...], ...]
    """By group, of each layer: the KV heads that all ranks have together; 1 where KV is not divided (MLA)."""
    has_layers: tuple[tuple[bool, ...], ...]
    """By group and range of layers, as ``make_plan`` takes them."""
    digests: tuple[str, ...]
    """By range of layers: of its layers. Ranks of a stage may differ here, by scales of their own, and nowhere else."""


_Layers = list[dict[str, tuple[KVCacheSpec, HeadPages]]]
"""By group: the layers of a range, in the order of their bytes (``_in_order``)."""


def cut_chunks(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    kv_caches: Mapping[str, torch.Tensor],
    canonical: CanonicalKVCaches,
    wanted: ShardCut,
    blocks_per_chunk: int,
) -> RankShards | str:
    """Return how chunks are cut, or why they are not, as a clause; on all ranks the same.

    ``kv_caches``: by layer, as vLLM registers them; ``canonical``: its view of the same memory. Raises whatever is
    wrong with what vLLM has made on this rank, once the others know: they return a clause then.
    """
    cut = cut_by_config(vllm_config, wanted)
    if isinstance(cut, str):
        return cut
    parallel = vllm_config.parallel_config
    rank, tp = parallel.rank, parallel.tensor_parallel_size
    ranges: dict[int, _Layers] = {}
    failure: Exception | None = None
    own: _Told | str
    try:
        why = understood_pages(vllm_config, kv_cache_config, kv_caches)
        if why is None:
            ranges = _ranges(vllm_config, kv_cache_config, kv_caches, canonical, cut)
            own = _tell(vllm_config, kv_cache_config, kv_caches, ranges)
        else:
            own = why
    except Exception as error:  # noqa: BLE001 - the other ranks wait for this one's word
        own, failure = f"the KV heads in the caches of rank {rank} are not found", error
    everyone = [own] if parallel.world_size == 1 else of_all_ranks(own)
    if failure is not None:
        raise failure
    told = [each for each in everyone if isinstance(each, _Told)]
    if len(told) < len(everyone):
        return next(each for each in everyone if isinstance(each, str))
    if any(each[:2] != told[number // tp * tp][:2] for number, each in enumerate(told)):
        return "ranks of one pipeline stage have other layers"
    stages = told[rank % tp :: tp]
    heads = [tuple(chain.from_iterable(each)) for each in zip(*(stage.heads for stage in stages), strict=True)]
    has = [tuple(chain.from_iterable(each)) for each in zip(*(stage.has_layers for stage in stages), strict=True)]
    plan = make_plan(wanted.heads, heads, has, tp, cut)
    if isinstance(plan, str):
        return plan
    for group in plan.groups:
        first_replicas = (told[number // group.replicas * group.replicas] for number in range(len(told)))
        if any(each.digests != first.digests for each, first in zip(told, first_replicas, strict=True)):
            return "ranks that have the same KV heads differ in what their layers' bytes mean"
    digests = [digest for stage in stages for digest in stage.digests]
    digest = digests[0] if len(digests) == 1 else hashlib.sha256(json.dumps(digests).encode()).hexdigest()
    groups: list[GroupLayout] = []
    for position, group in enumerate(plan.groups):
        for number in plan.ranges(rank, position):
            pages = [pages for _, pages in ranges[number][position].values()]
            groups += shard_groups(pages, group.per_rank)
    return RankShards(plan, digest, KVLayout(regions_of(canonical), tuple(groups), blocks_per_chunk))


def cut_by_config(vllm_config: VllmConfig, wanted: ShardCut) -> LayerCut | str:
    """Return how layers are cut; or why chunks are not, as a clause, as far as vLLM's configuration tells."""
    parallel, speculative = vllm_config.parallel_config, vllm_config.speculative_config
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        return "context parallelism divides the tokens of a block"
    draft = getattr(speculative, "draft_parallel_config", None)
    if draft is not None and draft.tensor_parallel_size != parallel.tensor_parallel_size:
        return "the draft model has a tensor parallelism of its own"
    if wanted.heads == "distinct" and not vllm_config.model_config.use_mla and not has_replicas(vllm_config):
        return "each rank has KV heads of its own"
    plan = make_plan(wanted.heads, [[kv_heads(vllm_config)]], [[True]], parallel.tensor_parallel_size)
    return plan if isinstance(plan, str) else layer_cut(vllm_config, wanted.layers)


def kv_heads(vllm_config: VllmConfig) -> int:
    """Return the KV heads of the model on all ranks together, by its config: 1 where KV is not divided (MLA), 0 where
    there are none (Mamba).
    """
    model = vllm_config.model_config
    return 1 if model.use_mla else model.get_total_num_kv_heads() or 0


def has_replicas(vllm_config: VllmConfig) -> bool:
    """Whether ranks have KV alike, by the configuration."""
    parallel = vllm_config.parallel_config
    return 0 < kv_heads(vllm_config) * parallel.decode_context_parallel_size < parallel.tensor_parallel_size


def of_all_ranks(own: _Told | str) -> Sequence[_Told | str]:
    """Return what the ranks of the engine say, in their order. Each must ask, and waits for the others.

    vLLM's group of all ranks may have those of other data-parallel engines in it.
    """
    columns = _gathered(_gathered(own, get_pp_group()), get_tp_group())
    return [told for stage in zip(*columns, strict=True) for told in stage]


def _gathered(own: _T, group: GroupCoordinator) -> list[_T]:
    told = [own] * group.world_size
    torch.distributed.all_gather_object(told, own, group=group.cpu_group)
    return told


def _ranges(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    kv_caches: Mapping[str, torch.Tensor],
    canonical: CanonicalKVCaches,
    cut: LayerCut,
) -> dict[int, _Layers]:
    """Return the layers of this rank by range of layers. Raises LayoutError where one is not of its stage."""
    parallel = vllm_config.parallel_config
    held = cut.stages[parallel.rank // parallel.tensor_parallel_size]
    pages = layer_pages(kv_cache_config, kv_caches, canonical)
    found: dict[int, _Layers] = {number: [{} for _ in pages] for number in held}
    layers = vllm_config.model_config.get_total_num_hidden_layers() if len(cut.begins) > 1 else 0
    for position, group in enumerate(get_offloading_group_ids(kv_cache_config)):
        for name, spec in layers_of(kv_cache_config.kv_cache_groups[group]):
            number = range_of(name, cut, layers)
            if number not in held:
                raise LayoutError(f"{name} runs on another pipeline stage than the model's layer of that number")
            found[number][position][name] = spec, pages[position][name]
    return {number: [_in_order(layers) for layers in groups] for number, groups in found.items()}


def _in_order(layers: dict[str, tuple[KVCacheSpec, HeadPages]]) -> dict[str, tuple[KVCacheSpec, HeadPages]]:
    """Return a group's layers of a range in the order of their bytes: kind after kind, in each in the model's order, as
    vLLM has them side by side in a block (BLHNC). So a block stays one piece where a rank holds all of it.
    """
    kinds: dict[str, dict[str, tuple[KVCacheSpec, HeadPages]]] = {}
    for name, (spec, pages) in layers.items():
        kinds.setdefault(json.dumps(_facts(spec), sort_keys=True), {})[name] = spec, pages
    return {name: layer for of_kind in kinds.values() for name, layer in of_kind.items()}


def _facts(spec: KVCacheSpec) -> list[Any]:
    """Return what a layer's spec says of its bytes, the same on all ranks."""
    told = {path: value for path, value in collect(spec, {}).values.items() if path not in _OF_THE_RANK}
    return [type(spec).__qualname__, told]


def _tell(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    kv_caches: Mapping[str, torch.Tensor],
    ranges: Mapping[int, _Layers],
) -> _Told:
    total = vllm_config.model_config.get_total_num_kv_heads()
    groups = range(len(get_offloading_group_ids(kv_cache_config)))
    heads = tuple(
        tuple(
            1 if isinstance(spec, MLAAttentionSpec) else total
            for layers in ranges.values()
            for spec, _ in layers[group].values()
        )
        for group in groups
    )
    has_layers = tuple(tuple(bool(layers[group]) for layers in ranges.values()) for group in groups)
    digests = tuple(_digest(vllm_config, kv_cache_config, kv_caches, layers) for layers in ranges.values())
    return _Told(heads, has_layers, digests)


def _digest(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, kv_caches: Mapping[str, torch.Tensor], groups: _Layers
) -> str:
    """Digest what makes the bytes of shards interchangeable, layer by layer of a range."""
    modules = vllm_config.compilation_config.static_forward_context
    model = vllm_config.model_config
    facts: list[object] = []
    for number, layers in zip(get_offloading_group_ids(kv_cache_config), groups, strict=True):
        group = kv_cache_config.kv_cache_groups[number]
        # Of a group without layers here vLLM tells a stage less than it tells an engine of one stage.
        facts.append([number, str(group.role), group.is_eagle_group] if layers else [number])
        for name, (spec, _) in layers.items():
            heads = 1 if isinstance(spec, MLAAttentionSpec) else model.get_total_num_kv_heads()
            pages = kv_caches[name]
            # Of MLA a kernel may divide a block, and an indexer's keeps its scales behind the tokens of each part.
            parts = pages.shape[0] // kv_cache_config.num_blocks
            of_layer: list[Any] = layer_facts(modules.get(name))
            facts.append([name, *_facts(spec), heads, str(pages.dtype), parts, of_layer])
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
