"""The proof's table: a line for each part and first word of its cells' names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from rich.table import Table

FINDINGS = ("wrong", "dead", "leaks", "missed")
_HEAD = ("part", "cells", "tried", *FINDINGS, "seconds")


def drawn(results: Mapping[str, Any]) -> Table:
    """Return the table for a terminal."""
    table = Table(*_HEAD, title=_title(results))
    for line in _lines(results):
        table.add_row(*line)
    return table


def findings(results: Mapping[str, Any]) -> list[str]:
    """Return what was found, a line each."""
    return [
        f"{name}: {kind}: {sentence}"
        for name, row in results["cells"].items()
        for kind in FINDINGS
        for sentence in row[kind]
    ]


def markdown(results: Mapping[str, Any]) -> str:
    """Return the table, with the command that makes it."""
    lines = [_HEAD, ["---"] * len(_HEAD), *_lines(results)]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return f'`make prove ARGS="--seed {results["seed"]}"`, {_title(results)}\n\n{table}'


def _title(results: Mapping[str, Any]) -> str:
    return f"commit {results['commit']}, seed {results['seed']}, {results['machine']}"


def _lines(results: Mapping[str, Any]) -> list[list[str]]:
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for name, row in results["cells"].items():
        groups.setdefault("/".join(name.split("/")[:2]), []).append(row)
    return [[name, *_summary(rows)] for name, rows in groups.items()]


def _summary(rows: list[Mapping[str, Any]]) -> list[str]:
    counts: Counter[str] = Counter()
    for row in rows:
        counts.update(row["counts"])
    left_out = sum(not row["counts"] and bool(row["note"]) for row in rows)
    tried = ", ".join(f"{count:,} {what}" for what, count in counts.items())
    if left_out:
        tried += f"; {left_out} cells left out"
    found = [str(sum(len(row[kind]) for row in rows)) for kind in FINDINGS]
    return [str(len(rows)), tried, *found, f"{sum(row['seconds'] for row in rows):.0f}"]
