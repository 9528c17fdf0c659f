"""What is measured of serving, what follows from it, and the table that a person reads.

Threading: frozen values and pure functions.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
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

    def ttfts_ms(self, *, later: bool = False) -> list[float]:
        """Return times to first tokens. ``later``: of the requests that could hit: later turns, known prefixes."""
        return [record.ttft_s * 1e3 for record in self.records if record.repeated_tokens or not later]

    def gaps_ms(self) -> list[float]:
        """Return inter-token latencies."""
        return [gap * 1e3 for record in self.records for gap in record.gaps_s]

    def requests_per_s(self) -> float:
        """From the first request to the last token."""
        ended_s = max(record.sent_s + record.ttft_s + sum(record.gaps_s) for record in self.records)
        return len(self.records) / (ended_s - min(record.sent_s for record in self.records))

    def percent_of_prompts(self, tokens: int) -> float:
        """Return a number of tokens as a percentage of all prompt tokens."""
        return 100 * tokens / sum(record.prompt_tokens for record in self.records)


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else float("nan")


def _percentile(values: Sequence[float], percent: float) -> float:
    return float(np.percentile(values, percent)) if values else float("nan")


FIGURES: dict[str, tuple[Callable[[Run], float], str]] = {
    "TTFT mean ms": (lambda run: _mean(run.ttfts_ms()), ",.0f"),
    "p50": (lambda run: _percentile(run.ttfts_ms(), 50), ",.0f"),
    "p99": (lambda run: _percentile(run.ttfts_ms(), 99), ",.0f"),
    "later mean": (lambda run: _mean(run.ttfts_ms(later=True)), ",.0f"),
    "later p50": (lambda run: _percentile(run.ttfts_ms(later=True), 50), ",.0f"),
    "later p99": (lambda run: _percentile(run.ttfts_ms(later=True), 99), ",.0f"),
    "ITL p50": (lambda run: _percentile(run.gaps_ms(), 50), ",.1f"),
    "ITL p99": (lambda run: _percentile(run.gaps_ms(), 99), ",.1f"),
    "requests/s": (Run.requests_per_s, ".3f"),
    "hits %": (lambda run: run.percent_of_prompts(sum(record.cached_tokens for record in run.records)), ".0f"),
    "connector %": (lambda run: run.percent_of_prompts(run.external_tokens), ".0f"),
    "CPU s": (lambda run: run.processor_s, ".1f"),
    "loaded GB": (lambda run: run.loaded_bytes / 1e9, ".2f"),
    "stored GB": (lambda run: run.stored_bytes / 1e9, ".2f"),
}
"""By the table's columns: what they say of a run, and in which form. NaN: nothing was measured."""
RATIOS = {"TTFT": "TTFT mean ms", "later TTFT": "later mean", "ITL p50": "ITL p50", "req/s": "requests/s"}
"""Columns of ratios to ``BASE``, and the figures that they compare."""
LEGEND = (
    "Medians over rounds. TTFT and inter-token latency (ITL) in ms, as a client of the engine sees them. later: "
    "requests whose prompt begins with something seen before. hits: cached tokens of all prompt tokens; connector: "
    "those it brought. CPU s: of all the engine's processes, until a second after the last answer. Ratios: to vLLM's "
    "prefix cache alone in the same round. Without --model the model only takes time: a step sleeps, nothing is "
    "computed, and vLLM's own work adds to the step. Without CUDA, copies that a GPU's copy engine would make take "
    "processor time, ours and vLLM's alike."
)


def figures(run: Run) -> dict[str, float]:
    """Return what a run comes to, by column. ValueError: it has no records."""
    if not run.records:
        raise ValueError(f"{run.side} answered nothing")
    return {name: of(run) for name, (of, _) in FIGURES.items()}


def ratio(runs: Sequence[Run], side: str, column: str) -> float:
    """Return the median of a figure's ratios to ``BASE``'s, over the rounds that both have run; NaN if none."""
    base = {run.round: figures(run)[column] for run in runs if run.side == BASE}
    mine = [run for run in runs if run.side == side and base.get(run.round, 0.0)]
    return _median(figures(run)[column] / base[run.round] for run in mine)


def table(runs: Sequence[Run]) -> str:
    """Return a row for each side of one workload: of each figure the median over rounds."""
    heading = ["side", *FIGURES, *(f"× {name}" for name in RATIOS), "load"]
    rows = []
    for side in NOTES:
        mine = [run for run in runs if run.side == side]
        if not mine:
            continue
        found, loads = [figures(run) for run in mine], [run.load_before for run in mine]
        cells = [tables.number(_median(each[name] for each in found), form) for name, (_, form) in FIGURES.items()]
        ratios = [tables.number(ratio(runs, side, column), ".2f") for column in RATIOS.values()]
        rows.append([side, *cells, *ratios, f"{min(loads):.1f}–{max(loads):.1f}"])
    return tables.table(heading, rows)


def _median(values: Iterable[float]) -> float:
    found = list(values)
    return statistics.median(found) if found else float("nan")
