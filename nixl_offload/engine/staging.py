"""Staging slots: page-aligned memory of the host or of a device, allocated and registered once, in which a chunk lies
as it lies in its file.

Threading: used by the pump alone after construction. Ownership: a slot belongs to its acquirer until it is
released; a slot whose memory a mover may still touch is retired instead and never handed out again.
"""

from __future__ import annotations

import logging
import mmap
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

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
"""Where chunks are packed that do not go direct."""

MIN_SLOTS = 2
"""One that stores may hold while another is left for a load."""
DEVICE_SHARE = 1 / 4
"""Of the device memory that is free at start, staging takes at most so much: graphs and kernels need some later."""


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """``memory`` is the slot's bytes, shape (slot_bytes,); ``offset_bytes`` is its place in the pool's region."""

    index: int
    offset_bytes: int
    memory: npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class DeviceSlot:
    """As Slot, in device memory: only a device's streams and movers may touch ``memory``, uint8 (slot_bytes,)."""

    index: int
    offset_bytes: int
    memory: torch.Tensor


SlotT = TypeVar("SlotT", Slot, DeviceSlot)


class SlotPool(Generic[SlotT]):
    """Equal slots over one region. The memory lives as long as any reference to the pool or a slot does."""

    region: MemoryRegion
    memory: MemoryId | None = None
    """What the mover that was given the region calls it."""

    def __init__(self, slot_bytes: int, slots_total: int) -> None:
        self.slot_bytes = slot_bytes
        self.slots_total = slots_total
        self._free = list(range(slots_total - 1, -1, -1))
        self._is_free = bytearray(b"\1" * slots_total)
        self._slots: list[SlotT | None] = [None] * slots_total
        """Those that were handed out before."""
        self._retired = 0

    @property
    def free(self) -> int:
        """Slots that can be acquired now."""
        return len(self._free)

    @property
    def usable(self) -> int:
        """Slots that are not retired; 0 means that nothing can be staged any more."""
        return self.slots_total - self._retired

    def acquire(self) -> SlotT | None:
        """Take a slot, or None if all are in use. Its bytes are those of an earlier chunk."""
        if not self._free:
            return None
        index = self._free.pop()
        self._is_free[index] = False
        slot = self._slots[index]
        if slot is None:
            slot = self._slots[index] = self._slot(index)
        return slot

    def release(self, slot: SlotT) -> None:
        """Give a slot back. Nothing may touch its memory any more. Raises RuntimeError if it is not out."""
        if self._is_free[slot.index]:
            raise RuntimeError(f"staging slot {slot.index} was released twice")
        self._is_free[slot.index] = True
        self._free.append(slot.index)

    def retire(self, slot: SlotT) -> None:
        """Never hand this slot out again: something may still write to it."""
        self._retired += 1
        logger.error(
            "a failed transfer may still touch staging slot %d; retired, %d of %d left",
            slot.index,
            self.usable,
            self.slots_total,
        )

    def _slot(self, index: int) -> SlotT:
        raise NotImplementedError


class StagingPool(SlotPool[Slot]):
    """Slots in host memory."""

    def __init__(self, *, slot_bytes: int, budget_bytes: int, pinned: bool = False) -> None:
        """Allocate as many slots as ``budget_bytes`` holds, at least ``MIN_SLOTS`` (then a warning says so).

        ``pinned`` asks torch for page-locked memory, which copies to and from a device need to be asynchronous: see
        ``Device.page_locks``. Raises MoverError when the host does not have so much.
        """
        slot_bytes = align_up(slot_bytes)
        slots_total = budget_bytes // slot_bytes
        if slots_total < MIN_SLOTS:
            logger.warning(
                "staging_bytes=%d holds fewer than %d chunks of %d bytes; using %d bytes",
                budget_bytes,
                MIN_SLOTS,
                slot_bytes,
                MIN_SLOTS * slot_bytes,
            )
            slots_total = MIN_SLOTS
        super().__init__(slot_bytes, slots_total)
        self._memory = _allocate(slots_total * slot_bytes, pinned=pinned)
        self.region = MemoryRegion(self._memory.ctypes.data, len(self._memory))

    def _slot(self, index: int) -> Slot:
        start = index * self.slot_bytes
        return Slot(index, start, self._memory[start : start + self.slot_bytes])


class DeviceStagingPool(SlotPool[DeviceSlot]):
    """Slots in the memory of a device."""

    def __init__(self, *, slot_bytes: int, budget_bytes: int, device: Device) -> None:
        """Allocate as many slots as ``budget_bytes`` holds, of what is free on the device at most ``DEVICE_SHARE``, and
        never fewer than ``MIN_SLOTS``. A warning says so when they are others than asked for.

        Waits until the device has done what the caller queued, for movers follow no stream. Raises MoverError when
        the device has no room: a model that finds no memory any more ends the engine, and chunks can go through host
        memory.
        """
        slot_bytes = align_up(slot_bytes)
        wanted, free_bytes = budget_bytes // slot_bytes, _free_bytes(device)
        spared = wanted if free_bytes is None else int(free_bytes * DEVICE_SHARE) // slot_bytes
        slots_total = max(MIN_SLOTS, min(wanted, spared))
        has_room = free_bytes is None or spared >= MIN_SLOTS
        memory = _allocate_on(device, slots_total * slot_bytes) if has_room else None
        free = (
            "" if free_bytes is None else f"; {format_size(free_bytes)} are free, {DEVICE_SHARE:.0%} of it may be taken"
        )
        if memory is None:
            wanted_words = f"{slots_total} staging slots of {format_size(slot_bytes)}{free}"
            raise MoverError(
                f"{device.torch_device} has no room for {wanted_words}: lower gpu_memory_utilization or "
                "blocks_per_chunk, or let the tier stage in host memory"
            )
        if slots_total != wanted:
            logger.warning(
                "staging_bytes=%d, in device memory: %d slots of %d bytes are used instead of %d%s",
                budget_bytes,
                slots_total,
                slot_bytes,
                wanted,
                free,
            )
        super().__init__(slot_bytes, slots_total)
        self._memory = memory
        self.region = MemoryRegion(memory.data_ptr(), len(memory), device.kind, device.number)

    def _slot(self, index: int) -> DeviceSlot:
        start = index * self.slot_bytes
        return DeviceSlot(index, start, self._memory[start : start + self.slot_bytes])


def _allocate(length_bytes: int, *, pinned: bool) -> npt.NDArray[np.uint8]:
    """Return page-aligned memory of shape (length_bytes,). Raises MoverError."""
    if not pinned:
        try:
            area = mmap.mmap(-1, length_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            words = f"{format_size(length_bytes)} of host memory for staging: {error.strerror}; lower staging"
            raise MoverError(words) from error
        return np.frombuffer(area, dtype=np.uint8)
    # torch rounds page-locked memory up to a power of two: a page more than one could take twice the staging.
    tensor = torch.empty(length_bytes, dtype=torch.uint8, pin_memory=True)
    if tensor.data_ptr() % PAGE_BYTES:
        tensor = torch.empty(length_bytes + PAGE_BYTES, dtype=torch.uint8, pin_memory=True)
    start = -tensor.data_ptr() % PAGE_BYTES
    memory: npt.NDArray[np.uint8] = tensor.numpy()[start : start + length_bytes]
    return memory


def _allocate_on(device: Device, length_bytes: int) -> torch.Tensor | None:
    """Return page-aligned memory of shape (length_bytes,) that nothing touches any more; None: there is not so much."""
    try:
        memory = torch.empty(length_bytes + PAGE_BYTES, dtype=torch.uint8, device=device.torch_device)
    except torch.OutOfMemoryError:
        return None
    stream = device.streams.new()
    stream.wait(device.streams.compute_fence())  # what had this memory before may still be on its way there
    stream.synchronize()
    start = -memory.data_ptr() % PAGE_BYTES
    return memory[start : start + length_bytes]


def _free_bytes(device: Device) -> int | None:
    """What is free on the device now; None where that is not known."""
    if device.torch_device.type != "cuda":
        return None
    free_bytes, _ = torch.cuda.mem_get_info(device.torch_device)
    return free_bytes
