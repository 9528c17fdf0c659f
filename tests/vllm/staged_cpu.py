"""Has vLLM's CPU build run pipeline stages: it lacks one buffer for it, which its GPU build makes in a trial run.

Threading: imported in each worker's process, by the name of the extension, before it runs any step.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from tests.vllm.poison import PoisonExtension

EXTENSION = f"{__name__}.{PoisonExtension.__name__}"
"""For ``worker_extension_cls``."""
_gather = CPUModelRunner.sync_and_gather_intermediate_tensors


def _with_buffer(runner: Any, num_tokens: int, intermediate_tensors: Any, sync_self: bool) -> Any:
    if runner.intermediate_tensors is None:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )
    return _gather(runner, num_tokens, intermediate_tensors, sync_self)


CPUModelRunner.sync_and_gather_intermediate_tensors = _with_buffer
