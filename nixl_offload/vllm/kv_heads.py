"""Finds the KV heads in vLLM's pages, and the ranges of its layers, so that chunks can be stored as shards that engines
of other sizes understand.

A page is understood where heads lie one after the other, each whole, and where it is certain which of the model's heads
a rank has. All other pages are not understood: their chunks are stored rank by rank.

With pipeline stages vLLM makes the groups of the whole model, and a stage has of each the layers that it runs, or
none: in the model's order, by names with the model's own layer numbers. So a range of layers is the same wherever it is
whole. Layers are cut at the boundaries of the server's own stages; or as vLLM would cut for another number of them, so
that servers of that many, and of one, share. Those of a draft model belong to the last range: they run on the last
stage.
Threading: pure functions. vLLM's rule of cutting looks at VLLM_PP_LAYER_PARTITION.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from vllm.distributed.utils import get_pp_indices
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVQuantMode,
    MLAAttentionSpec,
    SlidingWindowSpec,
    group_kernel_blocks,
)

from nixl_offload.chunk.layout import HeadPages, RegionSpec
from nixl_offload.chunk.shards import ONE_RANGE, LayerCut, cut_layers
from nixl_offload.errors import LayoutError
from nixl_offload.vllm.kv_caches import layers_of, offloaded_groups, regions_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
    from vllm.v1.kv_offload.base import CanonicalKVCaches

_DIVIDED: Final = (FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec)
"""Divided by heads among ranks. These very classes: what derives from them may lie otherwise."""
_DRAFT: Final = "draft_model."
"""How the names of layers of a draft model begin that count from 0; others go on from the model's."""
_KV_HEADS: Final = re.compile("kv_heads|key_value_heads|n_heads?_kv|multi_query_group_num|attention_groups|in_group")
"""How models' configs call their number of KV heads, or that of some layers."""


def understood_pages(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, kv_caches: Mapping[str, torch.Tensor]
) -> str | None:
    """Say, as a clause, why the pages of this rank cannot be divided by KV heads; None: they can.

    ``kv_caches``: by layer, as vLLM registers them. Context parallelism divides blocks otherwise: nobody asks with it.
    """
    tp, total = vllm_config.parallel_config.tensor_parallel_size, vllm_config.model_config.get_total_num_kv_heads()
    is_divided = False
    for group in offloaded_groups(kv_cache_config):
        for name, spec in layers_of(group):
            why = _why_not(spec, kv_caches.get(name), kv_cache_config.num_blocks, max(1, total // tp))
            if why is not None:
                return f"{name}: {why}"
            is_divided |= not isinstance(spec, MLAAttentionSpec)
    if is_divided and tp > total and not _all_layers_have(vllm_config, total):
        # A layer with more heads than others would be divided where they are replicated.
        return f"it is not certain that all layers have {total} KV heads, which {tp} ranks hold as replicas"
    return None


def layer_pages(
    kv_cache_config: KVCacheConfig, kv_caches: Mapping[str, torch.Tensor], canonical: CanonicalKVCaches
) -> list[dict[str, HeadPages]]:
    """Return where the heads of this rank's layers lie, by offloaded group and by name, in the model's order.

    ``kv_caches``: by layer, for which ``understood_pages`` has no reason; ``canonical``: vLLM's view of the same
    memory, to whose tensors the pages refer. Raises LayoutError when they do not fit each other.
    """
    regions = regions_of(canonical)
    return [
        {name: _head_pages(spec, kv_caches[name], regions) for name, spec in layers_of(group)}
        for group in offloaded_groups(kv_cache_config)
    ]


def _why_not(spec: KVCacheSpec, pages: object, num_blocks: int, heads: int) -> str | None:
    """Say why a layer is not understood. ``heads``: how many a rank must have where they are divided."""
    if type(spec) is not MLAAttentionSpec and type(spec) not in _DIVIDED:
        return f"what a {type(spec).__name__} describes has no KV heads, or lies in an order of its own"
    assert isinstance(spec, AttentionSpec)
    if not isinstance(pages, torch.Tensor) or pages.dim() != 4 or pages.shape[0] % num_blocks:
        return "its KV cache is not one tensor of blocks, heads, tokens and content"
    if spec.tokens_per_state != 1:
        return f"a stored state is that of {spec.tokens_per_state} tokens"
    if spec.kv_quant_mode.is_per_token_head:
        return "its scales lie beside each token's head"
    if isinstance(spec, MLAAttentionSpec):
        if spec.max_tp_shards != 1:
            return "vLLM does not say that all ranks have it alike"
        return None if _is_dense(pages, spec, num_blocks) else f"its pages have gaps: strides {pages.stride()}"
    if spec.kv_quant_mode not in (KVQuantMode.NONE, KVQuantMode.FP8_PER_TENSOR):
        return f"its KV cache is quantized as {spec.kv_quant_mode.name}"
    if spec.num_kv_heads != heads:
        return f"it has {spec.num_kv_heads} KV heads on a rank, by the model's config there are {heads}"
    if pages.shape[0] != num_blocks:
        return f"the attention kernel divides a block into {pages.shape[0] // num_blocks}"
    content = (spec.head_size + spec.head_size_v) * spec.dtype.itemsize
    wanted = (heads, spec.block_size, content // pages.element_size())
    if tuple(pages.shape[1:]) != wanted or spec.num_head_slots is not None:
        return f"a page has the shape {tuple(pages.shape[1:])}, not {wanted}"
    if not _is_dense(pages, spec, num_blocks):
        return f"heads do not lie one after the other in a page: strides {pages.stride()}"
    return None


def _is_dense(pages: torch.Tensor, spec: AttentionSpec, num_blocks: int) -> bool:
    """Whether a page is head after head, in each token after token, without gaps."""
    page = group_kernel_blocks(pages, num_blocks)[0]
    return page.is_contiguous() and page.numel() * page.element_size() == spec.unpadded_page_size_bytes


def _all_layers_have(vllm_config: VllmConfig, heads: int) -> bool:
    """Whether the configs of the model, and of a draft model, name no other number of KV heads."""
    models = [vllm_config.model_config]
    if (speculative := vllm_config.speculative_config) is not None and speculative.draft_model_config is not None:
        models.append(speculative.draft_model_config)
    return all(
        model.get_total_num_kv_heads() == heads and set(_named(model.hf_text_config.to_dict())) == {heads}
        for model in models
    )


def _named(config: Any, inside: str = "") -> Iterator[object]:
    """Return what a config says of KV heads, at any depth."""
    if isinstance(config, Mapping):
        for key, value in config.items():
            yield from _named(value, str(key))
    elif isinstance(config, list | tuple):
        for value in config:
            yield from _named(value, inside)
    elif config is not None and _KV_HEADS.search(inside):
        yield config


def _head_pages(spec: KVCacheSpec, pages: torch.Tensor, regions: Sequence[RegionSpec]) -> HeadPages:
    """Find a layer's pages in the regions. Raises LayoutError when they are in none."""
    assert isinstance(spec, AttentionSpec)
    heads = 1 if isinstance(spec, MLAAttentionSpec) else spec.num_kv_heads
    length = spec.unpadded_page_size_bytes
    for index, region in enumerate(regions):
        offset = pages.data_ptr() - region.base_address
        if 0 <= offset <= region.page_bytes - length and region.num_blocks * region.stride_bytes == _span_bytes(pages):
            return HeadPages(index, offset, heads, length // heads)
    raise LayoutError(f"pages at {pages.data_ptr():#x} lie in none of the KV tensors")


def _span_bytes(pages: torch.Tensor) -> int:
    """Bytes from the first block to behind the last, gaps included."""
    return pages.shape[0] * pages.stride(0) * pages.element_size()


def layer_cut(vllm_config: VllmConfig, wanted: int | None) -> LayerCut | str:
    """Return how layers are cut; or why they are not, as a clause.

    ``wanted``: for how many stages; None: for this server's own.
    """
    stages = vllm_config.parallel_config.pipeline_parallel_size
    if stages == 1 and wanted in (None, 1):
        return ONE_RANGE
    layers = vllm_config.model_config.get_total_num_hidden_layers()
    own = [get_pp_indices(layers, stage, stages) for stage in range(stages)]
    try:
        asked = own if wanted is None else [get_pp_indices(layers, stage, wanted) for stage in range(wanted)]
    except ValueError as error:  # VLLM_PP_LAYER_PARTITION is for another number of stages
        return f"vLLM does not cut {layers} layers for {wanted} pipeline stages: {error}"
    cut = cut_layers(asked, own)
    if cut is None:
        begins = ", ".join(str(begin) for begin, _ in own[1:])
        return (
            f"this server's pipeline stages begin at layers {begins}, and `layers: {wanted}` cuts at "
            f"{', '.join(str(begin) for begin, _ in asked[1:]) or 'none'}"
        )
    return cut


def range_of(name: str, cut: LayerCut, layers: int) -> int:
    """Return the range of layers that a layer belongs to. ``layers``: of the model, without those of a draft model.

    Raises LayoutError where its name does not tell.
    """
    last = len(cut.begins) - 1
    if not last or name.startswith(_DRAFT):
        return last
    try:
        number = extract_layer_index(name)
    except AssertionError as error:
        raise LayoutError(f"which layer {name} is cannot be told from its name") from error
    return last if number >= layers else bisect_right(cut.begins, number) - 1
