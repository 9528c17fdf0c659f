"""Mutants: a module with one operator, constant, statement or argument changed, which some test must notice.

A cell for each module of catalog, index, chunk, identity and the engine's state machine, with ``guards`` the tests that
are to notice. Each tries as many mutants as the proof has time for, drawn by the seed. Those that live are findings.
Those in ``survivors.toml`` are not tried: they change nothing, or nothing that matters, with the reason for each.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from tests.prove.cells import Cell, Outcome
from tests.prove.mutants.guards import GUARDS

MUTANTS = 8
"""Tried of each module."""
SURVIVORS = Path(__file__).with_name("survivors.toml")


def cells(seed: int) -> Iterator[Cell]:
    """A cell for each module, named without ``nixl_offload/`` and ``.py``."""
    for module in GUARDS:
        name = module.removeprefix("nixl_offload/").removesuffix(".py")
        yield Cell(name, partial(try_module, module, seed), limit_s=600.0)


def try_module(module: str, seed: int, count: int = MUTANTS) -> Outcome:
    """Try ``count`` mutants of a module."""
    from tests.prove.mutants.trial import try_mutants

    may_live = {(text, what) for of, text, what in allowed_survivors() if of == module}
    verdicts = try_mutants(module, GUARDS[module], count, seed, may_live)
    living = verdicts.survivors
    outcome = Outcome(counts={"mutants": verdicts.killed + len(living), "killed": verdicts.killed})
    if verdicts.spared:
        outcome.counts["listed"] = verdicts.spared
    outcome.wrong = [f"{name} fails without a mutant" for name in verdicts.broken]
    outcome.missed = [f"{module}:{change.line}: {change.what}, in {change.text!r}: no test fails" for change in living]
    return outcome


def allowed_survivors() -> set[tuple[str, str, str]]:
    """Return module, text of the line and change of each that may live."""
    table = tomllib.loads(SURVIVORS.read_text())
    return {(one["module"], one["text"], change) for one in table["survivor"] for change in one["changes"]}
