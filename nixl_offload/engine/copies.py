"""The contract of copies between KV blocks and chunks' slots. In a slot each block is one row: its pages side by side,
layer by layer.

Threading: ``Packer.fence`` is called by the submitting thread, everything else by the pump. Nothing waits for a device:
what a call has queued is answered by the fence that it returns.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from nixl_offload.chunk.checksum import payload_checksums
from nixl_offload.engine.streams import Fence

BlockIds = npt.NDArray[np.int32]
Checksums = npt.NDArray[np.uint64]
Payload = npt.NDArray[np.uint8]
"""The blocks of a chunk in a slot of host memory: shape (blocks, block_bytes), contiguous."""
SlotRows = Payload | torch.Tensor
"""As ``Payload``; of a slot in device memory a tensor."""
Parts = Sequence[tuple[BlockIds, SlotRows]]
"""The chunks of one call: which KV blocks, and where their bytes lie."""


@dataclass(frozen=True, slots=True)
class Brought:
    """Rows in scratch memory of a device. Slices like an array of rows."""

    owner: object
    """As long as anybody refers to it, the scratch is taken."""
    tensor: torch.Tensor

    def __len__(self) -> int:
        return len(self.tensor)

    def __getitem__(self, rows: slice) -> Brought:
        """Return some of the rows, one after the other."""
        return Brought(self.owner, self.tensor[rows])


Source = SlotRows | Brought
"""Where blocks can be scattered from."""
Sources = Sequence[tuple[BlockIds, Source]]


class Summed(Fence, Protocol):
    """Checksums of chunks' blocks, made now or by a device. Until it is ``done`` nothing may change the blocks."""

    by_device: bool
    """The checksums are made by the time that it is ``done``, whether they are asked for or not."""

    def values(self) -> list[Checksums]:
        """Return the checksums of each chunk's blocks. Where the host sums, it does so now.

        Raises RuntimeError before ``done``.
        """

    def rows(self) -> list[Source]:
        """Return where each chunk's blocks can be scattered from, once it is ``done``."""


class SummedByHost:
    """Implements ``Summed``: the host sums when asked, once ``fence`` is passed, unless it has ``sums`` already."""

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
    """Copies for the KV groups of one layout, all by number. A group without pages has no blocks.

    Numbers that do not fit raise LayoutError before anything is copied. When a call raises, nothing that it queued
    touches slots or blocks any more.
    """

    def fence(self) -> Fence:
        """Mark this point of the compute stream. KV blocks may be touched once it is done."""

    def gather_many(self, group: int, parts: Parts, fence: Fence) -> Summed:
        """KV blocks to slots, summed, once ``fence`` is done. Done when rows are whole and blocks may change."""

    def scatter_many(self, group: int, parts: Sources, fence: Fence) -> Fence:
        """Slots to KV blocks, once ``fence`` is done: pending writes to the blocks must not come after the load. Done
        when the blocks are complete and the rows may change.
        """

    def bring(self, group: int, payloads: Sequence[Payload]) -> Generator[None, None, Summed]:
        """Sum blocks in host memory. A device copies them to its scratch and sums the copy, which the result's ``rows``
        return for the scatter: blocks cross the bus once. Yields as long as there is no scratch.
        """

    def sums(self, group: int, block_ids: Sequence[BlockIds], fence: Fence) -> Summed:
        """The checksums of each chunk's blocks where they lie, read once ``fence`` is done."""

    def clear(self, group: int, block_ids: BlockIds, fence: Fence) -> Fence:
        """Zero the group's pages of KV blocks once ``fence`` is done. The returned fence is done when they are zero."""
