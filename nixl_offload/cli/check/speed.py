"""A short I/O test of movers, as a server compares them at start. It tells a drive from a network share, not one drive
from another.

Threading: one thread, in the child process. Ownership: the scratch file has no name while bytes move; objects are
removed before the figures are returned. Memory for objects is kept for the life of the process: late I/O may touch it.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch

from nixl_offload.engine.autotune import FREE_SHARE, best_of, compare
from nixl_offload.engine.engine_memory import Staging
from nixl_offload.engine.streams import device_of
from nixl_offload.errors import MoverError
from nixl_offload.movers.base import MemoryKind, Mover, Op, TransferState
from nixl_offload.movers.select import make_mover, scratch_memory
from nixl_offload.stores.base import Store
from nixl_offload.types import PAGE_BYTES, align_up

_BUDGET_S: Final = 2.0
_PHASE_S: Final = 0.15
"""For writing objects, and for reading them."""
_OBJECTS: Final = 8
_MAX_PIECE_BYTES: Final = 4 << 20
_STUCK_S: Final = 30.0
_KEPT: Final[list[object]] = []


def measure_file_movers(
    names: Sequence[str], directory: str, gpu: bool, direct_io: bool, piece_bytes: int, **options: Any
) -> dict[str, Any]:
    """Compare movers in ``directory``. Returns ``speeds`` by name, with ``failed`` where there are none, and the name
    of the ``fastest``. Raises OSError.
    """
    space = os.statvfs(directory)
    if space.f_blocks:
        piece_bytes = min(piece_bytes, space.f_bavail * space.f_frsize // FREE_SHARE)
    piece_bytes = min(piece_bytes, _MAX_PIECE_BYTES) // PAGE_BYTES * PAGE_BYTES
    if not piece_bytes:
        return {"speeds": {name: {"failed": "the disk is too full to measure on"} for name in names}, "fastest": None}
    paths: list[tuple[str, Staging]] = [
        (name, "host" if gpu and name not in ("gds_mt", "kvikio") else "device") for name in names
    ]
    found = compare(
        paths,
        directory,
        device_of(torch.empty(0, device="cuda" if gpu else "cpu")),
        piece_bytes,
        lambda name: make_mover(name, **options),
        direct_io=direct_io,
        budget_s=_BUDGET_S,
    )
    speeds = {each.mover: _figures(each.mover, piece_bytes, each.read_bytes_s, each.write_bytes_s) for each in found}
    failed = {each.mover: {"failed": each.reason} for each in found if not each.measured}
    best = best_of(found)
    return {"speeds": speeds | failed, "fastest": best and best.mover}


def measure_object_mover(mover: Mover, store: Store, connections: int, piece_bytes: int) -> dict[str, Any]:
    """Measure an open mover of objects; ``store`` removes what it wrote. Raises MoverError, StoreError."""
    piece_bytes = min(align_up(piece_bytes), _MAX_PIECE_BYTES)
    names = [f"check-{secrets.token_hex(8)}" for _ in range(min(_OBJECTS, connections))]
    region, keep = scratch_memory(MemoryKind.DRAM, len(names) * piece_bytes)
    _KEPT.append(keep)
    memory = mover.register_memory(region)
    in_object = np.array([[0, piece_bytes]], dtype=np.int64)
    offsets = [np.array([number * piece_bytes, 0], dtype=np.int64) for number in range(len(names))]
    speeds = {}
    try:
        objects = [mover.open_object(name, piece_bytes) for name in names]
        for op in (Op.WRITE, Op.READ):
            began_s, moved_bytes = time.monotonic(), 0
            while time.monotonic() - began_s < _PHASE_S:
                transfers = [
                    mover.submit(op, memory, in_object + offset, opened, in_object)
                    for offset, opened in zip(offsets, objects, strict=True)
                ]
                until_s = time.monotonic() + _STUCK_S
                while any(mover.poll(each) is TransferState.PENDING for each in transfers):
                    if time.monotonic() > until_s:
                        raise MoverError(f"nothing moved for {_STUCK_S:.0f} s")
                    time.sleep(0.0002)
                failed = [each.error or "failed" for each in transfers if each.state is TransferState.FAILED]
                if failed:
                    raise MoverError(failed[0])
                moved_bytes += len(objects) * piece_bytes
            speeds[op] = moved_bytes / (time.monotonic() - began_s)
        for opened in objects:
            mover.close_file(opened)
        mover.unregister_memory(memory)
    finally:
        store.delete(names)
    return _figures(mover.name, piece_bytes, speeds[Op.READ], speeds[Op.WRITE])


def _figures(mover: str, piece_bytes: int, read: float, written: float) -> dict[str, Any]:
    return {"mover": mover, "piece_bytes": piece_bytes, "read_bytes_s": read, "write_bytes_s": written}
