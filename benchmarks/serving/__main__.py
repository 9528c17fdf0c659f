"""The race: real vLLM engines, one for each way of keeping KV, in turns, with a model that only takes time, at a GPU's
pace without a GPU. ``python -m benchmarks.serving ROW...``; ``make bench-serving ARGS=...``.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks import tables
from benchmarks.serving import report, sides
from benchmarks.serving.report import Run
from benchmarks.serving.rows import ROWS
from benchmarks.serving.turns import measure
from examples.demo import terminal
from examples.demo.engine import EngineError


def main() -> int:
    """Measure, and print a table for each row. Returns 1 when a side failed."""
    notes = "; ".join(f"{name} ({note})" for name, note in sides.NOTES.items())
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving", description=__doc__, epilog=f"sides: {notes}")
    add = parser.add_argument
    add("rows", nargs="+", choices=ROWS, help="of rows.py")
    add("--sides", nargs="+", choices=sides.NOTES, help="(the row's)")
    add("--rounds", type=int, default=5, help="how often each side runs, each time with another seed (5)")
    add("--seed", type=int, default=0, help="the first (0)")
    add("--sessions", type=int, help="(the row's)")
    add("--copies", type=float, default=50.0, help="GB/s of copies by the clock; 0: real copies (50)")
    add("--dir", type=Path, help="where files of KV lie (TMPDIR)")
    add("--json", type=Path, help="append each run to this file, for benchmarks.serving.report")
    chosen = parser.parse_args()
    progress, machine, failed = terminal.start(), tables.machine(), set[tuple[str, str]]()
    for row in chosen.rows:
        plan, runs = ROWS[row], list[Run]()
        contestants = chosen.sides or plan.sides
        for number in range(chosen.rounds):
            spec = replace(plan.workload, seed=chosen.seed + number, sessions=chosen.sessions or plan.workload.sessions)
            at = number % len(contestants)
            for side in (*contestants[at:], *contestants[:at]):
                if (row, side) in failed:
                    continue
                try:
                    run = replace(measure(replace(plan, workload=spec), side, chosen.copies, chosen.dir), row=row)
                except EngineError as error:
                    failed.add((row, side))
                    progress(f"{row}, seed {spec.seed}, {side}: FAILED, left out from here on: {error}")
                    continue
                runs.append(run)
                found = ", ".join(f"{name} {value:,.1f}" for name, value in report.figures(run).items())
                progress(f"{row}, seed {spec.seed}, {side}: {found}, load {run.load_before:.1f}")
                if chosen.json is not None:
                    line = {"machine": machine, "copies": chosen.copies, "plan": asdict(plan), "run": asdict(run)}
                    with chosen.json.open("a") as file:
                        file.write(json.dumps(line) + "\n")
        print(row, report.table(runs), "", sep="\n")
    print(machine, report.LEGEND, sep="\n")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(terminal.attempt(main, errors=OSError))
