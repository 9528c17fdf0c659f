"""Who goes on at a switch point: schedules at random, by priorities, and one after another; and schedules as words.

A schedule is written as what differs from the default schedule, in which a thread goes on until it waits and then the
next one by number gets its turn: ``120:3,455:1`` has thread 3 go on at step 120 and thread 1 at step 455.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

from tests.prove.races.scheduler import Thread

Deviations = Mapping[int, int]


def written(deviations: Deviations) -> str:
    """Return a schedule in words; ``-`` is the default one."""
    return ",".join(f"{step}:{number}" for step, number in sorted(deviations.items())) or "-"


def read(words: str) -> dict[int, int]:
    """Return what ``written`` has written. Raises ValueError."""
    if words == "-":
        return {}
    return {int(step): int(number) for step, _, number in (each.partition(":") for each in words.split(","))}


class Replay:
    """The default schedule but for some deviations. ``missed``: those that could not be followed."""

    def __init__(self, deviations: Deviations) -> None:
        self._deviations = deviations
        self.followed = 0

    @property
    def missed(self) -> int:
        return len(self._deviations) - self.followed

    def choose(self, step: int, default: Thread, ready: list[Thread], early: list[Thread]) -> Thread:
        wanted = self._deviations.get(step)
        for thread in (*ready, *early):
            if thread.number == wanted:
                self.followed += 1
                return thread
        return default


class RandomWalk:
    """A thread is preempted with a probability, and when it waits somebody goes on."""

    def __init__(self, seed: int, preempts: float) -> None:
        self._random = random.Random(seed)
        self._preempts = preempts

    def choose(self, step: int, default: Thread, ready: list[Thread], early: list[Thread]) -> Thread:
        if default.is_waiting or self._random.random() < self._preempts:
            return self._random.choice([*ready, *early])
        return default


class Priorities:
    """PCT (Burckhardt et al., 2010): threads have random priorities, the highest that can goes on, and at ``changes``
    random steps of ``length`` who runs falls below all others. Finds a defect that needs so many orders with a
    probability that can be computed.
    """

    def __init__(self, seed: int, changes: int, length: int) -> None:
        self._random = random.Random(seed)
        self._priorities: dict[int, float] = {}
        self._changes = sorted(self._random.sample(range(1, max(length, changes) + 1), changes))
        self._lowest = 0.0

    def choose(self, step: int, default: Thread, ready: list[Thread], early: list[Thread]) -> Thread:
        while self._changes and step >= self._changes[0]:
            self._changes.pop(0)
            self._lowest -= 1.0
            self._priorities[default.number] = self._lowest
        return max(ready, key=self._priority)

    def _priority(self, thread: Thread) -> float:
        if thread.number not in self._priorities:
            self._priorities[thread.number] = self._random.random()
        return self._priorities[thread.number]
