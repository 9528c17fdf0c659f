"""Staging slots: page-aligned host memory, allocated and registered once, in which a chunk lies as it lies in its file.

Threading: used by the pump alone after construction. Ownership: a slot belongs to whoever acquired it until it is
released; a slot whose memory a mover may still touch is retired instead and never handed out again.
"""

from __future__ import annotations

import logging
import mmap
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from nixl_offload.movers.base import MemoryRegion
from nixl_offload.types import PAGE_BYTES, align_up

logger = logging.getLogger(__name__)

MIN_SLOTS = 2
"""One that stores may hold while another is left for a load."""


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """``memory`` is the slot's bytes, shape (slot_bytes,); ``offset_bytes`` is its place in the pool's region."""

    index: int
    offset_bytes: int
    memory: npt.NDArray[np.uint8]


class StagingPool:
    """Equal slots over one region. The memory lives as long as any reference to the pool or a slot does."""

    def __init__(self, *, slot_bytes: int, budget_bytes: int, pinned: bool = False) -> None:
        """Allocate as many slots as ``budget_bytes`` holds, at least ``MIN_SLOTS`` (then a warning says so).

        ``pinned`` asks torch for page-locked memory, which CUDA copies need to be asynchronous.
        """
        self.slot_bytes = align_up(slot_bytes)
        self.slots_total = budget_bytes // self.slot_bytes
        if self.slots_total < MIN_SLOTS:
            logger.warning(
                "staging_bytes=%d holds fewer than %d chunks of %d bytes; using %d bytes",
                budget_bytes,
                MIN_SLOTS,
                self.slot_bytes,
                MIN_SLOTS * self.slot_bytes,
            )
            self.slots_total = MIN_SLOTS
        length_bytes = self.slots_total * self.slot_bytes
        self._memory = _allocate(length_bytes, pinned=pinned)
        self.region = MemoryRegion(self._memory.ctypes.data, length_bytes)
        self._free = list(range(self.slots_total - 1, -1, -1))
        self._retired = 0

    @property
    def free(self) -> int:
        """Slots that can be acquired now."""
        return len(self._free)

    @property
    def usable(self) -> int:
        """Slots that are not retired; 0 means that nothing can be staged any more."""
        return self.slots_total - self._retired

    def acquire(self) -> Slot | None:
        """Take a slot, or None if all are in use. Its bytes are whatever was there before."""
        if not self._free:
            return None
        index = self._free.pop()
        start = index * self.slot_bytes
        return Slot(index, start, self._memory[start : start + self.slot_bytes])

    def release(self, slot: Slot) -> None:
        """Give a slot back. Nothing may touch its memory any more. Raises RuntimeError if it is not out."""
        if slot.index in self._free:
            raise RuntimeError(f"staging slot {slot.index} was released twice")
        self._free.append(slot.index)

    def retire(self, slot: Slot) -> None:
        """Never hand this slot out again: something may still write to it."""
        self._retired += 1
        logger.error(
            "a failed transfer may still touch staging slot %d; retired, %d of %d left",
            slot.index,
            self.usable,
            self.slots_total,
        )


def _allocate(length_bytes: int, *, pinned: bool) -> npt.NDArray[np.uint8]:
    """Return page-aligned memory of shape (length_bytes,)."""
    if not pinned:
        area = mmap.mmap(-1, length_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return np.frombuffer(area, dtype=np.uint8)
    tensor = torch.empty(length_bytes + PAGE_BYTES, dtype=torch.uint8, pin_memory=True)
    start = -tensor.data_ptr() % PAGE_BYTES
    memory: npt.NDArray[np.uint8] = tensor.numpy()[start : start + length_bytes]
    return memory
