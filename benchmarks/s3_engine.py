"""Ours as a server runs it, for ``benchmarks.s3``: chunks between KV blocks and a bucket, through a whole engine.

Threading: the caller's thread submits and asks; the engine's pump does the rest. Against the mover alone this adds
staging copies, a header page per object, checksums both ways and the pump's own time.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from benchmarks.s3_ours import NAMESPACE, connect
from benchmarks.s3_sides import Buffer, Keys, Move, Side
from examples.s3_server import RcloneServer
from nixl_offload.chunk.layout import GroupLayout, KVLayout, RegionSpec
from nixl_offload.engine import ChainEngine, Chunk, Engine
from nixl_offload.movers.base import Mover
from nixl_offload.stores.base import Store
from nixl_offload.tiers.s3.link import ObjectLink
from nixl_offload.tiers.shared.naming import shard_name
from nixl_offload.types import Key, Location, Outcome

ENGINES = {"engine, NIXL OBJ": "obj", "engine, obstore": "obstore"}
"""Names of these sides, and the mover of each."""
BLOCKS_PER_CHUNK = 16
JOB_CHUNKS = 16
ASK_S = 0.002
"""What was completed is asked for so often, as the steps of a server would."""
_QUEUE_SHARE = 4
"""An engine queues stores of so many times its staging memory, and drops the rest."""


def open_engine(name: str, server: RcloneServer, buffer: Buffer, connections: int) -> Side:
    """Open one of ``ENGINES`` over the buffer, whose pieces are the KV blocks of a chunk each."""
    return EngineSide(name, *connect(ENGINES[name], f"engine-{ENGINES[name]}", server, connections), buffer)


class EngineSide(Side):
    """An engine with a bucket. Jobs are of 16 chunks."""

    def __init__(self, name: str, mover: Mover, open_client: Callable[[], Store], buffer: Buffer) -> None:
        self.name, self._open_client = name, open_client
        block_bytes = buffer.piece_bytes // BLOCKS_PER_CHUNK
        blocks = torch.frombuffer(buffer.view, dtype=torch.int8).view(-1, block_bytes)
        region = RegionSpec(0, blocks.data_ptr(), len(blocks), block_bytes, block_bytes)
        layout = KVLayout((region,), (GroupLayout.of_pages(((0, block_bytes),)),), BLOCKS_PER_CHUNK)
        self._slot_bytes = layout.slot_bytes(0)
        self._engine = ChainEngine(1)
        engine = Engine(
            table=self._engine.table,
            tensors=[blocks],
            layout=layout,
            link=ObjectLink("s3://bucket", NAMESPACE.name, 0, mover, time.monotonic),
            rank_namespace=bytes(32),
            staging_bytes=self._slot_bytes * max(32, buffer.rows // _QUEUE_SHARE),
        )
        self._engine.join(0, engine)
        self._jobs = 0

    def move(self, move: Move, keys: Keys, first_row: int) -> None:
        submit = self._engine.submit_store if move == "WRITE" else self._engine.submit_load
        blocks = np.arange(len(keys) * BLOCKS_PER_CHUNK, dtype=np.int32) + first_row * BLOCKS_PER_CHUNK
        chunks = [
            Chunk(key, Location(0, 0, self._slot_bytes), 0, ids, 0)
            for key, ids in zip(keys, np.split(blocks, len(keys)), strict=True)
        ]
        waiting = set()
        for begin in range(0, len(chunks), JOB_CHUNKS):
            self._jobs += 1
            waiting.add(self._jobs)
            submit(self._jobs, chunks[begin : begin + JOB_CHUNKS])
        while waiting:
            for done in self._engine.finished():
                if set(done.outcomes) != {Outcome.OK}:
                    raise RuntimeError(f"{self.name}: {done.errors}")
                waiting.discard(done.job_id)
            time.sleep(ASK_S)

    def exists(self, keys: Keys) -> int:
        raise NotImplementedError("the scheduler's half is asked: see s3_ours")

    def object_path(self, key: bytes) -> str:
        return shard_name(NAMESPACE.name, Key(key), 0)

    def close(self) -> None:
        self._engine.close()
