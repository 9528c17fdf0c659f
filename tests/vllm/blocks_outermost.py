"""A worker extension that gives an engine on the CPU the KV cache of CUDA: block-outermost and page-aligned.

vLLM's CPU kernels use strides and compute the same with either layout, but the backend does not list this one. After
the patch, ``VLLM_KV_CACHE_LAYOUT=BLHNC`` selects it. Torch's own CPU memory is not page-aligned, which a mover with
O_DIRECT needs.
Threading: patches are made when vLLM imports this module in its worker, before it asks for layouts and allocates.
"""

from __future__ import annotations

import mmap
from typing import Any

import torch
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.kv_cache_layout import KVCacheLayout

from tests.vllm.poison import PoisonExtension

CPUAttentionBackend.supported_kv_cache_layouts = classmethod(  # type: ignore[method-assign,assignment]
    lambda cls: (KVCacheLayout.LBHNC, KVCacheLayout.BLHNC)
)

_KV_CACHE_BYTES = 1 << 20
"""Larger tensors are KV caches."""
_zeros = torch.zeros


def _zeros_from_a_page_on(*size: Any, **options: Any) -> torch.Tensor:
    if len(size) == 1 and options.get("dtype") is torch.int8 and isinstance(size[0], int) and size[0] > _KV_CACHE_BYTES:
        return torch.frombuffer(mmap.mmap(-1, size[0]), dtype=torch.int8)
    return _zeros(*size, **options)


torch.zeros = _zeros_from_a_page_on

ENVIRONMENT = {"VLLM_KV_CACHE_LAYOUT": "BLHNC"}


class BlocksOutermostExtension(PoisonExtension):
    """Damages KV caches, too."""

    def block_strides(self) -> list[tuple[int, int]]:
        """Return for each layer the bytes from one block to the next, and the bytes of its page."""
        return [
            (cache.stride(0) * cache.element_size(), cache[0].numel() * cache.element_size())
            for cache in self.model_runner.kv_caches
        ]
