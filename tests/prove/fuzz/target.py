"""What a fuzzed part of the product is: how to open it, and a function that one input is given to.

Threading: one thread. A target raises ``Broken`` where a promise does not hold; any other exception that gets out
of the product is not a documented error, and as much a finding.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tests.prove.fuzz.trees import Mutate

T = TypeVar("T")
CORPUS = Path(__file__).parents[2] / "fixtures" / "fuzz"
"""A directory for each target: inputs that once reached something new, or found something."""
One = Callable[[bytes], None]


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
    seeds: Callable[[], Iterable[bytes]] = tuple
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

    def corpus(self) -> list[Path]:
        """Return the kept inputs."""
        return sorted((CORPUS / self.directory).glob("*"))


def targets() -> dict[str, Target]:
    """Return all targets by name. They import the package, which a fuzzer instruments before."""
    from tests.prove.fuzz import answers, stored, texts

    return {target.name: target for part in (stored, texts, answers) for target in part.targets()}


def expect(holds: object, promise: str) -> None:
    """Raise Broken unless it holds."""
    if not holds:
        raise Broken(promise)


class Reader:
    """Takes numbers, choices and texts off an input, zeros and empty ones when it is used up."""

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
        """Take one of some values; a byte tells which."""
        return values[self.number() % len(values)]


def told(error: Exception) -> str:
    """Return an error and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    where = " > ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames)
    return f"{type(error).__name__}: {str(error)[:200]} ({where})"
