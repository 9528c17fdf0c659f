"""Real models built on the spot: random weights from a fixed seed, written as safetensors next to a Llama config.

An ordinary random model hardly looks at its KV cache: its attention is flat, an average over thousands of values is
nearly zero, and the token itself decides the answer. Here the weights are scaled so that attention is sharp (each head
picks out a few distant tokens) and what attention says outweighs the token's own embedding and the MLP. So a wrong KV
block changes tokens and logprobs.

Threading: plain functions; nothing is shared. torch and safetensors are imported when a model is written.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The size of a Llama, and how strongly it listens to its context."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int
    max_tokens: int
    """Longest prompt plus answer (``max_position_embeddings``)."""
    sliding_window: int | None = None
    """If set, every other layer sees only this many tokens, and vLLM makes two KV-cache groups."""
    sharpness: float = 4.0
    """Standard deviation of the attention logits: 0 is a flat average, 4 lets a head pick out a few tokens."""
    attention_gain: float = 2.0
    """Size of what one attention layer adds, where a token's own embedding has size 1."""
    mlp_gain: float = 0.5
    """Size of what one MLP adds."""
    logit_scale: float = 3.0
    """Standard deviation of the output logits: large enough that greedy choices are no coin flips."""

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden // self.heads

    def layer_types(self) -> list[str]:
        """Hugging Face's ``layer_types``: what each layer attends to."""
        return [
            "full_attention" if self.sliding_window is None or index % 2 == 1 else "sliding_attention"
            for index in range(self.layers)
        ]

    def parameters(self) -> int:
        """Number of parameters, norms left out."""
        attention = self.hidden * self.head_size * 2 * (self.heads + self.kv_heads)
        return 2 * self.vocab * self.hidden + self.layers * (attention + 3 * self.hidden * self.intermediate)


DEMO = ModelShape(layers=12, hidden=768, heads=12, kv_heads=4, intermediate=2048, vocab=16384, max_tokens=8192)
"""About 100 M parameters: large enough that a long prefill hurts on two cores."""

TINY = ModelShape(layers=4, hidden=256, heads=4, kv_heads=2, intermediate=512, vocab=2048, max_tokens=4096)
"""For tests: prefills a thousand tokens in a fraction of a second."""

TINY_HYBRID = ModelShape(
    layers=4, hidden=256, heads=4, kv_heads=2, intermediate=512, vocab=2048, max_tokens=4096, sliding_window=512
)
"""For tests: TINY with sliding windows, so that vLLM makes two KV-cache groups of two layers."""


def write_model(directory: Path, shape: ModelShape, *, seed: int = 1) -> Path:
    """Write ``config.json`` and ``model.safetensors`` (float32) to ``directory`` and return it.

    The same shape and seed give the same bytes. An existing directory is reused as it is. OSError: no room, no rights.
    """
    from safetensors.torch import save_file

    if (directory / "config.json").exists():
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    save_file(dict(_weights(shape, seed)), directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(_config(shape), indent=2))
    return directory


def _config(shape: ModelShape) -> dict[str, object]:
    config: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_size,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.max_tokens,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    if shape.sliding_window is not None:
        config |= {"sliding_window": shape.sliding_window, "layer_types": shape.layer_types()}
    return config


def _weights(shape: ModelShape, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and tensor. Every projection's input is RMS-normed: a weight's deviation sets its output's size."""
    import torch

    generator = torch.Generator().manual_seed(seed)

    def normal(rows: int, columns: int, output_size: float) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator).mul_(output_size / columns**0.5)

    attention_width, kv_width = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    yield "model.embed_tokens.weight", torch.randn(shape.vocab, shape.hidden, generator=generator)
    for index in range(shape.layers):
        prefix = f"model.layers.{index}"
        yield f"{prefix}.self_attn.q_proj.weight", normal(attention_width, shape.hidden, shape.sharpness**0.5)
        yield f"{prefix}.self_attn.k_proj.weight", normal(kv_width, shape.hidden, shape.sharpness**0.5)
        yield f"{prefix}.self_attn.v_proj.weight", normal(kv_width, shape.hidden, 1.0)
        yield f"{prefix}.self_attn.o_proj.weight", normal(shape.hidden, attention_width, shape.attention_gain)
        yield f"{prefix}.mlp.gate_proj.weight", normal(shape.intermediate, shape.hidden, 1.0)
        yield f"{prefix}.mlp.up_proj.weight", normal(shape.intermediate, shape.hidden, 1.0)
        yield f"{prefix}.mlp.down_proj.weight", normal(shape.hidden, shape.intermediate, shape.mlp_gain)
        yield f"{prefix}.input_layernorm.weight", torch.ones(shape.hidden)
        yield f"{prefix}.post_attention_layernorm.weight", torch.ones(shape.hidden)
    yield "model.norm.weight", torch.ones(shape.hidden)
    yield "lm_head.weight", normal(shape.vocab, shape.hidden, shape.logit_scale)


def random_prompts(shape: ModelShape, lengths: list[int], *, seed: int = 7) -> list[list[int]]:
    """Prompts of random token ids with the given lengths; no two share a prefix (but by chance)."""
    import random

    source = random.Random(seed)
    return [[source.randrange(2, shape.vocab) for _ in range(length)] for length in lengths]
