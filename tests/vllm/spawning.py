"""Lets an engine that was forked start its further processes by forking, too, wherever vLLM asks for "spawn".

A spawned process imports torch and vLLM anew: 10 s of CPU time for each scheduler and each rank. Here it comes from
multiprocessing's own forkserver, which is forked off the engine's process while that is still fresh from the zygote:
it has imported everything, and nothing has run in it. As with "spawn", a new process shares nothing with the one that
asked for it: it gets what was pickled for it, and that one's environment. What it does not prove is that a bare
interpreter finds our package; for that, engines of ``in_process=False, forked=False`` are there, which do without.

Threading: ``fork_server`` is called once, before anything else runs. Ownership: the server ends when the last process
ends that knows it; it belongs to the engine's process group.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import tempfile
from multiprocessing import forkserver, resource_tracker, spawn
from typing import Any

_ENVIRONMENT = "environment of the parent"


def fork_server() -> None:
    """Fork the server off this process and make "spawn" mean "ask the server", here and in all that come from it."""
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    get_context = multiprocessing.get_context
    prepare, get_preparation_data = spawn.prepare, spawn.get_preparation_data

    def tell(name: str) -> dict[str, Any]:
        return {**get_preparation_data(name), _ENVIRONMENT: dict(os.environ)}

    def take(data: dict[str, Any]) -> None:
        os.environ.clear()
        os.environ.update(data.pop(_ENVIRONMENT))
        prepare(data)

    spawn.get_preparation_data, spawn.prepare = tell, take
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
