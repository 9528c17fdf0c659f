"""The proof's report, as Markdown: a line for each part and each cell, the matrix of faults, notes and findings.

Threading: pure functions. ``results``: as in results.json.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tests.prove.faults import matrix
from tests.prove.faults.table import FAULTS

FINDINGS = ("wrong", "dead", "leaks", "missed")


def markdown(results: Mapping[str, Any]) -> str:
    """Return all of it, with the command that makes it."""
    cells: Mapping[str, Any] = results["cells"]
    parts: dict[str, list[Any]] = {}
    for name, row in cells.items():
        parts.setdefault(name.split("/")[0], []).append(row)
    told = [
        f'`make prove ARGS="--seed {results["seed"]}"`, commit {results["commit"]}, {results["machine"]}\n',
        _table("part", ((part, rows) for part, rows in parts.items())),
        _table("cell", ((name, [row]) for name, row in cells.items())),
        matrix(results) if "faults" in parts else "",
        "".join(f"- {name}: {row['note']}\n" for name, row in cells.items() if row["note"]),
        "".join(f"- {line}\n" for line in findings(results)),
    ]
    return "\n".join(filter(None, told))


def findings(results: Mapping[str, Any]) -> list[str]:
    """Return what was found, a line each."""
    return [
        f"{name}: {kind}: {sentence}"
        for name, row in results["cells"].items()
        for kind in FINDINGS
        for sentence in row[kind]
    ]


def _table(what: str, lines: Iterable[tuple[str, Sequence[Mapping[str, Any]]]]) -> str:
    table = [(what, "cells", "tried", *FINDINGS, "seconds"), ("---",) * 8]
    for name, rows in lines:
        counts = Counter[str]()
        for row in rows:  # kinds of faults are in the matrix
            counts.update({what: count for what, count in row["counts"].items() if what not in FAULTS})
        tried = ", ".join(f"{count:,} {what}" for what, count in counts.items())
        found = [str(sum(len(row[kind]) for row in rows)) for kind in FINDINGS]
        table.append((name, str(len(rows)), tried, *found, f"{sum(row['seconds'] for row in rows):.0f}"))
    return "".join(f"| {' | '.join(line)} |\n" for line in table)
