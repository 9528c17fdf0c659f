"""A scheduler for threads of this process: one of them runs at a time, and a strategy says which goes on.

Threads are real ones. Each gives control away at switch points: wherever it takes or gives back a lock, waits, sleeps,
starts another or ends (``primitives`` has the locks that call in here). Time is virtual: it passes when all threads
wait, and by a microsecond whenever somebody looks at the clock.

Threading: ``Scheduler`` is used by whichever of its threads runs; the others wait for their batons.
"""

from __future__ import annotations

import _thread
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

START_S = 1_000_000.0
TICK_S = 1e-6
"""How much later it is at each look at the clock, so that a loop that waits for a time ends."""


class Stopped(BaseException):
    """The run is over before its time. Not an Exception, so that the code that is tried lets it through."""


class Resource(Protocol):
    """What a thread may wait for."""

    def is_free(self) -> bool:
        """Whether a thread that waits for it can go on."""


@dataclass(slots=True, eq=False)
class Thread:
    """A thread, as the scheduler knows it. ``number``: by the order of starts; 0 is the scenario's own."""

    number: int
    name: str = "main"
    baton: Any = field(default_factory=_thread.allocate_lock)
    ident: int = 0
    waits_for: Resource | None = None
    until_s: float | None = None
    """A waiting thread goes on then at the latest; None: never by itself."""
    is_waiting: bool = False
    is_done: bool = False
    held: list[Any] = field(default_factory=list)
    """Locks that it has, in the order it took them."""
    clock: dict[int, int] = field(default_factory=dict)
    """A vector clock, by number of thread."""


class Strategy(Protocol):
    """Decides who goes on."""

    def choose(self, step: int, default: Thread, ready: list[Thread], early: list[Thread]) -> Thread:
        """Return one of ``ready``, or of ``early``, for whom time would have to pass. ``default``: who would go on if
        nobody interfered.
        """


@dataclass(slots=True)
class Failure:
    """Why a run ended before its time. ``kind``: as a finding of ``tests.prove.cells.Outcome``."""

    kind: str
    words: str


class Scheduler:
    """Runs a scenario once, by a strategy.

    ``early_s``: a strategy may let time pass, up to so much at once, while other threads could go on: those are slow
    then. ``most_steps``: more switch points are taken for a livelock.
    """

    active: Scheduler | None = None
    """The one that runs now."""

    def __init__(self, strategy: Strategy, *, early_s: float = 0.0, most_steps: int = 200_000) -> None:
        self._strategy = strategy
        self._early_s = early_s
        self._most_steps = most_steps
        self.now_s = START_S
        self.step = 0
        self.switches = 0
        self.deviations: dict[int, int] = {}
        """By step: the number of the thread that went on, where it is not the one that would have by itself."""
        self.branches: list[tuple[int, tuple[int, ...]]] = []
        """Steps at which others could have gone on, and who."""
        self.threads: list[Thread] = []
        self.current: Thread | None = None
        self.failure: Failure | None = None
        self.trace: list[str] | None = None
        """What happened, a line each; None: not wanted."""

    # -- the scenario's side ----------------------------------------------------------------------------------------

    def run(self, scenario: Callable[[], None]) -> None:
        """Run ``scenario`` as thread 0, then let all others come to their end. ``failure`` says what went wrong."""
        main = Thread(0, ident=_thread.get_ident())
        main.baton.acquire()
        main.clock[0] = 1
        self.threads.append(main)
        self.current = main
        Scheduler.active = self
        try:
            scenario()
            self._let_others_end(main)
        except Stopped:
            pass
        except AssertionError as error:
            self._fail("wrong", f"{error or 'an assertion failed'}\n{_where(error)}")
        except Exception as error:  # noqa: BLE001 - whatever it was, it is what came of this schedule
            self._fail("dead", f"{error!r}\n{_where(error)}")
        finally:
            self.current = None
            Scheduler.active = None

    def fail(self, kind: str, words: str) -> None:
        """Something was found; the run goes on. The first counts."""
        self._fail(kind, words)

    def _fail(self, kind: str, words: str) -> None:
        if self.failure is None:
            self.failure = Failure(kind, words)

    def _let_others_end(self, main: Thread) -> None:
        self.wait(_Others(self), 600.0, f"the end of {len(self.threads) - 1} threads")
        left = [thread for thread in self.threads[1:] if not thread.is_done]
        if left:
            self._fail("leaks", f"threads are left: {self._describe(left)}")

    # -- a thread's side --------------------------------------------------------------------------------------------

    def point(self, what: str) -> None:
        """Another thread may go on here."""
        me = self._me()
        self._count_step(me)
        options = self._options()
        chosen = me
        if len(options) > 1:
            chosen = self._choose(me, options)
        if self.trace is not None:
            self.trace.append(f"{self.step:6} {me.number}:{me.name} {what}{_to(me, chosen)}")
        if chosen is not me:
            self._hand_over(me, chosen)

    def wait(self, resource: Resource | None, timeout_s: float | None, what: str) -> bool:
        """Wait for a resource, or (None) for the time to pass. False: the time has passed and it is not free."""
        me = self._me()
        self._count_step(me)
        me.waits_for, me.is_waiting = resource, True
        me.until_s = None if timeout_s is None else self.now_s + max(0.0, timeout_s)
        try:
            chosen = self._next(me)
            if chosen is None:
                self._deadlock(me)
                return False
            if self.trace is not None:
                self.trace.append(f"{self.step:6} {me.number}:{me.name} waits for {what}{_to(me, chosen)}")
            if chosen is not me:
                self._hand_over(me, chosen)
        finally:
            me.waits_for, me.is_waiting, me.until_s = None, False, None
        return resource is None or resource.is_free()

    def start(self, name: str, begin: Callable[[], None]) -> int:
        """Start a thread, which runs ``begin`` when it is chosen. Returns its identity."""
        me = self._me()
        thread = Thread(len(self.threads), name)
        thread.baton.acquire()
        thread.clock = dict(me.clock)
        thread.clock[thread.number] = 1
        me.clock[me.number] += 1
        self.threads.append(thread)

        def main() -> None:
            thread.baton.acquire()
            if self.failure is not None and self.current is not thread:
                return
            try:
                begin()
            except Stopped:
                return
            finally:
                thread.is_done = True
            self._leave(thread)

        thread.ident = _thread.start_new_thread(main, ())
        self.point(f"starts {thread.number}:{name}")
        return thread.ident

    def now(self) -> float:
        """Return the time, which passes by that."""
        if self.current is None:
            raise Stopped
        self.now_s += TICK_S
        return self.now_s

    # -- inside -----------------------------------------------------------------------------------------------------

    def _me(self) -> Thread:
        me = self.current
        if me is None:
            raise Stopped
        assert me.ident in {0, _thread.get_ident()}, "a thread runs that is not the scheduler's"
        return me

    def _count_step(self, me: Thread) -> None:
        self.step += 1
        if self.step > self._most_steps:
            self._stop(me, "dead", f"no end after {self._most_steps} steps: {self._describe(self.threads)}")

    def _options(self) -> list[Thread]:
        """Return who can go on now, or as soon as time has passed that may pass."""
        found = []
        limit_s = self.now_s + self._early_s
        for thread in self.threads:
            if thread.is_done:
                continue
            if thread.is_waiting:
                free = thread.waits_for is not None and thread.waits_for.is_free()
                if not free and (thread.until_s is None or thread.until_s > limit_s):
                    continue
            found.append(thread)
        return found

    def _is_early(self, thread: Thread) -> bool:
        """Whether a thread can go on only if time passes."""
        if not thread.is_waiting or (thread.waits_for is not None and thread.waits_for.is_free()):
            return False
        return thread.until_s is not None and thread.until_s > self.now_s

    def _next(self, me: Thread) -> Thread | None:
        """Return who goes on when ``me`` cannot; None: nobody ever will."""
        options = self._options()
        if not options or all(self._is_early(thread) for thread in options):
            times = [thread.until_s for thread in self.threads if thread.is_waiting and thread.until_s is not None]
            if not times:
                return None
            self.now_s = max(self.now_s, min(times))
            options = self._options()
        return options[0] if len(options) == 1 else self._choose(me, options)

    def _choose(self, me: Thread, options: list[Thread]) -> Thread:
        ready = [thread for thread in options if not self._is_early(thread)]
        early = [thread for thread in options if thread not in ready]
        default = me
        if me not in ready:  # whose turn it is, in the order of numbers
            default = min(ready, key=lambda thread: (thread.number <= me.number, thread.number))
        others = tuple(thread.number for thread in options if thread is not default)
        if others:
            self.branches.append((self.step, others))
        chosen = self._strategy.choose(self.step, default, ready, early)
        if chosen is not default:
            self.deviations[self.step] = chosen.number
        if self._is_early(chosen):
            assert chosen.until_s is not None
            self.now_s = max(self.now_s, chosen.until_s)
        return chosen

    def _hand_over(self, me: Thread, chosen: Thread) -> None:
        self.switches += 1
        self.current = chosen
        chosen.baton.release()
        me.baton.acquire()
        if self.current is not me:
            raise Stopped

    def _leave(self, me: Thread) -> None:
        """A thread has ended."""
        if self.current is not me:
            return
        self.step += 1
        chosen = self._next(me)
        if self.trace is not None:
            self.trace.append(f"{self.step:6} {me.number}:{me.name} ends")
        if chosen is None:
            self._fail("dead", f"all wait for each other: {self._describe(self.threads)}")
            self._end_run()
            return
        self.switches += 1
        self.current = chosen
        chosen.baton.release()

    def _deadlock(self, me: Thread) -> None:
        if isinstance(self.threads[0].waits_for, _Others):
            left = [thread for thread in self.threads[1:] if not thread.is_done]
            self._stop(me, "leaks", f"threads are left: {self._describe(left)}")
        self._stop(me, "dead", f"all wait for each other: {self._describe(self.threads)}")

    def _stop(self, me: Thread, kind: str, words: str) -> None:
        """End the run: thread 0 returns from it, the others wait for ever."""
        self._fail(kind, words)
        self._end_run()
        if me.number:
            me.baton.acquire()
        raise Stopped

    def _end_run(self) -> None:
        main, me = self.threads[0], self.current
        self.current = None
        if me is not main:
            main.baton.release()

    def _describe(self, threads: list[Thread]) -> str:
        """Tell where threads are."""
        frames = sys._current_frames()
        told = []
        for thread in threads:
            if thread.is_done:
                continue
            frame = frames.get(thread.ident)
            calls = traceback.extract_stack(frame) if frame is not None else []
            places = [
                f"{call.filename.rpartition('/')[2]}:{call.lineno} {call.name}" for call in calls if _is_ours(call)
            ]
            told.append(f"{thread.number}:{thread.name} at {' > '.join(places[-4:])}")
        return "; ".join(told)


class _Others:
    """The end of all threads but the first."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def is_free(self) -> bool:
        return all(thread.is_done for thread in self._scheduler.threads[1:])


def _is_ours(call: traceback.FrameSummary) -> bool:
    return "/nixl_offload/" in call.filename or ("/tests/" in call.filename and "scheduler.py" not in call.filename)


def _to(me: Thread, chosen: Thread) -> str:
    return "" if chosen is me else f" -> {chosen.number}:{chosen.name}"


def _where(error: BaseException) -> str:
    places = traceback.extract_tb(error.__traceback__)
    return " > ".join(f"{call.filename.rpartition('/')[2]}:{call.lineno}" for call in places if _is_ours(call))
