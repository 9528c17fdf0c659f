"""Starts engines in a fifth of the time: a process that has imported vLLM once, and forks a child for each engine.

An engine start is mostly imports: 8 s of CPU time for torch and vLLM, 2 s for the engine. Nothing that a fork would
break exists in the zygote: it creates no NIXL agent, opens no file of ours, and runs no torch operation, which would
start threads. Only in-process engines start this way; those in several processes start as ``vllm serve`` does.

Threading: engines may be started and ended from any thread; the zygote itself serves one request after the other, over
a socket that carries the descriptors of a child's pipes. Ownership: end of the socket ends the zygote; engines see the
end of theirs.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping
from multiprocessing import forkserver, resource_tracker, spawn
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, cast

from examples.demo.engine import Engine, EngineError

ROOT = Path(__file__).resolve().parents[2]
_REQUEST_BYTES = 1 << 18
_ENVIRONMENT = "environment of the parent"
MAIN_MODULE = "NIXL_OFFLOAD_TEST_MAIN"
"""Environment variable: the module whose ``main`` a forked process runs, if it is not the engine over pipes."""
_IMPORTS = (
    "vllm",
    "vllm.entrypoints.llm",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.engine.core",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.v1.attention.backends.flash_attn",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.kv_offload.cpu.spec",
    "vllm.utils.cpu_triton_utils",
    "vllm.triton_utils.dispatcher",
    "vllm.plugins.lora_resolvers.filesystem_resolver",
    "vllm.plugins.lora_resolvers.hf_hub_resolver",
    "vllm.plugins.io_processors",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.distributed.elastic_ep.elastic_execute",
    "vllm.renderers.hf",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.model_executor.model_loader.default_loader",
    "vllm.model_executor.models.llama",
    "transformers.models.llama.configuration_llama",
    "compressed_tensors",
    "nixl",
    "nixl_offload.vllm.connector",
    "examples.demo.engine_process",
    "tests.vllm.poison",
)
"""What an engine imports. One that is missing is no error: the child imports what it needs, only later."""


class Zygote:
    """The near end. Made by ``start``; ``close`` ends it and every engine that it forked."""

    def __init__(self, log: Path, environment: Mapping[str, str]) -> None:
        """Start the process and return at once; the first ``fork`` waits until it has imported all it should.

        ``environment`` must hold what libraries read when they are loaded (``OMP_NUM_THREADS``, ...).
        """
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {**os.environ, **environment}
        search_path = os.pathsep.join(filter(None, (str(ROOT), environment.get("PYTHONPATH"))))
        with far, log.open("ab") as log_file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.vllm.zygote", str(far.fileno())],
                pass_fds=[far.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=log_file,
                cwd=ROOT,
                env={**environment, "PYTHONPATH": search_path},
            )
        self._socket = near
        self._socket.settimeout(120)
        self._lock = threading.Lock()

    def fork(self, log_file: BinaryIO, environment: dict[str, str], *, spawns: bool) -> ForkedProcess:
        """Fork an engine process with its pipes and environment. ``spawns``: it is going to start processes of its own.

        Raises EngineError when the zygote is gone.
        """
        child_in, our_in = os.pipe()
        our_out, child_out = os.pipe()
        try:
            request = {"op": "fork", "environment": environment, "spawns": spawns}
            pid = self.ask(request, [child_in, child_out, log_file.fileno()])
        except BaseException:
            os.close(our_in)
            os.close(our_out)
            raise
        finally:
            os.close(child_in)
            os.close(child_out)
        return ForkedProcess(self, pid, our_in, our_out)

    def ask(self, request: dict[str, Any], descriptors: list[int]) -> int:
        """Send one request, return the number it is answered with; -1 stands for None."""
        try:
            with self._lock:
                socket.send_fds(self._socket, [json.dumps(request).encode()], descriptors)
                answer = self._socket.recv(64)
        except OSError as error:
            raise EngineError(f"the zygote does not answer: {error}") from error
        if not answer:
            raise EngineError("the zygote died")
        return int(answer)

    def close(self) -> None:
        """End the zygote. Engines must be closed before: nobody could reap them."""
        self._socket.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class ForkedProcess:
    """The part of ``subprocess.Popen`` that ``Engine`` uses, for a child of the zygote."""

    def __init__(self, zygote: Zygote, pid: int, stdin: int, stdout: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdin = os.fdopen(stdin, "wb", buffering=0)
        self.stdout = os.fdopen(stdout, "rb", buffering=0)
        self._zygote = zygote

    def wait(self, timeout: float | None = None) -> int:
        """See Popen.wait."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            status = self._zygote.ask({"op": "reap", "pid": self.pid}, [])
            if status >= 0:
                self.returncode = os.waitstatus_to_exitcode(status)
            elif deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("forked engine", timeout or 0)
            else:
                time.sleep(0.01)
        return self.returncode


class ForkedEngine(Engine):
    """An engine that a zygote forks. Its further processes are forked, too (``fork_server``); with ``forks_all`` False
    they are bare interpreters.
    """

    def __init__(self, zygote: Zygote, *args: Any, forks_all: bool = True, **options: Any) -> None:
        self._zygote, self._forks_all = zygote, forks_all
        self._workers = options.get("distributed_executor_backend") == "mp"
        super().__init__(*args, **options)

    def _spawn(self, log_file: BinaryIO, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        spawns = self._workers or environment.get("VLLM_ENABLE_V1_MULTIPROCESSING") != "0"
        forked = self._zygote.fork(log_file, environment, spawns=spawns and self._forks_all)
        return cast("subprocess.Popen[bytes]", forked)


def import_all() -> None:
    """Import what engines import."""
    for name in _IMPORTS:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def serve(requests: socket.socket) -> None:
    """The far end: import, then fork and reap on request until the socket ends."""
    import_all()
    gc.collect()
    gc.freeze()  # a child's collections need not copy the pages that all share
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, _REQUEST_BYTES, 3)
        if not message:
            return
        request = json.loads(message)
        if request["op"] == "reap":
            pid, status = os.waitpid(request["pid"], os.WNOHANG)
            requests.send(str(status if pid else -1).encode())
            continue
        pid = os.fork()
        if pid == 0:
            requests.close()
            _become_engine(request["environment"], descriptors, spawns=request["spawns"])
        for descriptor in descriptors:
            os.close(descriptor)
        requests.send(str(pid).encode())


def _become_engine(environment: dict[str, str], descriptors: list[int], *, spawns: bool) -> NoReturn:
    code = 1
    try:
        os.setsid()
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
            os.close(descriptor)
        faulthandler.register(signal.SIGUSR1, file=2)
        os.environ.clear()
        os.environ.update(environment)
        tempfile.tempdir = None
        sys.stdin = os.fdopen(0, encoding="utf-8")
        _save_work()
        if spawns:
            fork_server()
        code = importlib.import_module(environment.get(MAIN_MODULE, "examples.demo.engine_process")).main()
    except BaseException:  # noqa: BLE001 - the fork must never return into the zygote's loop
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def fork_server() -> None:
    """Fork a server off this process, and make "spawn" mean "ask the server", here and in all that come from it.

    A spawned process imports torch and vLLM anew: 10 s of CPU time for each scheduler and each rank. Here it comes from
    multiprocessing's own forkserver, forked while the engine's process is fresh from the zygote: it has imported
    everything, and nothing has run in it. As with "spawn", a new process gets what was pickled for it, and the
    environment of the one that asked. That a bare interpreter finds our package is for ``forked=False`` to prove.

    Called once, before anything else runs. The server ends with the last process that knows it.
    """
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    get_context = multiprocessing.get_context
    prepare, get_preparation_data = spawn.prepare, spawn.get_preparation_data

    def with_environment(name: str) -> dict[str, Any]:
        return {**get_preparation_data(name), _ENVIRONMENT: dict(os.environ)}

    def take(data: dict[str, Any]) -> None:
        os.environ.clear()
        os.environ.update(data.pop(_ENVIRONMENT))
        prepare(data)

    spawn.get_preparation_data, spawn.prepare = with_environment, take
    multiprocessing.get_context = lambda method=None: get_context("forkserver" if method == "spawn" else method)
    server.ensure_running = lambda: None  # Python would start a second one for those that the first has forked
    resource_tracker.ensure_running()

    listener = socket.socket(socket.AF_UNIX)
    server._forkserver_address = os.path.join(tempfile.mkdtemp(), "spawn")
    listener.bind(server._forkserver_address)
    listener.listen()
    alive_r, server._forkserver_alive_fd = os.pipe()
    if os.fork() == 0:
        with contextlib.suppress(BaseException):
            os.close(server._forkserver_alive_fd)
            os.dup2(2, 1)  # stdout is a pipe whose end says that the engine is gone
            forkserver.main(listener.detach(), alive_r, [])
        os._exit(0)
    listener.close()
    os.close(alive_r)


def _save_work() -> None:
    """Spare an engine work that is only about what the zygote has imported. Nothing that an engine makes is touched."""
    # vLLM thaws what it froze when it shuts down, and collects twice: half a million of the zygote's objects each time.
    # An engine's own objects are not frozen here, and so are collected then as ever.
    gc.freeze = gc.unfreeze = lambda: None
    # vLLM looks at a model's class in a process of its own (no CUDA is to be initialised), which imports all anew.
    registry: Any = importlib.import_module("vllm.model_executor.models.registry")
    registry._run_in_subprocess = lambda look: look()
    # Ranks and scheduler spin for a second after each message before they sleep until the next one. Of those that sleep
    # at once vLLM wakes some up only when they look for themselves, which they do every 5 s.
    messages: Any = importlib.import_module("vllm.distributed.device_communicators.shm_broadcast")
    messages.SpinCondition.__init__.__defaults__ = (0.0,)
    messages.SHM_READER_RECHECK_INTERVAL_MS = 10


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
    os._exit(0)  # what the imports would do at exit serves nobody
