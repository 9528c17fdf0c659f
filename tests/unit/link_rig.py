"""Parts of the rigs of link tests: a shared directory, and objects kept as files, with a real mover."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from nixl_offload.movers.base import Extents, FileEntry, FileId, MemoryId, Mover, Op, Transfer, TransferState
from nixl_offload.movers.threaded import CopyMover
from nixl_offload.stores.filesystem import REAL, Filesystem
from nixl_offload.tiers.base import Link
from nixl_offload.tiers.shared.links import ObjectLink, TreeLink
from tests.contract.suites.faulty_mover import FaultyMover

NAMESPACE_NAME = "0123456789abcdef" * 2
LinkMaker = Callable[[Mover, Callable[[], float]], Link]


def tree(root: Path, *, filesystem: Filesystem = REAL) -> LinkMaker:
    """Makes the link to a shared directory."""
    root.mkdir(exist_ok=True)
    return lambda mover, clock: TreeLink(
        str(root), NAMESPACE_NAME, mover, direct_io=True, clock=clock, filesystem=filesystem
    )


def objects() -> LinkMaker:
    """Makes the link to a bucket."""
    return lambda mover, clock: ObjectLink("s3://bucket", NAMESPACE_NAME, mover, clock)


def shards(root: Path) -> list[Path]:
    """All stored files, drafts left out."""
    return sorted(path for path in root.rglob("*.[0-9a-f][0-9a-f][0-9a-f][0-9a-f]") if path.is_file())


def drafts(root: Path) -> list[Path]:
    """Drafts that writes have left."""
    return sorted(root.rglob(".*"))


class ObjectFiles(CopyMover):
    """Objects as files of a flat directory, written whole; reports missing ones."""

    def __init__(self, directory: Path) -> None:
        super().__init__(name="objects")
        self.directory = directory
        directory.mkdir(exist_ok=True)
        self.limits = replace(self.limits, alignment_bytes=1, whole_writes=True, tells_short_reads=False)
        self.opened: dict[FileId, Path] = {}
        self.reads: dict[Transfer, FileId] = {}

    def open_object(self, name: str, length_bytes: int) -> FileId:
        """See Mover. An empty file stands for a missing object."""
        self._check_usable()
        path = self.directory / name.replace("/", "_")
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        file = self._add_file(FileEntry(fd, str(path), length_bytes))
        self.opened[file] = path
        return file

    def close_file(self, file: FileId) -> None:
        """See Mover."""
        super().close_file(file)
        del self.opened[file]

    def submit(
        self, op: Op, memory: MemoryId, memory_extents: Extents, file: FileId, file_extents: Extents
    ) -> Transfer:
        """See Mover."""
        transfer = super().submit(op, memory, memory_extents, file, file_extents)
        self.reads[transfer] = file
        return transfer

    def poll(self, transfer: Transfer) -> TransferState:
        """See Mover."""
        state = super().poll(transfer)
        if state is not TransferState.PENDING:
            file = self.reads.pop(transfer, None)
            if file is not None and state is TransferState.FAILED:
                transfer.missing = self.opened[file].stat().st_size == 0
        return state


class Watched(FaultyMover):
    """Records every transfer that starts on memory which another unfinished transfer still owns."""

    def __init__(self, mover: Mover) -> None:
        super().__init__(mover)
        self._started: dict[Transfer, tuple[MemoryId, Extents]] = {}
        self.overlaps = 0

    def submit(
        self, op: Op, memory: MemoryId, memory_extents: Extents, file: FileId, file_extents: Extents
    ) -> Transfer:
        """See Mover."""
        begin, end = memory_extents[:, 0], memory_extents.sum(axis=1)
        for other, extents in self.owned.values():
            if other == memory:
                apart = (end[:, None] <= extents[None, :, 0]) | (begin[:, None] >= extents.sum(axis=1)[None, :])
                self.overlaps += int(not np.all(apart))
        transfer = super().submit(op, memory, memory_extents, file, file_extents)
        self._started[transfer] = (memory, np.array(memory_extents))
        return transfer

    @property
    def owned(self) -> dict[Transfer, tuple[MemoryId, Extents]]:
        """Transfers that are not final, and their memory."""
        return {each: what for each, what in self._started.items() if each.state is TransferState.PENDING}
