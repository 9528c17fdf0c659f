"""The vLLM that ``smoke`` and ``race`` start: on the kernels of a rung, with a model of random weights.

``GPU_CHECK_ATTENTION`` names vLLM's attention backend. ``GPU_CHECK_WITHOUT_C`` puts torch in the place of vLLM's
compiled kernels, for a machine on which they do not load. Threading: import it before vLLM, in the main thread.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import torch

PLAYED = "NIXL_OFFLOAD_PLAYED" in os.environ
"""Host memory plays the device: models are small."""


def write_llama(directory: Path, *, layers: int, heads: int, kv_heads: int, hidden: int, wide: int, words: int) -> Path:
    """Write the ``config.json`` of a Llama and return its directory: with random weights, no more is wanted."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "hidden_size": hidden,
        "intermediate_size": wide,
        "vocab_size": words,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def options(**own: Any) -> dict[str, Any]:
    """The options of an engine on this rung."""
    made: dict[str, Any] = {
        "load_format": "dummy",
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "seed": 0,
        "attention_backend": os.environ.get("GPU_CHECK_ATTENTION", "FLASH_ATTN"),
        "distributed_executor_backend": "uni",
    }
    if "GPU_CHECK_WITHOUT_C" in os.environ:
        made["compilation_config"] = {"custom_ops": ["none"]}
        made["ir_op_priority"] = {"rms_norm": ["native"], "fused_add_rms_norm": ["native"]}
    return made | own


def without_c() -> None:
    """Make vLLM's libraries empty modules, and register in torch the few operations that it cannot start without."""
    for name in ("_C_stable_libtorch", "vllm_flash_attn._vllm_fa3_C"):  # the second: its package raises without any
        sys.modules[f"vllm.{name}"] = types.ModuleType(f"vllm.{name}")
    if PLAYED:  # what plays the device has stand-ins of its own
        return
    for space, schema, function in (
        ("_C", "silu_and_mul(Tensor(a!) result, Tensor input) -> ()", _silu_and_mul),
        (
            "_C_cache_ops",
            "swap_blocks_batch(Tensor a, Tensor b, Tensor sizes, bool any=False) -> ()",
            _swap_blocks_batch,
        ),
        *(
            ("_C", f"{name}(int capability) -> bool", lambda _: False)
            for name in (
                "cutlass_scaled_mm_supports_fp8",
                "cutlass_scaled_mm_supports_block_fp8",
                "cutlass_scaled_mm_supports_fp4",
                "cutlass_group_gemm_supported",
            )
        ),
    ):
        library = torch.library.Library(space, "FRAGMENT")
        library.define(schema)
        library.impl(schema.partition("(")[0], function, "CompositeExplicitAutograd")
        _LIBRARIES.append(library)


_LIBRARIES: list[torch.library.Library] = []
"""Operations go when their library does."""


def _silu_and_mul(result: torch.Tensor, x: torch.Tensor) -> None:
    gate, up = x.chunk(2, dim=-1)
    torch.mul(torch.nn.functional.silu(gate), up, out=result)


def _swap_blocks_batch(sources: torch.Tensor, targets: torch.Tensor, sizes: torch.Tensor, _: bool = False) -> None:
    """Copy one by one, slower than vLLM's kernel does: the race of this rung says nothing of vLLM's offloading."""
    from nixl_offload.engine.streams import cuda_runtime

    default, stream = 4, ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    for source, target, size in zip(sources.tolist(), targets.tolist(), sizes.tolist(), strict=True):
        code = cuda_runtime().cudaMemcpyAsync(
            ctypes.c_void_p(target), ctypes.c_void_p(source), ctypes.c_size_t(size), default, stream
        )
        assert not code, f"CUDA error {code}"


if "GPU_CHECK_WITHOUT_C" in os.environ:
    without_c()
