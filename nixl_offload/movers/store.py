"""Objects through a ``stores.Store``: host memory, one request per transfer. The first choice for a bucket and host
memory.

Threading: as ``ThreadedMover``. Ownership: it owns the store and closes it.
"""

from __future__ import annotations

from nixl_offload.movers.base import FileId, Mover, MoverLimits, Op
from nixl_offload.movers.threaded import Row, ThreadedMover, ThreadedTransfer
from nixl_offload.movers.tracked import FileEntry
from nixl_offload.stores.base import Store


class StoreMover(ThreadedMover):
    """Puts and gets objects with the store's blocking calls. ``threads`` is how many requests are in flight."""

    def __init__(self, store: Store, *, threads: int, close_timeout_s: float = 30.0) -> None:
        limits = MoverLimits(max_extents_per_transfer=1, whole_writes=True)
        super().__init__(store.name, limits, threads=threads, close_timeout_s=close_timeout_s)
        self._store = store

    # It moves objects only.
    adopt_file = Mover.adopt_file

    def open_object(self, name: str, length_bytes: int) -> FileId:
        self._check_usable()
        return self._add_file(FileEntry(-1, name, length_bytes))

    def close_file(self, file: FileId) -> None:
        self._pop_file(file)

    def _release(self) -> None:
        self._store.close()

    def _move(self, transfer: ThreadedTransfer, row: Row, memory: memoryview) -> None:
        if transfer.op is Op.READ:
            self._store.read_into(transfer.file.path, row[2], memory)
        else:
            self._store.write(transfer.file.path, memory)
