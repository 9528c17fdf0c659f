"""The picture of ``bench-serving``: for each workload TTFT of requests that could hit, inter-token latency, hits.

Threading: plain functions. matplotlib is imported when something is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.serving.records import medians
from benchmarks.serving.report import Result, about

GRAY, BLUE, GREEN, LIGHT = "#888888", "#4c78a8", "#54a24b", "#d9d9d9"


def draw(results: Sequence[Result], machine: Mapping[str, Any], path: Path) -> None:
    """Write a PNG with a row for each workload. OSError: ``path`` cannot be written."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        len(results), 3, figsize=(13, 3.6 * len(results) + 0.8), squeeze=False, layout="constrained"
    )
    for row, result in zip(axes, results, strict=True):
        names = list(result.runs)
        shown = [medians(result.figures(name)) for name in names]
        times, gaps, hits = row
        # Where nothing can hit, the times of all requests are shown.
        can_hit = not any(math.isnan(of.later_ttft_mean_s) for of in shown)
        means = [of.later_ttft_mean_s if can_hit else of.ttft_mean_s for of in shown]
        worst = [of.later_ttft_p99_s if can_hit else of.ttft_p99_s for of in shown]
        _bars(times, names, means, worst, "{:.2f}", BLUE)
        times.set_title(f"{result.plan.workload.kind}: TTFT, s (mean; whisker: p99)", fontsize=9)
        middle = [of.gap_p50_s * 1e3 for of in shown]
        _bars(gaps, names, middle, [of.gap_p99_s * 1e3 for of in shown], "{:.1f}", GREEN)
        gaps.set_title("inter-token latency, ms (p50; whisker: p99)", fontsize=9)
        external = [of.external_rate for of in shown]
        local = [max(0.0, of.hit_rate - of.external_rate) for of in shown]
        hits.bar(names, local, color=BLUE, label="prefix cache")
        hits.bar(names, external, bottom=local, color=GREEN, label="connector")
        hits.axhline(max(of.possible_hit_rate for of in shown), color=GRAY, linestyle=":", label="without limits")
        hits.set_ylim(0, 1)
        hits.set_title("cached tokens of all prompt tokens", fontsize=9)
        hits.legend(fontsize=7)
        for axis in row:
            axis.tick_params(axis="x", labelrotation=30, labelsize=8)
            axis.spines[["top", "right"]].set_visible(False)
    words = (
        [*about(results[0].plan, machine).values()]
        if len(results) == 1
        else [about(results[0].plan, machine)["machine"]]
    )
    figure.supxlabel("\n".join(words), fontsize=7, color="#555555")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _bars(axis: Any, names: list[str], values: list[float], worst: list[float], label: str, color: str) -> None:
    above = [max(0.0, top - value) for value, top in zip(values, worst, strict=True)]
    bars = axis.bar(names, values, color=color, yerr=[[0.0] * len(names), above], ecolor=GRAY, capsize=3)
    axis.bar_label(bars, labels=[label.format(value) for value in values], padding=2, fontsize=8)
