"""Interpreter time of a rank's half per chunk: a slab with a real mover, and the memory tier, on host memory.

With one rank vLLM's scheduler shares the interpreter with this code, so each microsecond here is one of a step.

Run ``python -m benchmarks.interpreter [--directory DIR] [--rounds N]``. It needs vLLM, and takes a minute. ``DIR``
lies on a tmpfs (``/dev/shm``), so that no drive is waited for. A chunk has 32 layers × 16 blocks with pages of 64
bytes, 32 KiB: copying and checksumming it takes a few microseconds, and what is left is interpreter.

Two figures:

- **interpreter**: CPU time that holds the interpreter, over a run of jobs one after the other, per chunk: that of every
  Python thread of the process, without what lets go of the interpreter: copies between KV blocks and slots, the pump's
  pauses and waits, and NIXL's calls that start and look at I/O. Of the caller's thread only what ``submit_*`` and
  ``get_finished`` take; it asks every 2 ms, as steps would. Other system calls let go of it too and are counted all the
  same: an upper bound.
- **stretch**: CPU time of the pump between two moments in which it lets go of the interpreter, over all jobs of the
  first figure, in microseconds: the 99th percentile and the longest. On a busy machine the longest is mostly the
  machine.

Each figure is the median over rounds. Only ``open_rank`` and ``Probes`` know the package.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
)

from benchmarks import tables
from benchmarks.engine import offloading_config

LAYERS = 32
PAGE_BYTES = 64
BLOCKS_PER_CHUNK = 16
JOBS = (1, 8, 64)
CHUNKS = 64
"""So many different ones; each rests in a slot of its own."""
RUN_CHUNKS = 256
"""Chunks of a measurement of CPU time."""
ASK_S = 0.002
DEADLINE_S = 60.0
OPERATIONS = ("store", "load")
NIXL_CALLS = ("postXferReq", "getXferStatus")
"""These let go of the interpreter: with a switch interval of ten seconds, another thread ran within them. The call that
makes a request (``createXferReq``) does not."""


@dataclass
class Rank:
    """A rank's half, as vLLM sees it."""

    worker: OffloadingWorker
    mover: str
    specs: Callable[[str, range], LoadStoreSpec]
    """The storage side of a job: what is done, with these chunks."""
    _jobs: int = field(default=0)

    def job(self, operation: str, chunks: range, ask_s: float = ASK_S) -> float:
        """Have a job done; return the CPU seconds of this thread that the worker took."""
        self._jobs += 1
        blocks = list(range(chunks.start * BLOCKS_PER_CHUNK, chunks.stop * BLOCKS_PER_CHUNK))
        memory = GPULoadStoreSpec(blocks, group_sizes=[len(blocks)], block_indices=[0])
        spec = self.specs(operation, chunks)
        began_s = time.thread_time()
        if operation == "store":
            self.worker.submit_store(self._jobs, memory, spec)
        else:
            self.worker.submit_load(self._jobs, spec, memory)
        cpu_s = time.thread_time() - began_s
        give_up_s = time.monotonic() + DEADLINE_S
        while True:
            time.sleep(ask_s)
            began_s = time.thread_time()
            finished = self.worker.take_finished()
            cpu_s += time.thread_time() - began_s
            if finished:
                break
            assert time.monotonic() < give_up_s, "the job does not end"
        assert {outcome.value for job in finished for outcome in job.result.outcomes} == {"ok"}, finished
        return cpu_s


@contextmanager
def open_rank(medium: str, directory: Path) -> Iterator[Rank]:
    """Open a rank's half over ``slab`` or ``memory``, nothing stored yet."""
    from nixl_offload.catalog import LoadTicket, StoreTicket
    from nixl_offload.config import parse_config
    from nixl_offload.tiers.kinds import AnyPlace
    from nixl_offload.tiers.slab.file import SlabPlace
    from nixl_offload.tiers.slot_tier import MemoryPlace
    from nixl_offload.types import Key, Location
    from nixl_offload.vllm.messages import TicketSpec
    from nixl_offload.vllm.worker import NixlOffloadingWorker

    tier = {
        "slab": {"kind": "slab", "path": str(directory), "capacity": "64MiB", "mover": "posix"},
        "memory": {"kind": "memory", "capacity": "64MiB"},
    }[medium]
    config = parse_config({"staging": "64MiB", "tiers": [tier]})
    blocks = CHUNKS * BLOCKS_PER_CHUNK
    tensors = [torch.randint(-128, 128, (blocks, PAGE_BYTES), dtype=torch.int8) for _ in range(LAYERS)]
    layers = [f"layer {layer}" for layer in range(LAYERS)]
    offloading = offloading_config(layers, LAYERS * PAGE_BYTES, BLOCKS_PER_CHUNK)
    caches = CanonicalKVCaches(
        [CanonicalKVCacheTensor(tensor, PAGE_BYTES) for tensor in tensors],
        [[CanonicalKVCacheRef(layer, PAGE_BYTES) for layer in range(LAYERS)]],
    )
    worker = NixlOffloadingWorker(offloading, config, caches)
    (slot_bytes,) = worker.geometry("digest").slot_bytes
    digests, rank_bytes = (b"r" * 32,), CHUNKS * slot_bytes
    place: AnyPlace = MemoryPlace(digests, rank_bytes)
    if medium == "slab":
        place = SlabPlace(str(directory), digests, rank_bytes, 4 * slot_bytes)

    def specs(operation: str, chunks: range) -> TicketSpec:
        keys = tuple(Key(chunk.to_bytes(32, "big") + bytes(4)) for chunk in chunks)
        locations = tuple(Location(0, chunk * slot_bytes, slot_bytes) for chunk in chunks)
        return TicketSpec((StoreTicket if operation == "store" else LoadTicket)(1, keys, locations))

    try:
        worker.open({0: place})
        give_up_s = time.monotonic() + DEADLINE_S
        while not (statuses := worker.take_status()):
            assert time.monotonic() < give_up_s, "the tiers do not open"
            time.sleep(ASK_S)
        (status,) = statuses[0].tiers
        assert status.access is not None, f"the tier cannot be used: {status.trouble}"
        rank = Rank(worker, status.access.mover, specs)
        rank.job("store", range(CHUNKS))
        yield rank
    finally:
        worker.shutdown()


class Probes:
    """Notes how long threads go on without letting go of the interpreter, and what they do while they have let go."""

    def __init__(self) -> None:
        from nixl_offload.engine.jobs import TierQueue
        from nixl_offload.engine.packer import HostCopy
        from nixl_offload.engine.paths import Stretch

        self._without_s = 0.0
        self._stretches_s: list[float] = []
        self._began_s: dict[int, float] = {}
        self._wrap(Stretch, "_let_go")
        self._wrap(TierQueue, "sleep")
        self._wrap(HostCopy, "gather")
        self._wrap(HostCopy, "scatter")

    def watch_nixl(self) -> None:
        """Watch NIXL's calls, too. It has been started: the first import of it decides how much it logs."""
        agent = sys.modules["nixl._api"].nixlBind.nixlAgent
        for name in NIXL_CALLS:
            self._wrap(agent, name)

    def take_us(self) -> tuple[float, float, float]:
        """Since the last call: of all stretches the 99th percentile and the longest, and what was done without the
        interpreter.
        """
        stretches_s, without_s = sorted(self._stretches_s), self._without_s
        self._stretches_s.clear()
        self._without_s = 0.0
        return stretches_s[len(stretches_s) * 99 // 100] * 1e6, stretches_s[-1] * 1e6, without_s * 1e6

    def _wrap(self, owner: type, name: str) -> None:
        """Have one stretch end when this is called, and another begin when it returns."""
        call = getattr(owner, name)

        def without(*arguments: Any) -> Any:
            thread, now_s = threading.get_ident(), time.thread_time()
            self._stretches_s.append(now_s - self._began_s.get(thread, now_s))
            result = call(*arguments)
            self._began_s[thread] = time.thread_time()
            self._without_s += self._began_s[thread] - now_s
            return result

        setattr(owner, name, without)


def others_cpu_s() -> float:
    """CPU seconds of all Python threads but this one."""
    here = threading.get_ident()
    return sum(
        time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
        for thread in threading.enumerate()
        if thread.ident is not None and thread.ident != here
    )


def cpu_us(rank: Rank, operation: str, size: int) -> tuple[float, float]:
    """Return the microseconds of CPU per chunk: of the caller's thread, and of all others."""
    caller_s, before_s = 0.0, others_cpu_s()
    for at in range(RUN_CHUNKS // size):
        first = at * size % CHUNKS
        caller_s += rank.job(operation, range(first, first + size))
    others_s = others_cpu_s() - before_s
    return caller_s * 1e6 / RUN_CHUNKS, others_s * 1e6 / RUN_CHUNKS


def measure(rank: Rank, operation: str, rounds: int, probes: Probes) -> dict[str, Any]:
    """Return medians over rounds: ``cpu_us`` by the size of jobs, and stretches."""
    result: dict[str, Any] = {"cpu_us": {}}
    stretches_us = []
    for size in JOBS:
        cpu_us(rank, operation, size)
        probes.take_us()
        runs = []
        for _ in range(rounds):
            caller, others = cpu_us(rank, operation, size)
            *stretch_us, without_us = probes.take_us()
            stretches_us.append(stretch_us)
            without = without_us / RUN_CHUNKS
            runs.append((caller + others - without, caller, others, without))
        names = ("interpreter", "caller", "others", "without")
        result["cpu_us"][size] = dict(zip(names, map(statistics.median, zip(*runs, strict=True)), strict=True))
    p99_us, longest_us = map(statistics.median, zip(*stretches_us, strict=True))
    return result | {"stretch_p99_us": p99_us, "stretch_longest_us": longest_us}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--directory", type=Path, default=Path("/dev/shm"), help="where the slab goes")
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args()
    logging.disable(logging.WARNING)
    rows = []
    probes = Probes()
    for medium in ("slab", "memory"):
        with tempfile.TemporaryDirectory(dir=chosen.directory) as scratch, open_rank(medium, Path(scratch)) as rank:
            if medium == "slab":
                probes.watch_nixl()
            for operation in OPERATIONS:
                found = measure(rank, operation, chosen.rounds, probes)
                cells = [
                    f"{cpu['interpreter']:.0f} ({cpu['caller']:.0f} + {cpu['others']:.0f} - {cpu['without']:.0f})"
                    for cpu in found["cpu_us"].values()
                ]
                cells += [f"{found['stretch_p99_us']:.0f}", f"{found['stretch_longest_us']:.0f}"]
                rows.append([f"{operation}, {medium} ({rank.mover})", *cells])
    columns = ["µs per chunk", *(f"jobs of {size}" for size in JOBS), "stretch p99", "longest"]
    print(tables.machine(), tables.table(columns, rows), sep="\n")
    print("\nCPU time of the caller's thread + that of others - what of it lets go of the interpreter.")


if __name__ == "__main__":
    main()
