"""Describes vLLM's KV caches in plain numbers.

Threading: pure functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches

from nixl_offload.chunk.layout import GroupLayout, KVLayout, RegionSpec

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec


def canonical_layout(kv_caches: CanonicalKVCaches, blocks_per_chunk: int) -> KVLayout:
    """Describe vLLM's canonical KV caches in plain numbers."""
    tensors = tuple(
        RegionSpec(
            region=number,
            base_address=item.tensor.data_ptr(),
            num_blocks=item.tensor.shape[0],
            stride_bytes=item.tensor.stride(0) * item.tensor.element_size(),
            page_bytes=item.page_size_bytes,
        )
        for number, item in enumerate(kv_caches.tensors)
    )
    groups = tuple(
        GroupLayout(tuple((ref.tensor_idx, ref.page_size_bytes) for ref in refs)) for refs in kv_caches.group_data_refs
    )
    return KVLayout(tensors, groups, blocks_per_chunk)


def without_padding(kv_caches: CanonicalKVCaches, groups: Sequence[KVCacheGroupSpec]) -> CanonicalKVCaches:
    """Have each group of a block-outermost KV cache store its own pages only. ``groups``: those that are offloaded.

    vLLM hands out the whole block for every group; one with fewer or smaller pages than another leaves the end of its
    blocks unused, and what lies there belonged to somebody else's request. Pages begin at the first byte of a block.
    A group without any layer on this rank has none.
    """
    if len(kv_caches.tensors) != 1 or any(len(refs) != 1 for refs in kv_caches.group_data_refs):
        return kv_caches
    refs: list[list[CanonicalKVCacheRef]] = []
    for group, (ref,) in zip(groups, kv_caches.group_data_refs, strict=True):
        if not group.layer_names:
            refs.append([])  # its spec may still be that of other ranks' layers
            continue
        spec = group.kv_cache_spec
        layers = 1 if isinstance(spec, UniformTypeKVCacheSpecs) else len(group.layer_names)
        used = layers * spec.page_size_bytes
        refs.append([replace(ref, page_size_bytes=min(used, ref.page_size_bytes))])
    return CanonicalKVCaches(kv_caches.tensors, refs)
