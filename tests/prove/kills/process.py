"""A process that is forked from this one, and killed: it must be forked before this one has a thread.

Threading: none.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

from tests.prove.cells import Outcome


@dataclass(slots=True)
class Report:
    """What a server tells, once it has checked everything, and when something goes wrong later."""

    outcome: Outcome = field(default_factory=Outcome)
    is_checked: bool = False


class ServerProcess:
    """A server's process. It begins when ``begin`` is called, and ends when it is killed."""

    def __init__(self, serve: Callable[[Callable[[Report], None]], None]) -> None:
        begin, self._begin = os.pipe()
        self._told, tell = os.pipe()
        self.pid = os.fork()
        if self.pid:
            os.close(begin)
            os.close(tell)
        else:
            os.close(self._begin)
            os.close(self._told)
            _serve_in_child(serve, begin, tell)
        self._heard = bytearray()
        self.has_ended = False
        """Known once all that it told was heard."""

    def begin(self) -> None:
        """Let it open its storage."""
        os.write(self._begin, b"!")  # closing it tells nothing: later forks have it open, too
        os.close(self._begin)

    def hear(self, timeout_s: float) -> list[Report]:
        """Return what it told meanwhile, after ``timeout_s`` at most; [] as well when it has ended."""
        if not select.select([self._told], [], [], max(0.0, timeout_s))[0]:
            return []
        some = os.read(self._told, 1 << 20)
        self._heard += some
        self.has_ended = not some
        told = []
        while len(self._heard) >= 8 and len(self._heard) >= 8 + (size := int.from_bytes(self._heard[:8], "big")):
            told.append(pickle.loads(self._heard[8 : 8 + size]))
            del self._heard[: 8 + size]
        return told

    def kill(self) -> None:
        """Send SIGKILL; ``wait`` afterwards."""
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> tuple[list[Report], int]:
        """Wait for its end; return what it told last, and its status."""
        status = os.waitpid(self.pid, 0)[1]
        told = self.hear(0.0)  # all that a pipe holds is read at once
        os.close(self._told)
        return told, status


def _serve_in_child(serve: Callable[[Callable[[Report], None]], None], begin: int, tell: int) -> NoReturn:
    """In the server's process."""

    def told(what: Report) -> None:
        data = pickle.dumps(what)
        os.write(tell, len(data).to_bytes(8, "big") + data)

    try:
        os.read(begin, 1)
        serve(told)
    except BaseException:  # noqa: BLE001 - it is what came out
        told(Report(Outcome(dead=[traceback.format_exc(limit=-4)])))
    os._exit(0)
