"""Models of further families for tests, as small and as dependent on their KV as ``examples.demo.model``'s Llama.

Each function writes a checkpoint with random weights from a fixed seed and returns its directory, which it must be
the first to use. Names and shapes of tensors are those that vLLM's loaders want.

Threading: plain functions; nothing is shared.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file

from examples.demo.model import TINY, write_model

IMAGE_TOKEN = TINY.vocab - 1
IMAGE_TOKENS = 8
"""What an image adds at the beginning of a prompt."""
IMAGE_PIXELS = 56
"""Width and height."""
_LATENT, _ROPE, _HEAD, _HEADS = 512, 64, 64, 4
_VISION = 64


def write_long_rope(directory: Path, *, original_tokens: int) -> Path:
    """Write TINY as a Phi-3 with LongRoPE, of whose factors vLLM takes the short ones up to ``original_tokens``."""
    write_model(directory, TINY)
    llama = load_file(directory / "model.safetensors")
    tensors = {name: llama[name] for name in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")}
    for index in range(TINY.layers):
        layer = f"model.layers.{index}"
        for name, parts in {
            "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
            **{same: (same,) for same in ("self_attn.o_proj", "mlp.down_proj", "input_layernorm")},
            "post_attention_layernorm": ("post_attention_layernorm",),
        }.items():
            tensors[f"{layer}.{name}.weight"] = torch.cat([llama[f"{layer}.{part}.weight"] for part in parts])
    config = json.loads((directory / "config.json").read_text())
    pairs = TINY.head_size // 2
    config |= {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "pad_token_id": 0,
        "original_max_position_embeddings": original_tokens,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0 + 0.01 * pair for pair in range(pairs)],
            "long_factor": [1.0 + 0.5 * pair for pair in range(pairs)],
        },
    }
    return _write(directory, config, tensors)


CPU_MLA: Final[dict[str, Any]] = {"attention_backend": "CPU_MLA"}
"""vLLM's reference implementation: without it vLLM takes another where the processor has AMX, which refuses float32 and
keeps prefix caching on."""


def write_mla(directory: Path) -> Path:
    """Write a DeepSeek-V2 without experts, whose attention is MLA."""
    config = {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "hidden_size": TINY.hidden,
        "intermediate_size": TINY.intermediate,
        "num_hidden_layers": TINY.layers,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _HEADS,
        "kv_lora_rank": _LATENT,
        "q_lora_rank": None,
        "qk_nope_head_dim": _HEAD,
        "qk_rope_head_dim": _ROPE,
        "v_head_dim": _HEAD,
        "first_k_dense_replace": TINY.layers,
        "moe_intermediate_size": 128,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "vocab_size": TINY.vocab,
        "max_position_embeddings": TINY.max_tokens,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    return _write(directory, config, dict(_mla_weights()))


def _mla_weights() -> Iterator[tuple[str, torch.Tensor]]:
    source = torch.Generator().manual_seed(1)
    yield "model.embed_tokens.weight", torch.randn(TINY.vocab, TINY.hidden, generator=source)
    for index in range(TINY.layers):
        layer = f"model.layers.{index}"
        for name, rows, columns, size in (
            ("self_attn.q_proj", _HEADS * (_HEAD + _ROPE), TINY.hidden, 2.0),
            ("self_attn.kv_a_proj_with_mqa", _LATENT + _ROPE, TINY.hidden, 2.0),
            ("self_attn.kv_b_proj", _HEADS * 2 * _HEAD, _LATENT, 1.0),
            ("self_attn.o_proj", TINY.hidden, _HEADS * _HEAD, TINY.attention_gain),
            ("mlp.gate_proj", TINY.intermediate, TINY.hidden, 1.0),
            ("mlp.up_proj", TINY.intermediate, TINY.hidden, 1.0),
            ("mlp.down_proj", TINY.hidden, TINY.intermediate, TINY.mlp_gain),
        ):
            yield f"{layer}.{name}.weight", _normal(source, rows, columns, size)
        for name, width in (
            ("input_layernorm", TINY.hidden),
            ("post_attention_layernorm", TINY.hidden),
            ("self_attn.kv_a_layernorm", _LATENT),
        ):
            yield f"{layer}.{name}.weight", torch.ones(width)
    yield "model.norm.weight", torch.ones(TINY.hidden)
    yield "lm_head.weight", _normal(source, TINY.vocab, TINY.hidden, TINY.logit_scale)


def write_vision(directory: Path) -> Path:
    """Write a BLIP-2 that sees images of ``IMAGE_PIXELS`` and speaks with TINY, with its tokenizer and processor."""
    write_model(directory, TINY)
    llama = load_file(directory / "model.safetensors")
    tensors = {f"language_model.{name}": tensor for name, tensor in llama.items()} | dict(_vision_weights())
    tower = {"hidden_size": _VISION, "intermediate_size": 2 * _VISION, "num_attention_heads": 2}
    config = {
        "architectures": ["Blip2ForConditionalGeneration"],
        "model_type": "blip-2",
        "vision_config": {**tower, "num_hidden_layers": 0, "image_size": IMAGE_PIXELS, "patch_size": 14},
        "qformer_config": {**tower, "num_hidden_layers": 1, "encoder_hidden_size": _VISION, "vocab_size": 16},
        "text_config": json.loads((directory / "config.json").read_text()),
        "num_query_tokens": IMAGE_TOKENS,
        "image_token_index": IMAGE_TOKEN,
        "torch_dtype": "float32",
    }
    size = {"height": IMAGE_PIXELS, "width": IMAGE_PIXELS}
    processor = {
        "processor_class": "Blip2Processor",
        "num_query_tokens": IMAGE_TOKENS,
        "image_processor": {"image_processor_type": "BlipImageProcessor", "size": size},
    }
    words = {f"t{token}": token for token in range(IMAGE_TOKEN)} | {"<image>": IMAGE_TOKEN}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "t0"},
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "t0",
        "eos_token": "t1",
        "additional_special_tokens": ["<image>"],
    }
    (directory / "processor_config.json").write_text(json.dumps(processor))
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return _write(directory, config, tensors)


def _vision_weights() -> Iterator[tuple[str, torch.Tensor]]:
    source = torch.Generator().manual_seed(2)
    layer = "qformer.encoder.layer.0."
    yield "query_tokens", torch.randn(1, IMAGE_TOKENS, _VISION, generator=source)
    embeddings = "vision_model.embeddings."
    yield embeddings + "class_embedding", torch.randn(1, 1, _VISION, generator=source)
    yield embeddings + "position_embedding", torch.randn(1, (IMAGE_PIXELS // 14) ** 2 + 1, _VISION, generator=source)
    yield embeddings + "patch_embedding.weight", torch.randn(_VISION, 3, 14, 14, generator=source) / 14
    yield embeddings + "patch_embedding.bias", torch.zeros(_VISION)
    for attention in ("attention", "crossattention"):
        for part in ("attention.query", "attention.key", "attention.value", "output.dense"):
            yield from _linear(source, f"{layer}{attention}.{part}", _VISION, _VISION)
        yield from _layer_norm(f"{layer}{attention}.output.LayerNorm")
    yield from _linear(source, f"{layer}intermediate_query.dense", 2 * _VISION, _VISION)
    yield from _linear(source, f"{layer}output_query.dense", _VISION, 2 * _VISION)
    for norm in (f"{layer}output_query.LayerNorm", "qformer.layernorm", "vision_model.post_layernorm"):
        yield from _layer_norm(norm)
    yield from _linear(source, "language_projection", TINY.hidden, _VISION)


def _linear(source: torch.Generator, name: str, rows: int, columns: int) -> Iterator[tuple[str, torch.Tensor]]:
    yield f"{name}.weight", _normal(source, rows, columns, 1.0)
    yield f"{name}.bias", torch.zeros(rows)


def _layer_norm(name: str) -> Iterator[tuple[str, torch.Tensor]]:
    yield f"{name}.weight", torch.ones(_VISION)
    yield f"{name}.bias", torch.zeros(_VISION)


def _normal(source: torch.Generator, rows: int, columns: int, output_size: float) -> torch.Tensor:
    return torch.randn(rows, columns, generator=source) * (output_size / columns**0.5)


def _write(directory: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    return directory
