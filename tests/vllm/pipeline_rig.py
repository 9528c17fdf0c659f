"""A whole vLLM engine with pipeline stages in one process, of which only the model is played: vLLM's own engine core,
scheduler and KV cache configs, one real connector half for each rank, real KV tensors, and messages that are pickled as
between processes. The CPU build cannot run pipeline stages itself.

The model's KV is a function of the layer and of all tokens up to a position. Each stage writes it where a forward pass
would, and, when a request begins with tokens that were not computed, compares what has been loaded for them.

Threading: one test's thread, beside those of the connector's halves. Ownership: ``PlayedEngine`` owns both, until
``close``.
"""

from __future__ import annotations

import copy
import pickle
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pytest
import torch
from vllm import SamplingParams
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import core as engine_core
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.worker.utils import allocate_kv_cache
from vllm.v1.worker.worker_base import WorkerBase

from nixl_offload.vllm import rank_shards
from nixl_offload.vllm.messages import WorkerReport

BLOCK_TOKENS = 32
CHUNK_TOKENS = 64
WINDOW_TOKENS = 96
MAX_STEPS = 20_000
HEAD_SIZE = 32
PAGE_BYTES = 2 * BLOCK_TOKENS * HEAD_SIZE * 4
"""Of a layer, keys and values in float32."""
_MEMORY_BYTES = 8 << 20
"""For the KV cache of each rank."""
_NULL_BLOCK = 0
_SPREAD = 0x9E3779B97F4A7C15


def vllm_config_of(model: Path, stages: Sequence[str], connector: Mapping[str, Any], **engine_args: Any) -> VllmConfig:
    """Return the configuration of an engine with so many stages. ``connector``: our config."""
    arguments = {
        "model": str(model),
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "async_scheduling": False,
        "block_size": BLOCK_TOKENS,
        "max_model_len": 1024,
        "max_num_batched_tokens": 256,
        "max_num_seqs": 4,
        "pipeline_parallel_size": len(stages),
        "hf_overrides": {"num_hidden_layers": sum(map(len, stages))},
        "kv_transfer_config": KVTransferConfig(
            kv_connector="NixlOffloadConnector",
            kv_role="kv_both",
            kv_connector_extra_config={"config": {"chunk_tokens": CHUNK_TOKENS, "slow_hits": "take", **connector}},
        ),
    }
    return EngineArgs(**(arguments | engine_args)).create_engine_config()


def _worker_of(config: Any) -> WorkerBase:
    """Make what our connector looks for in a rank's process: vLLM's worker, with a model that stays as it is."""
    worker = object.__new__(WorkerBase)
    worker.model_config = config.model_config
    model = torch.nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias.zero_()
    worker.get_model = lambda: model  # type: ignore[method-assign]
    return worker


class PlayedRank:
    """A pipeline stage. ``kinds``: ``F`` for each layer of full attention, ``S`` for each with a sliding window."""

    def __init__(self, vllm_config: VllmConfig, rank: int, kinds: str, first_layer: int) -> None:
        self.config = copy.copy(vllm_config)
        self.config.parallel_config = copy.copy(vllm_config.parallel_config)
        self.config.parallel_config.rank = rank
        self.rank = rank
        self.moved: Counter[str] = Counter()
        """Payload bytes by operation, as the connector's half has told."""
        self.began_with: dict[str, int] = {}
        """By request: the tokens that it had before it computed any. Each of its layers was compared."""
        self.wrong: list[str] = []
        self._kinds = {f"model.layers.{first_layer + at}.self_attn.attn": kind for at, kind in enumerate(kinds)}
        self._requests: dict[str, tuple[npt.NDArray[np.uint64], list[list[int]]]] = {}
        """By request: what stands for its tokens, and its blocks by group."""
        self._connector: KVConnectorBase_V1 | None = None

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        common: dict[str, Any] = {
            "block_size": BLOCK_TOKENS,
            "num_kv_heads": 1,
            "head_size": HEAD_SIZE,
            "dtype": torch.float32,
        }
        full, window = FullAttentionSpec(**common), SlidingWindowSpec(**common, sliding_window=WINDOW_TOKENS)
        return {name: full if kind == "F" else window for name, kind in self._kinds.items()}

    def determine_available_memory(self) -> int:
        return _MEMORY_BYTES

    def initialize_from_config(self, kv_cache_configs: Sequence[KVCacheConfig]) -> None:
        """As vLLM's worker: first the connector, then the KV cache."""
        config = pickle.loads(pickle.dumps(kv_cache_configs[self.rank]))
        self._connector = KVConnectorFactory.create_connector(self.config, KVConnectorRole.WORKER, config)
        layout = self.config.cache_config.get_resolved_kv_cache_layout()
        self._caches = allocate_kv_cache(config, torch.device("cpu"), layout)
        self.groups = [group.layer_names for group in config.kv_cache_groups]
        self._vllm_worker = _worker_of(self.config)
        self._vllm_worker.model_runner = self._runner()
        self._connector.register_kv_caches(self._caches)

    @property
    def worker(self) -> Any:
        """Our worker."""
        return self._connector.connector_worker.rank_worker  # type: ignore[union-attr]

    def get_kv_connector_handshake_metadata(self) -> dict[tuple[int, int], Any] | None:
        assert self._connector is not None
        told = self._connector.get_handshake_metadata()
        return None if told is None else {(self.rank, 0): pickle.loads(pickle.dumps(told))}

    def execute(self, message: bytes) -> ModelRunnerOutput:
        """Do a step, as vLLM's model runner with its connector does."""
        scheduled: SchedulerOutput = pickle.loads(message)
        connector, metadata = self._connector, scheduled.kv_connector_metadata
        assert connector is not None
        assert metadata is not None
        self._begin(scheduled)
        connector.bind_connector_metadata(metadata)
        self._forward(scheduled)
        connector.start_load_kv(None)  # type: ignore[arg-type]
        connector.wait_for_save()
        results = connector.get_transfer_results(scheduled.finished_req_ids)
        report = connector.build_connector_worker_meta()
        for part in getattr(report, "metadata", (report,)):  # of each connector, if there are several
            if isinstance(part, WorkerReport) and part.work is not None:
                for act, size_bytes in part.work.payload_bytes.items():
                    self.moved[act.operation] += size_bytes
        output = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=connector.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=report,
        )
        connector.clear_connector_metadata()
        return ModelRunnerOutput([], {}, kv_connector_output=pickle.loads(pickle.dumps(output)))

    def shutdown(self) -> None:
        if self._connector is not None:
            self._connector.shutdown()

    def _runner(self) -> Any:
        """Return what plays vLLM's model runner for our connector; None: nothing."""
        return None

    def _begin(self, scheduled: SchedulerOutput) -> None:
        """Do what comes before the forward pass."""
        assert self._connector is not None
        assert scheduled.kv_connector_metadata is not None
        self._connector.handle_preemptions(scheduled.kv_connector_metadata)

    def _forward(self, scheduled: SchedulerOutput) -> None:
        for name in scheduled.finished_req_ids:
            self._requests.pop(name, None)
        for new in scheduled.scheduled_new_reqs:
            assert new.prompt_token_ids is not None
            self._requests[new.req_id] = tokens_of(new.prompt_token_ids), [list(ids) for ids in new.block_ids]
            self._compare(new.req_id, new.num_computed_tokens)
            self._write(new.req_id, new.num_computed_tokens, scheduled.num_scheduled_tokens[new.req_id])
        cached = scheduled.scheduled_cached_reqs
        for name, added, computed in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
            assert name not in cached.resumed_req_ids, "nothing is preempted here"
            for blocks, more in zip(self._requests[name][1], added or (), strict=added is not None):
                blocks.extend(more)
            self._write(name, computed, scheduled.num_scheduled_tokens[name])

    def _write(self, request: str, first: int, count: int) -> None:
        for layer, blocks, slots, values in self._rows(request, first, count):
            layer[blocks, :, slots] = values

    def _compare(self, request: str, count: int) -> None:
        for number, (layer, blocks, slots, values) in enumerate(self._rows(request, 0, count)):
            if not torch.equal(layer[blocks, :, slots], values):
                self.wrong.append(f"request {request}, rank {self.rank}, layer {number}")
        self.began_with[request] = count

    def _rows(self, request: str, first: int, count: int) -> Iterator[tuple[torch.Tensor, ...]]:
        """For each layer: its cache as words, blocks and slots of the tokens, and the words that belong there. Tokens
        that a window has left behind have no block.
        """
        tokens, tables = self._requests[request]
        for names, table in zip(self.groups, tables, strict=True):
            positions = np.arange(first, min(first + count, len(tokens)))
            blocks = np.array(table, dtype=np.int64)[positions // BLOCK_TOKENS]
            kept = blocks != _NULL_BLOCK
            positions, blocks = positions[kept], blocks[kept]
            for name in names:
                layer = self._caches[name].view(torch.int64)
                slots = torch.from_numpy(positions % BLOCK_TOKENS)
                yield layer, torch.from_numpy(blocks), slots, words_of(name, tokens[positions], layer.shape[-1])


def tokens_of(prompt: Sequence[int]) -> npt.NDArray[np.uint64]:
    """Return a number for each position that depends on all tokens up to it."""
    digest, numbers = blake2b(digest_size=8), []
    for token in prompt:
        digest.update(token.to_bytes(4, "big"))
        numbers.append(int.from_bytes(digest.digest(), "big"))
    return np.array(numbers, dtype=np.uint64)


def words_of(layer: str, tokens: npt.NDArray[np.uint64], words: int) -> torch.Tensor:
    """Return the KV of tokens in a layer, shape (tokens, 1 head, words)."""
    spread = np.arange(1, words + 1, dtype=np.uint64) * np.uint64(_SPREAD)
    return torch.from_numpy(((tokens[:, np.newaxis] * np.uint64(_factor(layer))) ^ spread).view(np.int64)).unsqueeze(1)


def token_of(layer: str, words: torch.Tensor) -> int | None:
    """Return the number of the token whose KV in a layer these words are; None: of none."""
    first = int(words.flatten()[0].item())
    number = (first ^ _SPREAD) * pow(_factor(layer), -1, 1 << 64) % (1 << 64)
    [expected] = words_of(layer, np.array([number], np.uint64), words.shape[-1])
    return number if torch.equal(words, expected) else None


def _factor(layer: str) -> int:
    return int.from_bytes(blake2b(layer.encode(), digest_size=8).digest(), "big") | 1


class PlayedExecutor(Executor):
    """Steps all ranks one after the other, and answers with one token for each prompt that is through."""

    supports_pp = True
    rank_type: ClassVar[type[PlayedRank]] = PlayedRank
    stages: ClassVar[Sequence[str]]
    layout: ClassVar[str]

    def _init_executor(self) -> None:
        firsts = [sum(map(len, self.stages[:rank])) for rank in range(len(self.stages))]
        self.ranks = [
            self.rank_type(self.vllm_config, rank, kinds, first)
            for rank, (kinds, first) in enumerate(zip(self.stages, firsts, strict=True))
        ]
        self._output: ModelRunnerOutput | None = None

    def collective_rpc(
        self, method: Any, timeout: Any = None, args: tuple[Any, ...] = (), kwargs: Any = None, non_block: bool = False
    ) -> Any:
        if method == "get_supported_kv_cache_layouts":
            return [[self.layout]] * len(self.ranks)
        if method == "initialize_from_config":
            return _side_by_side([partial(rank.initialize_from_config, *args) for rank in self.ranks])
        return [getattr(rank, method)(*args) if hasattr(rank, method) else None for rank in self.ranks]

    def compile_or_warm_up_model(self) -> None:
        """There is no model."""

    def set_kv_cache_layout(self, layout_name: str, cp_kv_cache_interleave_size: int) -> None:
        """The ranks' configs share the cache config with the engine core's."""

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        message = pickle.dumps(scheduler_output)
        outputs: list[ModelRunnerOutput | None] = [rank.execute(message) for rank in self.ranks]
        assert self.kv_output_aggregator is not None
        combined = self.kv_output_aggregator.aggregate(outputs, output_rank=len(outputs) - 1)
        assert combined is not None
        self._output = self._sampled(scheduler_output, combined)
        output = None if scheduler_output.total_num_scheduled_tokens else self._output
        return _done(output) if non_block else output

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        return _done(self._output) if non_block else self._output

    def check_health(self) -> None:
        """Nothing can be wrong with it."""

    def _sampled(self, scheduled: SchedulerOutput, combined: ModelRunnerOutput) -> ModelRunnerOutput:
        cached = scheduled.scheduled_cached_reqs
        computed = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        names = list(scheduled.num_scheduled_tokens)
        prompts = {name: len(self.ranks[0]._requests[name][0]) for name in names}
        through = [computed[name] + scheduled.num_scheduled_tokens[name] >= prompts[name] for name in names]
        return ModelRunnerOutput(
            names,
            {name: at for at, name in enumerate(names)},
            sampled_token_ids=[[1] if done else [] for done in through],
            kv_connector_output=combined.kv_connector_output,
        )


_MEETING: ContextVar[tuple[int, list[Any], threading.Barrier, threading.Lock]] = ContextVar("meeting")
"""Which stage a thread plays, where it meets the others, and what it holds while it runs."""


def _side_by_side(calls: Sequence[Callable[[], None]]) -> list[None]:
    """Make calls that wait for each other, as ranks do. One runs at a time: some of vLLM's state is the process's."""
    told, barrier, turn = [None] * len(calls), threading.Barrier(len(calls), timeout=60.0), threading.Lock()

    def run(rank: int) -> None:
        _MEETING.set((rank, told, barrier, turn))
        with turn:
            calls[rank]()

    with ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(run, range(len(calls))))


def _of_all_ranks(own: Any) -> list[Any]:
    """As vLLM's groups of ranks would pass it on."""
    rank, told, barrier, turn = _MEETING.get()
    told[rank] = pickle.dumps(own)
    turn.release()
    try:
        barrier.wait()
    finally:
        turn.acquire()
    return [pickle.loads(each) for each in told]


def _done(output: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(output)
    return future


class PlayedEngine:
    """vLLM's engine core over ``PlayedRank``s. ``is_open``: its tiers are, as a server's before its first request."""

    executor_type: ClassVar[type[PlayedExecutor]] = PlayedExecutor

    def __init__(
        self, vllm_config: VllmConfig, stages: Sequence[str], layout: str = "LBHNC", *, is_open: bool = True
    ) -> None:
        executor = type("StagedExecutor", (self.executor_type,), {"stages": stages, "layout": layout})
        self.core = engine_core.EngineCore(vllm_config, executor, log_stats=False)
        assert isinstance(self.core.model_executor, PlayedExecutor)
        self.ranks = self.core.model_executor.ranks
        self._numbers = iter(range(1 << 30))
        if is_open:
            self.settle()

    @property
    def manager(self) -> Any:
        """The scheduler's half of ours."""
        connector = self.core.scheduler.get_kv_connector()
        assert connector is not None
        return connector.connector_scheduler.offload_manager  # type: ignore[attr-defined]

    def generate(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        """Compute one token for each prompt, and return how many tokens of each need not be computed."""
        requests = [self.request(prompt) for prompt in prompts]
        for request in requests:
            self.core.add_request(request)
        self.settle()
        assert all(request.is_finished() for request in requests)
        return [self.ranks[0].began_with[request.request_id] for request in requests]

    def request(self, prompt: Sequence[int]) -> Request:
        """Make a request that computes one token."""
        return Request(
            f"request-{next(self._numbers)}",
            list(prompt),
            SamplingParams(max_tokens=1, ignore_eos=True),
            None,
            block_hasher=self.core.request_block_hasher,
        )

    def settle(self) -> None:
        """Step until nothing is left to do, background work included."""
        for _ in range(MAX_STEPS):
            if not self.core.scheduler.has_requests() and not self.core.batch_queue:
                return
            self.core.step_fn()
        raise AssertionError("the engine does not come to rest")

    def reset_prefix_cache(self) -> None:
        """Forget the KV cache, not what is stored."""
        assert self.core.reset_prefix_cache()

    def moved(self, operation: str) -> list[int]:
        """Payload bytes by rank of ``store``, ``load``, ``write_through`` or ``fetch``, since the start."""
        return [rank.moved[operation] for rank in self.ranks]

    def wrong(self) -> list[str]:
        """What was loaded and is not what was computed."""
        return [words for rank in self.ranks for words in rank.wrong]

    def close(self) -> None:
        self.core.shutdown()


@contextmanager
def played() -> Iterator[None]:
    """Make ``PlayedEngine`` possible; its engine core leaves heap and environment of the process as they are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_core, "freeze_gc_heap", lambda: None)
        patch.setattr(engine_core, "enable_envs_cache", lambda: None)
        patch.setattr(engine_core, "cleanup_dist_env_and_memory", lambda: None)  # collects garbage, for half a second
        patch.setattr(engine_core, "get_kv_cache_configs", _configs_with_empty_ranks)
        patch.setattr(rank_shards, "of_all_ranks", _of_all_ranks)
        yield


def _configs_with_empty_ranks(
    vllm_config: VllmConfig, specs: list[dict[str, KVCacheSpec]], memory: list[int], groups: list[KVCacheGroupSpec]
) -> list[KVCacheConfig]:
    """Return vLLM's configs, and for a rank without any layer what vLLM's projection of the groups would give: vLLM
    itself divides by its block size, 0.
    """
    filled = [rank for rank, spec in enumerate(specs) if spec]
    made = _VLLMS_CONFIGS(vllm_config, [specs[rank] for rank in filled], [memory[rank] for rank in filled], groups)
    of_rank = dict(zip(filled, made, strict=True))
    without_layers = [KVCacheGroupSpec([], group.kv_cache_spec) for group in made[0].kv_cache_groups]
    empty = KVCacheConfig(num_blocks=made[0].num_blocks, kv_cache_tensors=[], kv_cache_groups=without_layers)
    return [of_rank.get(rank, empty) for rank in range(len(specs))]


_VLLMS_CONFIGS = engine_core.get_kv_cache_configs
