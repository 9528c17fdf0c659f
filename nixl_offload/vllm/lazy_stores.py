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
from vllm.v1.kv_offload.base import OffloadKey, ReqContext

LEAST_SHARE, MOST_SHARE = 8, 4
"""Looks ahead over an eighth of vLLM's blocks, for a long hit takes many at once. Over more if a step does, but at most
over a fourth, for they are in both caches."""
LOOKS = 4
"""Looks anew when a fourth of what it looks at has been allocated or freed: five looks at each block."""


class PutOff(NamedTuple):
    """A chunk that is not stored yet."""

    block_ids: list[int]
    names: list[bytes]
    """Of the blocks, in vLLM's prefix cache."""

    @property
    def key(self) -> OffloadKey:
        """The chunk's key, which is the name of its last block."""
        return OffloadKey(self.names[-1])


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
        chunk = None if block is None else self._chunks.get(block.block_id)
        return chunk is not None and chunk.key == key

    def put_off(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> list[OffloadKey]:
        """Remember chunks of a request. Returns the others, which must be stored now or never: vLLM's cache does not
        have all of their blocks, or drops them in another order, as those of windows.
        """
        others, blocks = list(keys), self._pool.blocks
        if (state := self._state_of(req_context.req_id)) is None:
            return others
        for config, group in zip(state.config.kv_group_configs, state.group_states, strict=True):
            if config.sliding_window_size_in_chunks is not None:
                continue
            asked, others, count = others, [], state.config.blocks_per_chunk
            step = config.hashes_per_chunk // count
            for key in asked:
                end = (req_context.get_offload_key_position(key) or 0) // config.tokens_per_block
                ids, name = group.block_ids[end - count : end], bytes(key)
                # The key of another group, of a request with an adapter, or of a chunk's part does not name the block.
                if len(ids) == count and blocks[ids[-1]].block_hash == name:
                    before = state.req.block_hashes[(end - count + 1) * step - 1 : end * step - 1 : step]
                    chunk = PutOff(ids, [*[block_hash + key[-4:] for block_hash in before], key])
                    if count == 1 or self._holds(chunk):
                        self._chunks[ids[-1]] = chunk
                        continue
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

    def _holds(self, chunk: PutOff) -> bool:
        blocks = self._pool.blocks
        return [blocks[at].block_hash for at in chunk.block_ids] == chunk.names
