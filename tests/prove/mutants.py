"""Mutants: code of one room with one expression or statement changed, which some test must notice. mutmut makes and
tries them.

A cell for each room whose code decides what is served. A seed tries each tenth mutant, so ten seeds try all. Some
mutants change nothing that is promised: a finding is that more live than ``ALIVE_PERCENT`` allows, with their names.
``mutmut show NAME`` in a room's directory (``build/prove/mutants``) shows what one changes.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from glob import glob
from pathlib import Path

from tests.prove.cells import Cell, Outcome

_ROOT = Path(__file__).parents[2]
KEPT = _ROOT / "build" / "prove" / "mutants"


def _unit(*names: str) -> tuple[str, ...]:
    return tuple(f"unit/test_{name}.py" for name in names)


ROOMS = {
    "catalog": _unit("catalog", "moves", "prefetch"),
    "index": (*_unit("catalog", "durable", "slots"), "model/test_index_model.py"),
    "chunk": _unit("authentication", "head*", "late_checksums", "layout", "shards"),
    "identity": _unit("namespace", "settings", "weights"),
    "engine": _unit("*batch*", "*chain*", "*engine*", "grace", "job_table", "late_checksums", "slot_headers")
    + _unit("staging"),
}
"""Each with the tests that are to notice, below ``tests``."""
ALIVE_PERCENT = 25
"""At most. Texts of messages and log lines are mutants, too."""
_RESULT = re.compile(r"^ +(nixl_offload\S+): (.+)$", re.MULTILINE)
_CONFIG = """[mutmut]
source_paths = nixl_offload/{room}
also_copy =
  nixl_offload
  tests
  examples
process_isolation = forkserver
timeout_multiplier = 4
pytest_add_cli_args_test_selection =
{tests}
"""


def cells(seed: int) -> Iterator[Cell]:
    """A cell for each room."""
    for room in ROOMS:
        yield Cell(room, partial(try_room, room, seed), limit_s=3600.0)


def try_room(room: str, seed: int) -> Outcome:
    """Try each tenth mutant of a room."""
    if importlib.util.find_spec("mutmut") is None:
        return Outcome(note="mutmut is not installed here")
    shutil.rmtree(KEPT / room, ignore_errors=True)
    for folder in ("nixl_offload", "tests", "examples"):
        shutil.copytree(_ROOT / folder, KEPT / room / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(_ROOT / "pyproject.toml", KEPT / room)
    found = {words: sorted(glob(words, root_dir=_ROOT / "tests")) for words in ROOMS[room]}
    assert all(found.values()), f"some tests of {room} are not there: {found}"
    tests = "".join(f"  tests/{name}\n" for names in found.values() for name in names)
    (KEPT / room / "setup.cfg").write_text(_CONFIG.format(room=room, tests=tests))
    _mutmut(room, "run", "--max-children", "1", f"*__mutmut_*{seed % 10}")
    results = dict(_RESULT.findall(_mutmut(room, "results", "--all", "true")))
    alive = [name for name, status in results.items() if status in ("survived", "no tests", "suspicious")]
    tried = sum(status != "not checked" for status in results.values())
    outcome = Outcome(counts={"mutants": tried, "killed": tried - len(alive)})
    if 100 * len(alive) > ALIVE_PERCENT * tried:
        outcome.missed.append(f"{len(alive)} of {tried} live, more than {ALIVE_PERCENT}%: {', '.join(alive)}")
    return outcome


def _mutmut(room: str, *words: str) -> str:
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "mutmut", *words],
        cwd=KEPT / room, capture_output=True, text=True, check=False,
    )  # fmt: skip
    print(ended.stdout[-4000:], ended.stderr[-4000:])
    return ended.stdout
