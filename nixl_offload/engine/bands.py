"""Copies in host memory between KV pages and payload rows, many pages a call: pages are named by their address.

A Python loop over layers pays a call, and the interpreter's lock twice, for every layer; a table in which row ``i`` is
the page that begins at byte ``i`` lets one call copy pages of all layers. Threading: as the arrays; each method is done
when it returns, and copies without the interpreter's lock. Ownership: a band keeps its arrays alive.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

Bytes = npt.NDArray[np.uint8]

SMALL_PAGE_BYTES = 48 << 10
"""Below this pages are gathered by ``torch.index_select``, from there on by runs of consecutive blocks, a slice each:
docs/decisions/0012-memory-tier.md has what each costs."""
_UNIT_BYTES = 16
_CALL_BYTES = 512 << 10
"""torch copies as many elements as these bytes hold (of 16 bytes each) on the calling thread. More would bring OpenMP
in, whose threads the model needs."""
_TABLE_LIMIT_BYTES = 1 << 62


class Band:
    """Pages of equal length, one of each layer, that lie side by side in a payload row from ``column`` on.

    With more than one layer the band is the whole row.
    """

    def __init__(self, layers: Sequence[Bytes], column: int, page_bytes: int) -> None:
        """``layers``: shape (num_blocks, at least page_bytes) each, rows contiguous, any stride; more than one only
        where ``fit_one_table`` says so.
        """
        self._layers = layers
        self._columns = slice(column, column + page_bytes * len(layers))
        self._page_bytes = page_bytes
        starts = [layer.ctypes.data for layer in layers]
        strides = [layer.strides[0] for layer in layers]
        aligned = int(np.bitwise_or.reduce([page_bytes, *starts, *strides])) % _UNIT_BYTES == 0
        wants_units = page_bytes < SMALL_PAGE_BYTES and aligned
        self._units: torch.Tensor | None = None
        self._rows_per_unit = 1
        if len(layers) == 1:
            self._table = layers[0][:, :page_bytes]
            self._firsts, self._strides = np.zeros(1, dtype=np.int64), np.ones(1, dtype=np.int64)
            if wants_units:
                self._units = torch.from_numpy(self._table.view(np.complex128))
            return
        base, rows = min(starts), _span_bytes(layers)
        memory = memoryview((ctypes.c_uint8 * (rows - 1 + page_bytes)).from_address(base))
        self._table = np.ndarray((rows, page_bytes), np.uint8, memory, strides=(1, 1))
        self._firsts = np.array([start - base for start in starts], dtype=np.int64)
        self._strides = np.array(strides, dtype=np.int64)
        if wants_units:
            shape = ((rows - 1) // _UNIT_BYTES + 1, page_bytes // _UNIT_BYTES)
            self._units = torch.from_numpy(np.ndarray(shape, np.complex128, memory, strides=(_UNIT_BYTES, _UNIT_BYTES)))
            self._rows_per_unit = _UNIT_BYTES

    def gather(self, block_ids: npt.NDArray[np.int32], payload: Bytes) -> None:
        """Copy pages to rows. Block ids must have been checked: addresses follow from them."""
        target = self._pages_of(payload)
        if self._units is not None and target.ctypes.data % _UNIT_BYTES == 0 and target.strides[0] % _UNIT_BYTES == 0:
            rows = torch.from_numpy(self._rows(block_ids) // self._rows_per_unit)
            out = torch.from_numpy(target.view(np.complex128))
            step = max(1, _CALL_BYTES // self._page_bytes)
            for at in range(0, len(rows), step):
                torch.index_select(self._units, 0, rows[at : at + step], out=out[at : at + step])
            return
        runs = runs_of(block_ids)
        if self._page_bytes < SMALL_PAGE_BYTES and 2 * len(runs) > len(block_ids):
            target[...] = self._table[self._rows(block_ids)]
            return
        for number, layer in enumerate(self._layers):
            column = self._columns.start + number * self._page_bytes
            into = payload[:, column : column + self._page_bytes]
            for row, block, count in runs:
                into[row : row + count] = layer[block : block + count, : self._page_bytes]

    def scatter(self, block_ids: npt.NDArray[np.int32], payload: Bytes) -> None:
        """Copy rows to pages, as ``gather``."""
        self._table[self._rows(block_ids)] = self._pages_of(payload)

    def _rows(self, block_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        """Rows of the table, in the order of the payload: block after block, in each layer after layer."""
        return (block_ids.astype(np.int64)[:, np.newaxis] * self._strides + self._firsts).ravel()

    def _pages_of(self, payload: Bytes) -> Bytes:
        if len(self._layers) == 1:
            return payload[:, self._columns]
        return payload.reshape(-1, self._page_bytes)


def bands_of(pages: Sequence[tuple[Bytes, int, int]]) -> list[Band]:
    """Return the bands of a group. ``pages``: (array, column, bytes) of each layer, side by side."""
    layers = [layer for layer, _, _ in pages]
    if len({page_bytes for _, _, page_bytes in pages}) == 1 and fit_one_table(layers, pages[0][2]):
        return [Band(layers, pages[0][1], pages[0][2])]
    return [Band([layer], column, page_bytes) for layer, column, page_bytes in pages]


def fit_one_table(layers: Sequence[Bytes], page_bytes: int) -> bool:
    """Whether arrays lie near enough to each other: numpy counts the bytes of a table, rows that overlap included."""
    return _span_bytes(layers) * page_bytes < _TABLE_LIMIT_BYTES


def _span_bytes(layers: Sequence[Bytes]) -> int:
    """From the begin of the first page in memory to the begin of the last, and one."""
    last = max(layer.ctypes.data + (len(layer) - 1) * layer.strides[0] for layer in layers)
    return last - min(layer.ctypes.data for layer in layers) + 1


def runs_of(block_ids: npt.NDArray[np.int32]) -> list[tuple[int, int, int]]:
    """Split into runs of consecutive ids: (row of the payload, first block id, count)."""
    breaks = (np.flatnonzero(np.diff(block_ids) != 1) + 1).tolist()
    starts = [0, *breaks]
    ends = [*breaks, len(block_ids)]
    firsts = block_ids[starts].tolist()
    return [(start, first, end - start) for start, end, first in zip(starts, ends, firsts, strict=True)]
