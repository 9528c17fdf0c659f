"""Kernels by torch until ``kernels.select`` has its own. To be deleted then."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nixl_offload.checksum_torch import block_checksums_torch
from nixl_offload.engine.kernels.base import GroupKernels, Page
from nixl_offload.engine.kernels.select import open_kernels as _open_kernels


class _Fallback:
    name = "torch"

    def __init__(self, tensors: Sequence[torch.Tensor], pages: Sequence[Page]) -> None:
        self._pages = [(tensors[page.tensor][:, : page.bytes], page.column, page.bytes) for page in pages]

    def gather(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        for tensor, column, size in self._pages:
            rows[:, column : column + size] = tensor.index_select(0, ids)

    def gather_summed(self, ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        self.gather(ids, rows)
        return self.sums_of_rows(rows)

    def scatter(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        for tensor, column, size in self._pages:
            tensor.index_copy_(0, ids, rows[:, column : column + size])

    def sums(self, ids: torch.Tensor) -> torch.Tensor:
        width = sum(size for _, _, size in self._pages)
        rows = torch.empty((len(ids), width), dtype=torch.uint8, device=ids.device)
        return self.gather_summed(ids, rows)

    def sums_of_rows(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(block_checksums_torch(rows).view("int64")).to(rows.device)


def open_kernels(tensors: Sequence[torch.Tensor], pages: Sequence[Page]) -> GroupKernels:
    """See kernels.select."""
    try:
        return _open_kernels(tensors, pages)
    except NotImplementedError:
        return _Fallback(tensors, pages)
