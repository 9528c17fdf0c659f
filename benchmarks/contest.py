"""Candidates take turns: the frame of every comparison here.

Each round runs all candidates in a random order, so that a noisy machine is equally unkind to all. A ratio is the
median of the ratios of single rounds. A candidate that fails drops out with a reason; the others go on.
Threading: one thread.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from benchmarks import tables

MIN_ROUNDS = 3


class WrongBytesError(Exception):
    """Other bytes arrived than were sent. No measurement makes up for that."""


class Run(NamedTuple):
    """The work of one candidate in one round. CPU is NaN if it was not measured."""

    seconds: float
    cpu_s: float = math.nan
    """Of the process that moves the bytes."""
    server_cpu_s: float = math.nan


Candidate = Callable[[int], Run]
"""Does the work of the round with this number. All copies have ended when it returns."""


@dataclass
class Contest:
    """The runs of each candidate, and why some dropped out. ``size_bytes`` is what a run moves."""

    size_bytes: int
    runs: dict[str, list[Run]]
    trouble: dict[str, str] = field(default_factory=dict)

    def rows(self, base: str, *what: str) -> Iterator[Row]:
        """Yield a row for each candidate, with its ratio to ``base``. ``what``: part, case and size of pieces."""
        per_gb = 1e9 / self.size_bytes
        for name in dict.fromkeys((*self.runs, *self.trouble)):
            if note := self.trouble.get(name):
                yield Row(what, name, note=note, failed=note.startswith(WrongBytesError.__name__))
                continue
            runs = self.runs[name]
            pairs = zip(runs, self.runs.get(base, []), strict=False)
            ratios = [theirs.seconds / own.seconds for own, theirs in pairs if name != base]
            yield Row(
                what,
                name,
                statistics.median(1e-6 * self.size_bytes / run.seconds for run in runs),
                statistics.median(ratios) if ratios else None,
                # The kernel counts another process's time in steps of 10 ms, so the mean is better than the median.
                *(per_gb * statistics.fmean(times) for times in list(zip(*runs, strict=True))[1:]),
            )


@dataclass(frozen=True)
class Row:
    """A line of the table. NaN and None: not measured."""

    what: tuple[str, ...]
    side: str
    mb_s: float | None = None
    """Median over rounds, each byte counted once."""
    ratio: float | None = None
    """Of speeds, to the base: the median of each round's ratio."""
    cpu_s_per_gb: float | None = None
    server_cpu_s_per_gb: float | None = None
    note: str = ""
    """Why it was not measured."""
    failed: bool = False
    """Something is broken, not merely absent: the whole run has failed."""


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a table without empty columns, and below it why some were not measured."""
    heading = ["", "side", "MB/s", "ratio", "CPU s/GB", "server's"]
    lines = [
        [
            ", ".join(row.what),
            row.side,
            tables.number(row.mb_s, ",.0f"),
            *(tables.number(each, ".2f") for each in (row.ratio, row.cpu_s_per_gb, row.server_cpu_s_per_gb)),
        ]
        for row in rows
    ]
    shown = [at for at in range(len(heading)) if any(line[at] != "–" for line in lines)]
    lines = [[line[at] for at in shown] for line in (heading, *lines)]
    notes = dict.fromkeys(f"{row.side}: {row.note}" for row in rows if row.note)
    return "\n".join([tables.table(lines[0], lines[1:]), "", *notes]) if rows else ""


def contest(candidates: Mapping[str, Candidate], size_bytes: int, rounds: int, deadline_s: float = math.inf) -> Contest:
    """Let the candidates take turns for ``rounds``, after one round that warms up and does not count.

    Ends early when the next round would not be over by ``deadline_s`` (``time.monotonic``), but not before
    ``MIN_ROUNDS``; once that time is over, after the first.
    """
    found = Contest(size_bytes, {name: [] for name in candidates})
    lots, longest_s = random.Random(1), 0.0
    for number in range(rounds + 1):
        begun_s = time.monotonic()
        if number > 1 and (begun_s > deadline_s or (number > MIN_ROUNDS and begun_s + longest_s > deadline_s)):
            break
        alive = [name for name in candidates if name not in found.trouble]
        for name in lots.sample(alive, len(alive)):
            try:
                run = candidates[name](number)
            except Exception as error:  # noqa: BLE001 - the others are still to be measured
                found.trouble[name] = reason(error)
                continue
            if number:
                found.runs[name].append(run)
        longest_s = max(longest_s, time.monotonic() - begun_s) if number else 0.0
    return found


def reason(error: BaseException) -> str:
    """Return an error as one line of at most 200 characters."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
