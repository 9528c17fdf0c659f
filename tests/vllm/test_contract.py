"""Our classes against vLLM's: which versions are accepted, how ranks' reports merge, and that vLLM makes the calls on
which right tokens depend in the expected order. Starts no engine.
"""

from __future__ import annotations

import importlib
import inspect
import textwrap
from typing import Any

import pytest
from vllm.v1.attention.backend import AttentionLayer

from nixl_offload.config import CONNECTOR_NAME
from nixl_offload.errors import NotSupportedError
from nixl_offload.types import Outcome
from nixl_offload.vllm import plugin, vllm_internals
from nixl_offload.vllm.messages import TicketReport, WorkerReport

OFFLOADING = "vllm.distributed.kv_transfer.kv_connector.v1.offloading"


def named(path: str) -> Any:
    """``package.module:Class.attribute``, or a failure that says what is gone."""
    module, _, rest = path.partition(":")
    thing = importlib.import_module(module)
    for name in filter(None, rest.split(".")):
        assert hasattr(thing, name), f"this vLLM has no {name} in {path}"
        thing = getattr(thing, name)
    return thing


def source(path: str) -> str:
    return textwrap.dedent(inspect.getsource(named(path)))


def in_order(path: str, *pieces: str) -> None:
    """Assert that ``pieces`` occur in the source of ``path``, one after the other."""
    text, at = source(path), 0
    for piece in pieces:
        found = text.find(piece, at)
        assert found >= 0, f"{path} no longer has {piece!r} after the pieces before it in {list(pieces)}"
        at = found + len(piece)


@pytest.mark.parametrize("text", ["0.32.0", "0.34.0", "0.3.3", "0.330.0", "dev", ""])
def test_other_versions_are_refused_before_anything_private_is_imported(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A renamed import in vLLM must not be what the operator reads; our sentence must."""
    plugin.check_version()
    monkeypatch.setattr("vllm.__version__", text)
    with pytest.raises(NotSupportedError, match=rf"supports vLLM 0\.33, and this is vLLM {text}"):
        getattr(plugin, CONNECTOR_NAME)


def test_layers_keep_the_scales_of_quantized_kv_where_we_read_them() -> None:
    """Under another name they would drop out of the identity without a word."""
    assert {"_k_scale_float", "_v_scale_float"} <= set(AttentionLayer.__annotations__)


def test_loads_within_the_step_are_turned_off() -> None:
    """Where such a load fails, vLLM keeps and stores what was computed from it: wrong answers, seen with both."""
    extra: dict[str, Any] = {"sync_load_budget_bytes": 1 << 20, "other": 1}
    assert "sync_load_budget_bytes is ignored" in str(vllm_internals.turn_off_loads_within_the_step(extra))
    assert extra == {"sync_load_budget_bytes": 0, "other": 1}
    assert vllm_internals.turn_off_loads_within_the_step(extra) is None


def test_ranks_stop_before_the_scheduler_gives_up_the_directory() -> None:
    """Else a second engine could take the lock while ours still writes."""
    in_order("vllm.v1.engine.core:EngineCore.shutdown", "self.model_executor.shutdown()", "self.scheduler.shutdown()")


def test_stores_are_flushed_before_their_blocks_are_reused() -> None:
    in_order(f"{OFFLOADING}.worker:OffloadingConnectorWorker.handle_preemptions", "submit_store(", "self.worker.wait(")


def test_a_step_touches_no_block_of_a_load_that_comes_with_it() -> None:
    """Loads begin in ``bind_connector_metadata`` and depend on this (decision 0014)."""
    runner, second = "vllm.v1.worker.gpu_model_runner:GPUModelRunner", "vllm.v1.worker.gpu.model_runner:GPUModelRunner"
    # Before the forward pass, on the thread that launches it, after stores are flushed and blocks zeroed and copied.
    bound = ("handle_preemptions(", "self._update_states(", "maybe_get_kv_connector_output(", "self._model_forward(")
    in_order(f"{runner}.execute_model", *bound)
    in_order(f"{runner}._update_states", "_zero_block_ids(", "copy_kv_cache_blocks_inplace(")
    mixin = "vllm.v1.worker.kv_connector_model_runner_mixin:KVConnectorModelRunnerMixin._get_kv_connector_output"
    in_order(mixin, "bind_connector_metadata(", "yield", "start_load_kv(", "wait_for_save()")
    launches = ("pre_forward(", "run_fullgraph(", "pre_forward(", "model(")
    in_order(f"{second}.execute_model", "self.update_requests(", *launches)
    active = "vllm.v1.worker.gpu.kv_connector:ActiveKVConnector"
    in_order(f"{active}.pre_forward", "handle_preemptions(", "bind_connector_metadata(")
    in_order(f"{active}.post_forward", "_start_load_kv()", "wait_for_save()")
    # Blocks are zeroed and copied in the step that allocates them.
    scheduler = "vllm.v1.core.sched.scheduler:Scheduler.schedule"
    in_order(scheduler, "allocate_slots(", "take_kv_cache_block_copies()", "self._get_new_block_ids_to_zero()")
    # Nor does the step have freed blocks in its hands: after a preemption it admits no load.
    in_order(scheduler, "self._preempt_request(", "if not preempted_reqs", "get_num_new_matched_tokens(")
    # The request of a load waits: it is no part of the step, and its blocks are in nobody's prefix.
    in_order(scheduler, "if load_kv_async:", "WAITING_FOR_REMOTE_KVS", "skip_request(request_queue)", "continue")


def test_reports_of_two_ranks_merge() -> None:
    """Counts add up, a failure on either rank is a failure, CORRUPT outweighs the rest, nothing given is changed."""
    first, second = WorkerReport(), WorkerReport()
    for report in (first, second):
        report.mark_completed(7)
    first.tickets[3] = TicketReport(1, {0: Outcome.CORRUPT, 2: Outcome.FAILED})
    second.tickets[3] = TicketReport(1, {0: Outcome.FAILED, 1: Outcome.DROPPED})
    merged = first.aggregate(second)
    assert isinstance(merged, WorkerReport)
    assert merged.completed_jobs == {7: 2}
    assert merged.tickets[3].ranks == 2
    assert merged.tickets[3].failures == {0: Outcome.CORRUPT, 1: Outcome.DROPPED, 2: Outcome.FAILED}
    assert first.tickets[3].ranks == second.tickets[3].ranks == 1
