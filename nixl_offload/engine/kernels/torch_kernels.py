"""Gather, scatter and checksums of the KV blocks of one group, by torch's own operations: for tensors in host memory,
and for a device on which Triton's kernels cannot run.

A *row* is a block as it lies in a payload: the pages of its layers side by side. All calls queue work on the caller's
current stream and return at once; checksums by torch alone wait, because the host computes them.
Threading: one thread at a time per object. Ownership: what a call allocates belongs to the caller's current stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from nixl_offload.chunk.checksum import block_checksums

SCRATCH_BYTES = 32 << 20
"""Blocks copied together to be summed; a block that is larger, alone."""

_Rows = TypeVar("_Rows", torch.Tensor, npt.NDArray[np.uint8])


@dataclass(frozen=True, slots=True)
class Page:
    """One layer's share of a block: ``bytes`` from ``offset`` of a row of ``tensor`` on go to ``column`` of the payload
    row.
    """

    tensor: int
    column: int
    bytes: int
    offset: int = 0

    def of(self, tensors: Sequence[_Rows]) -> _Rows:
        """Return a view of it in all blocks, of shape (num_blocks, ``bytes``)."""
        return tensors[self.tensor][:, self.offset : self.offset + self.bytes]


class TorchKernels:
    """``ids``: block ids, int64 of shape (n,) on the device, checked by the caller: addresses follow from them.

    ``rows``: uint8 of shape (n, block_bytes) on the device; rows contiguous, any distance between them. Checksums are
    those of ``checksum.block_checksums``: int64 of shape (n,) on the device with the same 64 bits. Numbers that do not
    fit raise ValueError.
    """

    name = "torch"
    """For logs."""

    def __init__(self, tensors: Sequence[torch.Tensor], pages: Sequence[Page]) -> None:
        """``tensors``: all KV tensors, uint8 of shape (num_blocks, page_bytes), rows contiguous, any stride; ``pages``:
        those of the group.
        """
        self.block_bytes = sum(page.bytes for page in pages)
        self._views = [(page.of(tensors), slice(page.column, page.column + page.bytes)) for page in pages]

    def gather(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Copy blocks to rows."""
        self._check(rows, ids)
        for source, columns in self._views:
            torch.index_select(source, 0, ids, out=rows[:, columns])

    def scatter(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Copy rows to blocks."""
        self._check(rows, ids)
        for target, columns in self._views:
            target.index_copy_(0, ids, rows[:, columns])

    def sums_of_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the checksums of rows."""
        self._check(rows)
        digests = block_checksums(rows.cpu().numpy())
        return torch.from_numpy(digests.view(np.int64)).to(rows.device)

    def sums(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the checksums of blocks, some of which are copied side by side at a time."""
        step = max(1, SCRATCH_BYTES // self.block_bytes)
        sums = torch.empty(len(ids), dtype=torch.int64, device=ids.device)
        scratch = torch.empty((min(step, len(ids)), self.block_bytes), dtype=torch.uint8, device=ids.device)
        for begin in range(0, len(ids), step):
            some = ids[begin : begin + step]
            rows = scratch[: len(some)]
            self.gather(some, rows)
            sums[begin : begin + step] = self.sums_of_rows(rows)
        return sums

    def _check(self, rows: torch.Tensor, ids: torch.Tensor | None = None) -> None:
        """Raise ValueError unless these are rows of the group, and a block id for each."""
        if rows.dtype != torch.uint8 or rows.dim() != 2 or rows.shape[1] != self.block_bytes or rows.stride(1) != 1:
            found = f"{rows.dtype} {tuple(rows.shape)}, strides {rows.stride()}"
            raise ValueError(f"rows must be uint8 of shape (n, {self.block_bytes}), each contiguous, not {found}")
        if ids is not None and (ids.dtype != torch.int64 or ids.shape != (len(rows),)):
            raise ValueError(f"block ids must be int64 of shape ({len(rows)},), not {ids.dtype} {tuple(ids.shape)}")
