"""Where KV tensors lie, and in what order work on them is done: streams and fences of a device.

A stream does its work in order, on its own time; a fence is a point in it that can be asked about, and that other
streams can be made to wait for. Nothing in the engine waits for a device: fences are polled.
Threading: ``Streams.compute_fence`` on the thread that submits to the model's stream; a stream is driven by one thread.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from nixl_offload.movers.base import MemoryKind

logger = logging.getLogger(__name__)


class Fence(Protocol):
    """A point in a device's work."""

    def done(self) -> bool:
        """Return True once the device is past it; never blocks. Raises when the device is out of order."""


class ReadyFence:
    """The fence of work that is already done."""

    def done(self) -> bool:
        """Return True."""
        return True


READY = ReadyFence()


class Stream(Protocol):
    """Work in order. What ``run`` was given may be done long after it returned."""

    def run(self, work: Callable[[], None]) -> None:
        """Queue ``work``, which calls torch or launches kernels and neither waits nor looks at values on the device.

        It runs in torch's inference mode: vLLM makes its KV cache in that, and what was made there can be written
        nowhere else.
        What it raises may come out here, or of the next ``synchronize``.
        """

    def wait(self, fence: Fence) -> None:
        """Have all later work wait for ``fence``, which is of the same device. Returns at once."""

    def record(self) -> Fence:
        """Mark the end of what is queued so far."""

    def synchronize(self) -> None:
        """Wait until all that is queued is done. For the way out of errors only."""


class Streams(Protocol):
    """The streams of one device."""

    def compute_fence(self) -> Fence:
        """Mark this point of the caller's own stream, that of the model."""

    def new(self) -> Stream:
        """Return a stream of our own, beside that of the model. It is given back when the last reference goes."""


@dataclass(frozen=True, slots=True)
class Device:
    """The device of the KV tensors."""

    torch_device: torch.device
    kind: MemoryKind
    """The kind of its memory, for movers."""
    streams: Streams

    @property
    def number(self) -> int:
        """For ``MemoryRegion.device_id``."""
        return self.torch_device.index or 0

    @property
    def is_accelerator(self) -> bool:
        """Whether copies between it and the host go over a bus."""
        return self.kind is MemoryKind.VRAM

    @property
    def page_locks(self) -> bool:
        """Whether host memory must be page-locked for copies to be asynchronous: not where a host plays the device."""
        return self.torch_device.type != "cpu"


class HostStreams:
    """The host's, all of them one: work is done when ``run`` returns, the model's writes when its call returns."""

    def compute_fence(self) -> Fence:
        return READY

    def new(self) -> Stream:
        return self

    def run(self, work: Callable[[], None]) -> None:
        with torch.inference_mode():
            work()

    def wait(self, fence: Fence) -> None:
        assert fence.done()

    def record(self) -> Fence:
        return READY

    def synchronize(self) -> None:
        return


class CudaStreams:
    """Those of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def compute_fence(self) -> Fence:
        """Record an event on the caller's current stream."""
        event = torch.Event(self._device)
        event.record(torch.cuda.current_stream(self._device))
        return _CudaFence(event)

    def new(self) -> Stream:
        return _CudaStream(self._device)


class _CudaFence:
    """A CUDA event."""

    def __init__(self, event: torch.Event) -> None:
        self.event = event

    def done(self) -> bool:
        return bool(self.event.query())


class _CudaStream:
    """The thread that drives it works on its device from then on.

    Torch deals its own streams out of a pool of 32 for each GPU, in turn: a copy on one of them could wait for what
    vLLM or a library has queued there. So these are made here, and lent for the life of this object. They are never
    destroyed: torch records events on every stream that touched page-locked memory when that memory is freed, which may
    be long after an engine was closed. What is still queued on one is done before what its next owner queues.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        _take_thread_to(device)
        free = _FREE.setdefault(device.index, deque())
        try:
            handle = free.pop()
        except IndexError:
            handle = _new_handle()
        if not handle:
            self._stream = torch.Stream(device)
            return
        wrap: Any = torch.cuda.ExternalStream  # torch has no types for it
        self._stream = wrap(handle, device)
        weakref.finalize(self, free.append, handle).atexit = False

    def run(self, work: Callable[[], None]) -> None:
        _take_thread_to(self._device)
        with torch.inference_mode(), self._stream:
            work()

    def wait(self, fence: Fence) -> None:
        _take_thread_to(self._device)
        if isinstance(fence, _CudaFence):
            self._stream.wait_event(fence.event)

    def record(self) -> Fence:
        _take_thread_to(self._device)
        event = torch.Event(self._device)
        event.record(self._stream)
        return _CudaFence(event)

    def synchronize(self) -> None:
        self._stream.synchronize()


_FREE: dict[int, deque[int]] = {}
"""Handles of streams that may be lent again, by the number of their GPU. A garbage collection may give one back on any
thread: each operation on it is one of the interpreter's.
"""
_NON_BLOCKING = 1
"""Neither waits for CUDA's default stream, nor that for it."""


def _new_handle() -> int:
    """Return a new stream of the calling thread's current GPU; 0 where CUDA gives none."""
    handle = ctypes.c_void_p()
    try:
        error = cuda_runtime().cudaStreamCreateWithFlags(ctypes.byref(handle), ctypes.c_uint(_NON_BLOCKING))
        why = f"error {error} of cudaStreamCreateWithFlags" if error else ""
    except (OSError, AttributeError) as problem:
        why = str(problem)
    if why:
        _complain(why)
        return 0
    return handle.value or 0


@functools.cache
def _complain(why: str) -> None:
    logger.warning("No CUDA streams of our own (%s): copies may wait for others' work on torch's streams", why)


@functools.cache
def cuda_runtime() -> Any:
    """Return the CUDA runtime that torch has loaded. Raises OSError."""
    version = torch.version.cuda
    if version is None:
        raise OSError("this torch is built without CUDA")
    return ctypes.CDLL(f"libcudart.so.{version.partition('.')[0]}")


def _take_thread_to(device: torch.device) -> None:
    """Make ``device`` the calling thread's current one, for good.

    A new thread's is the first GPU. Torch goes back there after each event that it records, waits for or lets go of,
    and CUDA makes a context then: some hundred MiB of the first GPU's memory for each rank that works on another.
    """
    if torch.cuda.current_device() != device.index:
        torch.cuda.set_device(device)


def device_of(tensor: torch.Tensor) -> Device:
    """Return the device on which ``tensor`` lies."""
    if tensor.is_cuda:
        return Device(tensor.device, MemoryKind.VRAM, CudaStreams(tensor.device))
    return Device(tensor.device, MemoryKind.DRAM, HostStreams())


def model_on_default_stream(tensor: torch.Tensor) -> bool:
    """Whether the caller's current stream, on which the model runs, is CUDA's default one.

    Streams of the common kind, as libraries make them, wait for what is queued there, and it for them.
    """
    return tensor.is_cuda and torch.cuda.current_stream(tensor.device).cuda_stream == 0
