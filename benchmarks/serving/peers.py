"""vLLM's own offloading, also where its platform check would refuse it. Imported in the engine's process.

All of it is vLLM's. Only where there is no CUDA, its streams, events and batched copies are ``played``.

Threading: as vLLM's; the played stream of ``with`` is the calling thread's own.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import simple_cpu_offload_connector
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker
from vllm.v1.kv_offload.cpu import gpu_worker
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec
from vllm.v1.simple_kv_offload import copy_backend, cuda_mem_ops, worker

from benchmarks.serving.played import Copy, CopyEngine

HAS_CUDA = torch.cuda.is_available()
SimpleCPUOffloadConnector = simple_cpu_offload_connector.SimpleCPUOffloadConnector


class PlayedCPUOffloadingSpec(CPUOffloadingSpec):
    """vLLM's memory, in the file that it takes on CUDA."""

    def _uses_shared_region(self) -> bool:
        return True

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if not HAS_CUDA and not self._worker:
            near = [replace(item, tensor=item.tensor.as_subclass(_Near)) for item in kv_caches.tensors]
            self._worker = made = self.create_worker(replace(kv_caches, tensors=near))
            for handler in (made._store_handler, made._load_handler, made._expedited_load_handler):
                for tensors in (handler.src_tensors, handler.dst_tensors):
                    tensors[:] = [tensor.as_subclass(torch.Tensor) for tensor in tensors]
        return self._worker or super().get_worker(kv_caches)


class PlayedTieringOffloadingSpec(PlayedCPUOffloadingSpec, TieringOffloadingSpec):
    """vLLM's memory with tiers behind it."""


class _Near(torch.Tensor):
    """Passes for device memory."""

    is_cuda = True  # type: ignore[assignment]


class _Stream:
    """A CUDA stream of copies; it is over when its last copy is."""

    all: ClassVar[list[_Stream]] = []
    current: ClassVar[_Stream]

    def __init__(self, **_: Any) -> None:
        self.copy = Copy(0)
        self.cuda_stream = len(self.all)
        self.all.append(self)

    priority_range = staticmethod(lambda: (0, 0))

    def wait_stream(self, _: Any) -> None: ...

    wait_event = wait_stream

    def __enter__(self) -> None:
        _Stream.current = self

    def __exit__(self, *_: object) -> None: ...


class _Event:
    """A CUDA event: the last copy of a stream."""

    def __init__(self, **_: Any) -> None: ...

    def record(self, stream: _Stream) -> None:
        self.copy = stream.copy
        self.query, self.synchronize = self.copy.query, self.copy.synchronize

    def elapsed_time(self, end: _Event) -> float:
        return 1e3 * (end.copy.end_s - end.copy.begin_s)


class _With:
    """A module or an object with some of its attributes replaced."""

    def __init__(self, whole: Any, **own: Any) -> None:
        self._whole = whole
        self.__dict__.update(own)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)


def _swap_blocks(src: torch.Tensor, dst: torch.Tensor, sizes: torch.Tensor, *, is_src_access_order_any: bool) -> None:
    plan = torch.stack([dst, src, sizes], dim=1).numpy()
    _Stream.current.copy = _ENGINES[is_src_access_order_any].start(plan)


def _batch_memcpy(dst: int, src: int, sizes: int, count: int, attributes: int, *rest: Any) -> int:
    plan = np.array([(ctypes.c_int64 * count).from_address(column) for column in (dst, src, sizes)]).T
    is_load = ctypes.c_uint.from_address(attributes).value == cuda_mem_ops.CU_MEMCPY_SRC_ACCESS_ORDER_ANY
    _Stream.all[rest[-1]].copy = _ENGINES[is_load].start(plan)
    return 0


if not HAS_CUDA:
    _ENGINES = CopyEngine(), CopyEngine()
    _MODEL = _Stream()
    cuda = _With(torch.cuda, Stream=_Stream, current_stream=lambda: _MODEL)
    for module in (gpu_worker, worker, copy_backend):
        module.torch = _With(torch, Event=_Event, cuda=cuda)  # type: ignore[attr-defined]
    gpu_worker.current_platform = _With(  # type: ignore[assignment]
        gpu_worker.current_platform, Stream=_Stream, current_stream=lambda: None, stream=lambda stream: stream
    )
    gpu_worker.ops = _With(gpu_worker.ops, swap_blocks_batch=_swap_blocks)  # type: ignore[assignment]
    cuda_mem_ops._batch_memcpy = (_batch_memcpy, 1)
