"""The whole engine on one file, for ``benchmarks.file``: KV blocks in host memory, gathered, summed and written; read,
verified and scattered. A chunk has 32 layers, which lie in one extent behind its header page.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections import deque
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from nixl_offload.chunk.layout import GroupLayout, KVLayout, RegionSpec
from nixl_offload.engine import ChainEngine, Chunk, Engine
from nixl_offload.movers.base import Op
from nixl_offload.movers.select import make_mover
from nixl_offload.tiers.slab.file import SlabFile
from nixl_offload.tiers.slab.link import SlabLink
from nixl_offload.types import Key, Location, Outcome

LAYERS, BLOCKS_PER_CHUNK = 32, 1
"""As with a model of 8B: pages of 64 KiB for a block of 16 tokens in each layer, 2 MiB a block."""
KV_CHUNKS = 256
"""So many chunks has the KV cache; a job's go to, and come from, other blocks than the next one's."""
JOB_CHUNKS = 64
STAGING_BYTES = 256 << 20
ASK_S = 0.0005


class WholeEngine:
    """An engine over a slab of ``chunks`` slots in ``directory``, all of them written before the first ``run``."""

    def __init__(self, mover: str, directory: Path, chunks: int, payload_bytes: int) -> None:
        page_bytes = payload_bytes // LAYERS // BLOCKS_PER_CHUNK
        blocks = KV_CHUNKS * BLOCKS_PER_CHUNK
        tensors = [torch.randint(-128, 128, (blocks, page_bytes), dtype=torch.int8) for _ in range(LAYERS)]
        specs = [RegionSpec(n, t.data_ptr(), blocks, page_bytes, page_bytes) for n, t in enumerate(tensors)]
        group = GroupLayout.of_pages((layer, page_bytes) for layer in range(LAYERS))
        layout = KVLayout(tuple(specs), (group,), BLOCKS_PER_CHUNK)
        self._slot_bytes, self._payload_bytes, self._chunks = layout.slot_bytes(0), payload_bytes, chunks
        slab = SlabFile(directory / "tier" / "rank0", chunks * self._slot_bytes, 64 * self._slot_bytes)
        slab.open()
        link = SlabLink(slab, make_mover(mover), time.monotonic)
        self.direct_io = slab.direct_io
        self._engine = ChainEngine(1)
        engine = Engine(
            table=self._engine.table,
            tensors=tensors,
            layout=layout,
            link=link,
            rank_namespace=os.urandom(32),
            staging_bytes=STAGING_BYTES,
            direct_min_extent_bytes=1 << 62,
        )
        self._engine.join(0, engine)
        self._jobs = 0
        self.run(Op.WRITE, np.arange(chunks, dtype=np.int32))

    def run(self, op: Op, order: npt.NDArray[np.int32]) -> float:
        """Store or load every chunk once, in this order; return the seconds."""
        waiting = deque(np.split(order, len(order) // JOB_CHUNKS))
        in_flight, began_s = 0, time.perf_counter()
        while waiting or in_flight:
            while waiting and in_flight < KV_CHUNKS // JOB_CHUNKS:
                self._submit(op, waiting.popleft().tolist())
                in_flight += 1
            for done in self._engine.finished():
                assert all(outcome is Outcome.OK for outcome in done.outcomes), done
                in_flight -= 1
            time.sleep(ASK_S)
        return time.perf_counter() - began_s

    def _submit(self, op: Op, chunks: list[int]) -> None:
        self._jobs += 1
        first = self._jobs * JOB_CHUNKS % KV_CHUNKS * BLOCKS_PER_CHUNK
        ids = np.arange(first, first + len(chunks) * BLOCKS_PER_CHUNK, dtype=np.int32).reshape(-1, BLOCKS_PER_CHUNK)
        ios = [
            Chunk(
                Key(hashlib.sha256(chunk.to_bytes(8, "big")).digest() + bytes(4)),
                Location(0, chunk * self._slot_bytes, self._slot_bytes),
                0,
                ids[number],
                0,
            )
            for number, chunk in enumerate(chunks)
        ]
        (self._engine.submit_store if op is Op.WRITE else self._engine.submit_load)(self._jobs, ios)

    def close(self) -> None:
        self._engine.close()
