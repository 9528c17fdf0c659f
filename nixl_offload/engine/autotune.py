"""Which mover carries chunks between a device and the files of a directory, and where chunks are packed for it.

No rule knows the fastest: GPUDirect Storage is the shortest path where it is real, and slower than page-locked host
memory where cuFile copies through buffers of its own. So at start each mover that can run moves some slots to a scratch
file and back. Copies over the bus, which movers of host memory need as well, are several times as fast as files.

Threading: on the thread that opens the tier. Ranks that start together measure together.
Ownership: movers, memory and file are given up in the end. If a transfer does not end, its mover and memory are kept
for the life of the process.
"""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Callable
from typing import Final, NamedTuple, cast

import numpy as np
import torch

from nixl_offload.chunk.layout import KVLayout
from nixl_offload.config import DirectoryConfig
from nixl_offload.engine.link_engine import POLL_S
from nixl_offload.engine.pump import leak
from nixl_offload.engine.staging import Staging
from nixl_offload.engine.streams import Device
from nixl_offload.errors import MoverError, MoverUnavailableError, NixlOffloadError
from nixl_offload.hardware.cores import unbound
from nixl_offload.keep import keep_forever
from nixl_offload.movers.base import MemoryKind, MemoryRegion, Mover, Op, Transfer, TransferState, open_file
from nixl_offload.movers.select import SCRATCH_BYTES, MoverChoice, open_mover
from nixl_offload.types import PAGE_BYTES, align_up

logger = logging.getLogger(__name__)

BUDGET_S: Final = 0.7
"""For measuring one mover. Opening it takes more on top, mostly for the first use of CUDA's libraries."""
TRANSFER_LIMIT_S: Final = 30.0
"""Storage that has not answered by then hangs."""
MARGIN: Final = 0.1
"""Movers this close to the fastest count as equal: a second of measuring cannot tell them apart."""
FREE_SHARE: Final = 16
"""The scratch file takes at most a sixteenth of what the filesystem has left."""
TRIAL_BYTES: Final = 128 << 20
"""What the slots of a trial take together, at most."""


class TransferPlan(NamedTuple):
    """The mover to open, and where its slots lie."""

    mover: str
    side: Staging


class Speed(NamedTuple):
    """In bytes per second."""

    read_bytes_s: float
    write_bytes_s: float

    @property
    def cost_s_byte(self) -> float:
        """Seconds per byte. Reads count twice: a request waits for a load, but not for a store."""
        return 2 / self.read_bytes_s + 1 / self.write_bytes_s


CANDIDATES: Final = (TransferPlan("gds_mt", "device"), TransferPlan("kvikio", "device"), TransferPlan("posix", "host"))
"""The first that is fast enough is taken."""


@unbound()
def plan_tier(
    tier: DirectoryConfig, device: Device, layout: KVLayout, *, host_because: str = ""
) -> TransferPlan | None:
    """Compare movers in the tier's directory, which must exist, and log the figures.

    Returns None if nothing was compared; the tier's mover is then opened unmeasured. This happens on the host, if the
    config names a mover, or if no mover could be measured. ``host_because``: why chunks must go through host memory.
    If it is given, they do, and nothing is measured.
    """
    if tier.mover != "auto" or not device.is_accelerator:
        return None
    if host_because:
        return TransferPlan("posix", "host")
    slot_bytes = max(layout.slot_bytes(group) for group in range(len(layout.groups)))
    speeds: dict[TransferPlan, Speed] = {}
    figures = []
    for plan in CANDIDATES:
        try:
            mover = open_file_mover(plan.mover, tier, tier.path, device)
            speed = measure(mover, plan.side, tier.path, device, slot_bytes, direct_io=tier.direct_io)
        except Exception as error:  # noqa: BLE001 - a library raises what it likes, and another mover may do
            text = str(error) if isinstance(error, NixlOffloadError | OSError) else repr(error)
            figures.append(f"{plan.mover}: {text.removeprefix(f'{plan.mover}: ')}")
        else:
            speeds[plan] = speed
            figures.append(
                f"{plan.mover}: read {speed.read_bytes_s / 1e9:.3g}, write {speed.write_bytes_s / 1e9:.3g} GB/s"
            )
    best = best_of(speeds)
    chosen = "no mover could be measured" if best is None else f"{best.mover} is the fastest, or nearly so"
    logger.info("Files in %s: %s: %s", tier.path, chosen, "; ".join(figures))
    return best


def best_of(speeds: dict[TransferPlan, Speed]) -> TransferPlan | None:
    """Return the first that is within ``MARGIN`` of the cheapest; None: there is none."""
    limit = (1 + MARGIN) * min((speed.cost_s_byte for speed in speeds.values()), default=0.0)
    return next((plan for plan, speed in speeds.items() if speed.cost_s_byte <= limit), None)


# Opening


def open_planned(
    tier: DirectoryConfig, directory: str, device: Device, plan: TransferPlan | None
) -> tuple[Mover, Staging]:
    """Open the mover of ``plan``, or the tier's own where there is no plan or its mover opens no more.

    Returns where chunks are packed for it, too. Raises MoverUnavailableError.
    """
    if plan is not None:
        try:
            return open_file_mover(plan.mover, tier, directory, device), plan.side
        except MoverUnavailableError as error:
            logger.warning("%s was found best and opens no more; using another mover: %s", plan.mover, error)
    mover = open_file_mover(tier.mover, tier, directory, device)
    return mover, staging_for(mover, device)


def staging_for(mover: Mover, device: Device) -> Staging:
    """Return where chunks are packed for a mover that was not measured."""
    return "device" if device.kind in mover.memory_kinds else "host"


def open_file_mover(name: str, tier: DirectoryConfig, directory: str, device: Device) -> Mover:
    """Open a mover between ``device`` and files in ``directory`` with the tier's settings. ``name``: a plan's, or what
    the tier says. Raises MoverUnavailableError, and what third parties raise.
    """
    scratch = memory = None
    if device.is_accelerator and name not in ("posix", "copy"):
        memory = _pages(SCRATCH_BYTES, device.torch_device)
        scratch = MemoryRegion(memory.data_ptr(), SCRATCH_BYTES, device.kind, device.number)
    all_well = False
    try:
        opened = open_mover(cast(MoverChoice, name), device.kind, directory, threads=tier.threads, scratch=scratch)
        all_well = all(probe.ok for probe in opened.report)
    finally:
        if not all_well:
            keep_forever(memory)  # late I/O of a mover that was passed over must not find it in other hands
    return opened.mover


# Measuring


class _LateError(MoverError):
    """A transfer may still touch the memory of the trial."""


def measure(
    mover: Mover,
    side: Staging,
    directory: str,
    device: Device,
    slot_bytes: int,
    *,
    direct_io: bool,
    budget_s: float = BUDGET_S,
    limit_s: float = TRANSFER_LIMIT_S,
) -> Speed:
    """Write slots to a scratch file without a name, read them back, and return how fast that was.

    Closes the mover, unless it hangs. ``budget_s`` bounds the measuring; a transfer that was begun is waited for, up
    to ``limit_s``. Raises MoverError, OSError (no file can be made), and what a library raises.
    """
    memory, is_late = None, False
    try:
        slots, slot_bytes = _trial_size(directory, slot_bytes)
        memory = _noise(slots * slot_bytes, device, side)
        kind, number = (device.kind, device.number) if side == "device" else (MemoryKind.DRAM, 0)
        with tempfile.TemporaryFile(buffering=0, dir=directory) as scratch:
            fd = scratch.fileno()
            region = mover.register_memory(MemoryRegion(memory.data_ptr(), len(memory), kind, number))
            file = open_file(mover, f"/proc/self/fd/{fd}", len(memory), direct_io=direct_io)

            def moved(count: int) -> Speed:
                """Write and read the first ``count`` slots."""
                begins = np.arange(count, dtype=np.int64) * slot_bytes
                extents = np.stack([begins, np.full_like(begins, slot_bytes)], axis=1)
                write_s = _time(mover, lambda: mover.submit(Op.WRITE, region, extents, file, extents), limit_s)
                if not direct_io:  # the page cache would answer
                    os.fdatasync(fd)
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                read_s = _time(mover, lambda: mover.submit(Op.READ, region, extents, file, extents), limit_s)
                return Speed(count * slot_bytes / read_s, count * slot_bytes / write_s)

            first = moved(1)  # for buffers and threads that are made on first use
            first_s = slot_bytes / first.read_bytes_s + slot_bytes / first.write_bytes_s
            return moved(max(1, min(slots, int(budget_s / first_s))))
    except Exception as error:
        is_late = isinstance(error, _LateError)
        raise
    finally:
        try:
            if not is_late:
                mover.close()
        except Exception as error:  # noqa: BLE001 - nobody needs it any more
            is_late = True
            logger.debug("%s does not close: %s", mover.name, error)
        if is_late:
            logger.warning("%s is left alone, with its memory and its file: it hung while it was measured", mover.name)
            leak((mover, memory))


def _time(mover: Mover, submit: Callable[[], Transfer], limit_s: float) -> float:
    """Return the seconds that a transfer takes, its submission included: some movers do their I/O there. Raises
    MoverError.
    """
    began_s = time.monotonic()
    transfer = submit()
    while mover.poll(transfer) is TransferState.PENDING:
        if time.monotonic() - began_s > limit_s:
            raise _LateError(f"storage did not answer for {limit_s:.0f} s")
        time.sleep(POLL_S)
    if transfer.state is TransferState.FAILED:
        raise (_LateError if transfer.quarantine else MoverError)(transfer.error or "failed")
    return max(time.monotonic() - began_s, 1e-9)


def _trial_size(directory: str, slot_bytes: int) -> tuple[int, int]:
    """Return how many slots to move, and their size. Raises MoverError where the disk has no room for one."""
    slot_bytes = align_up(min(slot_bytes, TRIAL_BYTES))
    space = os.statvfs(directory)
    free_bytes = space.f_bavail * space.f_frsize if space.f_blocks else TRIAL_BYTES * FREE_SHARE
    slots = min(TRIAL_BYTES, free_bytes // FREE_SHARE) // slot_bytes
    if not slots:
        raise MoverError(f"the disk has {free_bytes >> 20} MiB left, too little to measure with")
    return slots, slot_bytes


def _noise(length_bytes: int, device: Device, side: Staging) -> torch.Tensor:
    """Return memory on one side, full of noise: some filesystems compress. Raises MoverError."""
    where = device.torch_device if side == "device" else torch.device("cpu")
    memory = _pages(length_bytes, where, locked=side == "host" and device.page_locks)
    noise = torch.frombuffer(bytearray(os.urandom(min(1 << 20, length_bytes))), dtype=torch.uint8)
    for piece in torch.split(memory, len(noise)):
        piece.copy_(noise[: len(piece)])
    return memory


def _pages(length_bytes: int, where: torch.device, *, locked: bool = False) -> torch.Tensor:
    """Return ``length_bytes`` that begin at a page, page-locked where ``locked``. Raises MoverError."""
    try:
        tensor = torch.empty(length_bytes + PAGE_BYTES, dtype=torch.uint8, device=where, pin_memory=locked)
    except RuntimeError as error:  # torch.OutOfMemoryError is one
        why = str(error).partition("\n")[0]
        raise MoverError(f"no {length_bytes >> 20} MiB of memory on {where}: {why}") from error
    start = -tensor.data_ptr() % PAGE_BYTES
    return tensor[start : start + length_bytes]
