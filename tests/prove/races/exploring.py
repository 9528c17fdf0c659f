"""Runs a scenario under many schedules, and makes of what it finds the shortest schedule that shows it.

Threading: the thread of a cell's process.
"""

from __future__ import annotations

import gc
import logging
import random
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.prove.cells import Outcome
from tests.prove.races import accesses, primitives
from tests.prove.races.scheduler import Failure, Scheduler, Strategy
from tests.prove.races.strategies import Deviations, Priorities, RandomWalk, Replay, read, written

MOST_FINDINGS = 5
"""In a cell; then it ends."""
SHRINK_RUNS = 150
"""So many runs at most to shorten a schedule."""
PREEMPTS = (0.02, 0.1, 0.3)
"""Of random walks, in turn."""
PROGRAMS = 5
"""So many choices of the scenario's own share the bounded schedules, or more where these have few deviations."""


@dataclass(slots=True)
class Run:
    """What a scenario has of its run."""

    path: Path
    """An empty directory."""
    seed: int
    """For what the scenario itself chooses."""
    expects: tuple[str, ...] = ()
    """Errors that are to be logged: words of them."""

    @property
    def random(self) -> random.Random:
        """The scenario's own choices: the same for each run of a seed."""
        return random.Random(self.seed)


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is tried under many schedules: a function that drives the product's threads and asserts."""

    play: Callable[[Run], None]
    early_s: float = 0.0
    """See ``Scheduler``."""
    most_steps: int = 50_000
    seeds: int = 1
    """How many choices of the scenario's own there are: schedules go round them."""
    watched: tuple[type, ...] = ()
    """Classes whose attributes are watched: see ``accesses``."""
    allowed: dict[str, str] = field(default_factory=dict)
    """Attributes that threads share without a lock on purpose, and why that is right."""


@dataclass(slots=True)
class Ran:
    """What came of a run."""

    scheduler: Scheduler
    failure: Failure | None
    shared: int
    """How often a watched attribute was met that several threads use."""


class _Errors(logging.Handler):
    """Errors that were logged, which a scenario did not expect, are findings."""

    def __init__(self, run: Run) -> None:
        super().__init__(logging.ERROR)
        self._run = run

    def emit(self, record: logging.LogRecord) -> None:
        words = record.getMessage()
        if not any(expected in words for expected in self._run.expects) and Scheduler.active is not None:
            detail = f": {record.exc_info[1]!r}" if record.exc_info else ""
            Scheduler.active.fail("dead", f"logged: {words}{detail}")


def run_once(scenario: Scenario, strategy: Strategy, seed: int = 0, *, fine: bool = False, traced: bool = False) -> Ran:
    """Run a scenario once. ``fine``: threads switch, too, where they read or set a watched attribute."""
    path = Path("run").absolute()
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    run = Run(path, seed)
    scheduler = Scheduler(strategy, early_s=scenario.early_s, most_steps=scenario.most_steps)
    scheduler.trace = [] if traced else None
    errors = _Errors(run)
    logger = logging.getLogger("nixl_offload")
    logger.propagate, before = False, logger.propagate
    logger.addHandler(errors)
    primitives.begin_run()
    watch = accesses.Watch(scenario.watched if fine else (), scenario.allowed)
    state = random.getstate()
    random.seed(seed)
    gc.disable()
    try:
        with watch:
            scheduler.run(lambda: scenario.play(run))
    finally:
        gc.enable()
        random.setstate(state)
        logger.removeHandler(errors)
        logger.propagate = before
    if scheduler.failure is None and watch.races:
        scheduler.failure = Failure("wrong", f"{watch.races[0]}")
    return Ran(scheduler, scheduler.failure, watch.shared)


def explore(scenario: Scenario, name: str, *, schedules: int, bounded: int, seed: int, fine: int = 0) -> Outcome:
    """Try ``schedules`` at random (walks and priorities), ``fine`` more with watched attributes, and ``bounded`` of
    those that deviate from the default once, then twice; what is found is shortened.

    Counted are the deviations tried, and how many the same programs have, and pairs of them where all were tried; and
    how often watched attributes were met that threads share: to watch, and to meet none, is a finding.
    """
    outcome = Outcome(counts={"schedules": 0, "switch points": 0, "switches": 0, "shared accesses": 0})
    seen: set[str] = set()
    for number, (strategy, own, is_fine) in enumerate(_plan(scenario, schedules, bounded, seed, fine, outcome.counts)):
        if number % 50 == 0:
            gc.collect()
        ran = run_once(scenario, strategy, own, fine=is_fine)
        outcome.counts["schedules"] += 1
        outcome.counts["switch points"] += ran.scheduler.step
        outcome.counts["switches"] += ran.scheduler.switches
        outcome.counts["shared accesses"] += ran.shared
        if isinstance(strategy, _Level):
            strategy.add(ran)
        if ran.failure is not None and (kind := _kind(ran.failure)) not in seen:
            seen.add(kind)
            ran = shrink(scenario, ran, own, fine=is_fine)
            assert ran.failure is not None
            schedule = f"{own}/{'fine' if is_fine else 'locks'}/{written(ran.scheduler.deviations)}"
            words = f"{ran.failure.words}; again with: python -m tests.prove.races {name!r} {schedule}"
            getattr(outcome, ran.failure.kind).append(words)
            if len(seen) >= MOST_FINDINGS:
                break
    if fine and not seen and not outcome.counts["shared accesses"]:
        outcome.missed.append(f"{fine} schedules were to watch what threads share, and met nothing of it")
    outcome.missed += [f"locks are taken in different orders: {cycle}" for cycle in primitives.LockOrder.cycles()]
    return outcome


def shrink(scenario: Scenario, ran: Ran, seed: int, *, fine: bool) -> Ran:
    """Return a run that fails likewise with as few deviations as can be found."""
    assert ran.failure is not None
    wanted, best = _kind(ran.failure), ran
    runs, size = 0, max(1, len(ran.scheduler.deviations) // 2)
    while size and runs < SHRINK_RUNS:
        shorter = False
        items = sorted(best.scheduler.deviations.items())
        for begin in range(0, len(items), size):
            if runs >= SHRINK_RUNS:
                break
            tried = run_once(scenario, Replay(dict(items[:begin] + items[begin + size :])), seed, fine=fine)
            runs += 1
            same = tried.failure is not None and _kind(tried.failure) == wanted
            if same and len(tried.scheduler.deviations) < len(best.scheduler.deviations):
                best, shorter = tried, True
                break
        if not shorter:
            size //= 2
    return best


def replay(scenario: Scenario, words: str) -> tuple[Ran, int]:
    """Run a schedule as it stands in a finding, with a trace; return how many of its deviations could not be followed,
    too. Raises ValueError.
    """
    seed, granularity, schedule = words.split("/")
    strategy = Replay(read(schedule))
    return run_once(scenario, strategy, int(seed), fine=granularity == "fine", traced=True), strategy.missed


def _kind(failure: Failure) -> str:
    """What makes two failures the same: the words without numbers and addresses, up to the first stack."""
    first = failure.words.split("\n")[0].split(" at ")[0]
    return failure.kind + "".join(letter for letter in first if not letter.isdigit())[:120]


class _Level(Replay):
    """One of the schedules that deviate so often; what came of it tells which are next."""

    def __init__(self, deviations: Deviations, found: list[Deviations] | None) -> None:
        super().__init__(deviations)
        self._last = max(deviations, default=0)
        self._base = deviations
        self._found = found

    def add(self, ran: Ran) -> None:
        """Note those that deviate once more, later."""
        if self._found is not None:
            for step, numbers in ran.scheduler.branches:
                if step > self._last:
                    self._found += [{**self._base, step: number} for number in numbers]


def _plan(
    scenario: Scenario, schedules: int, bounded: int, seed: int, fine: int, counts: dict[str, int]
) -> Iterator[tuple[Strategy, int, bool]]:
    """Yield strategies, with the scenario's own choices and whether attributes are watched."""
    choose, length, left = random.Random(seed), 100, bounded
    programs = max(1, min(scenario.seeds, PROGRAMS, bounded // 20))
    for program in range(scenario.seeds):
        own = (seed * programs + program) % scenario.seeds
        once: list[Deviations] = []
        twice: list[Deviations] = []
        yield _Level({}, once), own, False
        length = max([length, *(step for each in once for step in each)])
        budget = min(left, -(-bounded // programs)) - 1
        # All that deviate once, or so many of them as there is time for; then those that deviate twice.
        for what, found, further in (("deviations", once, twice), ("pairs", twice, None)):
            tried = found if len(found) <= budget else choose.sample(found, max(0, budget))
            budget -= len(tried)
            left -= len(tried)
            for name, count in ((f"{what} tried", len(tried)), (f"{what} possible", len(found))):
                counts[name] = counts.get(name, 0) + count
            for deviations in tried:
                yield _Level(deviations, further), own, False
            if budget <= 0:
                break
        left -= 1
        if left <= 0:
            break
    for number in range(schedules + fine):
        own = number % scenario.seeds
        is_fine = number >= schedules
        strategy: Strategy
        if number % 4 == 3:
            strategy = Priorities(seed * 1_000_003 + number, 1 + number // 4 % 4, length)
        else:
            strategy = RandomWalk(seed * 1_000_003 + number, PREEMPTS[number % 4])
        yield strategy, own, is_fine


def timed(scenario: Scenario, count: int = 20) -> float:
    """Return the seconds that a random schedule of a scenario takes."""
    began_s = time.monotonic()
    for number in range(count):
        run_once(scenario, RandomWalk(number, 0.1), number % scenario.seeds)
    return (time.monotonic() - began_s) / count
