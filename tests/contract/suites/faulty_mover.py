"""A wrapper that makes a mover misbehave on cue, for tests of what is above it. Deterministic: it counts.

Threading: as the wrapped mover, except ``release``, which any thread may call. Ownership: closes the wrapped mover.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from threading import Event

import numpy as np

from nixl_offload.errors import MoverError
from nixl_offload.movers.base import (
    Extents,
    FileId,
    MemoryId,
    MemoryKind,
    MemoryRegion,
    Mover,
    Op,
    Transfer,
    TransferState,
)


class FaultKind(Enum):
    """What goes wrong."""

    FAIL = "fail"
    """FAILED at the first poll, with ``amount`` bytes moved all the same."""
    SHORT = "short"
    """DONE, but only the first ``amount`` bytes were moved: what a mover that does not count would say."""
    LATE = "late"
    """PENDING for ``amount`` more polls after the bytes have arrived."""
    CORRUPT = "corrupt"
    """DONE, with byte number ``amount`` of the transfer flipped where it arrived (host memory, file or object)."""
    REFUSE = "refuse"
    """``submit`` raises MoverError."""
    STUCK = "stuck"
    """PENDING until ``release``; nothing is moved before. ``close`` releases it too, as FAILED."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault for the ``nth`` transfer, counted from 0 over those of direction ``op`` (None: over all)."""

    nth: int
    kind: FaultKind
    op: Op | None = None
    amount: int = 0
    """Bytes or polls; see FaultKind. Bytes are rounded down to the mover's alignment where the file has O_DIRECT."""
    quarantine: bool = False
    """For FAIL: whether the mover would say that its memory may still be written."""
    every: bool = False
    """The nth and every one after it."""


@dataclass(slots=True, eq=False)
class _FaultyTransfer(Transfer):
    fault: Fault | None = None
    inner: Transfer | None = None
    polls_left: int = 0
    request: tuple[MemoryId, Extents, FileId, Extents] | None = None
    cut: FileId | None = None
    """The object that was named for a short write."""


class FaultyMover(Mover):
    """The wrapped mover's contract and limits, with the faults of ``script``. One fault a transfer: the first match."""

    def __init__(self, mover: Mover, script: Iterable[Fault] = ()) -> None:
        self.name = mover.name
        self.memory_kinds = mover.memory_kinds
        self.limits = mover.limits
        self.inner = mover
        self.script = list(script)
        """May be changed between submits."""
        self.submitted: list[Op] = []
        """Directions of all transfers so far, refused ones too."""
        self._released = Event()
        self._regions: dict[MemoryId, MemoryRegion] = {}
        self._paths: dict[FileId, str] = {}
        self._objects: dict[FileId, str] = {}
        self._direct: set[FileId] = set()
        self._stuck: set[_FaultyTransfer] = set()

    def register_memory(self, region: MemoryRegion) -> MemoryId:
        memory = self.inner.register_memory(region)
        self._regions[memory] = region
        return memory

    def unregister_memory(self, memory: MemoryId) -> None:
        self.inner.unregister_memory(memory)
        self._regions.pop(memory, None)

    def adopt_file(self, fd: int, path: str, length_bytes: int, *, direct: bool) -> FileId:
        file = self.inner.adopt_file(fd, path, length_bytes, direct=direct)
        self._paths[file] = f"/proc/self/fd/{fd}"  # for the file may have no name, or another one soon
        if direct:
            self._direct.add(file)
        return file

    def open_object(self, name: str, length_bytes: int) -> FileId:
        file = self.inner.open_object(name, length_bytes)
        self._objects[file] = name
        return file

    def close_file(self, file: FileId) -> None:
        self.inner.close_file(file)
        self._paths.pop(file, None)
        self._objects.pop(file, None)
        self._direct.discard(file)

    def release(self) -> None:
        """Let stuck transfers go on, those of the future included."""
        self._released.set()

    def submit(
        self, op: Op, memory: MemoryId, memory_extents: Extents, file: FileId, file_extents: Extents
    ) -> Transfer:
        """Start the transfer, or do what the script says instead."""
        fault = self._next_fault(op)
        if fault is None:
            return self.inner.submit(op, memory, memory_extents, file, file_extents)
        if fault.kind is FaultKind.REFUSE:
            raise MoverError(f"{self.name}: refused by a scripted fault")
        total_bytes = int(np.asarray(memory_extents)[:, 1].sum())
        transfer = _FaultyTransfer(op, total_bytes, fault=fault, polls_left=fault.amount)
        transfer.request = (memory, memory_extents, file, file_extents)
        if fault.kind is FaultKind.STUCK:
            self._stuck.add(transfer)
        elif fault.kind in {FaultKind.FAIL, FaultKind.SHORT}:
            grid = self.limits.alignment_bytes if file in self._direct else 1
            amount = fault.amount // grid * grid
            mem, fil = _head(memory_extents, amount), _head(file_extents, amount)
            if op is Op.WRITE and len(fil) and amount < total_bytes and file in self._objects:
                # An object is written whole, so the short one is another object under the same name.
                transfer.cut = file = self.inner.open_object(self._objects[file], amount)
            transfer.inner = self.inner.submit(op, memory, mem, file, fil)
        else:
            if fault.kind is FaultKind.CORRUPT and op is Op.WRITE and file in self._objects:
                self._flip(transfer, fault.amount, source=True)
            transfer.inner = self.inner.submit(op, memory, memory_extents, file, file_extents)
        return transfer

    def poll(self, transfer: Transfer) -> TransferState:
        if not isinstance(transfer, _FaultyTransfer):
            return self.inner.poll(transfer)
        fault = transfer.fault
        if transfer.state is not TransferState.PENDING or fault is None or transfer.request is None:
            return transfer.state
        if transfer.inner is None:
            if not self._released.is_set():
                return transfer.state
            self._stuck.discard(transfer)
            try:
                transfer.inner = self.inner.submit(transfer.op, *transfer.request)
            except MoverError as error:
                transfer.error, transfer.state = str(error), TransferState.FAILED
                return transfer.state
        if self.inner.poll(transfer.inner) is TransferState.PENDING:
            return transfer.state
        if fault.kind is FaultKind.LATE and transfer.polls_left > 0:
            transfer.polls_left -= 1
            return transfer.state
        transfer.error, transfer.quarantine = transfer.inner.error, transfer.inner.quarantine
        transfer.missing = transfer.inner.missing
        transfer.state = transfer.inner.state
        if transfer.cut is not None and not transfer.quarantine:
            self.inner.close_file(transfer.cut)
        if fault.kind is FaultKind.FAIL:
            transfer.error = f"{self.name}: failed by a scripted fault"
            transfer.quarantine |= fault.quarantine
            transfer.state = TransferState.FAILED
        elif fault.kind is FaultKind.CORRUPT and transfer.request[2] in self._objects and transfer.op is Op.WRITE:
            self._flip(transfer, fault.amount, source=True)  # back, for the memory itself was right
        elif fault.kind is FaultKind.CORRUPT and transfer.state is TransferState.DONE:
            self._flip(transfer, fault.amount)
        return transfer.state

    def close(self) -> None:
        """Transfers that are still stuck become FAILED; nothing of them was ever started."""
        for transfer in self._stuck:
            transfer.error, transfer.state = f"{self.name}: closed while stuck", TransferState.FAILED
        self._stuck.clear()
        self.inner.close()

    def _next_fault(self, op: Op) -> Fault | None:
        number = {None: len(self.submitted), op: self.submitted.count(op)}
        self.submitted.append(op)
        for fault in self.script:
            if fault.op in number:
                reached = number[fault.op]
                if reached == fault.nth or (fault.every and reached > fault.nth):
                    return fault
        return None

    def _flip(self, transfer: _FaultyTransfer, position: int, *, source: bool = False) -> None:
        """Flip all bits of byte ``position`` of the transfer, counted over its rows in order, where it arrives.

        ``source``: in the memory that it comes from.
        """
        if transfer.request is None:
            return
        memory, memory_extents, file, file_extents = transfer.request
        in_memory = source or transfer.op is Op.READ
        extents = memory_extents if in_memory else file_extents
        ends = np.cumsum(extents[:, 1])
        row = int(np.searchsorted(ends, position, side="right"))
        offset = int(extents[row, 0] + position - (ends[row] - extents[row, 1]))
        if in_memory:
            region = self._regions[memory]
            if region.kind is not MemoryKind.DRAM:
                raise MoverError(f"{self.name}: a scripted flip works on host memory only")
            byte = ctypes.c_uint8.from_address(region.address + offset)
            byte.value ^= 0xFF
            return
        fd = os.open(self._paths[file], os.O_RDWR | os.O_CLOEXEC)
        try:
            os.pwrite(fd, bytes([os.pread(fd, 1, offset)[0] ^ 0xFF]), offset)
        finally:
            os.close(fd)


def _head(extents: Extents, amount_bytes: int) -> Extents:
    """The rows that hold the first ``amount_bytes``, the last one cut."""
    ends = np.cumsum(extents[:, 1])
    head = np.array(extents[: int(np.searchsorted(ends, amount_bytes, side="left")) + 1])
    if not len(head) or amount_bytes <= 0:
        return head[:0]
    head[-1, 1] = min(int(head[-1, 1]), amount_bytes - int(ends[len(head) - 1] - head[-1, 1]))
    return head
