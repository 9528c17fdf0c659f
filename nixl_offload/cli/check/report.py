"""What ``nixl-offload check`` found: as text for people, in colours on a terminal, and as JSON; and its progress.

Threading: pure but for printing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, TextIO

from nixl_offload.cli.check.lines import STATES, Line, Section

_STYLES: Final = {"ok": "green", "warning": "yellow", "wrong": "red", "unknown": "magenta"}
_STATE_WIDTH: Final = max(map(len, STATES))


@dataclass(frozen=True, slots=True)
class CheckReport:
    """All that there is to tell."""

    sections: tuple[Section, ...]

    @property
    def works(self) -> bool:
        """Whether nothing is wrong."""
        return not any(section.worst() == "wrong" for section in self.sections)

    def to_dict(self) -> dict[str, Any]:
        """Return it all as plain data; the keys are stable. Times are seconds, sizes bytes, speeds bytes per second."""
        return {
            "works": self.works,
            "counts": self._counts(),
            "sections": [section.to_dict() for section in self.sections],
        }

    def print_to(self, out: TextIO) -> None:
        """Print it, and below it what is wrong once more, so that nobody has to scroll."""
        page = _Page(out)
        for number, section in enumerate(self.sections):
            if number:
                page.line("")
            page.line(section.title, bold=True)
            page.rows(section.lines)
        page.line("")
        counts = self._counts()
        told = ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state])
        if self.works:
            page.line(f"Nothing is wrong: {told}.", bold=True)
            return
        page.line(f"{'One thing is' if counts['wrong'] == 1 else 'Some things are'} wrong: {told}.", bold=True)
        for section in self.sections:
            for line in section.lines:
                if line.state == "wrong":
                    page.line(f"  {section.title}: {line.name}: {line.words}")
                    page.line(f"    to mend: {line.mend}")

    def _counts(self) -> dict[str, int]:
        states = [line.state for section in self.sections for line in section.lines]
        return {state: states.count(state) for state in STATES}


class Doing:
    """Says on a terminal what is being done, on one line that is written over; in a log only what takes long."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._terminal = stream.isatty()
        self._shown = False

    def __call__(self, what: str, *, long: str = "") -> None:
        """Show ``what``; ``long`` says why it will take seconds, and where that makes a line in a log."""
        text = f"{what} ({long})" if long else what
        if self._terminal:
            self._stream.write(f"\r\x1b[K{_printable(text)} ...")
            self._shown = True
        elif long:
            self._stream.write(f"nixl-offload: {_printable(text)}\n")
        self._stream.flush()

    def clear(self) -> None:
        """Leave no half line behind."""
        if self._shown:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._shown = False


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
        text = _printable(text)
        if self._console is None:
            print(text, file=self._out)
        else:
            self._console.print(text, style="bold" if bold else None)

    def rows(self, lines: list[Line]) -> None:
        """Print state, name and words below each other, and each mend below its line."""
        if self._console is None:
            width = max((len(line.name) for line in lines), default=0)
            for line in lines:
                print(f"  {line.state:<{_STATE_WIDTH}}  {line.name:<{width}}  {_printable(line.words)}", file=self._out)
                if line.mend:
                    print(f"  {'':<{_STATE_WIDTH}}  {'':<{width}}  to mend: {_printable(line.mend)}", file=self._out)
            return
        from rich.table import Table
        from rich.text import Text

        grid = Table.grid(padding=(0, 2, 0, 0))
        for overflow in ("ignore", "ignore", "fold"):
            grid.add_column(no_wrap=overflow == "ignore", overflow=overflow)
        for line in lines:
            # A server's and the loader's words may hold what looks like markup: Text takes them as they are.
            state = Text(f"  {line.state}", _STYLES[line.state])
            grid.add_row(state, Text(line.name), Text(_printable(line.words)))
            if line.mend:
                grid.add_row("", "", Text(f"to mend: {_printable(line.mend)}", "bold"))
        self._console.print(grid)


def _printable(text: str) -> str:
    """Paths, and what servers say, may hold what moves a terminal's cursor."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
