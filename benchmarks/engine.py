"""An engine of one tier that is given jobs of chunks as a server gives them, for benchmarks of files, buckets and GPUs.

Threading: the caller's thread submits and asks, the engine's pump does the rest. Ownership: the engine owns its link.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from nixl_offload.chunk.layout import GroupLayout, KVLayout, RegionSpec
from nixl_offload.engine import Chunk, Job, LinkEngine, RankEngine, WorkKind
from nixl_offload.engine.streams import READY
from nixl_offload.movers.base import Op
from nixl_offload.tiers.base import Link
from nixl_offload.types import Outcome

ASK_S = 0.0005
"""How often the engine is asked what has ended."""
JOB_TIMEOUT_S = 60.0


def layout_of(layers: Sequence[torch.Tensor], blocks_per_chunk: int) -> KVLayout:
    """Return the layout of a KV cache with one group and a tensor of shape (blocks, page bytes) for each layer."""
    specs = [
        RegionSpec(n, pages.data_ptr(), len(pages), pages.shape[1], pages.shape[1]) for n, pages in enumerate(layers)
    ]
    group = GroupLayout.of_pages((n, pages.shape[1]) for n, pages in enumerate(layers))
    return KVLayout(tuple(specs), (group,), blocks_per_chunk)


def offloading_config(layers: Sequence[str], block_bytes: int, blocks_per_chunk: int) -> Any:
    """Return what vLLM would say of one rank whose blocks of 16 tokens have ``block_bytes`` over all layers."""
    from vllm.v1.kv_offload import config

    sizes = dict.fromkeys(("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size", "data_parallel_size"), 1)
    return config.OffloadingConfig(
        groups=(config.OffloadingGroupConfig(tokens_per_block=16, layer_names=tuple(layers), group_id=0),),
        worker_kv_bytes_per_block=block_bytes,
        enable_kv_cache_events=False,
        extra_config={},
        engine_id="benchmark",
        model=config.OffloadingModelConfig(name="model", dtype="float16"),
        cache=config.OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=blocks_per_chunk),
        parallel=config.OffloadingParallelConfig(
            rank=0, data_parallel_index=0, data_parallel_rank_local=None, is_parallelism_agnostic=True, **sizes
        ),
    )


class DrivenEngine:
    """Stores and loads chunks, a few jobs at a time."""

    def __init__(self, link: Link, layers: Sequence[torch.Tensor], layout: KVLayout, **options: Any) -> None:
        """``options`` as for ``LinkEngine``."""
        self._rank = RankEngine(1)
        engine = LinkEngine(
            table=self._rank, tensors=layers, layout=layout, link=link, rank_namespace=bytes(32), **options
        )
        self._rank.join(0, engine)
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
                fence = self._rank.compute_fence() or READY
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
