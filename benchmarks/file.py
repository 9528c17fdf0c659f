"""Movers against fio on one file: store and load of pieces of 2 MiB, 512 and 64 KiB, same sizes, depth and O_DIRECT.

``python -m benchmarks.file [--dir DIR] [--json] [--rounds N] [--movers posix_aio,posix_uring,copy]``. Ours and fio take
turns on the same written file, in random order of pieces, so a noisy disk is equally unkind to both: believe the ratio.
The mover is used as the engine uses it: many extents a transfer, from and to slots of staging memory, polled at 2 kHz.
Then the whole engine, from and to KV blocks, checksums and all, against fio on a file in the same directory.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.file_engine import WholeEngine
from nixl_offload.errors import MoverError
from nixl_offload.movers.base import Extents, MemoryRegion, Mover, Op, Transfer, TransferState
from nixl_offload.movers.handles import open_file
from nixl_offload.movers.select import make_mover

POLL_S = 0.0005
KIB, MIB = 1 << 10, 1 << 20
ENGINES = {"posix_aio": "libaio", "posix_uring": "io_uring", "copy": "libaio"}
"""The fio engine that each mover is held against."""


@dataclass(frozen=True)
class Shape:
    """One workload: ``pieces`` of ``piece_bytes``, ``depth`` of them in flight, ``batch`` to a transfer."""

    name: str
    pieces: int
    piece_bytes: int
    depth: int
    batch: int

    @property
    def total_bytes(self) -> int:
        return self.pieces * self.piece_bytes


TINY = Shape("4096 × 64 KiB", 4096, 64 * KIB, 256, 64)
"""No model has chunks of so little by default, 256 tokens; few have less than half a MiB."""
SHAPES = (Shape("256 × 2 MiB", 256, 2 * MIB, 32, 8), Shape("1024 × 512 KiB", 1024, 512 * KIB, 64, 16), TINY)


@dataclass(frozen=True)
class Run:
    """One measured pass over all pieces."""

    megabytes_per_s: float
    cpu_s_per_gb: float


@dataclass(frozen=True)
class Result:
    """Medians over the rounds; the ratio is the median of each round's own."""

    mover: str
    shape: str
    op: str
    ours_mb_s: float
    fio_mb_s: float
    ratio: float
    ours_cpu_s_per_gb: float
    fio_cpu_s_per_gb: float


@contextmanager
def scratch_file(directory: str | None, size_bytes: int) -> Iterator[Path]:
    """A file written once, in a directory of its own that is removed in the end."""
    with tempfile.TemporaryDirectory(prefix="nixl-offload-bench-", dir=directory) as name:
        path = Path(name) / "slab"
        block = os.urandom(8 * MIB)
        with path.open("wb") as file:
            for _ in range(size_bytes // len(block)):
                file.write(block)
            os.fsync(file.fileno())
        yield path


class Ours:
    """A mover with staging slots and file slots of one shape."""

    def __init__(self, name: str, path: Path, shape: Shape) -> None:
        self.mover: Mover = make_mover(name)
        self.shape = shape
        staging_bytes = shape.depth * shape.piece_bytes
        self._pages = mmap.mmap(-1, staging_bytes)
        self._pages.write(os.urandom(MIB) * (staging_bytes // MIB))
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._pages))
        memory = self.mover.register_memory(MemoryRegion(address, staging_bytes))
        file = open_file(self.mover, str(path), shape.total_bytes, direct_io=True)
        self.staging = slots(shape.depth, shape.piece_bytes)
        self.slots = slots(shape.pieces, shape.piece_bytes)
        self.memory, self.file = memory, file

    def run(self, op: Op, order: npt.NDArray[np.int32]) -> Run:
        """Move every piece once, a batch per transfer, as many transfers at once as there are staging slots."""
        shape = self.shape
        batches = deque(np.split(order, shape.pieces // shape.batch))
        free = deque(np.split(np.arange(shape.depth, dtype=np.int32), shape.depth // shape.batch))
        flying: deque[tuple[Any, npt.NDArray[np.int32]]] = deque()
        cpu, start = cpu_s(), time.perf_counter()
        while batches or flying:
            while batches and free:
                staging = free.popleft()
                flying.append((self.submit(op, staging, batches.popleft()), staging))
            moved_on = False
            for _ in range(len(flying)):
                transfer, staging = flying.popleft()
                state = self.mover.poll(transfer)
                if state is TransferState.PENDING:
                    flying.append((transfer, staging))
                    continue
                if state is TransferState.FAILED:
                    raise MoverError(transfer.error or "failed")
                free.append(staging)
                moved_on = True
            if not moved_on:
                time.sleep(POLL_S)
        return as_run(shape.total_bytes, time.perf_counter() - start, cpu_s() - cpu)

    def submit(self, op: Op, staging: npt.NDArray[np.int32], pieces: npt.NDArray[np.int32]) -> Transfer:
        """Start one transfer between slots, by their numbers."""
        return self.mover.submit(op, self.memory, self.staging[staging], self.file, self.slots[pieces])

    def close(self) -> None:
        self.mover.close()


def slots(count: int, slot_bytes: int) -> Extents:
    """Equal slots, one after the other."""
    return np.stack([np.arange(count, dtype=np.int64) * slot_bytes, np.full(count, slot_bytes, dtype=np.int64)], axis=1)


def cpu_s() -> float:
    """CPU of this process so far, threads and the kernel's work for it included."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def as_run(total_bytes: int, seconds: float, cpu: float) -> Run:
    return Run(total_bytes / seconds / 1e6, cpu / (total_bytes / 1e9))


def run_fio(engine: str, path: Path, shape: Shape, op: Op, seed: int) -> Run:
    """The same with fio: random order, each piece once, on the file as it is."""
    command = [
        "fio",
        "--name=peer",
        f"--filename={path}",
        f"--ioengine={engine}",
        f"--rw={'randread' if op is Op.READ else 'randwrite'}",
        f"--bs={shape.piece_bytes}",
        f"--size={shape.total_bytes}",
        f"--iodepth={shape.depth}",
        f"--randseed={seed}",
        "--direct=1",
        "--overwrite=1",
        "--allow_file_create=0",
        "--invalidate=0",
        "--output-format=json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"fio failed: {done.stderr.strip() or done.stdout.strip()}")
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    side = job["read" if op is Op.READ else "write"]
    cpu = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3
    return as_run(side["io_bytes"], side["runtime"] / 1e3, cpu)


def compare(movers: list[str], path: Path, rounds: int, console: Console) -> list[Result]:
    """Every mover, shape and direction against fio, one round after the other."""
    runs: dict[tuple[str, Shape, Op], list[tuple[Run, Run]]] = {}
    cases = [(name, shape, op) for shape in SHAPES for name in movers for op in (Op.WRITE, Op.READ)]
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("rounds", total=len(cases) * rounds)
        for round_number in range(rounds):
            for name, shape, op in cases:
                progress.update(task, description=f"{name} {shape.name} {op.value}")
                order = np.random.default_rng(round_number).permutation(shape.pieces).astype(np.int32)
                ours = Ours(name, path, shape)
                try:
                    # Who goes first changes by round: the second finds the disk warmed up, or worn out.
                    if round_number % 2:
                        peer = run_fio(ENGINES[name], path, shape, op, round_number)
                        pair = ours.run(op, order), peer
                    else:
                        pair = ours.run(op, order), run_fio(ENGINES[name], path, shape, op, round_number)
                finally:
                    ours.close()
                runs.setdefault((name, shape, op), []).append(pair)
                progress.advance(task)
    return [summary(name, shape, op, pairs) for (name, shape, op), pairs in runs.items()]


def compare_engine(movers: list[str], path: Path, rounds: int) -> list[Result]:
    """The whole engine against fio: as ``compare``."""
    results = []
    for name in movers:
        for shape in SHAPES:
            runs: dict[Op, list[tuple[Run, Run]]] = {Op.WRITE: [], Op.READ: []}
            with tempfile.TemporaryDirectory(dir=path.parent) as directory:
                engine = WholeEngine(name, Path(directory), shape.pieces, shape.piece_bytes)
                try:
                    for number, op in ((number, op) for number in range(rounds) for op in runs):
                        order = np.random.default_rng(number).permutation(shape.pieces).astype(np.int32)
                        peer = run_fio(ENGINES[name], path, shape, op, number) if number % 2 else None
                        cpu, seconds = cpu_s(), engine.run(op, order)
                        ours = as_run(shape.total_bytes, seconds, cpu_s() - cpu)
                        peer = peer or run_fio(ENGINES[name], path, shape, op, number)
                        runs[op].append((ours, peer))
                finally:
                    engine.close()
            results += [summary(f"engine, {name}", shape, op, pairs) for op, pairs in runs.items()]
    return results


def summary(name: str, shape: Shape, op: Op, pairs: list[tuple[Run, Run]]) -> Result:
    def median(values: Iterator[float]) -> float:
        return statistics.median(values)

    return Result(
        mover=name,
        shape=shape.name,
        op="store" if op is Op.WRITE else "load",
        ours_mb_s=median(ours.megabytes_per_s for ours, _ in pairs),
        fio_mb_s=median(fio.megabytes_per_s for _, fio in pairs),
        ratio=median(ours.megabytes_per_s / fio.megabytes_per_s for ours, fio in pairs),
        ours_cpu_s_per_gb=median(ours.cpu_s_per_gb for ours, _ in pairs),
        fio_cpu_s_per_gb=median(fio.cpu_s_per_gb for _, fio in pairs),
    )


def submit_cost(name: str, path: Path) -> float:
    """Microseconds that ``submit`` of one batch of 64 × 64 KiB takes, I/O apart; the median."""
    ours = Ours(name, path, TINY)
    costs: list[float] = []
    rows = np.arange(64, dtype=np.int32)
    random = np.random.default_rng(0)
    try:
        for _ in range(100):
            pieces = random.permutation(4096)[:64].astype(np.int32)
            start = time.perf_counter()
            transfer = ours.submit(Op.READ, rows, pieces)
            costs.append(time.perf_counter() - start)
            while ours.mover.poll(transfer) is TransferState.PENDING:
                time.sleep(POLL_S)
    finally:
        ours.close()
    return statistics.median(costs) * 1e6


def table(results: list[Result], costs: dict[str, float]) -> Iterator[Table]:
    """What a person reads."""
    speeds = Table("mover", "pieces", "op", "MB/s", "fio MB/s", "ratio", "CPU s/GB", "fio CPU s/GB")
    for r in results:
        speeds.add_row(
            r.mover,
            r.shape,
            r.op,
            f"{r.ours_mb_s:,.0f}",
            f"{r.fio_mb_s:,.0f}",
            f"{r.ratio:.2f}",
            f"{r.ours_cpu_s_per_gb:.2f}",
            f"{r.fio_cpu_s_per_gb:.2f}",
        )
    yield speeds
    submits = Table("mover", "submit of 64 extents, µs")
    for name, cost in costs.items():
        submits.add_row(name, f"{cost:.0f}")
    yield submits


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.file", description=__doc__)
    parser.add_argument(
        "--dir", default=None, help="directory on the disk to measure (default: the system's temporary)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--movers", default="posix_aio,posix_uring", help="of: " + ", ".join(ENGINES))
    arguments = parser.parse_args()
    movers = arguments.movers.split(",")
    if unknown := set(movers) - set(ENGINES):
        parser.error(f"unknown mover {', '.join(sorted(unknown))}; there are {', '.join(ENGINES)}")
    if shutil.which("fio") is None:
        print("fio is not installed; `apt-get install fio` brings it", file=sys.stderr)
        return 2
    console = Console(stderr=True)
    with scratch_file(arguments.dir, max(shape.total_bytes for shape in SHAPES)) as path:
        results = compare(movers, path, arguments.rounds, console)
        results += compare_engine(movers, path, arguments.rounds)
        costs = {name: submit_cost(name, path) for name in movers}
    if arguments.json:
        print(json.dumps({"results": [asdict(result) for result in results], "submit": costs}, indent=1))
    else:
        for each in table(results, costs):
            Console(width=110).print(each)
    return 0


if __name__ == "__main__":
    sys.exit(main())
