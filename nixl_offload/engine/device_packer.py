"""Chunks packed on the device: KV blocks to and from slots that lie in device memory as well, with their checksums.

Threading: the pump's thread. Everything is queued on streams of its own and answered by fences; nothing waits for the
device. Ownership: a slot, and a header page, are the device's from the call until its fence is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from nixl_offload.chunk.header import HEADER_BYTES
from nixl_offload.engine.brought import BlockIds
from nixl_offload.engine.kernels.base import Page
from nixl_offload.engine.queued import DeviceGroups, QueuedSums, keep, taken_back
from nixl_offload.engine.streams import READY, Device, Fence
from nixl_offload.errors import LayoutError

HeaderPage = npt.NDArray[np.uint8]
"""Shape (HEADER_BYTES,), page-locked."""


class DevicePacker:
    """KV blocks and slots in the memory of one device.

    Gathers, scatters, and what is done to a slot beside them have a stream each: a load waits for no store, and neither
    a header nor an inspection for a step of the model. When a call raises, nothing that it queued touches slot, header
    page or blocks any more.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], pages: Sequence[Sequence[Page]], device: Device) -> None:
        """``tensors``: uint8 or int8 of shape (num_blocks, page_bytes); ``pages``: by group, then by layer."""
        self._device = device
        self._groups = DeviceGroups(tensors, pages, device)
        self._kernels_of = {self._groups.block_bytes[group]: it for group, it in self._groups.kernels.items()}
        self._out, self._in, self._beside = (device.streams.new() for _ in range(3))

    def gather(self, group: int, block_ids: BlockIds, rows: torch.Tensor, fence: Fence) -> QueuedSums:
        """KV blocks to ``rows`` of a slot, shape (n, block_bytes), once ``fence`` is done.

        Done when the blocks may change and the rows are complete; the values are those of what was copied. Raises
        LayoutError for numbers that do not fit.
        """
        kernels, ids = self._groups.kernels[group], self._checked(group, block_ids, rows)

        def gathered() -> torch.Tensor:
            keep(rows)
            return kernels.gather_summed(self._groups.upload(ids), rows)

        return QueuedSums.begin(self._out, self._device, len(ids), gathered, fence)

    def scatter(self, group: int, block_ids: BlockIds, rows: torch.Tensor, fence: Fence) -> Fence:
        """``rows`` of a slot to KV blocks, once ``fence`` is done: pending writes to the blocks must not overtake it.

        Done when the blocks are complete and the rows may change. Raises LayoutError for numbers that do not fit.
        """
        kernels, ids = self._groups.kernels[group], self._checked(group, block_ids, rows)

        def scattered() -> None:
            keep(rows)
            kernels.scatter(self._groups.upload(ids), rows)

        with taken_back(self._in):
            self._in.wait(fence)
            self._in.run(scattered)
            return self._in.record()

    def finish_image(self, header: HeaderPage, slot: torch.Tensor, clear: Sequence[tuple[int, int]]) -> Fence:
        """Put the header page at the slot's begin and zero the byte ranges ``[begin, end)``.

        The gather into the slot is done: its values are what the header says. With this fence the image is complete.
        Raises LayoutError for a range that touches the header page or leaves the slot.
        """
        for begin, end in clear:
            if not HEADER_BYTES <= begin <= end <= len(slot):
                raise LayoutError(f"bytes {begin} to {end} of a slot of {len(slot)} cannot be cleared")

        def finished() -> None:
            keep(slot)
            slot[:HEADER_BYTES].copy_(torch.from_numpy(header), non_blocking=True)
            for begin, end in clear:
                slot[begin:end].zero_()

        with taken_back(self._beside):
            self._beside.run(finished)
            return self._beside.record()

    def inspect(self, slot: torch.Tensor, header_out: HeaderPage, rows: torch.Tensor | None) -> QueuedSums:
        """Bring the header page of a slot that was read to ``header_out``, and the checksums of ``rows``, if any.

        The mover is done with the slot. Without ``rows`` there are no values. Raises LayoutError for rows of a length
        that no group has.
        """
        count, sums = 0, partial(torch.empty, 0, dtype=torch.int64)
        if rows is not None:
            kernels = self._kernels_of.get(rows.shape[1])
            if kernels is None:
                raise LayoutError(f"no group has blocks of {rows.shape[1]} bytes")
            count, sums = len(rows), partial(kernels.sums_of_rows, rows)

        def inspected() -> torch.Tensor:
            keep(slot)
            torch.from_numpy(header_out).copy_(slot[:HEADER_BYTES], non_blocking=True)
            return sums()

        return QueuedSums.begin(self._beside, self._device, count, inspected, READY)

    def _checked(self, group: int, block_ids: BlockIds, rows: torch.Tensor) -> torch.Tensor:
        """Return the ids, page-locked. Raises LayoutError: the kernels reckon with addresses."""
        self._groups.check_width(group, rows.shape[1])
        if len(rows) != len(block_ids):
            raise LayoutError(f"{len(rows)} rows for {len(block_ids)} blocks")
        return self._groups.ids(group, block_ids)
