"""The model class behind ``model``: attention layers that are never called, and a forward pass that sleeps.

On a GPU its stream sleeps, elsewhere the thread. The KV cache is filled once with bytes that differ, so that copies
read real memory. Every answer is token 0.

Threading: vLLM's model runner calls it from one thread. Imported in vLLM's processes only.
"""

from __future__ import annotations

import functools
import time
from typing import Any

import torch
from torch import nn
from vllm import ModelRegistry
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention

from benchmarks.serving.model import ARCHITECTURE, VOCABULARY, Pace

CALIBRATION_CYCLES = 50_000_000
"""Some 30 ms."""


class SleepingForCausalLM(nn.Module):
    """Llama's interface to vLLM, without weights."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.pace = Pace(config.pace_step_s, config.pace_token_s)
        self.dtype: Any = vllm_config.model_config.dtype
        self.hidden_size = config.hidden_size
        self.attention = nn.ModuleList(
            Attention(
                config.num_attention_heads,
                config.head_dim,
                scale=1.0,
                num_kv_heads=config.num_key_value_heads,
                cache_config=vllm_config.cache_config,
                prefix=f"model.layers.{layer}.self_attn.attn",
            )
            for layer in range(config.num_hidden_layers)
        )
        self._is_filled = False

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return torch.zeros(input_ids.shape[0], self.hidden_size, dtype=self.dtype, device=input_ids.device)

    def forward(self, input_ids: Any, positions: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        tokens, device = positions.shape[-1], positions.device
        if not self._is_filled:
            self._fill()
        duration_s = self.pace.step_s + tokens * self.pace.token_s
        if device.type == "cuda":
            torch.cuda._sleep(round(duration_s * _cycles_per_s(device)))
        else:
            time.sleep(duration_s)
        return torch.zeros(tokens, self.hidden_size, dtype=self.dtype, device=device)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return torch.zeros(hidden_states.shape[0], VOCABULARY, device=hidden_states.device)

    def load_weights(self, weights: Any) -> set[str]:
        return {name for name, _ in self.named_parameters()}

    def _fill(self) -> None:
        """Write to the whole KV cache: Linux backs pages that were never written with one page of zeros."""
        for layer in self.attention:
            cache: Any = layer.kv_cache
            for tensor in cache if isinstance(cache, (list, tuple)) else [cache]:
                if not tensor.numel():
                    return
                for block in range(tensor.shape[0]):
                    tensor[block].fill_(float(block % 251))
        self._is_filled = True


@functools.cache
def _cycles_per_s(device: torch.device) -> float:
    """Return how many cycles of ``torch.cuda._sleep`` make a second; waits for the device, once."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(CALIBRATION_CYCLES)  # brings the clock up
    begin.record()
    torch.cuda._sleep(CALIBRATION_CYCLES)
    end.record()
    end.synchronize()
    return CALIBRATION_CYCLES / begin.elapsed_time(end) * 1000


def register() -> None:
    """Make the model known. The entry point of the plugin."""
    if ARCHITECTURE not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(ARCHITECTURE, SleepingForCausalLM)
