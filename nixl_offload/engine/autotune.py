"""Chooses the mover between a device and the files of a directory.

No rule predicts the fastest. GPUDirect Storage is the shortest path if it is real, and slower than page-locked host
memory if cuFile copies through its own buffers. So at start each usable mover writes some slots to a scratch file and
reads them. Copies over the bus, which movers of host memory need as well, are several times as fast as files.

Threading: on the thread that opens the tier. Ranks that start together measure together.
Ownership: movers, memory and file are closed at the end. If a transfer does not end, its mover and memory are never
freed.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from typing import Any, Final, NamedTuple, cast

import numpy as np
import torch

from nixl_offload.chunk.layout import KVLayout
from nixl_offload.config import DirectoryConfig
from nixl_offload.engine.pump import leak
from nixl_offload.engine.staging import MIN_SLOTS, SlotPool, Staging, device_pool, host_pool
from nixl_offload.engine.streams import Device
from nixl_offload.errors import MoverError, MoverUnavailableError, NixlOffloadError
from nixl_offload.hardware.machine import unbound
from nixl_offload.keep import keep_forever
from nixl_offload.movers.base import LateError, Mover, Op, move, open_file
from nixl_offload.movers.select import SCRATCH_BYTES, MoverChoice, open_mover
from nixl_offload.types import PAGE_BYTES, align_up

logger = logging.getLogger(__name__)

BUDGET_S: Final = 0.7
"""Time to measure one mover. Opening it comes on top: mostly the first use of CUDA's libraries."""
TRANSFER_LIMIT_S: Final = 30.0
"""Storage that has not answered after this time counts as hung."""
MARGIN: Final = 0.1
"""Movers this close to the fastest count as equal: a second of measuring cannot tell them apart."""
FREE_SHARE: Final = 16
"""The scratch file takes at most a sixteenth of the filesystem's free space."""
TRIAL_BYTES: Final = 128 << 20
"""Most bytes of a trial's slots."""


class Speed(NamedTuple):
    """Measured speed of a mover."""

    read_bytes_s: float
    write_bytes_s: float

    @property
    def cost_s_byte(self) -> float:
        """Seconds per byte. Reads count twice: a request waits for a load, but not for a store."""
        return 2 / self.read_bytes_s + 1 / self.write_bytes_s


CANDIDATES: Final = ("gds_mt", "kvikio", "posix")
"""In order of preference: the first that is fast enough is used."""


@unbound()
def plan_tier(tier: DirectoryConfig, device: Device, layout: KVLayout, *, through_host: bool = False) -> str | None:
    """Compare movers in the tier's directory, which must exist, and log the figures. Returns the name of the best.

    Returns None if nothing was compared: without a device, if the config names a mover, or if no mover could be
    measured. Then the tier's mover is opened unmeasured. ``through_host``: chunks must go
    through host memory, so nothing is measured.
    """
    if tier.mover != "auto" or not device.is_accelerator:
        return None
    if through_host:
        return "posix"
    slot_bytes = max(layout.slot_bytes(group) for group in range(len(layout.groups)))
    speeds: dict[str, Speed] = {}
    figures = []
    for name in CANDIDATES:
        try:
            mover = open_file_mover(name, tier, tier.path, device)
            speed = measure(mover, tier.path, device, slot_bytes, direct_io=tier.direct_io)
        except Exception as error:  # noqa: BLE001 - libraries raise anything, and another mover may work
            text = str(error) if isinstance(error, NixlOffloadError | OSError) else repr(error)
            figures.append(f"{name}: {text.removeprefix(f'{name}: ')}")
        else:
            speeds[name] = speed
            figures.append(f"{name}: read {speed.read_bytes_s / 1e9:.3g}, write {speed.write_bytes_s / 1e9:.3g} GB/s")
    best = best_of(speeds)
    chosen = "no mover could be measured" if best is None else f"{best} is the fastest, or nearly so"
    logger.info("Files in %s: %s: %s", tier.path, chosen, "; ".join(figures))
    return best


def best_of(speeds: dict[str, Speed]) -> str | None:
    """Return the first mover within ``MARGIN`` of the cheapest; None without movers."""
    limit = (1 + MARGIN) * min((speed.cost_s_byte for speed in speeds.values()), default=0.0)
    return next((name for name, speed in speeds.items() if speed.cost_s_byte <= limit), None)


# Opening


def open_planned(tier: DirectoryConfig, directory: str, device: Device, planned: str | None) -> Mover:
    """Open the mover of this name. Without one, or if it no longer opens, open the tier's own.

    Raises MoverUnavailableError.
    """
    if planned is not None:
        try:
            return open_file_mover(planned, tier, directory, device)
        except MoverUnavailableError as error:
            logger.warning("%s was found best and opens no more; using another mover: %s", planned, error)
    return open_file_mover(tier.mover, tier, directory, device)


def staging_for(mover: Mover, device: Device) -> Staging:
    """Return where chunks are packed for a mover."""
    return "device" if device.kind in mover.memory_kinds else "host"


def open_file_mover(name: str, tier: DirectoryConfig, directory: str, device: Device) -> Mover:
    """Open a mover between ``device`` and files in ``directory`` with the tier's settings. ``name``: of a plan or of
    the tier. Raises MoverUnavailableError, and exceptions of third parties.
    """
    pool = scratch = None
    if device.is_accelerator and name not in ("posix", "copy"):
        pool = device_pool(slot_bytes=PAGE_BYTES, budget_bytes=SCRATCH_BYTES, device=device)
        scratch = pool.region
    all_well = False
    try:
        opened = open_mover(cast(MoverChoice, name), device.kind, directory, threads=tier.threads, scratch=scratch)
        all_well = all(probe.ok for probe in opened.report)
    finally:
        if not all_well:
            keep_forever(pool)  # a mover that failed its probe may still write there
    return opened.mover


# Measuring


def measure(
    mover: Mover,
    directory: str,
    device: Device,
    slot_bytes: int,
    *,
    direct_io: bool,
    budget_s: float = BUDGET_S,
    limit_s: float = TRANSFER_LIMIT_S,
) -> Speed:
    """Write slots to an unnamed scratch file, read them back, and return the speed.

    Closes the mover, unless it hangs. ``budget_s`` bounds the measuring, ``limit_s`` the wait for one transfer. Raises
    MoverError, OSError (no file can be created), and exceptions of libraries.
    """
    pool: SlotPool[Any] | None = None
    is_late = False
    try:
        slots, slot_bytes = _trial_size(directory, slot_bytes)
        pool = _noise(slots, slot_bytes, device, staging_for(mover, device))
        length_bytes = slots * slot_bytes
        with tempfile.TemporaryFile(buffering=0, dir=directory) as scratch:
            fd = scratch.fileno()
            region = mover.register_memory(pool.region)
            file = open_file(mover, f"/proc/self/fd/{fd}", length_bytes, direct_io=direct_io)

            def moved(count: int) -> Speed:
                """Write and read the first ``count`` slots."""
                begins = np.arange(count, dtype=np.int64) * slot_bytes
                extents = np.stack([begins, np.full_like(begins, slot_bytes)], axis=1)
                write_s = move(mover, lambda: mover.submit(Op.WRITE, region, extents, file, extents), limit_s)
                if not direct_io:  # the page cache would answer
                    os.fdatasync(fd)
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                read_s = move(mover, lambda: mover.submit(Op.READ, region, extents, file, extents), limit_s)
                return Speed(count * slot_bytes / read_s, count * slot_bytes / write_s)

            first = moved(1)  # warms up: buffers and threads are created on first use
            first_s = slot_bytes / first.read_bytes_s + slot_bytes / first.write_bytes_s
            return moved(max(1, min(slots, int(budget_s / first_s))))
    except Exception as error:
        is_late = isinstance(error, LateError)
        raise
    finally:
        try:
            if not is_late:
                mover.close()
        except Exception as error:  # noqa: BLE001 - the mover is not needed any more
            is_late = True
            logger.debug("%s does not close: %s", mover.name, error)
        if is_late:
            logger.warning("%s is left alone, with its memory and its file: it hung while it was measured", mover.name)
            leak((mover, pool))


def _trial_size(directory: str, slot_bytes: int) -> tuple[int, int]:
    """Return how many slots to move, and their size. Raises MoverError if the disk has no room for one."""
    slot_bytes = align_up(min(slot_bytes, TRIAL_BYTES))
    space = shutil.disk_usage(directory)
    free_bytes = space.free if space.total else TRIAL_BYTES * FREE_SHARE  # some filesystems say nothing
    slots = min(TRIAL_BYTES, free_bytes // FREE_SHARE) // slot_bytes
    if not slots:
        raise MoverError(f"the disk has {free_bytes >> 20} MiB left, too little to measure with")
    return slots, slot_bytes


def _noise(slots: int, slot_bytes: int, device: Device, side: Staging) -> SlotPool[Any]:
    """Return slots full of noise, since some filesystems compress. Raises MoverError."""
    budget_bytes = max(slots, MIN_SLOTS) * slot_bytes
    pool: SlotPool[Any]
    if side == "device":
        pool = device_pool(slot_bytes=slot_bytes, budget_bytes=budget_bytes, device=device)
    else:
        pool = host_pool(slot_bytes=slot_bytes, budget_bytes=budget_bytes, page_locked=device.page_locks)
    noise = torch.from_numpy(np.resize(np.frombuffer(os.urandom(1 << 20), dtype=np.uint8), slot_bytes))
    taken: list[Any] = [pool.acquire() for _ in range(pool.slots_total)]
    for slot in taken:
        torch.as_tensor(slot.memory).copy_(noise)
        pool.release(slot)
    return pool
