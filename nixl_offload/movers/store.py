"""Objects through a ``stores.Store``: host memory, one request per transfer. The first choice for a bucket and host
memory.

Threading: as ``ThreadedMover``. Ownership: it owns the store and closes it.
"""

from __future__ import annotations

from collections.abc import Sequence

from nixl_offload.movers.base import OBJECT_LIMITS, Op
from nixl_offload.movers.threaded import Row, ThreadedMover, ThreadedTransfer, host_view
from nixl_offload.stores.base import Store


class StoreMover(ThreadedMover):
    """Puts and gets objects with the store's blocking calls. ``threads`` is how many requests are in flight."""

    def __init__(self, store: Store, *, threads: int, close_timeout_s: float = 30.0) -> None:
        super().__init__(store.name, OBJECT_LIMITS, threads=threads, close_timeout_s=close_timeout_s)
        self.store = store

    def _release(self) -> None:
        self.store.close()

    def _move(self, transfer: ThreadedTransfer, rows: Sequence[Row]) -> None:
        [(address, length, offset)] = rows
        if transfer.op is Op.READ:
            self.store.read_into(transfer.file.path, offset, host_view(address, length))
        else:
            self.store.write(transfer.file.path, host_view(address, length))
