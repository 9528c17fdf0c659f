"""A wrapper that makes any mover take transfers of any size: it splits them, and queues what the mover cannot hold yet.

Threading: as the wrapped mover: one thread drives it. Ownership: it owns the wrapped mover and closes it.
"""

from __future__ import annotations

import os
import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from nixl_offload.errors import MoverError
from nixl_offload.movers.base import (
    UNLIMITED,
    Extents,
    FileId,
    MemoryId,
    MemoryRegion,
    Mover,
    MoverLimits,
    Op,
    Transfer,
    TransferState,
)
from nixl_offload.movers.handles import (
    FileEntry,
    HandleTable,
    MemoryEntry,
    check_limits,
    check_usable,
    fork_message,
    total_bytes,
)
from nixl_offload.movers.poll_schedule import PollSchedule


def split_extents(memory_extents: Extents, file_extents: Extents, max_extent_bytes: int) -> tuple[Extents, Extents]:
    """Cut every row longer than ``max_extent_bytes`` into pieces of that size and a rest, both sides alike. Pure."""
    lengths = memory_extents[:, 1]
    if not len(lengths) or int(lengths.max()) <= max_extent_bytes:
        return memory_extents, file_extents
    pieces = -(-lengths // max_extent_bytes)
    row = np.repeat(np.arange(len(lengths)), pieces)
    first = np.repeat(np.cumsum(pieces) - pieces, pieces)
    skipped = (np.arange(len(row)) - first) * max_extent_bytes
    size = np.minimum(lengths[row] - skipped, max_extent_bytes)
    return (
        np.stack([memory_extents[row, 0] + skipped, size], axis=1),
        np.stack([file_extents[row, 0] + skipped, size], axis=1),
    )


def split_at(memory_extents: Extents, file_extents: Extents, cuts: npt.NDArray[np.int64]) -> tuple[Extents, Extents]:
    """Cut every row that goes over one of ``cuts``, which are rising offsets in the memory, both sides alike. Pure."""
    begins, ends = memory_extents[:, 0], memory_extents.sum(axis=1)
    first, last = np.searchsorted(cuts, begins, side="right"), np.searchsorted(cuts, ends - 1, side="right")
    pieces = last - first + 1
    if not len(pieces) or int(pieces.max()) == 1:
        return memory_extents, file_extents
    row = np.repeat(np.arange(len(pieces)), pieces)
    number = first[row] + np.arange(len(row)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    bounds = np.concatenate([[0], cuts, [np.iinfo(np.int64).max]])
    begin = np.maximum(begins[row], bounds[number])
    size = np.minimum(ends[row], bounds[number + 1]) - begin
    return np.stack([begin, size], axis=1), np.stack([file_extents[row, 0] + begin - begins[row], size], axis=1)


@dataclass(slots=True, eq=False)
class _QueuedPart:
    """What becomes one transfer of the wrapped mover, with its ids."""

    owner: _LimitedTransfer
    memory: MemoryId
    mem: Extents
    file: FileId
    fil: Extents


@dataclass(slots=True, eq=False)
class _LimitedTransfer(Transfer):
    waiting: int = 0
    """Parts not yet handed to the wrapped mover."""
    running: dict[Transfer, int] = field(default_factory=dict)
    """Inner transfers in flight and their extents."""
    entries: tuple[MemoryEntry, FileEntry] | None = None


class LimitedMover(Mover):
    """The contract of the wrapped mover without its limits; alignment and whole writes stay: nobody can split those.

    A transfer is final only when all its parts are. One failed part fails it: parts not yet started never start, those
    that run are waited for, and it is quarantined if any of them is. Parts start in the order of ``submit``.
    Where bytes move unpolled, the wrapped mover is asked only when the end of a part is to be expected, by whichever
    ``poll`` comes first.
    """

    def __init__(self, mover: Mover, *, close_timeout_s: float = 30.0) -> None:
        inner = mover.limits
        self.name = mover.name
        self.memory_kinds = mover.memory_kinds
        self.limits = MoverLimits(
            alignment_bytes=inner.alignment_bytes,
            max_extent_bytes=UNLIMITED,
            max_extents_per_transfer=UNLIMITED,
            max_extents_in_flight=UNLIMITED,
            whole_writes=inner.whole_writes,
            tells_short_reads=inner.tells_short_reads,
            moves_unpolled=inner.moves_unpolled,
        )
        self.inner = mover
        self._inner_limits = inner
        # Cut on the grid, or the second piece of an aligned extent would not be aligned.
        self._piece_bytes = max(inner.max_extent_bytes // inner.alignment_bytes, 1) * inner.alignment_bytes
        self._per_transfer = min(inner.max_extents_per_transfer, inner.max_extents_in_flight)
        self._close_timeout_s = close_timeout_s
        self._table = HandleTable(mover.name)
        self._queue: deque[_QueuedPart] = deque()
        self._running: dict[Transfer, _LimitedTransfer] = {}
        self._extents_running = 0
        self._schedule = PollSchedule() if inner.moves_unpolled else None
        self._ended: dict[_LimitedTransfer, None] = {}
        """Those with nothing in flight any more that nobody was told of."""
        self._inner_ids: dict[int, int] = {}
        self._closed = False
        self._pid = os.getpid()

    # Regions and files: the wrapped mover's, with their sizes kept, so that submit can refuse before it queues.

    def register_memory(self, region: MemoryRegion) -> MemoryId:
        inner = self.inner.register_memory(region)
        memory = self._table.add_memory(MemoryEntry(region))
        self._inner_ids[memory] = inner
        return memory

    def unregister_memory(self, memory: MemoryId) -> None:
        """Raises MoverError while a transfer is in flight, queued or quarantined."""
        self._table.memory(memory)
        entry = self._table.pop_memory(memory)
        try:
            self.inner.unregister_memory(MemoryId(self._inner_ids[memory]))
        except MoverError:
            self._table.memories[memory] = entry
            raise
        del self._inner_ids[memory]

    def open_file(self, path: str, length_bytes: int, *, direct_io: bool) -> FileId:
        inner = self.inner.open_file(path, length_bytes, direct_io=direct_io)
        return self._opened(inner, FileEntry(-1, path, length_bytes, direct_io, direct_io))

    def adopt_file(self, fd: int, path: str, length_bytes: int, *, direct: bool) -> FileId:
        inner = self.inner.adopt_file(fd, path, length_bytes, direct=direct)
        return self._opened(inner, FileEntry(-1, path, length_bytes, direct, direct))

    def open_object(self, name: str, length_bytes: int) -> FileId:
        return self._opened(self.inner.open_object(name, length_bytes), FileEntry(-1, name, length_bytes))

    def _opened(self, inner: FileId, entry: FileEntry) -> FileId:
        file = self._table.add_file(entry)
        self._inner_ids[file] = inner
        return file

    def close_file(self, file: FileId) -> None:
        """Raises MoverError while a transfer is in flight, queued or quarantined."""
        entry = self._table.pop_file(file)
        try:
            self.inner.close_file(FileId(self._inner_ids[file]))
        except MoverError:
            self._table.files[file] = entry
            raise
        del self._inner_ids[file]

    # Transfers

    def submit(
        self, op: Op, memory: MemoryId, memory_extents: Extents, file: FileId, file_extents: Extents
    ) -> Transfer:
        """Never refuses for size or number, but for a whole write that the wrapped mover cannot take."""
        if self._fits_at_once(memory, memory_extents):
            return self._submit_whole(op, memory, memory_extents, file, file_extents)
        m, mem, f, fil = self._table.check(self.limits, op, memory, memory_extents, file, file_extents)
        if self.limits.whole_writes and op is Op.WRITE:
            check_limits(self.name, len(mem), total_bytes(mem), self._inner_limits)  # of one extent, or none
        self._check_usable()
        if not len(mem):
            return Transfer(op, 0, TransferState.DONE)
        ids = MemoryId(self._inner_ids[memory]), FileId(self._inner_ids[file])
        transfer = _LimitedTransfer(op, total_bytes(mem), entries=(m, f))
        if transfer.bytes_total > self._piece_bytes:
            mem, fil = split_extents(mem, fil, self._piece_bytes)
        for start in range(0, len(mem), self._per_transfer):
            rows = slice(start, start + self._per_transfer)
            self._queue.append(_QueuedPart(transfer, ids[0], mem[rows], ids[1], fil[rows]))
            transfer.waiting += 1
        self._hold(transfer)
        # A single part that the wrapped mover refuses at once was never started: that is an exception, not a failure.
        refused = self._start_waiting(raise_for=transfer if transfer.waiting == 1 else None)
        if refused is not None:
            transfer.state = TransferState.FAILED
            self._let_go(transfer)
            raise refused
        return transfer

    def _fits_at_once(self, memory: MemoryId, extents: Extents) -> bool:
        """Whether the wrapped mover takes a transfer as it is, now: nearly every one."""
        limits, count = self._inner_limits, len(extents)
        if self._queue or not 0 < count <= self._per_transfer or extents.ndim != 2:
            return False
        if self._extents_running + count > limits.max_extents_in_flight:
            return False
        if self._table.memory(memory).region.length_bytes <= limits.max_extent_bytes:
            return True
        return int(np.maximum.reduce(extents[:, 1])) <= limits.max_extent_bytes

    def _submit_whole(
        self, op: Op, memory: MemoryId, memory_extents: Extents, file: FileId, file_extents: Extents
    ) -> Transfer:
        """Hand a transfer over as it is; the wrapped mover checks it."""
        transfer = _LimitedTransfer(op, 0, entries=(self._table.memory(memory), self._table.file(file)))
        self._check_usable()
        ids = MemoryId(self._inner_ids[memory]), FileId(self._inner_ids[file])
        try:
            inner = self.inner.submit(op, ids[0], memory_extents, ids[1], file_extents)
        except MoverError:
            raise
        except Exception as error:  # noqa: BLE001 - as in _start_waiting: who knows what was started
            transfer.error, transfer.quarantine, transfer.state = f"{self.name}: {error!r}", True, TransferState.FAILED
        else:
            transfer.bytes_total = inner.bytes_total
            transfer.running[inner] = len(memory_extents)
            self._running[inner] = transfer
            self._extents_running += len(memory_extents)
            if self._schedule is not None:
                self._schedule.began(inner, time.monotonic())
        self._hold(transfer)
        return transfer

    def _check_usable(self) -> None:
        """Raise MoverError in a fork and after ``close``."""
        check_usable(self.name, self._pid, self._closed)

    def poll(self, transfer: Transfer) -> TransferState:
        """While parts of it wait in the queue this pushes everything on, so that their turn comes."""
        if transfer.state is not TransferState.PENDING or not isinstance(transfer, _LimitedTransfer):
            return transfer.state
        if os.getpid() != self._pid:
            transfer.error, transfer.quarantine = fork_message(self.name, self._pid), True
            transfer.state = TransferState.FAILED
            return transfer.state
        if not self._poll_due():
            for inner in list(self._running if transfer.waiting else transfer.running):
                self._poll_inner(inner)
            self._start_waiting()
        self._settle(transfer)
        return transfer.state

    def look(self) -> float | None:
        """Also starts what waits."""
        if self._schedule is None or not self._poll_due():
            return None
        if not self._ended:
            return max(self._schedule.next_s - time.monotonic(), 0.0)
        for owner in list(self._ended):
            self._settle(owner)
        return 0.0

    def _poll_due(self) -> bool:
        """Poll what may have ended; False where that is not known of any."""
        schedule = self._schedule
        if schedule is None or self._closed or os.getpid() != self._pid:
            return False
        now_s = time.monotonic()
        if now_s >= schedule.next_s:
            for began_s, inner in schedule.take(now_s):
                try:
                    is_final = self._poll_inner(inner)
                except Exception as error:  # noqa: BLE001 - a poll must not raise: here it would cost all that is due
                    self._running[inner].quarantine = True
                    self._end_part(inner, f"{self.name}: {error!r}")
                    continue
                if is_final:
                    schedule.ended(inner, began_s, now_s)
                else:
                    schedule.pending(inner, began_s, now_s)
            self._start_waiting()
        return True

    def _poll_inner(self, inner: Transfer) -> bool:
        """Whether it is final."""
        if self.inner.poll(inner) is TransferState.PENDING:
            return False
        owner = self._running[inner]
        owner.quarantine |= inner.quarantine
        owner.missing |= inner.missing
        self._end_part(inner, (inner.error or f"{self.name}: failed") if inner.state is TransferState.FAILED else None)
        return True

    def _end_part(self, inner: Transfer, error: str | None) -> None:
        """A part runs no longer. ``error``: None says that it is DONE."""
        owner = self._running.pop(inner)
        self._extents_running -= owner.running.pop(inner)
        if error is not None:
            owner.error = owner.error or error
            self._drop_waiting(owner)
        # Its owner may not be the transfer that is polled now; it becomes final when its own turn comes, or by a look.
        self._note_end(owner)

    def _start_waiting(self, raise_for: _LimitedTransfer | None = None) -> MoverError | None:
        """Hand over parts while they fit. Returns the refusal of ``raise_for``'s part; others fail their owner."""
        limits = self._inner_limits
        while self._queue:
            part = self._queue[0]
            if self._extents_running + len(part.mem) > limits.max_extents_in_flight:
                return None
            self._queue.popleft()
            part.owner.waiting -= 1
            try:
                inner = self.inner.submit(part.owner.op, part.memory, part.mem, part.file, part.fil)
            except MoverError as error:
                if part.owner is raise_for:
                    return error
                part.owner.error = part.owner.error or str(error)
                self._drop_waiting(part.owner)
                self._note_end(part.owner)
                continue
            except Exception as error:  # noqa: BLE001 - a part that is lost without a word would end as DONE
                # Only a MoverError promises that nothing was started.
                part.owner.error = part.owner.error or f"{self.name}: {error!r}"
                part.owner.quarantine = True
                self._drop_waiting(part.owner)
                self._note_end(part.owner)
                continue
            part.owner.running[inner] = len(part.mem)
            self._running[inner] = part.owner
            self._extents_running += len(part.mem)
            if self._schedule is not None:
                self._schedule.began(inner, time.monotonic())
        return None

    def _note_end(self, owner: _LimitedTransfer) -> None:
        if not owner.waiting and not owner.running:
            self._ended[owner] = None

    def _drop_waiting(self, owner: _LimitedTransfer) -> None:
        if owner.waiting:
            self._queue = deque(part for part in self._queue if part.owner is not owner)
            owner.waiting = 0

    def _settle(self, transfer: _LimitedTransfer) -> None:
        if transfer.waiting or transfer.running:
            return
        self._ended.pop(transfer, None)
        transfer.state = TransferState.DONE if transfer.error is None else TransferState.FAILED
        if not transfer.quarantine:
            self._let_go(transfer)

    def _hold(self, transfer: _LimitedTransfer) -> None:
        if transfer.entries is not None:
            for entry in transfer.entries:
                entry.in_flight += 1

    def _let_go(self, transfer: _LimitedTransfer) -> None:
        if transfer.entries is not None:
            for entry in transfer.entries:
                entry.in_flight -= 1
            transfer.entries = None

    def close(self) -> None:
        """What is queued is still moved, for ``close_timeout_s`` at most; then the queue is dropped."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        owners = {*self._running.values(), *(part.owner for part in self._queue)}
        deadline = time.monotonic() + self._close_timeout_s
        while time.monotonic() < deadline:
            owners = {owner for owner in owners if self.poll(owner) is TransferState.PENDING}
            if not owners:
                break
            time.sleep(0.0002)
        for owner in owners:
            owner.error = owner.error or f"{self.name}: closed before it was started whole"
            self._drop_waiting(owner)
        self.inner.close()
        for owner in owners:
            self.poll(owner)
        self._table.memories.clear()
        self._table.files.clear()
