"""The yardstick's table for the documentation, out of what ``make prove`` has written.

    python -m tests.prove.yardstick.table build/prove/results.json

Threading: plain functions.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def markdown(results: Mapping[str, Any]) -> str:
    """Return a row for each fault and a column for each side. Only what does not recover has a word on it."""
    columns: dict[str, dict[str, str]] = {}
    versions: list[str] = []
    for name, row in results["cells"].items():
        part, _, side = name.partition("/")
        if part != "yardstick":
            continue
        version, _, told = row["note"].partition(": ")
        versions.append(f"{side}: {version}{'' if row['counts'] else f' ({told})'}")
        columns[side] = dict(verdict.split(": ", 1) for verdict in told.split("; ")) if row["counts"] else {}
    sides = [side for side, verdicts in columns.items() if verdicts]
    faults = list(dict.fromkeys(fault for side in sides for fault in columns[side]))
    lines = [("", *sides), ("---",) * (len(sides) + 1)]
    lines += [(fault, *(_cell(columns[side].get(fault, "")) for side in sides)) for fault in faults]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines) + f"\n{'; '.join(versions)}.\n"


def _cell(verdict: str) -> str:
    what, _, recovered = verdict.partition(", ")
    shown = f"**{what}**" if what not in ("", "exact") else what
    return f"{shown}, {recovered}" if recovered else shown


if __name__ == "__main__":
    print(markdown(json.loads(Path(sys.argv[1]).read_text())))
