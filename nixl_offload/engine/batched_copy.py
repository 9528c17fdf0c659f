"""Pages of KV blocks to and from page-locked memory by one call to the driver for all of them, without a kernel and
without scratch: ``cuMemcpyBatchAsync`` of CUDA 12.8.

The alternative, a kernel that gathers into scratch and one copy over the bus, can be no faster than a plain copy. So
batched copies are taken where they come close to that, which is measured when a packer is made: blocks that lie in one
piece (BLHNC) should, pages of a few KiB cannot.

Threading: ``find_batched_copy`` at start, which waits for the device; what it returns on the thread that drives a
stream, within work on that.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from nixl_offload.engine.kernels.base import Page
from nixl_offload.engine.streams import Device, Stream

logger = logging.getLogger(__name__)

Addresses = npt.NDArray[np.uint64]
BatchedCopy = Callable[[Addresses, Addresses, Addresses], None]
"""Called with targets, sources and sizes in bytes, one of each for each copy; queues them on the current stream. Raises
RuntimeError when the driver refuses: then nothing of them is known to have been queued, or not to."""

MIN_PIECE_BYTES = 32 << 10
"""Smaller pages are not tried: the driver takes a microsecond or so for each."""
PLAIN_SHARE = 0.97
"""Of the speed of one plain copy; what gathers first was predicted to have 0.95 of it (gpu-log.md)."""
TRIAL_BYTES = 16 << 20
TRIAL_ROUNDS, TRIAL_REPEATS = 5, 8
"""What is timed is as many copies in a row as ``TRIAL_REPEATS``: 128 MiB take some 2.5 ms."""

_CUDA = "libcuda.so.1"
_VERSION = 12080
"""Of the interface that is asked for; CUDA 13 has another one by this name, with other arguments."""
_STREAM_ORDER = 1
"""The source is read when the stream gets there: a step may still be writing it when this is queued."""


_RATIOS: dict[tuple[int, int], float] = {}
"""By device and size: what was measured; 0.0 where that failed. Tiers that open at once may both measure."""


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes: access order, the hints of two locations (type and id), flags."""

    _fields_ = (
        ("order", ctypes.c_uint),
        ("source", ctypes.c_int * 2),
        ("target", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


class PageTable:
    """Where the pages of a group lie, for addresses by arithmetic."""

    def __init__(self, tensors: Sequence[torch.Tensor], pages: Sequence[Page]) -> None:
        self._bases = np.array([page.of(tensors).data_ptr() for page in pages], dtype=np.uint64)
        self._strides = np.array([tensors[page.tensor].stride(0) for page in pages], dtype=np.uint64)
        self._columns = np.array([page.column for page in pages], dtype=np.uint64)
        self._sizes = np.array([page.bytes for page in pages], dtype=np.uint64)

    def copies(
        self, block_ids: npt.NDArray[np.int32], payload: npt.NDArray[np.uint8], piece_bytes: int
    ) -> tuple[Addresses, Addresses, Addresses]:
        """Return (on the device, in the payload, size) of each copy: neighbours on both sides joined, and cut where the
        payload goes over a multiple of ``piece_bytes`` in memory. Block ids must have been checked.
        """
        ids = block_ids.astype(np.uint64)[:, np.newaxis]
        rows = np.uint64(payload.ctypes.data) + np.arange(len(ids), dtype=np.uint64) * np.uint64(payload.shape[1])
        device = (self._bases + ids * self._strides).ravel()
        host = (rows[:, np.newaxis] + self._columns).ravel()
        sizes = np.tile(self._sizes, len(ids))
        new = np.ones(len(sizes), dtype=bool)
        new[1:] = (device[1:] != device[:-1] + sizes[:-1]) | (host[1:] != host[:-1] + sizes[:-1])
        begins = np.flatnonzero(new)
        device, host, sizes = device[begins], host[begins], np.add.reduceat(sizes, begins)
        piece = np.uint64(piece_bytes)
        last = host + sizes - np.uint64(1)
        while (over := host // piece != last // piece).any():
            first = np.where(over, piece - host % piece, sizes)
            device = np.concatenate([device, (device + first)[over]])
            rest = (sizes - first)[over]
            host = np.concatenate([host, (host + first)[over]])
            sizes = np.concatenate([first, rest])
            last = host + sizes - np.uint64(1)
        return device, host, sizes


def find_batched_copy(device: Device, pages: Sequence[Page]) -> BatchedCopy | None:
    """Return the copy for pages like these if it is the better way on ``device``; never raises."""
    smallest = min((page.bytes for page in pages), default=0)
    if device.torch_device.type != "cuda" or smallest < MIN_PIECE_BYTES:
        return None
    copy = cuda_batched_copy(device.number)
    return copy if copy is not None and _is_quick(copy, device, smallest) else None


@functools.cache
def cuda_batched_copy(device: int) -> BatchedCopy | None:
    """Return the driver's, or None with a line in the log that says why there is none."""
    try:
        entry = _entry()
    except (OSError, AttributeError, RuntimeError) as error:
        logger.info("Copies over the bus are not batched: %s", error)
        return None

    def copy(targets: Addresses, sources: Addresses, sizes: Addresses) -> None:
        attributes, first, failed = _Attributes(order=_STREAM_ORDER), ctypes.c_size_t(0), ctypes.c_size_t(0)
        stream = torch.cuda.current_stream(device).cuda_stream
        code = entry(
            targets.ctypes.data,
            sources.ctypes.data,
            sizes.ctypes.data,
            len(sizes),
            ctypes.byref(attributes),
            ctypes.byref(first),
            1,
            ctypes.byref(failed),
            stream,
        )
        if code:
            raise RuntimeError(f"cuMemcpyBatchAsync: CUDA error {code} at copy {failed.value} of {len(sizes)}")

    return copy


def copy_on_host(targets: Addresses, sources: Addresses, sizes: Addresses) -> None:
    """A ``BatchedCopy`` where host memory plays the device."""
    for target, source, size in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(target, source, size)


def _entry() -> Callable[..., int]:
    """Ask the driver for the interface of that version. Raises OSError, AttributeError, RuntimeError."""
    cuda = ctypes.CDLL(_CUDA)
    address, status = ctypes.c_void_p(), ctypes.c_int()
    find = cuda.cuGetProcAddress_v2
    find.argtypes = (ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p)
    code = find(b"cuMemcpyBatchAsync", ctypes.byref(address), _VERSION, 0, ctypes.byref(status))
    if code or not address.value:
        raise RuntimeError(f"the driver has no cuMemcpyBatchAsync (CUDA error {code}): it is older than CUDA 12.8")
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    made = ctypes.CFUNCTYPE(
        ctypes.c_int, pointer, pointer, pointer, size, pointer, pointer, size, pointer, pointer
    )  # lets go of the interpreter
    return made(address.value)


def _is_quick(copy: BatchedCopy, device: Device, piece_bytes: int) -> bool:
    """Whether batched copies of pieces of that size bring the right bytes, both ways, at ``PLAIN_SHARE`` of a plain
    copy's speed. Tried once for each size: some milliseconds, in memory of its own.
    """
    key = device.number, piece_bytes
    if key not in _RATIOS:
        try:
            _RATIOS[key] = _ratio(copy, device, piece_bytes)
        except Exception as error:  # noqa: BLE001 - gathering works everywhere
            _RATIOS[key] = 0.0
            logger.warning("Copies over the bus are not batched: trying them failed: %s", error)
        else:
            logger.info(
                "Batched copies of %d KiB have %.2f of the speed of a plain copy over the bus: %s",
                piece_bytes >> 10,
                _RATIOS[key],
                "taken" if _RATIOS[key] >= PLAIN_SHARE else "blocks are gathered first",
            )
    return _RATIOS[key] >= PLAIN_SHARE


def _ratio(copy: BatchedCopy, device: Device, piece_bytes: int) -> float:
    """Return the speed of batched copies by that of plain ones, the worse direction.

    Raises RuntimeError when other bytes arrive than were sent, and what the device raises.
    """
    count, where, stream = max(2, TRIAL_BYTES // piece_bytes), device.torch_device, device.streams.new()
    host, whole = (
        torch.empty((rows, piece_bytes), dtype=torch.uint8, pin_memory=device.page_locks) for rows in (count, 2 * count)
    )
    made: list[torch.Tensor] = []

    def do(work: Callable[[], object]) -> None:
        stream.run(lambda: (work(), None)[1])
        stream.synchronize()

    def make() -> None:
        made.append(torch.randint(0, 256, (2 * count, piece_bytes), dtype=torch.uint8, device=where))
        made.append(torch.empty((count, piece_bytes), dtype=torch.uint8, device=where))

    do(make)
    blocks, plain = made
    # Every other block, in falling order: nothing lies side by side.
    order = np.arange(2 * count - 1, 0, -2)
    places = order.astype(np.uint64) * np.uint64(piece_bytes) + np.uint64(blocks.data_ptr())
    rows = np.arange(count, dtype=np.uint64) * np.uint64(piece_bytes) + np.uint64(host.data_ptr())
    sizes = np.full(count, piece_bytes, dtype=np.uint64)

    def look() -> torch.Tensor:
        do(lambda: whole.copy_(blocks, non_blocking=True))
        return whole.clone()

    before = look()
    do(lambda: copy(rows, places, sizes))
    if not torch.equal(host, before[order.tolist()]):
        raise RuntimeError("other bytes arrived than were sent")
    host.fill_(7)
    do(lambda: copy(places, rows, sizes))
    after = look()
    if not bool((after[1::2] == 7).all()) or not torch.equal(after[::2], before[::2]):
        raise RuntimeError("other bytes were written than were sent, or to other blocks")
    ratios = []
    for batched, one in (
        (lambda: copy(rows, places, sizes), lambda: host.copy_(plain, non_blocking=True)),
        (lambda: copy(places, rows, sizes), lambda: plain.copy_(host, non_blocking=True)),
    ):
        rounds = [(_seconds(device, stream, one), _seconds(device, stream, batched)) for _ in range(TRIAL_ROUNDS)]
        ratios.append(statistics.median(alone / together for alone, together in rounds))
    return min(ratios)


def _seconds(device: Device, stream: Stream, work: Callable[[], object]) -> float:
    """Return how long ``TRIAL_REPEATS`` of ``work`` take, by the device's own clock where it has one."""
    events: list[Any] = []

    def mark() -> None:
        if device.torch_device.type == "cuda":
            events.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
            events[-1].record()

    def repeat() -> None:
        mark()
        for _ in range(TRIAL_REPEATS):
            work()
        mark()

    begun_s = time.perf_counter()
    stream.run(repeat)
    stream.synchronize()
    if events:
        return float(events[0].elapsed_time(events[1])) / 1000
    return time.perf_counter() - begun_s
