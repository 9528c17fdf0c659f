"""A whole vLLM engine in one process; only the model is played. The engine core, scheduler and KV cache configs are
vLLM's. Each rank has a real connector half and real KV tensors, and messages are pickled as between processes. Ranks
are pipeline stages, which vLLM's CPU build cannot run itself.

The model's KV is a function of the layer, the weights, and all tokens up to a position. Each rank writes it where a
forward pass would. When a request begins with tokens that it did not compute in this step, all of its blocks that
attention reaches are compared with the expected KV.

Threading: one test's thread, beside the threads of the connector's halves. Ownership: ``PlayedEngine`` owns the halves
until ``close``.
"""

from __future__ import annotations

import copy
import pickle
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch
from vllm import SamplingParams
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.engine import core as engine_core
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
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
LOCAL_TOKENS = 128
"""Tokens in a chunk of chunked local attention (``C``)."""
LARGE_TOKENS = 128
"""Tokens in a block of full attention with large blocks (``L``)."""
ODD_WINDOW_TOKENS = 72
"""Tokens in a sliding window that ends within blocks (``W``)."""
IMAGE_TOKENS = 24
KINDS = "CDEFLMSW"
"""Kinds of layers. ``C``: chunked local attention. ``D``, ``E``: a draft's, whose KV depends on the next token, too;
``D`` has a window. ``F``: full attention. ``L``: full attention with large blocks. ``M``: a recurrent state. ``S``: a
sliding window. ``W``: a window that ends within blocks.
"""
DRAFTS = "DE"
MAX_STEPS = 20_000
HEAD_SIZE = 32
PAGE_BYTES = 2 * BLOCK_TOKENS * HEAD_SIZE * 4
"""Bytes of a layer's page: keys and values in float32."""
START = 0x9E3779B97F4A7C15
"""The number before a prompt's first token."""
_NULL_BLOCK = 0
_TOKENS = range(-1, 1010)
"""All tokens that occur, contents of images included."""


def vllm_config_of(model: Path, stages: Sequence[str], connector: Mapping[str, Any], **engine_args: Any) -> VllmConfig:
    """Return the configuration of an engine with these stages. ``connector``: our config."""
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


# What KV a token has.


def numbers_of(tokens: Iterable[int], before: int = START) -> list[int]:
    """Return a number for each token that depends on all tokens up to it. ``before``: the previous token's number.

    A draft token may be -1: vLLM puts it where there is none.
    """
    numbers = []
    for token in tokens:
        digest = blake2b(before.to_bytes(8, "big") + token.to_bytes(4, "big", signed=True), digest_size=8)
        before = int.from_bytes(digest.digest(), "big")
        numbers.append(before)
    return numbers


def next_token(number: int) -> int:
    """Return the token that the played model generates after this one: equal prompts get equal answers."""
    return number % 500


def seen_tokens(tokens: Sequence[int], media: Iterable[MultiModalFeatureSpec]) -> list[int]:
    """Return the tokens, with the images' contents in place of theirs."""
    seen = list(tokens)
    for image in media:
        first = image.mm_position.offset
        seen[first : first + IMAGE_TOKENS] = [int(image.mm_hash or 0)] * (min(first + IMAGE_TOKENS, len(seen)) - first)
    return seen


def _words_of(layer: str, tokens: npt.NDArray[np.uint64], words: int) -> torch.Tensor:
    """Return the KV of tokens in a layer, shape (tokens, 1 head, words)."""
    spread = np.arange(1, words + 1, dtype=np.uint64) * np.uint64(START)
    return torch.from_numpy(((tokens[:, np.newaxis] * np.uint64(_factor(layer))) ^ spread).view(np.int64)).unsqueeze(1)


def _token_of(layer: str, words: torch.Tensor) -> int | None:
    """Return the number of the token whose KV in a layer these words are; None if there is none."""
    first = int(words.flatten()[0].item())
    number = (first ^ START) * pow(_factor(layer), -1, 1 << 64) % (1 << 64)
    [expected] = _words_of(layer, np.array([number], np.uint64), words.shape[-1])
    return number if torch.equal(words, expected) else None


def _factor(layer: str) -> int:
    return int.from_bytes(blake2b(layer.encode(), digest_size=8).digest(), "big") | 1


class Rows(NamedTuple):
    """The KV of tokens in a layer."""

    layer: str
    words: torch.Tensor
    """The whole layer: blocks, heads, tokens, words of a token."""
    positions: npt.NDArray[np.int64]
    blocks: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.uint64]
    known: npt.NDArray[np.uint64]
    """The last token that each one's KV depends on."""
    salt: np.uint64
    """Stands for the weights."""

    def write(self) -> None:
        self.words[self.blocks, :, self.slots] = self._right()

    def wrong(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield, for each token with wrong KV, its position among these tokens and that KV."""
        found = self.words[self.blocks, :, self.slots]
        for at in (found != self._right()).flatten(1).any(1).nonzero().flatten().tolist():
            yield at, found[at]

    def _right(self) -> torch.Tensor:
        return _words_of(self.layer, self.known ^ self.salt, self.words.shape[-1])


# The ranks.


class PlayedRank:
    """A pipeline stage. ``kinds``: a letter of ``KINDS`` for each layer."""

    memory_bytes: ClassVar[int] = 8 << 20
    """For the KV cache."""

    def __init__(self, vllm_config: VllmConfig, rank: int, kinds: str, first_layer: int) -> None:
        self.config = copy.copy(vllm_config)
        self.config.parallel_config = copy.copy(vllm_config.parallel_config)
        self.config.parallel_config.rank = rank
        self.rank = rank
        self.moved: Counter[str] = Counter()
        """Payload bytes by operation, as the connector's half reports them."""
        self.began_with: dict[str, int] = {}
        """By request: how many tokens it had before it computed any. Each of its layers was compared."""
        self.answers = 0
        """Requests that began with tokens which were not computed in this step."""
        self.wrong: list[str] = []
        self.stale_drafts: list[str] = []
        """Where a draft's layer had KV of another continuation."""
        self.sampled: dict[str, list[int]] = {}
        """By request of this step: the tokens that it has generated, if any."""
        self.weights = 0
        """The number of the model's weights."""
        self.kinds = {f"model.layers.{first_layer + at}.self_attn.attn": kind for at, kind in enumerate(kinds)}
        self._requests: dict[str, tuple[npt.NDArray[np.uint64], list[list[int]]]] = {}
        """By request: its tokens' numbers, and its blocks by group."""
        self._new: dict[str, NewRequestData] = {}
        self.connector: Any = None

    # What vLLM asks of a worker.

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        common: dict[str, Any] = {"num_kv_heads": 1, "dtype": torch.float32}
        small = {"block_size": BLOCK_TOKENS, "head_size": HEAD_SIZE, **common}
        large = {"block_size": LARGE_TOKENS, "head_size": HEAD_SIZE * BLOCK_TOKENS // LARGE_TOKENS, **common}
        specs = {
            "C": ChunkedLocalAttentionSpec(attention_chunk_size=LOCAL_TOKENS, **small),
            "D": SlidingWindowSpec(sliding_window=WINDOW_TOKENS, is_draft=True, **small),
            "E": FullAttentionSpec(is_draft=True, **small),
            "F": FullAttentionSpec(**small),
            "L": FullAttentionSpec(**large),
            "M": MambaSpec(
                block_size=BLOCK_TOKENS, shapes=((PAGE_BYTES // 4,),), dtypes=(torch.float32,), mamba_cache_mode="align"
            ),
            "S": SlidingWindowSpec(sliding_window=WINDOW_TOKENS, **small),
            "W": SlidingWindowSpec(sliding_window=ODD_WINDOW_TOKENS, **small),
        }
        return {name: specs[kind] for name, kind in self.kinds.items()}

    def determine_available_memory(self) -> int:
        return self.memory_bytes

    def initialize_from_config(self, kv_cache_configs: Sequence[KVCacheConfig]) -> None:
        """As vLLM's worker: first the connector, then the KV cache."""
        config = pickle.loads(pickle.dumps(kv_cache_configs[self.rank]))
        self.connector = KVConnectorFactory.create_connector(self.config, KVConnectorRole.WORKER, config)
        layout = self.config.cache_config.get_resolved_kv_cache_layout()
        self.caches = allocate_kv_cache(config, torch.device("cpu"), layout)
        self.groups = [group.layer_names for group in config.kv_cache_groups]
        self.model = torch.nn.Linear(2, 2)
        self.change_weights(0)
        # What our connector looks for in a rank's process.
        self.vllm_worker: Any = object.__new__(WorkerBase)
        self.vllm_worker.model_config = self.config.model_config
        self.vllm_worker.get_model = lambda: self.model
        self.vllm_worker.model_runner = self._runner()
        self.connector.register_kv_caches(self.caches)

    def get_kv_connector_handshake_metadata(self) -> dict[tuple[int, int], Any] | None:
        metadata = self.connector.get_handshake_metadata()
        return None if metadata is None else {(self.rank, 0): pickle.loads(pickle.dumps(metadata))}

    def sleep(self, level: int) -> None:
        """The KV cache's memory goes away."""
        self.connector.unregister_kv_caches()
        for layer in self.caches.values():
            layer.fill_(-1.0)

    def wake_up(self, tags: list[str] | None) -> None:
        self.connector.restore_kv_caches()

    def change_weights(self, weights: int) -> None:
        """Replace the model's weights in place."""
        self.weights = weights
        with torch.no_grad():
            self.model.weight.fill_(1.0 + weights)
            self.model.bias.zero_()

    def shutdown(self) -> None:
        if self.connector is not None:
            self.connector.shutdown()

    # A step.

    def execute(self, message: bytes) -> ModelRunnerOutput:
        """Do a step, as vLLM's model runner with its connector does."""
        scheduled: SchedulerOutput = pickle.loads(message)
        connector, metadata = self.connector, scheduled.kv_connector_metadata
        assert metadata is not None
        self._begin(scheduled)
        connector.bind_connector_metadata(metadata)
        self._forward(scheduled)
        connector.start_load_kv(None)
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

    def _runner(self) -> Any:
        """Return what plays vLLM's model runner for our connector; None: nothing."""
        return None

    def _begin(self, scheduled: SchedulerOutput) -> None:
        """Do what comes before the forward pass."""
        self.connector.handle_preemptions(scheduled.kv_connector_metadata)

    def _forward(self, scheduled: SchedulerOutput) -> None:
        """Write the KV of all requests, then look at that which they begin with: a request may begin with what another
        one computes in the same step.
        """
        self.sampled = {}
        began: dict[str, int] = {}
        for name in scheduled.finished_req_ids | (scheduled.preempted_req_ids or set()):
            self._requests.pop(name, None)
        going_on = {new.req_id for new in scheduled.scheduled_new_reqs if new.req_id in self._requests}
        for new in scheduled.scheduled_new_reqs:
            tokens = new.prefill_token_ids or new.prompt_token_ids
            assert tokens is not None
            self._new[new.req_id] = new
            self._start(new.req_id, tokens, new.block_ids)
            began[new.req_id] = new.num_computed_tokens
        cached = scheduled.scheduled_cached_reqs
        computed = began | dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for name, added in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if name in cached.resumed_req_ids:
                assert added is not None
                self._start(name, cached.all_token_ids[name], added)
                began[name] = computed[name]
            else:
                for blocks, more in zip(self._requests[name][1], added or (), strict=added is not None):
                    blocks.extend(more)
        for name, count in began.items():
            if name in going_on and count:  # a draft's last token knows the one that vLLM discards: it costs no token
                self._write(name, count - 1, 1, kinds=DRAFTS)
            self._compare(name, count, kinds="M")  # before the step overwrites it
        for name, count in scheduled.num_scheduled_tokens.items():
            self._compute(name, computed[name], count, scheduled.scheduled_spec_decode_tokens.get(name, []))
        for name, count in began.items():
            self._compare(name, count, kinds=KINDS.replace("M", ""))
            self.began_with[name] = count
            self.answers += count > 0

    def _start(self, name: str, tokens: Sequence[int], tables: Sequence[Sequence[int]]) -> None:
        new = self._new[name]
        numbers = numbers_of(seen_tokens(tokens, new.mm_features), self._start_of(new))
        self._requests[name] = np.array(numbers, dtype=np.uint64), [list(table) for table in tables]

    def _start_of(self, new: NewRequestData) -> int:
        """Return what stands before a request's tokens."""
        return START

    def _compute(self, name: str, computed: int, count: int, drafts: Sequence[int]) -> None:
        """Compute tokens, drafts last. What is behind the first wrong draft is written, too, and computed again."""
        numbers, tables = self._requests[name]
        if computed + count - len(drafts) < len(numbers):
            self._write(name, computed, count)
            return
        last = int(numbers[-1])
        tried = np.array(numbers_of(drafts, last), np.uint64)
        self._requests[name] = np.append(numbers, tried), tables
        self._write(name, computed, count)
        sampled: list[int] = []
        for draft in (*drafts, None):
            sampled.append(next_token(last))
            [last] = numbers_of(sampled[-1:], last)
            if draft != sampled[-1]:
                break
        self.sampled[name] = sampled
        self._requests[name] = np.append(numbers, np.array(numbers_of(sampled, int(numbers[-1])), np.uint64)), tables
        self._write(name, computed, count - len(drafts) + len(sampled) - 1)

    def _write(self, request: str, first: int, count: int, *, kinds: str = KINDS) -> None:
        for rows in self.rows(request, first, count, kinds=kinds):
            rows.write()

    def _compare(self, request: str, count: int, *, kinds: str = KINDS) -> None:
        for rows in self.rows(request, 0, count, is_reached=True, kinds=kinds):
            self.compare_rows(f"request {request}", rows)

    def compare_rows(self, what: str, rows: Rows) -> None:
        """Note each token that has other KV than belongs there."""
        for at, words in rows.wrong():
            kind, position = self.kinds[rows.layer], rows.positions[at]
            written = _token_of(rows.layer, words)
            found = f"{what}: layer {rows.layer} ({kind}) has {written} for token {position}"
            # A block's hash does not name the token behind it. A draft's KV of a block's last token depends on that
            # token, so it may be another continuation's, in vLLM's own cache as well. It costs a draft, never a token.
            ends_block = (position + 1) % self.block_tokens(rows.layer) == 0
            if kind in DRAFTS and ends_block and written is not None:
                others = {numbers_of([token], int(rows.tokens[at]))[0] for token in _TOKENS}
                if written ^ int(rows.salt) in others:
                    self.stale_drafts.append(found)
                    continue
            self.wrong.append(f"{found}, not {rows.known[at] ^ rows.salt}")

    def block_tokens(self, layer: str) -> int:
        return LARGE_TOKENS if self.kinds[layer] == "L" else BLOCK_TOKENS

    def rows(
        self,
        request: str,
        first: int,
        count: int,
        *,
        is_reached: bool = False,
        is_whole: bool = False,
        kinds: str = KINDS,
    ) -> Iterator[Rows]:
        """Yield the KV of a request's tokens in each layer of these kinds. ``is_reached``: only what the token behind
        them attends to. ``is_whole``: with the rest of its blocks.
        """
        numbers, tables = self._requests[request]
        of_layer = [(name, table) for names, table in zip(self.groups, tables, strict=True) for name in names]
        for name, table in of_layer:
            kind, tokens = self.kinds[name], self.block_tokens(name)
            if kind not in kinds:
                continue
            since, end = first, min(first + count, len(numbers))
            if is_reached and kind in "DSW":
                window = ODD_WINDOW_TOKENS if kind == "W" else WINDOW_TOKENS
                since = max(0, count - window + 1)
            elif is_reached and kind == "C":
                since = count // LOCAL_TOKENS * LOCAL_TOKENS
            elif kind == "M":
                since = max(first, end - 1)
            positions = np.arange(since // tokens * tokens if is_whole else since, end)
            blocks = np.array(table, dtype=np.int64)[positions // tokens]
            assert (blocks != _NULL_BLOCK).all(), f"request {request} lacks a block"
            yield self.rows_at(name, numbers, positions, blocks, self.weights)

    def rows_at(
        self,
        name: str,
        numbers: npt.NDArray[np.uint64],
        positions: npt.NDArray[np.int64],
        blocks: npt.NDArray[np.int64],
        weights: int,
    ) -> Rows:
        """Return the KV of tokens that have these numbers, at these places of a layer. A state is one token."""
        kind, words = self.kinds[name], self.caches[name].view(torch.int64)
        if kind == "M":
            words = words.view(len(words), 1, 1, -1)
        slots = positions * 0 if kind == "M" else positions % self.block_tokens(name)
        known = np.minimum(positions + (kind in DRAFTS), len(numbers) - 1)
        salt = np.uint64(weights * 0x5851F42D4C957F2D % (1 << 64))
        return Rows(name, words, positions, blocks, slots, numbers[positions], numbers[known], salt)


class PlayedExecutor(Executor):
    """Steps all ranks one after the other, and answers with what the last one has generated."""

    supports_pp = True
    rank_type: ClassVar[type[PlayedRank]]
    stages: ClassVar[Sequence[str]]

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
        args = (*args, *(kwargs or {}).values())
        if method == "get_supported_kv_cache_layouts":
            return [["LBHNC"]] * len(self.ranks)
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
        names, sampled = list(scheduler_output.num_scheduled_tokens), self.ranks[-1].sampled
        self._output = ModelRunnerOutput(
            names,
            {name: at for at, name in enumerate(names)},
            sampled_token_ids=[sampled.get(name, []) for name in names],
            kv_connector_output=combined.kv_connector_output,
        )
        output = None if scheduler_output.total_num_scheduled_tokens else self._output
        return _done(output) if non_block else output

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        return _done(self._output) if non_block else self._output

    def check_health(self) -> None:
        """Nothing can be wrong with it."""


_MEETING: ContextVar[tuple[int, list[Any], threading.Barrier, threading.Lock]] = ContextVar("meeting")
"""Which stage a thread plays, where it meets the others, and what it holds while it runs."""


def _side_by_side(calls: Sequence[Callable[[], None]]) -> list[None]:
    """Make calls that wait for each other, as ranks do. One runs at a time: some of vLLM's state is the process's."""
    given, barrier, turn = [None] * len(calls), threading.Barrier(len(calls), timeout=60.0), threading.Lock()

    def run(rank: int) -> None:
        _MEETING.set((rank, given, barrier, turn))
        with turn:
            calls[rank]()

    with ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(run, range(len(calls))))


def _of_all_ranks(own: Any) -> list[Any]:
    """As vLLM's groups of ranks would pass it on."""
    rank, given, barrier, turn = _MEETING.get()
    given[rank] = pickle.dumps(own)
    turn.release()
    try:
        barrier.wait()
    finally:
        turn.acquire()
    return [pickle.loads(each) for each in given]


def _done(output: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(output)
    return future


class PlayedEngine:
    """vLLM's engine core over ``PlayedRank``s. ``is_open``: its tiers are, as a server's before its first request."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        stages: Sequence[str],
        *,
        rank_type: type[PlayedRank] = PlayedRank,
        is_open: bool = True,
    ) -> None:
        executor = type("StagedExecutor", (PlayedExecutor,), {"stages": stages, "rank_type": rank_type})
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

    def request(
        self, prompt: Sequence[int], name: str = "", tokens: int = 1, extra: dict[str, Any] | None = None, **fields: Any
    ) -> Request:
        """Make a request. ``extra``: of its sampling parameters."""
        return Request(
            name or f"request-{next(self._numbers)}",
            list(prompt),
            SamplingParams(max_tokens=tokens, ignore_eos=True, extra_args=extra),
            None,
            block_hasher=self.core.request_block_hasher,
            **fields,
        )

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.core.step_fn()
            self.core.post_step(True)

    def settle(self) -> None:
        """Step until nothing is left to do, background work included."""
        for _ in range(MAX_STEPS):
            if not self.core.scheduler.has_requests() and not self.core.batch_queue:
                return
            self.step()
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
