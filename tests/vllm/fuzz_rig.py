"""``PlayedEngine`` for what users do to a scheduler: requests that generate, end early, are preempted or go on as
sessions, ids that come again, resets of each kind, sleep, other weights; with images, adapters, drafts, a recurrent
state, or another connector beside ours. Stores read their blocks as late as the contract allows, and each chunk that is
stored is compared with what belongs under its key.

Threading: one test's thread, beside those of the connector's halves.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import RequestOffloadState
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import Request, RequestStatus

from nixl_offload.engine import Chunk, Job, WorkKind
from nixl_offload.vllm import connector_scheduler
from nixl_offload.vllm.connector import NixlOffloadConnector
from nixl_offload.vllm.load_decision import LoadDecider
from nixl_offload.vllm.rank_identity import adapter_digest
from nixl_offload.vllm.vllm_scheduler import AdaptedRequestState, MendedScheduler, notes_of
from tests.vllm.pipeline_rig import (
    BLOCK_TOKENS,
    DRAFTS,
    IMAGE_TOKENS,
    MAX_STEPS,
    PAGE_BYTES,
    START,
    PlayedEngine,
    PlayedRank,
    next_token,
    numbers_of,
    played,
    seen_tokens,
)

MAX_TOKENS = 512

BELONGS: dict[bytes, list[int]] = {}
"""By key: the numbers of its chunk's tokens. None of these: nothing may be stored under it."""
ON_DISK: dict[str, int] = {}
"""By path: the content of a LoRA adapter."""
_CONTENTS: dict[str, int] = {}
"""By the digest that a rank takes of a LoRA adapter: its content."""


class LateStores:
    """Keeps stores from their engine until their source blocks are about to be reused, or until they are let go."""

    def __init__(self, rank: FuzzedRank) -> None:
        engine = rank.rank_worker.engine
        self._submit, self._wait, self._rank = engine.submit, engine.wait, rank
        self.held: dict[int, tuple[Job, int]] = {}
        """By its id: a store, and which weights the model had in its step."""
        self.holds = True
        engine.submit, engine.wait = self._take, self._wait_for

    def _take(self, job: Job) -> None:
        if job.kind is not WorkKind.STORE:
            self._submit(job)
            return
        assert job.job_id is not None
        self.held[job.job_id] = job, self._rank.weights_of_job.pop(job.job_id)
        if not self.holds:
            self.let_go([job.job_id])

    def _wait_for(self, job_ids: set[int]) -> None:
        self.let_go(job_ids)
        self._wait(job_ids)

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
                job, weights = self.held.pop(job_id)
                self._rank.compare_stored(job.chunks, weights)
                self._submit(job)


@dataclass
class _Work(KVConnectorMetadata):
    loads: dict[str, tuple[list[int], list[list[int]], int, int]] = field(default_factory=dict)
    """By request: its tokens, its blocks by group, and the first and the last token to load."""
    kept: set[str] = field(default_factory=set)


class SlowConnector(KVConnectorBase_V1, SupportsHMA):
    """Another connector beside ours, inside ``MultiConnector``: it finds a part of most prompts and loads it some steps
    later, and it keeps the blocks of some requests for a while after their end.
    """

    fill: ClassVar[Callable[[Sequence[int], list[list[int]], int, int], None]]
    """Writes the KV of tokens to blocks of the only rank."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._random = random.Random(1)
        self._found: dict[str, int] = {}
        self._out: set[str] = set()
        """Requests that wait for the rank's half."""
        self._work = _Work()
        self._waiting: list[tuple[int, str, Any]] = []

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        blocks = (request.num_tokens - 1 - num_computed_tokens) // BLOCK_TOKENS
        if blocks < 1 or request.lora_request or request.mm_features or self._random.random() < 0.5:
            return 0, False
        self._found[request.request_id] = num_computed_tokens
        return self._random.randint(1, blocks) * BLOCK_TOKENS, True

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        first = self._found.pop(request.request_id, 0)
        if num_external_tokens:
            self._out.add(request.request_id)
            tables = [list(ids) for ids in blocks.get_block_ids()]
            self._work.loads[request.request_id] = (
                list(request.all_token_ids),
                tables,
                first,
                first + num_external_tokens,
            )

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        work, self._work = self._work, _Work()
        return work

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        if request.status is RequestStatus.FINISHED_ABORTED or self._random.random() < 0.5:
            return False, None
        self._work.kept.add(request.request_id)
        self._out.add(request.request_id)
        return True, None

    def has_pending_push_work(self) -> bool:
        return bool(self._out)

    def update_connector_output(self, connector_output: Any) -> None:
        self._out -= (connector_output.finished_sending or set()) | (connector_output.finished_recving or set())

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:
        work = self._get_connector_metadata()
        assert isinstance(work, _Work)
        self._waiting += [(self._random.randint(1, 6), name, load) for name, load in work.loads.items()]
        self._waiting += [(self._random.randint(1, 6), name, None) for name in work.kept]

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = KVConnectorTransferResults()
        waiting, self._waiting = self._waiting, []
        for steps, name, load in waiting:
            if steps > 1:
                self._waiting.append((steps - 1, name, load))
            elif load is None:
                results.finished_sending.add(name)
            else:
                SlowConnector.fill(*load)
                results.finished_recving.add(name)
        return results

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, *_: Any, **__: Any) -> None: ...

    def wait_for_save(self) -> None: ...

    def unregister_kv_caches(self) -> None: ...

    def restore_kv_caches(self) -> None: ...

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        return True


class FuzzedRank(PlayedRank):
    """The only rank. Zeroes blocks that vLLM allocates where the model runner of its order does."""

    second_runner: ClassVar[bool]

    def __init__(self, vllm_config: VllmConfig, rank: int, kinds: str, first_layer: int) -> None:
        super().__init__(vllm_config, rank, kinds, first_layer)
        self.stored = 0
        """Chunks that were compared when they were stored."""
        self.weights_of_job: dict[int, int] = {}
        """Which weights the model had in the step of a store."""
        self._adapters: dict[str, int] = {}
        """By path: the content as it was loaded."""
        SlowConnector.fill = self._fill

    def initialize_from_config(self, kv_cache_configs: Sequence[KVCacheConfig]) -> None:
        super().initialize_from_config(kv_cache_configs)
        kv_transfer_state._KV_CONNECTOR_AGENT = self.connector
        self.stores = LateStores(self)

    @property
    def rank_worker(self) -> Any:
        """Our worker."""
        return ours(self.connector).connector_worker.rank_worker

    def shutdown(self) -> None:
        self.stores.let_go(self.stores.held)
        super().shutdown()
        kv_transfer_state._KV_CONNECTOR_AGENT = None

    def sleep(self, level: int) -> None:
        with self.stores.all_let_go():
            super().sleep(level)

    def load_adapters_anew(self) -> None:
        """As with ``load_inplace``."""
        for path in list(self._adapters):
            self._load_adapter(LoRARequest(path, 1, path))

    def take_draft_token_ids(self) -> DraftTokenIds:
        """Return a draft for each request that has generated something; every third is wrong."""
        lasts = {name: int(self._requests[name][0][-1]) for name in self.sampled}
        return DraftTokenIds(list(lasts), [[next_token(last) + (not last % 3)] for last in lasts.values()])

    def compare_stored(self, chunks: Sequence[Chunk], weights: int) -> None:
        """Compare the blocks of chunks with what belongs under their keys."""
        for chunk in chunks:
            what, numbers = f"store of {chunk.key.hex()[:8]}", np.array(BELONGS[chunk.key], np.uint64)
            for name in self.groups[chunk.group]:
                kind, tokens = self.kinds[name], self.block_tokens(name)
                end = len(numbers) - (kind in DRAFTS)  # the last token's depends on the next one
                for at, block in enumerate(chunk.block_ids.tolist(), chunk.first_block):
                    positions = np.arange(at * tokens, min((at + 1) * tokens, end))
                    if kind == "M":
                        positions = positions[-1:]
                    if not len(positions):
                        self.wrong.append(f"{what}: nothing of block {block} belongs there")
                    self.compare_rows(what, self.rows_at(name, numbers, positions, positions * 0 + block, weights))
        self.stored += len(chunks)

    def _runner(self) -> Any:
        runner = SimpleNamespace(lora_manager=SimpleNamespace(_load_adapter=self._read_adapter))
        if self.second_runner:
            runner.update_requests = self._change_blocks
        return runner

    def _start_of(self, new: NewRequestData) -> int:
        if (adapter := new.lora_request) is None:
            return START
        content = self._adapters.get(adapter.lora_path)
        return START ^ (1 + (self._load_adapter(adapter) if content is None else content))

    def _load_adapter(self, request: LoRARequest) -> int:
        content: int = self.vllm_worker.model_runner.lora_manager._load_adapter(request).content
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
            self.vllm_worker.model_runner.update_requests(scheduled)
            super()._begin(scheduled)
        else:
            super()._begin(scheduled)
            self._change_blocks(scheduled)

    def _change_blocks(self, scheduled: SchedulerOutput) -> None:
        for layer in self.caches.values():
            if scheduled.new_block_ids_to_zero:
                layer[scheduled.new_block_ids_to_zero] = 0
            for copy in scheduled.kv_cache_block_copies or ():
                layer[copy.dst_block_id] = layer[copy.src_block_id]

    def _fill(self, tokens: Sequence[int], tables: list[list[int]], first: int, end: int) -> None:
        """Write whole blocks, as another connector's load does."""
        self._requests["loaded"] = np.array(numbers_of(tokens), dtype=np.uint64), tables
        for rows in self.rows("loaded", 0, end, is_reached=True, is_whole=True):
            rows.write()
        del self._requests["loaded"]


def ours(connector: Any) -> Any:
    """Return our connector: this one, or one that is in it."""
    return next(
        (one for one in getattr(connector, "_connectors", ()) if isinstance(one, NixlOffloadConnector)), connector
    )


class FuzzedEngine(PlayedEngine):
    """An engine of one rank that is stepped by hand."""

    def __init__(self, vllm_config: VllmConfig, kinds: str, *, blocks: int, second_runner: bool) -> None:
        """``blocks``: how many the KV cache has in all."""
        layers = kinds.count(max(set(kinds), key=kinds.count))
        fields = {"second_runner": second_runner, "memory_bytes": blocks * layers * PAGE_BYTES}
        rank_type = type("Rank", (FuzzedRank,), fields)
        super().__init__(vllm_config, (kinds,), rank_type=rank_type)
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
        """Add a request, or continue the session of that name. Without ``resumable`` the session ends."""
        request = self.request(prompt, name, tokens, extra, **fields)
        self.core.add_request(request)
        return request

    def settle(self) -> None:
        """As ``PlayedEngine.settle``, with all held stores released."""
        with self.rank.stores.all_let_go():
            super().settle()

    def left(self) -> list[str]:
        """Return what an engine at rest still has and should not have."""
        half, pool = self.scheduler_half, self.core.scheduler.kv_cache_manager.block_pool  # type: ignore[attr-defined]
        counts = {
            "requests": len(half._req_status),
            "jobs": len(half._jobs),
            "fenced blocks": len(half._block_id_to_pending_jobs),
            "fetches": len(half.offload_manager.catalog.moves.fetches),
            "blocks": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
        }
        return [f"{count} {what}" for what, count in counts.items() if count]


@contextmanager
def fuzzed() -> Iterator[None]:
    """As ``played``, for engines that zero allocated blocks, and that come to rest even on a busy machine."""
    with played(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(KVCacheConfig, "needs_kv_cache_zeroing", True)
        patch.setattr(connector_scheduler, "PATIENCE_S", 60.0)
        chance = random.Random(1)
        patch.setattr(LoadDecider, "is_long", lambda *_: chance.random() < 0.5)
        patch.setattr(RequestOffloadState, "update_offload_keys", _take_down(RequestOffloadState.update_offload_keys))
        patch.setattr(AdaptedRequestState, "update_offload_keys", _take_down(AdaptedRequestState.update_offload_keys))
        patch.setattr(MendedScheduler, "_make_boundary_key", _take_down_boundary)
        BELONGS.clear()
        yield


def _numbers_by(state: RequestOffloadState) -> list[int]:
    """Return the token numbers that belong under a request's keys. If the keys do not stand for its content, these are
    none, or differ from the request's own.
    """
    start = START
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
    """Record each key that a request gets in ``BELONGS``."""

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
    """Does at random what users do, and steps the engine in between."""

    def __init__(self, engine: FuzzedEngine, seed: int, *, adapters: bool = False) -> None:
        """``adapters``: whether half of the requests have one."""
        self.engine = engine
        self.requests = 0
        self._adapters = ["a", "b"] if adapters else []
        self._random = random.Random(seed)
        self._documents = [self._random.choices(range(500), k=MAX_TOKENS) for _ in range(4)]
        self._names: list[str] = []
        self._sessions: dict[str, int] = {}
        """Live session -> how many tokens it may still get."""
        self._adapter_of: dict[str, LoRARequest | None] = {}
        """By session."""
        ON_DISK.update(dict.fromkeys(self._adapters, 1))

    def run(self, actions: int) -> None:
        """Do this many actions, then let the engine come to rest."""
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
            self.engine.step(steps)
        # vLLM may be stuck with sessions: each keeps its blocks, and the first that lacks some stops all.
        self.engine.core.abort_requests([name for name in self._live if name.startswith("s")])
        self.engine.settle()
        for turn in ("computed", "loaded", "of other content")[: 3 if self._adapters else 2]:
            if turn == "of other content":
                ON_DISK["a"] = 3
                self.engine.rank.load_adapters_anew()
                self.engine.ask("reports it", [1])
                self.engine.settle()
            self.engine.reset_prefix_cache()
            for at, document in enumerate(self._documents):
                adapter = LoRARequest("a", 1, "a") if self._adapters else None
                self.engine.ask(f"document {at} {turn}", document[: MAX_TOKENS - 100], lora_request=adapter)
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
        self.engine.ask(name, prompt, tokens, lora_request=adapter, mm_features=images)
        self._names.append(name)
        self.requests += 1

    def _session(self) -> None:
        if len(self._live) >= 6:
            return
        name, prompt, tokens = f"s{self.requests}", self._prompt(200), self._random.choice([1, 3, 40])
        self._adapter_of[name] = adapter = self._adapter()
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
        adapter = self._adapter_of[name]
        self.engine.ask(name, prompt, tokens, resumable=True, lora_request=adapter, mm_features=images)
        self.requests += 1

    def _end(self, name: str) -> None:
        self._sessions.pop(name)
        if name in self._live:
            self.engine.ask(name, [1], 1, lora_request=self._adapter_of[name])

    def _sleep(self) -> None:
        level = self._random.choice([1, 2])
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
            self.engine.core.abort_requests([name])
            self._sessions.pop(name, None)

    def _reset(self) -> None:
        running, connector = self._random.choice([(False, False), (True, False), (False, True), (True, True)])
        try:
            self.engine.core.reset_prefix_cache(running, connector)
        except RuntimeError as error:  # vLLM cannot while a load is under way
            if "remote KV transfer" not in str(error):
                raise

    def _let_go(self) -> None:
        stores = self.engine.rank.stores
        names = [job for job in stores.held if self._random.random() < 0.5]
        stores.let_go(names)
