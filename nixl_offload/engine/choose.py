"""Which mover and which way chunks take between a device and the files of a directory: compared once, then remembered.

No rule knows it beforehand. GPUDirect Storage is the shortest way where it is real, and slower than page-locked host
memory with plain O_DIRECT where cuFile bounces through its own buffers; direct saves a copy on the device and pays with
smaller extents. So each candidate moves images of the shape that chunks have, through a scratch file in the directory
itself, many at once, as the engine does when it is busy: two seconds in all, a turn for each in every round.

What is compared is the time until an image has gone from device memory into the file, or back. For ``host`` that
includes the copy over the bus, overlapped; the kernels that pack and unpack for ``device`` are left out: they run at
the speed of device memory, some hundred times that of a drive. A load holds up a request, a store goes on behind it: so
a candidate costs 2 seconds per byte read + 1 second per byte written, and among those within 10 % of the cheapest the
one with the fewest copies is taken: direct, then device, then host, and gds_mt before kvikio.

The choice is kept in the directory, in a file for this machine, shape and setting (``choice.cache``), for a week. Of
ranks that start together one measures and the others wait for its result, for some seconds; a directory that takes
no lock, as on some file servers, is measured by each.
Threading: in the process and on the thread that will drive the mover, at start. Nothing is left open. Raises nothing
for reasons of storage, unless nothing can run at all. While it measures, a file without a name takes up to 256 MiB of
the disk, a quarter of what is free at most, beside the tier's capacity.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import Final, cast

import torch

from nixl_offload.config import DirectoryConfig
from nixl_offload.engine.choice import cache
from nixl_offload.engine.choice.base import MARGIN, Candidate, Choice, Shape, best_of, ways_of
from nixl_offload.engine.choice.cache import CachedChoice, read_cached
from nixl_offload.engine.choice.machine import Fingerprint, fingerprint
from nixl_offload.engine.choice.memory import aligned_tensor
from nixl_offload.engine.choice.runner import words
from nixl_offload.engine.choice.trial import hold_trial
from nixl_offload.engine.image import Way
from nixl_offload.engine.streams import Device
from nixl_offload.errors import MoverUnavailableError, TierError
from nixl_offload.hardware.cores import unbound
from nixl_offload.movers.base import MemoryRegion, Mover
from nixl_offload.movers.select import SCRATCH_BYTES, MoverChoice, open_mover
from nixl_offload.tiers.lock import DirectoryLock

__all__ = ["CachedChoice", "Candidate", "Choice", "Shape", "choose", "open_file_mover", "read_cached"]

logger = logging.getLogger(__name__)

BUDGET_S: Final = 2.0
"""For measuring; opening movers comes on top, which the first use of CUDA's libraries makes the longer part."""
LOCK_WAIT_S: Final = 10.0
"""For the rank that measures; one that has waited so long takes what would be taken unmeasured."""
_LOCK_POLL_S: Final = 0.05
_KEPT: Final[list[torch.Tensor]] = []
"""Some pages of device memory for each mover that failed to open; not ``pump.LEAKED``, for which shutdown leaves host
memory as it is."""


@unbound()
def choose(
    tier: DirectoryConfig,
    directory: str,
    device: Device,
    shape: Shape,
    *,
    budget_s: float = BUDGET_S,
    lock_wait_s: float = LOCK_WAIT_S,
) -> Choice:
    """Return the mover and the way for chunks of ``shape`` between ``device`` and files in ``directory``.

    What it returns was opened here and closed again, unless it was remembered or there was nothing to choose: open it
    with ``select.open_mover``. Says at INFO, in one line, what was chosen and the figures of all candidates.
    Raises MoverUnavailableError when nothing that the tier allows can run, with all reasons.
    """
    ways = ways_of(tier.mover, shape, accelerator=device.is_accelerator)
    question = _Question(tier, directory, device, shape, ways)
    if len(ways) == 1:
        why = f"the only way of mover: {tier.mover}"
        if not device.is_accelerator:
            why = "for the KV cache lies in host memory"
        choice = Choice(*ways[0], (), 0.0, False, why)
    else:
        choice = _remembered_or_measured(question, budget_s, lock_wait_s)
    logger.info("%s", _told(directory, choice))
    return choice


def _told(directory: str, choice: Choice) -> str:
    """All in a line; what keeps a mover from running at all is said once, not for each of its ways."""
    never: dict[str, set[str]] = {}
    for candidate in choice.candidates:
        never.setdefault(candidate.mover, set()).add("" if candidate.ok else candidate.reason)
    parts = dict.fromkeys(
        str(found) if found.ok or len(never[found.mover]) > 1 else f"{found.mover}: {found.reason}"
        for found in choice.candidates
    )
    before = ", as found before" if choice.cached else ""
    return "; ".join([f"Files in {directory}: {choice.mover}, {choice.way}{before}, {choice.reason}", *parts])


@dataclass(frozen=True, slots=True)
class _Question:
    tier: DirectoryConfig
    directory: str
    device: Device
    shape: Shape
    ways: tuple[tuple[str, Way], ...]
    refusals: dict[str, MoverUnavailableError] = field(default_factory=dict)
    """Of movers that did not open: they are not tried again, for storage that hangs takes a minute to say so."""

    def open(self, name: str) -> Mover:
        """Open a mover as the engine will. Raises NixlOffloadError, and what third parties raise."""
        if name in self.refusals:
            raise self.refusals[name]
        try:
            return open_file_mover(name, self.tier, self.directory, self.device)
        except MoverUnavailableError as error:
            # What cannot be moved where is said once, around the reasons of all.
            reason = str(error).partition(f" to files in {self.directory}: ")[2]
            self.refusals[name] = MoverUnavailableError(reason or str(error))
            raise self.refusals[name] from error


def open_file_mover(name: str, tier: DirectoryConfig, directory: str, device: Device) -> Mover:
    """Open a mover between ``device`` and files in ``directory`` with the tier's settings. ``name``: a choice's, or
    what the tier says. Raises MoverUnavailableError, and what third parties raise.
    """
    scratch = None
    if device.is_accelerator and name not in ("posix", "copy"):
        memory = aligned_tensor(SCRATCH_BYTES, device.torch_device)
        scratch = MemoryRegion(memory.data_ptr(), SCRATCH_BYTES, device.kind, device.number)
    safe = False
    try:
        opened = open_mover(
            cast(MoverChoice, name),
            device.kind,
            directory,
            tier.posix_api,
            threads=tier.threads,
            bounce_bytes=tier.bounce_bytes,
            scratch=scratch,
        )
        safe = all(probe.ok for probe in opened.report)
    finally:
        if scratch is not None and not safe:
            _KEPT.append(memory)  # late I/O of a mover that was passed over must not find it in other hands
    return opened.mover


def _remembered_or_measured(question: _Question, budget_s: float, lock_wait_s: float) -> Choice:
    machine = fingerprint(question.tier, question.directory, question.device, question.shape)
    lock = DirectoryLock(cache.lock_path(question.directory))
    deadline_s = time.monotonic() + lock_wait_s
    try:
        while True:
            remembered = _remembered(question, machine)
            if remembered is not None:
                return remembered
            if lock.is_held():  # and what its last holder found is seen
                break
            try:
                lock.acquire()
            except TierError as error:
                if error.cause != "locked":
                    logger.debug("%s: measured without a lock: %s", question.directory, error)
                    break
                if time.monotonic() > deadline_s:
                    return _first_that_runs(question, f"another rank has been measuring for {lock_wait_s:.0f} s")
                time.sleep(_LOCK_POLL_S)
        try:
            return _measured(question, machine, budget_s)
        except MoverUnavailableError:
            raise
        except Exception as error:
            logger.exception("%s: movers could not be compared", question.directory)
            return _first_that_runs(question, f"comparing them failed: {error!r}")
    finally:
        lock.release()


def _remembered(question: _Question, machine: Fingerprint) -> Choice | None:
    """What is in the file was perhaps written by somebody else: it may only choose among what is allowed."""
    choice = cache.read_choice(question.directory, machine)
    allowed = {*question.ways, ("copy", "host")} if ("posix", "host") in question.ways else {*question.ways}
    return choice if choice and (choice.mover, choice.way) in allowed else None


def _measured(question: _Question, machine: Fingerprint, budget_s: float) -> Choice:
    cache.clean(question.directory)
    verdict = hold_trial(
        question.ways,
        question.directory,
        question.device,
        question.shape,
        question.open,
        direct_io=question.tier.direct_io,
        budget_s=budget_s,
    )
    best = best_of(verdict.candidates)
    if best is not None:
        fastest = min(found.cost_s_byte for found in verdict.candidates if found.measured)
        why = "the fastest" if best.cost_s_byte == fastest else f"within {MARGIN:.0%} of the fastest, with fewer copies"
    else:
        best = next((found for found in verdict.candidates if found.ok), None)
        if best is None:
            return _first_that_runs(question, "nothing could be measured")
        why = f"the first that runs: {best.reason}"
    choice = Choice(best.mover, best.way, verdict.candidates, time.time(), False, why)
    cache.write_choice(question.directory, machine, question.shape, choice, finished=verdict.finished)
    return choice


def _first_that_runs(question: _Question, why: str) -> Choice:
    """Return what is preferred unmeasured and can be opened. Raises MoverUnavailableError."""
    # Where NIXL itself is missing, there is still what auto always ends with.
    last: list[tuple[str, Way]] = [("copy", "host")] if ("posix", "host") in question.ways else []
    report: list[Candidate] = []
    for name, way in [*question.ways, *last]:
        if any(candidate.mover == name for candidate in report):
            continue
        try:
            question.open(name).close()
        except Exception as error:  # noqa: BLE001 - whatever a third party raises, the others may do
            report.append(Candidate(name, way, False, words(name, error)))
            continue
        report.append(Candidate(name, way, True, "not measured"))
        return Choice(name, way, tuple(report), 0.0, False, f"the first that runs: {why}")
    reasons = "; ".join(f"{candidate.mover}: {candidate.reason}" for candidate in report)
    raise MoverUnavailableError(
        f"mover {question.tier.mover!r} cannot move {question.device.kind.value} to files in {question.directory}: "
        f"{reasons}"
    )
