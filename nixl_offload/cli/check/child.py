"""The process in which ``nixl-offload check`` starts movers, or asks vLLM: a library that crashes or hangs there ends a
task, not us.

Threading: one thread. Ownership: ``Trials`` owns its process and what that starts; ``close`` (the end of the ``with``)
kills them. It is started at the first task; tasks run one after the other while the caller does other things.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import IO, Any, Final

TASK_LIMIT_S: Final = 90.0
"""Importing torch on a cold disk takes tens of seconds; a mover gives a page that does not move 60 s."""

_IMPORTS: Final = ""
"""Statements for the child to begin with: tests give it libraries that crash."""

Answer = dict[str, Any]
"""What a task returns. ``failed``: why there is nothing else, in words."""


class Trials:
    """Runs tasks of ``trial`` in order."""

    def __init__(self, variables: Mapping[str, str] | None = None) -> None:
        """``variables``: what its environment has beside ours."""
        self._variables = dict(variables or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._waiting: list[tuple[int, Mapping[str, Any]]] = []
        self._answers: dict[int, Answer] = {}
        self._numbers = 0
        self._buffer = b""

    def begin(self, do: str, **task: Any) -> int:
        """Queue a task and return its number. Returns at once."""
        number = self._numbers = self._numbers + 1
        self._waiting.append((number, {"do": do, **task}))
        if self._process is None:
            self._start()
        else:
            self._send(self._waiting[-1])
        return number

    def answer(self, number: int, limit_s: float = TASK_LIMIT_S) -> Answer:
        """Return what became of a task; each task before it gets ``limit_s`` too. Never raises for the task's sake."""
        while number not in self._answers:
            self._take_one(limit_s)
        return self._answers[number]

    def run(self, do: str, **task: Any) -> Answer:
        """Run one task and return its answer."""
        return self.answer(self.begin(do, **task))

    def close(self) -> None:
        """Kill the process and its children, whatever they do."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        process.wait()

    def __enter__(self) -> Trials:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> None:
        self._buffer = b""
        # -c and not -m: where the package lies in the working directory alone, or on a path set by hand, it is found.
        code = (
            f"import sys; sys.path[:] = sys.argv[1:]; {_IMPORTS}from nixl_offload.cli.check.trial import main; main()"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # NIXL, cuFile and vLLM write there whatever went wrong; their exceptions say it as well.
            stderr=None if os.environ.get("VLLM_LOGGING_LEVEL") == "DEBUG" else subprocess.DEVNULL,
            env={**os.environ, **self._variables},
            start_new_session=True,
        )
        for task in list(self._waiting):
            self._send(task)

    def _send(self, task: tuple[int, Mapping[str, Any]]) -> None:
        assert self._process is not None
        with contextlib.suppress(OSError):  # It died: taking its answer says so.
            _stream(self._process.stdin).write(json.dumps(task).encode() + b"\n")
            _stream(self._process.stdin).flush()

    def _take_one(self, limit_s: float) -> None:
        """Note the answer to the oldest task; where there is none, why, and go on with the others in a new process."""
        number, _ = self._waiting[0]
        line = self._read_line(limit_s)
        if line is not None:
            self._waiting.pop(0)
            self._answers[number] = json.loads(line)
            return
        why = self._end(limit_s)
        self._waiting.pop(0)
        self._answers[number] = {"failed": why, "crashed": True}
        if self._waiting:
            self._start()

    def _read_line(self, limit_s: float) -> bytes | None:
        """Return a line; None when the process ended, or took too long."""
        assert self._process is not None
        descriptor = _stream(self._process.stdout).fileno()
        deadline_s = time.monotonic() + limit_s
        while b"\n" not in self._buffer:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not select.select([descriptor], [], [], left_s)[0]:
                return None
            got = os.read(descriptor, 1 << 16)
            if not got:
                return None
            self._buffer += got
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _end(self, limit_s: float) -> str:
        """End the process that gave no answer; say what became of it."""
        assert self._process is not None
        try:
            code: int | None = self._process.wait(0.5)
        except subprocess.TimeoutExpired:
            code = None
        self.close()
        if code is None:
            return f"no answer within {limit_s:.0f} s; it was killed"
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"it crashed ({signal.Signals(-code).name})"
        return f"it ended with exit code {code}"


def _stream(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream
