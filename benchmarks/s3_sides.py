"""What ``benchmarks.s3`` measures: the contract of a side, and the memory that it moves.

Threading: one thread drives a side. Ownership: a side keeps its clients until ``close``; the buffer is the caller's.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from abc import ABC, abstractmethod
from typing import Literal

import numpy as np

from nixl_offload.types import Key

POLL_S = 0.0005
"""Everybody's transfers are polled this often."""
STEP_S = 0.005
"""A short step of an engine: whoever answers "ask again" is asked again after it."""
MIB = 1 << 20
Keys = list[Key]
Move = Literal["WRITE", "READ"]


class Buffer:
    """Page-aligned host memory of equal pieces: the first half holds what is put, the second what is got."""

    def __init__(self, pieces: int, piece_bytes: int) -> None:
        self.rows, self.piece_bytes, self.size_bytes = 2 * pieces, piece_bytes, 2 * pieces * piece_bytes
        self._pages = mmap.mmap(-1, self.size_bytes)
        self.view = memoryview(self._pages)
        self._half_bytes = self.size_bytes // 2
        pattern = np.frombuffer(os.urandom(MIB + 8191), dtype=np.uint8)
        self._bytes = np.frombuffer(self._pages, dtype=np.uint8)
        self._bytes[: self._half_bytes] = np.resize(pattern, self._half_bytes)  # no two pieces are the same
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._pages))

    def forget(self) -> None:
        """Clear what was got."""
        self._bytes[self._half_bytes :] = 0

    def is_right(self) -> bool:
        """Whether what was got is what was put."""
        return np.array_equal(self._bytes[: self._half_bytes], self._bytes[self._half_bytes :])


class Side(ABC):
    """Somebody who moves objects between host memory and a bucket. Any failure raises."""

    name: str
    lists = False
    """Whether it can list."""

    @abstractmethod
    def move(self, move: Move, keys: Keys, first_row: int) -> None:
        """Put or get an object per key, from or to the buffer's rows from ``first_row`` on. Returns when all rest."""

    @abstractmethod
    def exists(self, keys: Keys) -> int:
        """Ask for each object whether it exists. Returns how many do."""

    def prefix(self, chain: Keys) -> tuple[int, int]:
        """Find how many leading keys exist, in this side's own way. Returns that many, and how many HEADs it took."""
        return self.exists(chain), len(chain)

    def forget(self) -> None:
        """Forget what was found out, so that the next question is a new one."""
        return

    def list(self) -> int | None:
        """List all objects of this side. Returns how many, or None where that is not offered."""
        return None

    @abstractmethod
    def object_path(self, key: bytes) -> str:
        """The object in the bucket that this side stores under ``key``."""

    @abstractmethod
    def close(self) -> None:
        """Release everything."""
