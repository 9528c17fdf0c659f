"""The vLLM that ``smoke`` and ``race`` start: on the kernels of a rung, with a model of random weights.

``GPU_CHECK_ATTENTION`` names vLLM's attention backend. Threading: pure functions, but for the file that one writes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from benchmarks.serving.model import write_config

PLAYED = "NIXL_OFFLOAD_PLAYED" in os.environ
"""Host memory plays the device: models are small."""


def write_llama(directory: Path, *, words: int, **sizes: int) -> Path:
    """As ``write_config``, with heads of 128 and a vocabulary of ``words``."""
    more = {"max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu"}
    return write_config(directory, head_dim=128, vocab_size=words, tie_word_embeddings=False, **sizes, **more)


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
    return made | own
