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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from benchmarks import tables

MIN_ROUNDS = 3
CELLS = ("MB/s", "ratio", "CPU s/GB", "server's")
"""Headings of ``Contest.lines``."""


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

    def gb_s(self, name: str) -> float:
        """Return the median rate."""
        return self.size_bytes / 1e9 / statistics.median(run.seconds for run in self.runs[name])

    def ratio(self, name: str, base: str) -> float | None:
        """Return how much faster ``name`` is than ``base``; None without a round that both ended."""
        pairs = list(zip(self.runs.get(name, []), self.runs.get(base, []), strict=False))
        return statistics.median(theirs.seconds / own.seconds for own, theirs in pairs) if pairs else None

    def lines(self, base: str, *labels: str) -> Iterator[list[str]]:
        """Yield a line of a table for each candidate: its name, ``labels`` and ``CELLS``, the ratio to ``base``."""
        for name in dict.fromkeys((*self.runs, *self.trouble)):
            if name in self.trouble:
                yield [f"{name}: {self.trouble[name]}", *labels, *["–"] * len(CELLS)]
                continue
            # The kernel counts another process's time in steps of 10 ms, so the mean is better than the median.
            cpu_s, server_cpu_s = (statistics.fmean(run[at] for run in self.runs[name]) for at in (1, 2))
            per_gb = 1e9 / self.size_bytes
            numbers = (self.gb_s(name) * 1e3, self.ratio(name, base), cpu_s * per_gb, server_cpu_s * per_gb)
            forms = (",.0f", ".2f", ".2f", ".2f")
            yield [name, *labels, *(tables.number(*each) for each in zip(numbers, forms, strict=True))]


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
