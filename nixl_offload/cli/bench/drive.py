"""Drives an open tier for ``nixl-offload bench``: whole chunks, as many in flight as a server has, for some seconds.

Threading: one thread submits and polls, as vLLM's worker does between steps.
"""

from __future__ import annotations

import random
import resource
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np

from nixl_offload.cli.bench.memory import KVCache
from nixl_offload.cli.bench.tiers import OpenTier
from nixl_offload.engine import ChunkIO
from nixl_offload.types import Key, Location, Outcome

Operation = Literal["store", "load"]

_POLL_S: Final = 0.0005
"""Often enough to keep the tier busy, seldom enough to be no part of the CPU that is reported."""
_FAILURES: Final = 8
"""So many chunks that fail, and an operation is given up."""
_STUCK_S: Final = 120.0


@dataclass(slots=True)
class Measured:
    """One operation on one tier."""

    operation: Operation
    seconds: float = 0.0
    payload_bytes: int = 0
    chunks: int = 0
    in_flight: int = 0
    cpu_s: float = 0.0
    latencies_s: list[float] = field(default_factory=list)
    """Of each chunk: from its submission to its end, the wait for others included."""
    failed: int = 0
    errors: list[str] = field(default_factory=list)

    @property
    def bytes_s(self) -> float:
        """Payload per second."""
        return self.payload_bytes / self.seconds if self.seconds else 0.0

    @property
    def chunks_s(self) -> float:
        """Chunks per second."""
        return self.chunks / self.seconds if self.seconds else 0.0

    @property
    def cpu_s_per_gb(self) -> float:
        """CPU seconds of this process, all threads and the kernel's work for them included."""
        return self.cpu_s / (self.payload_bytes / 1e9) if self.payload_bytes else 0.0

    def latency_s(self, share: float) -> float:
        """Return the latency that ``share`` of the chunks kept to."""
        return float(np.quantile(self.latencies_s, share)) if self.latencies_s else 0.0


class TierBench:
    """Stores chunks in the places of one tier, and loads those that are there."""

    def __init__(self, tier: OpenTier, cache: KVCache, report: Callable[[str], None]) -> None:
        self._tier = tier
        self._cache = cache
        self._report = report
        self._groups = len(cache.layout.groups)
        self._salt = secrets.token_bytes(24)
        self._stored: list[int] = []
        self._jobs = 0

    def store(self, seconds: float) -> Measured:
        """Store for so long. A tier whose server would overwrite is filled once before, which is not measured."""
        places = list(range(self._tier.chunks))
        if self._tier.overwrites:
            filled = self._run("store", places, 0.0, least=len(places))
            if filled.failed:
                return filled
        return self._run("store", places, seconds, least=self._tier.in_flight)

    def load(self, seconds: float) -> Measured:
        """Load what was stored, in random order, for so long."""
        places = self._stored[:]
        random.Random(0).shuffle(places)
        if not places:
            return Measured("load", errors=["nothing was stored"], failed=1)
        return self._run("load", places, seconds, least=self._tier.in_flight)

    def _run(self, operation: Operation, places: list[int], seconds: float, *, least: int) -> Measured:
        """Go round ``places`` until time is over and at least ``least`` chunks are done."""
        tier, measured = self._tier, Measured(operation, in_flight=self._tier.in_flight)
        engine = tier.engine
        submit = engine.submit_store if operation == "store" else engine.submit_load
        free, flying, turn = list(range(tier.in_flight)), dict[int, tuple[int, int]](), 0
        known = set(self._stored)
        cpu_s, began_s = _cpu_s(), time.perf_counter()
        heard_s = began_s
        while True:
            now_s = time.perf_counter()
            over = (now_s - began_s >= seconds and turn >= least) or measured.failed >= _FAILURES
            while free and not over:
                room, place = free.pop(), places[turn % len(places)]
                if any(place == other for _, other in flying.values()):
                    free.append(room)
                    break
                self._jobs += 1
                flying[self._jobs] = (room, place)
                submit(self._jobs, [self._chunk(place, room)])
                turn += 1
            for result in engine.finished():
                room, place = flying.pop(result.job_id)
                free.append(room)
                heard_s = now_s
                if result.outcomes == (Outcome.OK,):
                    measured.chunks += 1
                    measured.payload_bytes += result.bytes_moved
                    measured.latencies_s.append(result.seconds)
                    if operation == "store" and place not in known:
                        known.add(place)
                        self._stored.append(place)
                else:
                    measured.failed += 1
                    measured.errors += [error for error in result.errors if error not in measured.errors]
            if not flying and over:
                break
            if now_s - heard_s > _STUCK_S:
                measured.failed += len(flying)
                measured.errors.append(f"nothing moved for {_STUCK_S:.0f} s")
                break
            self._report(f"{operation} {measured.payload_bytes / 1e6:,.0f} MB")
            time.sleep(_POLL_S)
        measured.seconds = time.perf_counter() - began_s
        measured.cpu_s = _cpu_s() - cpu_s
        return measured

    def _chunk(self, place: int, room: int) -> ChunkIO:
        group, blocks = place % self._groups, self._cache.layout.blocks_per_chunk
        key = Key(self._salt + place.to_bytes(8, "big") + group.to_bytes(4, "big"))
        slot_bytes = self._cache.slot_bytes
        ids = np.arange(room * blocks, (room + 1) * blocks, dtype=np.int32)
        return ChunkIO(key, Location(self._tier.position, place * slot_bytes, slot_bytes), group, ids, 0)


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
