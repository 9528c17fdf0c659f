"""What plays the GPU in vLLM's processes: a model that only takes time, and copies over a bus.

The model's attention layers are never called, and its forward pass sleeps. Every answer is token 0. Copies are made by
a thread, or by the clock: then they take ``bytes / rate`` and no processor time, and their bytes are not moved. Ours
and vLLM's connectors use the same engines by the clock, one for each direction.

Threading: vLLM's model runner calls the model from one thread. A copy engine is used by one thread, and has at most one
of its own, which ends with the process.
"""

from __future__ import annotations

import ctypes
import math
import os
import queue
import threading
import time
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from vllm import ModelRegistry
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention

from benchmarks.serving.model import ARCHITECTURE, RATE, VOCABULARY, Pace
from nixl_offload.engine import paths
from nixl_offload.engine.packer import HostPacker, Parts, Summed
from nixl_offload.engine.streams import Fence

POLL_S = 0.0002
Plan = npt.NDArray[np.int64]
"""Rows of (to, from, bytes)."""


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
        return torch.zeros(input_ids.shape[0], self.hidden_size, dtype=self.dtype)

    def forward(self, input_ids: Any, positions: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        tokens = positions.shape[-1]
        if not self._is_filled:
            self._fill()
        time.sleep(self.pace.step_s + tokens * self.pace.token_s)
        return torch.zeros(tokens, self.hidden_size, dtype=self.dtype)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return torch.zeros(hidden_states.shape[0], VOCABULARY)

    def load_weights(self, weights: Any) -> set[str]:
        return {name for name, _ in self.named_parameters()}

    def _fill(self) -> None:
        """Write to the whole KV cache: Linux backs pages that were never written with one page of zeros."""
        for layer in self.attention:
            for block, memory in enumerate(layer.kv_cache):
                memory.fill_(float(block % 251))
        self._is_filled = len(self.attention[0].kv_cache) > 0


class Copy:
    """A copy under way, with the names of a CUDA event's methods."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.begin_s = time.perf_counter()
        self.end_s = math.inf if size_bytes else 0.0

    def query(self) -> bool:
        """Return whether it is over."""
        return time.perf_counter() >= self.end_s

    done = query

    def synchronize(self) -> None:
        """Wait for its end."""
        while not self.query():
            time.sleep(POLL_S)


class CopyEngine:
    """Copies in one direction, one after the other."""

    def __init__(self) -> None:
        self._rate = float(os.environ.get(RATE) or 0)
        self._free_s = 0.0
        self._jobs: queue.SimpleQueue[tuple[Plan, Copy]] = queue.SimpleQueue()
        if not self._rate:
            threading.Thread(target=self._run, name="played-copies", daemon=True).start()

    def start(self, plan: Plan) -> Copy:
        """Begin the copies of a plan."""
        copy = Copy(int(plan[:, 2].sum()))
        if self._rate:
            self._free_s = copy.end_s = max(self._free_s, copy.begin_s) + copy.size_bytes / self._rate
        else:
            self._jobs.put((plan, copy))
        return copy

    def _run(self) -> None:
        while True:
            plan, copy = self._jobs.get()
            copy.begin_s = time.perf_counter()
            for to, source, size_bytes in plan.tolist():
                ctypes.memmove(to, source, size_bytes)  # lets go of the interpreter
            copy.end_s = time.perf_counter()


class ClockedPacker(HostPacker):
    """Our packer by the clock. Checksums are those of what lies in the slots."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._out, self._in = CopyEngine(), CopyEngine()

    def gather_many(self, group: int, parts: Parts, fence: Fence) -> Summed:
        return Summed(self._out.start(self._plan(group, parts)), [rows for _, rows in parts])

    def scatter_many(self, group: int, parts: Parts, fence: Fence) -> Fence:
        return self._in.start(self._plan(group, parts))

    def _plan(self, group: int, parts: Parts) -> Plan:
        ids = np.concatenate([block_ids for block_ids, _ in parts]).astype(np.int64)
        return np.stack([ids, ids, np.full(len(ids), self.block_bytes[group])], axis=1)


def register() -> None:
    """Make the model known, and let ours copy by the clock if there is a rate. The entry point of the plugin."""
    if ARCHITECTURE not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(ARCHITECTURE, SleepingForCausalLM)
    if os.environ.get(RATE):
        paths.make_packer = lambda tensors, pages, _: ClockedPacker(
            [tensor.view(torch.uint8).numpy() for tensor in tensors], pages
        )
