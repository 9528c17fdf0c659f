"""The device of the KV tensors, and its streams and fences, which order work on them.

A stream does its queued work in order, asynchronously. A fence is a point in a stream; it can be polled, and other
streams can wait for it. The engine polls fences and never blocks on a device.
Threading: ``Device.compute_fence`` on the thread that submits to the model's stream; a stream is driven by one thread.
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
        """Return True once the device is past it; never blocks. Raises if the device has failed."""


class ReadyFence:
    """The fence of work that is already done."""

    def done(self) -> bool:
        """Return True."""
        return True


READY = ReadyFence()


class Stream(Protocol):
    """Work in order. Driven by one thread."""

    def run(self, work: Callable[[], None], behind: Fence = READY) -> Fence:
        """Queue ``work`` behind a fence of the same device, and return the fence of its end, without waiting.

        ``work`` calls torch or launches kernels; it neither waits nor looks at values on the device. It runs in torch's
        inference mode: vLLM creates its KV cache in that mode, and such tensors can be written only there.
        Errors of ``work`` are raised here or by fences. If this raises, nothing that was queued is under way any more.
        """


@dataclass(eq=False)
class Device:
    """The device of the KV tensors. This class is the host, where work is done when its call returns."""

    torch_device: torch.device
    kind: MemoryKind
    """The kind of its memory, for movers."""

    def compute_fence(self) -> Fence:
        """Mark this point of the caller's current stream, on which the model runs."""
        return READY

    def new_stream(self) -> Stream:
        """Return a stream that is not the model's. It is returned when its last reference goes."""
        return _HostStream()

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
        """Whether asynchronous copies need page-locked host memory: False if a host plays the device."""
        return self.torch_device.type != "cpu"


class _HostStream:
    def run(self, work: Callable[[], None], behind: Fence = READY) -> Fence:
        assert behind.done()
        with torch.inference_mode():
            work()
        return READY


class CudaDevice(Device):
    """A CUDA device."""

    def __init__(self, torch_device: torch.device) -> None:
        super().__init__(torch_device, MemoryKind.VRAM)

    def compute_fence(self) -> Fence:
        """Record an event on the caller's current stream."""
        event = torch.Event(self.torch_device)
        event.record(torch.cuda.current_stream(self.torch_device))
        return _CudaFence(event)

    def new_stream(self) -> Stream:
        return _CudaStream(self.torch_device)


class _CudaFence:
    """A CUDA event."""

    def __init__(self, event: torch.Event) -> None:
        self.event = event

    def done(self) -> bool:
        return bool(self.event.query())


class _CudaStream:
    """A CUDA stream. Its device becomes the current device of the thread that drives it.

    Torch hands out streams from a pool of 32 per GPU, in turn: a copy on one could wait for work that vLLM or a library
    queued there. So we create our own, and lend them for the life of this object. They are never destroyed: when
    page-locked memory is freed, perhaps long after an engine was closed, torch records events on every stream that
    touched it. A stream's next owner works after all that the last one queued.
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

    def run(self, work: Callable[[], None], behind: Fence = READY) -> Fence:
        _take_thread_to(self._device)
        try:
            if isinstance(behind, _CudaFence):
                self._stream.wait_event(behind.event)
            with torch.inference_mode(), self._stream:
                work()
            event = torch.Event(self._device)
            event.record(self._stream)
        except BaseException:
            self._stream.synchronize()
            raise
        return _CudaFence(event)


_FREE: dict[int, deque[int]] = {}
"""Handles of free streams, by GPU number. Garbage collection may return one on any thread, so only atomic operations
are used.
"""
_NON_BLOCKING = 1
"""The stream and CUDA's default stream do not wait for each other."""


def _new_handle() -> int:
    """Return a new stream of the calling thread's current GPU; 0 if CUDA refuses."""
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

    A new thread's current device is the first GPU. Torch returns to it after each call on an event, and CUDA then
    creates a context there: some hundred MiB of the first GPU's memory for each rank that works on another.
    """
    if torch.cuda.current_device() != device.index:
        torch.cuda.set_device(device)


def device_of(tensor: torch.Tensor) -> Device:
    """Return the device on which ``tensor`` lies."""
    return CudaDevice(tensor.device) if tensor.is_cuda else Device(tensor.device, MemoryKind.DRAM)


def model_on_default_stream(tensor: torch.Tensor) -> bool:
    """Whether the caller's current stream, on which the model runs, is CUDA's default one.

    Ordinary streams, which libraries create, and the default stream wait for each other's queued work.
    """
    return tensor.is_cuda and torch.cuda.current_stream(tensor.device).cuda_stream == 0
