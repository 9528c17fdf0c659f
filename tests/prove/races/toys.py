"""Broken by intention: what a scheduler that is worth its name finds, each with the repair that must pass.

Threading: each has the defect that its name says, under some schedules only.
"""

from __future__ import annotations

import threading
import time
from collections import deque

from tests.prove.races.exploring import Run, Scenario


class Counter:
    """Counts in two steps."""

    def __init__(self, lock: threading.Lock | None) -> None:
        self.value = 0
        self._lock = lock

    def add(self) -> None:
        if self._lock is None:
            self.value = self.value + 1
        else:
            with self._lock:
                self.value = self.value + 1


def _both(*calls: object) -> None:
    threads = [threading.Thread(target=call) for call in calls]  # type: ignore[arg-type]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _count(counter: Counter) -> None:
    _both(counter.add, counter.add)
    assert counter.value == 2, f"two were added, {counter.value} were counted"


def missing_lock(run: Run) -> None:
    _count(Counter(None))


def with_lock(run: Run) -> None:
    _count(Counter(threading.Lock()))


class Mailbox:
    """Something is put in, and somebody waits for it. ``is_careful``: who waits looks and waits under one lock."""

    def __init__(self, *, is_careful: bool) -> None:
        self._changed = threading.Condition()
        self._items: deque[int] = deque()
        self._is_careful = is_careful

    def put(self) -> None:
        self._items.append(1)
        with self._changed:
            self._changed.notify()

    def get(self) -> None:
        if self._is_careful:
            with self._changed:
                self._changed.wait_for(lambda: self._items)
        elif not self._items:
            with self._changed:
                self._changed.wait()
        self._items.popleft()


def lost_wakeup(run: Run) -> None:
    box = Mailbox(is_careful=False)
    _both(box.get, box.put)


def no_lost_wakeup(run: Run) -> None:
    box = Mailbox(is_careful=True)
    _both(box.get, box.put)


def _nested(first: threading.Lock, second: threading.Lock) -> None:
    with first, second:
        pass


def inversion(run: Run) -> None:
    left = threading.Lock()
    right = threading.Lock()
    _both(lambda: _nested(left, right), lambda: _nested(right, left))


def no_inversion(run: Run) -> None:
    left = threading.Lock()
    right = threading.Lock()
    _both(lambda: _nested(left, right), lambda: _nested(left, right))


def early_look(run: Run) -> None:
    """What takes a millisecond is looked for after two, by somebody who does not ask whether it is there."""
    found: list[int] = []

    def work() -> None:
        time.sleep(0.001)
        found.append(1)

    def look() -> None:
        time.sleep(0.002)
        assert found, "looked too early"

    _both(work, look)


def left_behind(run: Run) -> None:
    threading.Thread(target=threading.Event().wait, daemon=True).start()


def spinning(run: Run) -> None:
    stop: list[int] = []
    thread = threading.Thread(target=lambda: _spin(stop))
    thread.start()
    thread.join()


def _spin(stop: list[int]) -> None:
    while not stop:
        time.sleep(0)


BROKEN = {
    "missing lock": (Scenario(missing_lock, watched=(Counter,)), "wrong", "were counted|nothing orders"),
    "lost wakeup": (Scenario(lost_wakeup), "dead", "all wait for each other"),
    "inversion": (Scenario(inversion), "dead", "all wait for each other"),
    "early look": (Scenario(early_look, early_s=0.01), "dead", "looked too early"),
    "left behind": (Scenario(left_behind), "leaks", "threads are left"),
    "spinning": (Scenario(spinning, most_steps=1000), "dead", "no end after"),
}
"""Each with the kind of finding, and words of it."""
SOUND = {
    "missing lock": Scenario(with_lock, watched=(Counter,)),
    "lost wakeup": Scenario(no_lost_wakeup),
    "inversion": Scenario(no_inversion),
}
