"""The mover that a rank has open for a tier, the transfer plan that was measured, and what an engine is told of both.

Threading: on the thread that opens the engine. Ownership: ``OpenedMover`` owns its mover until an engine has it.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass
from typing import Final

import torch

from nixl_offload.chunk.layout import KVLayout
from nixl_offload.config import DirectoryConfig
from nixl_offload.engine.autotune import TransferPlan, open_file_mover, plan_transfers, remove_leftovers
from nixl_offload.engine.bus_packer import DEVICE_BYTES
from nixl_offload.engine.engine_memory import Staging
from nixl_offload.engine.staging import MIN_SLOTS
from nixl_offload.engine.streams import Device
from nixl_offload.errors import MoverUnavailableError
from nixl_offload.movers.base import MemoryKind, Mover
from nixl_offload.movers.paired import PairedMover
from nixl_offload.movers.select import open_mover
from nixl_offload.units import format_size

logger = logging.getLogger(__name__)

REGISTERS_HOST_WITH_CUFILE: Final = frozenset({"gds_mt"})
"""Movers. KvikIO registers device memory only, and NIXL's POSIX and OBJ know nothing of cuFile."""
SPARED_SHARE: Final = 0.25
"""Of the device memory that the model has not claimed. The rest is for CUDA graphs, libraries and neighbours."""


@dataclass(frozen=True, slots=True)
class OpenedMover:
    """What is open, and known, of a tier before its engine is."""

    mover: Mover | None = None
    """None: a slab's is opened with the slab."""
    plan: TransferPlan | None = None
    """None where nothing was compared."""

    def close(self) -> None:
        """Close the mover, before it has moved a chunk."""
        if self.mover is not None:
            with contextlib.suppress(Exception):
                self.mover.close()


def staging_of(opened: OpenedMover, mover: Mover, device: Device) -> Staging:
    """Return where chunks are packed for ``mover``: by the plan, where there is one."""
    if opened.plan is not None:
        return opened.plan.side
    return "device" if device.kind in mover.memory_kinds else "host"


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


def plan_tier(
    tier: DirectoryConfig, device: Device, layout: KVLayout, *, host_because: str = ""
) -> TransferPlan | None:
    """Compare movers in the tier's directory, which must be there. None: nothing was compared.

    ``host_because``: why chunks had better go through host memory; then they do, unless the config names a mover.
    """
    if host_because and device.is_accelerator and tier.mover == "auto":
        return TransferPlan("posix", "host")
    return plan_transfers(tier, tier.path, device, max(layout.slot_bytes(group) for group in range(len(layout.groups))))


def open_planned(tier: DirectoryConfig, directory: str, device: Device, plan: TransferPlan | None) -> OpenedMover:
    """Open the mover of ``plan``, or of the tier where there is no plan or its mover opens no more.

    Removes what processes that were killed while they did so have left in ``directory``. Raises MoverUnavailableError.
    """
    remove_leftovers(directory)
    if plan is not None:
        try:
            return OpenedMover(_open(plan.mover, tier, directory, device), plan)
        except MoverUnavailableError as error:
            if plan.mover == tier.mover:
                raise
            logger.warning("%s was found best and opens no more; using another mover: %s", plan.mover, error)
    return OpenedMover(_open(tier.mover, tier, directory, device))


def _open(name: str, tier: DirectoryConfig, directory: str, device: Device) -> Mover:
    """Open a mover by name, with another for host memory beside it where it would register that with cuFile, too.

    The memory tier may have a hundred GB, and gains nothing by that. Raises MoverUnavailableError.
    """
    mover = open_file_mover(name, tier, directory, device)
    if not device.is_accelerator or mover.name not in REGISTERS_HOST_WITH_CUFILE:
        return mover
    try:
        host = open_mover("auto", MemoryKind.DRAM, directory).mover
    except BaseException:
        mover.close()
        raise
    logger.info("%s: device memory goes by %s, host memory by %s", directory, mover.name, host.name)
    return PairedMover(mover, host)


def spared_bytes(device: Device, claimed_share: float, packers: int) -> int | None:
    """Return what staging may take of the device's memory, over all tiers; None: not to be told, or all of it.

    ``packers``: so many have scratch there, one for each engine. ``claimed_share``: what the model has claimed of the
    whole (vLLM's ``gpu_memory_utilization``). Much of that is free at start and belongs to activations all the same, so
    what is free says nothing.
    """
    if device.torch_device.type != "cuda":
        return None
    _, total_bytes = torch.cuda.mem_get_info(device.torch_device)
    spared = int(total_bytes * max(0.0, 1.0 - claimed_share) * SPARED_SHARE)
    return max(0, spared - packers * DEVICE_BYTES)
