"""How the demo's result is shown: a table for people, a dictionary for ``--json``.

Threading: pure functions.
"""

from __future__ import annotations

from typing import Any

from rich.table import Table

from examples.demo.engine import Answer
from examples.demo.run import CHUNK_TOKENS, FULL_CHUNK_TOKENS, PROMPT_TOKENS, DemoResult, median_ttft_s, problems, same


def as_table(result: DemoResult) -> Table:
    """One row for each way that the prompts were served."""
    table = Table(
        title=f"{len(result.cold)} prompts of {PROMPT_TOKENS} tokens, "
        f"{result.parameters / 1e6:.0f} M parameters, vLLM {result.vllm} on {result.device or 'this device'}",
        caption=f"stored {_megabytes(result.stored_bytes)} in {result.chunks} chunks of {CHUNK_TOKENS} tokens, "
        f"loaded {_megabytes(result.loaded_bytes)} after a restart; "
        f"the directory takes {_megabytes(result.directory_bytes)}",
    )
    table.add_column("served")
    for column in ("first token, median", "hit tokens", "bytes loaded", "same tokens", "same logprobs"):
        table.add_column(column, justify="right")
    for name, answers in (
        ("cold (computed)", result.cold),
        ("from files, new engine", result.files),
        ("from GPU prefix cache", result.gpu_prefix_cache),
    ):
        reference = answers is result.cold
        table.add_row(
            name,
            f"{median_ttft_s(answers) * 1e3:.0f} ms",
            f"{_hits(answers)} of {FULL_CHUNK_TOKENS * len(answers)}",
            _megabytes(sum(answer.loaded_bytes for answer in answers)),
            "reference" if reference else _of(same(answers, result.cold, "tokens"), answers),
            "reference" if reference else _of(same(answers, result.cold, "logprobs"), answers),
        )
    return table


def as_json(result: DemoResult) -> dict[str, Any]:
    """Everything in the table, times per prompt too, and what is wrong. Seconds and bytes."""
    found = problems(result)
    return {
        "ok": not found,
        "problems": found,
        "vllm": result.vllm,
        "device": result.device,
        "model_parameters": result.parameters,
        "prompt_tokens": PROMPT_TOKENS,
        "chunk_tokens": CHUNK_TOKENS,
        "chunks": result.chunks,
        "stored_bytes": result.stored_bytes,
        "loaded_bytes": result.loaded_bytes,
        "directory_bytes": result.directory_bytes,
        "passes": {
            name: {
                "ttft_median_s": median_ttft_s(answers),
                "ttft_s": [answer.ttft_s for answer in answers],
                "hit_tokens": _hits(answers),
                "hit_tokens_expected": 0 if answers is result.cold else FULL_CHUNK_TOKENS * len(answers),
                "external_hit_tokens": sum(answer.external_hit_tokens for answer in answers),
                "tokens_identical": same(answers, result.cold, "tokens") == len(answers),
                "logprobs_identical": same(answers, result.cold, "logprobs") == len(answers),
            }
            for name, answers in (
                ("cold", result.cold),
                ("files", result.files),
                ("gpu_prefix_cache", result.gpu_prefix_cache),
            )
        },
    }


def _hits(answers: list[Answer]) -> int:
    return sum(answer.cached_tokens for answer in answers)


def _of(count: int, answers: list[Answer]) -> str:
    return f"{count} of {len(answers)}"


def _megabytes(count_bytes: int) -> str:
    return f"{count_bytes / 1e6:.0f} MB"
