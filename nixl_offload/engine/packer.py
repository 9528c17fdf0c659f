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
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from nixl_offload.chunk.checksum import payload_checksums
from nixl_offload.chunk.layout import KVLayout
from nixl_offload.engine.kernels.torch_kernels import Page
from nixl_offload.engine.streams import READY, Fence
from nixl_offload.errors import LayoutError

BlockIds = npt.NDArray[np.int32]
Checksums = npt.NDArray[np.uint64]
Payload = npt.NDArray[np.uint8]
"""Blocks in slots of host memory: shape (blocks, block_bytes). Rows are contiguous, any distance apart."""
Parts = Sequence[tuple[BlockIds, Any]]
"""What one call copies, of a chunk or a stack of them: ids of KV blocks, and a ``Source`` of their rows."""
Run = tuple[int, Payload]
"""Consecutive blocks: the id of the first, and their rows."""
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


Source = Payload | torch.Tensor | Brought
"""Memory from which blocks can be scattered."""


class Summed:
    """Checksums of each part's blocks, and the fence of their work. Until ``done`` nothing may change the blocks."""

    def __init__(
        self, fence: Fence | None, payloads: Sequence[Payload] = (), *, sums: Sequence[Checksums] | None = None
    ) -> None:
        """``fence``: None until the work is queued. ``payloads``: the parts' rows in host memory. ``sums``: each
        part's, complete once the fence is done; None: ``values`` sums ``payloads``.
        """
        self.fence = fence
        self.payloads = payloads
        self.scratch: torch.Tensor | None = None
        """All rows on the device, if they are kept there."""
        self._sums = sums

    @property
    def has_sums(self) -> bool:
        """False: ``values`` computes the checksums, on the calling thread."""
        return self._sums is not None

    def done(self) -> bool:
        """See Fence."""
        return self.fence is not None and self.fence.done()

    def values(self) -> Sequence[Checksums]:
        """Return the checksums of each part's blocks. Raises RuntimeError before ``done``."""
        if not self.done():
            raise RuntimeError("checksums were asked for before their bytes were there")
        return payload_checksums(self.payloads) if self._sums is None else self._sums

    def brought(self, counts: list[int]) -> list[Brought]:
        """Return the rows on the device, by ``counts``, once it is ``done``. Empty: there are none."""
        return [] if self.scratch is None else [Brought(self, rows) for rows in torch.split(self.scratch, counts)]


class Packer:
    """Copies for the KV groups of one layout. Groups and blocks are given by number.

    Numbers out of range raise LayoutError before anything is copied. After an exception, nothing that the call queued
    touches slots or blocks.
    """

    def __init__(
        self, tensors: Sequence[npt.NDArray[np.uint8] | torch.Tensor], pages: Sequence[Sequence[Page]]
    ) -> None:
        """``tensors``: bytes of shape (num_blocks, page_bytes), rows contiguous, any stride. ``pages``: by group, then
        by layer.
        """
        self.block_bytes = [sum(page.bytes for page in group) for group in pages]
        """By group."""
        self._num_blocks = [min((len(tensors[page.tensor]) for page in group), default=0) for group in pages]

    def gather_many(self, group: int, parts: Parts, fence: Fence) -> Summed:
        """Copy KV blocks to slots and sum them, once ``fence`` is done. ``done``: rows are whole, blocks may change."""
        raise NotImplementedError

    def scatter_many(self, group: int, parts: Parts, fence: Fence) -> Fence:
        """Copy slots to KV blocks once ``fence`` is done, so that earlier writes to the blocks do not come after the
        load. The returned fence is done when the blocks are complete and the rows may change.
        """
        raise NotImplementedError

    def bring(self, group: int, payloads: Sequence[Payload]) -> Generator[None, None, Summed]:
        """Sum blocks in host memory. A device copies them to scratch and sums the copy there; ``brought`` returns it
        for the scatter, so blocks cross the bus once. Yields while there is no scratch.
        """
        raise NotImplementedError

    def sums(self, group: int, block_ids: Sequence[BlockIds], fence: Fence) -> Summed:
        """Sum each chunk's KV blocks, once ``fence`` is done. The host sums a copy of them."""
        raise NotImplementedError

    def clear(self, group: int, block_ids: BlockIds, fence: Fence) -> Fence:
        """Zero the group's pages of KV blocks once ``fence`` is done. The returned fence is done when they are zero."""
        raise NotImplementedError

    # Copies compute addresses, so wrong ids and rows are stopped here.

    def _checked_ids(self, group: int, parts: Parts) -> BlockIds:
        """Return all ids. Raises LayoutError unless each is a block's and has one row of its length."""
        for block_ids, rows in parts:
            if len(rows) != len(block_ids):
                raise LayoutError(f"{len(rows)} rows for {len(block_ids)} blocks")
        self._check_width(group, [rows.tensor if isinstance(rows, Brought) else rows for _, rows in parts])
        return self._check_ids(group, np.concatenate([block_ids for block_ids, _ in parts]))

    def _check_width(self, group: int, rows: Sequence[Payload | torch.Tensor]) -> None:
        for each in rows:
            if each.shape[1] != self.block_bytes[group]:
                raise LayoutError(f"rows of {each.shape[1]} bytes for blocks of {self.block_bytes[group]}")

    def _check_ids(self, group: int, block_ids: BlockIds) -> BlockIds:
        if len(block_ids) and not 0 <= block_ids.min() <= block_ids.max() < self._num_blocks[group]:
            raise LayoutError(f"block ids outside a KV cache of {self._num_blocks[group]} blocks")
        return block_ids


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

    def gather(self, runs: Sequence[Run]) -> None:
        """Copy pages to rows."""
        for block, payload in runs:
            self._rows(payload)[:] = self._blocks[block : block + len(payload)]

    def scatter(self, parts: Parts) -> None:
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


def runs_of(block_ids: BlockIds, payload: Payload) -> list[Run]:
    """Split a part into runs of consecutive block ids."""
    cuts = [0, *(np.flatnonzero(np.diff(block_ids) != 1) + 1).tolist(), len(block_ids)]
    return [(int(block_ids[a]), payload[a:b]) for a, b in pairwise(cuts) if a < b]


class HostPacker(Packer):
    """Copies between host memories, with numpy, on the calling thread."""

    def __init__(self, tensors: Sequence[npt.NDArray[np.uint8]], pages: Sequence[Sequence[Page]]) -> None:
        super().__init__(tensors, pages)
        self._copies: list[list[HostCopy]] = [
            host_copies_of([(page.of(tensors), page.column, page.bytes) for page in group]) for group in pages
        ]

    def gather_many(self, group: int, parts: Parts, fence: Fence) -> Summed:
        self._checked_ids(group, parts)
        runs = [run for part in parts for run in runs_of(*part)]
        for copy in self._copies[group]:
            copy.gather(runs)
        return Summed(READY, [payload for _, payload in parts])

    def scatter_many(self, group: int, parts: Parts, fence: Fence) -> Fence:
        self._checked_ids(group, parts)
        for copy in self._copies[group]:
            copy.scatter(parts)
        return READY

    def bring(self, group: int, payloads: Sequence[Payload]) -> Generator[None, None, Summed]:
        """Copies nothing; ``values`` sums."""
        yield from ()
        return Summed(READY, payloads)

    def sums(self, group: int, block_ids: Sequence[BlockIds], fence: Fence) -> Summed:
        width = self.block_bytes[group]
        return self.gather_many(group, [(ids, np.empty((len(ids), width), np.uint8)) for ids in block_ids], fence)

    def clear(self, group: int, block_ids: BlockIds, fence: Fence) -> Fence:
        rows = np.broadcast_to(np.uint8(0), (len(block_ids), self.block_bytes[group]))
        return self.scatter_many(group, [(block_ids, rows)], fence)


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
