"""``PlayedEngine`` for whatever users do to a scheduler: requests that generate, end early, are preempted or go on as
sessions, ids that come again, resets of each kind. Stores read their blocks as late as the contract allows.

Each time a request begins with tokens that it did not compute in this step, all of its blocks that attention reaches
are compared with what belongs there. So are those of each chunk that is stored.

Threading: one test's thread, beside those of the connector's halves.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import RequestOffloadState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from nixl_offload.engine import ChunkIO
from tests.vllm.pipeline_rig import (
    _NULL_BLOCK,
    BLOCK_TOKENS,
    HEAD_SIZE,
    PAGE_BYTES,
    WINDOW_TOKENS,
    PlayedEngine,
    PlayedExecutor,
    PlayedRank,
    played,
    words_of,
)

LOCAL_TOKENS = 128
"""Of a chunk of chunked local attention (``C``)."""
LARGE_TOKENS = 128
"""Of a block of full attention with large blocks (``L``)."""
ODD_WINDOW_TOKENS = 72
"""Of a sliding window that ends within blocks (``W``)."""
MAX_TOKENS = 512
_START = 0x9E3779B97F4A7C15

BELONGS: dict[bytes, list[int]] = {}
"""By key: the numbers of its chunk's tokens."""


def numbers_of(tokens: Iterable[int], before: int = _START) -> list[int]:
    """Return a number for each token that depends on all tokens up to it. ``before``: that of the token before."""
    numbers = []
    for token in tokens:
        digest = blake2b(before.to_bytes(8, "big") + token.to_bytes(4, "big"), digest_size=8)
        before = int.from_bytes(digest.digest(), "big")
        numbers.append(before)
    return numbers


def next_token(number: int) -> int:
    """Return what the played model generates behind a token: prompts alike are answered alike."""
    return number % 500


class LateStores:
    """Keeps stores from their engine until their source blocks are about to be reused, or until they are let go.

    ``compare``: looks at what they read.
    """

    def __init__(self, engine: Any, compare: Callable[[Sequence[ChunkIO]], None]) -> None:
        self._submit, self._wait, self._compare = engine.submit_store, engine.wait, compare
        self.held: dict[int, Sequence[ChunkIO]] = {}
        self.holds = True
        engine.submit_store, engine.wait = self._store, self._wait_for

    def _store(self, job_id: int, chunks: Sequence[ChunkIO]) -> None:
        self.held[job_id] = chunks
        if not self.holds:
            self.let_go([job_id])

    def _wait_for(self, job_ids: Iterable[int], *arguments: Any) -> None:
        job_ids = set(job_ids)
        self.let_go(job_ids)
        self._wait(job_ids, *arguments)

    def let_go(self, job_ids: Iterable[int]) -> None:
        for job_id in job_ids:
            if (chunks := self.held.pop(job_id, None)) is not None:
                self._compare(chunks)
                self._submit(job_id, chunks)


class FuzzedRank(PlayedRank):
    """The only rank. Zeroes blocks that vLLM allocates where the model runner of its order does."""

    second_runner: ClassVar[bool]
    memory_bytes: ClassVar[int]

    def __init__(self, vllm_config: VllmConfig, rank: int, kinds: str, first_layer: int) -> None:
        super().__init__(vllm_config, rank, kinds, first_layer)
        self.sampled: dict[str, list[int]] = {}
        """By request of this step: the token that it has generated, if any."""
        self.answers = 0
        """Requests that began with tokens which were not computed in this step."""
        self.stored = 0
        """Chunks that were compared when they were stored."""

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        common: dict[str, Any] = {"num_kv_heads": 1, "dtype": torch.float32}
        small = {"block_size": BLOCK_TOKENS, "head_size": HEAD_SIZE, **common}
        large = {"block_size": LARGE_TOKENS, "head_size": HEAD_SIZE * BLOCK_TOKENS // LARGE_TOKENS, **common}
        made = {
            "C": ChunkedLocalAttentionSpec(attention_chunk_size=LOCAL_TOKENS, **small),
            "L": FullAttentionSpec(**large),
            "W": SlidingWindowSpec(sliding_window=ODD_WINDOW_TOKENS, **small),
        }
        specs = super().get_kv_cache_spec()
        return {name: made.get(kind, specs[name]) for name, kind in self._kinds.items()}

    def determine_available_memory(self) -> int:
        return self.memory_bytes

    def initialize_from_config(self, kv_cache_configs: Sequence[KVCacheConfig]) -> None:
        super().initialize_from_config(kv_cache_configs)
        kv_transfer_state._KV_CONNECTOR_AGENT = self._connector
        self.stores = LateStores(self.worker._engine, self._compare_stored)

    def shutdown(self) -> None:
        self.stores.let_go(list(self.stores.held))
        super().shutdown()
        kv_transfer_state._KV_CONNECTOR_AGENT = None

    def _runner(self) -> Any:
        return SimpleNamespace(update_requests=self._zero) if self.second_runner else SimpleNamespace()

    def _begin(self, scheduled: SchedulerOutput) -> None:
        if self.second_runner:
            runner: Any = self._vllm_worker.model_runner
            runner.update_requests(scheduled)
            super()._begin(scheduled)
        else:
            super()._begin(scheduled)
            self._zero(scheduled)

    def _zero(self, scheduled: SchedulerOutput) -> None:
        if scheduled.new_block_ids_to_zero:
            for layer in self._caches.values():
                layer[scheduled.new_block_ids_to_zero] = 0

    def _forward(self, scheduled: SchedulerOutput) -> None:
        """Write the KV of all requests, then look at that which they begin with: a request may begin with what another
        one computes in the same step.
        """
        self.sampled = {}
        began: dict[str, int] = {}
        for name in scheduled.finished_req_ids:
            self._requests.pop(name, None)
        for new in scheduled.scheduled_new_reqs:
            tokens = new.prefill_token_ids or new.prompt_token_ids
            assert tokens is not None
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
        for name, count in scheduled.num_scheduled_tokens.items():
            self._compute(name, computed[name], count)
        for name, count in began.items():
            self._compare(name, count)
            self.answers += count > 0

    def _start(self, name: str, tokens: Sequence[int], tables: Sequence[Sequence[int]]) -> None:
        self._requests[name] = np.array(numbers_of(tokens), dtype=np.uint64), [list(table) for table in tables]

    def _compute(self, name: str, computed: int, count: int) -> None:
        self._write(name, computed, count)
        numbers, tables = self._requests[name]
        if computed + count < len(numbers):
            return
        last = int(numbers[-1])
        self.sampled[name] = [next_token(last)]
        self._requests[name] = np.append(numbers, np.array(numbers_of(self.sampled[name], last), np.uint64)), tables

    def _compare(self, request: str, count: int) -> None:
        for number, (layer, blocks, slots, values) in enumerate(self._rows(request, 0, count, is_reached=True)):
            right = (layer[blocks, :, slots] == values).flatten(1).all(1)
            if not right.all():
                self.wrong.append(f"request {request}, row {number}, {int((~right).sum())} of {count} tokens")
        self.began_with[request] = count

    def _compare_stored(self, chunks: Sequence[ChunkIO]) -> None:
        """Compare the blocks of chunks with what belongs under their keys."""
        for chunk in chunks:
            names, numbers = self.groups[chunk.group], BELONGS[chunk.key]
            tokens = self._block_tokens(names[0])
            for at, block in enumerate(chunk.block_ids.tolist(), chunk.first_block):
                of_block = np.array(numbers[at * tokens : (at + 1) * tokens], dtype=np.uint64)
                for name in names:
                    layer = self._caches[name].view(torch.int64)
                    if not torch.equal(layer[block].transpose(0, 1), words_of(name, of_block, layer.shape[-1])):
                        self.wrong.append(f"store of {chunk.key.hex()[:8]}, block {block}, {name}")
        self.stored += len(chunks)

    def _block_tokens(self, layer: str) -> int:
        return LARGE_TOKENS if self._kinds[layer] == "L" else BLOCK_TOKENS

    def _rows(
        self, request: str, first: int, count: int, *, is_reached: bool = False
    ) -> Iterator[tuple[torch.Tensor, ...]]:
        """As ``PlayedRank``'s. ``is_reached``: only those that the token behind them attends to."""
        numbers, tables = self._requests[request]
        for names, table in zip(self.groups, tables, strict=True):
            kind = self._kinds[names[0]]
            since = first
            if is_reached and kind in "SW":
                window = WINDOW_TOKENS if kind == "S" else ODD_WINDOW_TOKENS
                since = max(0, count - window + 1)
            elif is_reached and kind == "C":
                since = count // LOCAL_TOKENS * LOCAL_TOKENS
            positions = np.arange(since, min(first + count, len(numbers)))
            block_tokens = self._block_tokens(names[0])
            blocks = np.array(table, dtype=np.int64)[positions // block_tokens]
            assert (blocks != _NULL_BLOCK).all(), f"request {request} lacks a block"
            for name in names:
                layer = self._caches[name].view(torch.int64)
                slots = torch.from_numpy(positions % block_tokens)
                yield layer, torch.from_numpy(blocks), slots, words_of(name, numbers[positions], layer.shape[-1])


class FuzzedExecutor(PlayedExecutor):
    """Answers with what the only rank has generated."""

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
        self.core.scheduler.use_v2_model_runner = second_runner  # type: ignore[attr-defined]

    @property
    def rank(self) -> FuzzedRank:
        [rank] = self.ranks
        assert isinstance(rank, FuzzedRank)
        return rank

    @property
    def scheduler_half(self) -> Any:
        connector: Any = self.core.scheduler.get_kv_connector()
        return connector.connector_scheduler

    def ask(self, name: str, prompt: Sequence[int], tokens: int = 1, *, resumable: bool = False) -> Request:
        """Add a request, or go on with the session of that name; not ``resumable``: end the session."""
        request = Request(
            name,
            list(prompt),
            SamplingParams(max_tokens=tokens, ignore_eos=True),
            None,
            block_hasher=self.core.request_block_hasher,
            resumable=resumable,
        )
        self.core.add_request(request)
        return request

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.core.step_fn()

    def settle(self) -> None:
        """As the other's, with all stores let go."""
        stores = self.rank.stores
        holds, stores.holds = stores.holds, False
        stores.let_go(list(stores.held))
        super().settle()
        stores.holds = holds

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
    """As ``played``, for engines that zero what they allocate."""
    with played(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(KVCacheConfig, "needs_kv_cache_zeroing", True)
        patch.setattr(RequestOffloadState, "update_offload_keys", _take_down(RequestOffloadState.update_offload_keys))
        BELONGS.clear()
        yield


def _take_down(update: Callable[[RequestOffloadState], None]) -> Callable[[RequestOffloadState], None]:
    """Have ``BELONGS`` know each key that a request gets."""

    def updated(state: RequestOffloadState) -> None:
        known = [len(group.offload_keys) for group in state.group_states]
        update(state)
        numbers: list[int] = []
        for config, group, first in zip(state.config.kv_group_configs, state.group_states, known, strict=True):
            for at, key in enumerate(group.offload_keys[first:], first):
                numbers = numbers or numbers_of(state.req.all_token_ids)
                BELONGS[key] = numbers[at * config.tokens_per_chunk : (at + 1) * config.tokens_per_chunk]

    return updated


class Fuzz:
    """Does at random what users do, and lets the engine step between."""

    def __init__(self, engine: FuzzedEngine, seed: int) -> None:
        self.engine = engine
        self.requests = 0
        self._random = random.Random(seed)
        self._documents = [self._random.choices(range(500), k=MAX_TOKENS) for _ in range(4)]
        self._sessions: dict[str, int] = {}
        """Live ones -> tokens that they may still have."""
        self._names: list[str] = []
        self.log: list[str] = []

    def run(self, actions: int) -> None:
        """Do so many things, and come to rest."""
        chosen = [self._ask, self._abort, self._reset, self._let_go, self._session, self._go_on]
        for _ in range(actions):
            action = self._random.choices(chosen, weights=[10, 2, 1, 3, 1, 2])[0]
            action()
            steps = self._random.choice([0, 1, 1, 2, 5, 12])
            self.log.append(f"step {steps}")
            self.engine.step(steps)
        for name in list(self._sessions):
            self._end(name)
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

    def _ask(self) -> None:
        live = self._live
        if len(live) >= 6:
            return
        ended = [name for name in self._names[-6:] if name not in live]
        name = self._random.choice(ended) if ended and self._random.random() < 0.4 else f"r{self.requests}"
        prompt, tokens = self._prompt(), self._random.choice([1, 1, 3, 40, 90])
        self.log.append(f"ask {name} {len(prompt)} {tokens}")
        self.engine.ask(name, prompt, tokens)
        self._names.append(name)
        self.requests += 1

    def _session(self) -> None:
        if len(self._live) >= 6:
            return
        name, prompt, tokens = f"s{self.requests}", self._prompt(200), self._random.choice([1, 3, 40])
        self.log.append(f"session {name} {len(prompt)} {tokens}")
        self.engine.ask(name, prompt, tokens, resumable=True)
        self._sessions[name] = MAX_TOKENS - len(prompt) - tokens - 2
        self.requests += 1

    def _go_on(self) -> None:
        self._sessions = {name: room for name, room in self._sessions.items() if name in self._live}
        if not self._sessions:
            return
        name = self._random.choice(list(self._sessions))
        tokens, prompt = self._random.choice([1, 3, 40]), self._prompt(100)
        self._sessions[name] -= len(prompt) + tokens
        if self._sessions[name] < 2 or self._random.random() < 0.2:
            self._end(name)
            return
        self.log.append(f"go on {name} {len(prompt)} {tokens}")
        self.engine.ask(name, prompt, tokens, resumable=True)
        self.requests += 1

    def _end(self, name: str) -> None:
        self._sessions.pop(name)
        if name in self._live:
            self.log.append(f"end {name}")
            self.engine.ask(name, [1], 1)

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
