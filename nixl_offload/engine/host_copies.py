"""Copies in host memory between KV pages and payload rows, many pages a call: pages are named by their address.

A Python loop over layers pays a call, and the interpreter's lock twice, for every layer; a table in which row ``i`` is
the page that begins at byte ``i`` lets one call copy pages of all layers. Threading: as the arrays; each method is done
when it returns, and copies without the interpreter's lock. Ownership: a copy keeps its arrays alive.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

Bytes = npt.NDArray[np.uint8]
BlockIds = npt.NDArray[np.int32]
Run = tuple[int, int, int, int]
"""Number of the payload, row in it, block id, count."""

SMALL_PAGE_BYTES = 48 << 10
"""Below this pages of all layers are copied by one call; from there on a call for each layer costs nothing any more:
docs/decisions/0012-memory-tier.md."""
_RUN_BLOCKS = 4
_RUN_BYTES = 64 << 10
"""Runs of so many blocks and bytes, on average, are copied by slices: one call for each run and layer. Shorter ones are
copied no slower by one call for all, and slices of 2 KiB cost three times as much."""
_TOGETHER_BYTES = 256 << 10
"""So much of all payloads goes through scratch, by one index for all, rather than by a call for each."""
_UNIT_BYTES = 16
_CALL_BYTES = 512 << 10
"""torch copies as many elements as these bytes hold (of 16 bytes each) on the calling thread. More would bring OpenMP
in, whose threads the model needs."""
_TABLE_LIMIT_BYTES = 1 << 62


class HostCopy:
    """Pages of equal length, one of each layer, that lie side by side in a payload row from ``column`` on.

    With more than one layer the copy is the whole row.
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

    def gather(self, block_ids: BlockIds, payloads: Sequence[Bytes]) -> None:
        """Copy pages to rows. ``block_ids``: of all payloads, one after the other; they must have been checked, for
        addresses follow from them.
        """
        begin = 0
        if self._are_small(block_ids):
            found = self._table[self._rows(block_ids)]
            for payload in payloads:
                target = self._pages_of(payload)
                target[...] = found[begin : begin + len(target)]
                begin += len(target)
            return
        runs = runs_of(block_ids, [len(payload) for payload in payloads])
        if self._are_long(runs, len(block_ids)) or self._page_bytes >= SMALL_PAGE_BYTES:
            for packed, pages in self._slices(runs, payloads):
                packed[...] = pages
            return
        rows = self._rows(block_ids)
        units = self._units
        if units is not None:
            rows //= self._rows_per_unit
        selected, step = torch.from_numpy(rows), max(1, _CALL_BYTES // self._page_bytes)
        for payload in payloads:
            target = self._pages_of(payload)
            end = begin + len(target)
            if units is None:
                target[...] = self._table[rows[begin:end]]
            elif (target.ctypes.data | target.strides[0]) % _UNIT_BYTES:
                target[...] = self._table[rows[begin:end] * self._rows_per_unit]
            else:
                out = torch.from_numpy(target.view(np.complex128))
                for at in range(begin, end, step):
                    till = min(end, at + step)
                    torch.index_select(units, 0, selected[at:till], out=out[at - begin : till - begin])
            begin = end

    def scatter(self, block_ids: BlockIds, payloads: Sequence[Bytes]) -> None:
        """Copy rows to pages, as ``gather``."""
        if self._are_small(block_ids):
            self._table[self._rows(block_ids)] = np.concatenate([self._pages_of(payload) for payload in payloads])
            return
        runs = runs_of(block_ids, [len(payload) for payload in payloads])
        if self._are_long(runs, len(block_ids)):
            for packed, pages in self._slices(runs, payloads):
                pages[...] = packed
            return
        begin = 0
        if self._page_bytes >= SMALL_PAGE_BYTES:
            for payload in payloads:
                ids = block_ids[begin : begin + len(payload)]
                for columns, layer in self._by_layer():
                    layer[ids, : self._page_bytes] = payload[:, columns]
                begin += len(payload)
            return
        rows = self._rows(block_ids)
        for payload in payloads:
            source = self._pages_of(payload)
            self._table[rows[begin : begin + len(source)]] = source
            begin += len(source)

    def _are_small(self, block_ids: BlockIds) -> bool:
        """Whether calls would cost more than the bytes."""
        return len(block_ids) * len(self._layers) * self._page_bytes <= _TOGETHER_BYTES

    def _are_long(self, runs: Sequence[Run], blocks: int) -> bool:
        """Whether runs, which have ``blocks`` blocks in all, are worth a call for each."""
        return len(runs) * max(_RUN_BLOCKS, _RUN_BYTES // self._page_bytes) <= blocks

    def _slices(self, runs: Sequence[Run], payloads: Sequence[Bytes]) -> Iterator[tuple[Bytes, Bytes]]:
        """Payload and pages of each run in each layer."""
        for number, row, block, count in runs:
            packed = payloads[number][row : row + count]
            for columns, layer in self._by_layer():
                yield packed[:, columns], layer[block : block + count, : self._page_bytes]

    def _by_layer(self) -> Iterator[tuple[slice, Bytes]]:
        """The columns of each layer."""
        column = self._columns.start
        for layer in self._layers:
            yield slice(column, column + self._page_bytes), layer
            column += self._page_bytes

    def _rows(self, block_ids: BlockIds) -> npt.NDArray[np.int64]:
        """Rows of the table, in the order of the payload: block after block, in each layer after layer."""
        return (block_ids.astype(np.int64)[:, np.newaxis] * self._strides + self._firsts).ravel()

    def _pages_of(self, payload: Bytes) -> Bytes:
        if len(self._layers) == 1:
            return payload[:, self._columns]
        return payload.reshape(-1, self._page_bytes)


def host_copies_of(pages: Sequence[tuple[Bytes, int, int]]) -> list[HostCopy]:
    """Return the copies of a group. ``pages``: (array, column, bytes) of each layer, side by side."""
    layers = [layer for layer, _, _ in pages]
    if len({page_bytes for _, _, page_bytes in pages}) == 1 and fit_one_table(layers, pages[0][2]):
        return [HostCopy(layers, pages[0][1], pages[0][2])]
    return [HostCopy([layer], column, page_bytes) for layer, column, page_bytes in pages]


def fit_one_table(layers: Sequence[Bytes], page_bytes: int) -> bool:
    """Whether arrays lie near enough to each other: numpy counts the bytes of a table, rows that overlap included."""
    return _span_bytes(layers) * page_bytes < _TABLE_LIMIT_BYTES


def _span_bytes(layers: Sequence[Bytes]) -> int:
    """From the begin of the first page in memory to the begin of the last, and one."""
    last = max(layer.ctypes.data + (len(layer) - 1) * layer.strides[0] for layer in layers)
    return last - min(layer.ctypes.data for layer in layers) + 1


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
