"""How fast an engine steps that has nothing to compute while storage is at work.

At full speed while storage makes progress, slower while it makes none, and after some seconds not at all.
Threading: the scheduler's thread.
"""

from __future__ import annotations

from collections.abc import Callable

IDLE_STEP_S = 0.0005
"""The least time of a step that schedules nothing while storage is at work. vLLM steps on without a pause when all
requests wait for loads. Where a rank shares the scheduler's process its pump then waits 5 ms each time it needs the
interpreter (decision 0011)."""
STUCK_STEP_S = 0.005
"""The same after ``STUCK_AFTER_S`` without progress: a tier that hangs must not cost a core."""
STUCK_AFTER_S = 0.25
PATIENCE_S = 3.0
"""An engine without requests steps on for background work as long as that makes progress within this time. What is left
goes on with the next request: vLLM does not shut down before it has stopped stepping, and kills an engine that takes
longer than some seconds."""


class Idling:
    """Tracks when storage last made progress."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._progress_s = clock()

    def record_progress(self) -> None:
        """The ranks were given something to do, or a request or a rank was heard."""
        self._progress_s = self._clock()

    @property
    def pause_s(self) -> float:
        """How long a step without work should last."""
        return STUCK_STEP_S if self._clock() - self._progress_s >= STUCK_AFTER_S else IDLE_STEP_S

    @property
    def is_patient(self) -> bool:
        """Whether to step on for background work alone."""
        return self._clock() - self._progress_s < PATIENCE_S
