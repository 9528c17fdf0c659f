"""What ``nixl-offload check`` says: lines with a state, in sections. A line that says wrong has a mend.

Threading: frozen values; a section belongs to whoever fills it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

State = Literal["ok", "warning", "wrong", "unknown"]
STATES: Final[tuple[State, ...]] = ("ok", "warning", "wrong", "unknown")


class Line(NamedTuple):
    """One thing that was looked at. Make it by ``ok``, ``warning``, ``wrong`` or ``unknown``."""

    name: str
    """What it is about, in a word or two; the same in every run, for programs."""
    state: State
    words: str
    """For people: what is so, and what follows from it."""
    mend: str | None = None
    """A command, or a line of the config, that mends it; None where nothing is to be mended."""


@dataclass(slots=True)
class Section:
    """Lines about one thing: the environment, a tier."""

    kind: str
    """``environment``, ``hashes``, ``servers``, ``memory``, ``slab``, ``shared_dir``, ``s3``, ``model``."""
    title: str
    lines: list[Line] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    """What programs may want as numbers; goes into the JSON as it is."""

    def add(self, lines: Iterable[Line | None]) -> None:
        """Take lines, less those that are None."""
        self.lines += [line for line in lines if line is not None]

    def worst(self) -> State:
        """Return what the section comes to: wrong, warning or ok; what is not known makes nothing worse."""
        states = {line.state for line in self.lines}
        return "wrong" if "wrong" in states else "warning" if "warning" in states else "ok"

    def has(self, name: str, *states: State) -> bool:
        """Whether a line of that name has one of these states."""
        return any(line.name == name and line.state in states for line in self.lines)

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "kind": self.kind,
            "title": self.title,
            "state": self.worst(),
            "lines": [line._asdict() for line in self.lines],
            "facts": self.facts,
        }


def ok(name: str, words: str) -> Line:
    """It is as it should be."""
    return Line(name, "ok", words)


def warning(name: str, words: str, mend: str | None = None) -> Line:
    """It works, but costs something, or somebody should know."""
    return Line(name, "warning", words, mend)


def wrong(name: str, words: str, mend: str) -> Line:
    """It will not work until it is mended."""
    return Line(name, "wrong", words, mend)


def unknown(name: str, words: str, mend: str | None = None) -> Line:
    """It could not be found out; ``mend``: what would tell."""
    return Line(name, "unknown", words, mend)
