"""What nobody has run before on this card, against torch on random data: ``python -m benchmarks.gpu.arithmetic``.

vLLM's compiled kernels and FlashAttention 3, from libraries that were cut down to one architecture; our Triton kernels'
own trial. One that crashes takes the process along, and the log says which.
Threading: one thread.
"""

from __future__ import annotations

import importlib
import json
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CLOSE = 0.02
"""Relative, of bfloat16."""


def _close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    error = float((found.float() - wanted.float()).abs().max() / wanted.float().abs().max())
    assert error < CLOSE, f"off by {error:.3g} of the largest value"


def compiled_kernels() -> str:
    """The operations of a Llama's layer."""
    importlib.import_module("vllm._C_stable_libtorch")

    x, residual = (torch.randn(300, 4096, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    weight, out = torch.randn(4096, device=DEVICE, dtype=torch.bfloat16), torch.empty_like(x)
    torch.ops._C.rms_norm(out, x, weight, 1e-5)
    _close(out, torch.nn.functional.rms_norm(x.float(), (4096,), weight.float(), 1e-5))
    summed = x + residual
    torch.ops._C.fused_add_rms_norm(x, residual, weight, 1e-5)
    _close(x, torch.nn.functional.rms_norm(summed.float(), (4096,), weight.float(), 1e-5))
    _close(residual, summed)
    half = torch.empty(300, 2048, device=DEVICE, dtype=torch.bfloat16)
    torch.ops._C.silu_and_mul(half, x)
    _close(half, torch.nn.functional.silu(x[:, :2048].float()) * x[:, 2048:].float())
    angles = torch.rand(512, 64, device=DEVICE) * 6
    positions = torch.randint(0, 512, (300,), device=DEVICE)
    cos, sin = angles[positions].cos().unsqueeze(1), angles[positions].sin().unsqueeze(1)
    first, second = x.clone().view(300, 32, 128).float().chunk(2, dim=-1)
    torch.ops._C.rotary_embedding(
        positions, x, None, 128, torch.cat((angles.cos(), angles.sin()), dim=-1).bfloat16(), True
    )
    _close(x.view(300, 32, 128), torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))
    cache = torch.zeros(2, 64, 16, 8, 128, device=DEVICE, dtype=torch.bfloat16)
    keys, values = (torch.randn(300, 8, 128, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    slots, one = torch.randperm(1024, device=DEVICE)[:300], torch.ones(1, device=DEVICE)
    torch.ops._C_cache_ops.reshape_and_cache_flash(keys, values, cache[0], cache[1], slots, "auto", one, one)
    assert torch.equal(cache[0].view(-1, 8, 128)[slots], keys)
    assert torch.equal(cache[1].view(-1, 8, 128)[slots], values)
    return "right"


def flash_attention() -> str:
    """Two sequences behind a paged cache: a prompt's end, and one token."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    lengths, queries = (1000, 777), (100, 1)
    key_cache, value_cache = (torch.randn(128, 16, 8, 128, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    q = torch.randn(sum(queries), 32, 128, device=DEVICE, dtype=torch.bfloat16)
    table = torch.randperm(128, device=DEVICE, dtype=torch.int32).view(2, 64)
    found = torch.empty_like(q)
    flash_attn_varlen_func(
        q,
        key_cache,
        value_cache,
        out=found,
        max_seqlen_q=max(queries),
        cu_seqlens_q=torch.tensor([0, *np.cumsum(queries)], device=DEVICE, dtype=torch.int32),
        max_seqlen_k=max(lengths),
        seqused_k=torch.tensor(lengths, device=DEVICE, dtype=torch.int32),
        block_table=table,
        softmax_scale=128**-0.5,
        causal=True,
        fa_version=3,
    )
    begin = 0
    for row, (length, count) in enumerate(zip(lengths, queries, strict=True)):
        k, v = (
            cache[table[row]].flatten(0, 1)[:length].float().repeat_interleave(4, dim=1)
            for cache in (key_cache, value_cache)
        )
        mask = torch.ones(count, length, dtype=torch.bool, device=DEVICE).tril(length - count)
        wanted = torch.nn.functional.scaled_dot_product_attention(
            q[begin : begin + count].float().transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), attn_mask=mask
        )
        _close(found[begin : begin + count], wanted.transpose(0, 1))
        begin += count
    return "right"


def our_kernels() -> str:
    """Ours, which ``open_kernels`` tries before it takes them."""
    from nixl_offload.engine.kernels.select import open_kernels
    from nixl_offload.engine.kernels.torch_kernels import Page

    name = open_kernels([torch.zeros(64, 65536, dtype=torch.uint8, device=DEVICE)], [Page(0, 0, 65536, 0)]).name
    assert name == "triton", f"{name} was taken; the log says why"
    return name


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    said: dict[str, str] = {}
    wrong: list[str] = []
    checks: list[Callable[[], str]] = [compiled_kernels, flash_attention]
    checks += [our_kernels] if DEVICE == "cuda" else [libraries]
    for check in checks:
        print(f"{check.__name__} ...", flush=True)
        try:
            said[check.__name__] = check()
        except Exception as error:
            logging.exception(check.__name__)
            wrong.append(check.__name__)
            said[check.__name__] = f"{type(error).__name__}: {error}"[:150]
    words = "; ".join(f"{name}: {word}" for name, word in said.items())
    without = {"flash_attention": ["fa3"], "compiled_kernels": ["fa3", "triton", "triton-v1"]}
    found: dict[str, Any] = {"words": words, "wrong": wrong}
    if DEVICE == "cuda":
        found["no_rungs"] = [rung for name in wrong for rung in without.get(name, [])]
    elif not wrong:
        found |= {"words": f"needs a card; by stand-ins: {words}", "skipped": True}
    print(json.dumps(found), flush=True)


def libraries() -> str:
    """Whether vLLM's load, and how many operations they bring: that much needs no card."""
    loaded = [name for name in ("_C_stable_libtorch", "vllm_flash_attn._vllm_fa3_C") if _has_library(name)]
    return f"{', '.join(loaded) or 'none'} loaded, {len(torch._C._dispatch_get_all_op_names())} operations in all"


def _has_library(name: str) -> bool:
    return bool(getattr(importlib.import_module(f"vllm.{name}"), "__file__", ""))


if __name__ == "__main__":
    if DEVICE == "cpu":
        importlib.import_module("vllm.platforms").current_platform  # noqa: B018 - its plugin brings the stand-ins
    main()
