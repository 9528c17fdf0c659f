"""What ``nixl-offload check`` found: findings in sections, printed as text or JSON; and a line of progress meanwhile.

Threading: values and printing; a section belongs to the thread that fills it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple, TextIO, TypeVar

from nixl_offload.cli.terminal import about_size

C = TypeVar("C")

State = Literal["ok", "warning", "wrong", "unknown"]
_COLOURS: Final[dict[State, int]] = {"ok": 32, "warning": 33, "wrong": 31, "unknown": 35}
_BOLD: Final = 1


class Finding(NamedTuple):
    """The result of one probe. Make it with ``ok``, ``warning``, ``wrong`` or ``unknown``; a section names it."""

    state: State
    words: str
    """What is so, and what follows from it."""
    fix: str | None = None
    """A command or a line of the config that changes or shows it; of a finding that is ok, a line worth adding."""
    name: str = ""
    """The probe's name, the same in every run."""


def ok(words: str, config: str | None = None) -> Finding:
    """Return that it is as it should be."""
    return Finding("ok", words, config)


def warning(words: str, fix: str | None = None) -> Finding:
    """Return that it works, but costs something or is risky."""
    return Finding("warning", words, fix)


def wrong(words: str, fix: str) -> Finding:
    """Return that it does not work until it is fixed."""
    return Finding("wrong", words, fix)


def unknown(words: str, fix: str | None = None) -> Finding:
    """Return that it is not known from here."""
    return Finding("unknown", words, fix)


Probe = tuple[str, Callable[[C], Finding | None]]
"""A name and the function that looks; None means that the probe does not apply."""


def speed_finding(answer: Mapping[str, Any]) -> Finding:
    """Return the figures of a short I/O test, or why there are none."""
    if "failed" in answer:
        return warning(f"not measured: {answer['failed']}", "see the findings above")
    read, written = answer["read_bytes_s"] / 1e6, answer["write_bytes_s"] / 1e6
    return ok(f"read {read:,.0f} MB/s, write {written:,.0f} MB/s ({about_size(answer['piece_bytes'])} at a time)")


@dataclass(slots=True)
class Section:
    """Findings about one thing: the environment, the servers, a tier, the model."""

    kind: str
    """``environment``, ``model``, or the kind of a tier."""
    title: str
    findings: list[Finding] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    """Figures for programs; goes into the JSON as it is."""

    def add(self, name: str, *findings: Finding | None) -> None:
        """Add findings of the probe ``name``, without those that are None."""
        self.findings += [found._replace(name=name) for found in findings if found is not None]

    def run(self, probes: Sequence[Probe[C]], context: C) -> None:
        """Run each probe and add what it finds."""
        for name, look in probes:
            self.add(name, look(context))

    def state(self, name: str | None = None) -> State:
        """Return the worst state of all findings, or of those called ``name``. Unknown counts as ok."""
        states = {found.state for found in self.findings if name in (None, found.name)}
        return "wrong" if "wrong" in states else "warning" if "warning" in states else "ok"

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        findings = [found._asdict() for found in self.findings]
        plain = {"kind": self.kind, "title": self.title, "state": self.state()}
        return {**plain, "findings": findings, "facts": self.facts}


@dataclass(frozen=True, slots=True)
class CheckReport:
    """All sections."""

    sections: Sequence[Section]

    @property
    def works(self) -> bool:
        """Whether nothing is wrong."""
        return all(section.state() != "wrong" for section in self.sections)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data with stable keys: times in seconds, sizes in bytes, speeds in bytes per second."""
        sections = [section.to_dict() for section in self.sections]
        return {"works": self.works, "counts": self._counts(), "sections": sections}

    def print_to(self, out: TextIO) -> None:
        """Print all findings, and at the end once more those that are wrong; in colours on a terminal."""
        colours = out.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"

        def styled(text: str, style: int) -> str:
            return f"\x1b[{style}m{text}\x1b[0m" if colours and text else text

        repeated = []
        for section in self.sections:
            print(styled(_printable(section.title), _BOLD), file=out)
            width = max((len(found.name) for found in section.findings), default=0)
            for state, words, fix, name in section.findings:
                print(styled(f"  {state:<7}", _COLOURS[state]), f" {name:<{width}} ", _printable(words), file=out)
                label = "config" if state == "ok" else "fix"
                for line in (fix or "").splitlines():
                    print(" " * (width + 12), styled(f"{label}: {_printable(line)}", _BOLD), file=out)
                if state == "wrong":
                    repeated += [f"  {section.title}: {name}: {words}", f"    fix: {fix}"]
            print(file=out)
        counts = self._counts()
        summary = ", ".join(f"{counts[state]} {state}" for state in _COLOURS if counts[state])
        verdict = {0: "Nothing is wrong", 1: "One thing is wrong"}.get(counts["wrong"], "Some things are wrong")
        print(styled(f"{verdict}: {summary}.", _BOLD), *map(_printable, repeated), sep="\n", file=out)

    def _counts(self) -> dict[State, int]:
        states = [found.state for section in self.sections for found in section.findings]
        return {state: states.count(state) for state in _COLOURS}


class CheckProgress:
    """Shows the current step: on a terminal a line that is written over, in a log only the steps that take long."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._terminal = stream.isatty()

    def __call__(self, step: str, *, why_long: str = "") -> None:
        """Show ``step``; ``why_long`` says why it takes seconds."""
        text = _printable(f"{step} ({why_long})" if why_long else step)
        if self._terminal:
            self._stream.write(f"\r\x1b[K{text} ...")
        elif why_long:
            self._stream.write(f"nixl-offload: {text}\n")
        self._stream.flush()

    def clear(self) -> None:
        """Erase the line."""
        if self._terminal:
            self._stream.write("\r\x1b[K")
            self._stream.flush()


def _printable(text: str) -> str:
    """Return text that cannot move a terminal's cursor: paths and servers' answers may hold anything."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
