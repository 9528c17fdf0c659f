"""An engine with one tier that gets jobs of chunks as from a server, for benchmarks of files, buckets and GPUs.

Threading: the caller's thread submits and asks, the engine's pump does the rest. Ownership: the engine owns its link
and mover.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from nixl_offload.chunk.layout import GroupLayout, KVLayout, RegionSpec
from nixl_offload.chunk.shards import Shard
from nixl_offload.engine import Chunk, Job, LinkPaths, RankEngine, TierEngine, TierSetup, WorkKind
from nixl_offload.engine.paths import RankMemory
from nixl_offload.engine.streams import Device, device_of
from nixl_offload.movers.base import Mover, Op
from nixl_offload.tiers.base import Link
from nixl_offload.tiers.slab.file import SlabFile, SlabLink
from nixl_offload.types import Key, Location, Outcome, align_up

ASK_S = 0.0005
"""How often the engine is asked what has ended."""
JOB_TIMEOUT_S = 60.0


def layout_of(layers: Sequence[torch.Tensor], blocks_per_chunk: int) -> KVLayout:
    """Return the layout of a KV cache with one group and a tensor of shape (blocks, page bytes) for each layer."""
    specs = [RegionSpec(pages.data_ptr(), len(pages), pages.shape[1], pages.shape[1]) for pages in layers]
    group = GroupLayout.of_pages((n, pages.shape[1]) for n, pages in enumerate(layers))
    return KVLayout(tuple(specs), (group,), blocks_per_chunk)


def chunk_in_slot(number: int, slot_bytes: int, block_ids: npt.NDArray[np.int32]) -> Chunk:
    """Return a chunk with a key of its own that lies in slot ``number`` of a slab."""
    key = Key(number.to_bytes(32, "big") + bytes(4))
    return Chunk(key, Location(0, number * slot_bytes, slot_bytes), 0, block_ids, 0)


def over_slab(
    path: Path, chunks: int, mover: Mover, layers: Sequence[torch.Tensor], layout: KVLayout, **options: Any
) -> DrivenEngine:
    """Return an engine over a new slab with room for so many chunks. It owns ``mover``. ``options``: DrivenEngine's."""
    slot_bytes = layout.slot_bytes(0)
    extent_bytes = align_up(slot_bytes, 64 << 10)
    slab = SlabFile(path, align_up(chunks * slot_bytes, extent_bytes), extent_bytes)
    slab.open()
    return DrivenEngine(SlabLink(slab, mover, time.monotonic), layers, layout, **options)


class DrivenEngine:
    """Stores and loads chunks, a few jobs at a time."""

    def __init__(
        self,
        link: Link,
        layers: Sequence[torch.Tensor],
        layout: KVLayout,
        *,
        device: Device | None = None,
        **options: Any,
    ) -> None:
        """``device``: by default that of the layers. ``options`` as for ``LinkPaths``."""
        self._rank = RankEngine(1)
        self._device = device or device_of(layers[0])
        memory = RankMemory(layers, layout, self._device)
        setup = TierSetup(self._rank, memory, [Shard(0, bytes(32))] * len(layout.groups))
        self._rank.join(0, TierEngine(LinkPaths(setup, link, **options)))
        self._jobs = 0

    def move(self, op: Op, chunks: Sequence[Chunk], *, job_chunks: int, at_a_time: int) -> float:
        """Store or load these; return the seconds. RuntimeError: a chunk is not OK, or a job hangs."""
        kind = WorkKind.STORE if op is Op.WRITE else WorkKind.LOAD
        waiting = deque(chunks[at : at + job_chunks] for at in range(0, len(chunks), job_chunks))
        in_flight, began_s = 0, time.perf_counter()
        while waiting or in_flight:
            while waiting and in_flight < at_a_time:
                self._jobs += 1
                job = list(waiting.popleft())
                for position, chunk in enumerate(job):
                    chunk.position = position
                fence = self._device.compute_fence()
                self._rank.submit(Job(kind, job, len(job), fence, self._jobs))
                in_flight += 1
            for done in self._rank.finished():
                if set(done.outcomes) != {Outcome.OK}:
                    raise RuntimeError(f"not every chunk is OK: {'; '.join(done.errors) or done.outcomes}")
                in_flight -= 1
            if time.perf_counter() > began_s + JOB_TIMEOUT_S:
                raise RuntimeError(f"jobs have not ended within {JOB_TIMEOUT_S:.0f} s")
            time.sleep(ASK_S)
        return time.perf_counter() - began_s

    def close(self) -> None:
        """End the engine; its link is closed."""
        self._rank.close()
