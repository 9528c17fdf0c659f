"""Two movers as one: device memory goes by the first, host memory by the second, to and from the same files.

For movers that register host memory with cuFile as well. That would pin it once more, take long, and might fail: a
memory tier of a hundred GB must not go there.

Threading: as the two, driven by one thread. Ownership: owns both and closes them.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import replace

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
    """The contract of either, within the limits of both; named as the device's. Moves files, no objects.

    After a failure: as the mover that the transfer went by. A file is closed when both have let go of it.
    """

    def __init__(self, device: Mover, host: Mover) -> None:
        """``device`` takes VRAM and ``host`` DRAM."""
        first, second = device.limits, host.limits
        self.name = device.name
        self.memory_kinds = frozenset({MemoryKind.VRAM, MemoryKind.DRAM})
        self.limits = replace(
            first,
            alignment_bytes=max(first.alignment_bytes, second.alignment_bytes),
            max_extent_bytes=min(first.max_extent_bytes, second.max_extent_bytes),
            max_extents_per_transfer=min(first.max_extents_per_transfer, second.max_extents_per_transfer),
        )
        self._movers = {MemoryKind.VRAM: device, MemoryKind.DRAM: host}
        self._memories: dict[MemoryId, tuple[MemoryKind, MemoryId]] = {}
        self._files: dict[FileId, dict[MemoryKind, FileId]] = {}
        self._next_id = 1

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    def register_memory(self, region: MemoryRegion) -> MemoryId:
        inner = self._movers[region.kind].register_memory(region)
        memory = MemoryId(self._new_id())
        self._memories[memory] = region.kind, inner
        return memory

    def unregister_memory(self, memory: MemoryId) -> None:
        kind, inner = self._memory(memory)
        self._movers[kind].unregister_memory(inner)
        del self._memories[memory]

    def adopt_file(self, fd: int, path: str, length_bytes: int, *, direct: bool) -> FileId:
        try:
            second_fd = os.dup(fd)
        except OSError as error:
            os.close(fd)
            raise MoverError(f"cannot use {path}: {error.strerror}") from error
        fds = {MemoryKind.VRAM: fd, MemoryKind.DRAM: second_fd}
        inner: dict[MemoryKind, FileId] = {}
        try:
            for kind, mover in self._movers.items():
                inner[kind] = mover.adopt_file(fds.pop(kind), path, length_bytes, direct=direct)
        except BaseException:
            for kind, opened in inner.items():
                self._movers[kind].close_file(opened)
            for spare_fd in fds.values():
                os.close(spare_fd)
            raise
        file = FileId(self._new_id())
        self._files[file] = inner
        return file

    def close_file(self, file: FileId) -> None:
        """Raises MoverError while a transfer of either is in flight or quarantined."""
        inner = self._file(file)
        for kind in list(inner):
            self._movers[kind].close_file(inner[kind])
            del inner[kind]
        del self._files[file]

    def submit(
        self, op: Op, memory: MemoryId, memory_extents: Extents, file: FileId, file_extents: Extents
    ) -> Transfer:
        kind, inner = self._memory(memory)
        opened = self._file(file).get(kind)
        if opened is None:
            raise MoverError(f"{self.name}: file {file} is being closed")
        return self._movers[kind].submit(op, inner, memory_extents, opened, file_extents)

    def poll(self, transfer: Transfer) -> TransferState:
        for mover in self._movers.values():  # one of them knows it
            mover.poll(transfer)
        return transfer.state

    def close(self) -> None:
        with ExitStack() as both:  # the second is closed even if the first raises
            for mover in self._movers.values():
                both.callback(mover.close)

    def _memory(self, memory: MemoryId) -> tuple[MemoryKind, MemoryId]:
        if memory not in self._memories:
            raise MoverError(f"{self.name}: memory {memory} is not registered here")
        return self._memories[memory]

    def _file(self, file: FileId) -> dict[MemoryKind, FileId]:
        if file not in self._files:
            raise MoverError(f"{self.name}: file {file} is not open here")
        return self._files[file]
