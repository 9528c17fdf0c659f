"""The parts of the demo: an engine that computes prompts and stores them, one that takes them over, and the verdict.

Threading: one thread. Ownership: the caller ends engines; the scratch directory is the caller's. ``problems`` is pure:
it judges a handover, and says what is "as it should be".
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.demo.engine import Answer, Engine, quick_environment
from examples.demo.model import ModelShape, random_prompts, write_model

CHUNK_TOKENS = 256
BLOCK_TOKENS = 64
STEP_TOKENS = 512
"""Tokens per prefill step. Prompts are whole steps and a tail shorter than a block: the last step then has the same
shape whether the rest is computed, cached or loaded, so that logprobs can be compared bit by bit."""
STEPS = 7
TAIL_TOKENS = 50
FULL_CHUNK_TOKENS = STEPS * STEP_TOKENS
PROMPT_TOKENS = FULL_CHUNK_TOKENS + TAIL_TOKENS
SETTLE_S = 60.0
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Computed:
    """What the first engine did. The lists of answers are in the order of the prompts."""

    cold: list[Answer]
    gpu_prefix_cache: list[Answer]
    stored_bytes: int
    settled: bool
    """Whether its stores came to rest."""


@dataclass(frozen=True, slots=True)
class Handover:
    """What the first engine computed and the second one took over."""

    place: str
    """Where it was taken from, in words."""
    chunk_bytes: int
    """KV bytes of one chunk."""
    first: Computed
    taken: list[Answer]
    """The second engine's answers, in the order of the prompts."""
    stored_again_bytes: int
    """What the second engine stored, which had nothing new to store."""

    @property
    def chunks(self) -> int:
        """Full chunks of all prompts."""
        return len(self.first.cold) * FULL_CHUNK_TOKENS // CHUNK_TOKENS

    @property
    def loaded_bytes(self) -> int:
        """Bytes that the second engine loaded."""
        return sum(answer.loaded_bytes for answer in self.taken)


class Stage:
    """A model made on the spot, prompts, and engines of one shape."""

    def __init__(
        self, shape: ModelShape, scratch: Path, *, prompts: int, tokens: int, progress: Callable[[str], None]
    ) -> None:
        """Write the model to ``scratch``. OSError: no room."""
        self.shape, self.tokens = shape, tokens
        self._scratch, self._progress = scratch, progress
        progress(f"building a model of {shape.parameters() / 1e6:.0f} M parameters with random weights")
        self._model = write_model(scratch / "model", shape)
        self._prompts = random_prompts(shape, [PROMPT_TOKENS] * prompts)
        self._warm_up = random_prompts(shape, [CHUNK_TOKENS - 1], seed=8)  # less than a chunk: nothing is stored
        self._dtype, item_bytes = _dtype()
        token_bytes = 2 * shape.layers * shape.kv_heads * shape.head_size * item_bytes
        self.chunk_bytes = CHUNK_TOKENS * token_bytes
        self.kv_bytes = prompts * (PROMPT_TOKENS + tokens) * token_bytes
        """KV bytes of all prompts and answers."""

    @property
    def capacity(self) -> str:
        """More than enough for everything, as the config says it."""
        return f"{2 * self.kv_bytes // GIB + 1}GiB"

    def start(self, number: int, tier: Mapping[str, Any], environment: Mapping[str, str]) -> Engine:
        """Start an engine with one tier and wait for it. Raises EngineError. ``number`` is for people."""
        self._progress(f"starting engine {number} (half a minute on a small machine)")
        return Engine(
            self._model,
            connector={"chunk_tokens": CHUNK_TOKENS, "slow_hits": "take", "tiers": [dict(tier)]},
            log=self._scratch / f"engine-{number}.log",
            environment={**quick_environment(scratch=self._scratch), **environment},
            dtype=self._dtype,
            block_size=BLOCK_TOKENS,
            max_model_len=PROMPT_TOKENS + self.tokens,
            max_num_batched_tokens=STEP_TOKENS,
            max_num_seqs=4,
            kv_cache_memory_bytes=2 * self.kv_bytes + GIB // 4,
        )

    def compute(self, engine: Engine) -> Computed:
        """Let a new engine compute the prompts, answer them again, and store. Raises EngineError."""
        self._generate(engine, self._warm_up)
        cold = self._serve(engine, "cold")
        gpu_prefix_cache = self._serve(engine, "from GPU prefix cache")
        settled = engine.settle(deadline_s=SETTLE_S)
        return Computed(cold, gpu_prefix_cache, engine.stored_bytes(), settled)

    def take_over(self, engine: Engine, first: Computed, place: str) -> Handover:
        """Let another new engine answer the same prompts. Raises EngineError."""
        self._generate(engine, self._warm_up)
        taken = self._serve(engine, f"from {place}")
        engine.settle(deadline_s=SETTLE_S)
        return Handover(place, self.chunk_bytes, first, taken, engine.stored_bytes())

    def _serve(self, engine: Engine, how: str) -> list[Answer]:
        answers = []
        for number, prompt in enumerate(self._prompts, start=1):
            answers += self._generate(engine, [prompt])
            ttft_ms = answers[-1].ttft_s * 1e3
            self._progress(f"  prompt {number} of {len(self._prompts)}, {how}: first token after {ttft_ms:.0f} ms")
        return answers

    def _generate(self, engine: Engine, prompts: list[list[int]]) -> list[Answer]:
        return engine.generate(prompts, max_tokens=self.tokens)


def problems(handover: Handover) -> list[str]:
    """Say in a sentence each what is not as it should be; empty when all is well."""
    found = []
    first, taken, place = handover.first, handover.taken, handover.place
    prompt_count, expected_bytes = len(first.cold), handover.chunks * handover.chunk_bytes
    if any(answer.cached_tokens for answer in first.cold):
        found.append("The cold run was not cold: some prompt tokens were already cached.")
    if any(answer.external_hit_tokens for answer in first.gpu_prefix_cache) or any(
        answer.cached_tokens != FULL_CHUNK_TOKENS for answer in first.gpu_prefix_cache
    ):
        found.append("The second pass was not served from the GPU prefix cache, so it is no reference.")
    if not first.settled:
        found.append(f"The first engine's stores did not come to rest within {SETTLE_S:.0f} s.")
    if first.stored_bytes != expected_bytes:
        found.append(f"The first engine stored {first.stored_bytes} bytes; it should have been {expected_bytes}.")
    for number, answer in enumerate(taken, start=1):
        if answer.external_hit_tokens != FULL_CHUNK_TOKENS:
            found.append(
                f"The second engine took {answer.external_hit_tokens} of {FULL_CHUNK_TOKENS} tokens"
                f" of prompt {number} from {place}; it should have been every full chunk."
            )
    if handover.loaded_bytes < expected_bytes:
        found.append(f"The second engine loaded {handover.loaded_bytes} of {expected_bytes} bytes from {place}.")
    if handover.stored_again_bytes:
        found.append(f"The second engine stored {handover.stored_again_bytes} bytes that were there already.")
    for name, answers in ((place, taken), ("the GPU prefix cache", first.gpu_prefix_cache)):
        same_tokens = same(answers, first.cold, "tokens")
        same_logprobs = same(answers, first.cold, "logprobs")
        if same_tokens < prompt_count:
            found.append(f"{prompt_count - same_tokens} prompts got other tokens from {name} than cold.")
        if same_logprobs < prompt_count:
            found.append(f"{prompt_count - same_logprobs} prompts got other logprobs from {name} than cold.")
    return found


def same(answers: list[Answer], reference: list[Answer], what: str) -> int:
    """How many answers have the same ``what`` ("tokens" or "logprobs", bit by bit) as their reference."""
    return sum(getattr(a, what) == getattr(b, what) for a, b in zip(answers, reference, strict=True))


def median_ttft_s(answers: list[Answer]) -> float:
    """Median time to first token, in seconds."""
    return statistics.median(answer.ttft_s for answer in answers)


def _dtype() -> tuple[str, int]:
    """Element type and its size in bytes: bfloat16 on a GPU; float32 on a CPU, because not all are good at bfloat16."""
    import torch

    return ("bfloat16", 2) if torch.cuda.is_available() else ("float32", 4)
