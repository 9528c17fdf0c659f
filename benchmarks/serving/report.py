"""What is measured of serving, what follows from it, and the tables that a person reads.

``python -m benchmarks.serving.report FILE``: the tables of what ``--json`` has written. ``... BEFORE AFTER``: what two
checkouts have measured of the same rows and sides, paired by seed. Threading: frozen values and pure functions.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import tables
from benchmarks.serving.sides import BASE, NOTES, PEERS

T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""Student's t for an interval of 95 %, by degrees of freedom from 1."""


@dataclass(frozen=True)
class Record:
    """One answered request. Seconds; ``sent_s`` since the begin of the run."""

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
    seed: int
    records: tuple[Record, ...]
    processor_s: float
    """Of all processes of the engine, from the first request until a second after the last answer."""
    load_before: float
    """The machine's load average when the run began."""
    row: str = ""

    @staticmethod
    def of(values: Mapping[str, Any]) -> Run:
        """Return the run of what ``dataclasses.asdict`` and JSON have made of it."""
        records = tuple(Record(**{**record, "gaps_s": tuple(record["gaps_s"])}) for record in values["records"])
        return Run(**{**values, "records": records})

    def ttfts_ms(self, *, later: bool = False) -> list[float]:
        """Return times to first tokens. ``later``: of the requests that repeat something, if any does."""
        repeating = [record for record in self.records if record.repeated_tokens]
        return [record.ttft_s * 1e3 for record in (repeating if later and repeating else self.records)]

    def gaps_ms(self) -> list[float]:
        """Return inter-token latencies."""
        return [gap * 1e3 for record in self.records for gap in record.gaps_s]

    def requests_per_s(self) -> float:
        """From the first request to the last token."""
        ended_s = max(record.sent_s + record.ttft_s + sum(record.gaps_s) for record in self.records)
        return len(self.records) / (ended_s - min(record.sent_s for record in self.records))

    def hit_percent(self) -> float:
        """Return the cached tokens as a percentage of all prompt tokens."""
        prompts = sum(record.prompt_tokens for record in self.records)
        return 100 * sum(record.cached_tokens for record in self.records) / prompts


def _percentile(values: Sequence[float], percent: float) -> float:
    return float(np.percentile(values, percent)) if values else float("nan")


LATER = "later TTFT"
FIGURES: dict[str, tuple[Callable[[Run], float], str]] = {
    "TTFT": (lambda run: statistics.fmean(run.ttfts_ms()), ",.0f"),
    "p50": (lambda run: _percentile(run.ttfts_ms(), 50), ",.0f"),
    "p99": (lambda run: _percentile(run.ttfts_ms(), 99), ",.0f"),
    LATER: (lambda run: statistics.fmean(run.ttfts_ms(later=True)), ",.0f"),
    "later p50": (lambda run: _percentile(run.ttfts_ms(later=True), 50), ",.0f"),
    "later p99": (lambda run: _percentile(run.ttfts_ms(later=True), 99), ",.0f"),
    "ITL p50": (lambda run: _percentile(run.gaps_ms(), 50), ",.1f"),
    "ITL p99": (lambda run: _percentile(run.gaps_ms(), 99), ",.1f"),
    "requests/s": (Run.requests_per_s, ".3f"),
    "hits %": (Run.hit_percent, ".0f"),
    "CPU s": (lambda run: run.processor_s, ".1f"),
}
"""By the table's columns: what they say of a run, and in which form. NaN: nothing was measured."""


def figures(run: Run) -> dict[str, float]:
    """Return what a run comes to, by column."""
    return {name: value(run) for name, (value, _) in FIGURES.items()}


COMPARED = (LATER, "later p50", "ITL p50", "ITL p99", "requests/s", "CPU s")
LEGEND = (
    "Means over seeds. TTFT and inter-token latency (ITL) in ms. later: of requests that repeat something that was "
    "asked before, or of all where none does. hits: cached tokens of all prompt tokens. CPU s: of all the engine's "
    "processes, until a second after the last answer. ×: ratio of later TTFT to that of vLLM's prefix cache alone, and "
    "of the best of vLLM's connectors: geometric means of pairs of equal seeds, with intervals of 95 %. A step of the "
    "model sleeps, and vLLM's own work adds to it."
)


class Ratio(NamedTuple):
    """A geometric mean over seeds, and its interval of 95 %: endless for one seed, NaN for none."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        interval = f" ({self.low:.2f}–{self.high:.2f})" if math.isfinite(self.high) else ""
        return tables.number(self.mean, ".2f") + interval


def ratio(runs: Iterable[Run], base: Iterable[Run], figure: str = LATER) -> Ratio:
    """Return the ratio of a figure to that of ``base``, over the seeds that both have."""
    value = FIGURES[figure][0]
    of_seed = {run.seed: value(run) for run in base}
    pairs = [(value(run), of_seed[run.seed]) for run in runs if run.seed in of_seed]
    logs = [math.log(one / other) for one, other in pairs if one > 0 and other > 0]
    mean, half = statistics.fmean(logs or [math.nan]), math.inf
    if len(logs) > 1:
        half = T_95[min(len(logs) - 1, len(T_95)) - 1] * statistics.stdev(logs) / math.sqrt(len(logs))
    return Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half))


def by_side(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Return the runs of each side that has any, in the order of ``NOTES``."""
    return {side: mine for side in NOTES if (mine := [run for run in runs if run.side == side])}


def best_peer(sides: Mapping[str, Sequence[Run]]) -> str:
    """Return the side of vLLM's with the lowest TTFT of later requests; empty: there is none."""
    peers = [side for side in sides if side.startswith(PEERS)]
    return min(peers, key=lambda side: _mean(sides[side], FIGURES[LATER][0]), default="")


def table(runs: Sequence[Run]) -> str:
    """Return a row for each side of one row of the race, the fastest first."""
    sides = by_side(runs)
    best = best_peer(sides)
    heading = ["side", *FIGURES, f"× {BASE}", f"× {best or 'peer'}", "load"]
    rows = []
    for side in sorted(sides, key=lambda side: _mean(sides[side], FIGURES[LATER][0])):
        mine = sides[side]
        cells = [tables.number(_mean(mine, value), form) for value, form in FIGURES.values()]
        ratios = [str(ratio(mine, sides.get(base, ()))) if side != base else "1" for base in (BASE, best)]
        loads = [run.load_before for run in mine]
        rows.append([side, *cells, *ratios, f"{min(loads):.1f}–{max(loads):.1f}"])
    return tables.table(heading, rows)


def comparison(before: Sequence[Run], after: Sequence[Run]) -> str:
    """Return a row for each row and side of the race that both have: what ``after`` is of ``before``."""
    rows = []
    for row, side in dict.fromkeys((run.row, run.side) for run in after):
        one, other = ([run for run in runs if (run.row, run.side) == (row, side)] for runs in (before, after))
        seeds = len({run.seed for run in one} & {run.seed for run in other})
        if seeds:
            rows.append([f"{row}, {side}", *(str(ratio(other, one, figure)) for figure in COMPARED), str(seeds)])
    return tables.table(["after / before", *COMPARED, "seeds"], rows)


def _mean(runs: Sequence[Run], value: Callable[[Run], float]) -> float:
    return statistics.fmean(map(value, runs))


def main() -> None:
    texts = [Path(path).read_text() for path in sys.argv[1:3]]
    runs, *after = [[Run.of(json.loads(line)["run"]) for line in text.splitlines()] for text in texts]
    for row in dict.fromkeys(run.row for run in runs) if not after else ():
        print(row, table([run for run in runs if run.row == row]), "", sep="\n")
    print(comparison(runs, after[0]) if after else LEGEND)


if __name__ == "__main__":
    main()
