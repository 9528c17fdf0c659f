"""Candidates taking turns, and rows of the one table: medians, and ratios that are medians of each round's own.

Threading: one thread. Nothing is dropped silently: a candidate that fails becomes a row that says why.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

Run = Callable[[int], float]
"""Does the work of one round, whose number it is given, and returns the seconds that it took, all copies ended."""

MIN_ROUNDS = 3


class WrongBytesError(Exception):
    """What arrived is not what was sent: worse than anything that a row could measure."""


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    part: str
    case: str
    way: str
    size: str = ""
    """Of the pieces; a column of its own in the table."""
    gb_s: float | None = None
    against: str = ""
    """What ``ratio`` is to: "plain copy" and 0.9 say that the way has nine tenths of its speed."""
    ratio: float | None = None
    note: str = ""
    """Why it was not measured, or what else is to be known."""
    failed: bool = False
    """Something is broken, not merely absent: the whole run has failed."""


@dataclass
class Contest:
    """What came of the rounds: seconds by candidate, and why one gave up."""

    size_bytes: int
    seconds: dict[str, list[float]] = field(default_factory=dict)
    trouble: dict[str, str] = field(default_factory=dict)
    wrong: set[str] = field(default_factory=set)
    """Those that gave up because of wrong bytes."""

    def gb_s(self, name: str) -> float | None:
        """The median speed, each byte counted once."""
        times = self.seconds.get(name)
        return self.size_bytes / statistics.median(times) / 1e9 if times else None

    def ratio(self, name: str, base: str) -> float | None:
        """How much faster ``name`` is than ``base``: the median over rounds of both."""
        pairs = list(zip(self.seconds.get(name, []), self.seconds.get(base, []), strict=False))
        return statistics.median(b / a for a, b in pairs) if pairs else None

    def row(self, part: str, case: str, name: str, size: str, base: str) -> Row:
        """The row of one candidate, with its ratio to ``base``."""
        if name in self.trouble:
            return Row(part, case, name, size, note=self.trouble[name], failed=name in self.wrong)
        ratio = None if name == base else self.ratio(name, base)
        note = f"{base} could not be measured" if ratio is None and name != base else ""
        return Row(part, case, name, size, self.gb_s(name), base if ratio is not None else "", ratio, note)


def contest(candidates: Mapping[str, Run], size_bytes: int, rounds: int, deadline_s: float) -> Contest:
    """Let the candidates take turns, in an order drawn for each round, after one round that warms up.

    Ends after ``rounds``, or when the next would not be over by ``deadline_s`` (``time.monotonic``), but not before
    ``MIN_ROUNDS``; once that time is over, after the first. A candidate that raises is out; the others go on, and its
    rounds do not count.
    """
    found = Contest(size_bytes, {name: [] for name in candidates})
    lots, longest_s = random.Random(1), 0.0
    for number in range(rounds + 1):
        begun = time.monotonic()
        late = begun > deadline_s or (number > MIN_ROUNDS and begun + longest_s > deadline_s)
        if number > 1 and late:
            break
        alive = [name for name in candidates if name not in found.trouble]
        for name in lots.sample(alive, len(alive)):
            try:
                seconds = candidates[name](number)
            except Exception as error:  # noqa: BLE001 - whatever it is, the others are still to be measured
                found.trouble[name] = reason(error)
                if isinstance(error, WrongBytesError):
                    found.wrong.add(name)
                found.seconds[name] = []
                continue
            if number:
                found.seconds[name].append(seconds)
        longest_s = max(longest_s, time.monotonic() - begun) if number else 0.0
    return found


def reason(error: BaseException) -> str:
    """What a row says of an error: one line, not too long."""
    words = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, WrongBytesError):
        words = f"WRONG BYTES: {words}"
    return words if len(words) <= 200 else f"{words[:200]} …"


def unit(size_bytes: int) -> str:
    """``65536`` is "64 KiB"."""
    return f"{size_bytes >> 20} MiB" if size_bytes >= 1 << 20 else f"{size_bytes >> 10} KiB"
