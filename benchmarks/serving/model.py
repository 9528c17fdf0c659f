"""The model that only takes time: its shapes, its pace, and the files that make vLLM load it.

Threading: plain functions. No torch and no vLLM here: ``played`` has the class.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VOCABULARY = 1024
"""Few, so that sampling costs no time."""
BLOCK_TOKENS = 32
"""The smallest that the CPU backend takes; on GPUs it is 16."""
ARCHITECTURE = "SleepingForCausalLM"
RATE = "NIXL_OFFLOAD_SERVING_BYTES_PER_S"
"""The environment variable with the rate of copies by the clock; empty: copies are made."""


@dataclass(frozen=True)
class Shape:
    """What a rank keeps of a token: keys and values of 16 bits, for each layer and head."""

    layers: int
    heads: int
    head_size: int

    @property
    def token_bytes(self) -> int:
        """KV of a token on this rank."""
        return 2 * 2 * self.layers * self.heads * self.head_size


WHOLE = Shape(32, 8, 128)
"""An 8B model's."""


@dataclass(frozen=True)
class Pace:
    """How long a step takes: ``step_s``, and ``token_s`` for each token in it, of prompts and answers alike."""

    step_s: float = 0.010
    token_s: float = 0.00005


def write_config(
    directory: Path, *, layers: int, heads: int, kv_heads: int, head_dim: int, hidden: int, wide: int, **more: Any
) -> Path:
    """Write the ``config.json`` of a Llama with random weights to ``directory``, and return the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_size": hidden,
        "intermediate_size": wide,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    (directory / "config.json").write_text(json.dumps(config | more, indent=1))
    return directory


def write_model(directory: Path, shape: Shape, pace: Pace, max_tokens: int) -> Path:
    """Write the ``config.json`` of the model that only takes time."""
    sizes = {"layers": shape.layers, "heads": shape.heads, "kv_heads": shape.heads, "head_dim": shape.head_size}
    return write_config(
        directory,
        **sizes,
        hidden=8 * shape.heads,
        wide=64,
        vocab_size=VOCABULARY,
        architectures=[ARCHITECTURE],
        max_position_embeddings=max_tokens,
        pace_step_s=pace.step_s,
        pace_token_s=pace.token_s,
    )


def write_plugin(directory: Path, name: str, entry_points: str) -> Path:
    """Write what makes vLLM load a plugin of this repository, as if a distribution ``name`` was installed, wherever
    ``directory`` is on ``sys.path``. ``entry_points``: the content of the file of that name. Returns ``directory``.
    """
    folder = directory / f"{name}-0.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
    (folder / "entry_points.txt").write_text(entry_points)
    return directory
