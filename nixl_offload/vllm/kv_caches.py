"""Describes vLLM's KV caches in plain numbers: layers, groups, pages, and the KV heads in a page.

Heads are found if they lie one after the other in a page, each whole, and if it is certain which of the model's heads a
rank has. Otherwise chunks are stored rank by rank.

Threading: pure functions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import get_offloading_group_ids
from vllm.v1.core.kv_cache_utils import resolve_dcp_kv_block_size
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    group_kernel_blocks,
)
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches

from nixl_offload.chunk.layout import HeadPages, RegionSpec
from nixl_offload.errors import LayoutError
from nixl_offload.units import format_size

_DIVIDED: Final = (FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec)
"""KV of these is divided by heads among ranks. Subclasses are not meant: their layout may differ."""
_KV_HEADS: Final = re.compile("kv_heads|key_value_heads|n_heads?_kv|multi_query_group_num|attention_groups|in_group")
"""Names in models' configs for a number of KV heads, of all layers or of some."""
SMALL_CHUNK_BYTES: Final = 256 << 10
"""Of a rank's part of a chunk: its header takes 1.6 %, and a pump moves 20 GB/s of them."""


@dataclass(frozen=True, slots=True)
class RankCaches:
    """One rank's KV caches, as vLLM has planned and allocated them."""

    vllm: VllmConfig
    config: KVCacheConfig
    by_layer: Mapping[str, torch.Tensor]
    canonical: CanonicalKVCaches
    """The same memory in the form that vLLM hands to offloading."""


def keeps_prefix(kv_cache_config: KVCacheConfig, groups: int) -> bool:
    """Whether a request whose load has failed in part may keep the prefix before its first missing block.

    True only for one group of full attention. Block ids are unique only within a group. A load of a window or a state
    brings the end alone: nothing before it was ever loaded. ``groups``: how many are offloaded.
    """
    if groups != 1 or len(kv_cache_config.kv_cache_groups) != 1:
        return False
    return all(isinstance(spec, FullAttentionSpec) for spec in _layer_specs(kv_cache_config.kv_cache_groups[0]))


def chunk_blocks(chunk_tokens: int, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> tuple[int, str]:
    """Return how many blocks a chunk has, and a line for the log if these are not ``chunk_tokens``; 1: a block, or as
    many as have ``SMALL_CHUNK_BYTES``.

    vLLM keeps states at the end of a prompt's last whole block, where a chunk of several blocks rarely ends. It keeps
    windows only at multiples of ``prefix_cache_retention_interval``, so a chunk must divide it. Raises ValueError if a
    block does not. The scheduler's half and all ranks get the same number.
    """
    model, parallel, groups = vllm_config.model_config, vllm_config.parallel_config, offloaded_groups(kv_cache_config)
    dcp, interval = parallel.decode_context_parallel_size, vllm_config.cache_config.prefix_cache_retention_interval or 0
    tokens = [resolve_dcp_kv_block_size(group.kv_cache_spec, dcp) for group in groups]
    whole = [all(isinstance(spec, FullAttentionSpec) for spec in _layer_specs(group)) for group in groups]
    kept = [size for size, is_whole in zip(tokens, whole, strict=True) if not is_whole]
    least, why = chunk_tokens, f"vLLM's blocks hold {max(tokens)}, and a chunk is whole blocks"
    if any(isinstance(spec, MambaSpec) for group in kv_cache_config.kv_cache_groups for spec in _layer_specs(group)):
        least, why = 1, "one of vLLM's blocks, because this model keeps a state; --block-size makes larger ones"
    elif chunk_tokens == 1:
        numbers = model.get_num_kv_heads(parallel) * model.get_head_size() * (1 if model.use_mla else 2)
        layers = model.get_total_num_hidden_layers() / parallel.pipeline_parallel_size
        least = min(256, int(len(groups) * SMALL_CHUNK_BYTES / max(1, 2 * numbers * layers)))
        why += f" of {format_size(SMALL_CHUNK_BYTES)} on a rank"
    wanted = max(1, -(-least // max(tokens)))
    blocks = next((n for n in range(wanted, 0, -1) if not any(interval % (size * n) for size in kept)), 0)
    if not blocks:
        raise ValueError(f"prefix_cache_retention_interval ({interval}) is not a multiple of a block")
    if blocks < wanted:
        why = "prefix_cache_retention_interval must be a multiple of it"
    chunk = blocks * max(tokens)
    return blocks, "" if chunk == chunk_tokens else f"A chunk is {chunk} tokens, not {chunk_tokens}: {why}"


def _layer_specs(group: KVCacheGroupSpec) -> list[KVCacheSpec]:
    """Return the specs that the layers of a group have."""
    spec = group.kv_cache_spec
    return list(spec.kv_cache_specs.values()) if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]


def offloaded_groups(kv_cache_config: KVCacheConfig) -> list[KVCacheGroupSpec]:
    """Return the KV cache groups whose chunks are stored."""
    return [kv_cache_config.kv_cache_groups[number] for number in get_offloading_group_ids(kv_cache_config)]


def layers_of(group: KVCacheGroupSpec) -> Iterator[tuple[str, KVCacheSpec]]:
    """Return the names and specs of a group's layers on this rank, in the model's order."""
    specs = group.kv_cache_spec
    for name in group.layer_names:
        yield name, specs.kv_cache_specs[name] if isinstance(specs, UniformTypeKVCacheSpecs) else specs


def regions_of(kv_caches: CanonicalKVCaches) -> tuple[RegionSpec, ...]:
    """Describe the tensors of vLLM's canonical KV caches."""
    return tuple(
        RegionSpec(
            base_address=item.tensor.data_ptr(),
            num_blocks=item.tensor.shape[0],
            stride_bytes=item.tensor.stride(0) * item.tensor.element_size(),
            page_bytes=item.page_size_bytes,
        )
        for item in kv_caches.tensors
    )


def without_padding(kv_caches: CanonicalKVCaches, groups: Sequence[KVCacheGroupSpec]) -> CanonicalKVCaches:
    """Cut each group of a block-outermost KV cache down to its own pages. ``groups``: those that are offloaded.

    vLLM hands out the whole block for every group. A group with fewer or smaller pages leaves the end of its blocks
    unused: another request's bytes may lie there. Pages begin at a block's start. Groups without layers have none.
    """
    if len(kv_caches.tensors) != 1 or any(len(refs) != 1 for refs in kv_caches.group_data_refs):
        return kv_caches
    refs: list[list[CanonicalKVCacheRef]] = []
    for group, (ref,) in zip(groups, kv_caches.group_data_refs, strict=True):
        if not group.layer_names:
            refs.append([])  # its spec may describe layers of other ranks
            continue
        spec = group.kv_cache_spec
        layers = 1 if isinstance(spec, UniformTypeKVCacheSpecs) else len(group.layer_names)
        used = layers * spec.page_size_bytes
        refs.append([replace(ref, page_size_bytes=min(used, ref.page_size_bytes))])
    return CanonicalKVCaches(kv_caches.tensors, refs)


def understood_pages(caches: RankCaches) -> str | None:
    """Return, as a clause, why the pages of this rank cannot be divided by KV heads; None: they can."""
    tp, total = caches.vllm.parallel_config.tensor_parallel_size, caches.vllm.model_config.get_total_num_kv_heads()
    is_divided = False
    for group in offloaded_groups(caches.config):
        for name, spec in layers_of(group):
            why = _why_not(spec, caches.by_layer.get(name), caches.config.num_blocks, max(1, total // tp))
            if why is not None:
                return f"{name}: {why}"
            is_divided |= not isinstance(spec, MLAAttentionSpec)
    if is_divided and tp > total and not _all_layers_have(caches.vllm, total):
        # A layer with more heads would be divided among ranks that hold replicas of the other layers.
        return f"it is not certain that all layers have {total} KV heads, which {tp} ranks hold as replicas"
    return None


def layer_pages(caches: RankCaches) -> list[dict[str, tuple[KVCacheSpec, HeadPages]]]:
    """Return this rank's layers and where their heads lie, by offloaded group and by name, in the model's order.

    ``understood_pages`` has returned None. Raises LayoutError if a layer lies in none of the canonical tensors.
    """
    regions = regions_of(caches.canonical)
    return [
        {name: (spec, _head_pages(spec, caches.by_layer[name], regions)) for name, spec in layers_of(group)}
        for group in offloaded_groups(caches.config)
    ]


def _why_not(spec: KVCacheSpec, pages: object, num_blocks: int, heads: int) -> str | None:
    """Return why a layer is not understood, or None. ``heads``: how many a rank must have if they are divided."""
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
    """Whether a page has head after head, and in each head token after token, without gaps."""
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
    """Yield all numbers of KV heads that a config names, at any depth."""
    if isinstance(config, Mapping):
        for key, value in config.items():
            yield from _named(value, str(key))
    elif isinstance(config, list | tuple):
        for value in config:
            yield from _named(value, inside)
    elif config is not None and _KV_HEADS.search(inside):
        yield config


def _head_pages(spec: KVCacheSpec, pages: torch.Tensor, regions: Sequence[RegionSpec]) -> HeadPages:
    """Find a layer's pages in the regions. Raises LayoutError if they are in none."""
    assert isinstance(spec, AttentionSpec)
    heads = 1 if isinstance(spec, MLAAttentionSpec) else spec.num_kv_heads
    length = spec.unpadded_page_size_bytes
    span_bytes = pages.shape[0] * pages.stride(0) * pages.element_size()  # gaps between blocks included
    for index, region in enumerate(regions):
        offset = pages.data_ptr() - region.base_address
        if 0 <= offset <= region.page_bytes - length and region.num_blocks * region.stride_bytes == span_bytes:
            return HeadPages(index, offset, heads, length // heads)
    raise LayoutError(f"pages at {pages.data_ptr():#x} lie in none of the KV tensors")
