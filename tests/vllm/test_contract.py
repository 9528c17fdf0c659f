"""What we rely on in vLLM, name by name, asked of the vLLM that is installed. Starts no engine.

Much of it is private to vLLM or is an order of calls that no signature shows. A new version that renames or reorders
one of these fails here, in a sentence, and not as a request that never comes back. Where only the source can tell (who
is called first, which attributes a constructor sets), the source is read.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.v1.attention.backend import AttentionLayer

from nixl_offload.config.schema import VllmOptions
from nixl_offload.errors import NotSupportedError
from nixl_offload.types import Outcome
from nixl_offload.vllm import plugin, vllm_internals
from nixl_offload.vllm.connector import NixlOffloadConnector
from nixl_offload.vllm.connector_scheduler import NixlOffloadScheduler
from nixl_offload.vllm.connector_worker import NixlConnectorWorker
from nixl_offload.vllm.manager import NixlOffloadManager
from nixl_offload.vllm.messages import RankGeometry, StepMetadata, TicketReport, TicketSpec, WorkerReport
from nixl_offload.vllm.spec import NixlOffloadSpec
from nixl_offload.vllm.worker import NixlOffloadingWorker
from tests.vllm import manager_rig

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


def attributes_set_in(path: str, owner: str = "self") -> set[str]:
    """Names ``x`` of every ``self.x = ...`` in a function."""
    return {
        node.attr
        for node in ast.walk(ast.parse(source(path)))
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == owner
    }


def parameters(path: str) -> list[str]:
    return [name for name in inspect.signature(named(path)).parameters if name != "self"]


# Versions.


def test_the_installed_version_is_supported() -> None:
    plugin.check_version()


@pytest.mark.parametrize("text", ["0.33.0", "0.33.0+cpu", "0.33.1.dev7+gabcdef", "0.33.0rc2"])
def test_builds_of_the_supported_version_are_accepted(text: str) -> None:
    plugin.check_version(text)


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


@pytest.mark.parametrize(
    ("cls", "inherited"),
    [
        (NixlOffloadConnector, ["get_handshake_metadata", "get_transfer_results", "get_block_ids_with_load_errors"]),
        (NixlOffloadConnector, ["set_xfer_handshake_metadata_pp_aware", "build_prom_metrics"]),
        (NixlOffloadScheduler, ["update_connector_output", "build_connector_meta", "get_num_new_matched_tokens"]),
        (
            NixlOffloadManager,
            ["get_load_source", "touch", "has_pending_work", "take_events", "reset_cache", "shutdown"],
        ),
        (NixlConnectorWorker, ["get_finished", "build_connector_worker_meta", "start_kv_transfers"]),
        (NixlOffloadingWorker, ["submit_store", "submit_load", "get_finished", "wait", "shutdown"]),
        (WorkerReport, ["aggregate"]),
    ],
)
def test_what_we_override_is_still_asked_for_under_that_name(cls: type, inherited: list[str]) -> None:
    for name in inherited:
        assert name in vars(cls), f"{cls.__name__} does not override {name}: correct this list"
        assert any(name in vars(base) for base in cls.__mro__[1:]), (
            f"this vLLM has no {name} above {cls.__name__}, so nothing calls ours"
        )


def test_completion_without_an_outcome_does_nothing_in_the_base() -> None:
    """Tickets settle from our own message; a base that did something of its own here would settle them twice."""
    for name in ("complete_store", "complete_load", "on_request_finished", "on_schedule_end"):
        path = f"vllm.v1.kv_offload.base:OffloadingManager.{name}"
        body = ast.parse(source(path)).body[0]
        assert isinstance(body, ast.FunctionDef)
        rest = [item for item in body.body if not (isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant))]
        assert all(isinstance(item, ast.Return) and item.value is None for item in rest), f"{path} now does something"


# Constructors that we go past, and attributes of bases that we read or write.


def test_connector_constructor_sets_nothing_but_what_ours_sets() -> None:
    """Ours goes past it, so an attribute that a new version adds there would be missing."""
    theirs = attributes_set_in(f"{CONNECTOR}.offloading_connector:OffloadingConnector.__init__")
    ours = attributes_set_in("nixl_offload.vllm.connector:NixlOffloadConnector.__init__")
    ours |= attributes_set_in("nixl_offload.vllm.vllm_internals:set_canonical_layout", "connector")
    assert theirs <= ours, f"OffloadingConnector.__init__ also sets {sorted(theirs - ours)}"
    in_order(
        f"{CONNECTOR}.offloading_connector:OffloadingConnector.__init__", "super().__init__", "build_offloading_config"
    )


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


def test_constructors_take_what_we_give() -> None:
    base = f"{CONNECTOR}.base:KVConnectorBase_V1.__init__"
    assert parameters(base) == ["vllm_config", "role", "kv_cache_config"]
    assert "_kv_cache_config" in attributes_set_in(base)
    for path in (
        f"{OFFLOADING}.scheduler:OffloadingConnectorScheduler",
        f"{OFFLOADING}.worker:OffloadingConnectorWorker",
    ):
        assert parameters(f"{path}.__init__") == ["spec", "vllm_config", "kv_cache_config"]
    assert parameters(f"{OFFLOADING}.config:build_offloading_config") == ["vllm_config", "kv_cache_config"]
    assert parameters(f"{OFFLOADING}.config:get_offloading_group_ids") == ["kv_cache_config"]
    assert len(parameters("vllm.v1.core.kv_cache_utils:resolve_dcp_kv_block_size")) == 2
    backends = "vllm.distributed.kv_transfer.kv_connector.utils:get_current_attn_backends"
    assert parameters(backends)[0] == "vllm_config"
    assert parameters("vllm.v1.kv_offload.base:OffloadingSpec.__init__") == ["config"]
    request = parameters("vllm.v1.request:Request.__init__")
    assert request[:4] == ["request_id", "prompt_token_ids", "sampling_params", "pooling_params"]
    assert {"lora_request", "cache_salt", "block_hasher"} <= set(request)
    assert parameters("vllm.v1.request:Request.append_output_token_ids") == ["token_ids"]
    assert parameters(f"{OFFLOADING}.scheduler:RequestOffloadState.update_offload_keys") == []


def test_layers_keep_the_scales_of_quantized_kv_where_we_read_them() -> None:
    """Under another name they would drop out of the identity without a word."""
    names = {"_k_scale_float", "_v_scale_float"}
    assert names <= set(AttentionLayer.__annotations__)
    assert names <= attributes_set_in(
        "vllm.model_executor.layers.attention.attention:set_default_quant_scales", "layer"
    )


@pytest.mark.parametrize(
    ("path", "names"),
    [
        (
            f"{OFFLOADING}.worker:OffloadingConnectorWorker.__init__",
            {"worker", "_load_jobs", "_unsubmitted_store_jobs", "_is_store_writer", "_connector_worker_meta"},
        ),
        (
            f"{OFFLOADING}.scheduler:OffloadingConnectorScheduler.__init__",
            {
                "manager",
                "config",
                "_current_batch_load_jobs",
                "_events_tracker",
                "_jobs",
                "_lookup_groups",
                "_req_status",
                "_stale_job_threshold",
            },
        ),
        (
            "vllm.v1.request:Request.__init__",
            {"kv_transfer_params", "kv_hints", "lora_request", "cache_salt", "block_hashes", "_block_hasher"},
        ),
        ("vllm.v1.kv_offload.base:OffloadingSpec.__init__", {"config", "extra_config"}),
        ("vllm.v1.kv_offload.base:GPULoadStoreSpec.__init__", {"group_sizes", "block_indices"}),
        ("vllm.v1.kv_offload.base:BlockIDsLoadStoreSpec.__init__", {"block_ids"}),
    ],
)
def test_bases_set_the_attributes_that_we_use(path: str, names: set[str]) -> None:
    missing = names - attributes_set_in(path)
    assert not missing, f"{path} does not set {sorted(missing)}"


@pytest.mark.parametrize(
    ("path", "names"),
    [
        (f"{OFFLOADING}.common:OffloadingWorkerMetadata", ["completed_jobs", "transfer_stats"]),
        (f"{OFFLOADING}.common:TransferStats", ["load", "store"]),
        (f"{OFFLOADING}.common:TransferJob", ["req_id", "src_spec", "dst_spec"]),
        (f"{OFFLOADING}.common:OffloadingConnectorMetadata", ["load_jobs", "store_jobs", "jobs_to_flush"]),
        (f"{OFFLOADING}.scheduler:SchedulerOffloadConfig", ["kv_group_configs", "tokens_per_hash"]),
        (
            f"{OFFLOADING}.scheduler:GroupOffloadConfig",
            ["group_idx", "tokens_per_chunk", "sliding_window_size_in_chunks"],
        ),
        (f"{OFFLOADING}.scheduler:RequestGroupState", ["offload_keys", "next_stored_chunk_idx"]),
        (f"{OFFLOADING}.scheduler:RequestOffloadState", ["req", "req_context", "group_states"]),
        (f"{OFFLOADING}.scheduler:RequestOffloadState", ["config", "offloading_context"]),
        ("vllm.v1.kv_hints:KvHintsEnvelope", ["actions"]),
        ("vllm.v1.kv_hints:KvHintAction", ["action_type", "action_version", "payload"]),
        (f"{OFFLOADING}.scheduler:TransferJobStatus", ["req_id", "keys", "is_store"]),
        (
            "vllm.v1.core.sched.output:SchedulerOutput",
            ["total_num_scheduled_tokens", "num_scheduled_tokens", "scheduled_new_reqs", "scheduled_cached_reqs"],
        ),
        (
            "vllm.v1.core.sched.output:SchedulerOutput",
            ["finished_req_ids", "preempted_req_ids", "kv_connector_block_state"],
        ),
        ("vllm.v1.core.sched.output:KVConnectorBlockState", ["boundary_state_offloads"]),
        ("vllm.v1.core.sched.output:NewRequestData", ["req_id", "num_computed_tokens"]),
        ("vllm.v1.core.sched.output:CachedRequestData", ["req_ids", "num_computed_tokens"]),
        ("vllm.v1.kv_offload.base:ReqContext", ["req_id", "kv_transfer_params", "load_tier_filter"]),
        (f"{CONNECTOR}.base:KVConnectorTransferResults", ["finished_sending", "finished_recving", "failed_recving"]),
        ("vllm.v1.outputs:KVConnectorOutput", ["finished_recving", "invalid_block_ids", "kv_connector_worker_meta"]),
        ("vllm.v1.kv_offload.base:CanonicalKVCaches", ["tensors", "group_data_refs"]),
        ("vllm.v1.kv_offload.base:CanonicalKVCacheTensor", ["tensor", "page_size_bytes"]),
        ("vllm.v1.kv_offload.base:CanonicalKVCacheRef", ["tensor_idx", "page_size_bytes"]),
        ("vllm.v1.kv_offload.base:TransferResult", ["job_id", "success", "transfer_size", "transfer_time"]),
        ("vllm.v1.kv_offload.base:OffloadingEvent", ["keys", "medium", "removed", "locality"]),
        ("vllm.v1.kv_offload.base:PrepareStoreOutput", ["keys_to_store", "store_spec", "evicted_keys"]),
        (
            "vllm.v1.kv_offload.config:OffloadingConfig",
            ["groups", "model", "cache", "parallel", "enable_kv_cache_events", "kv_cache_layout", "canonical_layout"],
        ),
        ("vllm.v1.kv_offload.config:OffloadingGroupConfig", ["group_id", "tokens_per_block", "layer_names"]),
        ("vllm.v1.kv_offload.config:OffloadingModelConfig", ["name", "dtype"]),
        ("vllm.v1.kv_offload.config:OffloadingCacheConfig", ["tokens_per_hash", "blocks_per_chunk"]),
        (
            "vllm.v1.kv_offload.config:OffloadingParallelConfig",
            [
                "rank",
                "world_size",
                "tp_size",
                "pp_size",
                "pcp_size",
                "dcp_size",
                "data_parallel_index",
                "data_parallel_size",
            ],
        ),
        ("vllm.config:VllmConfig", ["kv_transfer_config", "model_config", "cache_config", "parallel_config"]),
        ("vllm.config:VllmConfig", ["attention_config"]),
        ("vllm.config:AttentionConfig", ["backend"]),
        ("vllm.config:CacheConfig", ["prefix_caching_hash_algo", "enable_prefix_caching"]),
        ("vllm.config:ModelConfig", ["model", "revision", "quantization", "hf_config"]),
        ("vllm.config:ParallelConfig", ["decode_context_parallel_size"]),
        ("vllm.config:KVTransferConfig", ["kv_connector_extra_config", "kv_load_failure_policy"]),
        ("vllm.v1.kv_cache_interface:KVCacheConfig", ["kv_cache_groups"]),
        ("vllm.v1.kv_cache_interface:KVCacheGroupSpec", ["kv_cache_spec", "layer_names"]),
    ],
)
def test_messages_and_configs_have_the_fields_that_we_use(path: str, names: list[str]) -> None:
    cls = named(path)
    if dataclasses.is_dataclass(cls):
        fields = [item.name for item in dataclasses.fields(cls)]
    else:
        fields = list(getattr(cls, "_fields", ())) or list(inspect.get_annotations(cls))
    missing = [name for name in names if name not in fields]
    assert not missing, f"{path} has no {missing}"


def test_messages_that_we_build_by_position_keep_their_order() -> None:
    meta = named(f"{OFFLOADING}.common:OffloadingWorkerMetadata")
    assert [item.name for item in dataclasses.fields(meta)][:2] == ["completed_jobs", "transfer_stats"]
    assert parameters("vllm.v1.kv_offload.base:PrepareStoreOutput")[:3] == [
        "keys_to_store",
        "store_spec",
        "evicted_keys",
    ]
    assert parameters(f"{OFFLOADING}.common:DirectionalTransferStats.record") == ["num_bytes", "time"]
    named("vllm.v1.kv_offload.base:RequestOffloadingContext")()
    scheduled = named(f"{OFFLOADING}.common:OffloadingConnectorMetadata")
    assert [item.name for item in dataclasses.fields(scheduled)] == ["load_jobs", "store_jobs", "jobs_to_flush"], (
        "build_connector_meta copies these, and would leave out what came on top"
    )


def test_words_that_we_answer_with_exist() -> None:
    for path in (
        "vllm.v1.kv_offload.base:LookupResult.MISS",
        "vllm.v1.kv_offload.base:LookupResult.HIT",
        "vllm.v1.kv_offload.base:LookupResult.HIT_PENDING",
        "vllm.v1.kv_offload.base:LookupResult.RETRY",
        "vllm.v1.kv_offload.base:TierFilter.ALL",
        f"{CONNECTOR}.base:KVConnectorRole.SCHEDULER",
        f"{CONNECTOR}.base:SupportsHMA",
    ):
        named(path)
    assert issubclass(NixlOffloadConnector, named(f"{CONNECTOR}.base:SupportsHMA"))


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


def test_extra_config_is_read_under_the_names_that_we_write() -> None:
    assert "blocks_per_chunk" in source(f"{OFFLOADING}.config:build_offloading_config")
    assert "get_spec_cls" in source(f"{OFFLOADING}.metrics:OffloadPromMetrics.__init__")
    assert "sync_load_budget_bytes" in source(f"{OFFLOADING}.scheduler")


def test_what_the_config_may_pass_on_is_what_vllm_reads() -> None:
    """Of the connector, its scheduler and the base of specs; of other specs' keys, which mean nothing here, none."""
    modules = ("config", "scheduler", "worker", "events", "metrics", "common")
    texts = [source(f"{OFFLOADING}.{module}") for module in modules]
    texts += [source("vllm.v1.kv_offload.base"), source("vllm.v1.kv_offload.factory"), source(CONNECTOR)]
    read = set(re.findall(r"extra_config(?:\.get\(|\[)\s*\"(\w+)\"", "\n".join(texts)))
    assert read >= {"offload_prompt_only", "self_describing_kv_events", "canonical_layout"}
    ours = {"spec_name", "spec_module_path", "block_size", "blocks_per_chunk"}
    assert read <= {*VllmOptions.__annotations__, *ours, "sync_load_budget_bytes"}, "the last is turned off"


def test_loads_within_the_step_are_turned_off() -> None:
    """Where such a load fails, vLLM keeps and stores what was computed from it: wrong answers, seen with both."""
    extra: dict[str, Any] = {"sync_load_budget_bytes": 1 << 20, "other": 1}
    told = vllm_internals.turn_off_loads_within_the_step(extra)
    assert told is not None
    assert "sync_load_budget_bytes is ignored" in told
    assert extra == {"sync_load_budget_bytes": 0, "other": 1}
    assert vllm_internals.turn_off_loads_within_the_step(extra) is None


# Orders of calls.


def test_failure_policy_is_read_after_the_connector_is_built() -> None:
    in_order("vllm.v1.core.sched.scheduler:Scheduler.__init__", "create_connector(", "kv_load_failure_policy")


@pytest.mark.parametrize(
    "path",
    [
        "vllm.v1.worker.kv_connector_model_runner_mixin:KVConnectorModelRunnerMixin._get_kv_connector_output",
        "vllm.v1.worker.gpu.kv_connector:ActiveKVConnector.post_forward",
    ],
)
def test_ranks_are_asked_for_completions_then_bad_blocks_then_our_report(path: str) -> None:
    """``get_transfer_results`` collects what the other two hand out: so in this order, and all in one step."""
    in_order(path, "get_transfer_results(", "get_block_ids_with_load_errors(", "build_connector_worker_meta(")


def test_default_transfer_results_come_from_get_finished() -> None:
    in_order(f"{CONNECTOR}.base:KVConnectorBase_V1.get_transfer_results", "self.get_finished(")


def test_scheduler_hears_of_failures_before_it_resumes_requests() -> None:
    in_order(
        "vllm.v1.core.sched.scheduler:Scheduler.update_from_output",
        "_handle_failed_recving(",
        "_handle_invalid_blocks(",
        "_update_from_kv_xfer_finished(",
    )
    in_order("vllm.v1.core.sched.scheduler:Scheduler._handle_failed_recving", "num_computed_tokens = 0")
    in_order(
        "vllm.v1.core.sched.scheduler:Scheduler._handle_invalid_blocks",
        "len(self.kv_cache_config.kv_cache_groups) > 1",
        "raise",
    )
    in_order(
        "vllm.v1.core.sched.scheduler:Scheduler._update_from_kv_xfer_finished",
        "update_connector_output(",
        "finished_recving",
    )


def test_ranks_reports_of_one_step_are_merged_and_failures_wait_for_the_last_rank() -> None:
    in_order(
        "vllm.distributed.kv_transfer.kv_connector.utils:KVOutputAggregator.aggregate",
        "aggregated_kv_connector_worker_meta.aggregate(",
        "invalid_block_ids |=",
        "_failed_recving_pending & finished_recving",
    )


def test_handshake_reaches_the_scheduler_half() -> None:
    text = source("vllm.v1.engine.core")
    assert "get_kv_connector_handshake_metadata()" in text
    assert "set_xfer_handshake_metadata_pp_aware(" in text
    assert "get_handshake_metadata()" in source("vllm.v1.worker.gpu_worker:Worker.get_kv_connector_handshake_metadata")


def test_multi_connector_passes_on_one_handshake_and_each_report() -> None:
    """So ours goes by the report there: ``NixlConnector`` raises ValueError for a handshake that is not its own."""
    multi = f"{CONNECTOR}.multi_connector:MultiConnector"
    in_order(
        f"{multi}.get_handshake_metadata", "for c in self._connectors", "if metadata is not None", "return metadata"
    )
    in_order(f"{multi}.set_xfer_handshake_metadata_pp_aware", "for c in self._connectors", "(metadata)")
    in_order(f"{multi}.build_connector_worker_meta", "c.build_connector_worker_meta()")
    in_order(
        f"{multi}.update_connector_output", "multi_connector_worker_meta.metadata[i]", "c.update_connector_output("
    )
    assert "isinstance(rank_metadata, NixlHandshakePayload)" in source(
        f"{CONNECTOR}.nixl.base_scheduler:NixlBaseConnectorScheduler.set_xfer_handshake_metadata"
    )
    assert "get_kv_transfer_group()" in source("vllm.v1.worker.gpu_worker:Worker.get_kv_connector_handshake_metadata")
    assert "kv_load_failure_policy" in source("vllm.config.kv_transfer:KVTransferConfig")


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


def test_geometries_of_one_step_are_merged() -> None:
    """Inside another connector every rank tells its own in its first report."""
    reports = [WorkerReport(geometries={rank: RankGeometry(rank, (4096,), "digest")}) for rank in range(3)]
    merged = reports[0].aggregate(reports[1]).aggregate(reports[2])
    assert isinstance(merged, WorkerReport)
    assert merged.geometries == {rank: RankGeometry(rank, (4096,), "digest") for rank in range(3)}
    assert list(reports[0].geometries) == [0]


def test_handshake_message_is_one() -> None:
    assert isinstance(RankGeometry(0, (4096,), "digest"), named(f"{CONNECTOR}.base:KVConnectorHandshakeMetadata"))


# What follows from the differences between versions.


def test_an_unknown_version_is_refused_before_anything_private_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A renamed import in vLLM must not be what the operator reads; our sentence must."""
    from nixl_offload.config import CONNECTOR_NAME
    from nixl_offload.vllm import plugin

    monkeypatch.setattr("vllm.__version__", "0.34.0")
    with pytest.raises(NotSupportedError, match=r"vLLM 0\.33, and this is vLLM 0\.34\.0"):
        getattr(plugin, CONNECTOR_NAME)


def test_every_rank_stores_where_the_kv_is_replicated() -> None:
    """MLA with TP > 1: vLLM lets rank 0 store for all; each of our ranks has a file of its own and loads from it."""
    jobs = named(f"{OFFLOADING}.common")
    parallel = SimpleNamespace(rank=1)
    spec = SimpleNamespace(
        replicated_layout=True, config=SimpleNamespace(canonical_layout=False, parallel=parallel, groups=(None,))
    )
    worker = NixlConnectorWorker(spec, None, manager_rig.kv_cache_config())  # type: ignore[arg-type]
    blocks = named("vllm.v1.kv_offload.base:GPULoadStoreSpec")([1], group_sizes=[1], block_indices=[0])
    worker.prepare_store_kv(jobs.OffloadingConnectorMetadata({}, {5: jobs.TransferJob("request", blocks, blocks)}))
    assert [job_id for job_id, *_ in worker._unsubmitted_store_jobs] == [5]


def test_sleeping_without_a_rank_does_nothing() -> None:
    """Of ``unregister_kv_caches`` and ``restore_kv_caches`` vLLM may call each twice."""
    assert NixlOffloadConnector.supports_sleep_mode(None)  # type: ignore[arg-type]
    connector = object.__new__(NixlOffloadConnector)
    connector.connector_worker = None
    connector.unregister_kv_caches()
    connector.restore_kv_caches()


def test_opening_again_changes_nothing() -> None:
    """Waking up repeats the handshake; opening twice would meet our own lock."""
    rig = manager_rig.Rig(manager_rig.config_of(manager_rig.memory_tier()))
    opened = rig.manager.catalog
    rig.manager.open(manager_rig.ranks())
    assert not rig.manager.serving.take_places(), "the ranks are not told again"
    assert rig.manager.catalog is opened
    rig.close()


def test_chunks_of_a_failed_load_are_offered_to_the_store_again() -> None:
    """The stock scheduler half passes over the chunks of a load when it stores, failed or not."""
    group = SimpleNamespace(offload_keys=[b"a", b"b", b"c", b"d"], next_stored_chunk_idx=4)
    scheduler = object.__new__(NixlOffloadScheduler)
    scheduler._jobs = {7: SimpleNamespace(req_id="request", is_store=False, keys={b"a", b"b", b"c"})}  # type: ignore[dict-item]
    scheduler._req_status = {"request": SimpleNamespace(group_states=[group])}  # type: ignore[dict-item]
    vllm_internals.offer_again(scheduler, [7, 8], {b"z"})
    assert group.next_stored_chunk_idx == 4
    vllm_internals.offer_again(scheduler, [7, 8], {b"b", b"c"})
    assert group.next_stored_chunk_idx == 1
