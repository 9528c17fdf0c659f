"""Files through the whole engine, against fio: ``python -m benchmarks.file`` (``make bench``).

KV blocks in host memory are gathered, summed and written; read, verified and scattered. Ours and fio take turns on
files of one directory, with the same sizes, depth, random order and O_DIRECT. Believe the ratio: a noisy disk is
equally unkind to both. A chunk has 32 layers, which lie in one extent behind its header page.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from benchmarks import tables
from benchmarks.contest import Row, Run, contest, table
from benchmarks.engine import chunk_in_slot, layout_of, over_slab
from nixl_offload.movers.base import Op
from nixl_offload.movers.select import make_mover

MIB = 1 << 20
FIO_ENGINES = {"posix_aio": "libaio", "posix_uring": "io_uring", "copy": "libaio"}
"""The fio engine that each mover is compared with."""
LAYERS = 32
KV_CHUNKS = 256
"""Chunks in the KV cache. Consecutive jobs use different blocks."""
JOB_CHUNKS = 64
STAGING_BYTES = 256 * MIB


class Shape(NamedTuple):
    """One workload: ``pieces`` chunks of ``piece_bytes``; fio has ``depth`` of them in flight."""

    pieces: int
    piece_bytes: int
    depth: int

    @property
    def total_bytes(self) -> int:
        return self.pieces * self.piece_bytes


SHAPES = (Shape(256, 2 * MIB, 32), Shape(1024, MIB // 2, 64), Shape(4096, MIB // 16, 256))
"""No model has chunks of 64 KiB by default; few have less than half a MiB."""


class Ours:
    """An engine over a slab. A load needs an earlier store."""

    def __init__(self, mover: str, directory: Path, shape: Shape) -> None:
        self._shape = shape
        size = (KV_CHUNKS, shape.piece_bytes // LAYERS)
        layers = [torch.randint(-128, 128, size, dtype=torch.int8) for _ in range(LAYERS)]
        layout, options = layout_of(layers, 1), {"staging_bytes": STAGING_BYTES, "direct_min_extent_bytes": 1 << 62}
        self._slot_bytes = layout.slot_bytes(0)
        self._engine = over_slab(directory / "slab", shape.pieces, make_mover(mover), layers, layout, **options)

    def run(self, op: Op, number: int) -> Run:
        """Store or load every chunk once, in random order."""
        order = np.random.default_rng(number).permutation(self._shape.pieces)
        blocks = [np.array([at % KV_CHUNKS], dtype=np.int32) for at in range(len(order))]
        chunks = [chunk_in_slot(int(slot), self._slot_bytes, ids) for slot, ids in zip(order, blocks, strict=True)]
        cpu_s = tables.cpu_s()
        seconds = self._engine.move(op, chunks, job_chunks=JOB_CHUNKS, at_a_time=KV_CHUNKS // JOB_CHUNKS)
        return Run(seconds, tables.cpu_s() - cpu_s)

    def close(self) -> None:
        self._engine.close()


def run_fio(engine: str, path: Path, shape: Shape, op: Op, number: int) -> Run:
    """Do the same with fio: random order, each piece once, on a file that was written before."""
    if not path.exists():
        path.write_bytes(os.urandom(8 * MIB) * (max(each.total_bytes for each in SHAPES) // (8 * MIB)))
    side = "read" if op is Op.READ else "write"
    command = [
        *("fio", "--name=peer", f"--filename={path}", f"--ioengine={engine}", f"--rw=rand{side}", "--direct=1"),
        *(f"--bs={shape.piece_bytes}", f"--size={shape.total_bytes}", f"--iodepth={shape.depth}"),
        *(f"--randseed={number}", "--overwrite=1", "--allow_file_create=0", "--invalidate=0", "--output-format=json"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"fio failed: {done.stderr.strip() or done.stdout.strip()}")
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    cpu_s = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3
    return Run(job[side]["runtime"] / 1e3, cpu_s)


def compare(mover: str, shape: Shape, rounds: int, directory: Path) -> Iterator[Row]:
    """Yield rows of stores, then of loads."""
    peer = f"fio, {FIO_ENGINES[mover]}"
    with tempfile.TemporaryDirectory(dir=directory) as own, closing(Ours(mover, Path(own), shape)) as ours:
        for op in (Op.WRITE, Op.READ):
            fio = partial(run_fio, FIO_ENGINES[mover], directory / "fio", shape, op)
            found = contest({mover: partial(ours.run, op), peer: fio}, shape.total_bytes, rounds)
            what = "store" if op is Op.WRITE else "load"
            yield from found.rows(peer, what, f"{shape.pieces} × {shape.piece_bytes >> 10} KiB")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.file", description=__doc__)
    parser.add_argument("--dir", help="directory on the disk to measure (default: the system's temporary)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--movers", nargs="+", choices=FIO_ENGINES, default=["posix_aio", "posix_uring"])
    chosen = parser.parse_args()
    if shutil.which("fio") is None:
        print("fio is not installed; `apt-get install fio` brings it", file=sys.stderr)
        return 2
    print(tables.machine())
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="nixl-offload-bench-", dir=chosen.dir) as directory:
        for shape in SHAPES:
            for mover in chosen.movers:
                print(f"{mover}, {shape}", file=sys.stderr)
                rows += compare(mover, shape, chosen.rounds, Path(directory))
    print(table(rows))
    return int(any(row.failed for row in rows))


if __name__ == "__main__":
    sys.exit(main())
