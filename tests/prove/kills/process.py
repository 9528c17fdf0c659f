"""A server in a process of its own that can be killed: forked, so before the parent has a thread.

Threading: none.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from tests.prove.cells import Outcome

_CONTEXT = multiprocessing.get_context("fork")


@dataclass(slots=True)
class Report:
    """What a server tells, once it has checked everything, and when something goes wrong later."""

    outcome: Outcome = field(default_factory=Outcome)
    is_checked: bool = False


class ServerProcess:
    """A server's process. It begins when ``begin`` is called, and ends when it is killed."""

    def __init__(self, serve: Callable[[Callable[[Report], None]], None]) -> None:
        self._pipe, theirs = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(target=_serve, args=(serve, theirs))
        self._process.start()
        theirs.close()
        self.has_ended = False
        """Known once all that it told was heard."""

    def begin(self) -> None:
        """Let it open its storage."""
        self._pipe.send(True)

    def hear(self, timeout_s: float) -> list[Report]:
        """Return what it told meanwhile, after ``timeout_s`` at most; [] as well when it has ended."""
        try:
            return [self._pipe.recv()] if self._pipe.poll(max(0.0, timeout_s)) else []
        except (EOFError, OSError):  # killed, perhaps in the middle of a report
            self.has_ended = True
            return []

    def kill(self) -> None:
        """Send SIGKILL; ``wait`` afterwards."""
        self._process.kill()

    def wait(self) -> tuple[list[Report], int]:
        """Wait for its end; return what it told last, and its exit code: 0, or the signal's number below 0."""
        self._process.join()
        told = list[Report]()
        while not self.has_ended:
            told += self.hear(0.0)
        self._pipe.close()
        return told, self._process.exitcode or 0


def _serve(serve: Callable[[Callable[[Report], None]], None], pipe: Connection) -> None:
    """In the server's process."""
    try:
        pipe.recv()
        serve(pipe.send)
    except BaseException:  # noqa: BLE001 - it is what came out
        pipe.send(Report(Outcome(dead=[traceback.format_exc(limit=-4)])))
    os._exit(0)
