"""Our classes against vLLM's: which versions are accepted, that overrides take every call, which file touches private
names, how ranks' reports merge, and in which order vLLM calls what decides over right tokens. Starts no engine.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import textwrap
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.v1.attention.backend import AttentionLayer

from nixl_offload.errors import NotSupportedError
from nixl_offload.types import Outcome
from nixl_offload.vllm import plugin, vllm_internals
from nixl_offload.vllm.connector import NixlOffloadConnector
from nixl_offload.vllm.connector_scheduler import NixlOffloadScheduler
from nixl_offload.vllm.connector_worker import NixlConnectorWorker
from nixl_offload.vllm.manager import NixlOffloadManager
from nixl_offload.vllm.messages import StepMetadata, TicketReport, TicketSpec, WorkerReport
from nixl_offload.vllm.spec import NixlOffloadSpec
from nixl_offload.vllm.worker import NixlOffloadingWorker

CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1"
OFFLOADING = f"{CONNECTOR}.offloading"
OUR_CLASSES = (
    NixlOffloadConnector,
    NixlOffloadScheduler,
    NixlOffloadManager,
    NixlOffloadSpec,
    NixlOffloadingWorker,
    NixlConnectorWorker,
    WorkerReport,
    StepMetadata,
    TicketSpec,
)


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


def parameters(path: str) -> list[str]:
    return [name for name in inspect.signature(named(path)).parameters if name != "self"]


# Versions.


def test_the_installed_version_is_supported() -> None:
    plugin.check_version()


@pytest.mark.parametrize("text", ["0.32.0", "0.34.0", "0.3.3", "0.330.0", "1.0.0", "dev", ""])
def test_other_versions_are_refused_in_a_sentence_that_names_the_supported_one(text: str) -> None:
    with pytest.raises(NotSupportedError) as refused:
        plugin.check_version(text)
    assert "supports vLLM 0.33" in str(refused.value)
    assert f"this is vLLM {text}" in str(refused.value)


# Our classes against their bases.


def accepts_what_base_takes(ours: Any, base: Any) -> list[str]:
    """Why a call that fits ``base`` may not fit ``ours``: parameters missing, renamed, moved, or newly required."""
    mine, theirs = inspect.signature(ours).parameters, inspect.signature(base).parameters
    if any(item.kind is inspect.Parameter.VAR_KEYWORD for item in mine.values()):
        return []
    problems = [f"does not take {name!r}" for name in theirs if name not in mine]
    order = [name for name in mine if name in theirs]
    if order != [name for name in theirs if name in mine]:
        problems.append(f"takes {order} in another order")
    problems += [f"requires {name!r}" for name in mine if name not in theirs and mine[name].default is mine[name].empty]
    problems += [
        f"requires {name!r}, which the base leaves optional"
        for name in mine
        if name in theirs and mine[name].default is mine[name].empty and theirs[name].default is not theirs[name].empty
    ]
    return problems


@pytest.mark.parametrize("cls", OUR_CLASSES)
def test_overrides_accept_every_call_that_their_bases_accept(cls: type) -> None:
    assert not inspect.isabstract(cls), f"vLLM asks {cls.__name__} for {sorted(cls.__abstractmethods__)}"
    for name, override in vars(cls).items():
        overridden = next((vars(item)[name] for item in cls.__mro__[1:] if name in vars(item)), None)
        if name.startswith("__") or overridden is None:
            continue
        if isinstance(override, (classmethod, staticmethod)):
            assert type(override) is type(overridden), f"{cls.__name__}.{name} is not what its base is"
        ours, base = (getattr(item, "__func__", item) for item in (override, overridden))
        if inspect.isfunction(ours) and inspect.isfunction(base):
            problems = accepts_what_base_takes(ours, base)
            assert not problems, f"{cls.__name__}.{name} {'; '.join(problems)}"


# Constructors that we go past, and attributes of bases that we read or write.


def private_names_of(cls: type) -> set[str]:
    """Attributes and methods with a leading underscore that the vLLM classes above ``cls`` have."""
    names: set[str] = set()
    for base in (each for each in cls.__mro__ if each.__module__.startswith("vllm.")):
        names.update(vars(base))
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(base)))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
    return {name for name in names if name.startswith("_") and not name.startswith("__")}


def test_private_names_of_vllm_live_in_one_file() -> None:
    """``vllm_internals`` alone touches them: of vLLM's objects, and of what our classes have from vLLM's."""
    for path in Path(inspect.getfile(vllm_internals)).parent.glob("*.py"):
        if path.name in {"vllm_internals.py", "compare.py"}:  # compare.py asks Python's argparse, not vLLM
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                owner = node.value.id if isinstance(node.value, ast.Name) else ""
                assert owner in {"self", "cls"}, f"{path.name}:{node.lineno} touches {ast.unparse(node)}"
    for cls in OUR_CLASSES:
        used = {
            node.attr
            for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(cls))))
            if isinstance(node, ast.Attribute)
        }
        used |= set(vars(cls))
        found = used & private_names_of(cls) - {"_abc_impl"}
        assert not found, f"{cls.__name__} touches {sorted(found)}, which are vLLM's"


def test_layers_keep_the_scales_of_quantized_kv_where_we_read_them() -> None:
    """Under another name they would drop out of the identity without a word."""
    assert {"_k_scale_float", "_v_scale_float"} <= set(AttentionLayer.__annotations__)


# Registration, and what vLLM reads out of its extra config.


def test_factories_know_us_by_name() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory

    from nixl_offload.config import CONNECTOR_NAME
    from nixl_offload.vllm.plugin import SPEC_NAME, register

    register()
    register()
    assert KVConnectorFactory.get_connector_class_by_name(CONNECTOR_NAME) is NixlOffloadConnector
    assert OffloadingSpecFactory.get_spec_cls({"spec_name": SPEC_NAME}) is NixlOffloadSpec


def test_loads_within_the_step_are_turned_off() -> None:
    """Where such a load fails, vLLM keeps and stores what was computed from it: wrong answers, seen with both."""
    extra: dict[str, Any] = {"sync_load_budget_bytes": 1 << 20, "other": 1}
    told = vllm_internals.turn_off_loads_within_the_step(extra)
    assert told is not None
    assert "sync_load_budget_bytes is ignored" in told
    assert extra == {"sync_load_budget_bytes": 0, "other": 1}
    assert vllm_internals.turn_off_loads_within_the_step(extra) is None


# Orders of calls.


def test_ranks_stop_before_the_scheduler_gives_up_the_directory() -> None:
    """Else a second engine could take the lock while ours still writes."""
    in_order("vllm.v1.engine.core:EngineCore.shutdown", "self.model_executor.shutdown()", "self.scheduler.shutdown()")


def test_stores_are_flushed_before_their_blocks_are_reused() -> None:
    in_order(f"{OFFLOADING}.worker:OffloadingConnectorWorker.handle_preemptions", "submit_store(", "self.worker.wait(")
    in_order("vllm.v1.worker.gpu.kv_connector:ActiveKVConnector.pre_forward", "handle_preemptions(", "_start_load_kv(")


def test_a_step_touches_no_block_of_a_load_that_comes_with_it() -> None:
    """What the fence of loads rests on, which is recorded in ``handle_preemptions``: decision 0014."""
    runner, second = "vllm.v1.worker.gpu_model_runner:GPUModelRunner", "vllm.v1.worker.gpu.model_runner:GPUModelRunner"
    # Before the forward pass, in either runner, and on the thread that launches it.
    in_order(f"{runner}.execute_model", "handle_preemptions(", "self._update_states(", "self._model_forward(")
    launches = ("pre_forward(", "run_fullgraph(", "pre_forward(", "model(")
    in_order(f"{second}.execute_model", "self.update_requests(", *launches)
    in_order("vllm.v1.worker.gpu.kv_connector:ActiveKVConnector.post_forward", "_start_load_kv()", "wait_for_save()")
    # The first one zeroes blocks behind it: not those of a load, of any group that we load.
    assert "zero_block_ids" in source(f"{runner}._zero_block_ids")
    scheduler = "vllm.v1.core.sched.scheduler:Scheduler.schedule"
    in_order(scheduler, "delay_cache_blocks=load_kv_async", "get_loaded_kv_cache_group_ids(request)")
    coordinator = "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.allocate_new_computed_blocks"
    assert "record_for_zeroing=i not in skip_zeroing_group_ids" in source(coordinator)
    loaded = "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.get_loaded_kv_cache_group_ids"
    assert "prefix_cacheable_group_ids" in source(loaded)
    assert "get_loaded_kv_cache_group_ids" not in vars(NixlOffloadConnector)
    assert "get_loaded_kv_cache_group_ids" not in source(f"{CONNECTOR}.offloading_connector")
    assert "prefix_cacheable_group_ids" in source(f"{OFFLOADING}.config:get_offloading_group_ids")
    # Nor does the step have freed blocks in its hands: after a preemption it admits no load.
    in_order(scheduler, "self._preempt_request(", "if not preempted_reqs", "get_num_new_matched_tokens(")
    # The request of a load waits: it is no part of the step, and its blocks are in nobody's prefix.
    in_order(scheduler, "if load_kv_async:", "WAITING_FOR_REMOTE_KVS", "skip_request(request_queue)", "continue")


# Our messages.


def test_messages_that_we_build_by_position_keep_their_order() -> None:
    meta = named(f"{OFFLOADING}.common:OffloadingWorkerMetadata")
    assert [item.name for item in dataclasses.fields(meta)][:2] == ["completed_jobs", "transfer_stats"]
    prepared = ["keys_to_store", "store_spec", "evicted_keys"]
    assert parameters("vllm.v1.kv_offload.base:PrepareStoreOutput")[:3] == prepared
    assert parameters(f"{OFFLOADING}.common:DirectionalTransferStats.record") == ["num_bytes", "time"]
    named("vllm.v1.kv_offload.base:RequestOffloadingContext")()
    scheduled = named(f"{OFFLOADING}.common:OffloadingConnectorMetadata")
    assert [item.name for item in dataclasses.fields(scheduled)] == ["load_jobs", "store_jobs", "jobs_to_flush"], (
        "build_connector_meta copies these, and would leave out what came on top"
    )


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


def test_an_unknown_version_is_refused_before_anything_private_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A renamed import in vLLM must not be what the operator reads; our sentence must."""
    from nixl_offload.config import CONNECTOR_NAME
    from nixl_offload.vllm import plugin

    monkeypatch.setattr("vllm.__version__", "0.34.0")
    with pytest.raises(NotSupportedError, match=r"vLLM 0\.33, and this is vLLM 0\.34\.0"):
        getattr(plugin, CONNECTOR_NAME)
