"""What is measured of serving, what follows from it, and the table that a person reads.

Threading: frozen values and pure functions.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from benchmarks import tables
from benchmarks.serving.sides import BASE, NOTES


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

    @staticmethod
    def of(values: Mapping[str, Any]) -> Run:
        """Return the run of what ``dataclasses.asdict`` and JSON have made of it."""
        records = tuple(Record(**{**record, "gaps_s": tuple(record["gaps_s"])}) for record in values["records"])
        return Run(**{**values, "records": records})


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


def figures(run: Run) -> Figures:
    """Return what a run comes to. ValueError: it has no records."""
    if not run.records:
        raise ValueError(f"{run.side} answered nothing")
    ttfts = [record.ttft_s for record in run.records]
    later = [record.ttft_s for record in run.records if record.repeated_tokens]
    gaps = [gap for record in run.records for gap in record.gaps_s]
    ended_s = max(record.sent_s + record.ttft_s + sum(record.gaps_s) for record in run.records)
    prompts = sum(record.prompt_tokens for record in run.records)
    return Figures(
        ttft_mean_s=_mean(ttfts),
        ttft_p50_s=_percentile(ttfts, 50),
        ttft_p99_s=_percentile(ttfts, 99),
        later_ttft_mean_s=_mean(later),
        later_ttft_p50_s=_percentile(later, 50),
        later_ttft_p99_s=_percentile(later, 99),
        gap_p50_s=_percentile(gaps, 50),
        gap_p99_s=_percentile(gaps, 99),
        requests_per_s=len(run.records) / (ended_s - min(record.sent_s for record in run.records)),
        hit_rate=sum(record.cached_tokens for record in run.records) / prompts,
        possible_hit_rate=sum(record.repeated_tokens for record in run.records) / prompts,
        external_rate=run.external_tokens / prompts,
        processor_s=run.processor_s,
        loaded_bytes=run.loaded_bytes,
        stored_bytes=run.stored_bytes,
    )


def medians(rounds: Sequence[Figures]) -> Figures:
    """Return the median of every figure by itself."""
    return Figures(
        **{each.name: statistics.median(getattr(of, each.name) for of in rounds) for each in fields(Figures)}
    )


def ratio(runs: Sequence[Run], side: str, name: str) -> float:
    """Return the median of a figure's ratios to ``BASE``'s, over the rounds that both have run; NaN if none."""
    base = {run.round: getattr(figures(run), name) for run in runs if run.side == BASE}
    found = [
        getattr(figures(run), name) / base[run.round] for run in runs if run.side == side and base.get(run.round, 0.0)
    ]
    return statistics.median(found) if found else float("nan")


COLUMNS: dict[str, Callable[[Figures], str]] = {
    "TTFT mean ms": lambda of: tables.number(of.ttft_mean_s * 1e3, ",.0f"),
    "p50": lambda of: tables.number(of.ttft_p50_s * 1e3, ",.0f"),
    "p99": lambda of: tables.number(of.ttft_p99_s * 1e3, ",.0f"),
    "later mean": lambda of: tables.number(of.later_ttft_mean_s * 1e3, ",.0f"),
    "later p50": lambda of: tables.number(of.later_ttft_p50_s * 1e3, ",.0f"),
    "later p99": lambda of: tables.number(of.later_ttft_p99_s * 1e3, ",.0f"),
    "ITL p50": lambda of: tables.number(of.gap_p50_s * 1e3, ",.1f"),
    "ITL p99": lambda of: tables.number(of.gap_p99_s * 1e3, ",.1f"),
    "requests/s": lambda of: f"{of.requests_per_s:.3f}",
    "hits": lambda of: f"{100 * of.hit_rate:.0f} %",
    "connector": lambda of: f"{100 * of.external_rate:.0f} %",
    "CPU s": lambda of: f"{of.processor_s:.1f}",
    "loaded GB": lambda of: f"{of.loaded_bytes / 1e9:.2f}",
    "stored GB": lambda of: f"{of.stored_bytes / 1e9:.2f}",
}
RATIOS = {"TTFT": "ttft_mean_s", "later TTFT": "later_ttft_mean_s", "ITL p50": "gap_p50_s", "req/s": "requests_per_s"}
"""Columns of ratios to ``BASE``, and the figures that they compare."""
LEGEND = (
    "Medians over rounds. TTFT and inter-token latency (ITL) in ms, as a client of the engine sees them. later: "
    "requests whose prompt begins with something seen before. hits: cached tokens of all prompt tokens; connector: "
    "those it brought. CPU s: of all the engine's processes, until a second after the last answer. Ratios: to vLLM's "
    "prefix cache alone in the same round. Without --model the model only takes time: a step sleeps, nothing is "
    "computed, and vLLM's own work adds to the step. Without CUDA, copies that a GPU's copy engine would make take "
    "processor time, ours and vLLM's alike."
)


def table(runs: Sequence[Run]) -> str:
    """Return a row for each side of one workload."""
    heading = ["side", *COLUMNS, *(f"× {name}" for name in RATIOS), "load"]
    rows = []
    for side in NOTES:
        mine = [run for run in runs if run.side == side]
        if not mine:
            continue
        shown, loads = medians([figures(run) for run in mine]), [run.load_before for run in mine]
        ratios = [tables.number(ratio(runs, side, name), ".2f") for name in RATIOS.values()]
        cells = [cell(shown) for cell in COLUMNS.values()]
        rows.append([side, *cells, *ratios, f"{min(loads):.1f}–{max(loads):.1f}"])
    return tables.table(heading, rows)


def _percentile(values: Sequence[float], percent: float) -> float:
    return float(np.percentile(values, percent)) if values else float("nan")


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else float("nan")
