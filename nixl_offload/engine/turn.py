"""When the pump lets others have the interpreter: vLLM's scheduler shares it, and shall not wait for a batch.

A thread that wants the interpreter gets it when the one that has it waits for something, and otherwise only after the
switch interval, 5 ms. The pump's work on a batch is many small pieces; between them it asks ``Turn.pause``.
Threading: the pump's thread.
"""

from __future__ import annotations

import time

HOLD_S = 100e-6
"""So long the pump goes on before it lets go, at the end of the piece that is under way then. Pieces are some 100 µs at
most, so that it holds the interpreter for less than 200 µs at a time."""


class Turn:
    """A pump's stretch of time without a wait."""

    def __init__(self) -> None:
        self._began_s = time.perf_counter()

    def begin(self) -> None:
        """The thread has waited: another stretch begins."""
        self._began_s = time.perf_counter()

    def pause(self) -> None:
        """Between two pieces of work: let go of the interpreter if this stretch has lasted for ``HOLD_S``."""
        if time.perf_counter() - self._began_s >= HOLD_S:
            self._let_go()
            self.begin()

    def _let_go(self) -> None:
        # The kernel makes some 80 us of it, long enough for a thread that waits to wake up. ``sched_yield`` takes half
        # a microsecond: its caller has the interpreter back before anybody else could take it.
        time.sleep(0)
