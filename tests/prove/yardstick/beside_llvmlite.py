"""The engine process of a side that imports llvmlite, as LMCache does through numba.

vLLM's CPU platform asks ``vars(value).get("kernel")`` of every name in every module, in line 139 of
``triton_utils/dispatcher.py``. llvmlite's library object answers ``__dict__`` with a wrapped function, at which the
engine's start fails.

Threading: the process's main thread.
"""

from __future__ import annotations

from llvmlite.binding import ffi

from examples.demo.engine_process import main as serve


def main() -> int:
    """Serve, with a library object whose ``__dict__`` is a dictionary."""
    ffi.lib._fntab["__dict__"] = {}
    return serve()
