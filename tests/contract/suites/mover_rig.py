"""What the suites of movers work with: a mover with one region and one file, and raw access to both behind its back.

The region comes from a factory, ``MoverRigs.make_memory``: ordinary host memory, page-locked, or a device's.
Threading: one test, one thread.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

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
    open_file,
)

KIB = 1 << 10
MIB = 1 << 20
WAIT_S = 20.0
_HUGE_BYTES = 1 << 30
"""From here on the kernel is asked for huge pages."""


class HostMemory:
    """Pages of the host. ``kind`` is what movers are told, for those that run over an emulated device.

    Other memory for the suites has ``region``, ``read`` and ``write``, too. It lives as long as it is referred to.
    """

    def __init__(self, size_bytes: int, kind: MemoryKind = MemoryKind.DRAM) -> None:
        pages = mmap.mmap(-1, size_bytes)
        if size_bytes >= _HUGE_BYTES:
            pages.madvise(mmap.MADV_HUGEPAGE)
        self._array = np.frombuffer(pages, dtype=np.uint8)
        self.region = MemoryRegion(int(self._array.ctypes.data), size_bytes, kind)

    def read(self, begin: int = 0, end: int | None = None) -> npt.NDArray[np.uint8]:
        """Return a copy of its bytes from ``begin`` to ``end`` (None: to the last)."""
        return self._array[begin:end].copy()

    def write(self, values: npt.NDArray[np.uint8] | int) -> None:
        """Replace all its bytes; a number is that byte everywhere. They are there when this returns."""
        self._array[:] = values


def extents(offsets: npt.ArrayLike, length_bytes: npt.ArrayLike) -> Extents:
    """Rows of (offset, length); one length serves all."""
    column = np.asarray(offsets, dtype=np.int64)
    return np.stack([column, np.broadcast_to(np.asarray(length_bytes, dtype=np.int64), column.shape)], axis=1)


class MemoryRig:
    """A mover with one region of random bytes."""

    def __init__(self, mover: Mover, memory: Any) -> None:
        self.mover, self._memory, self.region = mover, memory, memory.region
        self.size_bytes = memory.region.length_bytes
        self.random = np.random.default_rng(self.size_bytes)
        self.set_memory(self.random.integers(0, 256, self.size_bytes, dtype=np.uint8))
        self.memory_id: MemoryId = mover.register_memory(self.region)

    @property
    def memory(self) -> npt.NDArray[np.uint8]:
        """The region's bytes as they are now: a copy that nothing changes any more."""
        found = self._memory.read()
        found.setflags(write=False)
        return found

    def set_memory(self, values: npt.NDArray[np.uint8] | int) -> None:
        """Replace all bytes of the region; a number is that byte everywhere."""
        self._memory.write(values)

    def wait(self, *transfers: Transfer, timeout_s: float = WAIT_S) -> Transfer:
        """Poll in turn until all are final; return the first."""
        deadline_s = time.monotonic() + timeout_s
        pending = list(transfers)
        while pending := [each for each in pending if self.mover.poll(each) is TransferState.PENDING]:
            assert time.monotonic() < deadline_s, f"not final after {timeout_s} s: {pending}"
            time.sleep(0.0002)
        return transfers[0]

    def assert_memory_is_ours(self, transfer: Transfer) -> None:
        """After a final state nothing may write the memory, unless quarantine says that it may."""
        if transfer.quarantine:
            return
        self.set_memory(0xA5)
        time.sleep(0.1)
        assert bool((self.memory == 0xA5).all()), "memory changed after a final state"


class Rig(MemoryRig):
    """The same with one file as large as the region, of random bytes, and raw access to it."""

    def __init__(self, mover: Mover, path: Path, memory: Any, *, direct_io: bool) -> None:
        super().__init__(mover, memory)
        self.path = path
        self.stored = self.random.integers(0, 256, self.size_bytes, dtype=np.uint8)
        path.touch(mode=0o600)
        self.fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self.raw_write(0, self.stored.tobytes())
        self.file_id: FileId = open_file(mover, str(path), self.size_bytes, direct_io=direct_io)

    def raw_write(self, offset: int, data: bytes) -> None:
        """Write to the file without the mover."""
        view = memoryview(data)
        while view:
            written = os.pwrite(self.fd, view, offset)
            offset, view = offset + written, view[written:]

    def raw_read(self) -> npt.NDArray[np.uint8]:
        """The whole file, read without the mover."""
        return np.fromfile(self.path, dtype=np.uint8)

    def submit(self, op: Op, memory: Extents, file: Extents) -> Transfer:
        """Submit between the region and the file."""
        return self.mover.submit(op, self.memory_id, memory, self.file_id, file)

    def move(self, op: Op, memory: Extents, file: Extents) -> Transfer:
        """Submit and poll until final."""
        return self.wait(self.submit(op, memory, file))

    def close(self) -> None:
        """Close mover and file."""
        self.mover.close()
        os.close(self.fd)


class MoverRigs:
    """How a test class comes by its mover. Attributes say what the mover is."""

    memory_kind: MemoryKind = MemoryKind.DRAM
    direct_io: bool = True

    def make_mover(self) -> Mover:
        """Return a fresh mover; skip the test where this machine cannot run it."""
        raise NotImplementedError

    def make_memory(self, size_bytes: int) -> Any:
        """Return fresh memory of ``memory_kind``; skip the test where this machine has none."""
        return HostMemory(size_bytes, self.memory_kind)

    @contextmanager
    def open_rig(self, path: Path, size_bytes: int = 4 * MIB, *, direct_io: bool | None = None) -> Iterator[Rig]:
        """A rig that is closed in the end, leaving no descriptor of its file open."""
        direct = self.direct_io if direct_io is None else direct_io
        memory = self.make_memory(size_bytes)
        rig = Rig(self.make_mover(), path, memory, direct_io=direct)
        try:
            yield rig
        finally:
            rig.close()
        assert str(path) not in open_paths(), "the mover left its file open"

    @pytest.fixture
    def rig(self, tmp_path: Path) -> Iterator[Rig]:
        """The rig of most cases."""
        with self.open_rig(tmp_path / "data") as rig:
            yield rig


def open_paths() -> set[str]:
    """What this process's descriptors point at. The number of a closed one may soon be another thread's."""
    links = (Path("/proc/self/fd") / number for number in os.listdir("/proc/self/fd"))
    return {str(link.readlink()) for link in links if link.is_symlink()}


def is_closed(path: Path) -> bool:
    """Whether no descriptor leads to ``path``, in the end: KvikIO closes its own on another thread."""
    deadline = time.monotonic() + WAIT_S
    while str(path) in open_paths() and time.monotonic() < deadline:
        time.sleep(0.001)
    return str(path) not in open_paths()
