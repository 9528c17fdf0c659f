"""The engine's own memory: staging slots on the host or on the device, made when the first group needs them, and header
pages.

Threading: made at start; afterwards the pump's.
"""

from __future__ import annotations

from typing import Literal, Protocol

from nixl_offload.engine.image import TransferPath
from nixl_offload.engine.slot_headers import SlotHeaders
from nixl_offload.engine.staging import DeviceStagingPool, Slot, StagingPool
from nixl_offload.engine.streams import Device
from nixl_offload.movers.base import MemoryRegion
from nixl_offload.types import PAGE_BYTES

Staging = Literal["host", "device"]
"""Where chunks are packed that do not go direct."""


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
