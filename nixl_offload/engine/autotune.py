"""Chooses the mover between a GPU and the files of a directory: each moves some slots, and the fastest is taken.

No rule knows it: GPUDirect Storage is the shortest path where it is real, and slower than page-locked host memory with
O_DIRECT where cuFile copies through buffers of its own. Measured is the time between memory and a scratch file; for
movers of host memory the copy over the bus, which the engine makes meanwhile, is measured apart, and the slower counts.

Threading: on the thread that will drive the mover, at start. Ranks that start together measure together.
Ownership: movers, memory and file are given up in the end. What a transfer that did not end may still touch is kept for
the life of the process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, cast

import numpy as np
import torch

from nixl_offload.config import DirectoryConfig
from nixl_offload.engine.engine_memory import Staging
from nixl_offload.engine.pump import POLL_S, leak
from nixl_offload.engine.streams import Device
from nixl_offload.errors import MoverError, NixlOffloadError
from nixl_offload.hardware.cores import unbound
from nixl_offload.movers.base import FileId, MemoryKind, MemoryRegion, Mover, Op, TransferState
from nixl_offload.movers.handles import open_file
from nixl_offload.movers.select import SCRATCH_BYTES, MoverChoice, open_mover
from nixl_offload.tiers.slab.other_namespaces import MOVER_CHOICE_PREFIX
from nixl_offload.types import PAGE_BYTES, align_up

logger = logging.getLogger(__name__)

MoverOpener = Callable[[str], Mover]
"""Opens a mover by name. May raise anything: then it cannot run here."""

BUDGET_S: Final = 2.0
"""For measuring. Opening movers takes more on top, mostly for the first use of CUDA's libraries."""
TRANSFER_LIMIT_S: Final = 30.0
"""Storage that has not answered by then hangs."""
MARGIN: Final = 0.1
"""Movers this close to the fastest are as good as it: two seconds of measuring tell no better."""
FREE_SHARE: Final = 16
"""At most a sixteenth of what the filesystem has left is taken for the scratch file."""
_ROUNDS: Final = 3
_SLOTS: Final = 16
"""At once, as in the engine when it is busy; and more where they are small."""
_SCRATCH_BYTES: Final = 64 << 20, 256 << 20
"""What so many slots may take, at least and at most."""
_LEFT_S: Final = 300.0
"""Scratch files that still have a name after so long are of a process that was killed."""
_LEFTOVER: Final = re.compile(
    re.escape(MOVER_CHOICE_PREFIX) + r"-[0-9a-f-]+\.(?:scratch|tmp)|\.mover-probe-[a-z0-9_]{8}"
)
_KEPT: Final[list[torch.Tensor]] = []
"""Some pages of device memory for each mover that failed to open: late I/O may still touch them. They are not in
``pump.LEAKED``, because that keeps shutdown from freeing host memory."""


@dataclass(frozen=True, slots=True)
class MeasuredMover:
    """What became of one mover. Speeds are medians, 0.0 where nothing was measured."""

    mover: str
    side: Staging
    ok: bool
    """It ran, as far as it was tried."""
    reason: str = ""
    """Why it cannot run, or has no figures; empty when it has."""
    read_bytes_s: float = 0.0
    write_bytes_s: float = 0.0

    @property
    def measured(self) -> bool:
        """Whether it has figures."""
        return self.ok and self.read_bytes_s > 0 and self.write_bytes_s > 0

    @property
    def cost_s_byte(self) -> float:
        """Seconds per byte, reads counted twice: a load holds up a request, a store goes on behind it."""
        return 2 / self.read_bytes_s + 1 / self.write_bytes_s

    def __str__(self) -> str:
        """For logs."""
        if not self.measured:
            return f"{self.mover}: {self.reason}"
        return f"{self.mover}: read {self.read_bytes_s / 1e9:.3g}, write {self.write_bytes_s / 1e9:.3g} GB/s"


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """The mover to open, with ``open_file_mover``, and where its slots lie."""

    mover: str
    side: Staging


@unbound()
def plan_transfers(
    tier: DirectoryConfig, directory: str, device: Device, slot_bytes: int, *, budget_s: float = BUDGET_S
) -> TransferPlan | None:
    """Return the mover for slots of ``slot_bytes`` between ``device`` and files in ``directory``, and log why.

    None: nothing was to be measured, or nothing could be, and the tier's mover is to be opened as it comes. All movers
    are closed again. While it measures, a file without a name takes up to 256 MiB beside the tier's capacity.
    """
    if tier.mover != "auto" or not device.is_accelerator:
        return None
    remove_leftovers(directory)
    try:
        found = compare(
            (("gds_mt", "device"), ("kvikio", "device"), ("posix", "host")),
            directory,
            device,
            slot_bytes,
            lambda name: open_file_mover(name, tier, directory, device),
            direct_io=tier.direct_io,
            budget_s=budget_s,
        )
    except Exception:
        logger.exception("%s: movers could not be compared", directory)
        return None
    best = best_of(found)
    figures = "; ".join(map(str, found))
    if best is None:
        logger.info("Files in %s: no mover could be measured: %s", directory, figures)
        return None
    logger.info(
        "Files in %s: %s, the fastest or within %.0f %% of it: %s", directory, best.mover, 100 * MARGIN, figures
    )
    return TransferPlan(best.mover, best.side)


def best_of(candidates: Sequence[MeasuredMover]) -> MeasuredMover | None:
    """Return the first that is within ``MARGIN`` of the cheapest; None: no figures."""
    measured = [each for each in candidates if each.measured]
    limit = (1 + MARGIN) * min((each.cost_s_byte for each in measured), default=0.0)
    return next((each for each in measured if each.cost_s_byte <= limit), None)


def open_file_mover(name: str, tier: DirectoryConfig, directory: str, device: Device) -> Mover:
    """Open a mover between ``device`` and files in ``directory`` with the tier's settings. ``name``: a plan's, or what
    the tier says. Raises MoverUnavailableError, and what third parties raise.
    """
    scratch = None
    if device.is_accelerator and name not in ("posix", "copy"):
        memory = _pages(SCRATCH_BYTES, device.torch_device)
        scratch = MemoryRegion(memory.data_ptr(), SCRATCH_BYTES, device.kind, device.number)
    safe = False
    try:
        opened = open_mover(cast(MoverChoice, name), device.kind, directory, threads=tier.threads, scratch=scratch)
        safe = all(probe.ok for probe in opened.report)
    finally:
        if scratch is not None and not safe:
            _KEPT.append(memory)  # late I/O of a mover that was passed over must not find it in other hands
    return opened.mover


# Measuring


@dataclass(slots=True, eq=False)
class _Contender:
    name: str
    mover: Mover
    side: Staging
    file: FileId
    failure: str = ""
    """Why it is out of the running."""
    hung: bool = False
    """A transfer is still in flight: neither memory nor mover may go."""
    tainted: bool = False
    """A failed transfer may still touch memory."""
    speeds: dict[Op, list[float]] = field(default_factory=lambda: {op: [] for op in Op})

    def move(self, op: Op, region: MemoryRegion, slots: int, slot_bytes: int, limit_s: float) -> float:
        """Move the first ``slots`` of ``region``; return bytes per second. Raises MoverError, and sets what is wrong.

        Memory is registered meanwhile only: no library promises that two movers may register the same memory at once.
        """
        offsets = np.arange(slots, dtype=np.int64) * slot_bytes
        extents = np.stack([offsets, np.full_like(offsets, slot_bytes)], axis=1)
        memory = self.mover.register_memory(region)
        try:
            began_s = time.monotonic()
            transfer = self.mover.submit(op, memory, extents, self.file, extents)
            while self.mover.poll(transfer) is TransferState.PENDING:
                if time.monotonic() - began_s > limit_s:
                    self.hung = True
                    raise MoverError(f"storage did not answer for {limit_s:.0f} s")
                time.sleep(POLL_S)
            if transfer.state is TransferState.FAILED:
                self.tainted = transfer.quarantine
                raise MoverError(transfer.error or "failed")
            return slots * slot_bytes / (time.monotonic() - began_s)
        finally:
            with contextlib.suppress(MoverError):  # a transfer of it is in flight: the end of the mover is its end
                self.mover.unregister_memory(memory)

    def result(self, trouble: str) -> MeasuredMover:
        if self.failure or not all(self.speeds.values()):
            reason = self.failure or f"not measured: {trouble or 'no time was left'}"
            return MeasuredMover(self.name, self.side, not self.failure, reason)
        read, write = (statistics.median(self.speeds[op]) for op in (Op.READ, Op.WRITE))
        return MeasuredMover(self.name, self.side, True, "", read, write)


def compare(
    candidates: Sequence[tuple[str, Staging]],
    directory: str,
    device: Device,
    slot_bytes: int,
    open_named: MoverOpener,
    *,
    direct_io: bool,
    budget_s: float,
    limit_s: float = TRANSFER_LIMIT_S,
) -> tuple[MeasuredMover, ...]:
    """Open each mover and measure it. Returns them in their order.

    ``budget_s`` bounds the measuring, not the opening; a transfer that was begun is waited for, up to ``limit_s``.
    Nothing is raised for reasons of storage or memory: those are in the results.
    """
    movers: dict[str, Mover] = {}
    results: dict[str, MeasuredMover] = {}
    contenders: list[_Contender] = []
    memory: _TrialMemory | None = None
    trouble = ""
    try:
        for name, side in candidates:
            try:
                movers[name] = open_named(name)
            except Exception as error:  # noqa: BLE001 - whatever a third party raises, the others may do
                results[name] = MeasuredMover(name, side, False, _words(name, error))
        if movers:
            memory = _TrialMemory(directory, device, slot_bytes, host=any(side == "host" for _, side in candidates))
            with _scratch_file(directory) as (fd, path):
                for name, side in candidates:
                    if name in movers:
                        try:
                            file = open_file(movers[name], path, memory.length_bytes, direct_io=direct_io)
                        except MoverError as error:
                            results[name] = MeasuredMover(name, side, False, _words(name, error))
                        else:
                            contenders.append(_Contender(name, movers[name], side, file))
                os.unlink(path)  # from here on nothing can stay behind
                trouble = _measure(contenders, memory, fd, direct_io, budget_s, limit_s)
    except (_NoRoomError, OSError) as error:
        trouble = str(error)
    finally:
        _close(movers, contenders, memory)
    results |= {each.name: each.result(trouble) for each in contenders}
    unmeasured = f"not measured: {trouble}"
    return tuple(results.get(name) or MeasuredMover(name, side, True, unmeasured) for name, side in candidates)


def _measure(
    contenders: Sequence[_Contender],
    memory: _TrialMemory,
    fd: int,
    direct_io: bool,
    budget_s: float,
    limit_s: float,
) -> str:
    """Let all write and read in turn, in rounds. Returns what stood against it, if anything did."""
    until_s = time.monotonic() + budget_s
    bus_bytes_s = memory.bus_bytes_s()
    slots = 1  # at first, for buffers and threads that are made on first use
    for turn in range(1 + _ROUNDS):
        began_s = time.monotonic()
        for contender in contenders:
            for op in (Op.WRITE, Op.READ):
                if contender.failure or (turn and time.monotonic() > until_s):
                    continue
                if op is Op.READ and not direct_io:  # the page cache would answer
                    os.fdatasync(fd)
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                try:
                    speed = contender.move(op, memory.region(contender.side), slots, memory.slot_bytes, limit_s)
                except Exception as error:  # noqa: BLE001 - of a library as well
                    contender.failure = _words(contender.name, error)
                    if contender.hung:
                        return contender.failure
                    continue
                if turn:
                    contender.speeds[op].append(min(speed, bus_bytes_s) if contender.side == "host" else speed)
        if all(each.failure for each in contenders):  # it is not the movers' fault
            failure = contenders[0].failure
            for each in contenders:
                each.failure = ""
            return f"the scratch file could not be written: {failure}"
        if not turn:
            round_s = time.monotonic() - began_s
            slots = max(1, min(memory.slots, int(budget_s / (2 * _ROUNDS) / max(round_s, 1e-9))))
    return ""


def _close(movers: dict[str, Mover], contenders: Sequence[_Contender], memory: _TrialMemory | None) -> None:
    """Close all movers but those that hang, whose memory is kept for ever, as that of quarantined transfers is."""
    hung = {each.name for each in contenders if each.hung}
    keep = any(each.hung or each.tainted for each in contenders)
    for name, mover in movers.items():
        try:
            if name in hung:
                raise MoverError("it does not answer")
            mover.close()
        except Exception as error:  # noqa: BLE001 - nobody needs it any more
            logger.warning("%s is left alone, with its memory and its file: %s", name, _words(name, error))
            leak(mover)
            keep = True
    if keep and memory is not None:
        leak(memory)


class _NoRoomError(NixlOffloadError):
    """There is not the memory or the disk space to measure with."""


class _TrialMemory:
    """Slots on the device, and in host memory where ``host``. Raises _NoRoomError, OSError."""

    def __init__(self, directory: str, device: Device, slot_bytes: int, *, host: bool) -> None:
        least_bytes, most_bytes = _SCRATCH_BYTES
        self.slot_bytes = align_up(min(slot_bytes, most_bytes))
        space = os.statvfs(directory)
        free_bytes = space.f_bavail * space.f_frsize if space.f_blocks else most_bytes * FREE_SHARE
        wanted_bytes = min(most_bytes, max(least_bytes, _SLOTS * self.slot_bytes))
        self.slots = int(min(wanted_bytes, free_bytes // FREE_SHARE)) // self.slot_bytes
        if not self.slots:
            raise _NoRoomError(f"the disk has {free_bytes >> 20} MiB left, too little to measure with")
        self._device = device
        while True:
            try:
                self._on_device = _pages(self.length_bytes, device.torch_device)
                locked = device.torch_device.type == "cuda"
                self._on_host = _pages(self.length_bytes if host else PAGE_BYTES, torch.device("cpu"), locked=locked)
                break
            except _NoRoomError:
                if self.slots == 1:
                    raise
                self.slots //= 2
        # Some filesystems compress.
        noise = torch.frombuffer(bytearray(os.urandom(min(1 << 20, self.slot_bytes))), dtype=torch.uint8)
        for target in (self._on_device, self._on_host):
            for piece in torch.split(target, len(noise)):
                piece.copy_(noise[: len(piece)])

    @property
    def length_bytes(self) -> int:
        """All slots."""
        return self.slots * self.slot_bytes

    def region(self, side: Staging) -> MemoryRegion:
        """Return the slots on one side."""
        if side == "host":
            return MemoryRegion(self._on_host.data_ptr(), self._on_host.numel(), MemoryKind.DRAM)
        return MemoryRegion(self._on_device.data_ptr(), self.length_bytes, self._device.kind, self._device.number)

    def bus_bytes_s(self) -> float:
        """Copy what there is in host memory to the device."""
        size = min(len(self._on_host), len(self._on_device))
        stream = self._device.streams.new()
        began_s = time.monotonic()
        stream.run(lambda: _copy(self._on_device[:size], self._on_host[:size]))
        stream.synchronize()
        return size / max(time.monotonic() - began_s, 1e-9)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)


def _pages(length_bytes: int, device: torch.device, *, locked: bool = False) -> torch.Tensor:
    """Return ``length_bytes`` that begin at a page, page-locked where ``locked``. Raises _NoRoomError."""
    try:
        tensor = torch.empty(length_bytes + PAGE_BYTES, dtype=torch.uint8, device=device, pin_memory=locked)
    except RuntimeError as error:  # torch.OutOfMemoryError is one
        why = str(error).partition("\n")[0]
        raise _NoRoomError(f"no {length_bytes >> 20} MiB of memory on {device}: {why}") from error
    start = -tensor.data_ptr() % PAGE_BYTES
    return tensor[start : start + length_bytes]


@contextlib.contextmanager
def _scratch_file(directory: str) -> Iterator[tuple[int, str]]:
    """A private, empty file: its descriptor, which is not for direct I/O, and its name. Raises OSError.

    A tree does not list it, and slabs count it as a small file of their own (``tiers.slab.other_namespaces``).
    """
    path = os.path.join(directory, f"{MOVER_CHOICE_PREFIX}-{secrets.token_hex(8)}.scratch")
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        yield fd, path
    finally:
        os.close(fd)
        with contextlib.suppress(OSError):
            os.unlink(path)


def remove_leftovers(directory: str) -> None:
    """Remove scratch files of processes that were killed. Several ranks may do so at once."""
    now_s = time.time()
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if _LEFTOVER.fullmatch(entry.name):
                with contextlib.suppress(OSError):
                    if now_s - entry.stat(follow_symlinks=False).st_mtime > _LEFT_S:
                        os.unlink(entry.path)


def _words(name: str, error: Exception) -> str:
    """Return the message of ``error`` without the mover's name; for foreign errors with their type."""
    text = str(error) if isinstance(error, NixlOffloadError) else repr(error)
    return text.removeprefix(f"{name}: ")
