"""Chunks that are stored only when vLLM is about to evict them from the GPU, so that memory holds what the GPU does not
(decision 0032). ``vllm_scheduler`` makes the jobs.

Threading: the scheduler's thread. Reads vLLM's block pool, and never changes it: the blocks of a store are fenced like
those of an ended request.
Failure: a chunk whose blocks vLLM takes before it was due is lost. No chunk is returned whose blocks have changed.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from itertools import islice
from typing import NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import RequestOffloadState
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId
from vllm.v1.kv_offload.base import OffloadKey, ReqContext, get_offload_group_idx

LEAST_SHARE, MOST_SHARE = 8, 4
"""Looks ahead over an eighth of vLLM's blocks, for a long hit takes many at once. Over more if a step does, but at most
over a fourth, for they are in both caches."""
LOOKS = 4
"""Looks anew when a fourth of what it looks at has been allocated or freed: five looks at each block."""


class PutOff(NamedTuple):
    """A chunk that is not stored yet."""

    key: OffloadKey
    block_ids: list[int]
    hashes: list[bytes]
    """Of the blocks: their names in vLLM's prefix cache."""


class LazyStores:
    """Remembers offered chunks by their blocks, until these come near the head of vLLM's queue of free blocks."""

    def __init__(
        self, pool: BlockPool, step_blocks: int, state_of: Callable[[str], RequestOffloadState | None]
    ) -> None:
        """``step_blocks``: the most blocks that a step fills. ``state_of``: returns vLLM's state of a request."""
        self._pool, self._state_of = pool, state_of
        size = pool.num_gpu_blocks
        self._ahead = max(size // LEAST_SHARE, min(2 * step_blocks, size // MOST_SHARE))
        self._chunks: dict[int, PutOff] = {}
        """By the last block of a chunk, which vLLM evicts first."""
        self._allocated = self._free = 0
        """Blocks allocated since the last look, and blocks that were free then."""
        self._wanted = 0
        """The most blocks that a hit wants at once, if that is more."""

    def __contains__(self, key: bytes) -> bool:
        """Whether a chunk is remembered, and vLLM's cache still has it."""
        block = self._pool.cached_block_hash_to_block.get_one_block(BlockHashWithGroupId(key))
        return block is not None and block.block_id in self._chunks

    def put_off(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> list[OffloadKey]:
        """Remember chunks of a request. Returns the others, which must be stored now or never: vLLM's cache does not
        have all of their blocks, or drops them in another order, as those of windows.
        """
        state, others = self._state_of(req_context.req_id), []
        for key in keys:
            if state is not None and (chunk := self._chunk(key, state)) is not None:
                self._chunks[chunk.block_ids[-1]] = chunk
            else:
                others.append(key)
        return others

    def due(self, allocated: int) -> list[PutOff]:
        """Forget and return the chunks whose blocks the next steps may take, the first to be evicted last.

        ``allocated``: the most blocks that this step may have taken from the queue.
        """
        queue = self._pool.free_block_queue
        self._allocated += allocated
        freed = max(0, queue.num_free_blocks - self._free + self._allocated)
        ahead, self._wanted = min(max(self._ahead, self._wanted), queue.num_free_blocks), 0
        if not self._chunks or LOOKS * (self._allocated + freed) < ahead:
            return []
        self._allocated, self._free = 0, queue.num_free_blocks
        near = islice(queue.iter_blocks_after(None), ahead)
        chunks = [chunk for block in near if (chunk := self._chunks.pop(block.block_id, None)) is not None]
        return [chunk for chunk in reversed(chunks) if self._holds(chunk)]

    def is_clear(self, blocks: int, being_stored: Container[int]) -> bool:
        """Whether vLLM may take its next ``blocks`` at once: none holds what memory lacks. If not, this is due with the
        step.
        """
        queue = self._pool.free_block_queue
        if not self._ahead < blocks <= queue.num_free_blocks:
            return True  # few are looked after anyway, and too many are not taken
        near = islice(queue.iter_blocks_after(None), blocks)
        if all(block.block_id not in self._chunks and block.block_id not in being_stored for block in near):
            return True
        self._wanted = self._allocated = max(self._wanted, blocks)
        return False

    def put_back(self, chunk: PutOff) -> None:
        """Remember a chunk for which there was no room. It is due at the next step."""
        self._chunks[chunk.block_ids[-1]] = chunk
        self._allocated = self._ahead

    def _chunk(self, key: OffloadKey, state: RequestOffloadState) -> PutOff | None:
        """Return a chunk whose blocks vLLM's cache has under the names that the request gives them; else None."""
        end, group_idx = state.req_context.get_offload_key_position(key), get_offload_group_idx(key)
        for config, group in zip(state.config.kv_group_configs, state.group_states, strict=True):
            if config.group_idx != group_idx or config.sliding_window_size_in_chunks is not None or end is None:
                continue
            count = state.config.blocks_per_chunk
            last, hashes_per_block = end // config.tokens_per_block, config.hashes_per_chunk // count
            ids = group.block_ids[last - count : last]
            first_hash = (last - count + 1) * hashes_per_block - 1
            own = state.req.block_hashes[first_hash : last * hashes_per_block : hashes_per_block]
            chunk = PutOff(key, ids, [block_hash + key[-4:] for block_hash in own])
            # The key of a request with an adapter, or of a chunk's part, is not the name of the last block.
            if len(ids) == count and chunk.hashes[-1:] == [key] and self._holds(chunk):
                return chunk
        return None

    def _holds(self, chunk: PutOff) -> bool:
        blocks = self._pool.blocks
        return all(blocks[at].block_hash == name for at, name in zip(chunk.block_ids, chunk.hashes, strict=True))
