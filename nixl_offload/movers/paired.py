"""Two movers as one: device memory goes by the first, host memory by the second, to and from the same files.

For movers that register host memory with cuFile as well. That would pin it once more, take long, and might fail: a
memory tier of a hundred GB must not go there.

Threading: as the two, driven by one thread. Ownership: owns both and closes them.
"""

from __future__ import annotations

import os
from contextlib import ExitStack

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


class PairedMover(Mover):
    """The contract and the limits of the device's mover. Moves files, no objects.

    A memory's id is twice that of its mover, plus 1 for host memory. A file's id is the device's mover's. A file is
    closed when both have let go of it.
    """

    def __init__(self, device: Mover, host: Mover) -> None:
        """``device`` takes VRAM and ``host`` DRAM."""
        self.name = device.name
        self.memory_kinds = frozenset(MemoryKind)
        self.limits = device.limits
        self._device, self._host = device, host
        self._host_files: dict[FileId, FileId] = {}

    def register_memory(self, region: MemoryRegion) -> MemoryId:
        on_host = region.kind is MemoryKind.DRAM
        return MemoryId(2 * (self._host if on_host else self._device).register_memory(region) + on_host)

    def unregister_memory(self, memory: MemoryId) -> None:
        inner, on_host = divmod(memory, 2)
        (self._host if on_host else self._device).unregister_memory(MemoryId(inner))

    def adopt_file(self, fd: int, path: str, length_bytes: int, *, direct: bool) -> FileId:
        try:
            host_fd = os.dup(fd)
        except OSError as error:
            os.close(fd)
            raise MoverError(f"cannot use {path}: {error.strerror}") from error
        try:
            file = self._device.adopt_file(fd, path, length_bytes, direct=direct)
        except BaseException:
            os.close(host_fd)
            raise
        try:
            self._host_files[file] = self._host.adopt_file(host_fd, path, length_bytes, direct=direct)
        except BaseException:
            self._device.close_file(file)
            raise
        return file

    def close_file(self, file: FileId) -> None:
        """Raises MoverError while a transfer of either is in flight or quarantined."""
        if file in self._host_files:
            self._host.close_file(self._host_files[file])
            del self._host_files[file]
        self._device.close_file(file)

    def submit(
        self, op: Op, memory: MemoryId, memory_extents: Extents, file: FileId, file_extents: Extents
    ) -> Transfer:
        if file not in self._host_files:
            raise MoverError(f"{self.name}: file {file} is not open here")
        inner, on_host = divmod(memory, 2)
        mover, opened = (self._host, self._host_files[file]) if on_host else (self._device, file)
        return mover.submit(op, MemoryId(inner), memory_extents, opened, file_extents)

    def poll(self, transfer: Transfer) -> TransferState:
        self._device.poll(transfer)  # one of them knows it
        return self._host.poll(transfer)

    def close(self) -> None:
        with ExitStack() as both:  # the second is closed even if the first raises
            both.callback(self._host.close)
            both.callback(self._device.close)
