"""Draws the pictures of these pages from what benchmarks and the demo have measured.

    python -m docs.pictures race FILE...      # who leads in each row: `benchmarks.serving ROW... --json FILE`
    python -m docs.pictures scheduler FILE    # the scheduler's thread: `benchmarks.scheduler --json FILE`
    python -m docs.pictures ttft              # time to first token: runs the demo, two minutes on a quiet machine

Threading: a command; nothing is shared.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

from benchmarks.serving.report import Run, best_peer, by_side, ratio
from benchmarks.serving.sides import BASE, PEERS

PLACE = Path(__file__).parent
OURS, SLAB, PEER, FLOOR, CACHED = "#d62728", "#ff9896", "#4c78a8", "#b8b8b8", "#54a24b"


def figure(**options: Any) -> tuple[Any, Any]:
    """Return a figure and its panels, which become the same SVG each time."""
    mpl.use("svg")
    mpl.rcParams.update({"svg.hashsalt": "nixl-offload", "svg.fonttype": "none"})
    from matplotlib import pyplot

    return pyplot.subplots(layout="constrained", squeeze=False, **options)


def save(drawn: Any, name: str) -> None:
    """Write a figure beside this file."""
    drawn.savefig(PLACE / f"{name}.svg", metadata={"Date": None})


def color(side: str) -> str:
    """Return the color of a side of the race."""
    return PEER if side.startswith(PEERS) else FLOOR if side == "free" else OURS


def lag(sides: dict[str, list[Run]]) -> float:
    """Return the TTFT of the best of ours as a multiple of that of the best peer; 0 where one is missing."""
    best = best_peer(sides)
    ours = [runs for side, runs in sides.items() if color(side) == OURS and side != BASE]
    return min((ratio(runs, sides[best]).mean for runs in ours), default=0.0) if best else 0.0


def race(*files: str) -> None:
    """A panel for each row, with intervals of 95 %. Rows in which ours loses stand first."""
    lines = [line for file in files for line in Path(file).read_text().splitlines()]
    runs = [Run.of(json.loads(line)["run"]) for line in lines]
    rows = {row: by_side([run for run in runs if run.row == row]) for row in dict.fromkeys(run.row for run in runs)}
    rows = dict(sorted(rows.items(), key=lambda item: lag(item[1]), reverse=True))
    heights = [1 + len(sides) for sides in rows.values()]
    drawn, panels = figure(nrows=len(rows), figsize=(7.5, 0.22 * sum(heights)), height_ratios=heights)
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
    save(drawn, "race")


def scheduler(file: str) -> None:
    """Medians and ranges over tokens and over waiting requests: a row of panels for each size of chunks."""
    found = json.loads(Path(file).read_text())
    chunks = sorted({row["chunk_tokens"] for row in found["rows"]}, reverse=True)
    kinds = {"hit": "tokens", "store": "tokens", "waiting": "requests"}
    drawn, panels = figure(nrows=len(chunks), ncols=len(kinds), figsize=(7.5, 2.4 * len(chunks)), sharey="row")
    for line, chunk_tokens in zip(panels, chunks, strict=True):
        for panel, (what, axis) in zip(line, kinds.items(), strict=True):
            rows = [row for row in found["rows"] if (row["what"], row["chunk_tokens"]) == (what, chunk_tokens)]
            for side, shade in {"vllm": PEER, "memory": OURS, "memory+slab": SLAB}.items():
                points = sorted((row[axis], sorted(row["ms"][side])) for row in rows)
                at, ms = [point for point, _ in points], [times for _, times in points]
                panel.plot(at, [times[len(times) // 2] for times in ms], "o-", color=shade, markersize=3, label=side)
                panel.vlines(at, [times[0] for times in ms], [times[-1] for times in ms], color=shade, linewidth=1)
            panel.set(xscale="log", yscale="log")
            panel.minorticks_off()
            apart = [point for point, later in zip(at, [*at[1:], at[-1] * 9], strict=True) if later > 2 * point]
            panel.set_xticks(apart, [f"{point / 1000:.0f} k" if point > 1000 else f"{point}" for point in apart])
            panel.tick_params(labelsize=7)
            panel.set_xlabel(
                axis if axis == "tokens" else f"requests of {max(row['tokens'] for row in rows):,} tokens", fontsize=7
            )
            panel.set_title(f"{what}, chunks of {chunk_tokens} tokens", fontsize=8, loc="left")
        line[0].set_ylabel("ms of the scheduler's thread", fontsize=7)
    panels[0, 0].legend(fontsize=7)
    save(drawn, "scheduler")


def ttft() -> None:
    """The picture of the README: by where a prompt's KV comes from."""
    command = [sys.executable, "-m", "examples.demo", "--json", "--prompts", "8"]
    result = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    bars = {
        "cold": ("computed", FLOOR),
        "files": ("from files, after a restart", PEER),
        "gpu_prefix_cache": ("from vLLM's own prefix cache", CACHED),
    }
    drawn, ((axis,),) = figure(figsize=(7.5, 1.7))
    for row, (name, (label, shade)) in enumerate(bars.items()):
        seconds = result["passes"][name]["ttft_median_s"]
        bar = axis.barh(row, seconds, color=shade, height=0.65)
        axis.bar_label(bar, labels=[f" {label}: {seconds:.2f} s"], fontsize=9)
    axis.set_xlim(0, axis.get_xlim()[1] * 1.35)
    axis.invert_yaxis()
    axis.axis("off")
    about = f"{result['prompt_tokens']:,} tokens, model of {result['model_parameters'] / 1e6:.0f} M parameters"
    axis.set_title(
        f"Time to first token (median of 8): {about}, vLLM {result['vllm']} on {result['device'] or 'this machine'}",
        fontsize=9,
        loc="left",
    )
    save(drawn, "ttft")


def main(name: str, *files: str) -> None:
    """Draw a picture."""
    {"race": race, "scheduler": scheduler, "ttft": ttft}[name](*files)


if __name__ == "__main__":
    main(*sys.argv[1:])
