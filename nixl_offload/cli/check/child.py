"""The child process of ``nixl-offload check``, for libraries that may crash or hang: NIXL's plugins, movers.
Both sides are here: ``ChildProcess`` runs tasks, ``main`` executes them.

Threading: one thread on each side; tasks run one after the other, each a line of JSON in and one out. Ownership:
``ChildProcess`` owns the process and whatever that starts; ``close`` kills them.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from types import TracebackType
from typing import Any, Final

from nixl_offload.config import S3Config, parse_config
from nixl_offload.errors import MoverError, NixlOffloadError

TASK_LIMIT_S: Final = 90.0
"""Importing torch on a cold disk takes tens of seconds."""
_IMPORTS: Final = ""
"""Statements that the child begins with: tests give it libraries that crash."""

Answer = dict[str, Any]
"""What a task returns. ``failed`` says in words why there is nothing else."""


class ChildProcess:
    """Runs tasks. The process starts with the first one, and anew after one that crashed or hung."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, task: str, /, *, limit_s: float = TASK_LIMIT_S, **arguments: Any) -> Answer:
        """Return the task's answer. Failure is an answer too: ``failed``, with ``crashed`` if there was none."""
        process = self._process = self._process or self._start()
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # It died: reading finds that out.
            process.stdin.write(json.dumps([task, arguments]).encode() + b"\n")
            process.stdin.flush()
        line = _read_line(process, time.monotonic() + limit_s)
        if line is not None:
            answer = json.loads(line)
            assert isinstance(answer, dict)
            return answer
        try:
            code = process.wait(0.5)
        except subprocess.TimeoutExpired:
            why = f"no answer within {limit_s:.0f} s; it was killed"
        else:
            names = {-number: f"it crashed ({number.name})" for number in signal.Signals}
            why = names.get(code, f"it ended with exit code {code}")
        self.close()
        return {"failed": why, "crashed": True}

    def close(self) -> None:
        """Kill the process and what it started, whatever they do."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):  # of what it started some may go on after it has ended
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(OSError), process:  # closes its pipes and waits for it
            pass

    def __enter__(self) -> ChildProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _start(self) -> subprocess.Popen[bytes]:
        # Not -m: with sys.path handed over, the package is found wherever the parent found it.
        code = f"import sys; sys.path[:] = sys.argv[1:]; {_IMPORTS}import {__name__} as child; child.main()"
        return subprocess.Popen(
            [sys.executable, "-c", code, *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # NIXL and cuFile log whatever goes wrong; their exceptions say it as well.
            stderr=None if os.environ.get("VLLM_LOGGING_LEVEL") == "DEBUG" else subprocess.DEVNULL,
            start_new_session=True,
        )


def _read_line(process: subprocess.Popen[bytes], deadline_s: float) -> bytes | None:
    """Return the one line of an answer; None when the process ended or took too long."""
    assert process.stdout is not None
    descriptor, line = process.stdout.fileno(), b""
    while not line.endswith(b"\n"):
        if not select.select([descriptor], [], [], max(0.0, deadline_s - time.monotonic()))[0]:
            return None
        got = os.read(descriptor, 1 << 16)
        if not got:
            return None
        line += got
    return line


def main() -> None:
    """Execute tasks until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # NIXL logs to stdout.
    for line in sys.stdin:
        task, arguments = json.loads(line)
        try:
            answer = _TASKS[task](**arguments)
        except NixlOffloadError as error:
            answer = {"failed": str(error)}
        except Exception as error:  # noqa: BLE001 - whatever a third party raises, the next task may do without it
            answer = {"failed": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    os._exit(0)  # Destructors of libraries may hang.


def _plugin(name: str, tier: dict[str, Any] | None = None) -> Answer:
    """Start a NIXL plugin. ``tier`` configures ``obj``."""
    from nixl_offload.movers.nixl_agent import NixlAgent
    from nixl_offload.movers.nixl_plugins import PLUGINS, object_plugin

    plugin = PLUGINS[name] if tier is None else object_plugin(_s3_tier(tier))
    agent = NixlAgent(plugin, plugin.params)
    try:
        agent.get()
    except MoverError as error:
        return {"failed": str(error).removeprefix(f"{name}: "), "loader": _loader_error(plugin.plugin)}
    return {"memory": sorted(kind.value for kind in agent.memory_kinds)}


def _loader_error(plugin: str) -> str | None:
    """Return the dynamic loader's own message, which names the library that a plugin misses; "" where it finds none.

    Searched where NIXL searches. None: there is no such plugin.
    """
    directories = [os.environ.get("NIXL_PLUGIN_DIR", "")]
    if not directories[0]:
        for wheel in ("nixl_cu13", "nixl_cu12"):  # "nixl" imports the one that fits torch's CUDA.
            module = getattr(sys.modules.get(f"{wheel}._api"), "__file__", None)
            home = os.path.dirname(os.path.dirname(module)) if module else ""
            directories += [f"{home}/{wheel}.libs/nixl", f"{home}/.{wheel}.mesonpy.libs/plugins"]
    for file in (f"{directory}/libplugin_{plugin}.so" for directory in directories if directory):
        if os.path.exists(file):
            try:
                ctypes.CDLL(file)
            except OSError as error:
                return str(error)
            return ""
    return None


def _mover(name: str, directory: str, gpu: bool, **options: Any) -> Answer:
    """Start a file mover and move a page with it, from and to the memory that it would be used with."""
    from nixl_offload.movers.base import MemoryKind
    from nixl_offload.movers.select import make_mover, probe_round_trip

    mover = make_mover(name, **options)
    try:
        on_device = MemoryKind.VRAM in mover.memory_kinds and name != "copy"
        if on_device and not gpu:
            return {"ok": False, "reason": "no NVIDIA driver here"}
        note = probe_round_trip(mover, MemoryKind.VRAM if on_device else MemoryKind.DRAM, directory)
    except MoverError as error:
        missing = isinstance(error.__cause__, ImportError)
        return {"ok": False, "reason": str(error).removeprefix(f"{name}: "), "not_installed": missing}
    finally:
        mover.close()
    return {"ok": True, "reason": f"{note}; packs through host memory" if gpu and not on_device else note}


def _file_speeds(**arguments: Any) -> Answer:
    from nixl_offload.cli.check.speed import measure_file_movers

    return measure_file_movers(**arguments)


def _objects(tier: dict[str, Any], io: bool, piece_bytes: int) -> Answer:
    """Open the mover that a server would take for a bucket, and measure it if ``io``."""
    from nixl_offload.cli.check.speed import measure_object_mover
    from nixl_offload.movers.base import MemoryKind
    from nixl_offload.movers.select_object import open_object_mover
    from nixl_offload.stores.s3 import open_store

    wanted = _s3_tier(tier)
    opened = open_object_mover(wanted, MemoryKind.DRAM)
    answer: Answer = {"movers": [probe._asdict() for probe in opened.report]}
    try:
        if io:
            with contextlib.closing(open_store(wanted)) as store:
                answer["io"] = measure_object_mover(opened.mover, store, wanted.connections, piece_bytes)
    except NixlOffloadError as error:
        answer["io"] = {"failed": str(error)}
    finally:
        opened.mover.close()
    return answer


def _memory() -> Answer:
    """Return how much host memory a rank could take, by the engine's own rule."""
    from nixl_offload.engine import host
    from nixl_offload.hardware import memory_limits

    available_bytes, limited_by = memory_limits.room()
    reserve_bytes = min(int(available_bytes * host.RESERVE_SHARE), host.RESERVE_LIMIT_BYTES)
    return {"available_bytes": available_bytes, "usable_bytes": available_bytes - reserve_bytes, "by": limited_by}


def _s3_tier(tier: dict[str, Any]) -> S3Config:
    found = parse_config({"tiers": [tier]}).s3
    assert found is not None
    return found


_TASKS: Final[dict[str, Any]] = {
    "plugin": _plugin,
    "mover": _mover,
    "file_speeds": _file_speeds,
    "objects": _objects,
    "memory": _memory,
}
