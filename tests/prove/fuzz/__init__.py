"""Fuzzing: bytes that others wrote, given to all that reads them. atheris finds the way by the branches that are taken.

A cell for each target, in a process of its own, for libFuzzer ends the process that it runs in. What was kept in
``tests/fixtures/fuzz`` is tried first, and what reached something new in an earlier run: that is in
``build/prove/corpus``. Inputs that found something are in ``build/prove/found``, named as among the fixtures, to be
moved there. ``python -m tests.prove.fuzz TARGET FILE`` shows one again.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from tests.prove.cells import Cell, Outcome
from tests.prove.fuzz.target import Target, targets

_ROOT = Path(__file__).parents[3]
KEPT = _ROOT / "build" / "prove"
"""Directory of what outlives a run."""
_SECONDS = 12
"""No target gets more, however many inputs are left."""
_ARTIFACT = "*-" + "[0-9a-f]" * 40
"""How libFuzzer names an input that ended it."""
_RUNS = re.compile(r"stat::number_of_executed_units: +(\d+)")


def cells(seed: int) -> Iterator[Cell]:
    """A cell for each target."""
    for name in targets():
        yield Cell(name, partial(fuzz, name, seed), limit_s=2.0 * _SECONDS + 60)


def fuzz(name: str, seed: int) -> Outcome:
    """Fuzz a target in a process of its own, in the current directory."""
    target, found = targets()[name], Path("found.jsonl").absolute()
    ended = subprocess.run(
        [
            sys.executable, "-m", "tests.prove.fuzz", name, f"--seed={seed}", f"--seconds={_SECONDS}",
            f"--found={found}", f"--corpus={KEPT / 'corpus' / target.directory}",
        ],
        env={**os.environ, "PYTHONPATH": str(_ROOT)}, capture_output=True, text=True, errors="replace", check=False,
    )  # fmt: skip
    print(ended.stdout, ended.stderr)
    runs = _RUNS.search(ended.stderr)
    outcome = Outcome(counts={"inputs": int(runs[1])} if runs else {})
    for line in found.read_text().splitlines() if found.exists() else ():
        one = json.loads(line)
        kept = _keep(target, base64.b64decode(one["input"]))
        getattr(outcome, one["kind"]).append(f"{one['error']}; input: {kept}")
    if ended.returncode or runs is None:
        kept_all = [_keep(target, file.read_bytes()) for file in Path("scratch").glob(_ARTIFACT)]
        last = " | ".join(ended.stderr.strip().splitlines()[-3:])
        outcome.dead.append(f"ended with {ended.returncode}: {last}; inputs: {', '.join(kept_all) or 'none'}")
    elif int(runs[1]) < target.runs:
        outcome.note = f"{int(runs[1]):,} of {target.runs:,} inputs, for {_SECONDS} s were over"
    return outcome


def _keep(target: Target, data: bytes) -> str:
    """Write an input down as it can be among the fixtures; return where."""
    file = KEPT / "found" / target.directory / hashlib.sha1(data, usedforsecurity=False).hexdigest()[:12]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)
    return str(file.relative_to(KEPT.parents[1]))
