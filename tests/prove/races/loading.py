"""Loads the scenarios over the scheduler's primitives: in a cell's own process.

Threading: the process's one thread.
"""

from __future__ import annotations

import importlib
import os
import re

from tests.prove.cells import Outcome
from tests.prove.races import primitives
from tests.prove.races.exploring import Scenario, explore


def scenario_of(name: str) -> Scenario:
    """Return a scenario. ``name``: its module, a slash, and its own. Raises KeyError."""
    primitives.install()
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = "1"
    import torch

    torch.set_num_threads(1)
    module = importlib.import_module(f"tests.prove.races.scenarios.{name.partition('/')[0]}")
    scenarios: dict[str, Scenario] = module.SCENARIOS
    return scenarios[name.partition("/")[2]]


def try_toys(seed: int, schedules: int = 100) -> Outcome:
    """Look for the defects of the toys, by so many schedules at random, and four times as many one after another. Not
    to find one is a finding.
    """
    primitives.install()
    toys = importlib.import_module("tests.prove.races.toys")
    outcome = Outcome(counts={"schedules": 0})
    for name, (scenario, kind, words) in toys.BROKEN.items():
        for how, (random, bounded) in {"at random": (schedules, 0), "one after another": (0, 4 * schedules)}.items():
            fine = schedules if scenario.watched else 0
            found = explore(scenario, f"toys/{name}", schedules=random, bounded=bounded, fine=fine, seed=seed)
            outcome.counts["schedules"] += found.counts["schedules"]
            if not any(re.search(words, sentence) for sentence in getattr(found, kind)):
                outcome.missed.append(f"{how}, the defect of {name!r} was not found, but {found}")
    if not any("toys" in cycle for cycle in primitives.LockOrder.cycles()):
        outcome.missed.append("the order of locks is not known to be wrong")
    primitives.LockOrder.edges.clear()
    for name, scenario in toys.SOUND.items():
        fine = schedules if scenario.watched else 0
        found = explore(scenario, f"toys/{name}", schedules=schedules, bounded=2 * schedules, fine=fine, seed=seed)
        outcome.counts["schedules"] += found.counts["schedules"]
        if not found.is_good():
            outcome.missed.append(f"without its defect {name!r} is blamed nonetheless: {found}")
    return outcome
