"""CUDA streams that nobody else has. Torch deals its streams out of a pool of 32 for each GPU and priority, in turn:
the 33rd is the first again, and a copy on it waits for what vLLM or a library has queued there.

Threading: any thread; no lock, because streams come back when the garbage collector says so.
Ownership: a stream is lent for the life of what ``take`` returns. It is never destroyed: torch records events on every
stream that touched page-locked memory when that memory is freed, which may be long after an engine was closed. There
are never more of them than were lent at once.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections import deque
from typing import Any

import torch

logger = logging.getLogger(__name__)

_NON_BLOCKING = 1
"""Neither waits for CUDA's default stream, nor that for it."""
_FREE: dict[int, deque[int]] = {}
"""Handles that may be lent again, by the number of their GPU. Each operation on it is one of the interpreter's."""


class OwnStream:
    """A stream on loan. What is still queued on it when it comes back is done before what its next owner queues."""

    def __init__(self, handle: int, device: torch.device) -> None:
        self.handle = handle
        wrap: Any = torch.cuda.ExternalStream  # torch has no types for it
        self.stream: torch.Stream = wrap(handle, device)
        self._number = device.index

    def give_back(self) -> None:
        """Nothing will be queued on it any more. Safe within a garbage collection."""
        _FREE.setdefault(self._number, deque()).append(self.handle)


def take(device: torch.device) -> OwnStream | None:
    """Return a stream of ``device``, which must be the calling thread's current one; None where CUDA gives none."""
    try:
        return OwnStream(_FREE.setdefault(device.index, deque()).pop(), device)
    except IndexError:
        pass
    handle = ctypes.c_void_p()
    try:
        error = runtime().cudaStreamCreateWithFlags(ctypes.byref(handle), ctypes.c_uint(_NON_BLOCKING))
    except (OSError, AttributeError) as problem:
        _complain(str(problem))
        return None
    if error or not handle.value:
        _complain(f"error {error} of cudaStreamCreateWithFlags")
        return None
    return OwnStream(handle.value, device)


@functools.cache
def runtime() -> Any:
    """The CUDA runtime that torch has loaded. Raises OSError."""
    version = torch.version.cuda
    if version is None:
        raise OSError("this torch is built without CUDA")
    return ctypes.CDLL(f"libcudart.so.{version.partition('.')[0]}")


@functools.cache
def _complain(why: str) -> None:
    logger.warning("No CUDA streams of our own (%s): copies may wait for others' work on torch's streams", why)
