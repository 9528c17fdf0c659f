"""All access to private attributes of vLLM's connector and of its ranks. ``vllm_scheduler`` has the rest.

Threading: that of vLLM's object. ruff (SLF001) checks that no other file touches private attributes.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, MutableMapping
from types import FrameType
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.worker.worker_base import WorkerBase

# The connector.


def turn_off_loads_within_the_step(extra_config: MutableMapping[str, Any]) -> str | None:
    """Turn off ``sync_load_budget_bytes``. Return a sentence for the log, or None if it was off.

    Blocks of a load within the step enter vLLM's prefix cache when they are allocated, and the same step offers chunks
    computed from them to the store. When such a load fails, vLLM recomputes the request, but takes back neither the
    blocks nor the store. The blocks gave wrong answers if the request was aborted before it was recomputed; the store
    always did.
    """
    if not extra_config.get("sync_load_budget_bytes"):
        return None
    extra_config["sync_load_budget_bytes"] = 0
    return (
        "kv_connector_extra_config: sync_load_budget_bytes is ignored: when a load that finishes within the step fails,"
        " vLLM keeps and stores what was computed from it, so damaged storage could reach an answer"
    )


def set_canonical_layout(connector: OffloadingConnector, offloading: OffloadingConfig) -> None:
    """Set what ``OffloadingConnector.__init__``, which ours skips, sets besides its halves."""
    connector._canonical_layout = offloading.canonical_layout


def outermost_connector() -> KVConnectorBase_V1 | None:
    """Return the connector that this rank's vLLM talks to: ours, or one that contains ours. None: not built yet."""
    return get_kv_transfer_group() if has_kv_transfer_group() else None


def load_failure_policy(connector: KVConnectorBase_V1 | None) -> str | None:
    """Return what vLLM does with a request whose load failed. The outermost connector's policy is in force."""
    return None if connector is None else connector._kv_transfer_config.kv_load_failure_policy


def evict_blocks(connector: OffloadingConnector, block_ids: set[int]) -> None:
    """Evict blocks from vLLM's prefix cache. Requests that run on them keep them."""
    manager = connector._kv_cache_manager
    if manager is not None:
        manager.evict_blocks(block_ids)


# The ranks' half.


def store_on_every_rank(worker: OffloadingConnectorWorker) -> None:
    """Let this rank store even if KV is replicated (MLA with TP > 1) and vLLM lets only rank 0 store."""
    worker._is_store_writer = True


def pop_loading_request(worker: OffloadingConnectorWorker, job_id: int) -> str | None:
    """Return the request that a job loads for, once; None: the job is a store."""
    return worker._load_jobs.pop(job_id, None)


def find_worker(vllm_config: VllmConfig) -> WorkerBase | None:
    """Return vLLM's worker in this process, to which a connector has no reference; None: there is none.

    Looks at all objects of the garbage collector, which takes 0.2 s of a start.
    """
    for each in gc.get_objects():
        if issubclass(type(each), WorkerBase):
            worker: WorkerBase = each
            if worker.model_config is vllm_config.model_config:
                return worker
    return None


def resets_for_pause() -> bool:
    """Whether vLLM resets caches now because it pauses, sleeps or gives KV memory back, not because a user asked.

    Its call is the same as for ``reset_external=true``. Only the callers on the stack tell them apart.
    """
    from vllm.v1.engine.core import EngineCore  # not in the ranks' processes

    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not EngineCore._reset_caches.__code__:
        frame = frame.f_back
    return frame is not None


def models_of_worker(worker: WorkerBase) -> list[torch.nn.Module]:
    """Return the models that a worker has loaded: its own, and a draft model."""
    draft = worker.get_draft_model() if hasattr(worker, "get_draft_model") else None
    return [model for model in (worker.get_model(), draft) if model is not None]


def finish_before_blocks_change(worker: WorkerBase) -> None:
    """Make connectors finish the stores of reused blocks before vLLM's second model runner writes to these blocks.

    The first runner calls ``handle_preemptions`` before anything else in a step. The second calls it only after
    ``update_requests``, which zeroes blocks or copies into them. A store still waiting would read the new content.
    """
    runner: Any = worker.model_runner
    update = getattr(runner, "update_requests", None)
    if update is None:  # the first one
        return

    def update_after_stores(scheduler_output: SchedulerOutput) -> None:
        connector, metadata = outermost_connector(), scheduler_output.kv_connector_metadata
        if connector is not None and metadata is not None:
            connector.handle_preemptions(metadata)
        update(scheduler_output)

    runner.update_requests = update_after_stores


def watch_adapters(worker: WorkerBase, loaded: Callable[[LoRARequest, object], None]) -> None:
    """Call ``loaded`` with each LoRA adapter that a worker reads, before anything changes it."""
    manager = getattr(worker.model_runner, "lora_manager", None)
    if manager is None:
        return
    read = manager._load_adapter

    def recorded(request: LoRARequest) -> Any:
        adapter = read(request)
        loaded(request, adapter)
        return adapter

    manager._load_adapter = recorded


def kv_scales(layer: Any) -> list[str | None]:
    """Return the exact scales of an attention layer's quantized KV; None for a scale that it does not have."""
    scales = (getattr(layer, name, None) for name in ("_k_scale_float", "_v_scale_float"))
    return [None if scale is None else repr(scale) for scale in scales]
