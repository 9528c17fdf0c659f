"""Copies between KV blocks in device memory and slots: in page-locked memory of the host, or on the device itself.

Threading: ``fence`` is called by the submitting thread, everything else by the pump. All work is queued on our own
streams: loads do not wait for stores, and checks of loads do not wait for the model's steps.
Ownership: from a call until its fence is done, the device owns the slots. Memory allocated within work belongs to the
work's stream. Torch keeps page-locked memory until its copies are done.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Final
from weakref import WeakSet

import numpy as np
import torch

from nixl_offload.chunk.header import HEADER_BYTES, Pages
from nixl_offload.engine.host import PIN_PIECE_BYTES
from nixl_offload.engine.kernels.torch_kernels import Page, open_kernels
from nixl_offload.engine.packer import BlockIds, Brought, HostPacker, Packer, Parts, Payload, Source, Summed
from nixl_offload.engine.streams import READY, Device, Fence

BROUGHT_BYTES = 64 << 20
"""Device memory for blocks between ``bring`` and their scatter; one batch may exceed it."""
DEVICE_BYTES: Final = 144 << 20
"""Most device memory of a packer, unless a chunk is larger: ``BROUGHT_BYTES``, a batch to gather (64 MiB into memory)
and a batch to scatter (16 MiB).
"""


class DevicePacker(Packer):
    """A batch takes one kernel, on contiguous rows: the slot itself if the batch is a single
    chunk on the device, else scratch, with one copy between scratch and slot for each chunk.

    Scratch belongs to its stream, so the caching allocator reuses the same memory for batch after batch.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], pages: Sequence[Sequence[Page]], device: Device) -> None:
        super().__init__(tensors, pages)
        bytes_of = [tensor.view(torch.uint8) for tensor in tensors]
        self._kernels = {number: open_kernels(bytes_of, group) for number, group in enumerate(pages) if group}
        """By group; none for a group without pages."""
        self._device = device
        # Streams for gathers, for scatters, and for headers and checksums of slots.
        self._out, self._in, self._beside = (device.new_stream() for _ in range(3))
        self._brought: WeakSet[Summed] = WeakSet()
        self._waiting: list[object] = []
        """Calls that wait for scratch, in order."""

    @property
    def sums_slowly(self) -> bool:
        """Whether this is a real device without kernels for checksums, so that the host sums."""
        return self._device.page_locks and any(kernels.name == "torch" for kernels in self._kernels.values())

    def gather_many(self, group: int, parts: Parts, fence: Fence) -> Summed:
        """The device also sums. If it has no fast kernels for that, the host sums payloads in host memory."""
        kernels, ids = self._kernels[group], self._locked(self._checked_ids(group, parts))
        payloads = [rows for _, rows in parts if isinstance(rows, np.ndarray)]
        host_sums = self.sums_slowly and len(payloads) == len(parts)
        summed, sums = self._summed([len(rows) for _, rows in parts], payloads)

        def gather() -> None:
            rows, copies = _side_by_side([rows for _, rows in parts], self._device.torch_device)
            kernels.gather(self._upload(ids), rows)
            _copy([(slot, row) for row, slot in copies])
            if not host_sums:
                sums.copy_(kernels.sums_of_rows(rows), non_blocking=True)

        summed.fence = self._out.run(gather, fence)
        return Summed(summed.fence, payloads) if host_sums else summed

    def scatter_many(self, group: int, parts: Parts, fence: Fence) -> Fence:
        kernels, ids = self._kernels[group], self._locked(self._checked_ids(group, parts))

        def scatter() -> None:
            rows, copies = _side_by_side([rows for _, rows in parts], self._device.torch_device)
            _copy(copies)
            kernels.scatter(self._upload(ids), rows)

        return self._in.run(scatter, fence)

    def bring(self, group: int, payloads: Sequence[Payload]) -> Generator[None, None, Summed]:
        """The host sums if the device has no fast kernels, or no memory left. Scratch is given in the order of the
        calls, so that small batches do not starve a large one.
        """
        self._check_width(group, payloads)
        if self.sums_slowly:
            return Summed(READY, payloads)
        counts = [len(payload) for payload in payloads]
        (summed, sums), kernels, place = self._summed(counts, payloads), self._kernels[group], object()
        self._waiting.append(place)
        try:
            while self._waiting[0] is not place or not self._has_room(payloads):
                yield
        finally:
            self._waiting.remove(place)

        def brought() -> None:
            rows, copies = _side_by_side(payloads, self._device.torch_device)
            _copy(copies)
            sums.copy_(kernels.sums_of_rows(rows), non_blocking=True)
            summed.scratch = rows

        try:
            summed.fence = self._beside.run(brought)
        except torch.OutOfMemoryError:
            return Summed(READY, payloads)
        self._brought.add(summed)
        return summed

    def sums(self, group: int, block_ids: Sequence[BlockIds], fence: Fence) -> Summed:
        """If ``fence`` is done, a stream is used on which no gather waits for a step."""
        kernels, ids = self._kernels[group], self._locked(self._check_ids(group, np.concatenate(block_ids)))
        summed, sums = self._summed([len(some) for some in block_ids])

        def sum_blocks() -> None:
            sums.copy_(kernels.sums(self._upload(ids)), non_blocking=True)

        summed.fence = (self._beside if fence.done() else self._out).run(sum_blocks, fence)
        return summed

    def clear(self, group: int, block_ids: BlockIds, fence: Fence) -> Fence:
        kernels, ids = self._kernels[group], self._locked(self._check_ids(group, block_ids))

        def cleared() -> None:
            row = torch.zeros(self.block_bytes[group], dtype=torch.uint8, device=self._device.torch_device)
            kernels.scatter(self._upload(ids), row.expand(len(ids), -1))

        return self._in.run(cleared, fence)

    # -- slots on the device ----------------------------------------------------------------------------------------

    def finish_images(self, headers: Pages, slots: Sequence[torch.Tensor], clear: Sequence[Sequence[slice]]) -> Fence:
        """Write a row of ``headers`` to the begin of each slot on the device, and zero the slot's byte ranges
        ``clear``.

        The gathers into the slots must be done. When the fence is done, the images are complete.
        """
        cleared = [slot[part] for slot, parts in zip(slots, clear, strict=True) for part in parts]
        pages = page_locked(headers.size, torch.uint8, self._device).view(headers.shape)
        pages.numpy()[:] = headers

        def finished() -> None:
            for slot in slots:
                keep(slot)
            _copy([(slot[:HEADER_BYTES], page) for slot, page in zip(slots, self._upload(pages), strict=True)])
            if cleared:
                torch._foreach_zero_(cleared)

        return self._beside.run(finished)

    def inspect(self, group: int, slots: Sequence[torch.Tensor], rows: Sequence[torch.Tensor]) -> tuple[Pages, Summed]:
        """Copy the header pages of slots on the device to the host, and the checksums of ``rows``, if any.

        The mover must be done with the slots. The pages are valid when the sums are done.
        """
        self._check_width(group, rows)
        pages = page_locked(len(slots) * HEADER_BYTES, torch.uint8, self._device).view(-1, HEADER_BYTES)
        kernels, device = self._kernels[group], self._device.torch_device
        summed, sums = self._summed([len(each) for each in rows])

        def inspected() -> None:
            together, copies = _side_by_side([slot[:HEADER_BYTES].view(1, -1) for slot in slots], device)
            _copy(copies)
            pages.copy_(together, non_blocking=True)
            if rows:
                together, copies = _side_by_side(rows, device)
                _copy(copies)
                sums.copy_(kernels.sums_of_rows(together), non_blocking=True)

        summed.fence = self._beside.run(inspected)
        return pages.numpy(), summed

    # -- what calls share -------------------------------------------------------------------------------------------

    def _summed(self, counts: Sequence[int], payloads: Sequence[Payload] = ()) -> tuple[Summed, torch.Tensor]:
        """Return checksums of chunks of ``counts`` blocks, and the page-locked memory into which queued work writes
        them: int64, one a block.
        """
        memory = page_locked(sum(counts), torch.int64, self._device)
        sums = [chunk.numpy().view(np.uint64) for chunk in torch.split(memory, list(counts))]
        return Summed(None, payloads, sums=sums), memory

    def _locked(self, block_ids: BlockIds) -> torch.Tensor:
        """Return ids in page-locked memory, for ``_upload``."""
        ids = page_locked(len(block_ids), torch.int64, self._device)
        ids.numpy()[:] = block_ids
        return ids

    def _upload(self, ids: torch.Tensor) -> torch.Tensor:
        """Within work on a stream: return ``ids`` on the device. The page-locked ``ids`` may be released at once."""
        return ids.to(self._device.torch_device, non_blocking=True)

    def _has_room(self, wanted: Sequence[Payload]) -> bool:
        taken = [payload for other in self._brought for payload in other.payloads]
        return not taken or sum(payload.nbytes for payload in (*taken, *wanted)) <= BROUGHT_BYTES


def make_packer(tensors: Sequence[torch.Tensor], pages: Sequence[Sequence[Page]], device: Device) -> Packer:
    """Return a packer for ``tensors``, each uint8 or int8 of shape (num_blocks, page_bytes)."""
    if device.is_accelerator:
        return DevicePacker(tensors, pages, device)
    return HostPacker([tensor.view(torch.uint8).numpy() for tensor in tensors], pages)


def page_locked(count: int, dtype: torch.dtype, device: Device) -> torch.Tensor:
    """Return host memory that allows asynchronous copies to and from ``device``."""
    return torch.empty(count, dtype=dtype, pin_memory=device.page_locks)


# Within work on a stream.


def keep(memory: torch.Tensor) -> None:
    """Keep ``memory`` from the allocator until the stream's work is done, even if it is released now."""
    if memory.is_cuda:
        memory.record_stream(torch.cuda.current_stream(memory.device))


def _side_by_side(
    sources: Sequence[Source], device: torch.device
) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Return rows on the device for all chunks, and the copies (rows, slot) that fill them. A single chunk on the
    device needs no copy. Rows of a stack are as far apart as in host memory: one copy brings them, with what is in
    between, or fills them, with zeros in between.
    """
    places = [source.tensor if isinstance(source, Brought) else source for source in sources]
    for place in places:
        if isinstance(place, torch.Tensor):
            keep(place)
    if len(places) == 1 and isinstance(places[0], torch.Tensor):
        return places[0], []
    count, width = sum(map(len, places)), places[0].shape[1]
    apart = max([width, *(place.strides[0] for place in places if isinstance(place, np.ndarray) and len(place) > 1)])
    make = torch.zeros if apart > width else torch.empty
    scratch = make((count, apart), dtype=torch.uint8, device=device)[:, :width]
    copies, begin = [], 0
    for place in places:
        rows = scratch[begin : begin + len(place)]
        begin += len(place)
        copies += [(rows, place)] if isinstance(place, torch.Tensor) else _over_the_bus(rows, place)
    return scratch, copies


def _over_the_bus(rows: torch.Tensor, payload: Payload) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the copies between rows and a payload, as bytes. A payload that crosses page-locked pieces is split there:
    CUDA does not promise to copy over two registrations.
    """
    length = (len(rows) - 1) * payload.strides[0] + payload.shape[1] if len(rows) else 0
    flat, host = (each.as_strided((length,), (1,)) for each in (rows, torch.from_numpy(payload)))
    copies, begin = [], 0
    while begin < len(host):
        end = min(len(host), begin + PIN_PIECE_BYTES - (payload.ctypes.data + begin) % PIN_PIECE_BYTES)
        copies.append((flat[begin:end], host[begin:end]))
        begin = end
    return copies


def _copy(copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy (target, source) pairs; one call copies all pairs within the device."""
    within = [(target, source) for target, source in copies if target.device == source.device]
    if within:
        targets, sources = (list(column) for column in zip(*within, strict=True))
        torch._foreach_copy_(targets, sources, non_blocking=True)
    for target, source in copies:
        if target.device != source.device:
            target.copy_(source, non_blocking=True)
