"""A KV cache for ``nixl-offload bench``: tensors of a model's shape, on the GPU if there is one, else in host memory.

Threading: one thread. The only file of the commands that imports torch itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from nixl_offload.chunk.layout import GroupLayout, KVLayout, RegionSpec
from nixl_offload.cli.model_shape import ModelShape
from nixl_offload.engine.autotune.scratch import aligned_tensor
from nixl_offload.engine.streams import Device, device_of

BLOCK_TOKENS: Final = 16
"""vLLM's default on CUDA."""


@dataclass(frozen=True, slots=True)
class KVCache:
    """Room for ``chunks`` chunks of every group, full of noise."""

    tensors: tuple[torch.Tensor, ...]
    layout: KVLayout
    device: Device
    chunks: int

    @property
    def slot_bytes(self) -> int:
        """Of the largest chunk: header page, payload, padding."""
        return max(self.layout.slot_bytes(group) for group in range(len(self.layout.groups)))

    def describe(self) -> str:
        """Say where it is."""
        if self.device.is_accelerator:
            return f"GPU memory ({torch.cuda.get_device_name(self.device.torch_device)})"
        return "host memory (no GPU here)"


def make_kv_cache(shape: ModelShape, *, chunk_tokens: int, chunks: int, block_outermost: bool) -> KVCache:
    """Return a KV cache as vLLM would lay it out: on CUDA, where asked for, all layers of a block side by side.

    Groups share tensors, as in vLLM. Raises NixlOffloadError when there is not the memory, or a chunk has more blocks
    than can be described.
    """
    on_gpu = torch.cuda.is_available()
    place = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    chunk_tokens = shape.chunk_holds(chunk_tokens)
    block_tokens = BLOCK_TOKENS if chunk_tokens % BLOCK_TOKENS == 0 and not shape.block_tokens else chunk_tokens
    blocks = chunk_tokens // block_tokens
    pages = [group.layer_token_bytes * block_tokens + group.state_bytes for group in shape.groups]
    if on_gpu and block_outermost:
        sizes = [max(group.layers * page for group, page in zip(shape.groups, pages, strict=True))]
        groups = [
            GroupLayout.of_pages([(0, group.layers * page)]) for group, page in zip(shape.groups, pages, strict=True)
        ]
    else:
        sizes = [max(pages)] * max(group.layers for group in shape.groups)
        groups = [
            GroupLayout.of_pages((layer, page) for layer in range(group.layers))
            for group, page in zip(shape.groups, pages, strict=True)
        ]
    num_blocks = chunks * blocks
    tensors = tuple(_noise(num_blocks, size, place) for size in sizes)
    regions = tuple(
        RegionSpec(number, tensor.data_ptr(), num_blocks, size, size)
        for number, (tensor, size) in enumerate(zip(tensors, sizes, strict=True))
    )
    return KVCache(tensors, KVLayout(regions, tuple(groups), blocks), device_of(tensors[0]), chunks)


def _noise(rows: int, row_bytes: int, place: torch.device) -> torch.Tensor:
    """Noise, for a drive may compress, and zeros are often not written at all."""
    memory = aligned_tensor(rows * row_bytes, place)
    words = memory[: memory.numel() // 8 * 8].view(torch.int64)
    words.random_()
    return memory.view(torch.int8).view(rows, row_bytes)
