"""The plain mover: host memory and files by ``preadv`` and ``pwritev``. The contract's reference.

Used where NIXL cannot run, and in tests. Threading: as ``ThreadedMover``; the GIL is free while bytes move.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from nixl_offload.errors import MoverError
from nixl_offload.movers.base import MoverLimits, Op
from nixl_offload.movers.threaded import Row, ThreadedMover, ThreadedTransfer, host_view
from nixl_offload.types import PAGE_BYTES


class CopyMover(ThreadedMover):
    """Moves bytes between host memory and files. A short read or write is a failure; the error has the offset."""

    def __init__(self, threads: int = 4, *, name: str = "copy", close_timeout_s: float = 30.0) -> None:
        limits = MoverLimits(alignment_bytes=PAGE_BYTES)
        super().__init__(name, limits, threads=threads, close_timeout_s=close_timeout_s)

    def _move(self, transfer: ThreadedTransfer, rows: Sequence[Row]) -> None:
        op, file = transfer.op, transfer.file
        for address, length, offset in rows:
            if transfer.stop:
                return
            memory, done = host_view(address, length), 0
            while done < length:
                if op is Op.READ:
                    moved = os.preadv(file.fd, [memory[done:]], offset + done)
                else:
                    moved = os.pwritev(file.fd, [memory[done:]], offset + done)
                done += moved
                # Under O_DIRECT a piece that ends off the grid is the end of the file; going on would only give EINVAL.
                if moved == 0 or (file.direct and moved % PAGE_BYTES):
                    raise MoverError(f"short {op.value} of {file.path} at {offset}: {done} of {length} bytes")
