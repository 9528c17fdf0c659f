"""Fuzzing: bytes that others wrote, given to all that reads them. atheris finds the way by the branches that are taken.

A cell for each target, in a process of its own, for libFuzzer ends the process that it runs in. What was kept in
``tests/fixtures/fuzz`` is tried first, and what reached something new in an earlier run: that is in
``build/prove/corpus``. An input that found something is in ``build/prove/found``, named as among the fixtures, to be
moved there. ``python -m tests.prove.fuzz TARGET FILE`` shows one again.

Threading: one thread. A target raises ``Broken`` where a promise does not hold; any other exception that gets out
of the product is not a documented error, and as much a finding.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from tests.prove.cells import ROOT, Cell, Outcome
from tests.prove.fuzz.trees import Mutate

T = TypeVar("T")
One = Callable[[bytes], None]
CORPUS: Final = ROOT / "tests" / "fixtures" / "fuzz"
"""A directory for each target: inputs that once reached something new, or found something."""
KEPT: Final = ROOT / "build" / "prove"
"""Directory of what outlives a run."""
_SECONDS: Final = 12
"""No target gets more, however many inputs are left."""
_RUNS: Final = re.compile(r"stat::number_of_executed_units: +(\d+)")
_ERROR: Final = re.compile(r"Uncaught Python exception: ===\s*(.+)")


class Broken(AssertionError):  # noqa: N818 - it says what the promise is
    """What was promised does not hold for an input."""


@dataclass(frozen=True, slots=True)
class Target:
    """Something that reads bytes which others wrote."""

    name: str
    begin: Callable[[Path], One]
    """Given a directory for scratch files, returns the function that takes an input."""
    runs: int
    """Inputs tried in the proof."""
    seeds: Callable[[], Iterable[bytes]]
    """Inputs to begin with, besides the corpus."""
    words: Sequence[bytes] = ()
    """What is worth putting into inputs."""
    mutate: Mutate | None = None
    """Changes inputs that are more than bytes; most changes, where it can."""
    max_bytes: int = 4096
    input_s: int = 5
    """Longer than that for one input is a finding."""

    @property
    def directory(self) -> str:
        """The name of a directory of inputs."""
        return self.name.replace("/", "-")

    def kept(self) -> list[bytes]:
        """Return the inputs to begin with."""
        return [*self.seeds(), *(file.read_bytes() for file in sorted((CORPUS / self.directory).glob("*")))]


def targets() -> dict[str, Target]:
    """Return all targets by name. They import the package, which a fuzzer instruments before."""
    from tests.prove.fuzz import answers, stored, texts

    return {target.name: target for part in (stored, texts, answers) for target in part.targets()}


def cells(seed: int) -> Iterator[Cell]:
    """A cell for each target."""
    for name in targets():
        yield Cell(name, partial(fuzz, name, seed), limit_s=2.0 * _SECONDS + 60)


def fuzz(name: str, seed: int) -> Outcome:
    """Fuzz a target in a process of its own, in the current directory, until the first finding."""
    target = targets()[name]
    command = [sys.executable, "-m", "tests.prove.fuzz", name, f"--seed={seed}", f"--seconds={_SECONDS}"]
    ended = subprocess.run(
        [*command, f"--corpus={KEPT / 'corpus' / target.directory}"],
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    print(ended.stdout, ended.stderr)
    runs, outcome = _RUNS.search(ended.stderr), Outcome()
    outcome.counts["inputs"] = int(runs[1]) if runs else 0
    if ended.returncode or runs is None:
        kept = []
        for file in Path("scratch").glob("*-" + "[0-9a-f]" * 40):  # as libFuzzer names an input that ended it
            data = file.read_bytes()
            kept.append(KEPT / "found" / target.directory / hashlib.sha1(data, usedforsecurity=False).hexdigest()[:12])
            kept[-1].parent.mkdir(parents=True, exist_ok=True)
            kept[-1].write_bytes(data)
        error = _ERROR.search(ended.stderr)
        said = error[1] if error else " | ".join(ended.stderr.strip().splitlines()[-3:])
        where = outcome.wrong if said.startswith("Broken") else outcome.dead
        inputs = ", ".join(str(file.relative_to(ROOT)) for file in kept)
        where.append(f"ended with {ended.returncode}: {said}; input: {inputs or 'none'}")
    elif int(runs[1]) < target.runs:
        outcome.note = f"{int(runs[1]):,} of {target.runs:,} inputs, for {_SECONDS} s were over"
    return outcome


def expect(holds: object, promise: str) -> None:
    """Raise Broken unless it holds."""
    if not holds:
        raise Broken(promise)


class Reader:
    """Takes numbers, choices and bytes off an input, zeros and empty ones when it is used up."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        """Bytes that were not taken yet."""
        return max(0, len(self._data) - self._at)

    def bytes(self, count: int) -> bytes:
        """Take so many bytes, or all that are left."""
        taken = self._data[self._at : self._at + count]
        self._at += count
        return taken

    def number(self, count: int = 1) -> int:
        """Take a number of so many bytes."""
        return int.from_bytes(self.bytes(count), "little")

    def choice(self, values: Sequence[T]) -> T:
        """Take one of some values, by a byte."""
        return values[self.number() % len(values)]
