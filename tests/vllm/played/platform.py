"""vLLM's CUDA platform and GPU worker on a played device.

Threading: as vLLM's.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from tests.vllm.played import arithmetic, device

arithmetic.install()

from vllm.platforms.cuda import CudaPlatformBase  # noqa: E402 - looks for compiled kernels
from vllm.platforms.interface import DeviceCapability  # noqa: E402


class PlayedPlatform(CudaPlatformBase):
    """CUDA to all who ask what it is; host memory to torch."""

    device_name = device_type = "cpu"
    dispatch_key = "CPU"
    dist_backend = "gloo"

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
        return DeviceCapability(*device.CAPABILITY)

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return device.NAME

    @classmethod
    def get_device_uuid(cls, device_id: int = 0) -> str:
        return "GPU-0"

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return device.TOTAL_BYTES

    @classmethod
    def is_fully_connected(cls, device_ids: list[int]) -> bool:
        return False

    @classmethod
    def device_count(cls) -> int:
        return 1

    @classmethod
    def set_device(cls, _: torch.device) -> None: ...

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return "vllm.distributed.device_communicators.base_device_communicator.DeviceCommunicatorBase"

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        super().check_and_update_config(vllm_config)
        vllm_config.parallel_config.worker_cls = f"{__name__}.PlayedWorker"


def __getattr__(name: str) -> Any:
    """Make the worker when it is asked for: the module of vLLM's asks for the platform, which is being made here."""
    if name != "PlayedWorker":
        raise AttributeError(name)
    from vllm.v1.sample.ops import topk_topp_sampler
    from vllm.v1.worker import gpu_worker

    # The one kernel that Triton's interpreter does not take; no greedy request needs it, but vLLM's profiling run does.
    topk_topp_sampler.HAS_TRITON = False
    gpu_worker.kernel_warmup = gpu_worker.warmup_kernels = lambda *_, **__: None  # nothing is compiled

    class PlayedWorker(gpu_worker.Worker):
        """vLLM's GPU worker, whose device is the host."""

        def init_device(self) -> None:
            self.device = torch.device("cpu")
            gpu_worker.init_worker_distributed_environment(
                self.vllm_config, self.rank, self.distributed_init_method, self.local_rank, "gloo"
            )
            gpu_worker.set_random_seed(self.model_config.seed)
            self.init_snapshot = SimpleNamespace(free_memory=device.FREE_BYTES, total_memory=device.TOTAL_BYTES)
            self.requested_memory = device.FREE_BYTES
            self._init_workspace_and_model_runner()

    PlayedWorker.__module__ = __name__
    globals()[name] = PlayedWorker
    return PlayedWorker
