"""A short I/O test of one tier through the mover that a server would take: speed of many pieces, latency of one page.

Threading: one thread, which drives the mover. Ownership: what is written is removed before the figures are returned; a
scratch file loses its name before the first byte moves. A figure of a few hundred ms tells a drive from a network
share, not one drive from another: ``nixl-offload bench`` measures.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np

from nixl_offload.errors import MoverError, StoreError
from nixl_offload.movers.base import FileId, MemoryId, MemoryKind, Mover, Op, Transfer, TransferState
from nixl_offload.movers.limits import LimitedMover
from nixl_offload.movers.select import make_mover, scratch_memory
from nixl_offload.stores.base import Store
from nixl_offload.types import PAGE_BYTES, align_up

PIECES: Final = 16
"""In flight at once, of files."""
OBJECTS: Final = 8
PHASE_S: Final = 0.15
"""Of writing and of reading; what is in flight then is waited for."""
PAGES: Final = 32
PAGES_S: Final = 0.05
FREE_SHARE: Final = 4
"""At most a quarter of what the filesystem has left."""
MAX_PIECE_BYTES: Final = 16 << 20
STUCK_S: Final = 30.0


def measure_files(
    name: str, directory: str, *, gpu: bool, direct_io: bool, piece_bytes: int, options: dict[str, Any]
) -> dict[str, Any]:
    """Measure file mover ``name`` in ``directory``. Raises MoverError; nothing stays behind."""
    piece_bytes = min(align_up(piece_bytes), MAX_PIECE_BYTES)
    space = os.statvfs(directory)
    if space.f_blocks:
        piece_bytes = min(
            piece_bytes, space.f_bavail * space.f_frsize // FREE_SHARE // PIECES // PAGE_BYTES * PAGE_BYTES
        )
    if piece_bytes < PAGE_BYTES:
        raise MoverError("the disk is too full to measure on")
    mover = LimitedMover(make_mover(name, **options))
    on_device = gpu and name != "copy" and MemoryKind.VRAM in mover.memory_kinds
    try:
        with _scratch(directory, PIECES * piece_bytes) as (descriptor, path):
            memory = _take_memory(mover, PIECES * piece_bytes, MemoryKind.VRAM if on_device else MemoryKind.DRAM)
            file = mover.open_file(path, PIECES * piece_bytes, direct_io=direct_io)
            os.unlink(path)
            run = _Files(mover, memory, file, piece_bytes)
            count = run.fill()
            written = run.speed(Op.WRITE, count)
            if not direct_io:  # the page cache would answer
                os.fdatasync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            read = run.speed(Op.READ, count, laps=None if direct_io else 1)
            latencies = {op: run.latency(op) for op in (Op.WRITE, Op.READ)}
            mover.close_file(file)
            mover.unregister_memory(memory)
    except OSError as error:
        raise MoverError(f"scratch file in {directory}: {error.strerror or error}") from error
    finally:
        mover.close()
    return _figures(name, piece_bytes, read, written, latencies[Op.READ], latencies[Op.WRITE])


def measure_objects(mover: Mover, store: Store, connections: int, piece_bytes: int) -> dict[str, Any]:
    """Measure an open object mover; ``store`` removes what it wrote. Raises MoverError.

    The names of objects that could not be removed are under ``left``.
    """
    piece_bytes = min(align_up(piece_bytes), MAX_PIECE_BYTES)
    count = min(OBJECTS, connections)
    names = [f"check-{secrets.token_hex(8)}" for _ in range(count + 1)]
    memory = _take_memory(mover, count * piece_bytes, MemoryKind.DRAM)
    left: list[str] = []
    try:
        page = mover.open_object(names[-1], PAGE_BYTES)
        pages = _Objects(mover, memory, [page], PAGE_BYTES)
        latencies = {op: pages.latency(op) for op in (Op.WRITE, Op.READ)}
        objects = [mover.open_object(name, piece_bytes) for name in names[:-1]]
        run = _Objects(mover, memory, objects, piece_bytes)
        written = run.speed(Op.WRITE, count)
        read = run.speed(Op.READ, count)
        for target in (page, *objects):
            mover.close_file(target)
        mover.unregister_memory(memory)
    finally:
        try:
            store.delete(names)
        except StoreError:
            left = names
    return {**_figures(mover.name, piece_bytes, read, written, latencies[Op.READ], latencies[Op.WRITE]), "left": left}


class _Files:
    """Pieces of one file, side by side, each with its own piece of memory."""

    def __init__(self, mover: Mover, memory: MemoryId, file: FileId, piece_bytes: int) -> None:
        self._mover = mover
        self._memory = memory
        self._file = file
        self._piece_bytes = piece_bytes

    def fill(self) -> int:
        """Write pieces for the first time, which is slower than it will be ever after; return how many there was time
        for: all, unless the disk is slow.
        """
        began_s, done = time.monotonic(), 0
        while done < PIECES and (not done or time.monotonic() - began_s < PHASE_S):
            _wait(self._mover, [self._submit(Op.WRITE, done)])
            done += 1
        return done

    def speed(self, op: Op, count: int, laps: int | None = None) -> float:
        """Return bytes per second of moving the first ``count`` pieces at once, again and again."""
        began_s, moved, lap = time.monotonic(), 0, 0
        while not lap or (time.monotonic() - began_s < PHASE_S and (laps is None or lap < laps)):
            _wait(self._mover, [self._submit(op, number) for number in range(count)])
            moved, lap = moved + count * self._piece_bytes, lap + 1
        return moved / (time.monotonic() - began_s)

    def latency(self, op: Op) -> float:
        """Return the median of seconds that one page takes alone."""
        times: list[float] = []
        until_s = time.monotonic() + PAGES_S
        while not times or (len(times) < PAGES and time.monotonic() < until_s):
            began_s = time.perf_counter()
            _wait(self._mover, [self._submit(op, 0, PAGE_BYTES)], pause_s=0.0)
            times.append(time.perf_counter() - began_s)
        return statistics.median(times)

    def _submit(self, op: Op, number: int, length_bytes: int = 0) -> Transfer:
        extents = np.array([[number * self._piece_bytes, length_bytes or self._piece_bytes]], dtype=np.int64)
        return self._mover.submit(op, self._memory, extents, self._file, extents)


class _Objects(_Files):
    """A piece is an object."""

    def __init__(self, mover: Mover, memory: MemoryId, objects: Sequence[FileId], piece_bytes: int) -> None:
        super().__init__(mover, memory, objects[0], piece_bytes)
        self._objects = objects

    def _submit(self, op: Op, number: int, length_bytes: int = 0) -> Transfer:
        there = np.array([[0, length_bytes or self._piece_bytes]], dtype=np.int64)
        here = there + np.array([[number * self._piece_bytes, 0]], dtype=np.int64)
        return self._mover.submit(op, self._memory, here, self._objects[number], there)


def _wait(mover: Mover, transfers: Sequence[Transfer], pause_s: float = 0.0002) -> None:
    """Poll until all are done. Raises MoverError; what is in flight then keeps its memory for the process's life."""
    until_s = time.monotonic() + STUCK_S
    pending = list(transfers)
    while pending:
        pending = [each for each in pending if mover.poll(each) is TransferState.PENDING]
        if pending and time.monotonic() > until_s:
            raise MoverError(f"nothing moved for {STUCK_S:.0f} s")
        if pending and pause_s:
            time.sleep(pause_s)
    for transfer in transfers:
        if transfer.state is TransferState.FAILED:
            raise MoverError(transfer.error or "failed")


def _take_memory(mover: Mover, length_bytes: int, kind: MemoryKind) -> MemoryId:
    """Register memory, on the host with bytes that do not compress. It stays for the life of this short-lived process:
    late I/O of a failed transfer finds nobody else there.
    """
    region, keep = scratch_memory(kind, length_bytes)
    _KEPT.append(keep)
    if kind is MemoryKind.DRAM:
        noise = os.urandom(min(length_bytes, 1 << 20))
        for offset in range(0, length_bytes, len(noise)):
            ctypes.memmove(region.address + offset, noise, min(len(noise), length_bytes - offset))
    return mover.register_memory(region)


_KEPT: Final[list[object]] = []


@contextlib.contextmanager
def _scratch(directory: str, length_bytes: int) -> Iterator[tuple[int, str]]:
    """A private file with space under it; the caller may take its name away. Raises OSError."""
    descriptor, path = tempfile.mkstemp(prefix=".mover-probe-", dir=directory)
    try:
        os.posix_fallocate(descriptor, 0, length_bytes)
        yield descriptor, path
    finally:
        os.close(descriptor)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def _figures(
    name: str, piece_bytes: int, read: float, written: float, read_latency_s: float, write_latency_s: float
) -> dict[str, Any]:
    return {
        "mover": name,
        "piece_bytes": piece_bytes,
        "read_bytes_s": read,
        "write_bytes_s": written,
        "read_latency_s": read_latency_s,
        "write_latency_s": write_latency_s,
    }
