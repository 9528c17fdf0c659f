"""Copies between KV blocks and chunks' payloads, where each block is one row: its pages side by side, layer by layer.

Threading: ``fence`` is called by the submitting thread, everything else by the pump. ``HostPacker`` is done when it
returns; ``CudaPacker`` queues on side streams of its own and hands out fences: nothing here waits for a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from nixl_offload.checksum_torch import block_checksums_torch
from nixl_offload.engine.bands import Band, bands_of
from nixl_offload.engine.host import PIN_PIECE_BYTES
from nixl_offload.errors import LayoutError
from nixl_offload.layout import KVLayout

BlockIds = npt.NDArray[np.int32]
Payload = npt.NDArray[np.uint8]
"""Shape (blocks, block_bytes); contiguous."""
Parts = Sequence[tuple[BlockIds, Payload]]
"""The chunks of one call: which KV blocks, and where their bytes lie."""

SCRATCH_BYTES = 32 << 20
"""Device memory for copies: what goes over the bus at once. A batch that is larger takes turns."""


@dataclass(frozen=True, slots=True)
class Page:
    """One layer's share of a block: the first ``bytes`` of a row of ``tensor`` go to ``column`` of the payload row."""

    tensor: int
    column: int
    bytes: int


class Fence(Protocol):
    """A point in the device's work."""

    def done(self) -> bool:
        """Return True once the device is past it; never blocks."""


class ReadyFence:
    """The fence of work that is already done."""

    def done(self) -> bool:
        """Return True."""
        return True


READY = ReadyFence()


class Packer(Protocol):
    """How KV blocks and payloads are copied. ``pages`` is indexed by group, then by layer."""

    def fence(self) -> Fence:
        """Mark this point of the compute stream. KV blocks may be touched once it is done."""

    def gather(self, group: int, block_ids: BlockIds, payload: Payload, fence: Fence) -> Fence:
        """KV blocks to payload. The returned fence is done when the blocks may change and the payload is complete."""

    def scatter(self, group: int, block_ids: BlockIds, payload: Payload, fence: Fence) -> Fence:
        """Payload to KV blocks. The returned fence is done when the blocks are complete and the payload may change."""

    def gather_many(self, group: int, parts: Parts, fence: Fence) -> Fence:
        """``gather`` of many chunks at once. If it raises, nothing touches any payload any more."""

    def scatter_many(self, group: int, parts: Parts, fence: Fence) -> Fence:
        """``scatter`` of many chunks at once. If it raises, nothing touches any block any more."""

    def checksums(self, group: int, block_ids: BlockIds) -> npt.NDArray[np.uint64]:
        """The checksum of each block where it lies, shape (blocks,). The fence of the job must be done."""


class HostPacker:
    """KV blocks in host memory, as uint8 arrays of shape (num_blocks, page_bytes); rows contiguous, any stride."""

    def __init__(self, tensors: Sequence[npt.NDArray[np.uint8]], pages: Sequence[Sequence[Page]]) -> None:
        self._tensors = tensors
        self._pages = pages
        self._num_blocks = [min(len(tensors[page.tensor]) for page in group) for group in pages]
        self._bands: list[list[Band]] = [
            bands_of([(tensors[page.tensor], page.column, page.bytes) for page in group]) for group in pages
        ]

    def fence(self) -> Fence:
        """See Packer: on the host the model's writes are over when its call returns."""
        return READY

    def gather(self, group: int, block_ids: BlockIds, payload: Payload, fence: Fence) -> Fence:
        """See Packer."""
        return self.gather_many(group, [(block_ids, payload)], fence)

    def scatter(self, group: int, block_ids: BlockIds, payload: Payload, fence: Fence) -> Fence:
        """See Packer."""
        return self.scatter_many(group, [(block_ids, payload)], fence)

    def gather_many(self, group: int, parts: Parts, fence: Fence) -> Fence:
        """See Packer. Raises LayoutError for block ids outside the KV cache."""
        block_ids = self._checked_ids(group, parts)
        for band in self._bands[group]:
            band.gather(block_ids, [payload for _, payload in parts])
        return READY

    def scatter_many(self, group: int, parts: Parts, fence: Fence) -> Fence:
        """See Packer. Raises LayoutError for block ids outside the KV cache."""
        block_ids = self._checked_ids(group, parts)
        for band in self._bands[group]:
            band.scatter(block_ids, [payload for _, payload in parts])
        return READY

    def _checked_ids(self, group: int, parts: Parts) -> BlockIds:
        """The ids of all parts. Bands reckon with addresses: nothing else would stop a wrong one."""
        block_ids = np.concatenate([block_ids for block_ids, _ in parts])
        if len(block_ids) and not 0 <= block_ids.min() <= block_ids.max() < self._num_blocks[group]:
            raise LayoutError(f"block ids outside a KV cache of {self._num_blocks[group]} blocks")
        return block_ids

    def checksums(self, group: int, block_ids: BlockIds) -> npt.NDArray[np.uint64]:
        """See Packer."""
        found = np.empty(len(block_ids), dtype=np.uint64)
        for row, block in enumerate(block_ids.tolist()):
            digest = xxhash.xxh3_64()
            for page in self._pages[group]:
                digest.update(self._tensors[page.tensor][block, : page.bytes].data)
            found[row] = digest.intdigest()
        return found


class _CudaFence:
    """A CUDA event."""

    def __init__(self, event: torch.Event) -> None:
        self.event = event

    def done(self) -> bool:
        """See Fence."""
        return bool(self.event.query())


class CudaPacker:
    """KV blocks in device memory, payloads in page-locked host memory. Per batch one copy on the device for each layer,
    and one over the bus for each chunk.

    Gathers and scatters have a stream each: a load waits for no store, and the bus goes both ways at once. Scratch
    belongs to its stream, so the caching allocator hands the same memory to one batch after the other; for each stream
    it is never more than ``SCRATCH_BYTES``, or one chunk.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], pages: Sequence[Sequence[Page]]) -> None:
        self._tensors = tensors
        self._pages = pages
        self._device = tensors[0].device
        self._out, self._in = torch.Stream(self._device), torch.Stream(self._device)
        self._wide = [_Wide(tensors, group) for group in pages]

    def fence(self) -> Fence:
        """See Packer: an event on the caller's current stream."""
        event = torch.Event(self._device)
        event.record(torch.cuda.current_stream(self._device))
        return _CudaFence(event)

    def gather(self, group: int, block_ids: BlockIds, payload: Payload, fence: Fence) -> Fence:
        """See Packer. ``payload`` must be page-locked."""
        return self.gather_many(group, [(block_ids, payload)], fence)

    def scatter(self, group: int, block_ids: BlockIds, payload: Payload, fence: Fence) -> Fence:
        """See Packer. ``payload`` must be page-locked."""
        return self.scatter_many(group, [(block_ids, payload)], fence)

    def gather_many(self, group: int, parts: Parts, fence: Fence) -> Fence:
        """See Packer. Payloads must be page-locked."""
        wide = self._wide[group]
        with self._out:
            _wait(self._out, fence)
            try:
                for turn in _turns(parts):
                    self._gather(wide, turn)
                return self._record(self._out)
            except BaseException:
                self._out.synchronize()  # what is queued already must not land in slots that are given up
                raise

    def scatter_many(self, group: int, parts: Parts, fence: Fence) -> Fence:
        """See Packer. Payloads must be page-locked."""
        wide = self._wide[group]
        with self._in:
            _wait(self._in, fence)  # pending writes to the blocks, zeroing for one, must not overtake the load
            try:
                for turn in _turns(parts):
                    self._scatter(wide, turn)
                return self._record(self._in)
            except BaseException:
                self._in.synchronize()  # what is queued already must not land in blocks that are given up
                raise

    def checksums(self, group: int, block_ids: BlockIds) -> npt.NDArray[np.uint64]:
        """See Packer. Summed on the device; waits for gathers, never for the compute stream."""
        with self._out:
            rows = self._rows(block_ids)
            pages = [self._tensors[page.tensor][:, : page.bytes].index_select(0, rows) for page in self._pages[group]]
            return block_checksums_torch(torch.cat(pages, dim=1))

    # A method for each turn: its scratch is free again when the next turn asks for some.

    def _gather(self, wide: _Wide, turn: Parts) -> None:
        rows, scratch = self._scratch(wide, turn)
        for source, columns in wide.pages:
            torch.index_select(source, 0, rows, out=scratch[:, columns])
        for device, host in _over_the_bus(scratch, turn):
            host.copy_(device, non_blocking=True)

    def _scatter(self, wide: _Wide, turn: Parts) -> None:
        rows, scratch = self._scratch(wide, turn)
        for device, host in _over_the_bus(scratch, turn):
            device.copy_(host, non_blocking=True)
        for target, columns in wide.pages:
            target.index_copy_(0, rows, scratch[:, columns])

    def _scratch(self, wide: _Wide, turn: Parts) -> tuple[torch.Tensor, torch.Tensor]:
        """The block ids of a turn on the device, and a row of scratch for each."""
        ids = np.concatenate([block_ids for block_ids, _ in turn])
        return self._rows(ids), torch.empty((len(ids), wide.columns), dtype=wide.dtype, device=self._device)

    def _rows(self, block_ids: BlockIds) -> torch.Tensor:
        # Page-locked, or the copy would wait for the stream; torch's own allocator keeps it until the copy is done.
        rows = torch.empty(len(block_ids), dtype=torch.int64, pin_memory=True)
        rows.numpy()[:] = block_ids
        return rows.to(self._device, non_blocking=True)

    def _record(self, stream: torch.Stream) -> Fence:
        event = torch.Event(self._device)
        event.record(stream)
        return _CudaFence(event)


def _wait(stream: torch.Stream, fence: Fence) -> None:
    if isinstance(fence, _CudaFence):
        stream.wait_event(fence.event)


class _Wide:
    """A group's pages as columns of the widest integers that all of them are made of: bytes would be copied singly."""

    def __init__(self, tensors: Sequence[torch.Tensor], pages: Sequence[Page]) -> None:
        block_bytes = sum(page.bytes for page in pages)
        parts = {block_bytes}
        for page in pages:
            tensor = tensors[page.tensor]
            parts |= {page.bytes, page.column, tensor.stride(0), tensor.data_ptr(), int(tensor.storage_offset())}
        self.dtype = next(
            dtype
            for dtype in (torch.int64, torch.int32, torch.int16, torch.uint8)
            if not any(part % dtype.itemsize for part in parts)
        )
        width = self.dtype.itemsize
        self.columns = block_bytes // width
        self.pages = [
            (
                tensors[page.tensor][:, : page.bytes].view(self.dtype),
                slice(page.column // width, (page.column + page.bytes) // width),
            )
            for page in pages
        ]


def make_packer(tensors: Sequence[torch.Tensor], pages: Sequence[Sequence[Page]]) -> Packer:
    """Return the packer for where ``tensors`` lie; each uint8 or int8 of shape (num_blocks, page_bytes)."""
    bytes_of = [tensor.view(torch.uint8) for tensor in tensors]
    if tensors and tensors[0].is_cuda:
        return CudaPacker(bytes_of, pages)
    return HostPacker([tensor.numpy() for tensor in bytes_of], pages)


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
