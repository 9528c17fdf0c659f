"""vLLM's own offloading specs, also where their platform check would refuse them. Imported in the engine's process.

Managers, policies, tiers and host memory are vLLM's. Only the copies, which vLLM gives to CUDA's copy engine, are made
by a thread where there is no CUDA. It lets go of the interpreter while it copies. There are no checksums.

Threading: vLLM's thread submits and asks; one copying thread per worker, ended by ``shutdown``.
"""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from concurrent.futures import Future

import numpy as np
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class PlayedCPUOffloadingSpec(CPUOffloadingSpec):
    """vLLM's memory, in the file that it takes on CUDA; copies by ``CopyingWorker`` where there is no CUDA device."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if kv_caches.tensors[0].tensor.is_cuda:
            return super().get_worker(kv_caches)
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self.config.engine_id,
                num_chunks=self.num_chunks,
                rank=0 if self.replicated_layout else self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = CopyingWorker(kv_caches, self.blocks_per_chunk, region)  # type: ignore[assignment]
        return self._worker


class PlayedTieringOffloadingSpec(PlayedCPUOffloadingSpec, TieringOffloadingSpec):
    """vLLM's memory with tiers behind it."""


class CopyingWorker(OffloadingWorker):
    """Copies pages between the KV cache and vLLM's region, job after job, on a thread."""

    def __init__(self, kv_caches: CanonicalKVCaches, blocks_per_chunk: int, region: SharedOffloadRegion) -> None:
        self._refs = kv_caches.group_data_refs
        self._blocks_per_chunk = blocks_per_chunk
        self._region = region
        self._device = [item.tensor for item in kv_caches.tensors]
        self._pages = [item.page_size_bytes for item in kv_caches.tensors]
        self._host = [region.create_next_worker_view(page * blocks_per_chunk) for page in self._pages]
        self._jobs: queue.SimpleQueue[tuple[int, np.ndarray, Future[None]] | None] = queue.SimpleQueue()
        self._under_way: dict[int, Future[None]] = {}
        self._finished: queue.SimpleQueue[TransferResult] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="played-copies", daemon=True)
        self._thread.start()

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        assert isinstance(dst_spec, BlockIDsLoadStoreSpec)
        return self._submit(job_id, src_spec, dst_spec.block_ids, is_store=True)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        assert isinstance(src_spec, BlockIDsLoadStoreSpec)
        return self._submit(job_id, dst_spec, src_spec.block_ids, is_store=False)

    def get_finished(self) -> list[TransferResult]:
        results = []
        while not self._finished.empty():
            results.append(self._finished.get())
            del self._under_way[results[-1].job_id]
        return results

    def wait(self, job_ids: set[int]) -> None:
        for job_id in job_ids:
            if (copied := self._under_way.get(job_id)) is not None:
                copied.result()

    def shutdown(self) -> None:
        self._jobs.put(None)
        self._thread.join()
        self._host.clear()
        self._region.cleanup()

    def _submit(self, job_id: int, blocks: GPULoadStoreSpec, chunk_ids: np.ndarray, *, is_store: bool) -> bool:
        """Plan the copies, rows of (to, from, bytes), and leave them to the thread."""
        plan, first_block, first_chunk, per_chunk = [], 0, 0, self._blocks_per_chunk
        for refs, count, at in zip(self._refs, blocks.group_sizes, blocks.block_indices, strict=True):
            if not count:
                continue
            skipped = at % per_chunk
            chunks = chunk_ids[first_chunk : first_chunk - (-(count + skipped) // per_chunk)].astype(np.int64)
            ids = blocks.block_ids[first_block : first_block + count].astype(np.int64)
            within = np.tile(np.arange(per_chunk), len(chunks))[skipped : skipped + count]
            rows = np.repeat(chunks, per_chunk)[skipped : skipped + count]
            for ref in refs:
                device, host = self._device[ref.tensor_idx], self._host[ref.tensor_idx]
                near = device.data_ptr() + ids * device.stride(0) * device.element_size()
                far = host.data_ptr() + rows * host.stride(0) + within * self._pages[ref.tensor_idx]
                to, source = (far, near) if is_store else (near, far)
                plan.append(np.stack([to, source, np.full(count, ref.page_size_bytes)], axis=1))
            first_block += count
            first_chunk += len(chunks)
        copied: Future[None] = Future()
        self._under_way[job_id] = copied
        self._jobs.put((job_id, np.concatenate(plan) if plan else np.empty((0, 3), np.int64), copied))
        return True

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job_id, plan, copied = job
            begin = time.perf_counter()
            for to, source, size_bytes in plan.tolist():
                ctypes.memmove(to, source, size_bytes)
            copied.set_result(None)
            took_s = time.perf_counter() - begin
            self._finished.put(TransferResult(job_id, True, int(plan[:, 2].sum()), took_s))
