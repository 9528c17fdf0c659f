"""Chooses the mover and the transfer path between a device and the files of a directory by measuring them at start.

No rule knows the best one: GPUDirect Storage is the shortest path where it is real, and slower than page-locked host
memory with O_DIRECT where cuFile copies through its own buffers. So each candidate moves images of chunks, many at
once, through a scratch file in the directory, in rounds, for two seconds in all. Ranks that start together measure
together.

Measured is the time between device memory and the file, for ``host`` with the copy over the bus; not the kernels that
gather and scatter for ``device``, which run at the speed of device memory. ``best_of`` has what is taken.

Threading: on the thread that will drive the mover, at start; nothing is left open. Raises nothing for reasons of
storage unless no mover can run. While it measures, a file without a name takes up to 256 MiB per rank, and at most a
sixteenth of what is free, beside the tier's capacity.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final, cast

import torch

from nixl_offload.config import DirectoryConfig
from nixl_offload.engine.autotune.candidates import (
    CUFILE,
    HOST_REFERENCE,
    MARGIN,
    MeasuredPath,
    Shape,
    TransferPlan,
    best_of,
    candidates_of,
    told_to_bounce,
)
from nixl_offload.engine.autotune.compare import compare
from nixl_offload.engine.autotune.scratch import aligned_tensor, remove_leftovers
from nixl_offload.engine.image import TransferPath
from nixl_offload.engine.streams import Device
from nixl_offload.errors import MoverUnavailableError
from nixl_offload.hardware.cores import unbound
from nixl_offload.hardware.gds import gds_report
from nixl_offload.movers.base import MemoryRegion, Mover
from nixl_offload.movers.select import SCRATCH_BYTES, MoverChoice, open_mover

logger = logging.getLogger(__name__)

BUDGET_S: Final = 2.0
"""For measuring. Opening movers takes more on top, mostly for the first use of CUDA's libraries."""
_KEPT: Final[list[torch.Tensor]] = []
"""Some pages of device memory for each mover that failed to open: late I/O may still touch them. They are not in
``pump.LEAKED``, because that keeps shutdown from freeing host memory."""


@unbound()
def plan_transfers(
    tier: DirectoryConfig, directory: str, device: Device, shape: Shape, *, budget_s: float = BUDGET_S
) -> TransferPlan | None:
    """Return the mover and the path for chunks of ``shape`` between ``device`` and files in ``directory``.

    None: comparing them failed for a reason of our own; the log has it, and the tier's mover is opened unmeasured.

    What it returns was opened here and closed again, unless there was nothing to choose: open it with
    ``open_file_mover``. Says at INFO, in one line, what was chosen and the figures of all candidates.
    Raises MoverUnavailableError when nothing that the tier allows can run, with all reasons.
    """
    candidates = candidates_of(tier.mover, shape, accelerator=device.is_accelerator)
    if len(candidates) == 1 and (candidates[0][0] not in CUFILE or not device.is_accelerator):
        why = _only(tier) if device.is_accelerator else "the KV cache is in host memory"
        plan: TransferPlan | None = TransferPlan(*candidates[0], why)
    else:
        remove_leftovers(directory)
        plan = _compared(candidates, tier, directory, device, shape, budget_s)
    if plan is not None:
        logger.info("%s", _line(directory, plan))
    return plan


def open_file_mover(name: str, tier: DirectoryConfig, directory: str, device: Device) -> Mover:
    """Open a mover between ``device`` and files in ``directory`` with the tier's settings. ``name``: a plan's, or what
    the tier says. Raises MoverUnavailableError, and what third parties raise.
    """
    scratch = None
    if device.is_accelerator and name not in ("posix", "copy"):
        memory = aligned_tensor(SCRATCH_BYTES, device.torch_device)
        scratch = MemoryRegion(memory.data_ptr(), SCRATCH_BYTES, device.kind, device.number)
    safe = False
    try:
        opened = open_mover(cast(MoverChoice, name), device.kind, directory, threads=tier.threads, scratch=scratch)
        safe = all(probe.ok for probe in opened.report)
    finally:
        if scratch is not None and not safe:
            _KEPT.append(memory)  # late I/O of a mover that was passed over must not find it in other hands
    return opened.mover


def _compared(
    candidates: Sequence[tuple[str, TransferPath]],
    tier: DirectoryConfig,
    directory: str,
    device: Device,
    shape: Shape,
    budget_s: float,
) -> TransferPlan | None:
    def opened(name: str) -> Mover:
        try:
            return open_file_mover(name, tier, directory, device)
        except MoverUnavailableError as error:
            # What cannot be moved where is said once, around the reasons of all.
            raise MoverUnavailableError(str(error).partition(f" to files in {directory}: ")[2] or str(error)) from error

    try:
        # Where the config names cuFile, what it is held against runs too, and cannot be taken.
        rivals = (*candidates, *(() if HOST_REFERENCE in candidates else (HOST_REFERENCE,)))
        found = compare(rivals, directory, device, shape, opened, direct_io=tier.direct_io, budget_s=budget_s)
        _warn_of_bouncing(directory, shape, found)
        found = found[: len(candidates)]
        if HOST_REFERENCE in candidates and not any(candidate.ok for candidate in found):
            # Where NIXL itself is missing, there is still what auto always ends with.
            found += compare([("copy", "host")], directory, device, shape, opened, direct_io=True, budget_s=0.0)
    except Exception:
        logger.exception("%s: movers could not be compared", directory)
        return None
    best = best_of(found)
    if best is not None and len(candidates) == 1:
        return TransferPlan(best.mover, best.path, _only(tier), found)
    if best is not None:
        fastest = min(candidate.cost_s_byte for candidate in found if candidate.measured)
        why = "the fastest" if best.cost_s_byte == fastest else f"within {MARGIN:.0%} of the fastest, with fewer copies"
        return TransferPlan(best.mover, best.path, why, found)
    first = next((candidate for candidate in found if candidate.ok), None)
    if first is not None:
        return TransferPlan(first.mover, first.path, f"the first that runs: {first.reason}", found)
    reasons = "; ".join(dict.fromkeys(f"{candidate.mover}: {candidate.reason}" for candidate in found))
    raise MoverUnavailableError(
        f"mover {tier.mover!r} cannot move {device.kind.value} to files in {directory}: {reasons}"
    )


def _only(tier: DirectoryConfig) -> str:
    return f"the only path of mover: {tier.mover}"


def _warn_of_bouncing(directory: str, shape: Shape, found: Sequence[MeasuredPath]) -> None:
    """Say so where cuFile copies through host memory and nothing but its speed tells."""
    told = told_to_bounce(found, shape)
    if told is None:
        return
    cufile, host = told
    report = gds_report(directory)
    if not report.real and "not certain" not in report.verdict:
        return  # that has been told, with the reason, when the mover was opened
    logger.warning(
        "%s: %s reads %.3g GB/s, and page-locked host memory takes %.3g GB/s from there. It probably copies through "
        "host memory, or drive and GPU lie under different PCIe roots, although all looks as it should (%s). "
        "`gdscheck -p` and cufile.log may tell; mover: posix is faster here, and auto takes it",
        directory,
        cufile.mover,
        cufile.read_bytes_s / 1e9,
        host.read_bytes_s / 1e9,
        report.verdict,
    )


def _line(directory: str, plan: TransferPlan) -> str:
    """For the log; what keeps a mover from running at all is said once, not for each of its paths."""
    able = {found.mover for found in plan.candidates if found.ok}
    parts = dict.fromkeys(
        str(found) if found.mover in able else f"{found.mover}: {found.reason}" for found in plan.candidates
    )
    return "; ".join([f"Files in {directory}: {plan.mover}, {plan.path}, {plan.reason}", *parts])
