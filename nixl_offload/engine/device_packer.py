"""Copies between KV blocks in device memory and slots: in page-locked memory of the host, or on the device itself.

Threading: ``fence`` is called by the submitting thread, everything else by the pump. Everything is queued on side
streams: gathers, scatters, and what is done to slots beside them have one each, so a load waits for no store, and
neither headers nor checksums of what was read wait for a step of the model.
Ownership: slots are the device's from the call until its fence is done. What work allocates while it runs belongs to
its stream; page-locked memory is torch's, which keeps it until the copies are done.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from weakref import WeakSet

import numpy as np
import numpy.typing as npt
import torch

from nixl_offload.chunk.header import HEADER_BYTES, Pages
from nixl_offload.engine.copies import (
    BlockIds,
    Brought,
    Checksums,
    Parts,
    Payload,
    Source,
    Sources,
    Summed,
    SummedByHost,
)
from nixl_offload.engine.host import PIN_PIECE_BYTES
from nixl_offload.engine.kernels.select import open_kernels
from nixl_offload.engine.kernels.torch_kernels import Page, TorchKernels
from nixl_offload.engine.streams import READY, Device, Fence, Stream
from nixl_offload.errors import LayoutError

SCRATCH_BYTES = 32 << 20
"""Device memory for the chunks that one kernel gathers or scatters together. A batch that is larger takes turns."""
BROUGHT_BYTES = 64 << 20
"""Device memory for what is brought there to be summed and has not been scattered yet, or one batch."""
DEVICE_BYTES = 2 * SCRATCH_BYTES + BROUGHT_BYTES
"""What a packer takes of the device at most, unless a chunk is larger."""

_Work = Callable[[TorchKernels, torch.Tensor, Sources], None]
"""What is done with a group's kernels, block ids on the device, and the chunks of one turn."""


class DeviceGroups:
    """The KV groups of one device: their kernels, and what kernels trust their callers to have checked."""

    def __init__(self, tensors: Sequence[torch.Tensor], pages: Sequence[Sequence[Page]], device: Device) -> None:
        """``tensors``: uint8 or int8 of shape (num_blocks, page_bytes); ``pages``: by group, then by layer."""
        bytes_of = [tensor.view(torch.uint8) for tensor in tensors]
        self.kernels: dict[int, TorchKernels] = {
            number: open_kernels(bytes_of, group) for number, group in enumerate(pages) if group
        }
        """By group; one without pages has none."""
        self.block_bytes = [sum(page.bytes for page in group) for group in pages]
        self._num_blocks = [min((len(tensors[page.tensor]) for page in group), default=0) for group in pages]
        self._device = device

    @property
    def sums_slowly(self) -> bool:
        """Whether checksums on a real device are torch's, which take many times as long as any drive."""
        return self._device.page_locks and any(kernels.name == "torch" for kernels in self.kernels.values())

    def check_width(self, group: int, width_bytes: int) -> None:
        """Raise LayoutError for rows of another length than the group's blocks."""
        if width_bytes != self.block_bytes[group]:
            raise LayoutError(f"rows of {width_bytes} bytes for blocks of {self.block_bytes[group]}")

    def ids(self, group: int, *block_ids: npt.NDArray[np.int32]) -> torch.Tensor:
        """Return all ids in page-locked memory, for ``upload``. Raises LayoutError for one outside the KV cache."""
        ids = page_locked(sum(map(len, block_ids)), torch.int64, self._device)
        if len(ids):
            found = np.concatenate(block_ids, out=ids.numpy())
            if not 0 <= found.min() <= found.max() < self._num_blocks[group]:
                raise LayoutError(f"block ids outside a KV cache of {self._num_blocks[group]} blocks")
        return ids

    def upload(self, ids: torch.Tensor) -> torch.Tensor:
        """Within work on a stream: return ``ids`` on the device. Their page-locked memory may be let go at once."""
        return ids.to(self._device.torch_device, non_blocking=True)


class SummedOnDevice:
    """Implements ``Summed``. Its maker queues the work that fills ``host`` with the sums, then sets ``fence``."""

    by_device = True

    def __init__(self, counts: Sequence[int], host: torch.Tensor, payloads: Sequence[Payload] = ()) -> None:
        """``counts``: blocks of each chunk. ``payloads``: where they lie in host memory."""
        self.bytes = sum(payload.nbytes for payload in payloads)
        self.host = host
        """int64, one for each block."""
        self.scratch: torch.Tensor | None = None
        """The rows, shape (blocks, block_bytes), where they are kept on the device."""
        self.fence: Fence | None = None
        self._ends = np.cumsum(counts)
        self._payloads = payloads

    def done(self) -> bool:
        return self.fence is not None and self.fence.done()

    def values(self) -> list[Checksums]:
        if not self.done():
            raise RuntimeError("checksums were asked for before the device had them")
        words: npt.NDArray[np.int64] = self.host.numpy()
        return np.split(words.view(np.uint64), self._ends[:-1]) if len(self._ends) else []

    def rows(self) -> list[Source]:
        if self.scratch is None:
            return list(self._payloads)
        begins = [0, *self._ends[:-1].tolist()]
        return [Brought(self, self.scratch[a:b]) for a, b in zip(begins, self._ends.tolist(), strict=True)]


class DevicePacker:
    """Implements ``Packer``. Per turn one kernel, on rows that lie side by side: the slot's, where a single chunk is on
    the device, else rows of scratch, with one copy for each chunk between them and its slot.

    Scratch belongs to its stream, so the caching allocator hands the same memory to one turn after the other. It is
    never more than ``SCRATCH_BYTES``, or one chunk, for each stream, and ``BROUGHT_BYTES`` for what is brought.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], pages: Sequence[Sequence[Page]], device: Device) -> None:
        self._device = device
        self._groups = DeviceGroups(tensors, pages, device)
        self._out, self._in, self._beside = (device.streams.new() for _ in range(3))
        self._brought: WeakSet[SummedOnDevice] = WeakSet()
        self._waiting: list[object] = []
        """For scratch, in order."""

    def fence(self) -> Fence:
        return self._device.streams.compute_fence()

    def gather_many(self, group: int, parts: Parts, fence: Fence) -> Summed:
        """The device sums as well. Without quick kernels for that, the host sums what lies there."""
        payloads = [rows for _, rows in parts if isinstance(rows, np.ndarray)]
        if self._groups.sums_slowly and len(payloads) == len(parts):
            return SummedByHost(self._in_turns(self._out, _gather, group, parts, fence), payloads)
        counts = [len(rows) for _, rows in parts]
        summed, begin = SummedOnDevice(counts, self._room_for_sums(counts), payloads), 0

        def gather(kernels: TorchKernels, ids: torch.Tensor, turn: Sources) -> None:
            nonlocal begin  # turns are taken in order
            rows, copies = _side_by_side(turn, ids.device)
            kernels.gather(ids, rows)
            _copy([(slot, row) for row, slot in copies])
            summed.host[begin : begin + len(ids)].copy_(kernels.sums_of_rows(rows), non_blocking=True)
            begin += len(ids)

        summed.fence = self._in_turns(self._out, gather, group, parts, fence)
        return summed

    def scatter_many(self, group: int, parts: Sources, fence: Fence) -> Fence:
        return self._in_turns(self._in, _scatter, group, parts, fence)

    def bring(self, group: int, payloads: Sequence[Payload]) -> Generator[None, None, Summed]:
        """The host sums where the device's kernels are slow, or the device has no memory left. Scratch is given in the
        order of the calls: small batches that come all the time would leave no room for a large one.
        """
        for payload in payloads:
            self._groups.check_width(group, payload.shape[1])
        if self._groups.sums_slowly:
            return SummedByHost(READY, payloads)
        place, wanted_bytes = object(), sum(payload.nbytes for payload in payloads)
        self._waiting.append(place)
        try:
            while self._waiting[0] is not place or not self._has_room(wanted_bytes):
                yield
        finally:
            self._waiting.remove(place)
        counts = [len(payload) for payload in payloads]
        summed = SummedOnDevice(counts, self._room_for_sums(counts), payloads)
        kernels, parts = self._groups.kernels[group], [(_NO_IDS, payload) for payload in payloads]

        def brought() -> None:
            rows, copies = _side_by_side(parts, self._device.torch_device)
            _copy(copies)
            summed.host.copy_(kernels.sums_of_rows(rows), non_blocking=True)
            summed.scratch = rows

        try:
            summed.fence = self._queued(self._beside, brought, READY)
        except torch.OutOfMemoryError:
            return SummedByHost(READY, payloads)
        self._brought.add(summed)
        return summed

    def sums(self, group: int, block_ids: Sequence[BlockIds], fence: Fence) -> Summed:
        """Where nothing is to be waited for, these wait for no gather either, which may wait for a step."""
        stream = self._beside if fence.done() else self._out
        kernels, ids = self._groups.kernels[group], self._groups.ids(group, *block_ids)
        counts = [len(some) for some in block_ids]
        summed = SummedOnDevice(counts, self._room_for_sums(counts))

        def sum_blocks() -> None:
            summed.host.copy_(kernels.sums(self._groups.upload(ids)), non_blocking=True)

        summed.fence = self._queued(stream, sum_blocks, fence)
        return summed

    def clear(self, group: int, block_ids: BlockIds, fence: Fence) -> Fence:
        kernels, ids = self._groups.kernels[group], self._groups.ids(group, block_ids)

        def cleared() -> None:
            row = torch.zeros(self._groups.block_bytes[group], dtype=torch.uint8, device=self._device.torch_device)
            kernels.scatter(self._groups.upload(ids), row.expand(len(ids), -1))

        return self._queued(self._in, cleared, fence)

    # -- slots on the device ----------------------------------------------------------------------------------------

    def finish_images(self, headers: Pages, slots: Sequence[torch.Tensor], clear: Sequence[Sequence[slice]]) -> Fence:
        """Put a row of ``headers`` at the begin of each slot on the device, and zero the slot's byte ranges ``clear``,
        which lie behind its header.

        The gathers into the slots are done: their sums are in the headers. With this fence the images are complete.
        """
        cleared = [slot[part] for slot, parts in zip(slots, clear, strict=True) for part in parts]
        pages = page_locked(headers.size, torch.uint8, self._device).view(headers.shape)
        pages.numpy()[:] = headers

        def finished() -> None:
            for slot in slots:
                keep(slot)
            _copy([(slot[:HEADER_BYTES], page) for slot, page in zip(slots, self._groups.upload(pages), strict=True)])
            if cleared:
                torch._foreach_zero_(cleared)

        return self._queued(self._beside, finished, READY)

    def inspect(
        self, group: int, slots: Sequence[torch.Tensor], rows: Sequence[torch.Tensor]
    ) -> tuple[Pages, SummedOnDevice]:
        """Bring the header pages of slots on the device that were read, and the checksums of ``rows``, if any.

        The mover is done with the slots. The pages have come when the sums are done.
        """
        for each in rows:
            self._groups.check_width(group, each.shape[1])
        pages = page_locked(len(slots) * HEADER_BYTES, torch.uint8, self._device).view(-1, HEADER_BYTES)
        kernels, device = self._groups.kernels[group], self._device.torch_device
        counts = [len(each) for each in rows]
        summed = SummedOnDevice(counts, self._room_for_sums(counts))

        def inspected() -> None:
            together, copies = _side_by_side([(_NO_IDS, slot[:HEADER_BYTES].view(1, -1)) for slot in slots], device)
            _copy(copies)
            pages.copy_(together, non_blocking=True)
            if rows:
                together, copies = _side_by_side([(_NO_IDS, each) for each in rows], device)
                _copy(copies)
                summed.host.copy_(kernels.sums_of_rows(together), non_blocking=True)

        summed.fence = self._queued(self._beside, inspected, READY)
        return pages.numpy(), summed

    # -- queueing ---------------------------------------------------------------------------------------------------

    def _in_turns(self, stream: Stream, work: _Work, group: int, parts: Sources, fence: Fence) -> Fence:
        """Queue turn after turn, each a piece of work of its own: its scratch is free again when the next one asks.
        Raises LayoutError for numbers that do not fit: kernels reckon with addresses.
        """
        for block_ids, rows in parts:
            self._groups.check_width(group, _tensor_or_array(rows).shape[1])
            if len(rows) != len(block_ids):
                raise LayoutError(f"{len(rows)} rows for {len(block_ids)} blocks")
        turns = [(turn, self._groups.ids(group, *(block_ids for block_ids, _ in turn))) for turn in _turns(parts)]
        kernels = self._groups.kernels[group]

        def one(turn: Sources, ids: torch.Tensor) -> None:
            work(kernels, self._groups.upload(ids), turn)

        with taken_back(stream):  # what is queued already must not land in slots or blocks that are given up
            stream.wait(fence)
            for turn, ids in turns:
                stream.run(partial(one, turn, ids))
            return stream.record()

    def _queued(self, stream: Stream, work: Callable[[], None], fence: Fence) -> Fence:
        with taken_back(stream):
            stream.wait(fence)
            stream.run(work)
            return stream.record()

    def _has_room(self, wanted_bytes: int) -> bool:
        taken_bytes = sum(other.bytes for other in self._brought)
        return not taken_bytes or taken_bytes + wanted_bytes <= BROUGHT_BYTES

    def _room_for_sums(self, counts: Sequence[int]) -> torch.Tensor:
        return page_locked(sum(counts), torch.int64, self._device)


_NO_IDS: BlockIds = np.empty(0, dtype=np.int32)


def page_locked(count: int, dtype: torch.dtype, device: Device) -> torch.Tensor:
    """Return host memory for copies to and from ``device``: from other memory, or to it, they would make us wait."""
    return torch.empty(count, dtype=dtype, pin_memory=device.page_locks)


def keep(memory: torch.Tensor) -> None:
    """Within work on a stream: ``memory`` goes back to the allocator only after that work, though it is let go now."""
    if memory.is_cuda:
        memory.record_stream(torch.cuda.current_stream(memory.device))


@contextmanager
def taken_back(stream: Stream) -> Iterator[None]:
    """When an exception comes out, nothing that was queued on ``stream`` touches anything any more."""
    try:
        yield
    except BaseException:
        stream.synchronize()
        raise


def _turns(parts: Sources) -> list[Sources]:
    """Deal chunks out so that each turn fits ``SCRATCH_BYTES``, a larger chunk alone."""
    turns: list[list[tuple[BlockIds, Source]]] = []
    room_bytes = 0
    for part in parts:
        size_bytes = _tensor_or_array(part[1]).nbytes
        room_bytes -= size_bytes
        if not turns or room_bytes < 0:
            turns.append([])
            room_bytes = SCRATCH_BYTES - size_bytes
        turns[-1].append(part)
    return [*turns]


def _tensor_or_array(rows: Source) -> Payload | torch.Tensor:
    return rows.tensor if isinstance(rows, Brought) else rows


# Within work on a stream.


def _gather(kernels: TorchKernels, ids: torch.Tensor, turn: Sources) -> None:
    rows, copies = _side_by_side(turn, ids.device)
    kernels.gather(ids, rows)
    _copy([(slot, row) for row, slot in copies])


def _scatter(kernels: TorchKernels, ids: torch.Tensor, turn: Sources) -> None:
    rows, copies = _side_by_side(turn, ids.device)
    _copy(copies)
    kernels.scatter(ids, rows)


def _side_by_side(turn: Sources, device: torch.device) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Return rows on the device for all chunks, and the copies that fill them: (rows, slot). Those of a single chunk on
    the device need none.
    """
    sources = [_tensor_or_array(rows) for _, rows in turn]
    for source in sources:
        if isinstance(source, torch.Tensor):
            keep(source)
    if len(sources) == 1 and isinstance(sources[0], torch.Tensor):
        return sources[0], []
    count, width = sum(map(len, sources)), sources[0].shape[1]
    scratch = torch.empty((count, width), dtype=torch.uint8, device=device)
    copies, begin = [], 0
    for source in sources:
        rows = scratch[begin : begin + len(source)]
        begin += len(source)
        copies += [(rows, source)] if isinstance(source, torch.Tensor) else _over_the_bus(rows, source)
    return scratch, copies


def _over_the_bus(rows: torch.Tensor, payload: Payload) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The copies between rows and a payload, as bytes: one, unless the payload crosses from one page-locked piece into
    the next: nothing promises that CUDA takes a copy over two registrations.
    """
    flat, host = rows.view(-1), torch.from_numpy(payload.reshape(-1))
    copies, begin = [], 0
    while begin < len(host):
        end = min(len(host), begin + PIN_PIECE_BYTES - (payload.ctypes.data + begin) % PIN_PIECE_BYTES)
        copies.append((flat[begin:end], host[begin:end]))
        begin = end
    return copies


def _copy(copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy (target, source) pairs: those within the device by one call."""
    within = [(target, source) for target, source in copies if target.device == source.device]
    if within:
        targets, sources = (list(column) for column in zip(*within, strict=True))
        torch._foreach_copy_(targets, sources, non_blocking=True)
    for target, source in copies:
        if target.device != source.device:
            target.copy_(source, non_blocking=True)
