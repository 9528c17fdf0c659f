"""What the demo does and what it demands: serve, stop, start again on the same directory, serve again, compare.

Threading: one thread. Ownership: ``run`` owns the engines and a scratch directory and leaves neither behind; the KV
directory is the caller's. ``problems`` is pure: it judges a result, and is where "as it should be" is written down.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
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
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class DemoResult:
    """All that was measured. The lists of answers are in the order of the prompts."""

    device: str
    vllm: str
    parameters: int
    chunk_bytes: int
    """KV bytes of one chunk: what a stored chunk must at least hold."""
    cold: list[Answer]
    gpu_prefix_cache: list[Answer]
    files: list[Answer]
    stored_bytes: int
    loaded_bytes: int
    stored_in_second_engine_bytes: int
    settled: bool
    """Whether the first engine's stores came to rest before it was stopped."""
    directory_bytes: int
    """Disk space that the KV directory takes, header pages and index included."""

    @property
    def chunks(self) -> int:
        """Full chunks of all prompts."""
        return len(self.cold) * FULL_CHUNK_TOKENS // CHUNK_TOKENS


def run(
    shape: ModelShape, directory: Path, *, prompts: int, tokens: int, progress: Callable[[str], None]
) -> DemoResult:
    """Run the demo on ``directory``, which must be new or empty. Raises EngineError when an engine fails."""
    with tempfile.TemporaryDirectory(prefix="nixl-offload-demo-", ignore_cleanup_errors=True) as scratch:
        return _run(_Setting(shape, directory, Path(scratch), progress), prompts=prompts, tokens=tokens)


@dataclass(frozen=True, slots=True)
class _Setting:
    shape: ModelShape
    directory: Path
    scratch: Path
    progress: Callable[[str], None]


def _run(setting: _Setting, *, prompts: int, tokens: int) -> DemoResult:
    shape, directory, scratch, progress = setting.shape, setting.directory, setting.scratch, setting.progress
    progress(f"building a model of {shape.parameters() / 1e6:.0f} M parameters with random weights")
    model = write_model(scratch / "model", shape)
    asked = random_prompts(shape, [PROMPT_TOKENS] * prompts)
    warm_up = random_prompts(shape, [CHUNK_TOKENS - 1], seed=8)  # less than a chunk: nothing of it is stored

    dtype, item_bytes = _dtype()
    token_bytes = 2 * shape.layers * shape.kv_heads * shape.head_size * item_bytes
    chunk_bytes = CHUNK_TOKENS * token_bytes
    kv_bytes = prompts * (PROMPT_TOKENS + tokens) * token_bytes
    options: dict[str, Any] = {
        "dtype": dtype,
        "block_size": BLOCK_TOKENS,
        "max_model_len": PROMPT_TOKENS + tokens,
        "max_num_batched_tokens": STEP_TOKENS,
        "max_num_seqs": 4,
        "kv_cache_memory_bytes": 2 * kv_bytes + GIB // 4,
    }
    config = {
        "chunk_tokens": CHUNK_TOKENS,
        "tiers": [{"kind": "file", "path": str(directory), "capacity": f"{2 * kv_bytes // GIB + 1}GiB"}],
    }

    def start(number: int) -> Engine:
        progress(f"starting engine {number} (half a minute on a small machine)")
        return Engine(
            model,
            connector=config,
            log=scratch / f"engine-{number}.log",
            environment=quick_environment(scratch=scratch),
            **options,
        )

    def serve(engine: Engine, how: str) -> list[Answer]:
        answers = []
        for number, prompt in enumerate(asked, start=1):
            answers += engine.generate([prompt], max_tokens=tokens)
            progress(f"  prompt {number} of {prompts}, {how}: first token after {answers[-1].ttft_s * 1e3:.0f} ms")
        return answers

    with start(1) as engine:
        about = engine.about
        engine.generate(warm_up, max_tokens=tokens)
        cold = serve(engine, "cold")
        gpu_prefix_cache = serve(engine, "from GPU prefix cache")
        settled = engine.settle(deadline_s=60)
        stored_bytes = engine.stored_bytes()
        progress(f"stopping engine 1, which has stored {stored_bytes / 1e6:.0f} MB")
        engine.stop()
    with start(2) as engine:
        engine.generate(warm_up, max_tokens=tokens)
        files = serve(engine, "from files")
        engine.settle(deadline_s=60)
        stored_again = engine.stored_bytes()
        engine.stop()
    return DemoResult(
        device=about["device"],
        vllm=about["vllm"],
        parameters=shape.parameters(),
        chunk_bytes=chunk_bytes,
        cold=cold,
        gpu_prefix_cache=gpu_prefix_cache,
        files=files,
        stored_bytes=stored_bytes,
        loaded_bytes=sum(answer.loaded_bytes for answer in files),
        stored_in_second_engine_bytes=stored_again,
        settled=settled,
        directory_bytes=sum(path.stat().st_blocks * 512 for path in directory.rglob("*") if path.is_file()),
    )


def problems(result: DemoResult) -> list[str]:
    """Say in a sentence each what is not as it should be; empty when all is well."""
    found = []
    prompt_count, expected_bytes = len(result.cold), result.chunks * result.chunk_bytes
    if any(answer.cached_tokens for answer in result.cold):
        found.append("The cold run was not cold: some prompt tokens were already cached.")
    if any(answer.external_hit_tokens for answer in result.gpu_prefix_cache) or any(
        answer.cached_tokens != FULL_CHUNK_TOKENS for answer in result.gpu_prefix_cache
    ):
        found.append("The second pass was not served from the GPU prefix cache, so it is no reference.")
    if not result.settled:
        found.append("The first engine's stores did not come to rest within a minute.")
    if result.stored_bytes < expected_bytes:
        found.append(f"Only {result.stored_bytes} of {expected_bytes} bytes were stored.")
    for number, answer in enumerate(result.files, start=1):
        if answer.external_hit_tokens != FULL_CHUNK_TOKENS:
            found.append(
                f"The second engine took {answer.external_hit_tokens} of {FULL_CHUNK_TOKENS} tokens"
                f" of prompt {number} from files; it should have been every full chunk."
            )
    if result.loaded_bytes < expected_bytes:
        found.append(f"Only {result.loaded_bytes} of {expected_bytes} bytes were loaded.")
    if result.stored_in_second_engine_bytes:
        found.append(f"The second engine stored {result.stored_in_second_engine_bytes} bytes that were there already.")
    for name, answers in (("files", result.files), ("the GPU prefix cache", result.gpu_prefix_cache)):
        same_tokens = same(answers, result.cold, "tokens")
        same_logprobs = same(answers, result.cold, "logprobs")
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
