"""Draws ``docs/race.svg``: who leads in each row of the race, and by how much, with intervals of 95 %.

    python -m docs.race FILE...    # what `python -m benchmarks.serving ROW... --json FILE` has measured

Rows in which ours loses stand first. Threading: a command; nothing is shared.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.serving.report import Run, best_peer, by_side, ratio
from benchmarks.serving.sides import BASE, PEERS

PICTURE = Path(__file__).with_name("race.svg")
OURS, PEER, FLOOR = "#d62728", "#4c78a8", "#b8b8b8"


def color(side: str) -> str:
    """Return the color of a side."""
    return PEER if side.startswith(PEERS) else FLOOR if side == "free" else OURS


def lag(sides: dict[str, list[Run]]) -> float:
    """Return the TTFT of the best of ours as a multiple of that of the best peer; 0 where one is missing."""
    best = best_peer(sides)
    ours = [runs for side, runs in sides.items() if color(side) == OURS and side != BASE]
    return min((ratio(runs, sides[best]).mean for runs in ours), default=0.0) if best else 0.0


def draw(rows: dict[str, dict[str, list[Run]]]) -> None:
    """Draw a panel for each row."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "race"
    from matplotlib import pyplot

    heights = [1 + len(sides) for sides in rows.values()]
    figure, panels = pyplot.subplots(
        len(rows), figsize=(7.5, 0.22 * sum(heights)), layout="constrained", squeeze=False, height_ratios=heights
    )
    for panel, (row, sides) in zip(panels[:, 0], rows.items(), strict=True):
        base = BASE if BASE in sides else best_peer(sides) or next(iter(sides))
        found = {side: ratio(runs, sides[base]) for side, runs in sides.items() if side != base}
        order = sorted(found, key=lambda side: found[side].mean)
        for at, side in enumerate(order):
            mean, low, high = found[side]
            panel.plot(mean, at, "o", color=color(side), markersize=4)
            if low > 0 and high < float("inf"):
                panel.plot([low, high], [at, at], color=color(side), linewidth=1.2)
        panel.axvline(1, color=FLOOR, linewidth=0.8)
        panel.set_yticks(range(len(order)), order, fontsize=7)
        panel.tick_params(axis="x", labelsize=7)
        panel.invert_yaxis()
        panel.margins(y=0.15)
        panel.set_title(f"{row}: TTFT of later requests, {base} = 1", fontsize=8, loc="left")
    figure.savefig(PICTURE, metadata={"Date": None})


def main(files: Sequence[str]) -> int:
    """Draw the runs of all files; returns the exit code."""
    lines = [line for file in files for line in Path(file).read_text().splitlines()]
    runs = [Run.of(json.loads(line)["run"]) for line in lines]
    rows = {row: by_side([run for run in runs if run.row == row]) for row in dict.fromkeys(run.row for run in runs)}
    draw(dict(sorted(rows.items(), key=lambda item: lag(item[1]), reverse=True)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
