"""How a result is shown: a table for people, a dictionary for ``--json``.

Threading: pure functions.
"""

from __future__ import annotations

from typing import Any

from rich.table import Table

from examples.demo.engine import Answer
from examples.demo.handover import (
    CHUNK_TOKENS,
    FULL_CHUNK_TOKENS,
    PROMPT_TOKENS,
    Handover,
    median_ttft_s,
    problems,
    same,
)
from examples.demo.run import Result

TITLES = {
    "cold": "cold (computed)",
    "files": "from files, after a restart",
    "S3": "from S3, another engine",
    "gpu_prefix_cache": "from GPU prefix cache",
}


def as_table(result: Result) -> Table:
    """Return a row for each way that the prompts were served."""
    handover, device = result.handover, result.about["device"] or "this device"
    cold = handover.first.cold
    table = Table(
        title=f"{len(cold)} prompts of {PROMPT_TOKENS} tokens, "
        f"{result.parameters / 1e6:.0f} M parameters, vLLM {result.about['vllm']} on {device}",
        caption=f"stored {_megabytes(handover.first.stored_bytes)} in {handover.chunks} chunks of {CHUNK_TOKENS} "
        f"tokens, loaded {_megabytes(handover.loaded_bytes)} by a new engine; the storage takes "
        f"{_megabytes(result.held_bytes)}",
    )
    table.add_column("served")
    for column in ("first token, median", "hit tokens", "bytes loaded", "same tokens", "same logprobs"):
        table.add_column(column, justify="right")
    for name, answers in _passes(handover).items():
        count = len(answers)
        agreeing = [f"{same(answers, cold, what)} of {count}" for what in ("tokens", "logprobs")]
        table.add_row(
            TITLES[name],
            f"{median_ttft_s(answers) * 1e3:.0f} ms",
            f"{_hits(answers)} of {FULL_CHUNK_TOKENS * count}",
            _megabytes(sum(answer.loaded_bytes for answer in answers)),
            *(["reference"] * 2 if answers is cold else agreeing),
        )
    return table


def as_json(result: Result) -> dict[str, Any]:
    """Return everything in the table, times per prompt too, and what is wrong. Seconds and bytes."""
    handover, found = result.handover, problems(result.handover)
    cold = handover.first.cold
    return {
        "ok": not found,
        "problems": found,
        "vllm": result.about["vllm"],
        "device": result.about["device"],
        "model_parameters": result.parameters,
        "prompt_tokens": PROMPT_TOKENS,
        "chunk_tokens": CHUNK_TOKENS,
        "chunks": handover.chunks,
        "stored_bytes": handover.first.stored_bytes,
        "loaded_bytes": handover.loaded_bytes,
        "held_bytes": result.held_bytes,
        "passes": {
            name: {
                "ttft_median_s": median_ttft_s(answers),
                "ttft_s": [answer.ttft_s for answer in answers],
                "hit_tokens": _hits(answers),
                "hit_tokens_expected": 0 if answers is cold else FULL_CHUNK_TOKENS * len(answers),
                "external_hit_tokens": sum(answer.external_hit_tokens for answer in answers),
                "tokens_identical": same(answers, cold, "tokens") == len(answers),
                "logprobs_identical": same(answers, cold, "logprobs") == len(answers),
            }
            for name, answers in _passes(handover).items()
        },
    }


def _passes(handover: Handover) -> dict[str, list[Answer]]:
    first = handover.first
    return {"cold": first.cold, handover.place: handover.taken, "gpu_prefix_cache": first.gpu_prefix_cache}


def _megabytes(count_bytes: int) -> str:
    return f"{count_bytes / 1e6:.0f} MB"


def _hits(answers: list[Answer]) -> int:
    return sum(answer.cached_tokens for answer in answers)
