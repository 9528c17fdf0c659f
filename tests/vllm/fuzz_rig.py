"""``PlayedEngine`` for whatever users do to a scheduler: requests that generate, end early, are preempted or go on as
sessions, ids that come again, resets of each kind, sleep, other weights; with images, adapters, drafts, a recurrent
state, or another connector beside ours. Stores read their blocks as late as the contract allows.

Each time a request begins with tokens that it did not compute in this step, all of its blocks that attention reaches
are compared with what belongs there. So are those of each chunk that is stored.

Threading: one test's thread, beside those of the connector's halves.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import RequestOffloadState
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request

from nixl_offload.engine import Chunk
from nixl_offload.vllm import idling
from nixl_offload.vllm.connector import NixlOffloadConnector
from nixl_offload.vllm.notes import notes_of
from nixl_offload.vllm.tensor_digests import adapter_digest
from nixl_offload.vllm.vllm_scheduler import AdaptedRequestState, MendedScheduler
from tests.vllm.pipeline_rig import (
    _NULL_BLOCK,
    BLOCK_TOKENS,
    HEAD_SIZE,
    MAX_STEPS,
    PAGE_BYTES,
    WINDOW_TOKENS,
    PlayedEngine,
    PlayedExecutor,
    PlayedRank,
    played,
    token_of,
    words_of,
)
from tests.vllm.slow_connector import SlowConnector

LOCAL_TOKENS = 128
"""Of a chunk of chunked local attention (``C``)."""
LARGE_TOKENS = 128
"""Of a block of full attention with large blocks (``L``)."""
ODD_WINDOW_TOKENS = 72
"""Of a sliding window that ends within blocks (``W``)."""
MAX_TOKENS = 512
IMAGE_TOKENS = 24
KINDS = "CDEFLMSW"
DRAFTS = "DE"
_START = 0x9E3779B97F4A7C15
_TOKENS = range(-1, 1010)
"""All that occur, with the contents of images."""

BELONGS: dict[bytes, list[int]] = {}
"""By key: the numbers of its chunk's tokens. None of these: nothing may be stored under it."""
ON_DISK: dict[str, int] = {}
"""By path: the content of a LoRA adapter."""
_CONTENTS: dict[str, int] = {}
"""By the digest that a rank takes of a LoRA adapter: its content."""


def numbers_of(tokens: Iterable[int], before: int = _START) -> list[int]:
    """Return a number for each token that depends on all tokens up to it. ``before``: that of the token before.

    A draft may be -1, which vLLM puts where it has none.
    """
    numbers = []
    for token in tokens:
        digest = blake2b(before.to_bytes(8, "big") + token.to_bytes(4, "big", signed=True), digest_size=8)
        before = int.from_bytes(digest.digest(), "big")
        numbers.append(before)
    return numbers


def next_token(number: int) -> int:
    """Return what the played model generates behind a token: prompts alike are answered alike."""
    return number % 500


def seen_tokens(tokens: Sequence[int], media: Iterable[MultiModalFeatureSpec]) -> list[int]:
    """Return tokens, and in the place of images what these show."""
    seen = list(tokens)
    for image in media:
        first = image.mm_position.offset
        seen[first : first + IMAGE_TOKENS] = [int(image.mm_hash or 0)] * (min(first + IMAGE_TOKENS, len(seen)) - first)
    return seen


class Rows(NamedTuple):
    """The KV of tokens in a layer."""

    layer: str
    words: torch.Tensor
    """Of the whole layer: blocks, heads, tokens, words of a token."""
    positions: npt.NDArray[np.int64]
    blocks: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.uint64]
    known: npt.NDArray[np.uint64]
    """The last token that each one's KV depends on."""
    salt: np.uint64
    """Of the weights."""

    def write(self) -> None:
        self.words[self.blocks, :, self.slots] = self._right()

    def wrong(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the place among these tokens of each that has other KV, and that KV."""
        found = self.words[self.blocks, :, self.slots]
        for at in (found != self._right()).flatten(1).any(1).nonzero().flatten().tolist():
            yield at, found[at]

    def _right(self) -> torch.Tensor:
        return words_of(self.layer, self.known ^ self.salt, self.words.shape[-1])


class LateStores:
    """Keeps stores from their engine until their source blocks are about to be reused, or until they are let go.

    ``compare``: looks at what they read.
    """

    def __init__(self, rank: FuzzedRank) -> None:
        engine = rank.worker._engine
        self._submit, self._wait, self._rank = engine.submit_store, engine.wait, rank
        self.held: dict[int, tuple[Sequence[Chunk], int, Callable[[], None]]] = {}
        """By job: what it stores, which weights the model had in its step, and how it goes on."""
        self.holds = True
        engine.submit_store, engine.wait = self._store, self._wait_for

    def _store(self, job_id: int, chunks: Sequence[Chunk], *others: Any, **options: Any) -> None:
        submit = partial(self._submit, job_id, chunks, *others, **options)
        self.held[job_id] = chunks, self._rank.weights_of_job.pop(job_id), submit
        if not self.holds:
            self.let_go([job_id])

    def _wait_for(self, job_ids: Iterable[int], *arguments: Any) -> None:
        job_ids = set(job_ids)
        self.let_go(job_ids)
        self._wait(job_ids, *arguments)

    @contextmanager
    def all_let_go(self) -> Iterator[None]:
        """Keep none meanwhile."""
        holds, self.holds = self.holds, False
        self.let_go(self.held)
        yield
        self.holds = holds

    def let_go(self, job_ids: Iterable[int]) -> None:
        for job_id in list(job_ids):
            if job_id in self.held:
                chunks, weights, submit = self.held.pop(job_id)
                self._rank.compare_stored(chunks, weights)
                submit()


class FuzzedRank(PlayedRank):
    """The only rank. Zeroes blocks that vLLM allocates where the model runner of its order does.

    Kinds of layers beside the other's: ``C`` chunked local attention, ``D`` and ``E`` a draft's, which knows the token
    behind, ``D`` with a window, ``L`` large blocks, ``M`` a recurrent state, ``W`` a window that ends within blocks.
    """

    second_runner: ClassVar[bool]
    memory_bytes: ClassVar[int]

    def __init__(self, vllm_config: VllmConfig, rank: int, kinds: str, first_layer: int) -> None:
        super().__init__(vllm_config, rank, kinds, first_layer)
        self.sampled: dict[str, list[int]] = {}
        """By request of this step: the tokens that it has generated, if any."""
        self.answers = 0
        """Requests that began with tokens which were not computed in this step."""
        self.stored = 0
        """Chunks that were compared when they were stored."""
        self.weights = 0
        """Which ones the model has."""
        self.weights_of_job: dict[int, int] = {}
        """Which ones it had in the step of a store."""
        self._new: dict[str, NewRequestData] = {}
        self._adapters: dict[str, int] = {}
        """By path: the content as it was loaded."""
        self.stale_drafts: list[str] = []
        """What a draft's layer had of another continuation."""
        SlowConnector.fill = self._fill

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        common: dict[str, Any] = {"num_kv_heads": 1, "dtype": torch.float32}
        small = {"block_size": BLOCK_TOKENS, "head_size": HEAD_SIZE, **common}
        large = {"block_size": LARGE_TOKENS, "head_size": HEAD_SIZE * BLOCK_TOKENS // LARGE_TOKENS, **common}
        made = {
            "C": ChunkedLocalAttentionSpec(attention_chunk_size=LOCAL_TOKENS, **small),
            "D": SlidingWindowSpec(sliding_window=WINDOW_TOKENS, is_draft=True, **small),
            "E": FullAttentionSpec(is_draft=True, **small),
            "L": FullAttentionSpec(**large),
            "M": MambaSpec(
                block_size=BLOCK_TOKENS,
                shapes=((PAGE_BYTES // 4,),),
                dtypes=(torch.float32,),
                mamba_cache_mode="align",
            ),
            "W": SlidingWindowSpec(sliding_window=ODD_WINDOW_TOKENS, **small),
        }
        specs = super().get_kv_cache_spec()
        return {name: made.get(kind, specs[name]) for name, kind in self._kinds.items()}

    def determine_available_memory(self) -> int:
        return self.memory_bytes

    def initialize_from_config(self, kv_cache_configs: Sequence[KVCacheConfig]) -> None:
        super().initialize_from_config(kv_cache_configs)
        kv_transfer_state._KV_CONNECTOR_AGENT = self._connector
        self.stores = LateStores(self)

    @property
    def worker(self) -> Any:
        return ours(self._connector).connector_worker.rank_worker

    def shutdown(self) -> None:
        self.stores.let_go(self.stores.held)
        super().shutdown()
        kv_transfer_state._KV_CONNECTOR_AGENT = None

    def sleep(self, level: int) -> None:
        """As vLLM's worker: the KV cache's memory goes away."""
        assert self._connector is not None
        with self.stores.all_let_go():
            self._connector.unregister_kv_caches()
        for layer in self._caches.values():
            layer.fill_(-1.0)

    def wake_up(self, tags: list[str] | None) -> None:
        assert self._connector is not None
        self._connector.restore_kv_caches()

    def change_weights(self, weights: int) -> None:
        self.weights = weights
        with torch.no_grad():
            self._vllm_worker.get_model().weight.fill_(1.0 + weights)  # type: ignore[operator, union-attr]

    def load_adapters_anew(self) -> None:
        """As with ``load_inplace``."""
        for path in list(self._adapters):
            self._load_adapter(LoRARequest(path, 1, path))

    def _runner(self) -> Any:
        manager = SimpleNamespace(_load_adapter=self._read_adapter)
        runner = SimpleNamespace(lora_manager=manager)
        if self.second_runner:
            runner.update_requests = self._change_blocks
        return runner

    def _load_adapter(self, request: LoRARequest) -> int:
        runner: Any = self._vllm_worker.model_runner
        content: int = runner.lora_manager._load_adapter(request).content
        self._adapters[request.lora_path] = content
        return content

    def _read_adapter(self, request: LoRARequest) -> Any:
        adapter = SimpleNamespace(id=request.lora_int_id, content=ON_DISK[request.lora_path])
        _CONTENTS[adapter_digest(adapter)] = adapter.content
        return adapter

    def _begin(self, scheduled: SchedulerOutput) -> None:
        metadata: Any = scheduled.kv_connector_metadata
        for part in getattr(metadata, "metadata", (metadata,)):
            self.weights_of_job.update(dict.fromkeys(getattr(part, "store_jobs", ()), self.weights))
        if self.second_runner:
            runner: Any = self._vllm_worker.model_runner
            runner.update_requests(scheduled)
            super()._begin(scheduled)
        else:
            super()._begin(scheduled)
            self._change_blocks(scheduled)

    def _change_blocks(self, scheduled: SchedulerOutput) -> None:
        if scheduled.new_block_ids_to_zero:
            for layer in self._caches.values():
                layer[scheduled.new_block_ids_to_zero] = 0
        for copy in scheduled.kv_cache_block_copies or ():
            for layer in self._caches.values():
                layer[copy.dst_block_id] = layer[copy.src_block_id]

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
        new, start = self._new[name], _START
        if (adapter := new.lora_request) is not None:
            content = self._adapters.get(adapter.lora_path)
            start ^= 1 + (self._load_adapter(adapter) if content is None else content)
        numbers = numbers_of(seen_tokens(tokens, new.mm_features), start)
        self._requests[name] = np.array(numbers, dtype=np.uint64), [list(table) for table in tables]

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

    def drafts(self) -> DraftTokenIds:
        """Return a draft for each request that has generated something; every third is wrong."""
        lasts = {name: int(self._requests[name][0][-1]) for name in self.sampled}
        return DraftTokenIds(list(lasts), [[next_token(last) + (not last % 3)] for last in lasts.values()])

    def _fill(self, tokens: Sequence[int], tables: list[list[int]], first: int, end: int) -> None:
        """Write what another connector has loaded: whole blocks."""
        self._requests["loaded"] = np.array(numbers_of(tokens), dtype=np.uint64), tables
        for rows in self._rows("loaded", 0, end, is_reached=True, is_whole=True):
            rows.write()
        del self._requests["loaded"]

    def _write(self, request: str, first: int, count: int, *, kinds: str = KINDS) -> None:
        for rows in self._rows(request, first, count, kinds=kinds):
            rows.write()

    def _compare(self, request: str, count: int, *, kinds: str = KINDS) -> None:
        for rows in self._rows(request, 0, count, is_reached=True, kinds=kinds):
            self._compare_rows(f"request {request}", rows)

    def compare_stored(self, chunks: Sequence[Chunk], weights: int) -> None:
        """Compare the blocks of chunks with what belongs under their keys."""
        for chunk in chunks:
            what, numbers = f"store of {chunk.key.hex()[:8]}", np.array(BELONGS[chunk.key], np.uint64)
            for name in self.groups[chunk.group]:
                kind, tokens = self._kinds[name], self._block_tokens(name)
                end = len(numbers) - (kind in DRAFTS)  # the last token's depends on the next one
                for at, block in enumerate(chunk.block_ids.tolist(), chunk.first_block):
                    positions = np.arange(at * tokens, min((at + 1) * tokens, end))
                    if kind == "M":
                        positions = positions[-1:]
                    if not len(positions):
                        self.wrong.append(f"{what}: nothing of block {block} belongs there")
                    self._compare_rows(what, self._rows_at(name, numbers, positions, positions * 0 + block, weights))
        self.stored += len(chunks)

    def _compare_rows(self, what: str, rows: Rows) -> None:
        for at, words in rows.wrong():
            kind, position = self._kinds[rows.layer], rows.positions[at]
            written = token_of(rows.layer, words)
            told = f"{what}: layer {rows.layer} ({kind}) has {written} for token {position}"
            # A block's hash does not name the token behind it. A draft's KV of a block's last token depends on that
            # token, so it may be another continuation's, in vLLM's own cache as well. It costs a draft, never a token.
            ends_block = (position + 1) % self._block_tokens(rows.layer) == 0
            if kind in DRAFTS and ends_block and written is not None:
                others = {numbers_of([token], int(rows.tokens[at]))[0] for token in _TOKENS}
                if written ^ int(rows.salt) in others:
                    self.stale_drafts.append(told)
                    continue
            self.wrong.append(f"{told}, not {rows.known[at] ^ rows.salt}")

    def _block_tokens(self, layer: str) -> int:
        return LARGE_TOKENS if self._kinds[layer] == "L" else BLOCK_TOKENS

    def _words(self, name: str) -> torch.Tensor:
        """Return a layer's cache as words: blocks, heads, tokens, words of a token. A state is one token."""
        layer = self._caches[name].view(torch.int64)
        return layer.view(len(layer), 1, 1, -1) if self._kinds[name] == "M" else layer

    def _rows(
        self,
        request: str,
        first: int,
        count: int,
        *,
        is_reached: bool = False,
        is_whole: bool = False,
        kinds: str = KINDS,
    ) -> Iterator[Rows]:
        """As ``PlayedRank``'s, of layers of these kinds. ``is_reached``: only what the token behind them attends to.
        ``is_whole``: with the rest of its blocks.
        """
        numbers, tables = self._requests[request]
        of_layer = [(name, table) for names, table in zip(self.groups, tables, strict=True) for name in names]
        for name, table in of_layer:
            kind, tokens = self._kinds[name], self._block_tokens(name)
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
            yield self._rows_at(name, numbers, positions, blocks, self.weights)

    def _rows_at(
        self,
        name: str,
        numbers: npt.NDArray[np.uint64],
        positions: npt.NDArray[np.int64],
        blocks: npt.NDArray[np.int64],
        weights: int,
    ) -> Rows:
        kind = self._kinds[name]
        slots = positions * 0 if kind == "M" else positions % self._block_tokens(name)
        known = np.minimum(positions + (kind in DRAFTS), len(numbers) - 1)
        words, salt = self._words(name), _salt(weights)
        return Rows(name, words, positions, blocks, slots, numbers[positions], numbers[known], salt)


def _salt(weights: int) -> np.uint64:
    return np.uint64(weights * 0x5851F42D4C957F2D % (1 << 64))


def ours(connector: Any) -> Any:
    """Return our connector: this one, or one that is in it."""
    return next(
        (one for one in getattr(connector, "_connectors", ()) if isinstance(one, NixlOffloadConnector)), connector
    )


class FuzzedExecutor(PlayedExecutor):
    """Answers with what the only rank has generated."""

    def collective_rpc(
        self, method: Any, timeout: Any = None, args: tuple[Any, ...] = (), kwargs: Any = None, non_block: bool = False
    ) -> Any:
        return super().collective_rpc(method, args=(*args, *(kwargs or {}).values()))

    def take_draft_token_ids(self) -> DraftTokenIds:
        [rank] = self.ranks
        assert isinstance(rank, FuzzedRank)
        return rank.drafts()

    def _sampled(self, scheduled: SchedulerOutput, combined: ModelRunnerOutput) -> ModelRunnerOutput:
        [rank], names = self.ranks, list(scheduled.num_scheduled_tokens)
        assert isinstance(rank, FuzzedRank)
        return ModelRunnerOutput(
            names,
            {name: at for at, name in enumerate(names)},
            sampled_token_ids=[rank.sampled.get(name, []) for name in names],
            kv_connector_output=combined.kv_connector_output,
        )


class FuzzedEngine(PlayedEngine):
    """An engine of one rank that is stepped by hand."""

    executor_type = FuzzedExecutor

    def __init__(self, vllm_config: VllmConfig, kinds: str, *, blocks: int, second_runner: bool) -> None:
        """``blocks``: of the KV cache, in all."""
        layers = kinds.count(max(set(kinds), key=kinds.count))
        fields = {"second_runner": second_runner, "memory_bytes": blocks * layers * PAGE_BYTES}
        rank_type = type("Rank", (FuzzedRank,), fields)
        self.executor_type = type("Executor", (FuzzedExecutor,), {"rank_type": rank_type})  # type: ignore[misc]
        super().__init__(vllm_config, (kinds,))
        scheduler: Any = self.core.scheduler
        scheduler.use_v2_model_runner = second_runner
        scheduler.max_num_encoder_input_tokens = MAX_TOKENS
        scheduler.encoder_cache_manager = EncoderCacheManager(MAX_TOKENS * 8)

    @property
    def rank(self) -> FuzzedRank:
        [rank] = self.ranks
        assert isinstance(rank, FuzzedRank)
        return rank

    @property
    def scheduler_half(self) -> Any:
        return ours(self.core.scheduler.get_kv_connector()).connector_scheduler

    def ask(
        self, name: str, prompt: Sequence[int], tokens: int = 1, extra: dict[str, Any] | None = None, **fields: Any
    ) -> Request:
        """Add a request, or go on with the session of that name; not ``resumable``: end the session.

        ``extra``: of its sampling parameters.
        """
        request = Request(
            name,
            list(prompt),
            SamplingParams(max_tokens=tokens, ignore_eos=True, extra_args=extra),
            None,
            block_hasher=self.core.request_block_hasher,
            **fields,
        )
        self.core.add_request(request)
        return request

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.core.step_fn()
            self.core.post_step(True)

    def settle(self) -> None:
        """As the other's, with all stores let go."""
        with self.rank.stores.all_let_go():
            for _ in range(MAX_STEPS):
                if not self.core.scheduler.has_requests() and not self.core.batch_queue:
                    return
                self.step()
        raise AssertionError("the engine does not come to rest")

    def left(self) -> list[str]:
        """Return what an engine at rest should not have any more."""
        half, pool = self.scheduler_half, self.core.scheduler.kv_cache_manager.block_pool  # type: ignore[attr-defined]
        counts = {
            "requests": len(half._req_status),
            "jobs": len(half._jobs),
            "fenced blocks": len(half._block_id_to_pending_jobs),
            "blocks": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
        }
        return [f"{count} {what}" for what, count in counts.items() if count]


@contextmanager
def fuzzed() -> Iterator[None]:
    """As ``played``, for engines that zero what they allocate, and come to rest however busy the machine is."""
    with played(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(KVCacheConfig, "needs_kv_cache_zeroing", True)
        patch.setattr(idling, "PATIENCE_S", 60.0)
        patch.setattr(RequestOffloadState, "update_offload_keys", _take_down(RequestOffloadState.update_offload_keys))
        patch.setattr(AdaptedRequestState, "update_offload_keys", _take_down(AdaptedRequestState.update_offload_keys))
        patch.setattr(MendedScheduler, "_make_boundary_key", _take_down_boundary)
        BELONGS.clear()
        yield


def _numbers_by(state: RequestOffloadState) -> list[int]:
    """Return the numbers that belong under a request's keys: none, or others than it has, where these do not stand for
    its content.
    """
    start = _START
    if state.req.lora_request is not None:
        use = notes_of(state.req_context).adapter
        if use is None:
            return []
        start ^= 1 + _CONTENTS[use.digests[0]]
    media = [
        replace(image, mm_hash="1") if image.identifier.startswith("uuid") else image for image in state.req.mm_features
    ]
    return numbers_of(seen_tokens(state.req.all_token_ids, media), start)


def _take_down(update: Callable[[Any], None]) -> Callable[[Any], None]:
    """Have ``BELONGS`` know each key that a request gets."""

    def updated(state: Any) -> None:
        known = [len(group.offload_keys) for group in state.group_states]
        update(state)
        numbers: list[int] = []
        for config, group, first in zip(state.config.kv_group_configs, state.group_states, known, strict=True):
            for at, key in enumerate(group.offload_keys[first:], first):
                numbers = numbers or _numbers_by(state)
                BELONGS[key] = numbers[at * config.tokens_per_chunk : (at + 1) * config.tokens_per_chunk]

    return updated


_VLLMS_BOUNDARY_KEY = MendedScheduler._make_boundary_key


def _take_down_boundary(scheduler: Any, request: Request, group: int, boundary: int, context: Any) -> Any:
    key = _VLLMS_BOUNDARY_KEY(scheduler, request, group, boundary, context)
    first = (boundary - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    BELONGS[key] = _numbers_by(scheduler._req_status[request.request_id])[first:boundary]
    return key


class Fuzz:
    """Does at random what users do, and lets the engine step between."""

    def __init__(self, engine: FuzzedEngine, seed: int, *, adapters: bool = False) -> None:
        """``adapters``: half of the requests have one."""
        self.engine = engine
        self.requests = 0
        self.log: list[str] = []
        self._adapters = ["a", "b"] if adapters else []
        self._random = random.Random(seed)
        self._documents = [self._random.choices(range(500), k=MAX_TOKENS) for _ in range(4)]
        self._names: list[str] = []
        self._sessions: dict[str, int] = {}
        """Live ones -> tokens that they may still have."""
        self._adapter_of: dict[str, LoRARequest | None] = {}
        """By session."""
        ON_DISK.update(dict.fromkeys(self._adapters, 1))

    def run(self, actions: int) -> None:
        """Do so many things, and come to rest."""
        chosen = {
            self._ask: 20,
            self._abort: 4,
            self._reset: 2,
            self._let_go: 6,
            self._session: 3,
            self._go_on: 9,
            self._sleep: 1,
            self._change_model: 1,
        }
        for _ in range(actions):
            [action] = self._random.choices(list(chosen), weights=list(chosen.values()))
            action()
            steps = self._random.choice([0, 1, 1, 2, 5, 12])
            self.log.append(f"step {steps}")
            self.engine.step(steps)
        # vLLM may never go on with sessions: each keeps its blocks, and the first that lacks some stops the others.
        self.engine.core.abort_requests([name for name in self._live if name.startswith("s")])
        self.engine.settle()
        for turn in ("computed", "loaded"):
            self.engine.reset_prefix_cache()
            for at, document in enumerate(self._documents):
                self.engine.ask(f"document {at} {turn}", document[: MAX_TOKENS - 100])
                self.engine.settle()

    @property
    def _live(self) -> list[str]:
        return list(self.engine.core.scheduler.requests)  # type: ignore[attr-defined]

    def _prompt(self, most: int = MAX_TOKENS - 100) -> list[int]:
        document = self._random.choice(self._documents)
        shared = document[: self._random.randrange(1, most)]
        return (shared + self._random.choices(range(500), k=self._random.choice([0, 0, 5, 40])))[:most]

    def _adapter(self) -> LoRARequest | None:
        if not self._adapters or self._random.random() < 0.5:
            return None
        at = self._random.randrange(len(self._adapters))
        return LoRARequest(self._adapters[at], at + 1, self._adapters[at])

    def _images(self, prompt: list[int], likely: float) -> list[MultiModalFeatureSpec]:
        """Put an image at a prompt's end, or none: one of few, under a digest or a uuid."""
        if len(prompt) < IMAGE_TOKENS or self._random.random() > likely:
            return []
        number = self._random.randrange(3)
        is_digest = self._random.random() < 0.5
        content = 1000 + number
        name = f"{content:064x}" if is_digest else f"uuid-{number}"
        prompt[-IMAGE_TOKENS:] = [0] * IMAGE_TOKENS
        place = PlaceholderRange(offset=len(prompt) - IMAGE_TOKENS, length=IMAGE_TOKENS)
        return [MultiModalFeatureSpec(None, "image", name, place, mm_hash=str(content))]

    def _ask(self) -> None:
        live = self._live
        if len(live) >= 6:
            return
        batches = self.engine.core.batch_queue or ()
        # VLLM takes a token that is on its way for one of the request that has the id now.
        on_their_way = {name for _, scheduled, *_ in batches for name in scheduled.num_scheduled_tokens}
        ended = [name for name in self._names[-6:] if name not in {*live, *on_their_way}]
        name = self._random.choice(ended) if ended and self._random.random() < 0.4 else f"r{self.requests}"
        prompt, tokens = self._prompt(), self._random.choice([1, 1, 3, 40, 90])
        adapter, images = self._adapter(), self._images(prompt, 0.2)
        self.log.append(f"ask {name} {len(prompt)} {tokens} {adapter} {images}")
        self.engine.ask(name, prompt, tokens, lora_request=adapter, mm_features=images)
        self._names.append(name)
        self.requests += 1

    def _session(self) -> None:
        if len(self._live) >= 6:
            return
        name, prompt, tokens = f"s{self.requests}", self._prompt(200), self._random.choice([1, 3, 40])
        self._adapter_of[name] = adapter = self._adapter()
        self.log.append(f"session {name} {len(prompt)} {tokens} {adapter}")
        self.engine.ask(name, prompt, tokens, resumable=True, lora_request=adapter)
        self._sessions[name] = MAX_TOKENS - len(prompt) - tokens - 2
        self.requests += 1

    def _go_on(self) -> None:
        self._sessions = {name: room for name, room in self._sessions.items() if name in self._live}
        if not self._sessions:
            return
        name = self._random.choice(list(self._sessions))
        tokens, prompt = self._random.choice([1, 3, 40]), self._prompt(100)
        images = self._images(prompt, 0.6)
        self._sessions[name] -= len(prompt) + tokens
        if self._sessions[name] < 2 or self._random.random() < 0.2:
            self._end(name)
            return
        self.log.append(f"go on {name} {len(prompt)} {tokens} {images}")
        adapter = self._adapter_of[name]
        self.engine.ask(name, prompt, tokens, resumable=True, lora_request=adapter, mm_features=images)
        self.requests += 1

    def _end(self, name: str) -> None:
        self._sessions.pop(name)
        if name in self._live:
            self.log.append(f"end {name}")
            self.engine.ask(name, [1], 1, lora_request=self._adapter_of[name])

    def _sleep(self) -> None:
        level = self._random.choice([1, 2])
        self.log.append(f"sleep {level}")
        for name in self._live:
            self._sessions.pop(name, None)
        assert self._succeeds(lambda: self.engine.core.sleep(level), MAX_STEPS)
        if self._random.random() < 0.5:
            self.engine.rank.change_weights(self._random.randrange(3))
        self.engine.core.wake_up()

    def _change_model(self) -> None:
        """Other weights, or other adapters in the place of these; nothing that runs goes on with what it has."""
        reset = partial(self.engine.core.reset_prefix_cache, True, self._random.random() < 0.5)
        if not self._succeeds(reset):
            return
        if self._adapters and self._random.random() < 0.8:
            ON_DISK[self._random.choice(self._adapters)] = self._random.randrange(3)
            self.engine.rank.load_adapters_anew()
        else:
            self.engine.rank.change_weights(self._random.randrange(3))
        self.log.append(f"adapters {ON_DISK}, weights {self.engine.rank.weights}")
        reset()

    def _succeeds(self, act: Callable[[], object], tries: int = 50) -> bool:
        """Step until vLLM can; it cannot while a load is under way, or while a session waits for its user."""
        for _ in range(tries):
            try:
                act()
            except RuntimeError as error:
                if "remote KV transfer" not in str(error):
                    raise
                self.engine.step()
            else:
                return True
        return False

    def _abort(self) -> None:
        if live := self._live:
            name = self._random.choice(live)
            self.log.append(f"abort {name}")
            self.engine.core.abort_requests([name])
            self._sessions.pop(name, None)

    def _reset(self) -> None:
        running, connector = self._random.choice([(False, False), (True, False), (False, True), (True, True)])
        self.log.append(f"reset running={running} connector={connector}")
        try:
            self.engine.core.reset_prefix_cache(running, connector)
        except RuntimeError as error:  # vLLM cannot while a load is under way
            if "remote KV transfer" not in str(error):
                raise

    def _let_go(self) -> None:
        stores = self.engine.rank.stores
        names = [job for job in stores.held if self._random.random() < 0.5]
        self.log.append(f"let go {names}")
        stores.let_go(names)
