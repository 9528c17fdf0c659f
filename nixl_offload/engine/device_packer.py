"""Chunks packed on the device: KV blocks to and from slots that lie in device memory as well, with their checksums.

Threading: the pump's thread. Everything is queued on streams of its own and answered by fences; nothing waits for the
device. Ownership: slots are the device's from the call until its fence is done.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nixl_offload.chunk.header import HEADER_BYTES, Pages
from nixl_offload.engine.brought import BlockIds
from nixl_offload.engine.kernels.base import Page
from nixl_offload.engine.queued import DeviceGroups, QueuedSums, keep, page_locked, taken_back
from nixl_offload.engine.streams import READY, Device, Fence
from nixl_offload.errors import LayoutError

DeviceParts = Sequence[tuple[BlockIds, torch.Tensor]]
"""The chunks of one call: which KV blocks, and the rows of a slot, uint8 of shape (n, block_bytes), for their bytes."""


class DevicePacker:
    """KV blocks and slots in one device's memory. The chunks of a call, those of a batch, take one kernel together:
    of several the rows lie side by side in scratch meanwhile, and one more call of torch's copies them all.

    Gathers, scatters, and what is done to slots beside them have a stream each: a load waits for no store, and neither
    headers nor an inspection for a step of the model. When a call raises, nothing that it queued touches slots or
    blocks any more.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], pages: Sequence[Sequence[Page]], device: Device) -> None:
        """``tensors``: uint8 or int8 of shape (num_blocks, page_bytes); ``pages``: by group, then by layer."""
        self._device = device
        self._groups = DeviceGroups(tensors, pages, device)
        self._kernels_of = {self._groups.block_bytes[group]: it for group, it in self._groups.kernels.items()}
        self._out, self._in, self._beside = (device.streams.new() for _ in range(3))

    def gather(self, group: int, parts: DeviceParts, fence: Fence) -> QueuedSums:
        """KV blocks to rows, once ``fence`` is done.

        Done when the blocks may change and the rows are complete; the values, part after part, are those of what was
        copied. Raises LayoutError for numbers that do not fit.
        """
        kernels, ids = self._groups.kernels[group], self._checked(group, parts)
        rows = [rows for _, rows in parts]

        def gathered() -> torch.Tensor:
            together = _room_for(rows)
            sums = kernels.gather_summed(self._groups.upload(ids), together)
            _copy(rows, _split(together, rows))
            return sums

        return QueuedSums.begin(self._out, self._device, len(ids), gathered, fence)

    def scatter(self, group: int, parts: DeviceParts, fence: Fence) -> Fence:
        """Rows to KV blocks, once ``fence`` is done: pending writes to the blocks must not overtake it.

        Done when the blocks are complete and the rows may change. Raises LayoutError for numbers that do not fit.
        """
        kernels, ids = self._groups.kernels[group], self._checked(group, parts)
        rows = [rows for _, rows in parts]

        def scattered() -> None:
            kernels.scatter(self._groups.upload(ids), _side_by_side(rows))

        with taken_back(self._in):
            self._in.wait(fence)
            self._in.run(scattered)
            return self._in.record()

    def finish_images(
        self, headers: Pages, slots: Sequence[torch.Tensor], clear: Sequence[Sequence[tuple[int, int]]]
    ) -> Fence:
        """Put a row of ``headers`` at the begin of each slot, and zero the slot's byte ranges ``[begin, end)``.

        The gathers into the slots are done: their values are what the headers say. With this fence the images are
        complete. Raises LayoutError for a range that touches the header page or leaves the slot.
        """
        cleared = []
        for slot, ranges in zip(slots, clear, strict=True):
            for begin, end in ranges:
                if not HEADER_BYTES <= begin <= end <= len(slot):
                    raise LayoutError(f"bytes {begin} to {end} of a slot of {len(slot)} cannot be cleared")
                cleared.append(slot[begin:end])
        pages = page_locked(headers.size, torch.uint8, self._device).view(headers.shape)
        pages.numpy()[:] = headers

        def finished() -> None:
            for slot in slots:
                keep(slot)
            _copy([slot[:HEADER_BYTES] for slot in slots], list(self._groups.upload(pages)))
            if cleared:
                torch._foreach_zero_(cleared)

        with taken_back(self._beside):
            self._beside.run(finished)
            return self._beside.record()

    def inspect(self, slots: Sequence[torch.Tensor], rows: Sequence[torch.Tensor] | None) -> tuple[Pages, QueuedSums]:
        """Bring the header pages of slots that were read, and the checksums of ``rows``, if any, part after part.

        The mover is done with the slots. The pages have come when the sums are done. Without ``rows`` there are no
        values. Raises LayoutError for rows of a length that no group has.
        """
        widths = {each.shape[1] for each in rows or ()}
        if len(widths) > 1 or not widths <= self._kernels_of.keys():
            raise LayoutError(f"no group has blocks of {' and '.join(map(str, sorted(widths)))} bytes")
        pages = page_locked(len(slots) * HEADER_BYTES, torch.uint8, self._device).view(-1, HEADER_BYTES)

        def inspected() -> torch.Tensor:
            pages.copy_(_side_by_side([slot[:HEADER_BYTES].view(1, -1) for slot in slots]), non_blocking=True)
            if not rows:
                return torch.empty(0, dtype=torch.int64)
            return self._kernels_of[rows[0].shape[1]].sums_of_rows(_side_by_side(rows))

        count = sum(map(len, rows or ()))
        return pages.numpy(), QueuedSums.begin(self._beside, self._device, count, inspected, READY)

    def _checked(self, group: int, parts: DeviceParts) -> torch.Tensor:
        """Return the ids, page-locked. Raises LayoutError: the kernels reckon with addresses."""
        for block_ids, rows in parts:
            self._groups.check_width(group, rows.shape[1])
            if len(rows) != len(block_ids):
                raise LayoutError(f"{len(rows)} rows for {len(block_ids)} blocks")
        return self._groups.ids(group, *(block_ids for block_ids, _ in parts))


# Within work on a stream.


def _room_for(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Memory for the rows of all parts, which are our callers': that of the only one, or scratch."""
    for part in parts:
        keep(part)
    if len(parts) == 1:
        return parts[0]
    return parts[0].new_empty((sum(map(len, parts)), parts[0].shape[1]))


def _side_by_side(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The rows of all parts."""
    together = _room_for(parts)
    _copy(_split(together, parts), parts)
    return together


def _split(together: torch.Tensor, parts: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    return parts if together is parts[0] else together.split_with_sizes([len(part) for part in parts])


def _copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """All of them by one call, unless they are the same."""
    if targets is not sources:
        torch._foreach_copy_(list(targets), list(sources), non_blocking=True)
