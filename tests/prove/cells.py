"""What a part of the proof is made of: cells, each tried in a process of its own, each with counts and findings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Outcome:
    """What came out of a cell. All lists empty: as it should be.

    A finding is a sentence that tells how to see it again: which step of which seed, what was expected, what came.
    """

    counts: dict[str, int] = field(default_factory=dict)
    """How often what was tried: ``faults``, ``kills``, ``histories``, ``schedules``, ``inputs``, ``mutants`` ...; never
    only 0, for a cell that tried nothing proves nothing."""
    wrong: list[str] = field(default_factory=list)
    """Answers and bytes that are not those that were asked for."""
    dead: list[str] = field(default_factory=list)
    """What ended, raised or waited without end where it should have gone on."""
    leaks: list[str] = field(default_factory=list)
    """Pins, slots, tickets, file descriptors, threads and files that were not given back."""
    missed: list[str] = field(default_factory=list)
    """All else that was expected and did not come: a fault that was not noticed, a mutant that lives."""
    note: str = ""
    """What a reader of the table should know; for a cell that makes no sense the reason, with no counts."""

    def is_good(self) -> bool:
        """Whether nothing was found."""
        return not (self.wrong or self.dead or self.leaks or self.missed)


@dataclass(frozen=True, slots=True)
class Cell:
    """One thing to try. ``run`` is called in a new process, with its directory for scratch files as current one."""

    name: str
    """Unique in its part, of words and slashes: ``slab/load/EIO``."""
    run: Callable[[], Outcome]
    limit_s: float = 300.0
    """Longer than that is a finding: the process is killed and counts as dead."""
