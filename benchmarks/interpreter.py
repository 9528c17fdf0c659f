"""Interpreter time of a rank's half per chunk: a slab with a real mover, and the memory tier, on host memory.

With one rank vLLM's scheduler shares the interpreter with this code, so each microsecond here is one of a step.

Run ``python -m benchmarks.interpreter [--rounds N]``, a minute. The slab lies in ``/dev/shm``, so no drive is waited
for. A chunk has 32 layers × 16 blocks with pages of 64 bytes, 32 KiB: copying and checksumming it takes a few
microseconds, and what is left is interpreter.

**µs per chunk** is the CPU time of the process over jobs one after the other, the median over rounds. The caller asks
every millisecond what has ended. Copies and system calls, which let go of the interpreter, are part of it.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks import tables
from nixl_offload.types import Outcome
from tests.vllm.rank_rig import SLOTS, Rig

LAYERS = 32
PAGE_BYTES = 64
BLOCKS_PER_CHUNK = 16
JOBS = (1, 8, 64)
RUN_CHUNKS = 256
"""Chunks of a measurement of CPU time."""
OPERATIONS = ("store", "load")


@contextmanager
def open_rank(medium: str, directory: Path) -> Iterator[Rig]:
    """Give a rank's half over ``slab`` or ``memory``. All chunks have been stored once."""
    rank = Rig(directory, kind=medium, shape=(LAYERS, PAGE_BYTES, BLOCKS_PER_CHUNK))
    try:
        run(rank, "store", SLOTS, SLOTS)
        yield rank
    finally:
        rank.worker.shutdown()


def run(rank: Rig, operation: str, size: int, chunks: int) -> float:
    """Let a rank do jobs of ``size`` chunks, one after the other; return the CPU seconds that they take."""
    began_s = tables.cpu_s()
    for first in range(0, chunks, size):
        slots = [(first + at) % SLOTS for at in range(size)]
        blocks = [slot * BLOCKS_PER_CHUNK + at for slot in slots for at in range(BLOCKS_PER_CHUNK)]
        if operation == "store":
            rank.store(blocks, *slots)
        else:
            assert set(rank.load(blocks, *slots)) == {Outcome.OK}
    return tables.cpu_s() - began_s


def measure(rank: Rig, operation: str, rounds: int) -> list[float]:
    """Return the CPU time of a chunk by size of jobs, in microseconds: medians over rounds, of which one warms up."""
    runs = [[run(rank, operation, size, RUN_CHUNKS) / RUN_CHUNKS * 1e6 for size in JOBS] for _ in range(rounds + 1)]
    return [statistics.median(each) for each in zip(*runs[1:], strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args()
    logging.disable(logging.WARNING)
    rows = []
    for medium in ("slab", "memory"):
        with tempfile.TemporaryDirectory(dir="/dev/shm") as name, open_rank(medium, Path(name)) as rank:
            for operation in OPERATIONS:
                found = measure(rank, operation, chosen.rounds)
                rows.append([f"{operation}, {medium}", *(f"{each:.0f}" for each in found)])
    columns = ["µs per chunk", *(f"jobs of {size}" for size in JOBS)]
    print(tables.machine(), tables.table(columns, rows), sep="\n")


if __name__ == "__main__":
    main()
