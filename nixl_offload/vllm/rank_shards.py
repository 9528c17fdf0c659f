"""Decides whether and how an engine's chunks are cut into shards, and where this rank's shards lie.

All ranks of an engine come to the same result: each sends the others its layers, or why it does not understand them.
Uncut chunks have a shard for each rank. The scheduler's half checks that ranks agree (``identity.build_namespace``).

With pipeline stages vLLM makes the groups of the whole model. A stage has the layers of each group that it runs, in the
model's order and with the model's layer numbers. So a range of layers is the same on all servers that have it whole.
Layers are cut at the boundaries of the server's own stages, or as vLLM would cut them for another number of stages.
Then servers with that many stages share, and servers with one. A draft's layers belong to the last stage and range.

Threading: called on all ranks by the worker's main thread when vLLM registers the KV caches. Waits for the other ranks.
vLLM's rule for cutting layers reads VLLM_PP_LAYER_PARTITION.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, NamedTuple

import torch.distributed
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import get_offloading_group_ids
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.distributed.utils import get_pp_indices
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import KVCacheSpec, MLAAttentionSpec
from vllm.v1.kv_offload.base import CanonicalKVCaches

from nixl_offload.chunk.layout import GroupLayout, HeadPages, KVLayout, shard_groups
from nixl_offload.chunk.shards import ONE_RANGE, LayerCut, ShardPlan, cut_layers, make_plan, uncut_plan
from nixl_offload.config import ShardCut
from nixl_offload.errors import LayoutError, NotSupportedError
from nixl_offload.identity.settings import collect
from nixl_offload.vllm.kv_caches import RankCaches, layer_pages, regions_of, understood_pages
from nixl_offload.vllm.rank_identity import layer_facts

_DRAFT: Final = "draft_model."
"""Prefix of a draft model's layer names that count from 0. Other drafts continue the model's numbers."""
_OF_THE_RANK: Final = {
    "num_kv_heads": "the heads of all ranks count",
    "num_head_slots": "the heads of all ranks count",
    "block_stride_alignment": "what lies between blocks",
    "max_tp_shards": "who holds replicas",
    "page_size_padded": "what lies between pages",
}
"""Fields of a layer's spec that do not describe a shard."""


@dataclass(frozen=True, slots=True)
class RankShards:
    """How the chunks of an engine are cut, and where the shards of this rank lie."""

    plan: ShardPlan
    digest: str
    """Hex digest of the model's layers, or of this rank's KV caches if chunks are not cut. Equal ones share."""
    layout: KVLayout
    """With a group for each shard, in the order of ``ShardPlan.shards_of``."""


class _RankLayers(NamedTuple):
    """A rank's layers, as it sends them to the other ranks, by range of layers."""

    heads: tuple[tuple[tuple[int, ...], ...], ...]
    """By group, for each layer: the KV heads of all ranks together; 1 if KV is not divided (MLA)."""
    digests: tuple[str, ...]
    """Digests of the layers. Only here may ranks of one stage differ: by their scales."""


_Layers = list[dict[str, tuple[KVCacheSpec, HeadPages]]]
"""By group: the layers of a range, in the order of their bytes (``_in_order``)."""


def cut_chunks(caches: RankCaches, wanted: ShardCut, blocks_per_chunk: int) -> RankShards:
    """Return how chunks are cut. The result is the same on all ranks.

    Raises NotSupportedError, with the reason as a clause, if they cannot be cut. Another error in this rank's caches is
    raised once the other ranks know of it.
    """
    cut = cut_by_config(caches.vllm, wanted)
    parallel = caches.vllm.parallel_config
    rank, tp = parallel.rank, parallel.tensor_parallel_size
    ranges: dict[int, _Layers] = {}
    failure: Exception | None = None
    own: _RankLayers | str
    try:
        why = understood_pages(caches)
        if why is None:
            ranges = _ranges(caches, cut)
            total = caches.vllm.model_config.get_total_num_kv_heads()
            own = _RankLayers(
                tuple(
                    tuple(tuple(_heads(spec, total) for spec, _ in layers.values()) for layers in groups)
                    for groups in ranges.values()
                ),
                tuple(_digest(caches, groups) for groups in ranges.values()),
            )
        else:
            own = why
    except Exception as error:  # noqa: BLE001 - the other ranks wait for this one's word
        own, failure = f"the KV heads in the caches of rank {rank} are not found", error
    everyone = [own] if parallel.world_size == 1 else of_all_ranks(own)
    if failure is not None:
        raise failure
    all_layers = [each for each in everyone if isinstance(each, _RankLayers)]
    if len(all_layers) < len(everyone):
        raise NotSupportedError(next(each for each in everyone if isinstance(each, str)))
    if any(each.heads != all_layers[number // tp * tp].heads for number, each in enumerate(all_layers)):
        raise NotSupportedError("ranks of one pipeline stage have other layers")
    stages = all_layers[rank % tp :: tp]
    by_group = list(zip(*(of_range for stage in stages for of_range in stage.heads), strict=True))
    heads = [tuple(chain.from_iterable(of_ranges)) for of_ranges in by_group]
    has = [tuple(bool(of_range) for of_range in of_ranges) for of_ranges in by_group]
    plan = make_plan(wanted.heads, heads, has, tp, cut)
    for group in plan.groups:
        firsts = (all_layers[number // group.replicas * group.replicas] for number in range(len(all_layers)))
        if any(each.digests != first.digests for each, first in zip(all_layers, firsts, strict=True)):
            raise NotSupportedError("ranks that have the same KV heads differ in what their layers' bytes mean")
    digests = [digest for stage in stages for digest in stage.digests]
    digest = digests[0] if len(digests) == 1 else hashlib.sha256(json.dumps(digests).encode()).hexdigest()
    groups: list[GroupLayout] = []
    for position, group in enumerate(plan.groups):
        for number in plan.ranges(rank, position):
            pages = [pages for _, pages in ranges[number][position].values()]
            groups += shard_groups(pages, group.per_rank)
    return RankShards(plan, digest, KVLayout(regions_of(caches.canonical), tuple(groups), blocks_per_chunk))


def leave_uncut(canonical: CanonicalKVCaches, blocks_per_chunk: int, digest: str, world_size: int) -> RankShards:
    """Return this rank's shards of uncut chunks: its own pages, as they lie. ``digest``: ``allocation_digest``'s."""
    pages = ([(ref.tensor_idx, ref.page_size_bytes) for ref in refs] for refs in canonical.group_data_refs)
    groups = tuple(map(GroupLayout.of_pages, pages))
    layout = KVLayout(regions_of(canonical), groups, blocks_per_chunk)
    return RankShards(uncut_plan(world_size, len(groups)), digest, layout)


def cut_by_config(vllm_config: VllmConfig, wanted: ShardCut) -> LayerCut:
    """Return how layers are cut. Raises NotSupportedError if vLLM's configuration does not let chunks be cut."""
    parallel, speculative = vllm_config.parallel_config, vllm_config.speculative_config
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise NotSupportedError("context parallelism divides the tokens of a block")
    draft = getattr(speculative, "draft_parallel_config", None)
    if draft is not None and draft.tensor_parallel_size != parallel.tensor_parallel_size:
        raise NotSupportedError("the draft model has a tensor parallelism of its own")
    if wanted.heads == "distinct" and not vllm_config.model_config.use_mla and not has_replicas(vllm_config):
        raise NotSupportedError("each rank has KV heads of its own")
    make_plan(wanted.heads, [[kv_heads(vllm_config)]], [[True]], parallel.tensor_parallel_size)  # or raises
    return _cut_layers(vllm_config, wanted.layers)


def _cut_layers(vllm_config: VllmConfig, wanted: int | None) -> LayerCut:
    """Return how layers are cut for ``wanted`` stages; None: for this server's own. Raises NotSupportedError."""
    stages = vllm_config.parallel_config.pipeline_parallel_size
    if stages == 1 and wanted in (None, 1):
        return ONE_RANGE
    layers = vllm_config.model_config.get_total_num_hidden_layers()
    own = [get_pp_indices(layers, stage, stages) for stage in range(stages)]
    try:
        asked = own if wanted is None else [get_pp_indices(layers, stage, wanted) for stage in range(wanted)]
    except ValueError as error:  # VLLM_PP_LAYER_PARTITION is for another number of stages
        raise NotSupportedError(f"vLLM does not cut {layers} layers for {wanted} pipeline stages: {error}") from error
    cut = cut_layers(asked, own)
    if cut is None:
        begins = ", ".join(str(begin) for begin, _ in own[1:])
        raise NotSupportedError(
            f"this server's pipeline stages begin at layers {begins}, and `layers: {wanted}` cuts at "
            f"{', '.join(str(begin) for begin, _ in asked[1:]) or 'none'}"
        )
    return cut


def kv_heads(vllm_config: VllmConfig) -> int:
    """Return the KV heads of all ranks together, by the config: 1 for MLA, 0 if there are none (Mamba)."""
    model = vllm_config.model_config
    return 1 if model.use_mla else model.get_total_num_kv_heads() or 0


def has_replicas(vllm_config: VllmConfig) -> bool:
    """Whether some ranks have the same KV, by the configuration."""
    parallel = vllm_config.parallel_config
    return 0 < kv_heads(vllm_config) * parallel.decode_context_parallel_size < parallel.tensor_parallel_size


def of_all_ranks(own: _RankLayers | str) -> Sequence[_RankLayers | str]:
    """Return what all ranks of this engine pass in, in their order. All must call this; each waits for the others.

    Not by vLLM's group of all ranks, which may include ranks of other data-parallel engines.
    """
    stages, ranks = get_pp_group(), get_tp_group()
    column = [own] * stages.world_size
    torch.distributed.all_gather_object(column, own, group=stages.cpu_group)
    columns = [column] * ranks.world_size
    torch.distributed.all_gather_object(columns, column, group=ranks.cpu_group)
    return [each for stage in zip(*columns, strict=True) for each in stage]


def _ranges(caches: RankCaches, cut: LayerCut) -> dict[int, _Layers]:
    """Return the layers of this rank by range of layers. Raises LayoutError if a layer belongs to another stage."""
    parallel = caches.vllm.parallel_config
    held = cut.stages[parallel.rank // parallel.tensor_parallel_size]
    groups = layer_pages(caches)
    found: dict[int, _Layers] = {number: [{} for _ in groups] for number in held}
    total = caches.vllm.model_config.get_total_num_hidden_layers() if len(cut.begins) > 1 else 0
    for position, layers in enumerate(groups):
        for name, layer in layers.items():
            number = _range_of(name, cut, total)
            if number not in held:
                raise LayoutError(f"{name} runs on another pipeline stage than the model's layer of that number")
            found[number][position][name] = layer
    return {number: [_in_order(layers) for layers in of_range] for number, of_range in found.items()}


def _range_of(name: str, cut: LayerCut, layers: int) -> int:
    """Return the range of layers that a layer belongs to. ``layers``: how many the model has, without a draft model's.

    Raises LayoutError if its name has no number.
    """
    last = len(cut.begins) - 1
    if not last or name.startswith(_DRAFT):
        return last
    try:
        number = extract_layer_index(name)
    except AssertionError as error:
        raise LayoutError(f"which layer {name} is cannot be told from its name") from error
    return last if number >= layers else bisect_right(cut.begins, number) - 1


def _in_order(layers: dict[str, tuple[KVCacheSpec, HeadPages]]) -> dict[str, tuple[KVCacheSpec, HeadPages]]:
    """Return a group's layers of a range in the order of their bytes: kind after kind, each in the model's order.
    vLLM's blocks have that order, too (BLHNC), so a block stays one piece if a rank holds all of it.
    """
    kinds: dict[str, dict[str, tuple[KVCacheSpec, HeadPages]]] = {}
    for name, (spec, pages) in layers.items():
        kinds.setdefault(json.dumps(_facts(spec), sort_keys=True), {})[name] = spec, pages
    return {name: layer for of_kind in kinds.values() for name, layer in of_kind.items()}


def _facts(spec: KVCacheSpec) -> list[Any]:
    """Return the part of a layer's spec that describes its bytes; the same on all ranks."""
    found = {path: value for path, value in collect(spec, {}).values.items() if path not in _OF_THE_RANK}
    return [type(spec).__qualname__, found]


def _heads(spec: KVCacheSpec, total: int) -> int:
    return 1 if isinstance(spec, MLAAttentionSpec) else total


def _digest(caches: RankCaches, groups: _Layers) -> str:
    """Return a digest of what makes shards interchangeable, over the layers of a range."""
    modules = caches.vllm.compilation_config.static_forward_context
    total = caches.vllm.model_config.get_total_num_kv_heads()
    facts: list[object] = []
    for number, layers in zip(get_offloading_group_ids(caches.config), groups, strict=True):
        group = caches.config.kv_cache_groups[number]
        # A stage without layers of a group knows less about it than an engine of one stage.
        facts.append([number, str(group.role), group.is_eagle_group] if layers else [number])
        for name, (spec, _) in layers.items():
            pages = caches.by_layer[name]
            # With MLA a kernel may divide a block. An indexer's cache has its scales after the tokens of each part.
            parts = pages.shape[0] // caches.config.num_blocks
            of_layer = layer_facts(modules.get(name))
            facts.append([name, *_facts(spec), _heads(spec, total), str(pages.dtype), parts, of_layer])
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
