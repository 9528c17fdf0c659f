"""Parts of the rigs of link tests: a shared directory, and objects kept as files, with a real mover."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from nixl_offload.movers.base import Extents, FileId, MemoryId, Mover, Op, Transfer, TransferState
from nixl_offload.movers.threaded import StoreMover
from nixl_offload.stores.directory import TreeStore
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


def object_files(directory: Path) -> Mover:
    """Return a mover of objects that are kept as files. As OBJ, it tells nobody when one is cut short."""
    directory.mkdir(exist_ok=True)
    mover = StoreMover(TreeStore(str(directory)), threads=4)
    mover.limits = replace(mover.limits, tells_short_reads=False)
    return mover


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
