"""The child process of ``nixl-offload check``, for libraries that may crash or hang: NIXL's plugins, movers.

Threading: one thread in each process; tasks run one after the other. Ownership: ``ChildProcess`` owns the process and
all processes that it starts; ``close`` kills them.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import secrets
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Final

from nixl_offload.config import S3Config
from nixl_offload.errors import NixlOffloadError
from nixl_offload.movers.select import MoverChoice

TASK_LIMIT_S: Final = 90.0
"""Importing torch on a cold disk takes tens of seconds."""
_PIECE_BYTES: Final = 2 << 20
_BUDGET_S: Final = 0.5
_OBJECTS: Final = 8

Answer = dict[str, Any]
"""The result of a task. If the task failed, its only field is ``failed``: the reason, in words."""


class ChildProcess:
    """Runs tasks, which are functions of this module. The first task starts the process, as does one after a crash."""

    def __init__(self) -> None:
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None

    def run(self, task: Callable[..., Answer], *, limit_s: float = TASK_LIMIT_S, **arguments: Any) -> Answer:
        """Run a task and return its answer. Never raises for a task that fails, crashes or takes too long."""
        if self._process is None or self._pipe is None:
            context = multiprocessing.get_context("spawn")
            self._pipe, theirs = context.Pipe()
            self._process = context.Process(target=_serve, args=(theirs,), name="nixl-offload-check", daemon=True)
            self._process.start()
            theirs.close()
        why = f"no answer within {limit_s:.0f} s; it was killed"
        try:
            self._pipe.send((task, arguments))
            if self._pipe.poll(limit_s):
                answer: Answer = self._pipe.recv()
                return answer
        except (EOFError, OSError):
            self._process.join(1.0)
            code = self._process.exitcode or 0
            why = f"it crashed ({signal.Signals(-code).name})" if code < 0 else f"it ended with exit code {code}"
        self.close()
        return {"failed": why}

    def close(self) -> None:
        """Kill the process and what it started."""
        process, self._process = self._process, None
        if process is None or process.pid is None or self._pipe is None:
            return
        with contextlib.suppress(ProcessLookupError):  # its own children may outlive it
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()
        self._pipe.close()


def _serve(pipe: Connection) -> None:
    """Run tasks until the parent has gone."""
    os.setsid()
    # NIXL and cuFile log errors to stdout; their exceptions repeat them.
    sink = 2 if os.environ.get("VLLM_LOGGING_LEVEL") == "DEBUG" else os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    with contextlib.suppress(EOFError, OSError):
        while True:
            task, arguments = pipe.recv()
            try:
                answer = task(**arguments)
            except NixlOffloadError as error:
                answer = {"failed": str(error)}
            except Exception as error:  # noqa: BLE001 - the next task may not need this library
                answer = {"failed": f"{type(error).__name__}: {error}"}
            pipe.send(answer)
    os._exit(0)  # destructors of libraries may hang


def try_file_movers(choice: MoverChoice, directory: str, *, gpu: bool, threads: int, direct_io: bool) -> Answer:
    """Open the mover that a server would use for a directory, and measure it."""
    import torch

    from nixl_offload.engine.autotune import FREE_SHARE, measure
    from nixl_offload.engine.streams import device_of
    from nixl_offload.movers.select import open_mover
    from nixl_offload.types import PAGE_BYTES

    device = device_of(torch.empty(0, device="cuda" if gpu else "cpu"))
    mover, report = open_mover(choice, device.kind, directory, threads=threads)
    answer: Answer = {"movers": [probe._asdict() for probe in report]}
    space = os.statvfs(directory)
    free_bytes = space.f_bavail * space.f_frsize if space.f_blocks else 1 << 40
    piece_bytes = min(_PIECE_BYTES, free_bytes // FREE_SHARE) // PAGE_BYTES * PAGE_BYTES
    if not piece_bytes:
        mover.close()
        return answer
    speed = measure(mover, directory, device, piece_bytes, direct_io=direct_io, budget_s=_BUDGET_S)
    return answer | speed._asdict()


def try_object_movers(tier: S3Config) -> Answer:
    """Open the mover that a server would use for a bucket, and measure the bucket with its client."""
    from nixl_offload.movers.base import MemoryKind
    from nixl_offload.movers.select import open_object_mover
    from nixl_offload.stores.s3 import open_store

    opened = open_object_mover(tier, MemoryKind.DRAM)
    opened.mover.close()
    names = [f"check-{secrets.token_hex(8)}" for _ in range(min(_OBJECTS, tier.connections))]
    pieces = {name: memoryview(bytearray(_PIECE_BYTES)) for name in names}
    with contextlib.closing(open_store(tier)) as store, ThreadPoolExecutor(len(names)) as pool:
        try:
            began_s = time.monotonic()
            list(pool.map(lambda name: store.write(name, pieces[name]), names))
            written_s = time.monotonic()
            list(pool.map(lambda name: store.read_into(name, 0, pieces[name]), names))
            read_s = time.monotonic()
        finally:
            store.delete(names)
    size_bytes = len(names) * _PIECE_BYTES
    return {
        "movers": [probe._asdict() for probe in opened.report],
        "read_bytes_s": size_bytes / (read_s - written_s),
        "write_bytes_s": size_bytes / (written_s - began_s),
    }
