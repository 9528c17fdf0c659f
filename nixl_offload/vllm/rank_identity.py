"""Digests what a rank has allocated: per layer its name, group, kind of cache, and how a block lies in memory. Names
what the rank has loaded beside a model's own files.

The namespace holds this of all ranks, so that ranks that differ in any of it share nothing.

Threading: a pure function, called by the worker's main thread when vLLM registers the KV caches.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import get_offloading_group_ids
from vllm.v1.kv_cache_interface import group_kernel_blocks

from nixl_offload.identity.settings import collect
from nixl_offload.vllm.kv_caches import layers_of
from nixl_offload.vllm.vllm_internals import kv_scales

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_REMOTE_CODE: Final = "transformers_modules."
"""Modules of a model's own code; transformers puts the commit or a digest of the sources into the name."""
_KNOWN_CODE: Final = ("torch", "transformers", "vllm")
"""Packages whose models read weights from ``secondary_weights`` and from their own files alone."""


def sources_of(models: Iterable[torch.nn.Module]) -> tuple[str, ...]:
    """Return where the weights of ``models`` come from beside their own files, sorted: directories, ids of the Hub, and
    modules of code that may load anything.
    """
    found = set()
    for model in models:
        found |= {str(source.model_or_path) for source in getattr(model, "secondary_weights", ())}
        classes = {type(module) for module in model.modules()}
        found |= {made.__module__ for made in classes if made.__module__.partition(".")[0] not in _KNOWN_CODE}
    return tuple(sorted(found))


def allocation_digest(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, kv_caches: Mapping[str, torch.Tensor]
) -> str:
    """Return a hex digest of this rank's offloaded KV caches. How many blocks there are, and where, is not in it."""
    layers = vllm_config.compilation_config.static_forward_context
    facts: list[object] = [sorted(name for name in sys.modules if name.startswith(_REMOTE_CODE))]
    for number in get_offloading_group_ids(kv_cache_config):
        group = kv_cache_config.kv_cache_groups[number]
        facts.append([number, str(group.role), group.is_eagle_group])
        for name, spec in layers_of(group):
            page = group_kernel_blocks(kv_caches[name], kv_cache_config.num_blocks) if name in kv_caches else None
            facts.append(
                [
                    name,
                    type(spec).__qualname__,
                    collect(spec, {}).values,
                    None if page is None else _page_facts(page, spec.page_size_bytes),
                    layer_facts(layers.get(name)),
                ]
            )
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _page_facts(blocks: torch.Tensor, page_bytes: int) -> list[object]:
    """``blocks``: shape (blocks, ...), one page each. The stride from block to block depends on what lies between."""
    item_bytes = blocks.element_size()
    stride_bytes = blocks.stride(0) * item_bytes
    offset_bytes = blocks.storage_offset() * item_bytes
    return [
        str(blocks.dtype),
        list(blocks.shape[1:]),
        [stride * item_bytes for stride in blocks.stride()[1:]],
        # Where layers lie side by side within a block, a layer's place in it counts.
        offset_bytes % stride_bytes if stride_bytes > page_bytes else None,
    ]


def layer_facts(layer: Any) -> list[object]:
    """Backend and scales: with a quantized cache the same bytes mean other values under another scale."""
    if layer is None:
        return []
    backend = layer.get_attn_backend() if hasattr(layer, "get_attn_backend") else None
    return [backend.get_name() if backend is not None else None, *kv_scales(layer)]
