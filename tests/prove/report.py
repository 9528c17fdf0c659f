"""The proof's report: a line for each part and each cell, the matrix of faults, what was left out and why.

Threading: pure functions. ``results``: as in results.json.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.table import Column, Table

from tests.prove.faults import matrix
from tests.prove.faults.table import FAULTS, POINTS, TIERS, senseless, why_not

FINDINGS = ("wrong", "dead", "leaks", "missed")
_FOUND_HEAD = (*FINDINGS, "seconds")
_PART_HEAD = ("part", "cells", "tried", *_FOUND_HEAD)
_CELL_HEAD = ("cell", "tried", *_FOUND_HEAD)
_REASON_HEAD = ("tiers", "points", "faults", "why not")


def drawn(results: Mapping[str, Any]) -> Iterator[Table | str]:
    """Yield what a terminal shows: tables, and texts that are not to be wrapped."""
    yield _table("cells", _CELL_HEAD, _cell_lines(results))
    if table := _matrix(results):
        yield table
        yield _table("faults that make no sense", _REASON_HEAD, _reasons(results))
    yield from _notes(results)
    yield from _rates(results)
    yield _table(_title(results), _PART_HEAD, _part_lines(results))


def findings(results: Mapping[str, Any]) -> list[str]:
    """Return what was found, a line each."""
    return [
        f"{name}: {kind}: {sentence}"
        for name, row in results["cells"].items()
        for kind in FINDINGS
        for sentence in row[kind]
    ]


def markdown(results: Mapping[str, Any]) -> str:
    """Return all of it, with the command that makes it."""
    told = [
        f'`make prove ARGS="--seed {results["seed"]}"`, {_title(results)}\n',
        _markdown_table(_PART_HEAD, _part_lines(results)),
        _markdown_table(_CELL_HEAD, _cell_lines(results)),
    ]
    if table := _matrix(results):
        told += [table, _markdown_table(_REASON_HEAD, _reasons(results))]
    told.append("".join(f"- {line}\n" for line in (*_notes(results), *_rates(results))))
    return "\n".join(told)


def _title(results: Mapping[str, Any]) -> str:
    return f"commit {results['commit']}, seed {results['seed']}, {results['machine']}"


def _table(title: str, head: Sequence[str], lines: Iterable[Sequence[str]]) -> Table:
    table = Table(Column(head[0], overflow="fold"), *head[1:], title=title)
    for line in lines:
        table.add_row(*line)
    return table


def _markdown_table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, ["---"] * len(head), *lines))


def _part_lines(results: Mapping[str, Any]) -> list[list[str]]:
    parts: dict[str, list[Mapping[str, Any]]] = {}
    for name, row in results["cells"].items():
        parts.setdefault(name.split("/")[0], []).append(row)
    return [[part, str(len(rows)), *_summary(rows)] for part, rows in parts.items()]


def _cell_lines(results: Mapping[str, Any]) -> list[list[str]]:
    return [[name, *_summary([row])] for name, row in results["cells"].items()]


def _summary(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what was tried, how much was found of each kind, and the seconds. Kinds of faults are in the matrix."""
    counts: Counter[str] = Counter()
    for row in rows:
        counts.update({what: count for what, count in row["counts"].items() if what not in FAULTS})
    tried = [f"{count:,} {what}" for what, count in counts.items()]
    if left_out := sum(not row["counts"] and bool(row["note"]) for row in rows):
        tried.append("left out" if len(rows) == 1 else f"{left_out} cells left out")
    found = [str(sum(len(row[kind]) for row in rows)) for kind in FINDINGS]
    return [", ".join(tried), *found, f"{sum(row['seconds'] for row in rows):.0f}"]


def _matrix(results: Mapping[str, Any]) -> str:
    """Return how often each fault struck at each point of each tier; nothing where no fault was tried."""
    return matrix(results) if any(name.startswith("faults/") for name in results["cells"]) else ""


def _reasons(results: Mapping[str, Any]) -> list[list[str]]:
    """Return why faults are not tried in cells that are: for each reason where it holds, in few lines."""
    points: dict[tuple[str, str, str], list[str]] = {}
    for tier in TIERS:
        for point in POINTS:
            if f"faults/{tier}/{point}" in results["cells"] and senseless(tier, point) is None:
                for fault in FAULTS:
                    if (why := why_not(tier, point, fault)) is not None:
                        points.setdefault((why, tier, fault), []).append(point)
    faults: dict[tuple[str, str, tuple[str, ...]], list[str]] = {}
    for (why, tier, fault), at in points.items():
        faults.setdefault((why, tier, tuple(at)), []).append(fault)
    tiers: dict[tuple[str, tuple[str, ...], tuple[str, ...]], list[str]] = {}
    for (why, tier, at), which in faults.items():
        tiers.setdefault((why, at, tuple(which)), []).append(tier)
    return [[", ".join(of), ", ".join(at), ", ".join(which), why] for (why, at, which), of in sorted(tiers.items())]


def _notes(results: Mapping[str, Any]) -> list[str]:
    """Return what cells say beside their counts: why they make no sense, what was cut short."""
    return [f"{name}: {row['note']}" for name, row in results["cells"].items() if row["note"]]


def _rates(results: Mapping[str, Any]) -> list[str]:
    """Return what share of mutants was killed; nothing where none was tried."""
    counts: Counter[str] = Counter()
    for name, row in results["cells"].items():
        counts.update(row["counts"] if name.startswith("mutants/") else {})
    killed, tried = counts["killed"], counts["mutants"]
    if not tried:
        return []
    with_listed = tried + counts["listed"]
    return [
        f"mutants: killed {killed:,}: {killed / tried:.1%} of {tried:,} tried, "
        f"{killed / with_listed:.1%} of {with_listed:,} with those drawn that are listed"
    ]
