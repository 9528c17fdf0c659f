"""How an engine steps that has nothing to compute while storage is at work: at once where something comes of it, at
leisure where nothing does, and after a while not at all.

Threading: the scheduler's thread.
"""

from __future__ import annotations

from collections.abc import Callable

IDLE_STEP_S = 0.0005
"""A step that schedules nothing lasts at least so long while storage is at work. vLLM steps on without a pause when all
requests wait for loads, and where a rank shares the scheduler's process its pump then waits 5 ms for the interpreter
each time that it needs it (decision 0011)."""
STUCK_STEP_S = 0.005
"""And so long once nothing has come of it for ``STUCK_AFTER_S``: a tier that hangs shall not cost a core."""
STUCK_AFTER_S = 0.25
PATIENCE_S = 3.0
"""An engine without requests steps on for stores and moves as long as something comes of them within this time. What is
left then goes on with the next request: vLLM does not shut down before it has stopped stepping, and kills an engine
that takes longer than some seconds."""


class Idling:
    """Remembers when something last came of anything."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._stirred_s = clock()

    def stir(self) -> None:
        """Something was asked, given to the ranks, or heard of them."""
        self._stirred_s = self._clock()

    @property
    def pause_s(self) -> float:
        """How long a step without work should last."""
        return STUCK_STEP_S if self._clock() - self._stirred_s >= STUCK_AFTER_S else IDLE_STEP_S

    @property
    def is_patient(self) -> bool:
        """Whether to go on stepping for nothing but work in the background."""
        return self._clock() - self._stirred_s < PATIENCE_S
