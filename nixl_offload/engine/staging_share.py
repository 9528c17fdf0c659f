"""How much memory the staging of each tier may take, and on which side.

Threading: pure functions, at start.
"""

from __future__ import annotations

import logging
from typing import Final

import torch

from nixl_offload.chunk.layout import KVLayout
from nixl_offload.engine.device_packer import DEVICE_BYTES
from nixl_offload.engine.staging import MIN_SLOTS, Staging
from nixl_offload.engine.streams import Device
from nixl_offload.units import format_size

logger = logging.getLogger(__name__)

SPARED_SHARE: Final = 0.25
"""Of the device memory that the model has not claimed. The rest is for CUDA graphs, libraries and neighbours."""


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
