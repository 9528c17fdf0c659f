"""What ``nixl-offload check`` found: as text for people, in colours on a terminal, and as JSON.

Threading: pure but for printing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TextIO

from nixl_offload.cli.terminal import moment
from nixl_offload.movers.gds import GdsReport
from nixl_offload.movers.select import Probe

_MARKS: Final = {True: "ok", False: "not", None: "unknown"}
_STYLES: Final = {"ok": "green", "not": "red", "unknown": "yellow"}

Row = tuple[str, str, str]
"""Mark, name, words."""


class Measured(NamedTuple):
    """A choice that lies beside the data."""

    path: str
    mover: str
    way: str
    reason: str
    measured_at_s: float
    current: bool
    """Young enough to be used by the next start of the same machine and setting."""
    candidates: tuple[tuple[str, str, bool, str, float, float], ...]
    """Mover, way, whether it ran, why not, bytes per second read and written."""

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        names = ("mover", "way", "ok", "reason", "read_bytes_s", "write_bytes_s")
        return {
            **{name: value for name, value in self._asdict().items() if name != "candidates"},
            "candidates": [dict(zip(names, candidate, strict=True)) for candidate in self.candidates],
        }


@dataclass(frozen=True, slots=True)
class TierReport:
    """All that there is to tell about one tier."""

    path: str
    mover: str
    """What the config says."""
    gds: GdsReport
    movers: tuple[Probe, ...]
    allowed: tuple[str, ...]
    """Movers that the config lets this machine take."""
    measured: tuple[Measured, ...]
    problems: tuple[str, ...]
    """Why it will not work; empty when it will."""

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "path": self.path,
            "mover": self.mover,
            "works": not self.problems,
            "problems": list(self.problems),
            "gds": {
                "real": self.gds.real,
                "verdict": self.gds.verdict,
                "facts": [fact._asdict() for fact in self.gds.facts],
            },
            "movers": [{**probe._asdict(), "allowed": probe.name in self.allowed} for probe in self.movers],
            "measured": [measured.to_dict() for measured in self.measured],
        }

    def fact_rows(self) -> list[Row]:
        """Return what decides about GPUDirect Storage."""
        rows = []
        for fact in self.gds.facts:
            rows.append((_MARKS[fact.ok], fact.name, fact.words))
            if fact.mend and not fact.ok:
                rows.append(("", "", f"to mend: {fact.mend}"))
        return rows

    def mover_rows(self) -> list[Row]:
        """Return which movers start."""
        other = "" if self.mover == "auto" else f" (`mover: {self.mover}` does not allow it)"
        return [
            (_MARKS[probe.ok], probe.name, probe.reason + ("" if probe.name in self.allowed else other))
            for probe in self.movers
        ]


@dataclass(frozen=True, slots=True)
class CheckReport:
    """All tiers."""

    tiers: tuple[TierReport, ...]

    @property
    def works(self) -> bool:
        """Whether every tier will."""
        return not any(tier.problems for tier in self.tiers)

    def to_dict(self) -> dict[str, Any]:
        """Return it all as plain data. Times are seconds since the epoch."""
        return {"works": self.works, "tiers": [tier.to_dict() for tier in self.tiers]}

    def print_to(self, out: TextIO) -> None:
        """Print it."""
        page = _Page(out)
        if not self.tiers:
            page.line("No tier with kind: file; nothing to check.")
        for number, tier in enumerate(self.tiers):
            if number:
                page.line("")
            page.line(f"{tier.path}, mover: {tier.mover}", bold=True)
            page.line("")
            page.line(tier.gds.verdict)
            page.rows(tier.fact_rows())
            if tier.movers:
                page.line("")
                page.line("Movers:")
                page.rows(tier.mover_rows())
            page.line("")
            for measured in tier.measured:
                age = "" if measured.current else ", too old to be used"
                chosen = f"{measured.mover} ({measured.way})"
                page.line(f"Measured {moment(measured.measured_at_s)}{age}; chosen: {chosen}, {measured.reason}")
                page.rows([_speeds(candidate) for candidate in measured.candidates])
            if not tier.measured:
                page.line("Speeds: not measured yet; with `mover: auto` and a GPU the first start does it.")
            for problem in tier.problems:
                page.rows([("not", "will not work", problem)])


def _speeds(candidate: tuple[str, str, bool, str, float, float]) -> Row:
    mover, way, ok, reason, read_bytes_s, write_bytes_s = candidate
    speeds = f"read {read_bytes_s / 1e6:,.0f} MB/s, write {write_bytes_s / 1e6:,.0f} MB/s"
    return (_MARKS[ok], f"{mover} {way}", speeds if ok and read_bytes_s else reason)


class _Page:
    """Plain text, or rich where a person looks at a terminal."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._console: Any = None
        if out.isatty():
            from rich.console import Console

            self._console = Console(file=out, highlight=False, markup=False, emoji=False)

    def line(self, text: str, *, bold: bool = False) -> None:
        """Print one line."""
        if self._console is None:
            print(text, file=self._out)
        else:
            self._console.print(text, style="bold" if bold else None)

    def rows(self, rows: list[Row]) -> None:
        """Print mark, name and words below each other."""
        if not rows:
            return
        if self._console is None:
            width = max(len(name) for _, name, _ in rows)
            for mark, name, words in rows:
                print(f"  {mark:<7}  {name:<{width}}  {words}".rstrip(), file=self._out)
            return
        from rich.table import Table
        from rich.text import Text

        grid = Table.grid(padding=(0, 2, 0, 0))
        for overflow in ("ignore", "ignore", "fold"):
            grid.add_column(no_wrap=overflow == "ignore", overflow=overflow)
        for mark, name, words in rows:
            # The drive's and the loader's words may hold what looks like markup: Text takes them as they are.
            grid.add_row(Text(f"  {mark:<7}", _STYLES.get(mark, "")), Text(name), Text(words))
        self._console.print(grid)
