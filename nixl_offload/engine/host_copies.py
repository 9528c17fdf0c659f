"""Copies in host memory between KV pages and payload rows, pages of many layers a call.

A Python loop over layers would ask for the interpreter after each layer, every hundred microseconds, while the model's
thread wants it too; and each time one of the two waits for the other to wake up. numpy reaches equally spaced layers by
one array. Threading: as the arrays; each method is done when it returns, and copies without the interpreter's lock, on
the calling thread alone. Ownership: a copy keeps its arrays alive.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
BlockIds = npt.NDArray[np.int32]
Run = tuple[int, int, int, int]
"""Number of the payload, row in it, block id, count."""
LayerPages = tuple[Bytes, int, int]
"""A layer's pages, of shape (num_blocks, at least the page's bytes), rows contiguous, any stride; the column of a
payload row at which a page begins; its bytes."""


class HostCopy:
    """Pages of equal length, of layers whose memory is equally spaced, side by side in a payload row."""

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

    def gather(self, runs: Sequence[Run], payloads: Sequence[Bytes]) -> None:
        """Copy pages to rows."""
        rows = [self._rows(payload) for payload in payloads]
        for number, row, block, count in runs:
            rows[number][row : row + count] = self._blocks[block : block + count]

    def scatter(self, parts: Sequence[tuple[BlockIds, Bytes]]) -> None:
        """Copy rows to pages: by an index, for blocks of whole runs cost a call each and gain nothing."""
        for block_ids, payload in parts:
            self._blocks[block_ids] = self._rows(payload)

    def _rows(self, payload: Bytes) -> Bytes:
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
