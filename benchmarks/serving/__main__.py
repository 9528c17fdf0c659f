"""Serving: real vLLM engines, one for each way of keeping KV, in turns, with a model that only takes time, at a GPU's
pace without a GPU, or with a real one. ``python -m benchmarks.serving``; ``make bench-serving ARGS=...``.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks import tables
from benchmarks.serving import report, sides, workloads
from benchmarks.serving.model import SHAPES, shape_of
from benchmarks.serving.report import Run, figures
from benchmarks.serving.turns import Plan, measure
from examples.demo import terminal

QUICK = {"sessions": 3, "turns": 2, "tokens": 600, "answer_tokens": 30}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Return the options. ``sides`` and ``kinds`` are lists of known names."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving",
        description=__doc__,
        epilog="sides: " + "; ".join(f"{name} ({note})" for name, note in sides.NOTES.items()),
    )
    add = parser.add_argument
    add("--workload", default="sessions", help=f"by commas, or all: {', '.join(workloads.KINDS)} (sessions)")
    add("--sides", default=",".join(sides.DEFAULT), help=f"by commas, or all ({','.join(sides.DEFAULT)})")
    add("--rounds", type=int, default=2, help="how often each side runs (2)")
    add("--quick", action="store_true", help="one round of a few short prompts")
    add("--sessions", type=int, help="sessions, documents or system prompts (6)")
    add("--turns", type=int, help="requests of each (3)")
    add("--tokens", type=int, help="new tokens of each request (1000); see benchmarks/serving/workloads.py")
    add("--answer-tokens", type=int, help="tokens of an answer (100)")
    add("--seed", type=int, default=0, help="of prompts (0)")
    add("--at-a-time", type=int, default=4, help="requests under way (4)")
    add("--shape", choices=SHAPES, default="8b", help="the KV of what model (8b)")
    add("--model", default="", help="a real model's directory or name, instead of a shape and a pace")
    add("--gpu-share", type=float, default=0.5, help="of the working set, what the GPU's cache holds (0.5)")
    add("--memory-gb", type=float, help="host memory in GB (0.4 of the working set)")
    add("--dir", type=Path, help="where files of KV lie (TMPDIR)")
    add("--json", type=Path, help="write everything that was measured to this file")
    chosen = parser.parse_args(arguments)
    chosen.sides = list(sides.NOTES) if chosen.sides == "all" else chosen.sides.split(",")
    chosen.kinds = list(workloads.KINDS) if chosen.workload == "all" else chosen.workload.split(",")
    unknown = {*chosen.sides, *chosen.kinds} - {*sides.NOTES, *workloads.KINDS}
    if unknown:
        parser.error(f"not known: {', '.join(sorted(unknown))}")
    numbers = (chosen.sessions, chosen.turns, chosen.tokens, chosen.answer_tokens)
    if min(chosen.rounds, chosen.at_a_time, *(n for n in numbers if n is not None)) < 1:
        parser.error("numbers must be at least 1")
    return chosen


def plans(chosen: argparse.Namespace) -> list[Plan]:
    """Return one for each workload."""
    names = ("sessions", "turns", "tokens", "answer_tokens")
    numbers = QUICK if chosen.quick else {}
    numbers = numbers | {name: getattr(chosen, name) for name in names if getattr(chosen, name) is not None}
    made = []
    for kind in chosen.kinds:
        plan = Plan(
            workload=workloads.Spec(kind=kind, seed=chosen.seed, **numbers),
            shape=shape_of(chosen.model) if chosen.model else SHAPES[chosen.shape],
            model=chosen.model,
            at_a_time=chosen.at_a_time,
            gpu_share=chosen.gpu_share,
        )
        if chosen.memory_gb is not None:
            plan = replace(plan, memory_share=chosen.memory_gb * 1e9 / plan.working_set_bytes)
        made.append(plan)
    return made


def main(arguments: list[str] | None = None) -> int:
    """Measure, and print a table for each workload. Returns 1 when a side failed."""
    chosen = parse(arguments)
    rounds = 1 if chosen.quick else chosen.rounds
    progress = terminal.start()
    machine = tables.machine()
    results: list[tuple[Plan, list[Run]]] = []
    try:
        for plan in plans(chosen):
            runs: list[Run] = []
            results.append((plan, runs))
            for run in measure(plan, chosen.sides, rounds, chosen.dir, progress):
                runs.append(run)
                found = figures(run)
                progress(
                    f"round {run.round + 1} of {rounds}, {run.side}: TTFT {found['TTFT mean ms']:.0f} ms, "
                    f"inter-token {found['ITL p50']:.1f} ms, {found['hits %']:.0f} % hits, load {run.load_before:.1f}"
                )
    finally:  # what there is, when it is interrupted
        for plan, runs in results:
            print(*plan.about(), f"\n{report.table(runs)}\n", sep="\n")
        print(machine, report.LEGEND, sep="\n")
        if chosen.json is not None:
            whole = [{"plan": asdict(plan), "runs": [asdict(run) for run in runs]} for plan, runs in results]
            chosen.json.write_text(json.dumps({"machine": machine, "workloads": whole}))
    return int(any(len(runs) < rounds * len(chosen.sides) for _, runs in results))


if __name__ == "__main__":
    sys.exit(terminal.attempt(main, errors=OSError))
