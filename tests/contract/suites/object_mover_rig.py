"""What the conformance suite of movers of objects works with: a mover with memory, and raw access to its objects.

Threading: one test, one thread.
"""

from __future__ import annotations

import mmap
import secrets
import time
from typing import Protocol

import numpy as np

from nixl_offload.movers.base import Extents, FileId, MemoryId, MemoryKind, MemoryRegion, Mover, Op, Transfer
from tests.contract.suites.mover_rig import WAIT_S, extents, wait


class RawObjects(Protocol):
    """Access to the objects without the mover; names are as the mover takes them."""

    def write(self, name: str, data: bytes) -> None:
        """Make an object."""

    def read(self, name: str) -> bytes:
        """Return an object's bytes."""

    def exists(self, name: str) -> bool:
        """Whether there is one."""


class ObjectRig:
    """A mover with one region of ``size_bytes`` of random memory, and names that nobody else uses."""

    def __init__(self, mover: Mover, raw: RawObjects, kind: MemoryKind, size_bytes: int) -> None:
        self.mover, self.raw = mover, raw
        self._pages = mmap.mmap(-1, size_bytes)
        self.memory = np.frombuffer(self._pages, dtype=np.uint8)
        self.memory[:] = np.random.default_rng(size_bytes).integers(0, 256, size_bytes, dtype=np.uint8)
        self.region = MemoryRegion(int(self.memory.ctypes.data), size_bytes, kind)
        self.memory_id: MemoryId = mover.register_memory(self.region)
        self._prefix = secrets.token_hex(6)

    def name(self, what: str) -> str:
        """A fresh test's own name; objects of one directory, as shards of one key are."""
        return f"suite/{self._prefix}-{what}"

    def store(self, what: str, data: bytes) -> str:
        """Make an object behind the mover's back and return its name."""
        name = self.name(what)
        self.raw.write(name, data)
        return name

    def open(self, name: str, length_bytes: int) -> FileId:
        """Name an object in the mover."""
        return self.mover.open_object(name, length_bytes)

    def submit(self, op: Op, where: Extents, target: FileId, there: Extents) -> Transfer:
        """Submit between the region and an object."""
        return self.mover.submit(op, self.memory_id, where, target, there)

    def move(self, op: Op, offset: int, target: FileId, there: int, length_bytes: int) -> Transfer:
        """Submit one extent and poll until it is final."""
        return self.wait(self.submit(op, extents([offset], length_bytes), target, extents([there], length_bytes)))

    def wait(self, *transfers: Transfer, timeout_s: float = WAIT_S) -> Transfer:
        """Poll in turn until all are final; return the first."""
        return wait(self.mover, *transfers, timeout_s=timeout_s)

    def bytes_at(self, offset: int, length_bytes: int) -> bytes:
        """A copy of the region's bytes."""
        return self.memory[offset : offset + length_bytes].tobytes()

    def assert_memory_is_ours(self, transfer: Transfer) -> None:
        """After a final state nothing may write the memory, unless quarantine says that it may."""
        if transfer.quarantine:
            return
        self.memory[:] = 0xA5
        time.sleep(0.1)
        assert bool((self.memory == 0xA5).all()), "memory changed after a final state"
