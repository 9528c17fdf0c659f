"""What a connector costs the thread that every step waits for, by call: processor time of the scheduler's half and of
a rank's, in an engine of one process with the model that only takes time. Processor time hardly depends on who else
uses the machine. ``python -m benchmarks.serving.steps [--sides memory,vllm-cpu] [--rounds 3] [--json FILE]``.

Threading: one thread. Each side runs in a process of its own (``step_engine``), in turns.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from benchmarks.serving import sides, workloads
from benchmarks.serving.step_engine import ALL, RANK, SCHEDULER, WHOLE
from benchmarks.serving.turns import ROOT, RUN_LIMIT_S, Plan, SideError, causes, end_process, job_of
from benchmarks.serving.workloads import Spec


def measure(plan: Plan, side: str, number: int, directory: Path | None) -> dict[str, Any]:
    """Run a side once, in a process of its own. Raises SideError."""
    with job_of(plan, side, number, directory) as (job, scratch, environment):
        environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        log = scratch / "log"
        with log.open("ab") as log_file:
            process = start_process(log_file, {**os.environ, **environment})
        assert process.stdin is not None
        assert process.stdout is not None
        limit = threading.Timer(RUN_LIMIT_S, end_process, (process.pid,))
        limit.daemon = True
        limit.start()
        try:
            with contextlib.suppress(BrokenPipeError):  # it is gone already: its log says why
                process.stdin.write(json.dumps(job).encode() + b"\n")
                process.stdin.flush()
            told = process.stdout.readline()
        finally:
            limit.cancel()
            end_process(process.pid)
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    pipe.close()
        if not told:
            raise SideError(causes(log.read_text(errors="replace")))
        found: dict[str, Any] = json.loads(told)
        return found


def start_process(log_file: BinaryIO, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start ``step_engine`` as the leader of a process group of its own, its stderr in ``log_file``."""
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.serving.step_engine"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log_file,
        cwd=ROOT,
        env=environment,
        start_new_session=True,
    )


def table(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Return a Markdown table: medians of microseconds per step, and in how many of 100 steps each is called."""
    lines = ["| processor time, µs per step | " + " | ".join(runs) + " |", "|---|" + "---:|" * len(runs)]
    for group in (*SCHEDULER, *RANK, ALL, WHOLE):
        cells = [f"{statistics.median(run['us'].get(group, 0.0) for run in of_side):.1f}" for of_side in runs.values()]
        lines.append(f"| {group} | " + " | ".join(cells) + " |")
    for what, read, form in (
        ("steps", lambda run: run["steps"], "{:.0f}"),
        ("ms per step", lambda run: 1e3 * run["step_s"], "{:.2f}"),
        ("lookups per 100 steps", lambda run: 100 * run["calls"].get("looking requests up", 0.0), "{:.0f}"),
    ):
        cells = [form.format(statistics.median(map(read, of_side))) for of_side in runs.values()]
        lines.append(f"| {what} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(arguments: Iterable[str] | None = None) -> int:
    """Measure, and print the table. Returns 1 when a side failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving.steps", description=__doc__)
    add = parser.add_argument
    add("--sides", default="memory,vllm-cpu", help="by commas; see benchmarks.serving (memory,vllm-cpu)")
    add("--rounds", type=int, default=3, help="how often each side runs (3)")
    add("--workload", choices=workloads.KINDS, default="documents", help="what is asked (documents)")
    add("--sessions", type=int, default=6, help="documents or sessions (6)")
    add("--at-a-time", type=int, default=4, help="requests under way (4)")
    add("--memory-gb", type=float, default=3.0, help="host memory in GB (3)")
    add("--dir", type=Path, help="where files of KV lie (TMPDIR)")
    add("--json", type=Path, help="write everything that was measured to this file")
    chosen = parser.parse_args(None if arguments is None else list(arguments))
    names = chosen.sides.split(",")
    if unknown := [name for name in names if name not in sides.NOTES]:
        parser.error(f"not known: {', '.join(unknown)}")
    plan = Plan(Spec(kind=chosen.workload, sessions=chosen.sessions), at_a_time=chosen.at_a_time)
    plan = replace(plan, memory_share=chosen.memory_gb * 1e9 / plan.working_set_bytes)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    try:
        for number in range(chosen.rounds):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                runs[name].append(measure(plan, name, number, chosen.dir))
                print(f"round {number + 1}, {name}: {runs[name][-1]['us'][ALL]:.0f} µs per step", file=sys.stderr)
    except SideError as error:
        print(f"{name} failed: {error}", file=sys.stderr)
        return 1
    print(table(runs))
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
