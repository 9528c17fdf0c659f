"""vLLM's own CPU offload, where its platform check would refuse it. Imported in the engine's process, by its factory.

Threading: the worker's thread; nothing here has a thread of its own.
"""

from __future__ import annotations

import time

import numpy as np
import torch
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class MeasuredCPUOffloadingSpec(CPUOffloadingSpec):
    """vLLM's spec: its manager, its policy, its chunks. On the CPU platform with a worker that copies, for vLLM's own
    asks for CUDA streams; elsewhere as it is.
    """

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if not current_platform.is_cpu():
            return super().get_worker(kv_caches)
        return CopyWorker(kv_caches, self.blocks_per_chunk, self.num_chunks)


class CopyWorker(OffloadingWorker):
    """Copies blocks in the call that submits them: kinder to vLLM's design than any poll, and no checksums."""

    def __init__(self, kv_caches: CanonicalKVCaches, blocks_per_chunk: int, chunks: int) -> None:
        self._device = [item.tensor for item in kv_caches.tensors]
        self._refs = kv_caches.group_data_refs
        self._blocks_per_chunk = blocks_per_chunk
        # Filled, so that the first stores pay for no page faults.
        rows = chunks * blocks_per_chunk
        self._host = [torch.empty((rows, tensor.shape[1]), dtype=tensor.dtype).fill_(0) for tensor in self._device]
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        assert isinstance(dst_spec, BlockIDsLoadStoreSpec)
        return self._copy(job_id, src_spec, dst_spec.block_ids, is_store=True)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        assert isinstance(src_spec, BlockIDsLoadStoreSpec)
        return self._copy(job_id, dst_spec, src_spec.block_ids, is_store=False)

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is ever under way."""

    def _copy(self, job_id: int, blocks: GPULoadStoreSpec, chunk_ids: np.ndarray, *, is_store: bool) -> bool:
        start, moved_bytes, first_block, first_chunk = time.perf_counter(), 0, 0, 0
        per_chunk = self._blocks_per_chunk
        for refs, count, at in zip(self._refs, blocks.group_sizes, blocks.block_indices, strict=True):
            if not count:
                continue
            skipped = at % per_chunk
            chunks = chunk_ids[first_chunk : first_chunk - (-(count + skipped) // per_chunk)]
            rows = (chunks[:, None] * per_chunk + np.arange(per_chunk)).ravel()[skipped : skipped + count].tolist()
            ids = blocks.block_ids[first_block : first_block + count].tolist()
            for ref in refs:
                device, host = self._device[ref.tensor_idx], self._host[ref.tensor_idx]
                for block, row in zip(ids, rows, strict=True):
                    if is_store:
                        host[row].copy_(device[block])
                    else:
                        device[block].copy_(host[row])
                moved_bytes += count * ref.page_size_bytes
            first_block += count
            first_chunk += len(chunks)
        self._finished.append(TransferResult(job_id, True, moved_bytes, time.perf_counter() - start))
        return True
