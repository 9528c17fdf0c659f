"""KvikIO itself: how it is loaded, with its process-wide settings, and how its errors read. Imports kvikio, and late.

Threading: by the thread that drives the mover.
"""

from __future__ import annotations

import ctypes
import re
from typing import Any

from nixl_offload.errors import MoverUnavailableError

KVIKIO_ERRORS = (RuntimeError, OSError, ValueError, MemoryError)
"""What KvikIO raises: RuntimeError for nearly everything, the rest where C++ has an exception of that meaning."""
_WHERE = re.compile(r"^[A-Za-z/ ]+ at: \S+:\d+: ")


def load_kvikio(name: str, threads: int, bounce_bytes: int) -> Any:
    """KvikIO, with its defaults set. Raises MoverUnavailableError."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise MoverUnavailableError(
            f"{name}: no NVIDIA driver: libcuda.so.1 cannot be loaded, and KvikIO wants it even for host memory"
        ) from error
    try:
        import kvikio
        import kvikio.defaults
    except ModuleNotFoundError as error:
        raise MoverUnavailableError(
            f"{name}: {error.name} is not installed; kvikio-cu13 or kvikio-cu12 has it, whichever fits torch's CUDA"
        ) from error
    except (ImportError, *KVIKIO_ERRORS) as error:
        raise MoverUnavailableError(f"{name}: KvikIO cannot be loaded: {words_of(error)}") from error
    settings: dict[str, object] = {
        "bounce_buffer_size": bounce_bytes,
        "gds_threshold": 0,
        "auto_direct_io_read": True,
        "auto_direct_io_write": True,
    }
    if kvikio.defaults.get("num_threads") != threads:  # the same number, too, would wait for the pool to be idle
        settings["num_threads"] = threads
    try:
        kvikio.defaults.set(settings)
    except KVIKIO_ERRORS as error:
        raise MoverUnavailableError(f"{name}: KvikIO takes no such setting: {words_of(error)}") from error
    return kvikio


def words_of(error: BaseException) -> str:
    """What ``error`` says, without the place in KvikIO's source."""
    return _WHERE.sub("", " ".join(str(error).split())) or type(error).__name__
