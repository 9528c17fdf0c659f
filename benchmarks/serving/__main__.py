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
from benchmarks.serving.workloads import Spec
from examples.demo import terminal


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving",
        description=__doc__,
        epilog="sides: " + "; ".join(f"{name} ({note})" for name, note in sides.NOTES.items()),
    )
    add = parser.add_argument
    add("--workload", nargs="+", choices=workloads.KINDS, default=["sessions"], help="one or more (sessions)")
    add("--sides", nargs="+", choices=sides.NOTES, default=sides.DEFAULT, help=f"({' '.join(sides.DEFAULT)})")
    add("--rounds", type=int, default=2, help="how often each side runs (2)")
    add("--sessions", type=int, default=Spec.sessions, help="sessions, documents or system prompts (6)")
    add("--turns", type=int, default=Spec.turns, help="requests of each (3)")
    add("--tokens", type=int, default=Spec.tokens, help="new tokens of each request (1000); see workloads.py")
    add("--answer-tokens", type=int, default=Spec.answer_tokens, help="tokens of an answer (100)")
    add("--seed", type=int, default=0, help="of prompts (0)")
    add("--at-a-time", type=int, default=4, help="requests under way (4)")
    add("--shape", choices=SHAPES, default="8b", help="the KV of what model (8b)")
    add("--model", default="", help="a real model's directory or name, instead of a shape and a pace")
    add("--gpu-share", type=float, default=0.5, help="of the working set, what the GPU's cache holds (0.5)")
    add("--memory-gb", type=float, help="host memory in GB (0.4 of the working set)")
    add("--dir", type=Path, help="where files of KV lie (TMPDIR)")
    add("--json", type=Path, help="write everything that was measured to this file")
    return parser.parse_args()


def plan_of(kind: str, chosen: argparse.Namespace) -> Plan:
    """Return what is measured of a workload."""
    plan = Plan(
        workload=Spec(kind, chosen.sessions, chosen.turns, chosen.tokens, chosen.answer_tokens, chosen.seed),
        shape=shape_of(chosen.model) if chosen.model else SHAPES[chosen.shape],
        model=chosen.model,
        at_a_time=chosen.at_a_time,
        gpu_share=chosen.gpu_share,
    )
    if chosen.memory_gb is None:
        return plan
    return replace(plan, memory_share=chosen.memory_gb * 1e9 / plan.working_set_bytes)


def main() -> int:
    """Measure, and print a table for each workload. Returns 1 when a side failed."""
    chosen = parse()
    progress = terminal.start()
    machine = tables.machine()
    results: list[tuple[Plan, list[Run]]] = []
    try:
        for plan in (plan_of(kind, chosen) for kind in chosen.workload):
            runs: list[Run] = []
            results.append((plan, runs))
            for run in measure(plan, chosen.sides, chosen.rounds, chosen.dir, progress):
                runs.append(run)
                found = figures(run)
                progress(
                    f"round {run.round + 1} of {chosen.rounds}, {run.side}: TTFT {found['TTFT mean ms']:.0f} ms, "
                    f"inter-token {found['ITL p50']:.1f} ms, {found['hits %']:.0f} % hits, load {run.load_before:.1f}"
                )
    finally:  # what there is, when it is interrupted
        for plan, runs in results:
            print(*plan.about(), f"\n{report.table(runs)}\n", sep="\n")
        print(machine, report.LEGEND, sep="\n")
        if chosen.json is not None:
            whole = [{"plan": asdict(plan), "runs": [asdict(run) for run in runs]} for plan, runs in results]
            chosen.json.write_text(json.dumps({"machine": machine, "workloads": whole}))
    return int(any(len(runs) < chosen.rounds * len(chosen.sides) for _, runs in results))


if __name__ == "__main__":
    sys.exit(terminal.attempt(main, errors=OSError))
