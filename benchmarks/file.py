"""Files through the whole engine, against fio: ``python -m benchmarks.file`` (``make bench``).

KV blocks in host memory are gathered, summed and written; read, verified and scattered. Ours and fio take turns on
files of one directory, with the same sizes, depth, random order and O_DIRECT, so a noisy disk is equally unkind to
both: believe the ratio. A chunk has 32 layers, which lie in one extent behind its header page.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks import tables
from benchmarks.engine import DrivenEngine, layout_of
from nixl_offload.engine import Chunk
from nixl_offload.movers.base import Op
from nixl_offload.movers.select import make_mover
from nixl_offload.tiers.slab.file import SlabFile, SlabLink
from nixl_offload.types import Key, Location

MIB = 1 << 20
FIO_ENGINES = {"posix_aio": "libaio", "posix_uring": "io_uring", "copy": "libaio"}
"""The fio engine that each mover is held against."""
LAYERS = 32
KV_CHUNKS = 256
"""So many chunks has the KV cache; a job's go to, and come from, other blocks than the next one's."""
JOB_CHUNKS = 64
STAGING_BYTES = 256 * MIB


@dataclass(frozen=True)
class Shape:
    """One workload: ``pieces`` chunks of ``piece_bytes``; fio has ``depth`` of them in flight."""

    pieces: int
    piece_bytes: int
    depth: int

    @property
    def total_bytes(self) -> int:
        return self.pieces * self.piece_bytes

    def __str__(self) -> str:
        return f"{self.pieces} × {self.piece_bytes >> 10} KiB"


SHAPES = (Shape(256, 2 * MIB, 32), Shape(1024, MIB // 2, 64), Shape(4096, MIB // 16, 256))
"""No model has chunks of 64 KiB by default; few have less than half a MiB."""


@dataclass(frozen=True)
class Run:
    """One measured pass over all pieces."""

    mb_s: float
    cpu_s_per_gb: float

    @staticmethod
    def of(total_bytes: int, seconds: float, cpu_s: float) -> Run:
        """Return the rates."""
        return Run(total_bytes / seconds / 1e6, cpu_s / (total_bytes / 1e9))


class Ours:
    """An engine over a slab, all of whose slots are written before the first ``run``."""

    def __init__(self, mover: str, directory: Path, shape: Shape) -> None:
        self._shape = shape
        page_bytes = shape.piece_bytes // LAYERS
        layers = [torch.randint(-128, 128, (KV_CHUNKS, page_bytes), dtype=torch.int8) for _ in range(LAYERS)]
        layout = layout_of(layers, blocks_per_chunk=1)
        self._slot_bytes = layout.slot_bytes(0)
        slab = SlabFile(directory / "tier" / "rank0", shape.pieces * self._slot_bytes, 64 * self._slot_bytes)
        slab.open()
        link = SlabLink(slab, make_mover(mover), time.monotonic)
        self._engine = DrivenEngine(link, layers, layout, staging_bytes=STAGING_BYTES, direct_min_extent_bytes=1 << 62)
        self.run(Op.WRITE, 0)

    def run(self, op: Op, seed: int) -> Run:
        """Store or load every chunk once, in random order."""
        order = np.random.default_rng(seed).permutation(self._shape.pieces)
        chunks = [
            Chunk(
                Key(int(slot).to_bytes(32, "big") + bytes(4)),
                Location(0, int(slot) * self._slot_bytes, self._slot_bytes),
                0,
                np.array([at % KV_CHUNKS], dtype=np.int32),
                0,
            )
            for at, slot in enumerate(order)
        ]
        cpu_s = tables.cpu_s()
        seconds = self._engine.move(op, chunks, job_chunks=JOB_CHUNKS, at_a_time=KV_CHUNKS // JOB_CHUNKS)
        return Run.of(self._shape.total_bytes, seconds, tables.cpu_s() - cpu_s)

    def close(self) -> None:
        self._engine.close()


def run_fio(engine: str, path: Path, shape: Shape, op: Op, seed: int) -> Run:
    """Do the same with fio: random order, each piece once, on a file that was written before."""
    if not path.exists():
        path.write_bytes(os.urandom(8 * MIB) * (max(each.total_bytes for each in SHAPES) // (8 * MIB)))
    side = "read" if op is Op.READ else "write"
    command = [
        *("fio", "--name=peer", f"--filename={path}", f"--ioengine={engine}", f"--rw=rand{side}", "--direct=1"),
        *(f"--bs={shape.piece_bytes}", f"--size={shape.total_bytes}", f"--iodepth={shape.depth}"),
        *(f"--randseed={seed}", "--overwrite=1", "--allow_file_create=0", "--invalidate=0", "--output-format=json"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"fio failed: {done.stderr.strip() or done.stdout.strip()}")
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    cpu_s = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3
    return Run.of(job[side]["io_bytes"], job[side]["runtime"] / 1e3, cpu_s)


def compare(mover: str, shape: Shape, rounds: int, directory: Path) -> Iterator[list[str]]:
    """Yield the rows of stores and of loads: medians over rounds, the ratio is the median of each round's own."""
    runs: dict[Op, list[tuple[Run, Run]]] = {Op.WRITE: [], Op.READ: []}
    with tempfile.TemporaryDirectory(dir=directory) as own, closing(Ours(mover, Path(own), shape)) as ours:
        for number in range(rounds):
            for op, pairs in runs.items():
                # Who goes first changes by round: the second finds the disk warmed up, or worn out.
                fio = run_fio(FIO_ENGINES[mover], directory / "fio", shape, op, number) if number % 2 else None
                own_run = ours.run(op, number)
                pairs.append((own_run, fio or run_fio(FIO_ENGINES[mover], directory / "fio", shape, op, number)))
    for op, pairs in runs.items():
        figures = [
            (statistics.median(run.mb_s for run in side), statistics.median(run.cpu_s_per_gb for run in side))
            for side in zip(*pairs, strict=True)
        ]
        ratio = statistics.median(ours.mb_s / fio.mb_s for ours, fio in pairs)
        (mb_s, cpu), (fio_mb_s, fio_cpu) = figures
        what = "store" if op is Op.WRITE else "load"
        yield [
            mover,
            str(shape),
            what,
            f"{mb_s:,.0f}",
            f"{fio_mb_s:,.0f}",
            f"{ratio:.2f}",
            f"{cpu:.2f}",
            f"{fio_cpu:.2f}",
        ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.file", description=__doc__)
    parser.add_argument("--dir", help="directory on the disk to measure (default: the system's temporary)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--movers", default="posix_aio,posix_uring", help="of: " + ", ".join(FIO_ENGINES))
    chosen = parser.parse_args()
    movers = chosen.movers.split(",")
    if unknown := set(movers) - set(FIO_ENGINES):
        parser.error(f"unknown mover {', '.join(sorted(unknown))}; there are {', '.join(FIO_ENGINES)}")
    if shutil.which("fio") is None:
        print("fio is not installed; `apt-get install fio` brings it", file=sys.stderr)
        return 2
    print(tables.machine())
    rows = []
    with tempfile.TemporaryDirectory(prefix="nixl-offload-bench-", dir=chosen.dir) as directory:
        for shape in SHAPES:
            for mover in movers:
                print(f"{mover}, {shape}", file=sys.stderr)
                rows += compare(mover, shape, chosen.rounds, Path(directory))
    print(tables.table(["mover", "chunks", "", "MB/s", "fio MB/s", "of fio", "CPU s/GB", "fio CPU s/GB"], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
