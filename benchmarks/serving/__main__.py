"""Serving: real vLLM engines, one for each way of keeping KV, in turns, with a model that only takes time, at a GPU's
pace without a GPU, or with a real one. ``python -m benchmarks.serving``; ``make bench-serving ARGS=...``.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from benchmarks.serving import report, sides, workloads
from benchmarks.serving.model import SHAPES, Pace, shape_of
from benchmarks.serving.records import Run, figures
from benchmarks.serving.turns import Plan, measure
from examples.demo import terminal

QUICK = {"sessions": 3, "turns": 2, "tokens": 600, "answer_tokens": 30}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.serving",
        description=__doc__,
        epilog="sides: " + "; ".join(f"{name} ({note})" for name, note in sides.NOTES.items()),
    )
    add = made.add_argument
    add("--workload", default="sessions", help=f"by commas, or all: {', '.join(workloads.KINDS)} (sessions)")
    add("--sides", default=",".join(sides.DEFAULT), help=f"by commas, or all ({','.join(sides.DEFAULT)})")
    add("--rounds", type=int, default=2, help="how often each side runs (2)")
    add("--quick", action="store_true", help="one round of a few short prompts")
    add("--sessions", type=int, help="sessions, documents, agents or system prompts (6)")
    add("--turns", type=int, help="requests of each (3)")
    add(
        "--tokens", type=int, help="new tokens of each request (1000); what that means: benchmarks/serving/workloads.py"
    )
    add("--answer-tokens", type=int, help="tokens of an answer (100)")
    add("--seed", type=int, default=0, help="of prompts and arrivals (0)")
    add("--at-a-time", type=int, default=4, help="requests under way, closed loop (4)")
    add("--rate", type=float, default=0.0, help="sessions that arrive each second, open loop (0: closed)")
    add("--shape", choices=SHAPES, default="8b", help="the KV of what model (8b)")
    add("--model", default="", help="a real model's directory or name, instead of a shape and a pace")
    add("--dummy-weights", action="store_true", help="with --model: random weights, so that config.json will do")
    add("--step-ms", type=float, default=10.0, help="time of a step (10)")
    add("--token-ms", type=float, default=0.1, help="time of a token in it (0.1)")
    add("--batched-tokens", type=int, default=2048, help="most tokens in a step (2048)")
    add("--gpu-share", type=float, default=0.5, help="of the working set, what the GPU's cache holds (0.5)")
    add("--memory-share", type=float, default=0.4, help="of the working set, what host memory holds (0.4)")
    add("--memory-gb", type=float, help="host memory in GB, instead of a share")
    add("--dir", type=Path, help="where files of KV lie (TMPDIR)")
    add("--json", type=Path, help="write everything that was measured to this file")
    add("--markdown", type=Path, help="write the table to this file")
    add("--plot", type=Path, help="draw to this PNG file")
    return made


def plans(chosen: argparse.Namespace) -> list[Plan]:
    """One for each workload."""
    names = list(workloads.KINDS) if chosen.workload == "all" else chosen.workload.split(",")
    numbers = dict(QUICK) if chosen.quick else {}
    numbers |= {
        name: getattr(chosen, name)
        for name in ("sessions", "turns", "tokens", "answer_tokens")
        if getattr(chosen, name) is not None
    }
    made = []
    for name in names:
        plan = Plan(
            workload=workloads.Spec(kind=name, seed=chosen.seed, **numbers),
            shape=shape_of(chosen.model) if chosen.model else SHAPES[chosen.shape],
            model=chosen.model,
            dummy_weights=chosen.dummy_weights,
            pace=Pace(chosen.step_ms / 1e3, chosen.token_ms / 1e3),
            at_a_time=chosen.at_a_time,
            rate_per_s=chosen.rate,
            gpu_share=chosen.gpu_share,
            memory_share=chosen.memory_share,
            batched_tokens=chosen.batched_tokens,
        )
        if chosen.memory_gb is not None:
            plan = replace(plan, memory_share=chosen.memory_gb * 1e9 / plan.working_set_bytes)
        made.append(plan)
    return made


def main(arguments: list[str] | None = None) -> int:
    """Measure, and print tables. Returns 1 when a side failed."""
    parsing = parser()
    chosen = parsing.parse_args(arguments)
    names = list(sides.NOTES) if chosen.sides == "all" else chosen.sides.split(",")
    kinds = list(workloads.KINDS) if chosen.workload == "all" else chosen.workload.split(",")
    unknown = [name for name in names if name not in sides.NOTES] + [
        name for name in kinds if name not in workloads.KINDS
    ]
    if unknown:
        parsing.error(f"not known: {', '.join(unknown)}")
    least = min(chosen.rounds, chosen.at_a_time, *(n for n in (chosen.sessions, chosen.turns) if n is not None))
    if least < 1 or chosen.rate < 0:
        parsing.error("--rounds, --at-a-time, --sessions and --turns must be at least 1, and --rate not below 0")
    rounds = 1 if chosen.quick else chosen.rounds
    progress = terminal.start()
    machine = report.machine()
    results: list[report.Result] = []
    try:
        for plan in plans(chosen):
            runs: list[Run] = []
            for what, sentence in report.about(plan, machine).items():
                progress(f"{what}: {sentence}")
            try:
                for run in measure(plan, names, rounds, chosen.dir, progress):
                    runs.append(run)
                    _tell(run, rounds, progress)
            finally:
                results.append(report.Result.of(plan, runs))
    finally:
        _show(results, machine, chosen)  # what there is, when it is interrupted
    failed = any(len(result.runs.get(name, ())) < rounds for result in results for name in names)
    return 1 if failed else 0


def _tell(run: Run, rounds: int, progress: terminal.Progress) -> None:
    found = figures(run)
    progress(
        f"round {run.round + 1} of {rounds}, {run.side}: TTFT {found.ttft_mean_s * 1e3:.0f} ms, inter-token "
        f"{found.gap_p50_s * 1e3:.1f} ms, {100 * found.hit_rate:.0f} % hits, load {run.load_before:.1f}"
    )


def _show(results: list[report.Result], machine: dict[str, object], chosen: argparse.Namespace) -> None:
    out = Console(width=None if sys.stdout.isatty() else 230)
    for result in results:
        for what, sentence in report.about(result.plan, machine).items():
            out.print(f"{what}: {sentence}", highlight=False)
        out.print(report.table(result))
    out.print(report.LEGEND, highlight=False)
    out.print(report.LIMITS, highlight=False)
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(report.as_json(results, machine)))
    if chosen.markdown is not None:
        chosen.markdown.write_text(report.markdown(results, machine))
    drawn = [result for result in results if result.runs]
    if chosen.plot is not None and drawn:
        from benchmarks.serving.plot import draw

        draw(drawn, machine, chosen.plot)


if __name__ == "__main__":
    sys.exit(terminal.attempt(main, errors=OSError))
