"""Staging slots: page-aligned memory of the host or of a device, allocated and registered once. A slot holds a chunk in
the layout of its file.

Threading: a pool is used by the pump alone after construction. Ownership: a slot belongs to its acquirer until it is
released; a slot whose memory a mover may still touch is retired instead and never handed out again.
"""

from __future__ import annotations

import logging
import mmap
import time
from dataclasses import dataclass
from typing import Final, Generic, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from nixl_offload.engine.streams import Device
from nixl_offload.errors import MoverError
from nixl_offload.movers.base import MemoryId, MemoryRegion
from nixl_offload.types import PAGE_BYTES, align_up
from nixl_offload.units import format_size

logger = logging.getLogger(__name__)

Staging = Literal["host", "device"]
"""Where chunks that do not go direct are packed."""

MIN_SLOTS: Final = 2
"""One for a store and one for a load."""


MemoryT = TypeVar("MemoryT", npt.NDArray[np.uint8], torch.Tensor)


@dataclass(slots=True, eq=False)
class Slot(Generic[MemoryT]):
    """A piece of ``region``, all memory of its pool, in bytes. Device memory is touched by a device's streams and by
    movers alone.
    """

    index: int
    offset_bytes: int
    region: MemoryT
    slot_bytes: int

    @property
    def memory(self) -> MemoryT:
        """The slot's bytes, of shape (slot_bytes,)."""
        return self.region[self.offset_bytes : self.offset_bytes + self.slot_bytes]


HostSlot = Slot[npt.NDArray[np.uint8]]


class SlotPool(Generic[MemoryT]):
    """Equal slots over one region. The memory lives as long as any reference to the pool or a slot does."""

    memory: MemoryId | None = None
    """The mover's id of the region."""

    def __init__(self, region: MemoryRegion, memory: MemoryT, slot_bytes: int) -> None:
        """``memory``: all of ``region``, which is cut into slots."""
        self.region = region
        self.slot_bytes = slot_bytes
        self.slots_total = region.length_bytes // slot_bytes
        self._free: dict[int, Slot[MemoryT]] = {}
        for index in reversed(range(self.slots_total)):
            self._free[index] = Slot(index, index * slot_bytes, memory, slot_bytes)
        self._retired = 0

    @property
    def free(self) -> int:
        """Number of slots that can be acquired now."""
        return len(self._free)

    @property
    def usable(self) -> int:
        """Number of slots that are not retired; 0: nothing can be staged any more."""
        return self.slots_total - self._retired

    def acquire(self) -> Slot[MemoryT] | None:
        """Take a slot; None if all are in use. It still holds bytes of an earlier chunk."""
        return self._free.popitem()[1] if self._free else None

    def release(self, slot: Slot[MemoryT]) -> None:
        """Give a slot back. Nothing may touch its memory any more. Raises RuntimeError if it is free already."""
        if slot.index in self._free:
            raise RuntimeError(f"staging slot {slot.index} was released twice")
        self._free[slot.index] = slot

    def retire(self, slot: Slot[MemoryT]) -> None:
        """Never hand this slot out again: something may still write to it."""
        self._retired += 1
        logger.error(
            "a failed transfer may still touch staging slot %d; retired, %d of %d left",
            slot.index,
            self.usable,
            self.slots_total,
        )


def host_pool(*, slot_bytes: int, budget_bytes: int, page_locked: bool = False) -> SlotPool[npt.NDArray[np.uint8]]:
    """Return slots in host memory: as many as ``budget_bytes`` holds, and at least ``MIN_SLOTS``.

    ``page_locked``: needed for asynchronous copies to and from a device (``Device.page_locks``). Raises MoverError if
    the host does not have that much memory.
    """
    slot_bytes = align_up(slot_bytes)
    length_bytes = slot_bytes * _slots_total(budget_bytes, slot_bytes)
    memory: npt.NDArray[np.uint8]
    if page_locked:
        # torch rounds page-locked memory up to a power of two: one page more than that would double it.
        tensor = torch.empty(length_bytes, dtype=torch.uint8, pin_memory=True)
        if tensor.data_ptr() % PAGE_BYTES:
            tensor = torch.empty(length_bytes + PAGE_BYTES, dtype=torch.uint8, pin_memory=True)
        start = -tensor.data_ptr() % PAGE_BYTES
        memory = tensor.numpy()[start : start + length_bytes]
    else:
        try:
            area = mmap.mmap(-1, length_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            words = f"{format_size(length_bytes)} of host memory for staging: {error.strerror}; lower staging"
            raise MoverError(words) from error
        memory = np.frombuffer(area, dtype=np.uint8)
    return SlotPool(MemoryRegion(memory.ctypes.data, length_bytes), memory, slot_bytes)


def device_pool(*, slot_bytes: int, budget_bytes: int, device: Device) -> SlotPool[torch.Tensor]:
    """Return slots in the memory of ``device``, counted as for ``host_pool``.

    Waits until the device has done the work that the caller queued, since movers do not wait for streams. Raises
    MoverError if the device has no room.
    """
    slot_bytes = align_up(slot_bytes)
    slots_total = _slots_total(budget_bytes, slot_bytes)
    length_bytes = slots_total * slot_bytes
    try:
        memory = torch.empty(length_bytes + PAGE_BYTES, dtype=torch.uint8, device=device.torch_device)
    except torch.OutOfMemoryError:
        raise MoverError(
            f"{device.torch_device} has no room for {slots_total} staging slots of {format_size(slot_bytes)}: lower "
            "gpu_memory_utilization or blocks_per_chunk, or let the tier stage in host memory"
        ) from None
    queued = device.compute_fence()  # that work may still touch this memory
    while not queued.done():
        time.sleep(0.0005)
    memory = memory[-memory.data_ptr() % PAGE_BYTES :][:length_bytes]
    return SlotPool(MemoryRegion(memory.data_ptr(), length_bytes, device.kind, device.number), memory, slot_bytes)


def _slots_total(budget_bytes: int, slot_bytes: int) -> int:
    if budget_bytes >= MIN_SLOTS * slot_bytes:
        return budget_bytes // slot_bytes
    logger.warning(
        "staging_bytes=%d holds fewer than %d chunks of %d bytes; using %d bytes",
        budget_bytes,
        MIN_SLOTS,
        slot_bytes,
        MIN_SLOTS * slot_bytes,
    )
    return MIN_SLOTS
