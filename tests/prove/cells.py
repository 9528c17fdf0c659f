"""Cells: what a part of the proof is made of. Each is tried in a process of its own: one that hangs or dies is a
finding, not an end.

Imports nothing of the product, for a cell of faults sets the clock before it loads that. Threading: ``run`` has a
thread for each worker. Ownership: processes and scratch directories are gone when ``run`` ends or is closed.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
FINDINGS: Final = ("wrong", "dead", "leaks", "missed")
_LOOK_S: Final = 0.1


@dataclass(slots=True)
class Outcome:
    """What came out of a cell. All lists empty: as it should be.

    A finding is a sentence that says how to see it again: which step of which seed, what was expected, what came.
    """

    counts: dict[str, int] = field(default_factory=dict)
    """How often what was tried: ``faults``, ``kills``, ``histories``, ``inputs`` ...; never only 0, for a
    cell that tried nothing proves nothing."""
    wrong: list[str] = field(default_factory=list)
    """Answers and bytes that are not those that were asked for."""
    dead: list[str] = field(default_factory=list)
    """What ended, raised or waited without end where it should have gone on."""
    leaks: list[str] = field(default_factory=list)
    """Pins, slots, tickets, file descriptors, threads and files that were not given back."""
    missed: list[str] = field(default_factory=list)
    """All else that was expected and did not come: a fault that was not noticed."""
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


def cells_of(module: str, seed: int) -> list[Cell]:
    """Return a part's cells for a seed. The same seed gives the same cells in the same order."""
    cells = list(importlib.import_module(module).cells(seed))
    assert len({cell.name for cell in cells}) == len(cells), f"{module} has several cells of one name"
    return cells


def run(
    wanted: Iterable[tuple[str, str, Cell]], seed: int, *, logs: Path, workers: int = 2
) -> Iterator[tuple[str, Outcome, float]]:
    """Yield name, outcome and seconds of each of the wanted (part, its module, cell), as they end.

    Each worker has cores of its own, so that cells disturb each other little. ``logs`` keeps what a cell printed when
    something was found in it. Closing the generator ends what runs.
    """
    all_cores, stopping = sorted(os.sched_getaffinity(0)), threading.Event()
    cores = deque(set(all_cores[worker::workers]) or set(all_cores) for worker in range(workers))
    logs.mkdir(parents=True, exist_ok=True)

    def begin(part: str, module: str, cell: Cell) -> tuple[str, Outcome, float]:
        name, began_s = f"{part}/{cell.name}", time.monotonic()
        log = logs / f"{name}.log".replace("/", "-").replace(" ", "_")
        outcome = _try(module, cell, seed, log, stopping)
        if outcome.is_good():
            log.unlink()
            if not any(outcome.counts.values()) and (outcome.counts or not outcome.note):
                outcome.missed.append("nothing was tried")
        return name, outcome, time.monotonic() - began_s

    # A thread's processes run on its cores.
    with ThreadPoolExecutor(workers, initializer=lambda: os.sched_setaffinity(0, cores.pop())) as pool:
        begun = [pool.submit(begin, *one) for one in wanted]
        try:
            for ended in as_completed(begun):
                yield ended.result()
        finally:
            stopping.set()
            pool.shutdown(cancel_futures=True)


def _try(module: str, cell: Cell, seed: int, log: Path, stopping: threading.Event) -> Outcome:
    """Return what came out of a cell, or that nothing did; end its process, and what that has left running."""
    with tempfile.TemporaryDirectory(prefix="nixl-offload-prove-", ignore_cleanup_errors=True) as scratch:
        search_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        # The order of sets of keys is part of what a seed decides.
        environment = {**os.environ, "PYTHONPATH": search_path, "TMPDIR": scratch, "PYTHONHASHSEED": "0"}
        command = [sys.executable, "-c", "from tests.prove.cells import main; main()", module, cell.name, str(seed)]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, cwd=scratch, env=environment, stdout=output, stderr=output, start_new_session=True
            )
        until_s = time.monotonic() + cell.limit_s
        while process.poll() is None and time.monotonic() < until_s and not stopping.wait(_LOOK_S):
            pass
        ended = process.poll()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if ended == 0:
            return Outcome(**json.loads(Path(scratch, "outcome.json").read_text()))
    end = f"did not end within {cell.limit_s:.0f} s" if ended is None else f"its process ended with {ended}"
    return Outcome(dead=[f"{end}; see {log.name}"])


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
