"""A short I/O test of a mover: some pieces written and read at once, a few hundred ms. It tells a drive from a network
share, not one drive from another: ``nixl-offload bench`` measures.

Threading: one thread, in the child process. Ownership: a scratch file loses its name before the first byte moves;
objects are removed before the figures are returned. Memory stays registered for the life of the process, so that late
I/O of a failed transfer touches nothing else.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import tempfile
import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from nixl_offload.errors import MoverError
from nixl_offload.movers.base import MemoryId, MemoryKind, Mover, Op, Transfer, TransferState
from nixl_offload.movers.limits import LimitedMover
from nixl_offload.movers.select import make_mover, scratch_memory
from nixl_offload.stores.base import Store
from nixl_offload.types import PAGE_BYTES, align_up

_FILE_PIECES: Final = 16
_OBJECTS: Final = 8
_PHASE_S: Final = 0.15
"""For writing, and for reading; what is in flight at the end is waited for."""
_FREE_SHARE: Final = 4
"""At most a quarter of the free space is taken."""
_MAX_PIECE_BYTES: Final = 16 << 20
_STUCK_S: Final = 30.0
_KEPT: Final[list[object]] = []

Submit = Callable[[Op, int], Transfer]
"""Starts moving the piece of that number."""


def measure_file_mover(
    name: str, directory: str, gpu: bool, direct_io: bool, piece_bytes: int, **options: Any
) -> dict[str, Any]:
    """Measure ``name`` in ``directory``. Raises MoverError."""
    space = os.statvfs(directory)
    if space.f_blocks:
        piece_bytes = min(piece_bytes, space.f_bavail * space.f_frsize // _FREE_SHARE // _FILE_PIECES)
    piece_bytes = min(piece_bytes, _MAX_PIECE_BYTES) // PAGE_BYTES * PAGE_BYTES
    if not piece_bytes:
        raise MoverError("the disk is too full to measure on")
    mover = LimitedMover(make_mover(name, **options))
    on_device = gpu and name != "copy" and MemoryKind.VRAM in mover.memory_kinds
    try:
        with tempfile.NamedTemporaryFile(prefix=".mover-probe-", dir=directory, delete=False) as scratch:
            try:
                os.posix_fallocate(scratch.fileno(), 0, _FILE_PIECES * piece_bytes)
                memory = _take_memory(mover, _FILE_PIECES * piece_bytes, on_device=on_device)
                file = mover.open_file(scratch.name, _FILE_PIECES * piece_bytes, direct_io=direct_io)
            finally:
                os.unlink(scratch.name)

            def submit(op: Op, number: int) -> Transfer:
                extents = np.array([[number * piece_bytes, piece_bytes]], dtype=np.int64)
                return mover.submit(op, memory, extents, file, extents)

            # The first write of a block is slower than all that follow. A slow disk has time for some pieces only.
            until_s, count = time.monotonic() + _PHASE_S, 0
            while count < _FILE_PIECES and (not count or time.monotonic() < until_s):
                _move(mover, submit, Op.WRITE, range(count, count + 1))
                count += 1
            written = _speed(mover, submit, Op.WRITE, count, piece_bytes)
            if not direct_io:  # The page cache would answer.
                os.fdatasync(scratch.fileno())
                os.posix_fadvise(scratch.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            read = _speed(mover, submit, Op.READ, count, piece_bytes, once=not direct_io)
            mover.close_file(file)
            mover.unregister_memory(memory)
    except OSError as error:
        raise MoverError(f"scratch file in {directory}: {error.strerror or error}") from error
    finally:
        mover.close()
    return {"mover": name, "piece_bytes": piece_bytes, "read_bytes_s": read, "write_bytes_s": written}


def measure_object_mover(mover: Mover, store: Store, connections: int, piece_bytes: int) -> dict[str, Any]:
    """Measure an open mover of objects; ``store`` removes what it wrote. Raises MoverError, StoreError."""
    piece_bytes = min(align_up(piece_bytes), _MAX_PIECE_BYTES)
    names = [f"check-{secrets.token_hex(8)}" for _ in range(min(_OBJECTS, connections))]
    memory = _take_memory(mover, len(names) * piece_bytes, on_device=False)
    try:
        objects = [mover.open_object(name, piece_bytes) for name in names]

        def submit(op: Op, number: int) -> Transfer:
            in_object = np.array([[0, piece_bytes]], dtype=np.int64)
            in_memory = np.array([[number * piece_bytes, piece_bytes]], dtype=np.int64)
            return mover.submit(op, memory, in_memory, objects[number], in_object)

        written = _speed(mover, submit, Op.WRITE, len(names), piece_bytes)
        read = _speed(mover, submit, Op.READ, len(names), piece_bytes)
        for opened in objects:
            mover.close_file(opened)
        mover.unregister_memory(memory)
    finally:
        store.delete(names)
    return {"mover": mover.name, "piece_bytes": piece_bytes, "read_bytes_s": read, "write_bytes_s": written}


def _speed(mover: Mover, submit: Submit, op: Op, count: int, piece_bytes: int, *, once: bool = False) -> float:
    """Return bytes per second of moving ``count`` pieces at once, again and again unless ``once``."""
    began_s, moved = time.monotonic(), 0
    while not moved or (not once and time.monotonic() - began_s < _PHASE_S):
        _move(mover, submit, op, range(count))
        moved += count * piece_bytes
    return moved / (time.monotonic() - began_s)


def _move(mover: Mover, submit: Submit, op: Op, numbers: range) -> None:
    """Move pieces and wait for all. Raises MoverError."""
    transfers = [submit(op, number) for number in numbers]
    until_s, pending = time.monotonic() + _STUCK_S, transfers
    while pending := [each for each in pending if mover.poll(each) is TransferState.PENDING]:
        if time.monotonic() > until_s:
            raise MoverError(f"nothing moved for {_STUCK_S:.0f} s")
        time.sleep(0.0002)
    for transfer in transfers:
        if transfer.state is TransferState.FAILED:
            raise MoverError(transfer.error or "failed")


def _take_memory(mover: Mover, length_bytes: int, *, on_device: bool) -> MemoryId:
    """Register memory; on the host with bytes that do not compress."""
    region, keep = scratch_memory(MemoryKind.VRAM if on_device else MemoryKind.DRAM, length_bytes)
    _KEPT.append(keep)
    if not on_device:
        noise = os.urandom(min(length_bytes, 1 << 20))
        for offset in range(0, length_bytes, len(noise)):
            ctypes.memmove(region.address + offset, noise, min(len(noise), length_bytes - offset))
    return mover.register_memory(region)
