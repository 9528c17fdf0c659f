"""The contract of kernels: what is done with the KV blocks of one group on the device that holds them.

A *row* is a block as it lies in a payload: the pages of its layers side by side. All calls queue work on the caller's
current stream and return at once; nothing here waits for the device or allocates on the host.
Threading: one thread at a time per object.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

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


class GroupKernels(Protocol):
    """``ids``: block ids, int64 of shape (n,) on the device, checked by the caller: addresses follow from them.

    ``rows``: uint8 of shape (n, block_bytes) on the device; rows contiguous, any distance between them, any address.
    Checksums are those of ``checksum.block_checksums``: int64 of shape (n,) on the device with the same 64 bits.
    """

    name: str
    """``triton`` or ``torch``: for logs."""

    def gather(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Copy blocks to rows."""

    def gather_summed(self, ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Copy blocks to rows and return the checksums of what was copied."""

    def scatter(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Copy rows to blocks."""

    def sums(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the checksums of blocks where they lie."""

    def sums_of_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the checksums of rows."""
