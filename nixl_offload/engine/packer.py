"""Copies between KV blocks and chunks' payloads, where each block is one row: its pages side by side, layer by layer.

Threading: ``fence`` is called by the submitting thread, everything else by the pump. ``HostPacker`` is done when it
returns; ``BusPacker`` queues on side streams of its own and hands out fences: nothing here waits for a device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol
from weakref import WeakSet

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from nixl_offload.chunk.layout import KVLayout
from nixl_offload.engine.brought import DeviceRows, OnDevice, Payload, Rows, Summed, SummedByHost
from nixl_offload.engine.host import PIN_PIECE_BYTES
from nixl_offload.engine.host_copies import HostCopy, host_copies_of
from nixl_offload.engine.kernels.base import GroupKernels, Page
from nixl_offload.engine.queued import DeviceGroups, QueuedSums, keep, page_locked, taken_back
from nixl_offload.engine.streams import READY, Device, Fence, ReadyFence, Stream, device_of
from nixl_offload.errors import LayoutError

BlockIds = npt.NDArray[np.int32]
Parts = Sequence[tuple[BlockIds, Payload]]
"""The chunks of one call: which KV blocks, and where their bytes lie."""
ScatterParts = Sequence[tuple[BlockIds, Rows]]
"""The same for a scatter, of which some may be on the device already."""

SCRATCH_BYTES = 32 << 20
"""Device memory for copies: what goes over the bus at once. A batch that is larger takes turns."""
BROUGHT_BYTES = 64 << 20
"""Device memory for what is brought there to be summed and has not been scattered yet, or one batch."""


class Sums(Fence, Protocol):
    """Checksums on their way to the host."""

    def values(self) -> npt.NDArray[np.uint64]:
        """One per block, in the order asked for. Raises RuntimeError before ``done``."""


class Packer(Protocol):
    """How KV blocks and payloads are copied. ``pages`` is indexed by group, then by layer; a group without pages has no
    blocks.
    """

    def fence(self) -> Fence:
        """Mark this point of the compute stream. KV blocks may be touched once it is done."""

    def gather(self, group: int, block_ids: BlockIds, payload: Payload, fence: Fence) -> Fence:
        """KV blocks to payload. The returned fence is done when the blocks may change and the payload is complete."""

    def scatter(self, group: int, block_ids: BlockIds, payload: Payload, fence: Fence) -> Fence:
        """Payload to KV blocks. The returned fence is done when the blocks are complete and the payload may change."""

    def gather_many(self, group: int, parts: Parts, fence: Fence) -> Summed:
        """``gather`` of many chunks at once, summed. If it raises, nothing touches any payload any more."""

    def scatter_many(self, group: int, parts: ScatterParts, fence: Fence) -> Fence:
        """``scatter`` of many chunks at once. If it raises, nothing touches any block any more."""

    def bring(self, group: int, payloads: Sequence[Payload]) -> Summed | None:
        """Sum blocks that lie in host memory, in scratch of the device where there is one, from which they can be
        scattered then. None: there is no scratch now; ask again.
        """

    def sums(self, group: int, block_ids: BlockIds, fence: Fence) -> Sums:
        """The checksum of each block where it lies, read once ``fence`` is done. The blocks must not change before."""


class HostPacker:
    """KV blocks in host memory, as uint8 arrays of shape (num_blocks, page_bytes); rows contiguous, any stride."""

    def __init__(self, tensors: Sequence[npt.NDArray[np.uint8]], pages: Sequence[Sequence[Page]]) -> None:
        self._tensors = tensors
        self._pages = pages
        self._num_blocks = [min((len(tensors[page.tensor]) for page in group), default=0) for group in pages]
        self._copies: list[list[HostCopy]] = [
            host_copies_of([(tensors[page.tensor], page.column, page.bytes) for page in group]) for group in pages
        ]

    def fence(self) -> Fence:
        """Return a fence that is done: on the host the model's writes are over when its call returns."""
        return READY

    def gather(self, group: int, block_ids: BlockIds, payload: Payload, fence: Fence) -> Fence:
        """Copy KV blocks to the payload, at once."""
        return self.gather_many(group, [(block_ids, payload)], fence)

    def scatter(self, group: int, block_ids: BlockIds, payload: Payload, fence: Fence) -> Fence:
        """Copy the payload to KV blocks, at once."""
        return self.scatter_many(group, [(block_ids, payload)], fence)

    def gather_many(self, group: int, parts: Parts, fence: Fence) -> Summed:
        """Raises LayoutError for block ids outside the KV cache."""
        block_ids, payloads = self._checked_ids(group, parts), [payload for _, payload in parts]
        for copy in self._copies[group]:
            copy.gather(block_ids, payloads)
        return SummedByHost(READY, payloads)

    def scatter_many(self, group: int, parts: ScatterParts, fence: Fence) -> Fence:
        """Raises LayoutError for block ids outside the KV cache."""
        block_ids = self._checked_ids(group, parts)
        payloads = [rows for _, rows in parts if not isinstance(rows, DeviceRows)]
        for copy in self._copies[group]:
            copy.scatter(block_ids, payloads)
        return READY

    def bring(self, group: int, payloads: Sequence[Payload]) -> Summed:
        """Nothing is copied; they are summed when asked for."""
        return SummedByHost(READY, payloads)

    def _checked_ids(self, group: int, parts: ScatterParts) -> BlockIds:
        """The ids of all parts. Host copies reckon with addresses: nothing else would stop a wrong one."""
        block_ids = np.concatenate([block_ids for block_ids, _ in parts])
        if len(block_ids) and not 0 <= block_ids.min() <= block_ids.max() < self._num_blocks[group]:
            raise LayoutError(f"block ids outside a KV cache of {self._num_blocks[group]} blocks")
        return block_ids

    def sums(self, group: int, block_ids: BlockIds, fence: Fence) -> Sums:
        """Summed when this returns."""
        found = np.empty(len(block_ids), dtype=np.uint64)
        for row, block in enumerate(block_ids.tolist()):
            digest = xxhash.xxh3_64()
            for page in self._pages[group]:
                digest.update(self._tensors[page.tensor][block, : page.bytes].data)
            found[row] = digest.intdigest()
        return _ReadySums(found)


class _ReadySums(ReadyFence):
    """What was summed at once."""

    def __init__(self, values: npt.NDArray[np.uint64]) -> None:
        self._values = values

    def values(self) -> npt.NDArray[np.uint64]:
        return self._values


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

    def fence(self) -> Fence:
        return self._device.streams.compute_fence()

    def gather(self, group: int, block_ids: BlockIds, payload: Payload, fence: Fence) -> Fence:
        """``payload`` must be page-locked."""
        return self.gather_many(group, [(block_ids, payload)], fence)

    def scatter(self, group: int, block_ids: BlockIds, payload: Payload, fence: Fence) -> Fence:
        """``payload`` must be page-locked."""
        return self.scatter_many(group, [(block_ids, payload)], fence)

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
        if here:
            self._copy(self._in, self._scatter, group, here, fence)
        return self._scatter_brought(group, there, fence)

    def bring(self, group: int, payloads: Sequence[Payload]) -> Summed | None:
        """Payloads must be page-locked. Raises LayoutError for rows that do not fit the group.

        The host sums where the device's kernels are slow, or it has no memory left.
        """
        for payload in payloads:
            self._groups.check_width(group, payload.shape[1])
        if self._groups.sums_slowly:
            return SummedByHost(READY, payloads)
        summed = OnDevice(payloads, self._room_for_sums(payloads))
        taken_bytes = sum(other.bytes for other in self._brought)
        if taken_bytes and taken_bytes + summed.bytes > BROUGHT_BYTES:
            return None
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


def make_packer(
    tensors: Sequence[torch.Tensor], pages: Sequence[Sequence[Page]], device: Device | None = None
) -> Packer:
    """Return the packer for where ``tensors`` lie; each uint8 or int8 of shape (num_blocks, page_bytes).

    ``device``: None asks the tensors.
    """
    if device is None and tensors:
        device = device_of(tensors[0])
    if device is not None and device.is_accelerator:
        return BusPacker(tensors, pages, device)
    return HostPacker([tensor.view(torch.uint8).numpy() for tensor in tensors], pages)


def pages_of(layout: KVLayout) -> list[list[Page]]:
    """Return the pages of each group, side by side in the order of its refs."""
    groups = []
    for group in layout.groups:
        pages, column = [], 0
        for tensor, page_bytes in group.refs:
            pages.append(Page(tensor, column, page_bytes))
            column += page_bytes
        groups.append(pages)
    return groups


def require_agreement(tensors: Sequence[torch.Tensor], layout: KVLayout) -> None:
    """Raise LayoutError unless ``layout`` describes exactly these tensors."""
    if len(tensors) != len(layout.tensors):
        raise LayoutError(f"{len(tensors)} KV tensors, the layout describes {len(layout.tensors)}")
    for index, (tensor, spec) in enumerate(zip(tensors, layout.tensors, strict=True)):
        if tensor.dim() != 2 or tensor.element_size() != 1 or tensor.stride(1) != 1:
            raise LayoutError(f"KV tensor {index} is not bytes of shape (num_blocks, page_bytes)")
        found = (tensor.data_ptr(), tensor.shape[0], tensor.stride(0), tensor.shape[1])
        stated = (spec.base_address, spec.num_blocks, spec.stride_bytes, spec.page_bytes)
        if found != stated:
            raise LayoutError(f"KV tensor {index} is {found} (address, blocks, stride, page), the layout says {stated}")
    if len({tensor.device for tensor in tensors}) > 1:
        raise LayoutError("the KV tensors lie on different devices")


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
