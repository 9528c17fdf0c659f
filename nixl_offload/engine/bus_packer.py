"""Copies between KV blocks in device memory and payloads in page-locked memory of the host, over the bus.

Threading: ``fence`` is called by the submitting thread, everything else by the pump. Everything is queued on side
streams of its own and answered by fences: nothing here waits for a device.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import partial
from weakref import WeakSet

import numpy as np
import torch

from nixl_offload.engine.brought import (
    BlockIds,
    DeviceRows,
    OnDevice,
    Parts,
    Payload,
    ScatterParts,
    Summed,
    SummedByHost,
)
from nixl_offload.engine.host import PIN_PIECE_BYTES
from nixl_offload.engine.kernels.base import GroupKernels, Page
from nixl_offload.engine.queued import DeviceGroups, QueuedSums, keep, page_locked, taken_back
from nixl_offload.engine.streams import READY, Device, Fence, Stream
from nixl_offload.errors import LayoutError

SCRATCH_BYTES = 32 << 20
"""Device memory for copies: what goes over the bus at once. A batch that is larger takes turns."""
BROUGHT_BYTES = 64 << 20
"""Device memory for what is brought there to be summed and has not been scattered yet, or one batch."""


DEVICE_BYTES = 2 * SCRATCH_BYTES + BROUGHT_BYTES
"""What a packer takes of the device at most, unless a chunk is larger."""


class BusPacker:
    """KV blocks in device memory, payloads in page-locked host memory. Per batch one kernel on the device, and one copy
    over the bus for each chunk.

    Gathers and scatters have a stream each: a load waits for no store, and the bus goes both ways at once. Scratch
    belongs to its stream, so the caching allocator hands the same memory to one batch after the other; for each stream
    it is never more than ``SCRATCH_BYTES``, or one chunk. What is brought to be summed has ``BROUGHT_BYTES`` of its
    own, and a stream, so it waits for no step of the model.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], pages: Sequence[Sequence[Page]], device: Device) -> None:
        self._device = device
        self._groups = DeviceGroups(tensors, pages, device)
        self._out, self._in, self._ready = (device.streams.new() for _ in range(3))
        self._brought: WeakSet[OnDevice] = WeakSet()
        self._waiting: list[object] = []
        """For scratch, in order."""

    def fence(self) -> Fence:
        return self._device.streams.compute_fence()

    def gather_many(self, group: int, parts: Parts, fence: Fence) -> Summed:
        """Payloads must be page-locked. Raises LayoutError for numbers that do not fit the KV cache.

        The kernel that gathers sums as well, unless the device's kernels are slow.
        """
        payloads = [payload for _, payload in parts]
        if self._groups.sums_slowly:
            return SummedByHost(self._copy(self._out, self._gather, group, parts, fence), payloads)
        summed, begin = OnDevice(payloads, self._room_for_sums(payloads)), 0

        def gather(kernels: GroupKernels, ids: torch.Tensor, turn: Parts) -> None:
            nonlocal begin  # turns are taken in order
            rows = self._scratch(turn)
            found = kernels.gather_summed(self._groups.upload(ids), rows)
            for device, host in _over_the_bus(rows, turn):
                host.copy_(device, non_blocking=True)
            summed.host[begin : begin + len(ids)].copy_(found, non_blocking=True)
            begin += len(ids)

        summed.fence = self._copy(self._out, gather, group, parts, fence)
        return summed

    def scatter_many(self, group: int, parts: ScatterParts, fence: Fence) -> Fence:
        """Payloads must be page-locked. Raises LayoutError for numbers that do not fit the KV cache."""
        # Pending writes to the blocks, zeroing for one, must not overtake the load: so this waits for the fence too.
        here = [(block_ids, rows) for block_ids, rows in parts if not isinstance(rows, DeviceRows)]
        there = [(block_ids, rows) for block_ids, rows in parts if isinstance(rows, DeviceRows)]
        if not there:
            return self._copy(self._in, self._scatter, group, here, fence)
        with taken_back(self._in):  # the first half is queued when the second is looked at
            if here:
                self._copy(self._in, self._scatter, group, here, fence)
            return self._scatter_brought(group, there, fence)

    def bring(self, group: int, payloads: Sequence[Payload]) -> Generator[None, None, Summed]:
        """Payloads must be page-locked. Raises LayoutError for rows that do not fit the group.

        The host sums where the device's kernels are slow, or it has no memory left. Who came first has scratch first:
        small batches that come all the time would leave no room for a large one.
        """
        for payload in payloads:
            self._groups.check_width(group, payload.shape[1])
        if self._groups.sums_slowly:
            return SummedByHost(READY, payloads)
        turn, wanted_bytes = object(), sum(payload.nbytes for payload in payloads)
        self._waiting.append(turn)
        try:
            while self._waiting[0] is not turn or not self._has_room(wanted_bytes):
                yield
        finally:
            self._waiting.remove(turn)
        summed = OnDevice(payloads, self._room_for_sums(payloads))
        kernels, parts = self._groups.kernels[group], [(_NO_IDS, payload) for payload in payloads]

        def brought() -> None:
            rows = torch.empty((len(summed.host), payloads[0].shape[1]), dtype=torch.uint8, device=self._where)
            for device, host in _over_the_bus(rows, parts):
                device.copy_(host, non_blocking=True)
            summed.host.copy_(kernels.sums_of_rows(rows), non_blocking=True)
            summed.memory = rows

        try:
            with taken_back(self._ready):
                self._ready.run(brought)
                summed.fence = self._ready.record()
        except torch.OutOfMemoryError:
            return SummedByHost(READY, payloads)
        self._brought.add(summed)
        return summed

    def _has_room(self, wanted_bytes: int) -> bool:
        taken_bytes = sum(other.bytes for other in self._brought)
        return not taken_bytes or taken_bytes + wanted_bytes <= BROUGHT_BYTES

    def _room_for_sums(self, payloads: Sequence[Payload]) -> torch.Tensor:
        return page_locked(sum(map(len, payloads)), torch.int64, self._device)

    def _scatter_brought(self, group: int, parts: Sequence[tuple[BlockIds, DeviceRows]], fence: Fence) -> Fence:
        """Queue a kernel for each run of rows."""
        runs = [(self._groups.ids(group, *block_ids), rows) for block_ids, rows in _runs(parts)]
        kernels = self._groups.kernels[group]

        def scattered(ids: torch.Tensor, rows: DeviceRows) -> None:
            memory = rows.tensor()
            keep(memory)
            kernels.scatter(self._groups.upload(ids), memory)

        with taken_back(self._in):
            self._in.wait(fence)
            for ids, rows in runs:
                self._in.run(partial(scattered, ids, rows))
            return self._in.record()

    def sums(self, group: int, block_ids: BlockIds, fence: Fence) -> QueuedSums:
        """Where nothing is to be waited for, these wait for no gather either, which may wait for a step."""
        stream = self._ready if fence.done() else self._out
        kernels, ids = self._groups.kernels[group], self._groups.ids(group, block_ids)
        return QueuedSums.begin(stream, self._device, len(ids), lambda: kernels.sums(self._groups.upload(ids)), fence)

    def clear(self, group: int, block_ids: BlockIds, fence: Fence) -> Fence:
        kernels, ids = self._groups.kernels[group], self._groups.ids(group, block_ids)

        def cleared() -> None:
            row = torch.zeros(self._groups.block_bytes[group], dtype=torch.uint8, device=self._where)
            kernels.scatter(self._groups.upload(ids), row.expand(len(ids), -1))

        with taken_back(self._in):
            self._in.wait(fence)
            self._in.run(cleared)
            return self._in.record()

    def _copy(self, stream: Stream, turn_of: _Turn, group: int, parts: Parts, fence: Fence) -> Fence:
        """Queue turn after turn, each a piece of work of its own: its scratch is free again when the next one asks."""
        for _, payload in parts:
            self._groups.check_width(group, payload.shape[1])
        turns = [(turn, self._groups.ids(group, *(block_ids for block_ids, _ in turn))) for turn in _turns(parts)]
        with taken_back(stream):  # what is queued already must not land in slots or blocks that are given up
            stream.wait(fence)
            for turn, ids in turns:
                stream.run(partial(turn_of, self._groups.kernels[group], ids, turn))
            return stream.record()

    def _gather(self, kernels: GroupKernels, ids: torch.Tensor, turn: Parts) -> None:
        rows = self._scratch(turn)
        kernels.gather(self._groups.upload(ids), rows)
        for device, host in _over_the_bus(rows, turn):
            host.copy_(device, non_blocking=True)

    def _scatter(self, kernels: GroupKernels, ids: torch.Tensor, turn: Parts) -> None:
        rows = self._scratch(turn)
        for device, host in _over_the_bus(rows, turn):
            device.copy_(host, non_blocking=True)
        kernels.scatter(self._groups.upload(ids), rows)

    def _scratch(self, turn: Parts) -> torch.Tensor:
        """A row for each block of a turn."""
        count = sum(len(block_ids) for block_ids, _ in turn)
        return torch.empty((count, turn[0][1].shape[1]), dtype=torch.uint8, device=self._where)

    @property
    def _where(self) -> torch.device:
        return self._device.torch_device


_NO_IDS: BlockIds = np.empty(0, dtype=np.int32)
_Turn = Callable[[GroupKernels, torch.Tensor, Parts], None]


def _turns(parts: Parts) -> list[Parts]:
    """Deal chunks out so that each turn fits ``SCRATCH_BYTES``, a larger chunk alone."""
    turns: list[list[tuple[BlockIds, Payload]]] = []
    room_bytes = 0
    for part in parts:
        room_bytes -= part[1].nbytes
        if not turns or room_bytes < 0:
            turns.append([])
            room_bytes = SCRATCH_BYTES - part[1].nbytes
        turns[-1].append(part)
    return [*turns]


def _runs(parts: Sequence[tuple[BlockIds, DeviceRows]]) -> list[tuple[list[BlockIds], DeviceRows]]:
    """Join parts whose rows follow each other: nearly always they all do."""
    runs: list[tuple[list[BlockIds], DeviceRows]] = []
    for block_ids, rows in parts:
        if len(block_ids) != rows.count:
            raise LayoutError(f"{rows.count} rows for {len(block_ids)} blocks")
        if runs and runs[-1][1].scratch is rows.scratch and runs[-1][1].begin + runs[-1][1].count == rows.begin:
            ids, before = runs.pop()
            runs.append(([*ids, block_ids], DeviceRows(rows.scratch, before.begin, before.count + rows.count)))
        else:
            runs.append(([block_ids], rows))
    return runs


def _over_the_bus(scratch: torch.Tensor, turn: Parts) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The copies between scratch and payloads, as bytes: (on the device, on the host). One for each chunk, unless it
    crosses from one page-locked piece into the next: nothing promises that CUDA takes a copy over two registrations.
    """
    flat = scratch.view(torch.uint8).view(-1)
    copies, at = [], 0
    for _, payload in turn:
        host = torch.from_numpy(payload.reshape(-1))
        address, begin = payload.ctypes.data, 0
        while begin < len(host):
            end = min(len(host), begin + PIN_PIECE_BYTES - (address + begin) % PIN_PIECE_BYTES)
            copies.append((flat[at + begin : at + end], host[begin:end]))
            begin = end
        at += len(host)
    return copies
