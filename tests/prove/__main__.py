"""Proves the promises at length: ``make prove``, ``python -m tests.prove``.

Results are written as they come. What has been tried with this commit and seed is not tried again, unless something
was found. Returns 1 when something was found.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from tests.prove.cells import FINDINGS, ROOT, cells_of, run
from tests.prove.faults import FAULTS, POINTS, TIERS, faults_at

PARTS: dict[str, str] = {
    name: f"tests.prove.{name}" for name in ("soak", "yardstick", "faults", "kills", "power", "scheduler", "fuzz")
}
"""Name of a part, and its module: one with ``cells(seed: int) -> Iterable[Cell]``. Those with the longest
cells come first, so that no core has to wait for another at the end.
"""
Rows = dict[str, dict[str, Any]]
"""By name of a cell: its outcome, and ``seconds``."""


def main(arguments: list[str] | None = None) -> int:
    """Try what is missing; print the tables."""
    parser = argparse.ArgumentParser(prog="python -m tests.prove", description=__doc__)
    parser.add_argument("--parts", default="all", help=f"by commas ({', '.join(PARTS)})")
    parser.add_argument("--cells", default="", help="only cells whose names have this in them")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--results", type=Path, default=Path("build/prove"), help="directory of results and logs")
    parser.add_argument("--list", action="store_true", help="print the cells, try none")
    chosen = parser.parse_args(arguments)
    names = list(PARTS) if chosen.parts == "all" else chosen.parts.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"not known: {', '.join(unknown)}; parts are {', '.join(PARTS)}")
    cells = {
        f"{part}/{cell.name}": (part, PARTS[part], cell)
        for part in names
        for cell in cells_of(PARTS[part], chosen.seed)
        if chosen.cells in cell.name
    }
    if chosen.list:
        print(*cells, sep="\n")
        return 0
    chosen.results.mkdir(parents=True, exist_ok=True)
    file = chosen.results / "results.json"
    results = _known(file, {"commit": _commit(), "seed": chosen.seed, "machine": _machine()})
    rows: Rows = results["cells"]
    missing = [one for name, one in cells.items() if name not in rows or _findings(rows[name])]
    bar = tqdm(total=len(cells), initial=len(cells) - len(missing), unit="cell", disable=not sys.stderr.isatty())
    for name, outcome, seconds in run(missing, chosen.seed, logs=chosen.results / "logs", workers=chosen.workers):
        row = rows[name] = {**asdict(outcome), "seconds": round(seconds, 1)}
        written = file.with_suffix(".new")
        written.write_text(json.dumps(results, indent=1))
        written.replace(file)
        bar.update()
        if (found := _findings(row)) or bar.disable:
            tried = ", ".join(f"{count} {what}" for what, count in outcome.counts.items())
            tqdm.write(f"{name}: {'; '.join(found) or tried or outcome.note} ({seconds:.1f} s)", file=sys.stderr)
    bar.close()
    shown = {name: rows[name] for name in cells}
    report = f'`make prove ARGS="--seed {chosen.seed}"`, commit {results["commit"]}, {results["machine"]}\n\n'
    report += _report(shown)
    (chosen.results / "report.md").write_text(report)
    print(report)
    return int(any(map(_findings, shown.values())))


def _known(file: Path, run: dict[str, Any]) -> dict[str, Any]:
    """Return the results in ``file`` when they are of this ``run``, else none."""
    if file.exists():
        known: dict[str, Any] = json.loads(file.read_text())
        if {name: known[name] for name in run} == run:
            return known
        print("results of another commit, seed or machine are put aside", file=sys.stderr)
        file.replace(file.with_name("results-before.json"))
    return {**run, "cells": {}}


def _commit() -> str:
    """Return the commit, with a digest of all that differs from it, new files included."""
    changes = _git("diff", "--binary", "HEAD")
    for name in filter(None, _git("ls-files", "-z", "--others", "--exclude-standard").split(b"\0")):
        file = ROOT / os.fsdecode(name)
        changes += name + (file.read_bytes() if file.is_file() else b"")
    commit = _git("rev-parse", "--short=12", "HEAD").decode().strip()
    return f"{commit}-changed-{hashlib.sha256(changes).hexdigest()[:12]}" if changes else commit


def _git(*words: str) -> bytes:
    return subprocess.run(["git", *words], check=True, capture_output=True, cwd=ROOT).stdout


def _machine() -> str:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB, Python {platform.python_version()}"


def _findings(row: dict[str, Any]) -> list[str]:
    return [f"{kind}: {sentence}" for kind in FINDINGS for sentence in row[kind]]


def _report(rows: Rows) -> str:
    """Return, as Markdown, a line for each part and cell, the matrix of faults, notes and findings."""
    parts: dict[str, list[dict[str, Any]]] = {}
    for name, row in rows.items():
        parts.setdefault(name.split("/")[0], []).append(row)
    lines = [
        *_table("part", parts.items()),
        *_table("cell", ((name, [row]) for name, row in rows.items())),
        *(_matrix(rows) if "faults" in parts else []),
        *(f"- {name}: {row['note']}" for name, row in rows.items() if row["note"]),
        "",
        *(f"- {name}: {found}" for name, row in rows.items() for found in _findings(row)),
    ]
    return "\n".join(lines) + "\n"


def _table(what: str, lines: Iterable[tuple[str, Sequence[dict[str, Any]]]]) -> list[str]:
    table = [(what, "cells", "tried", *FINDINGS, "seconds"), ("---",) * 8]
    for name, rows in lines:
        counts = Counter[str]()
        for row in rows:  # kinds of faults are in the matrix
            counts.update({what: count for what, count in row["counts"].items() if what not in FAULTS})
        tried = ", ".join(f"{count:,} {what}" for what, count in counts.items())
        found = [str(sum(len(row[kind]) for row in rows)) for kind in FINDINGS]
        table.append((name, str(len(rows)), tried, *found, f"{sum(row['seconds'] for row in rows):.0f}"))
    return [*(f"| {' | '.join(line)} |" for line in table), ""]


def _matrix(rows: Rows) -> list[str]:
    """Return how often each fault struck, tiers by points and faults."""
    lines = ["| | " + " | ".join(FAULTS) + " |", "|" + "---|" * (len(FAULTS) + 1)]
    for tier in TIERS:
        for point in POINTS:
            counts = rows.get(f"faults/{tier}/{point}", {}).get("counts")
            if counts:
                sensible = faults_at(tier, point)
                struck = [str(counts.get(fault, 0)) if fault in sensible else "–" for fault in FAULTS]
                lines.append(f"| {tier}, {point} | " + " | ".join(struck) + " |")
    return [*lines, ""]


if __name__ == "__main__":
    sys.exit(main())
