"""Describes vLLM's KV caches in plain numbers.

Threading: pure functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import get_offloading_group_ids
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, UniformTypeKVCacheSpecs
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches

from nixl_offload.chunk.layout import GroupLayout, KVLayout, RegionSpec

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec


def keeps_prefix(kv_cache_config: KVCacheConfig, groups: int) -> bool:
    """Say whether a request whose load has failed in part may go on from what lies before its first missing block.

    Only where there is one group, block ids being unique within a group, and each of its layers needs all tokens: of a
    window or a state a load brings the end alone, and what lies before that was never there. ``groups``: how many are
    offloaded.
    """
    if groups != 1 or len(kv_cache_config.kv_cache_groups) != 1:
        return False
    return all(isinstance(spec, FullAttentionSpec) for spec in _layer_specs(kv_cache_config.kv_cache_groups[0]))


def keeps_state(kv_cache_config: KVCacheConfig) -> bool:
    """Say whether some layers keep a state (Mamba, GDN, short convolutions) and not what tokens had to say."""
    groups = kv_cache_config.kv_cache_groups
    return any(isinstance(spec, MambaSpec) for group in groups for spec in _layer_specs(group))


def retained_blocks(blocks: int, tokens: Sequence[int], kv_cache_config: KVCacheConfig, interval: int) -> int:
    """Return how many blocks a chunk may have, ``blocks`` at most. ``tokens``: of a block, by offloaded group.

    Of windows and state vLLM keeps what lies before multiples of ``interval`` (``prefix_cache_retention_interval``), so
    a chunk must divide it. Raises ValueError where no block does.
    """
    groups = offloaded_groups(kv_cache_config)
    for fewer in range(blocks, 0, -1):
        if all(
            interval % (size * fewer) == 0 or all(isinstance(spec, FullAttentionSpec) for spec in _layer_specs(group))
            for size, group in zip(tokens, groups, strict=True)
        ):
            return fewer
    raise ValueError(f"prefix_cache_retention_interval ({interval}) is not a multiple of a block")


def _layer_specs(group: KVCacheGroupSpec) -> list[KVCacheSpec]:
    """Return the specs that the layers of a group have."""
    spec = group.kv_cache_spec
    return list(spec.kv_cache_specs.values()) if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]


def offloaded_groups(kv_cache_config: KVCacheConfig) -> list[KVCacheGroupSpec]:
    """Return the groups of which chunks are stored."""
    return [kv_cache_config.kv_cache_groups[number] for number in get_offloading_group_ids(kv_cache_config)]


def layers_of(group: KVCacheGroupSpec) -> Iterator[tuple[str, KVCacheSpec]]:
    """Return the names and specs of a group's layers on this rank, in the model's order."""
    specs = group.kv_cache_spec
    for name in group.layer_names:
        yield name, specs.kv_cache_specs[name] if isinstance(specs, UniformTypeKVCacheSpecs) else specs


def canonical_layout(kv_caches: CanonicalKVCaches, blocks_per_chunk: int) -> KVLayout:
    """Describe vLLM's canonical KV caches in plain numbers."""
    groups = tuple(
        GroupLayout.of_pages((ref.tensor_idx, ref.page_size_bytes) for ref in refs)
        for refs in kv_caches.group_data_refs
    )
    return KVLayout(regions_of(kv_caches), groups, blocks_per_chunk)


def regions_of(kv_caches: CanonicalKVCaches) -> tuple[RegionSpec, ...]:
    """Describe the tensors of vLLM's canonical KV caches."""
    return tuple(
        RegionSpec(
            region=number,
            base_address=item.tensor.data_ptr(),
            num_blocks=item.tensor.shape[0],
            stride_bytes=item.tensor.stride(0) * item.tensor.element_size(),
            page_bytes=item.page_size_bytes,
        )
        for number, item in enumerate(kv_caches.tensors)
    )


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
