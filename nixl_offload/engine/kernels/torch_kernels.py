"""Gather, scatter and checksums in torch's own operations: for tensors in host memory, and for a device on which
Triton's kernels cannot run.

Checksums on a device are right but slow there: a handful of small kernels for every kilobyte of a block.
Threading: see base. Ownership: what a call allocates belongs to the caller's current stream.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from nixl_offload.chunk.checksum import block_checksums
from nixl_offload.chunk.checksum_torch import SHORT_BYTES, words_on, xxh3_64_torch
from nixl_offload.engine.kernels.base import Page

SCRATCH_BYTES = 32 << 20
"""Blocks copied together to be summed; a block that is larger, alone."""


class TorchKernels:
    """Implements GroupKernels. On a device, blocks of up to ``SHORT_BYTES`` are summed by the host, which waits."""

    name = "torch"

    def __init__(self, tensors: Sequence[torch.Tensor], pages: Sequence[Page]) -> None:
        self.block_bytes = sum(page.bytes for page in pages)
        self._device = tensors[pages[0].tensor].device
        self._wide = _by_width(tensors, pages)
        words_on(self._device)  # the first call of all would wait for the device

    def gather(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        wide, rows = self._view(ids, rows)
        for source, columns in wide:
            torch.index_select(source, 0, ids, out=rows[:, columns])

    def gather_summed(self, ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        self.gather(ids, rows)
        return self.sums_of_rows(rows)

    def scatter(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        wide, rows = self._view(ids, rows)
        for target, columns in wide:
            target.index_copy_(0, ids, rows[:, columns])

    def sums(self, ids: torch.Tensor) -> torch.Tensor:
        """Some blocks at a time are copied side by side."""
        return sums_of_copies(self.gather, self.sums_of_rows, ids, self.block_bytes)

    def sums_of_rows(self, rows: torch.Tensor) -> torch.Tensor:
        check_rows(rows, self.block_bytes)
        if not rows.is_cuda or rows.shape[1] <= SHORT_BYTES:
            digests = block_checksums(rows.cpu().numpy())
            return torch.from_numpy(digests.view(np.int64)).to(rows.device)
        return xxh3_64_torch(rows)

    def _view(self, ids: torch.Tensor, rows: torch.Tensor) -> tuple[_Columns, torch.Tensor]:
        """The pages as columns of the widest integers that ``rows`` are made of too, and ``rows`` as such."""
        check_ids(ids, len(rows))
        check_rows(rows, self.block_bytes)
        width = math.gcd(max(self._wide), rows.data_ptr(), rows.storage_offset(), rows.stride(0))
        dtype, wide = self._wide[width]
        return wide, rows.view(dtype)


_Columns = list[tuple[torch.Tensor, slice]]


def _by_width(tensors: Sequence[torch.Tensor], pages: Sequence[Page]) -> dict[int, tuple[torch.dtype, _Columns]]:
    """A group's pages as columns of integers of each width that all of them are made of: bytes are copied singly."""
    parts = []
    for page in pages:
        view = page.of(tensors)
        parts += [page.bytes, page.column, view.stride(0), view.data_ptr(), view.storage_offset()]
    widest = math.gcd(8, *parts)
    return {
        dtype.itemsize: (
            dtype,
            [
                (
                    page.of(tensors).view(dtype),
                    slice(page.column // dtype.itemsize, (page.column + page.bytes) // dtype.itemsize),
                )
                for page in pages
            ],
        )
        for dtype in (torch.uint8, torch.int16, torch.int32, torch.int64)
        if dtype.itemsize <= widest
    }


def check_ids(ids: torch.Tensor, count: int) -> None:
    """Raise ValueError unless ``ids`` are ``count`` block ids."""
    if ids.dtype != torch.int64 or ids.shape != (count,):
        raise ValueError(f"block ids must be int64 of shape ({count},), not {ids.dtype} {tuple(ids.shape)}")


def check_rows(rows: torch.Tensor, block_bytes: int) -> None:
    """Raise ValueError unless ``rows`` are rows of ``block_bytes``: kernels reckon with addresses."""
    if rows.dtype != torch.uint8 or rows.dim() != 2 or rows.shape[1] != block_bytes or rows.stride(1) != 1:
        found = f"{rows.dtype} {tuple(rows.shape)}, strides {rows.stride()}"
        raise ValueError(f"rows must be uint8 of shape (n, {block_bytes}), each contiguous, not {found}")


def sums_of_copies(
    gather: Callable[[torch.Tensor, torch.Tensor], None],
    sums_of_rows: Callable[[torch.Tensor], torch.Tensor],
    ids: torch.Tensor,
    block_bytes: int,
) -> torch.Tensor:
    """Return the checksums of blocks whose pages cannot be summed where they lie."""
    step = max(1, SCRATCH_BYTES // block_bytes)
    sums = torch.empty(len(ids), dtype=torch.int64, device=ids.device)
    scratch = torch.empty((min(step, len(ids)), block_bytes), dtype=torch.uint8, device=ids.device)
    for begin in range(0, len(ids), step):
        some = ids[begin : begin + step]
        rows = scratch[: len(some)]
        gather(some, rows)
        sums[begin : begin + step] = sums_of_rows(rows)
    return sums
