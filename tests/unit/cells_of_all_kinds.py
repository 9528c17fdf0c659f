"""Cells for the tests of ``make prove``'s frame: one for each way in which a cell can end."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from functools import partial

from tests.prove.cells import Cell, Outcome


def cells(seed: int) -> Iterator[Cell]:
    """Yield the cells; ``seed`` 0 has two of one name."""
    yield Cell("good/counts", partial(Outcome, {"things": seed}))
    yield Cell("good/senseless", partial(Outcome, note="nothing to try"))
    yield Cell("good/leaves a process", _leave_a_process)
    yield Cell("bad/wrong", _print_and_be_wrong)
    yield Cell("bad/tries nothing", partial(Outcome, {"things": 0}))
    yield Cell("bad/raises", _raise)
    yield Cell("bad/dies", _die)
    yield Cell("bad/hangs", partial(time.sleep, 3600), limit_s=1.0)
    if not seed:
        yield Cell("good/counts", Outcome)


def _leave_a_process() -> Outcome:
    left = subprocess.Popen(["sleep", "3600"])
    number, left.returncode = left.pid, 0  # so that nobody warns of it
    return Outcome({"processes": 1}, note=str(number))


def _print_and_be_wrong() -> Outcome:
    print("what the cell printed")
    return Outcome({"things": 1}, wrong=["seed 1, step 2: another answer"], note=str(time.monotonic_ns()))


def _raise() -> Outcome:
    raise RuntimeError("not caught")


def _die() -> Outcome:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError
