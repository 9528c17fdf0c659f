"""Copies between KV blocks and slots of chunks: the contract, and its implementation on the host (on a device:
``device_packer``). A block is one row of a slot: its pages side by side, layer by layer.

One numpy call copies the pages of many layers, if the layers are equally spaced in memory. A Python loop over layers
would take the GIL after each layer, every hundred microseconds, and compete for it with the model's thread.

Threading: ``Packer.fence`` is called by the submitting thread, everything else by the pump. Nothing waits for a device:
a call queues work and returns its fence. A call of ``HostPacker`` is done when it returns; it copies on the calling
thread, with the GIL released.
"""

from __future__ import annotations

import ctypes
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from nixl_offload.chunk.checksum import payload_checksums
from nixl_offload.chunk.layout import KVLayout
from nixl_offload.engine.kernels.torch_kernels import Page
from nixl_offload.engine.streams import READY, Fence
from nixl_offload.errors import LayoutError

BlockIds = npt.NDArray[np.int32]
Checksums = npt.NDArray[np.uint64]
Payload = npt.NDArray[np.uint8]
"""The blocks of a chunk in a slot of host memory: shape (blocks, block_bytes), contiguous."""
SlotRows = Payload | torch.Tensor
"""As ``Payload``; a tensor for a slot in device memory."""
Parts = Sequence[tuple[BlockIds, SlotRows]]
"""The chunks of one call: the KV blocks, and the slot rows of their bytes."""
Run = tuple[int, int, int, int]
"""A run of blocks: number of the payload, row in it, first block id, count."""
LayerPages = tuple[npt.NDArray[np.uint8], int, int]
"""A layer's pages: an array of shape (num_blocks, at least page bytes), rows contiguous, any stride; the column of a
page in a payload row; the page's bytes."""


@dataclass(frozen=True, slots=True)
class Brought:
    """Rows in scratch memory of a device. Slices like an array of rows."""

    owner: object
    """The scratch is in use while this object is referenced."""
    tensor: torch.Tensor

    def __len__(self) -> int:
        return len(self.tensor)

    def __getitem__(self, rows: slice) -> Brought:
        """Return consecutive rows."""
        return Brought(self.owner, self.tensor[rows])


Source = SlotRows | Brought
"""Memory from which blocks can be scattered."""
Sources = Sequence[tuple[BlockIds, Source]]


class Summed(Fence, Protocol):
    """Checksums of chunks' blocks, computed by the host or a device. Until ``done`` nothing may change the blocks."""

    by_device: bool
    """True: a device computes the checksums, and has them when ``done``. False: ``values`` computes them."""

    def values(self) -> list[Checksums]:
        """Return the checksums of each chunk's blocks. If the host sums, it does so in this call.

        Raises RuntimeError before ``done``.
        """

    def rows(self) -> list[Source]:
        """Return where each chunk's blocks can be scattered from, once it is ``done``."""


class SummedByHost:
    """Implements ``Summed``: once ``fence`` is done, ``values`` computes the sums unless ``sums`` were given."""

    by_device = False

    def __init__(self, fence: Fence, payloads: Sequence[Payload], sums: list[Checksums] | None = None) -> None:
        self._fence = fence
        self._payloads = payloads
        self._sums = sums

    def done(self) -> bool:
        return self._fence.done()

    def values(self) -> list[Checksums]:
        if not self._fence.done():
            raise RuntimeError("checksums were asked for before their bytes were there")
        return payload_checksums(self._payloads) if self._sums is None else self._sums

    def rows(self) -> list[Source]:
        return list(self._payloads)


class Packer(Protocol):
    """Copies for the KV groups of one layout. Groups and blocks are given by number.

    Numbers out of range raise LayoutError before anything is copied. After an exception, nothing that the call queued
    touches slots or blocks.
    """

    def fence(self) -> Fence:
        """Mark this point of the compute stream. KV blocks may be touched once it is done."""

    def gather_many(self, group: int, parts: Parts, fence: Fence) -> Summed:
        """Copy KV blocks to slots and sum them, once ``fence`` is done. ``done``: rows are whole, blocks may change."""

    def scatter_many(self, group: int, parts: Sources, fence: Fence) -> Fence:
        """Copy slots to KV blocks once ``fence`` is done, so that earlier writes to the blocks do not come after the
        load. The returned fence is done when the blocks are complete and the rows may change.
        """

    def bring(self, group: int, payloads: Sequence[Payload]) -> Generator[None, None, Summed]:
        """Sum blocks in host memory. A device copies them to scratch and sums the copy there; ``rows`` returns it for
        the scatter, so blocks cross the bus once. Yields while there is no scratch.
        """

    def sums(self, group: int, block_ids: Sequence[BlockIds], fence: Fence) -> Summed:
        """Sum each chunk's KV blocks in place, once ``fence`` is done."""

    def clear(self, group: int, block_ids: BlockIds, fence: Fence) -> Fence:
        """Zero the group's pages of KV blocks once ``fence`` is done. The returned fence is done when they are zero."""


class HostCopy:
    """Copies equally long pages of equally spaced layers, which lie side by side in a payload row. Keeps the layers'
    arrays alive.
    """

    def __init__(self, pages: Sequence[LayerPages]) -> None:
        """``pages``: one or more layers, as grouped by ``host_copies_of``."""
        first, column, page_bytes = pages[0]
        addresses = [layer.ctypes.data for layer, _, _ in pages]
        self._keep_alive = [layer for layer, _, _ in pages]
        self._columns = slice(column, column + page_bytes * len(pages))
        self._page_shape = (len(pages), page_bytes)
        base = min(addresses)
        span_bytes = max(addresses) - base + (len(first) - 1) * first.strides[0] + page_bytes
        memory = memoryview((ctypes.c_uint8 * span_bytes).from_address(base))
        spacing = addresses[1] - addresses[0] if len(pages) > 1 else page_bytes
        shape, strides = (len(first), *self._page_shape), (first.strides[0], spacing, 1)
        self._blocks = np.ndarray(shape, np.uint8, memory, addresses[0] - base, strides)

    def gather(self, runs: Sequence[Run], payloads: Sequence[Payload]) -> None:
        """Copy pages to rows."""
        rows = [self._rows(payload) for payload in payloads]
        for number, row, block, count in runs:
            rows[number][row : row + count] = self._blocks[block : block + count]

    def scatter(self, parts: Sequence[tuple[BlockIds, Payload]]) -> None:
        """Copy rows to pages, by an index array: one call per run would be no faster."""
        for block_ids, payload in parts:
            self._blocks[block_ids] = self._rows(payload)

    def _rows(self, payload: Payload) -> npt.NDArray[np.uint8]:
        """Return a view of shape (blocks, layers, page bytes)."""
        return payload[:, self._columns].reshape(-1, *self._page_shape)


def host_copies_of(pages: Sequence[LayerPages]) -> list[HostCopy]:
    """Return as few copies as the group's memory allows. ``pages``: in their order in a row."""
    together: list[list[LayerPages]] = []
    for page in pages:
        if not together or not _continues(together[-1], page):
            together.append([])
        together[-1].append(page)
    return [HostCopy(each) for each in together]


def _continues(before: Sequence[LayerPages], page: LayerPages) -> bool:
    """Whether a layer's pages have the shape of the layers before it, and its memory continues their spacing."""
    (layer, _, page_bytes), (last, _, last_bytes) = page, before[-1]
    if (page_bytes, layer.shape[0], layer.strides[0]) != (last_bytes, last.shape[0], last.strides[0]):
        return False
    if len(before) == 1:
        return True
    return layer.ctypes.data - last.ctypes.data == last.ctypes.data - before[-2][0].ctypes.data


def runs_of(block_ids: BlockIds, counts: Sequence[int]) -> list[Run]:
    """Split ids into runs of consecutive ids within one payload. ``counts``: rows of each payload."""
    starts = np.cumsum([0, *counts[:-1]])
    breaks = np.diff(block_ids, prepend=-2) != 1
    breaks[starts[starts < len(block_ids)]] = True
    begins = np.flatnonzero(breaks)
    numbers = np.searchsorted(starts, begins, side="right") - 1
    lengths = np.diff(begins, append=len(block_ids))
    columns = (numbers, begins - starts[numbers], block_ids[begins], lengths)
    return list(zip(*(column.tolist() for column in columns), strict=True))


class HostPacker:
    """Implements ``Packer`` for host memory: uint8 of shape (num_blocks, page_bytes), rows contiguous, any stride."""

    def __init__(self, tensors: Sequence[npt.NDArray[np.uint8]], pages: Sequence[Sequence[Page]]) -> None:
        self._views = [[page.of(tensors) for page in group] for group in pages]
        self._num_blocks = [min((len(tensors[page.tensor]) for page in group), default=0) for group in pages]
        self._copies: list[list[HostCopy]] = [
            host_copies_of([(page.of(tensors), page.column, page.bytes) for page in group]) for group in pages
        ]

    def fence(self) -> Fence:
        """Return a fence that is done: the model's writes are over when its call returns."""
        return READY

    def gather_many(self, group: int, parts: Parts, fence: Fence) -> Summed:
        """Raises LayoutError for block ids outside the KV cache."""
        block_ids, payloads = self._checked(group, parts)
        runs = runs_of(block_ids, [len(payload) for payload in payloads])
        for copy in self._copies[group]:
            copy.gather(runs, payloads)
        return SummedByHost(READY, payloads)

    def scatter_many(self, group: int, parts: Sources, fence: Fence) -> Fence:
        """Raises LayoutError for block ids outside the KV cache."""
        _, payloads = self._checked(group, parts)
        rows = [(block_ids, payload) for (block_ids, _), payload in zip(parts, payloads, strict=True)]
        for copy in self._copies[group]:
            copy.scatter(rows)
        return READY

    def bring(self, group: int, payloads: Sequence[Payload]) -> Generator[None, None, Summed]:
        """Copies nothing; ``values`` sums."""
        yield from ()
        return SummedByHost(READY, payloads)

    def sums(self, group: int, block_ids: Sequence[BlockIds], fence: Fence) -> Summed:
        """The sums are complete when this returns."""
        found = []
        for chunk in block_ids:
            sums = np.empty(len(chunk), dtype=np.uint64)
            for row, block in enumerate(chunk.tolist()):
                digest = xxhash.xxh3_64()
                for view in self._views[group]:
                    digest.update(view[block].data)
                sums[row] = digest.intdigest()
            found.append(sums)
        return SummedByHost(READY, (), found)

    def clear(self, group: int, block_ids: BlockIds, fence: Fence) -> Fence:
        """The blocks are zero when this returns."""
        for view in self._views[group]:
            view[block_ids] = 0
        return READY

    def _checked(self, group: int, parts: Sources) -> tuple[BlockIds, list[Payload]]:
        """Return all ids and payloads. Copies compute addresses from ids, so wrong ids must be stopped here."""
        block_ids = np.concatenate([block_ids for block_ids, _ in parts])
        if len(block_ids) and not 0 <= block_ids.min() <= block_ids.max() < self._num_blocks[group]:
            raise LayoutError(f"block ids outside a KV cache of {self._num_blocks[group]} blocks")
        return block_ids, [rows for _, rows in parts if isinstance(rows, np.ndarray)]


def pages_of(layout: KVLayout) -> list[list[Page]]:
    """Return the pages that each group stores, side by side in a row in the order of its refs."""
    groups = []
    for group in layout.groups:
        pages, column = [], 0
        for tensor, page_offset, length in group.refs:
            pages.append(Page(tensor, column, length, page_offset))
            column += length
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
