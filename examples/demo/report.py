"""How a result is shown: a table for people, a dictionary for ``--json``. The rows serve both demos.

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
from examples.demo.run import DemoResult


def as_table(result: DemoResult) -> Table:
    """One row for each way that the prompts were served."""
    handover = result.handover
    table = empty_table(
        len(handover.first.cold),
        result.parameters,
        result.vllm,
        result.device,
        caption=f"stored {megabytes(handover.first.stored_bytes)} in {handover.chunks} chunks "
        f"of {CHUNK_TOKENS} tokens, "
        f"loaded {megabytes(handover.loaded_bytes)} after a restart; "
        f"the directory takes {megabytes(result.directory_bytes)}",
    )
    cold = handover.first.cold
    add_row(table, "cold (computed)", cold, cold)
    add_row(table, "from files, new engine", handover.taken, cold)
    add_row(table, "from GPU prefix cache", handover.first.gpu_prefix_cache, cold)
    return table


def as_json(result: DemoResult) -> dict[str, Any]:
    """Everything in the table, times per prompt too, and what is wrong. Seconds and bytes."""
    found = problems(result.handover)
    return {
        "ok": not found,
        "problems": found,
        "vllm": result.vllm,
        "device": result.device,
        "model_parameters": result.parameters,
        "prompt_tokens": PROMPT_TOKENS,
        "chunk_tokens": CHUNK_TOKENS,
        **handover_json(result.handover, "files"),
        "directory_bytes": result.directory_bytes,
    }


def empty_table(prompts: int, parameters: int, vllm: str, device: str, *, caption: str) -> Table:
    """A table without rows; see ``add_row``."""
    table = Table(
        title=f"{prompts} prompts of {PROMPT_TOKENS} tokens, "
        f"{parameters / 1e6:.0f} M parameters, vLLM {vllm} on {device or 'this device'}",
        caption=caption,
    )
    table.add_column("served")
    for column in ("first token, median", "hit tokens", "bytes loaded", "same tokens", "same logprobs"):
        table.add_column(column, justify="right")
    return table


def add_row(table: Table, name: str, answers: list[Answer], reference: list[Answer]) -> None:
    """Add a row for one pass over the prompts, compared with ``reference`` (unless it is the reference)."""
    is_reference = answers is reference
    table.add_row(
        name,
        f"{median_ttft_s(answers) * 1e3:.0f} ms",
        f"{_hits(answers)} of {FULL_CHUNK_TOKENS * len(answers)}",
        megabytes(sum(answer.loaded_bytes for answer in answers)),
        "reference" if is_reference else _of(same(answers, reference, "tokens"), answers),
        "reference" if is_reference else _of(same(answers, reference, "logprobs"), answers),
    )


def handover_json(handover: Handover, name: str) -> dict[str, Any]:
    """What was stored and loaded, and each pass; the second engine's is called ``name``."""
    cold = handover.first.cold
    return {
        "chunks": handover.chunks,
        "stored_bytes": handover.first.stored_bytes,
        "stored_tokens": handover.stored_tokens,
        "loaded_bytes": handover.loaded_bytes,
        "passes": {
            pass_name: {
                "ttft_median_s": median_ttft_s(answers),
                "ttft_s": [answer.ttft_s for answer in answers],
                "hit_tokens": _hits(answers),
                "hit_tokens_expected": 0 if answers is cold else FULL_CHUNK_TOKENS * len(answers),
                "external_hit_tokens": sum(answer.external_hit_tokens for answer in answers),
                "tokens_identical": same(answers, cold, "tokens") == len(answers),
                "logprobs_identical": same(answers, cold, "logprobs") == len(answers),
            }
            for pass_name, answers in (
                ("cold", cold),
                (name, handover.taken),
                ("gpu_prefix_cache", handover.first.gpu_prefix_cache),
            )
        },
    }


def megabytes(count_bytes: int) -> str:
    """Bytes for people."""
    return f"{count_bytes / 1e6:.0f} MB"


def _hits(answers: list[Answer]) -> int:
    return sum(answer.cached_tokens for answer in answers)


def _of(count: int, answers: list[Answer]) -> str:
    return f"{count} of {len(answers)}"
