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

Each figure is the median over rounds.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
)

from benchmarks import tables
from nixl_offload.catalog.catalog import LoadTicket, StoreTicket
from nixl_offload.config import parse_config
from nixl_offload.engine.jobs import TierQueue
from nixl_offload.engine.packer import HostCopy
from nixl_offload.engine.paths import Stretch
from nixl_offload.tiers.base import Place
from nixl_offload.tiers.slab.file import SlabPlace
from nixl_offload.types import Key, Location, Outcome
from nixl_offload.vllm.messages import TicketSpec
from nixl_offload.vllm.rank_shards import leave_uncut
from nixl_offload.vllm.worker import NixlOffloadingWorker
from tests.vllm.manager_rig import offloading_config

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


class Rank:
    """A rank's half over ``slab`` or ``memory``, asked as vLLM asks it. All chunks have been stored once."""

    def __init__(self, medium: str, directory: Path) -> None:
        tiers = {
            "slab": {"kind": "slab", "path": str(directory), "capacity": "64MiB", "mover": "posix"},
            "memory": {"kind": "memory", "capacity": "64MiB"},
        }
        config = parse_config({"staging": "64MiB", "tiers": [tiers[medium]]})
        blocks = CHUNKS * BLOCKS_PER_CHUNK
        tensors = [torch.randint(-128, 128, (blocks, PAGE_BYTES), dtype=torch.int8) for _ in range(LAYERS)]
        offloading = offloading_config(events=False)
        cache = replace(offloading.cache, blocks_per_chunk=BLOCKS_PER_CHUNK)
        caches = CanonicalKVCaches(
            [CanonicalKVCacheTensor(tensor, PAGE_BYTES) for tensor in tensors],
            [[CanonicalKVCacheRef(layer, PAGE_BYTES) for layer in range(LAYERS)]],
        )
        shards = leave_uncut(caches, BLOCKS_PER_CHUNK, "digest", 1)
        self._worker = NixlOffloadingWorker(replace(offloading, cache=cache), config, tensors, shards)
        (self._slot_bytes,) = self._worker.geometry().slot_bytes
        place = Place(bytes(32))
        if medium == "slab":
            place = SlabPlace(bytes(32), str(directory), CHUNKS * self._slot_bytes, 4 * self._slot_bytes)
        self._jobs = 0
        self._worker.open({0: place})
        (status,) = _until(self._worker.take_status, "the tiers do not open")[0].tiers
        assert status.access is not None, f"the tier cannot be used: {status.trouble}"
        self.mover = status.access.mover
        self.job("store", range(CHUNKS))

    def job(self, operation: str, chunks: range) -> float:
        """Let the worker do a job; return the CPU seconds that it took of this thread."""
        self._jobs += 1
        blocks = list(range(chunks.start * BLOCKS_PER_CHUNK, chunks.stop * BLOCKS_PER_CHUNK))
        memory = GPULoadStoreSpec(blocks, group_sizes=[len(blocks)], block_indices=[0])
        keys = tuple(Key(chunk.to_bytes(32, "big") + bytes(4)) for chunk in chunks)
        locations = tuple(Location(0, chunk * self._slot_bytes, self._slot_bytes) for chunk in chunks)
        began_s = time.thread_time()
        if operation == "store":
            self._worker.submit_store(self._jobs, memory, TicketSpec(StoreTicket(1, keys, locations)))
        else:
            self._worker.submit_load(self._jobs, TicketSpec(LoadTicket(1, keys, locations)), memory)
        cpu_s = [time.thread_time() - began_s]

        def ask() -> list[Any]:
            began_s = time.thread_time()
            finished = self._worker.take_finished()
            cpu_s.append(time.thread_time() - began_s)
            return finished

        finished = _until(ask, "the job does not end")
        assert {outcome for job in finished for outcome in job.outcomes} == {Outcome.OK}, finished
        return sum(cpu_s)

    def close(self) -> None:
        self._worker.shutdown()


def _until(ask: Callable[[], Sequence[Any]], trouble: str) -> Sequence[Any]:
    """Ask every ``ASK_S`` until something comes. AssertionError: nothing does."""
    give_up_s = time.monotonic() + DEADLINE_S
    while not (found := ask()):
        assert time.monotonic() < give_up_s, trouble
        time.sleep(ASK_S)
    return found


class Probes(ExitStack):
    """Notes how long threads go on without letting go of the interpreter, and what they do while they have let go.

    ``close`` takes the probes out.
    """

    def __init__(self) -> None:
        """Watch NIXL's calls, too, if it was imported: the first import decides how much it logs."""
        super().__init__()
        self._without_s = 0.0
        self._stretches_s: list[float] = []
        self._began_s: dict[int, float] = {}
        watched = [(Stretch, "_let_go"), (TierQueue, "sleep"), (HostCopy, "gather"), (HostCopy, "scatter")]
        if nixl := sys.modules.get("nixl._api"):
            watched += [(nixl.nixlBind.nixlAgent, name) for name in NIXL_CALLS]
        for owner, name in watched:
            self._wrap(owner, name)

    def take_us(self) -> tuple[float, float, float]:
        """Since the last call: of all stretches the 99th percentile and the longest, and what was done without the
        interpreter.
        """
        stretches_s, without_s = sorted(self._stretches_s), self._without_s
        self._stretches_s.clear()
        self._without_s = 0.0
        return stretches_s[len(stretches_s) * 99 // 100] * 1e6, stretches_s[-1] * 1e6, without_s * 1e6

    def _wrap(self, owner: type, name: str) -> None:
        """Let one stretch end when this is called, and another begin when it returns."""
        call = getattr(owner, name)

        def without(*arguments: Any) -> Any:
            thread, now_s = threading.get_ident(), time.thread_time()
            self._stretches_s.append(now_s - self._began_s.get(thread, now_s))
            result = call(*arguments)
            self._began_s[thread] = time.thread_time()
            self._without_s += self._began_s[thread] - now_s
            return result

        setattr(owner, name, without)
        self.callback(setattr, owner, name, call)


def others_cpu_s() -> float:
    """CPU seconds of all Python threads but this one."""
    here = threading.get_ident()
    return sum(
        time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
        for thread in threading.enumerate()
        if thread.ident is not None and thread.ident != here
    )


def measure(rank: Rank, operation: str, rounds: int, probes: Probes) -> tuple[dict[int, list[float]], list[float]]:
    """Return medians over rounds, in microseconds: by the size of jobs what a chunk takes of the interpreter, of the
    caller's thread, of others, and without the interpreter; then of all stretches the 99th percentile and the longest.
    """
    by_size: dict[int, list[float]] = {}
    stretches_us = []
    for size in JOBS:
        runs = []
        for number in range(rounds + 1):
            others_s = -others_cpu_s()
            starts = (at * size % CHUNKS for at in range(RUN_CHUNKS // size))
            caller = sum(rank.job(operation, range(start, start + size)) for start in starts) * 1e6
            others = (others_s + others_cpu_s()) * 1e6
            *stretch_us, without = probes.take_us()
            if number:  # the first warms up
                runs.append([caller + others - without, caller, others, without])
                stretches_us.append(stretch_us)
        by_size[size] = [statistics.median(each) / RUN_CHUNKS for each in zip(*runs, strict=True)]
    return by_size, [statistics.median(each) for each in zip(*stretches_us, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--directory", type=Path, default=Path("/dev/shm"), help="where the slab goes")
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args()
    logging.disable(logging.WARNING)
    rows = []
    for medium in ("slab", "memory"):
        with (
            tempfile.TemporaryDirectory(dir=chosen.directory) as name,
            closing(Rank(medium, Path(name))) as rank,
            Probes() as probes,
        ):
            for operation in OPERATIONS:
                by_size, stretches_us = measure(rank, operation, chosen.rounds, probes)
                cells = ["{:.0f} ({:.0f} + {:.0f} - {:.0f})".format(*found) for found in by_size.values()]
                cells += [f"{each:.0f}" for each in stretches_us]
                rows.append([f"{operation}, {medium} ({rank.mover})", *cells])
    columns = ["µs per chunk", *(f"jobs of {size}" for size in JOBS), "stretch p99", "longest"]
    print(tables.machine(), tables.table(columns, rows), sep="\n")
    print("\nCPU time of the caller's thread + that of others - what of it lets go of the interpreter.")


if __name__ == "__main__":
    main()
