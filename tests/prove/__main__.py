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
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from tests.prove.cells import Outcome
from tests.prove.report import FINDINGS, markdown
from tests.prove.running import cells_of, run

ROOT = Path(__file__).parents[2]
PARTS: dict[str, str] = {
    name: f"tests.prove.{name}"
    for name in ("soak", "yardstick", "faults", "kills", "power", "scheduler", "fuzz", "mutants")
}
"""Name of a part, and its module: one with ``cells(seed: int) -> Iterable[Cell]``. Those with the longest
cells come first, so that no core has to wait for another at the end.
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m tests.prove", description=__doc__)
    made.add_argument("--parts", default="all", help=f"by commas ({', '.join(PARTS)})")
    made.add_argument("--cells", default="", help="only cells whose names have this in them")
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    made.add_argument("--results", type=Path, default=Path("build/prove"), help="directory of results and logs")
    made.add_argument("--list", action="store_true", help="print the cells, try none")
    return made


def main(arguments: list[str] | None = None) -> int:
    """Try what is missing; print the tables."""
    parsing = parser()
    chosen = parsing.parse_args(arguments)
    names = list(PARTS) if chosen.parts == "all" else chosen.parts.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        parsing.error(f"not known: {', '.join(unknown)}; parts are {', '.join(PARTS)}")
    cells = [
        (name, PARTS[name], cell)
        for name in names
        for cell in cells_of(PARTS[name], chosen.seed)
        if chosen.cells in cell.name
    ]
    if chosen.list:
        for name, _, cell in cells:
            print(f"{name}/{cell.name}")
        return 0
    chosen.results.mkdir(parents=True, exist_ok=True)
    file = chosen.results / "results.json"
    results = _known(file, {"commit": _commit(), "seed": chosen.seed, "machine": _machine()})
    rows: dict[str, Any] = results["cells"]
    missing = [wanted for wanted in cells if not _is_good(rows.get(f"{wanted[0]}/{wanted[2].name}"))]
    bar = tqdm(total=len(cells), initial=len(cells) - len(missing), unit="cell", disable=not sys.stderr.isatty())
    for part, cell, outcome, seconds in run(missing, chosen.seed, workers=chosen.workers, logs=chosen.results / "logs"):
        rows[f"{part}/{cell.name}"] = {**asdict(outcome), "seconds": round(seconds, 1)}
        _write(file, results)
        bar.update()
        if not outcome.is_good() or bar.disable:
            tqdm.write(f"{part}/{cell.name}: {_sentence(outcome)} ({seconds:.1f} s)", file=sys.stderr)
    bar.close()
    shown = {**results, "cells": {name: rows[name] for name in (f"{part}/{cell.name}" for part, _, cell in cells)}}
    (chosen.results / "report.md").write_text(markdown(shown))
    print(markdown(shown))
    return 0 if all(_is_good(row) for row in shown["cells"].values()) else 1


def _known(file: Path, run: dict[str, Any]) -> dict[str, Any]:
    """Return the results in ``file`` when they are of this ``run``, else none."""
    if file.exists():
        known: dict[str, Any] = json.loads(file.read_text())
        if {name: known[name] for name in run} == run:
            return known
        print("results of another commit, seed or machine are put aside", file=sys.stderr)
        file.replace(file.with_name("results-before.json"))
    return {**run, "cells": {}}


def _write(file: Path, results: dict[str, Any]) -> None:
    written = file.with_suffix(".new")
    written.write_text(json.dumps(results, indent=1))
    written.replace(file)


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


def _is_good(row: dict[str, Any] | None) -> bool:
    return row is not None and not any(row[kind] for kind in FINDINGS)


def _sentence(outcome: Outcome) -> str:
    found = [f"{kind}: {sentence}" for kind in FINDINGS for sentence in getattr(outcome, kind)]
    return "; ".join(found) or ", ".join(f"{count} {what}" for what, count in outcome.counts.items()) or outcome.note


if __name__ == "__main__":
    sys.exit(main())
