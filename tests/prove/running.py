"""Runs cells, each in a process of its own, several at a time; a cell that hangs or dies is a finding, not an end.

Threading: one thread. Ownership: processes and scratch directories are gone when ``run`` returns or is closed.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest.mock import patch

from tests.prove.cells import Cell, Outcome

_LOOK_S = 1.0
_END_S = 10.0


@dataclass(slots=True, eq=False)
class _Running:
    part: str
    cell: Cell
    process: BaseProcess
    answer: Connection
    scratch: tempfile.TemporaryDirectory[str]
    cores: set[int]
    began_s: float = field(default_factory=time.monotonic)

    def is_late(self) -> bool:
        return time.monotonic() > self.began_s + self.cell.limit_s


def cells_of(module: str, seed: int) -> list[Cell]:
    """Return a part's cells for a seed. The same seed gives the same cells in the same order.

    Raises ValueError when two have one name.
    """
    cells = list(importlib.import_module(module).cells(seed))
    names = [cell.name for cell in cells]
    if doubled := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"{module} has several cells named {', '.join(sorted(doubled))}")
    return cells


def run(
    wanted: Iterable[tuple[str, str, Cell]], seed: int, *, workers: int, logs: Path
) -> Iterator[tuple[str, Cell, Outcome, float]]:
    """Yield part, cell, outcome and seconds of each of the wanted (part, its module, cell), as they end.

    Each worker has cores of its own, so that cells disturb each other little. ``logs`` keeps what a cell printed when
    something was found in it. Closing the generator ends what runs.
    """
    waiting, running = deque(wanted), list[_Running]()
    all_cores = sorted(os.sched_getaffinity(0))
    free = [set(all_cores[worker::workers]) or set(all_cores) for worker in range(workers)]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([])  # a cell of faults sets the clock before it loads the product
    with patch.dict(os.environ, PYTHONHASHSEED="0"):  # the order of sets of keys is part of what a seed decides
        forkserver.ensure_running()
    logs.mkdir(parents=True, exist_ok=True)
    try:
        while waiting or running:
            while waiting and free:
                running.append(_begin(context, *waiting.popleft(), seed, logs, free.pop()))
            wait([one.answer for one in running], timeout=_LOOK_S)
            for one in [one for one in running if one.answer.poll() or one.is_late() or not one.process.is_alive()]:
                running.remove(one)
                free.append(one.cores)
                outcome = _end(one, _log(logs, one.part, one.cell))
                yield one.part, one.cell, outcome, time.monotonic() - one.began_s
    finally:
        for one in running:
            _kill(one.process)
            one.scratch.cleanup()


def _log(logs: Path, part: str, cell: Cell) -> Path:
    return logs / f"{part}-{cell.name}.log".replace("/", "-").replace(" ", "_")


def _begin(
    context: ForkServerContext, part: str, module: str, cell: Cell, seed: int, logs: Path, cores: set[int]
) -> _Running:
    answer, theirs = context.Pipe(duplex=False)
    scratch = tempfile.TemporaryDirectory(prefix="nixl-offload-prove-", ignore_cleanup_errors=True)
    process = context.Process(
        target=_try,
        args=(module, cell.name, seed, theirs, scratch.name, str(_log(logs, part, cell).absolute()), cores),
    )
    process.start()
    theirs.close()
    return _Running(part, cell, process, answer, scratch, cores)


def _try(module: str, name: str, seed: int, answer: Connection, scratch: str, log: str, cores: set[int]) -> None:
    """In the cell's process."""
    os.setsid()
    os.sched_setaffinity(0, cores)
    os.environ["TMPDIR"] = tempfile.tempdir = scratch
    os.chdir(scratch)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    try:
        cell = next(cell for cell in cells_of(module, seed) if cell.name == name)
        outcome = cell.run()
    except BaseException:  # noqa: BLE001 - it is what came out of the cell
        traceback.print_exc()
        outcome = Outcome(dead=[traceback.format_exc(limit=-3)])
    sys.stdout.flush()
    sys.stderr.flush()
    answer.send(outcome)


def _end(one: _Running, log: Path) -> Outcome:
    """Return what the cell answered, or that it did not; end its process, and what that has left running."""
    outcome = None
    if one.answer.poll():
        with suppress(EOFError, OSError):  # it died, perhaps in the middle of its answer
            outcome = one.answer.recv()
        one.process.join(timeout=_END_S)
    if outcome is None:
        late = one.process.exitcode is None
        end = (
            f"did not end within {one.cell.limit_s:.0f} s" if late else f"its process ended with {one.process.exitcode}"
        )
        outcome = Outcome(dead=[f"{end}; see {log.name}"])
    if outcome.is_good() and not any(outcome.counts.values()) and (outcome.counts or not outcome.note):
        outcome.missed.append("nothing was tried")
    _kill(one.process)
    one.answer.close()
    one.scratch.cleanup()
    if outcome.is_good():
        log.unlink(missing_ok=True)
    return outcome


def _kill(process: BaseProcess) -> None:
    """End a cell's process and all of its session."""
    if process.pid is not None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.join()
    process.close()
