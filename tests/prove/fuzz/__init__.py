"""Fuzzing: bytes that others wrote, given to all that reads them. atheris finds the way by the branches that are taken.

A cell for each target, in a process of its own, for libFuzzer ends the process that it runs in. What was kept in
``tests/fixtures/fuzz`` is tried first. ``python -m tests.prove.fuzz TARGET FILE`` shows one input again.
"""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from tests.prove.cells import Cell, Outcome

_ROOT = Path(__file__).parents[3]
_SECONDS = 30
"""No target gets more, however many inputs are left."""
_ARTIFACT = "*-" + "[0-9a-f]" * 40
"""How libFuzzer names an input that ended it."""
_RUNS = re.compile(r"stat::number_of_executed_units: +(\d+)")


def cells(seed: int) -> Iterator[Cell]:
    """A cell for each target."""
    from tests.prove.fuzz.targets import TARGETS

    for name in TARGETS:
        yield Cell(name, partial(fuzz, name, seed), limit_s=2.0 * _SECONDS + 60)


def fuzz(name: str, seed: int) -> Outcome:
    """Fuzz a target in a process of its own, in the current directory."""
    found = Path("found.jsonl").absolute()
    ended = subprocess.run(
        [sys.executable, "-m", "tests.prove.fuzz", name, f"--seed={seed}", f"--seconds={_SECONDS}", f"--found={found}"],
        env={**os.environ, "PYTHONPATH": str(_ROOT)}, capture_output=True, text=True, errors="replace", check=False,
    )  # fmt: skip
    print(ended.stdout, ended.stderr)
    runs = _RUNS.search(ended.stderr)
    outcome = Outcome(counts={"inputs": int(runs[1])} if runs else {})
    for line in found.read_text().splitlines() if found.exists() else ():
        one = json.loads(line)
        getattr(outcome, one["kind"]).append(f"{one['error']}; input (base64): {one['input']}")
    if ended.returncode or runs is None:
        kept = [base64.b64encode(file.read_bytes()).decode() for file in Path("scratch").glob(_ARTIFACT)]
        last = " | ".join(ended.stderr.strip().splitlines()[-3:])
        outcome.dead.append(f"ended with {ended.returncode}: {last}; inputs (base64): {', '.join(kept) or 'none'}")
    return outcome
