"""One chunk's verdict, beside servers that write, evict and refresh meanwhile: nothing is called bad at first sight.

Threading: ``Judge.judge`` is called by several threads at once, each with a buffer of its own.
"""

from __future__ import annotations

import threading
import time
from typing import Final, NamedTuple

from nixl_offload.cli.inventory.base import Chunk, Held, Inventory, Shard
from nixl_offload.cli.inventory.slab import SlabInventory
from nixl_offload.cli.verify.check import Buffer, Problem, check_shard
from nixl_offload.errors import NixlOffloadError
from nixl_offload.tiers.shared.sweep import GRACE_S
from nixl_offload.types import key_group

GOOD: Final = "good"
BAD: Final = "bad"
CHANGED: Final = "changed"
"""Evicted, rewritten or deleted while it was looked at."""
STALE: Final = "stale"
"""A slab's index names a slot that has been given to another chunk since: harmless, as loads check the header."""
UNFINISHED: Final = "unfinished"
"""Some ranks' shards are missing, and the others are so young that those may still be on their way."""
UNREADABLE: Final = "unreadable"
"""The storage failed: nothing is known of the chunk."""
VERDICTS: Final = (GOOD, BAD, CHANGED, STALE, UNFINISHED, UNREADABLE)

_PAUSES_BESIDE_AN_ENGINE_S: Final = (0.3, 1.0)
"""Before a slot is read again: an engine tells its index of an eviction within 0.1 s, and writes a slot in less."""
_PAUSES_S: Final = (0.0,)


class StoppedError(NixlOffloadError):
    """The run was interrupted: no verdict."""


class Verdict(NamedTuple):
    """What became of a chunk."""

    kind: str
    chunk: Chunk
    """As it was read last."""
    problems: tuple[Problem, ...] = ()


class Throttle:
    """Spreads reads so that they take no more than so many bytes a second together. None: no limit."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._next_s = 0.0

    def wait(self, size_bytes: int, stop: threading.Event) -> None:
        """Return when ``size_bytes`` may be read, or when ``stop`` is set."""
        if self._bytes_per_s is None:
            return
        with self._lock:
            now_s = time.monotonic()
            begin_s = max(self._next_s, now_s)
            self._next_s = begin_s + size_bytes / self._bytes_per_s
        if begin_s > now_s:
            stop.wait(begin_s - now_s)


class Judge:
    """Reads chunks of one inventory and gives verdicts."""

    def __init__(self, inventory: Inventory, throttle: Throttle, stop: threading.Event) -> None:
        self._inventory = inventory
        self._throttle = throttle
        self._stop = stop
        self._own = threading.local()
        self._lock = threading.Lock()
        self.bytes_read = 0
        """By all threads; for the progress."""

    def judge(self, held: Held, chunk: Chunk) -> Verdict:
        """Return the verdict. Raises StoppedError, StoreError, TierError (the index cannot be read)."""
        problems = self._look(held, chunk)
        pauses_s = _PAUSES_BESIDE_AN_ENGINE_S if problems and self._engine(held) else _PAUSES_S
        for pause_s in pauses_s:
            if not problems:
                break
            self._stop.wait(pause_s)
            now = self._inventory.look_again(held, chunk)
            if now is None or now.cursor != chunk.cursor:
                return Verdict(CHANGED, chunk)
            chunk, problems = now, self._look(held, now)
        return Verdict(self._kind(chunk, problems), chunk, problems)

    def _engine(self, held: Held) -> bool:
        return isinstance(self._inventory, SlabInventory) and self._inventory.in_use(held) is not None

    def _kind(self, chunk: Chunk, problems: tuple[Problem, ...]) -> str:
        if not problems:
            return GOOD
        reasons = {problem.reason for problem in problems}
        if "unreadable" in reasons:
            return UNREADABLE
        if reasons == {"other"} and len(problems) == len(chunk.shards) and self._inventory.kind == "slab":
            return STALE
        times_s = [shard.modified_s for shard in chunk.shards if shard.modified_s is not None]
        if reasons - {"rank"} == {"missing"} and times_s and max(times_s) > time.time() - GRACE_S:
            return UNFINISHED
        return BAD

    def _look(self, held: Held, chunk: Chunk) -> tuple[Problem, ...]:
        problems = []
        for shard in chunk.shards:
            words = held.why_no_shard(chunk.key, shard.rank)
            if words is not None:
                problems.append(Problem(shard.rank, shard.place, "rank", words))
                continue
            problem = check_shard(self._read, held, chunk, shard, self._buffer())
            if problem is not None:
                problems.append(problem)
        there = {shard.rank for shard in chunk.shards}
        for rank in sorted(set(held.holders(key_group(chunk.key))) - there):
            words = f"the shard of rank {rank} is not there: the chunk is incomplete, and cannot be loaded"
            problems.append(Problem(rank, "", "missing", words))
        return tuple(problems)

    def _read(self, shard: Shard, offset: int, memory: memoryview) -> None:
        self._throttle.wait(memory.nbytes, self._stop)
        if self._stop.is_set():
            raise StoppedError("interrupted")
        self._inventory.read_into(shard, offset, memory)
        with self._lock:
            self.bytes_read += memory.nbytes

    def _buffer(self) -> Buffer:
        buffer: Buffer | None = getattr(self._own, "buffer", None)
        if buffer is None:
            buffer = self._own.buffer = Buffer()
        return buffer
