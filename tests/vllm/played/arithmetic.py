"""What vLLM's compiled kernels compute, in torch, on host memory.

A row's result does not depend on the rows beside it, nor on how many there are: matrix products and attention are done
in tiles of one size. So a token's KV and logits are the same bits however vLLM cuts prompts into steps and batches.
Threading: as vLLM calls them; nothing here keeps state.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import vllm
from torch.nn import functional

TILE_ROWS = 32
"""Rows of a matrix product, and queries of an attention head, that are computed at once."""
TILE_KEYS = 1024
"""Keys beside which a query is computed: the sequence, rounded up to a multiple."""

_OPS: dict[str, Callable[..., Any]] = {}


def _op(schema: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def take(function: Callable[..., Any]) -> Callable[..., Any]:
        _OPS[schema] = function
        return function

    return take


def install() -> None:
    """Register the operations, under their schemas where no library of vLLM's brings them."""
    [home] = vllm.__path__
    for name in ("_C_stable_libtorch", "vllm_flash_attn/_vllm_fa3_C"):
        if not any(Path(home).glob(f"{name}.*so")):
            full_name = f"vllm.{name.replace('/', '.')}"
            sys.modules[full_name] = types.ModuleType(full_name)
    importlib.import_module("vllm._C_stable_libtorch")
    for schema, function in _OPS.items():
        space, _, rest = schema.partition("::")
        name = rest.partition("(")[0]
        if not hasattr(getattr(torch.ops, space), name):
            library = torch.library.Library(space, "FRAGMENT")
            library.define(rest)
            _KEPT.append(library)
        library = torch.library.Library(space, "IMPL")
        for key in ("CompositeExplicitAutograd", "CPU"):  # a library has some for host memory that want a card
            library.impl(name, function, key)
        _KEPT.append(library)
    for name in ("vllm.vllm_flash_attn", "vllm.vllm_flash_attn.flash_attn_interface"):
        module: Any = importlib.import_module(name)
        module.flash_attn_varlen_func = attention
        module.get_scheduler_metadata = lambda *_, **__: None
    functional.linear = _linear(functional.linear)


_KEPT: list[torch.library.Library] = []


@_op("_C::rms_norm(Tensor! result, Tensor input, Tensor? weight, float epsilon) -> ()")
def _rms_norm(result: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, epsilon: float) -> None:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    result.copy_(normed if weight is None else normed * weight.float())


@_op("_C::fused_add_rms_norm(Tensor! input, Tensor! residual, Tensor? weight, float epsilon) -> ()")
def _fused_add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, epsilon: float) -> None:
    residual.add_(x)
    _rms_norm(x, residual, weight, epsilon)


@_op("_C::silu_and_mul(Tensor! result, Tensor input) -> ()")
def _silu_and_mul(result: torch.Tensor, x: torch.Tensor) -> None:
    gate, up = x.chunk(2, dim=-1)
    result.copy_(functional.silu(gate) * up)


@_op(
    "_C::rotary_embedding(Tensor positions, Tensor! query, Tensor!? key, int head_size, Tensor cos_sin_cache, "
    "bool is_neox, int rope_dim_offset=0, bool inverse=False) -> ()"
)
def _rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
    rope_dim_offset: int = 0,
    inverse: bool = False,
) -> None:
    assert is_neox
    assert rope_dim_offset == 0
    assert not inverse
    cos, sin = cos_sin_cache[positions].float().unsqueeze(1).chunk(2, dim=-1)
    for tensor in (query, key):
        if tensor is not None:
            heads = tensor.view(len(positions), -1, head_size)[..., : 2 * cos.shape[-1]]
            first, second = heads.float().chunk(2, dim=-1)
            heads.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))


@_op(
    "_C_cache_ops::reshape_and_cache_flash(Tensor key, Tensor value, Tensor! key_cache, Tensor! value_cache, "
    "Tensor slot_mapping, str kv_cache_dtype, Tensor k_scale, Tensor v_scale) -> ()"
)
def _reshape_and_cache_flash(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *_: Any,
) -> None:
    block_tokens = key_cache.shape[1]
    is_real = slot_mapping >= 0
    slots = slot_mapping[is_real]
    count = len(slot_mapping)
    for cache, new in ((key_cache, key), (value_cache, value)):
        cache[slots // block_tokens, slots % block_tokens] = new[:count][is_real]


@_op("_C::get_cuda_view_from_cpu_tensor(Tensor cpu_tensor) -> Tensor")
def _get_cuda_view_from_cpu_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view_as(tensor)


@_op("_C::cutlass_scaled_mm_supports_fp8(int cuda_device_capability) -> bool")
@_op("_C::cutlass_scaled_mm_supports_block_fp8(int cuda_device_capability) -> bool")
@_op("_C::cutlass_scaled_mm_supports_fp4(int cuda_device_capability) -> bool")
@_op("_C::cutlass_group_gemm_supported(int cuda_device_capability) -> bool")
def _no(_: int) -> bool:
    return False


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    out: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seqused_k: torch.Tensor,
    block_table: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    window_size: list[int] | None = None,
    softcap: float = 0.0,
    **_: Any,
) -> torch.Tensor:
    """FlashAttention over pages: ``k`` and ``v`` are [blocks, tokens of a block, heads, head size]."""
    assert causal
    assert not softcap
    left = -1 if window_size is None else window_size[0]
    starts, lengths = cu_seqlens_q.tolist(), seqused_k.tolist()
    block_tokens, kv_heads, head_size = k.shape[1:]
    group = q.shape[1] // kv_heads
    for row, length in enumerate(lengths):
        begin, end = starts[row], starts[row + 1]
        if begin == end:
            continue
        blocks = block_table[row, : -(-length // block_tokens)].long()
        width = -(-length // TILE_KEYS) * TILE_KEYS
        keys, values = (_padded(cache[blocks].flatten(0, 1)[:length].float(), width) for cache in (k, v))
        keys, values = keys.permute(1, 2, 0).contiguous(), values.transpose(0, 1).contiguous()
        numbers = torch.arange(width)
        for first in range(begin, end, TILE_ROWS):
            last = min(end, first + TILE_ROWS)
            position = torch.arange(TILE_ROWS) + (length - end + first)
            queries = _padded(q[first:last].float(), TILE_ROWS).view(TILE_ROWS, kv_heads, group, head_size)
            scores = torch.matmul(queries.permute(1, 2, 0, 3).reshape(kv_heads, -1, head_size), keys) * softmax_scale
            visible = numbers <= position[:, None]
            if left >= 0:
                visible &= numbers >= position[:, None] - left
            scores = scores.view(kv_heads, group, TILE_ROWS, width).masked_fill(~visible, float("-inf"))
            weights = torch.softmax(scores, dim=-1).nan_to_num(0.0).view(kv_heads, -1, width)
            sums = torch.matmul(weights, values).view(kv_heads, group, TILE_ROWS, head_size)
            out[first:last] = sums.permute(2, 0, 1, 3).reshape(TILE_ROWS, -1, head_size)[: last - first].to(out.dtype)
    return out


def _linear(linear: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def tiled(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        parts = [linear(_padded(part, TILE_ROWS), weight, bias) for part in rows.split(TILE_ROWS)]
        return torch.cat(parts)[: len(rows)].view(*x.shape[:-1], -1)

    return tiled


def _padded(rows: torch.Tensor, count: int) -> torch.Tensor:
    return functional.pad(rows, [0, 0] * (rows.dim() - 1) + [0, count - len(rows)])
