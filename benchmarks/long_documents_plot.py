"""The picture of ``benchmarks.long_documents``: TTFT above, what served the tokens below, a column per working set.

Threading: plain functions. matplotlib is imported when something is drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.long_documents_report import Result

COLORS = {"GPU": "#4c78a8", "memory": "#54a24b", "file": "#eeca3b", "computed": "#d9d9d9"}
TITLES = "fit the GPU cache", "fit the memory tier", "fit neither"


def draw(results: Sequence[Result], about: Mapping[str, str], path: Path) -> None:
    """Write a PNG. OSError: ``path`` cannot be written."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    sets = sorted({result.documents for result in results})
    figure, axes = pyplot.subplots(
        2, len(sets), figsize=(4.2 * len(sets), 6.4), sharey="row", squeeze=False, layout="constrained"
    )
    for column, (documents, title) in enumerate(zip(sets, TITLES, strict=False)):
        shown = [result for result in results if result.documents == documents]
        names = [result.contender for result in shown]
        times, served = axes[0][column], axes[1][column]
        times.set_title(f"{documents} documents: {title}")
        means = [result.ttft_mean_s for result in shown]
        above = [max(0.0, result.ttft_p99_s - result.ttft_mean_s) for result in shown]
        bars = times.bar(names, means, color="#4c78a8", yerr=[[0.0] * len(shown), above], ecolor="#888888", capsize=3)
        times.bar_label(bars, labels=[f"{mean:.2f}" for mean in means], padding=2, fontsize=8)
        bottom = [0.0] * len(shown)
        for tier, color in COLORS.items():
            shares = [
                1.0 - sum(result.hits.values()) if tier == "computed" else result.hits.get(tier, 0.0)
                for result in shown
            ]
            served.bar(names, shares, bottom=bottom, color=color, label=tier)
            bottom = [low + share for low, share in zip(bottom, shares, strict=True)]
        for axis in (times, served):
            axis.tick_params(axis="x", labelrotation=30)
            axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("time to first token, s\n(mean; whisker: p99)")
    axes[1][0].set_ylabel("share of prompt tokens")
    handles, labels = axes[1][-1].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, loc="outside upper right", ncols=len(COLORS), title="served from")
    figure.supxlabel("\n".join(about.values()), fontsize=7, color="#555555")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
