"""What comes out of ``benchmarks.long_documents``: the figures of a contender, who answered wrongly, and the table.

Threading: pure functions and frozen values.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.long_documents_sides import QUESTION_TOKENS, Sizes
from examples.demo.engine import Answer

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.25}
"""How far a logprob may be from the reference's: where a part of a document was cached, the last prefill step has
another shape, and the last bits differ. A wrong block of KV moves it by far more."""
SOURCES = {"device": "GPU", "host": "memory", "disk": "file"}
"""vLLM's names of what a hit was served from."""


@dataclass(frozen=True)
class Result:
    """What one contender made of one working set. Times in seconds; shares of all prompt tokens that were repeated."""

    documents: int
    contender: str
    first_ttft_mean_s: float
    """Of the first request about each document."""
    ttft_mean_s: float
    """Of the others: the median of the rounds' means."""
    ttft_p50_s: float
    ttft_p99_s: float
    requests_per_s: float
    """One at a time, background writes included: the median of the rounds."""
    prompt_tokens_per_s: float
    hits: dict[str, float]
    """Share by what served it."""
    requests: int
    same_answers: int
    """Of all requests: the same tokens as the reference, and logprobs within the tolerance."""
    logprob_difference: float
    """The largest, where the tokens are the same."""
    ttft_s: tuple[tuple[float, ...], ...]
    """Of each request, by round; the first requests first."""


def difference(answer: Answer, right: Answer) -> float | None:
    """The largest difference of logprobs. None: other tokens."""
    if answer.tokens != right.tokens:
        return None
    return max(abs(a - b) for a, b in zip(answer.logprobs, right.logprobs, strict=True))


def hits(answers: Sequence[Answer], prompt_tokens: int) -> dict[str, float]:
    """The share of all prompt tokens that each tier served, as vLLM counts cached tokens by source."""
    name, total = "vllm:prompt_tokens_cached_by_source:", prompt_tokens * len(answers)
    served: dict[str, float] = {}
    for answer in answers:
        for counter, moved in answer.counters.items():
            if counter.startswith(name) and moved:
                source = counter.removeprefix(name)
                tier = SOURCES.get(source, source)
                served[tier] = served.get(tier, 0.0) + moved / total
    return served


def problems(results: Sequence[Result]) -> list[str]:
    """Say in a sentence each who answered wrongly."""
    return [
        f"{r.contender}: {r.requests - r.same_answers} of {r.requests} answers about {r.documents} documents are not "
        "the reference's."
        for r in results
        if r.same_answers < r.requests
    ]


def about(sizes: Sizes, rounds: int, engine: Mapping[str, Any]) -> dict[str, str]:
    """What the figures depend on, in words. ``engine``: what an engine says of itself."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    processor = names[0] if names else platform.machine()
    document_bytes = sizes.document_tokens * sizes.token_bytes
    return {
        "machine": f"{os.cpu_count()} × {processor}, load {os.getloadavg()[0]:.1f} before; {engine['device'] or 'CPU'}",
        "engine": f"vLLM {engine['vllm']}, {sizes.shape.parameters() / 1e6:.0f} M parameters, {sizes.dtype}",
        "documents": f"{sizes.document_tokens} tokens ({document_bytes / 1e6:.0f} MB of KV), questions of "
        f"{QUESTION_TOKENS} tokens, {rounds} rounds after the first requests",
        "capacities": f"GPU cache {sizes.gpu_documents} documents ({sizes.gpu_bytes / 1e6:.0f} MB), memory "
        f"{sizes.memory_documents} ({sizes.memory_bytes / 1e6:.0f} MB), files {sizes.file_documents}",
    }


def table(results: Sequence[Result]) -> Table:
    """What a person reads."""
    shown = Table("documents", "kept in")
    for column in (
        "first ms",
        "mean ms",
        "p50",
        "p99",
        "requests/s",
        "tokens/s",
        "GPU",
        "memory",
        "file",
        "same answers",
    ):
        shown.add_column(column, justify="right")
    last = None
    for r in results:
        if last not in (None, r.documents):
            shown.add_section()
        last = r.documents
        times = (r.first_ttft_mean_s, r.ttft_mean_s, r.ttft_p50_s, r.ttft_p99_s)
        shown.add_row(
            str(r.documents),
            r.contender,
            *(f"{time_s * 1e3:,.0f}" for time_s in times),
            f"{r.requests_per_s:.2f}",
            f"{r.prompt_tokens_per_s:,.0f}",
            *(f"{100 * r.hits.get(tier, 0):.0f} %" for tier in SOURCES.values()),
            f"{r.same_answers} of {r.requests}",
        )
    return shown
