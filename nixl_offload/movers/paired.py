"""Two movers as one: device memory goes by the first, host memory by the second, to and from the same files.

For movers that register host memory with cuFile as well. That pins it once more, takes long, and may fail: a memory
tier of a hundred GB must not go there, and gains nothing by it, as its bytes do not come from a device.

Threading: as the two, driven by one thread. Ownership: owns both and closes them. A file is opened by the second only
when host memory is first moved to or from it.
"""

from __future__ import annotations

import os
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace

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


@dataclass(slots=True, eq=False)
class _File:
    path: str
    length_bytes: int
    direct: bool
    of_device: FileId
    spare_fd: int
    """For the host's mover; -1 once that has it, or the file is being closed."""
    of_host: FileId | None = None


class PairedMover(Mover):
    """The contract of either, within the limits of both; named as the device's. Moves files, no objects.

    After a failure: as the mover that the transfer went by. A file is closed when both have let go of it.
    """

    def __init__(self, device: Mover, host: Mover) -> None:
        """``device`` takes VRAM and ``host`` DRAM; what else they take is not used."""
        first, second = device.limits, host.limits
        self.name = device.name
        self.memory_kinds = frozenset({MemoryKind.VRAM, MemoryKind.DRAM})
        self.limits = replace(
            first,
            alignment_bytes=max(first.alignment_bytes, second.alignment_bytes),
            max_extent_bytes=min(first.max_extent_bytes, second.max_extent_bytes),
            max_extents_per_transfer=min(first.max_extents_per_transfer, second.max_extents_per_transfer),
            whole_writes=first.whole_writes or second.whole_writes,
            tells_short_reads=first.tells_short_reads and second.tells_short_reads,
        )
        self._device, self._host = device, host
        self._memories: dict[MemoryId, tuple[Mover, MemoryId]] = {}
        self._files: dict[FileId, _File] = {}
        self._going: dict[Transfer, Mover] = {}
        self._next_id = 1
        self._closed = False

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    # Regions and files

    def register_memory(self, region: MemoryRegion) -> MemoryId:
        mover = self._device if region.kind is MemoryKind.VRAM else self._host
        inner = mover.register_memory(region)
        memory = MemoryId(self._new_id())
        self._memories[memory] = mover, inner
        return memory

    def unregister_memory(self, memory: MemoryId) -> None:
        mover, inner = self._memory(memory)
        mover.unregister_memory(inner)
        del self._memories[memory]

    def adopt_file(self, fd: int, path: str, length_bytes: int, *, direct: bool) -> FileId:
        try:
            spare_fd = os.dup(fd)
        except OSError as error:
            with suppress(OSError):
                os.close(fd)
            raise MoverError(f"cannot use {path}: {error.strerror}") from error

        try:
            inner = self._device.adopt_file(fd, path, length_bytes, direct=direct)
        except BaseException:
            os.close(spare_fd)
            raise
        file = FileId(self._new_id())
        self._files[file] = _File(path, length_bytes, direct, inner, spare_fd)
        return file

    def close_file(self, file: FileId) -> None:
        """Raises MoverError while a transfer of either is in flight or quarantined."""
        entry = self._file(file)
        if entry.of_host is not None:
            self._host.close_file(entry.of_host)
            entry.of_host = None
        if entry.spare_fd >= 0:
            os.close(entry.spare_fd)
            entry.spare_fd = -1
        self._device.close_file(entry.of_device)
        del self._files[file]

    # Transfers

    def submit(
        self, op: Op, memory: MemoryId, memory_extents: Extents, file: FileId, file_extents: Extents
    ) -> Transfer:
        mover, inner = self._memory(memory)
        entry = self._file(file)
        its_file = entry.of_device if mover is self._device else self._of_host(entry)
        transfer = mover.submit(op, inner, memory_extents, its_file, file_extents)
        if transfer.state is TransferState.PENDING:
            self._going[transfer] = mover
        return transfer

    def poll(self, transfer: Transfer) -> TransferState:
        mover = self._going.get(transfer)
        if mover is None:
            return transfer.state
        state = mover.poll(transfer)
        if state is not TransferState.PENDING:
            del self._going[transfer]
        return state

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with ExitStack() as rest:  # done whatever the host's mover raises
            rest.callback(self._let_go)
            rest.callback(self._device.close)
            self._host.close()

    def _let_go(self) -> None:
        for transfer, mover in list(self._going.items()):
            mover.poll(transfer)
        self._going.clear()
        for entry in self._files.values():
            if entry.spare_fd >= 0:
                os.close(entry.spare_fd)
        self._files.clear()
        self._memories.clear()

    # Inside

    def _memory(self, memory: MemoryId) -> tuple[Mover, MemoryId]:
        found = self._memories.get(memory)
        if found is None:
            raise MoverError(f"{self.name}: memory {memory} is not registered here")
        return found

    def _file(self, file: FileId) -> _File:
        found = self._files.get(file)
        if found is None:
            raise MoverError(f"{self.name}: file {file} is not open here")
        return found

    def _of_host(self, entry: _File) -> FileId:
        if entry.of_host is None:
            if entry.spare_fd < 0:
                raise MoverError(f"{self.name}: {entry.path} is being closed")
            try:
                fd = os.dup(entry.spare_fd)  # a mover that refuses closes what it was given, and may be asked again
            except OSError as error:
                raise MoverError(f"cannot use {entry.path}: {error.strerror}") from error
            entry.of_host = self._host.adopt_file(fd, entry.path, entry.length_bytes, direct=entry.direct)
            os.close(entry.spare_fd)
            entry.spare_fd = -1
        return entry.of_host
