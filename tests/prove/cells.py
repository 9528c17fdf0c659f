"""Cells: what a part of the proof is made of. Each is tried in a process of its own: one that hangs or dies is a
finding, not an end.

Imports nothing of the product, for a cell of faults sets the clock before it loads that. Ownership: a cell's processes
and scratch directory are gone when ``tried`` returns.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
FINDINGS: Final = ("wrong", "dead", "leaks", "missed")


@dataclass(slots=True)
class Outcome:
    """What came out of a cell. All lists empty: as it should be.

    A finding is a sentence that says how to see it again: which step of which seed, what was expected, what came.
    """

    counts: dict[str, int] = field(default_factory=dict)
    """How often what was tried: ``faults``, ``kills``, ``histories``, ``inputs`` ...; never only 0, for a cell that
    tried nothing proves nothing."""
    wrong: list[str] = field(default_factory=list)
    """Answers and bytes that are not those that were asked for."""
    dead: list[str] = field(default_factory=list)
    """What ended, raised or waited without end where it should have gone on."""
    leaks: list[str] = field(default_factory=list)
    """Pins, slots, tickets, file descriptors, threads and files that were not given back."""
    missed: list[str] = field(default_factory=list)
    """All else that was expected and did not come, such as a fault that was not noticed."""
    note: str = ""
    """What a reader of the table should know; for a cell that makes no sense the reason, with no counts."""

    @property
    def findings(self) -> list[str]:
        """All that was found, each with its kind."""
        return [f"{kind}: {sentence}" for kind in FINDINGS for sentence in getattr(self, kind)]

    def add(self, other: Outcome, where: str) -> None:
        """Take over another's findings, which came up ``where``."""
        for kind in FINDINGS:
            getattr(self, kind).extend(f"{where}: {sentence}" for sentence in getattr(other, kind))


@dataclass(frozen=True, slots=True)
class Cell:
    """One thing to try. ``run`` is called in a new process, with its directory for scratch files as current one."""

    name: str
    """Unique in its part, of words and slashes: ``slab/load/EIO``."""
    run: Callable[[], Outcome]
    limit_s: float = 300.0
    """Longer than that is a finding: the process is killed and counts as dead."""


def cells_of(module: str, seed: int) -> list[Cell]:
    """Return a part's cells for a seed. The same seed gives the same cells in the same order."""
    return list(importlib.import_module(module).cells(seed))


def tried(module: str, cell: Cell, seed: int) -> Outcome:
    """Try a cell of a part. Prints what it has printed. Ends its process, and what that has left running."""
    with tempfile.TemporaryDirectory(prefix="nixl-offload-prove-", ignore_cleanup_errors=True) as scratch:
        search_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        # The order of sets of keys is part of what a seed decides.
        environment = {**os.environ, "PYTHONPATH": search_path, "TMPDIR": scratch, "PYTHONHASHSEED": "0"}
        command = [sys.executable, "-c", "from tests.prove.cells import main; main()", module, cell.name, str(seed)]
        with Path(scratch, "log").open("w+b") as log:
            process = subprocess.Popen(
                command, cwd=scratch, env=environment, stdout=log, stderr=log, start_new_session=True
            )
            try:
                process.wait(cell.limit_s)
                end = f"its process ended with {process.returncode}"
            except subprocess.TimeoutExpired:
                end = f"did not end within {cell.limit_s:.0f} s"
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            log.seek(0)
            print(log.read().decode(errors="replace"))
        written = Path(scratch, "outcome.json")
        outcome = Outcome(**json.loads(written.read_text())) if written.exists() else Outcome(dead=[end])
    if not outcome.findings and not any(outcome.counts.values()) and (outcome.counts or not outcome.note):
        outcome.missed.append("nothing was tried")
    return outcome


def main() -> None:
    """In the cell's process: try it, and write down what came out. Threads that it left do not hold up the end."""
    (module, name, seed), written = sys.argv[1:], Path("outcome.json").absolute()
    try:
        outcome = next(cell for cell in cells_of(module, int(seed)) if cell.name == name).run()
    except BaseException:  # noqa: BLE001 - it is what came out of the cell
        traceback.print_exc()
        outcome = Outcome(dead=[traceback.format_exc(limit=-3)])
    written.write_text(json.dumps(asdict(outcome)))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
