"""The packer for where the KV blocks lie, and that of the host's own memory.

The host copies pages of many layers by one call of numpy, which reaches equally spaced layers by one array. A Python
loop over layers would ask for the interpreter after each layer, every hundred microseconds, while the model's thread
wants it too; and each time one of the two waits for the other to wake up.

Threading: see ``copies``. Each call of ``HostPacker`` is done when it returns, and copies without the interpreter's
lock, on the calling thread alone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Generator, Sequence

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from nixl_offload.chunk.layout import KVLayout
from nixl_offload.engine.copies import (
    BlockIds,
    Packer,
    Parts,
    Payload,
    Sources,
    Summed,
    SummedByHost,
)
from nixl_offload.engine.device_packer import DevicePacker
from nixl_offload.engine.kernels.torch_kernels import Page
from nixl_offload.engine.streams import READY, Device, Fence, device_of
from nixl_offload.errors import LayoutError

Run = tuple[int, int, int, int]
"""Number of the payload, row in it, block id, count."""
LayerPages = tuple[npt.NDArray[np.uint8], int, int]
"""A layer's pages, of shape (num_blocks, at least the page's bytes), rows contiguous, any stride; the column of a
payload row at which a page begins; its bytes."""


class HostCopy:
    """Copies pages of equal length, of layers whose memory is equally spaced, side by side in a payload row. It keeps
    their arrays alive.
    """

    def __init__(self, pages: Sequence[LayerPages]) -> None:
        """``pages``: one layer or more, as ``host_copies_of`` puts them together."""
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
        """Copy rows to pages: by an index, for blocks of whole runs cost a call each and gain nothing."""
        for block_ids, payload in parts:
            self._blocks[block_ids] = self._rows(payload)

    def _rows(self, payload: Payload) -> npt.NDArray[np.uint8]:
        """A view of shape (blocks, layers, page bytes)."""
        return payload[:, self._columns].reshape(-1, *self._page_shape)


def host_copies_of(pages: Sequence[LayerPages]) -> list[HostCopy]:
    """Return the copies of a group, as few as its layers' memory allows. ``pages``: side by side in a row."""
    together: list[list[LayerPages]] = []
    for page in pages:
        if not together or not _continues(together[-1], page):
            together.append([])
        together[-1].append(page)
    return [HostCopy(each) for each in together]


def _continues(before: Sequence[LayerPages], page: LayerPages) -> bool:
    """Whether a layer's pages are like those before it, and its memory as far from the last as that from the one
    before.
    """
    (layer, _, page_bytes), (last, _, last_bytes) = page, before[-1]
    if (page_bytes, layer.shape[0], layer.strides[0]) != (last_bytes, last.shape[0], last.strides[0]):
        return False
    if len(before) == 1:
        return True
    return layer.ctypes.data - last.ctypes.data == last.ctypes.data - before[-2][0].ctypes.data


def runs_of(block_ids: BlockIds, counts: Sequence[int]) -> list[Run]:
    """Split into runs of consecutive ids, none of which goes from one payload into the next; ``counts``: their rows."""
    starts = np.cumsum([0, *counts[:-1]])
    breaks = np.diff(block_ids, prepend=-2) != 1
    breaks[starts[starts < len(block_ids)]] = True
    begins = np.flatnonzero(breaks)
    numbers = np.searchsorted(starts, begins, side="right") - 1
    lengths = np.diff(begins, append=len(block_ids))
    columns = (numbers, begins - starts[numbers], block_ids[begins], lengths)
    return list(zip(*(column.tolist() for column in columns), strict=True))


class HostPacker:
    """KV blocks in host memory, as uint8 arrays of shape (num_blocks, page_bytes); rows contiguous, any stride."""

    def __init__(self, tensors: Sequence[npt.NDArray[np.uint8]], pages: Sequence[Sequence[Page]]) -> None:
        self._views = [[page.of(tensors) for page in group] for group in pages]
        self._num_blocks = [min((len(tensors[page.tensor]) for page in group), default=0) for group in pages]
        self._copies: list[list[HostCopy]] = [
            host_copies_of([(page.of(tensors), page.column, page.bytes) for page in group]) for group in pages
        ]

    def fence(self) -> Fence:
        """Return a fence that is done: on the host the model's writes are over when its call returns."""
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
        """Nothing is copied; they are summed when asked for."""
        yield from ()
        return SummedByHost(READY, payloads)

    def sums(self, group: int, block_ids: Sequence[BlockIds], fence: Fence) -> Summed:
        """Summed when this returns."""
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
        """Zeroed when this returns."""
        for view in self._views[group]:
            view[block_ids] = 0
        return READY

    def _checked(self, group: int, parts: Sources) -> tuple[BlockIds, list[Payload]]:
        """The ids and payloads of all parts. Host copies reckon with addresses: nothing else would stop a wrong id."""
        block_ids = np.concatenate([block_ids for block_ids, _ in parts])
        if len(block_ids) and not 0 <= block_ids.min() <= block_ids.max() < self._num_blocks[group]:
            raise LayoutError(f"block ids outside a KV cache of {self._num_blocks[group]} blocks")
        return block_ids, [rows for _, rows in parts if isinstance(rows, np.ndarray)]


def make_packer(
    tensors: Sequence[torch.Tensor], pages: Sequence[Sequence[Page]], device: Device | None = None
) -> Packer:
    """Return the packer for where ``tensors`` lie; each uint8 or int8 of shape (num_blocks, page_bytes).

    ``device``: None asks the tensors.
    """
    if device is None and tensors:
        device = device_of(tensors[0])
    if device is not None and device.is_accelerator:
        return DevicePacker(tensors, pages, device)
    return HostPacker([tensor.view(torch.uint8).numpy() for tensor in tensors], pages)


def pages_of(layout: KVLayout) -> list[list[Page]]:
    """Return what each group stores of its pages, side by side in the order of its refs."""
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
