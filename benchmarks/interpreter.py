"""Interpreter time of a rank's half per chunk: a slab with a real mover, and the memory tier, on host memory.

With one rank vLLM's scheduler shares the interpreter with this code, so each microsecond here is one of a step.

Run ``python -m benchmarks.interpreter [--directory DIR] [--rounds N]``. It needs vLLM, and takes a minute. ``DIR``
lies on a tmpfs (``/dev/shm``), so that no drive is waited for. A chunk has 32 layers × 16 blocks with pages of 64
bytes, 32 KiB: copying and checksumming it takes a few microseconds, and what is left is interpreter.

Two figures, each the median over rounds:

- **µs per chunk**: CPU time of every Python thread of the process, over a run of jobs one after the other. Of the
  caller's thread only what ``submit_*`` and ``finished`` take; it asks every 2 ms, as steps would. An upper bound
  of the time that holds the interpreter, as copies and system calls let go of it.
- **late**: how late another thread that wakes every millisecond gets the interpreter, in microseconds: the median and
  the 99th percentile. It includes what the kernel's timer is late.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor, GPULoadStoreSpec

from benchmarks import tables
from nixl_offload.catalog.catalog import LoadTicket, StoreTicket
from nixl_offload.config import parse_config
from nixl_offload.tiers.base import Place
from nixl_offload.tiers.slab.file import SlabPlace
from nixl_offload.tiers.slots import SlotPlaces
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
WAKE_S = 0.001


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
            slots = SlotPlaces(CHUNKS * self._slot_bytes, 4 * self._slot_bytes)
            place = SlabPlace(bytes(32), str(directory), slots)
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
            finished = self._worker.engine.finished()
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


class Latecomer:
    """A thread that wakes every ``WAKE_S`` and notes how late it gets the interpreter. ``close`` ends it."""

    def __init__(self) -> None:
        self._late_s: list[float] = []
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def take_us(self) -> tuple[float, float]:
        """Return the median and the 99th percentile since the last call, in microseconds."""
        late_s, self._late_s = sorted(self._late_s), []
        return late_s[len(late_s) // 2] * 1e6, late_s[len(late_s) * 99 // 100] * 1e6

    def close(self) -> None:
        self._ending.set()
        self._thread.join()

    def others_cpu_s(self) -> float:
        """Return CPU seconds of all Python threads but this one and the caller's."""
        threads = {*threading.enumerate()} - {threading.current_thread(), self._thread}
        idents = [thread.ident for thread in threads if thread.ident is not None]
        return sum(time.clock_gettime(time.pthread_getcpuclockid(ident)) for ident in idents)

    def _run(self) -> None:
        while not self._ending.is_set():
            due_s = time.perf_counter() + WAKE_S
            time.sleep(WAKE_S)
            self._late_s.append(time.perf_counter() - due_s)


def measure(rank: Rank, operation: str, rounds: int, other: Latecomer) -> tuple[list[float], list[float]]:
    """Return medians over rounds, in microseconds: by size of jobs the CPU time of a chunk; then how late ``other``
    was, the median and the 99th percentile of all jobs.
    """
    by_size, late_us = [], []
    for size in JOBS:
        runs = []
        for number in range(rounds + 1):
            cpu_s = -other.others_cpu_s()
            starts = (at * size % CHUNKS for at in range(RUN_CHUNKS // size))
            cpu_s += sum(rank.job(operation, range(start, start + size)) for start in starts)
            cpu_s += other.others_cpu_s()
            late = other.take_us()
            if number:  # the first warms up
                runs.append(cpu_s / RUN_CHUNKS * 1e6)
                late_us.append(late)
        by_size.append(statistics.median(runs))
    return by_size, [statistics.median(each) for each in zip(*late_us, strict=True)]


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
            closing(Latecomer()) as other,
        ):
            for operation in OPERATIONS:
                by_size, late_us = measure(rank, operation, chosen.rounds, other)
                cells = [f"{each:.0f}" for each in (*by_size, *late_us)]
                rows.append([f"{operation}, {medium} ({rank.mover})", *cells])
    columns = ["µs per chunk", *(f"jobs of {size}" for size in JOBS), "late", "late p99"]
    print(tables.machine(), tables.table(columns, rows), sep="\n")


if __name__ == "__main__":
    main()
