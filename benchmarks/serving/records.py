"""What is measured: a record of each request, what the engine counted meanwhile, and what follows from both.

Threading: frozen values and pure functions.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Record:
    """One answered request. Seconds; ``sent_s`` since the first request of the run."""

    session: int
    turn: int
    prompt_tokens: int
    repeated_tokens: int
    """Of the prompt, seen before in this run: the most that a cache can hit."""
    cached_tokens: int
    """Of the prompt, not computed: from vLLM's prefix cache or from the connector."""
    sent_s: float
    ttft_s: float
    gaps_s: tuple[float, ...]
    """Between one token of the answer and the next, as the server's frontend saw them."""

    @property
    def ended_s(self) -> float:
        return self.sent_s + self.ttft_s + sum(self.gaps_s)


@dataclass(frozen=True)
class Run:
    """One side, once through the workload, in processes of its own."""

    side: str
    round: int
    records: tuple[Record, ...]
    processor_s: float
    """Of all processes of the engine, from the first request until a second after the last answer."""
    loaded_bytes: int
    """By the connector, into the KV cache."""
    stored_bytes: int
    """By the connector, out of the KV cache."""
    external_tokens: int
    """Prompt tokens that came from the connector."""
    load_before: float
    """The machine's load average when the run began."""
    start_s: float
    """How long the engine took to start. Not part of anything else."""

    def as_json(self) -> dict[str, Any]:
        """Plain values; ``from_json`` reads them."""
        return asdict(self)

    @staticmethod
    def from_json(told: Mapping[str, Any]) -> Run:
        """Read what ``as_json`` wrote."""
        records = tuple(Record(**{**record, "gaps_s": tuple(record["gaps_s"])}) for record in told["records"])
        return Run(**{**told, "records": records})


@dataclass(frozen=True)
class Figures:
    """What is reported of a run, or the medians of several. Times in seconds; NaN: nothing was measured."""

    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    later_ttft_mean_s: float
    """Of the requests that could hit: later turns, known prefixes."""
    later_ttft_p50_s: float
    later_ttft_p99_s: float
    gap_p50_s: float
    """Inter-token latency."""
    gap_p99_s: float
    requests_per_s: float
    hit_rate: float
    """Cached tokens, of all prompt tokens."""
    possible_hit_rate: float
    """Repeated tokens, of all prompt tokens: what a cache without limits would reach."""
    external_rate: float
    """Tokens that the connector brought, of all prompt tokens."""
    processor_s: float
    loaded_bytes: float
    stored_bytes: float


def percentile(values: Sequence[float], percent: float) -> float:
    """By linear interpolation; NaN of nothing."""
    return float(np.percentile(values, percent)) if len(values) else float("nan")


def mean(values: Sequence[float]) -> float:
    """NaN of nothing."""
    return statistics.fmean(values) if len(values) else float("nan")


def figures(run: Run) -> Figures:
    """What a run comes to. ValueError: it has no records."""
    if not run.records:
        raise ValueError(f"{run.side} answered nothing")
    ttfts = [record.ttft_s for record in run.records]
    later = [record.ttft_s for record in run.records if record.repeated_tokens]
    gaps = [gap for record in run.records for gap in record.gaps_s]
    took_s = max(record.ended_s for record in run.records) - min(record.sent_s for record in run.records)
    prompts = sum(record.prompt_tokens for record in run.records)
    return Figures(
        ttft_mean_s=mean(ttfts),
        ttft_p50_s=percentile(ttfts, 50),
        ttft_p99_s=percentile(ttfts, 99),
        later_ttft_mean_s=mean(later),
        later_ttft_p50_s=percentile(later, 50),
        later_ttft_p99_s=percentile(later, 99),
        gap_p50_s=percentile(gaps, 50),
        gap_p99_s=percentile(gaps, 99),
        requests_per_s=len(run.records) / took_s,
        hit_rate=sum(record.cached_tokens for record in run.records) / prompts,
        possible_hit_rate=sum(record.repeated_tokens for record in run.records) / prompts,
        external_rate=run.external_tokens / prompts,
        processor_s=run.processor_s,
        loaded_bytes=run.loaded_bytes,
        stored_bytes=run.stored_bytes,
    )


def medians(rounds: Sequence[Figures]) -> Figures:
    """Of every figure by itself. ValueError: of nothing."""
    if not rounds:
        raise ValueError("no rounds")
    names = [field.name for field in fields(Figures)]
    return Figures(**{name: statistics.median(getattr(of, name) for of in rounds) for name in names})


def ratios(of: Sequence[Figures], base: Sequence[Figures], name: str) -> float:
    """The median of a figure's ratios to the base's, round by round; NaN where the base's is zero or missing."""
    found = [
        getattr(one, name) / getattr(other, name)
        for one, other in zip(of, base, strict=False)
        if getattr(other, name) and not math.isnan(getattr(one, name))
    ]
    return statistics.median(found) if found else float("nan")
