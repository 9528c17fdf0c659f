"""The engine's own memory: staging slots on the host or on the device, made when the first group needs them, and header
pages.

Threading: made at start; afterwards the pump's.
"""

from __future__ import annotations

import logging
from typing import Final, Protocol

import torch

from nixl_offload.chunk.layout import KVLayout
from nixl_offload.engine.bus_packer import DEVICE_BYTES
from nixl_offload.engine.image import TransferPath
from nixl_offload.engine.slot_headers import SlotHeaders
from nixl_offload.engine.staging import MIN_SLOTS, DeviceStagingPool, Slot, Staging, StagingPool
from nixl_offload.engine.streams import Device
from nixl_offload.movers.base import MemoryRegion
from nixl_offload.types import PAGE_BYTES
from nixl_offload.units import format_size

logger = logging.getLogger(__name__)

SPARED_SHARE: Final = 0.25
"""Of the device memory that the model has not claimed. The rest is for CUDA graphs, libraries and neighbours."""

HEADER_PAGES = 256
"""One for each chunk that may be in flight: see ``transfer_paths.link_paths``."""


class HostSlots(Protocol):
    """Host memory that is not the engine's: what it needs of ``host.HostSlab``."""

    region: MemoryRegion
    headers: SlotHeaders

    def slot(self, offset: int, slot_bytes: int) -> Slot:
        """Return a view of a slot. Raises LayoutError where there is none."""


class EngineMemory:
    """``staging`` and ``device`` are None as long as nothing is packed there; ``pages``: a header page for each chunk
    that may be in flight. ``host``: the slots that are named by ``Chunk.host_offset``.
    """

    def __init__(
        self,
        *,
        slot_bytes: int,
        budget_bytes: int,
        device: Device,
        packs_on_device: bool = False,
        host: HostSlots | None = None,
    ) -> None:
        """Allocate the header pages. ``budget_bytes`` holds for the staging of each kind that is needed."""
        self.packs_on_device = packs_on_device
        self.host = host
        self.staging: StagingPool | None = None
        self.device: DeviceStagingPool | None = None
        self.pages = StagingPool(
            slot_bytes=PAGE_BYTES, budget_bytes=PAGE_BYTES * HEADER_PAGES, pinned=device.page_locks
        )
        self._slot_bytes = slot_bytes
        self._budget_bytes = budget_bytes
        self._device = device

    def open_staging(self) -> StagingPool:
        """Return the staging slots in host memory, which are page-locked for an accelerator."""
        if self.staging is None:
            self.staging = StagingPool(
                slot_bytes=self._slot_bytes, budget_bytes=self._budget_bytes, pinned=self._device.page_locks
            )
        return self.staging

    def open_device(self) -> DeviceStagingPool:
        """Return the staging slots in device memory. Raises MoverError when the device has too little."""
        if self.device is None:
            self.device = DeviceStagingPool(
                slot_bytes=self._slot_bytes, budget_bytes=self._budget_bytes, device=self._device
            )
        return self.device

    def close_device(self) -> None:
        """Let go of staging on the device that no mover took."""
        self.device = None

    @property
    def packed(self) -> list[StagingPool | DeviceStagingPool]:
        """The pools that chunks are packed in."""
        return [pool for pool in (self.staging, self.device) if pool is not None]

    def pools_of(self, path: TransferPath) -> list[StagingPool | DeviceStagingPool]:
        """The pools that a chunk takes a slot of."""
        if path == "host":
            return [] if self.staging is None else [self.staging]
        return [self.pages] if path == "direct" or self.device is None else [self.device]


def share_staging(
    side: Staging, wanted_bytes: int, spared_bytes: int | None, sharers: int, layout: KVLayout
) -> tuple[Staging, int]:
    """Return where an engine packs chunks, and its share of the staging memory that ``sharers`` engines divide.

    Where the device can spare less than two chunks for each (``spared_bytes``; None: as much as is wanted), chunks
    go through host memory.
    """
    share_bytes = wanted_bytes // sharers
    if side == "host" or spared_bytes is None:
        return side, share_bytes
    least_bytes = MIN_SLOTS * max(layout.slot_bytes(group) for group in range(len(layout.groups)))
    spared_bytes //= sharers
    if spared_bytes >= least_bytes:
        return "device", min(share_bytes, spared_bytes)
    logger.warning(
        "Chunks go through host memory: the device can spare %s for a tier, and two chunks take %s. "
        "Lower gpu_memory_utilization or chunk_tokens.",
        format_size(spared_bytes),
        format_size(least_bytes),
    )
    return "host", share_bytes


def spared_bytes(device: Device, claimed_share: float, packers: int) -> int | None:
    """Return what staging may take of the device's memory, over all tiers; None: as much as is wanted.

    ``packers``: engines that have scratch there. ``claimed_share``: the part of the memory that the model has claimed
    (vLLM's ``gpu_memory_utilization``). What is free at start does not count: activations need it later.
    """
    if device.torch_device.type != "cuda":
        return None
    _, total_bytes = torch.cuda.mem_get_info(device.torch_device)
    spared = int(total_bytes * max(0.0, 1.0 - claimed_share) * SPARED_SHARE)
    return max(0, spared - packers * DEVICE_BYTES)
