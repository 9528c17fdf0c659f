"""One chunk's verdict, beside servers that write, evict and refresh: nothing is called bad at first sight.

Threading: several threads call ``Judge.judge`` at once, each with a buffer of its own.
"""

from __future__ import annotations

import threading
import time
from typing import Final, Literal, NamedTuple

from nixl_offload.chunk.authentication import ChunkKeys
from nixl_offload.cli.verify.shard import NO_KEY, Buffer, Macs, ShardFault, check_shard
from nixl_offload.errors import NixlOffloadError
from nixl_offload.tiers.inspect import ChunkInfo, Inspector, NamespaceInfo, ShardInfo
from nixl_offload.tiers.shared.sweep import GRACE_S
from nixl_offload.types import key_group

Verdict = Literal["good", "bad", "changed", "stale", "unfinished", "unreadable", "unauthenticated"]
"""Changed: evicted, rewritten or deleted while it was read. Stale: a slab's index names a slot that holds another chunk
by now, which is harmless, as loads check the header. Unfinished: shards of some ranks are missing, and the others are
so young that those may still be on their way. Unreadable: the storage failed, nothing is known of the chunk.
Unauthenticated: good but for its MAC, which is by a key that is not here.
"""

_PAUSES_BESIDE_AN_ENGINE_S: Final = (0.3, 1.0)
"""Before a slot is read again: an engine records an eviction in its index within 0.1 s, and writes a slot in less."""


class StoppedError(NixlOffloadError):
    """The run was interrupted: no verdict."""


class ChunkVerdict(NamedTuple):
    """What became of a chunk."""

    kind: Verdict
    chunk: ChunkInfo
    """As it was read last."""
    faults: tuple[ShardFault, ...] = ()


class Judge:
    """Reads chunks of one tier and gives verdicts. ``bytes_per_s``: all threads together read no faster."""

    def __init__(
        self, inspector: Inspector, bytes_per_s: float | None, stop: threading.Event, keys: ChunkKeys | None = None
    ) -> None:
        self._inspector = inspector
        self._macs = None if inspector.exclusive else Macs(keys)
        self._bytes_per_s = bytes_per_s
        self._next_read_s = 0.0
        self._stop = stop
        self._own = threading.local()
        self._lock = threading.Lock()
        self.bytes_read = 0
        """By all threads."""

    def judge(self, namespace: NamespaceInfo, chunk: ChunkInfo) -> ChunkVerdict:
        """Return the verdict. Raises StoppedError, StoreError, TierError (the index cannot be read)."""
        faults = self._check(namespace, chunk)
        beside_an_engine = bool(_worse(faults)) and self._inspector.in_use(namespace) is not None
        for pause_s in _PAUSES_BESIDE_AN_ENGINE_S if beside_an_engine else (0.0,):
            if not _worse(faults):
                break
            self._stop.wait(pause_s)
            now = self._inspector.look_again(namespace, chunk)
            gone = {each.place for each in chunk.shards} - {each.place for each in now.shards} if now else True
            if now is None or now.version != chunk.version or gone:
                return ChunkVerdict("changed", chunk)
            chunk, faults = now, self._check(namespace, now)
        return ChunkVerdict(self._kind(chunk, faults), chunk, _worse(faults) or faults)

    def _kind(self, chunk: ChunkInfo, faults: tuple[ShardFault, ...]) -> Verdict:
        reasons = {fault.reason for fault in _worse(faults)}
        if not reasons:
            return "unauthenticated" if faults else "good"
        if "unreadable" in reasons:
            return "unreadable"
        if reasons == {"other"} and len(faults) == len(chunk.shards) and self._inspector.exclusive:
            return "stale"
        if reasons - {"rank"} == {"missing"} and chunk.modified_s > time.time() - GRACE_S:
            return "unfinished"
        return "bad"

    def _check(self, namespace: NamespaceInfo, chunk: ChunkInfo) -> tuple[ShardFault, ...]:
        faults = []
        if not hasattr(self._own, "buffer"):
            self._own.buffer = Buffer()
        for shard in chunk.shards:
            if words := namespace.why_no_shard(chunk.key, shard.rank):
                faults.append(ShardFault(shard.rank, shard.place, "rank", words))
            elif fault := check_shard(self._read, namespace, chunk, shard, self._own.buffer, self._macs):
                faults.append(fault)
        there = {shard.rank for shard in chunk.shards}
        for rank in sorted(set(namespace.holders(key_group(chunk.key))) - there):
            words = f"the shard of rank {rank} is not there: the chunk is incomplete, and cannot be loaded"
            faults.append(ShardFault(rank, "", "missing", words))
        return tuple(faults)

    def _read(self, shard: ShardInfo, offset: int, memory: memoryview) -> None:
        if self._bytes_per_s is not None:
            with self._lock:
                now_s = time.monotonic()
                begin_s = max(self._next_read_s, now_s)
                self._next_read_s = begin_s + memory.nbytes / self._bytes_per_s
            self._stop.wait(begin_s - now_s)
        if self._stop.is_set():
            raise StoppedError("interrupted")
        self._inspector.read_into(shard, offset, memory)
        with self._lock:
            self.bytes_read += memory.nbytes


def _worse(faults: tuple[ShardFault, ...]) -> tuple[ShardFault, ...]:
    """Leave out where only a key is not here."""
    return tuple(fault for fault in faults if fault.reason != NO_KEY)
