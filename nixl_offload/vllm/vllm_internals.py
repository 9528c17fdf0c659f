"""All that we touch of vLLM's private attributes: the place to look at first when vLLM moves on.

Threading: as whatever of vLLM is touched. ``tests/vllm/test_contract.py`` holds every installed vLLM to it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from nixl_offload.vllm.compat import check_version

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
    from vllm.v1.core.sched.output import SchedulerOutput


def without_preempted_loads(scheduler: OffloadingConnectorScheduler, output: SchedulerOutput) -> SchedulerOutput:
    """Return ``output`` for vLLM 0.32 to build the connector's metadata from, without preempted requests that load.

    ``reset_prefix_cache(reset_running_requests=True)`` preempts running requests, and the next step may already load
    them again. vLLM has the jobs of preempted requests finished before their blocks are reused, and 0.32 takes it that
    these are stores: a load that this very step begins fails its assertion, and the engine ends. There is nothing to
    finish for such a request: a load begins only when no other job is left. 0.33 leaves such loads out itself.
    """
    loading = {job.req_id for job in scheduler._current_batch_load_jobs.values()}
    if not loading or not output.preempted_req_ids or check_version() != (0, 32):
        return output
    return replace(output, preempted_req_ids=output.preempted_req_ids - loading)
