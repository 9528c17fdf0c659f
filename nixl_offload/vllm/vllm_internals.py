"""All that we touch of vLLM's private attributes: the place to look at first when vLLM moves on.

Threading: that of the object of vLLM's. ``tests/vllm/test_contract.py`` checks that no other file touches them.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence, Set
from copy import copy
from dataclasses import replace
from types import FrameType, MappingProxyType
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    GroupOffloadConfig,
    OffloadingConnectorScheduler,
    RequestOffloadState,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.sampling_params import SamplingParams
from vllm.v1.kv_offload.base import OffloadKey, get_offload_block_hash, get_offload_group_idx, make_offload_key
from vllm.v1.request import Request
from vllm.v1.worker.worker_base import WorkerBase

from nixl_offload.vllm.adapters import Adapted, AdapterUse

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import TransferJob
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
    from vllm.forward_context import ForwardContext
    from vllm.lora.request import LoRARequest
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_offload.base import ReqContext
    from vllm.v1.kv_offload.config import OffloadingConfig
    from vllm.v1.request import Request

# The connector.


class LeanConnector(OffloadingConnector):
    """vLLM's connector, which goes down to the rank's half only where a step has something to begin.

    It is asked right after the forward pass, which has emptied the processor's caches: each call in vain takes five to
    ten microseconds there (decision 0020).
    """

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        metadata, worker = self._connector_metadata, self.connector_worker
        assert worker is not None
        assert isinstance(metadata, OffloadingConnectorMetadata)
        is_ours = type(metadata) is not OffloadingConnectorMetadata
        if is_ours or metadata.load_jobs or worker._unsubmitted_store_jobs:
            worker.start_kv_transfers(metadata)


def turn_off_loads_within_the_step(extra_config: MutableMapping[str, Any]) -> str | None:
    """Turn off ``sync_load_budget_bytes``. Return a sentence for the log, or None where nothing was to be done.

    Blocks of a load within the step enter vLLM's prefix cache when they are allocated, and the same step offers chunks
    computed from them to the store. When such a load fails, vLLM recomputes the request, but takes back neither the
    blocks nor the store. Both ended in wrong answers: the blocks when the request is aborted before it is recomputed,
    the store always.
    """
    if not extra_config.get("sync_load_budget_bytes"):
        return None
    extra_config["sync_load_budget_bytes"] = 0
    return (
        "kv_connector_extra_config: sync_load_budget_bytes is ignored: when a load that finishes within the step fails,"
        " vLLM keeps and stores what was computed from it, so damaged storage could reach an answer"
    )


def set_canonical_layout(connector: OffloadingConnector, offloading: OffloadingConfig) -> None:
    """Set what ``OffloadingConnector.__init__``, past which ours goes, sets besides its halves."""
    connector._canonical_layout = offloading.canonical_layout


def outermost_connector() -> KVConnectorBase_V1 | None:
    """Return the connector that this rank's vLLM talks to: ours, or one that ours is in. None: not built yet."""
    return get_kv_transfer_group() if has_kv_transfer_group() else None


def load_failure_policy(connector: KVConnectorBase_V1 | None) -> str | None:
    """Return what vLLM does with a request whose load failed: of the outermost connector it is the policy in force."""
    return None if connector is None else connector._kv_transfer_config.kv_load_failure_policy


def evict_blocks(connector: OffloadingConnector, block_ids: set[int]) -> None:
    """Have vLLM's prefix cache forget blocks. Requests that run on them keep them."""
    manager = connector._kv_cache_manager
    if manager is not None:
        manager.evict_blocks(block_ids)


def prefix_cache(connector: OffloadingConnector) -> object:
    """Return vLLM's table of cached blocks, which each reset replaces."""
    manager = connector._kv_cache_manager
    return None if manager is None else manager.block_pool.cached_block_hash_to_block


# The scheduler's half.


class AdaptedRequestState(RequestOffloadState):
    """vLLM's state of a request with an adapter, whose keys hold the adapter's content once that is known."""

    use: AdapterUse | None = None

    def adapt(self, use: AdapterUse | None) -> None:
        """Have keys stand for ``use``, and the request offer all its chunks to the store anew. Nothing of it may be
        under way.
        """
        self.req_context.set_state(Adapted(use))
        if use == self.use:
            return
        self.use = use
        for group in self.group_states:
            group.offload_keys.clear()
            group.next_stored_chunk_idx = 0
        self.update_offload_keys()

    def update_offload_keys(self) -> None:
        known = [len(group.offload_keys) for group in self.group_states]
        super().update_offload_keys()
        for first, group in zip(known, self.group_states, strict=True):
            group.offload_keys[first:] = [self.key(key) for key in group.offload_keys[first:]]

    def key(self, key: OffloadKey) -> OffloadKey:
        """Return what stands for a key of vLLM's."""
        if self.use is None:
            return key
        own = make_offload_key(self.use.tag(get_offload_block_hash(key)), get_offload_group_idx(key))
        position = self.req_context.get_offload_key_position(key)
        if position is not None:
            self.req_context.set_offload_key_position(own, position)
        return own


def with_adapter(scheduler: OffloadingConnectorScheduler, request_id: str) -> None:
    """Have a new request's keys hold its adapter's content, which is not known yet."""
    state = scheduler._req_status[request_id]
    adapted = AdaptedRequestState(state.config, state.req, state.req_context, state.offloading_context)
    scheduler._req_status[request_id] = adapted
    adapted.adapt(None)


def known_requests(scheduler: OffloadingConnectorScheduler) -> list[RequestOffloadState]:
    """Return what vLLM's half knows of all requests."""
    return list(scheduler._req_status.values())


class ChunkwiseScheduler(OffloadingConnectorScheduler):
    """vLLM's scheduler half, which looks only at requests that have completed a chunk, or ended, when it stores.

    vLLM goes through every running request in every step, at some microseconds each; with hundreds of them that is
    a good part of a step that decodes, and nearly all of it finds nothing.
    """

    stores = True
    """Whether anything is stored in this step."""
    ever_stores = True
    """Whether anything is stored in any step."""
    held: Mapping[str, int] = MappingProxyType({})
    """Requests that offer nothing in this step; a later one offers it, if they have not ended by then."""
    _renamed: Set[str] = frozenset()
    """Other names of requests that have ended, which vLLM has not signalled yet."""

    def on_new_request(self, request: Request) -> None:
        """As vLLM's. A request of that id that has ended is kept under another name, as long as it stores.

        vLLM keeps requests by id, so the new one would take the place of the old, and the report of the old one's
        stores would end the engine.
        """
        before = self._req_status.pop(request.request_id, None)
        if before is not None:
            name = f"{request.request_id}\0{self._generate_job_id()}"
            self._req_status[name] = before
            for job_id in before.transfer_jobs:
                self._jobs[job_id].req_id = name
            if not before.finished_signaled:
                self._renamed |= {name}
            self.renamed(request.request_id, name)
        super().on_new_request(request)

    def renamed(self, request_id: str, name: str) -> None:
        """Take note that a request that has ended has another name from now on."""

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """As vLLM's. Of an id that has come again, the end is that of the request before."""
        ended = scheduler_output.finished_req_ids
        come_again = {name for name in ended if (state := self._req_status.get(name)) and not state.req.is_finished()}
        if come_again or self._renamed:
            scheduler_output = copy(scheduler_output)
            scheduler_output.finished_req_ids = (ended - come_again) | self._renamed
            self._renamed = frozenset()
        return super().build_connector_meta(scheduler_output)

    def reset_cache(self) -> None:
        """As vLLM's, which fails if no step has come since the last reset. What that one flushes is still flushed."""
        flushed, self._current_batch_jobs_to_flush = self._current_batch_jobs_to_flush, set()
        super().reset_cache()
        self._current_batch_jobs_to_flush |= flushed

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """As vLLM's, which takes the chunk that a loaded tail ends in for stored. It is stored once it is whole."""
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        state = self._req_status.get(request.request_id)
        if state is not None and num_external_tokens:
            loaded_tokens = state.num_locally_computed_tokens + num_external_tokens
            for at in self._full_attention_groups:
                group, chunk_tokens = state.group_states[at], self.config.kv_group_configs[at].tokens_per_chunk
                group.next_stored_chunk_idx = min(group.next_stored_chunk_idx, loaded_tokens // chunk_tokens)

    def check_blocks(self, request_id: str, block_ids: Sequence[Sequence[int]]) -> None:
        """Offer no chunk of a request from a block that it does not have any more. ``block_ids``: vLLM's own table, by
        KV cache group.

        The table that we inherit is appended to; vLLM's own forgets blocks that slid out of a window, and a reset has
        all chunks offered anew.
        """
        state = self._req_status.get(request_id)
        if state is None:
            return
        has_ended = state.req.is_finished()  # vLLM may then offer again what it has offered before
        for config, group in zip(self.config.kv_group_configs, state.group_states, strict=True):
            owned = block_ids[config.group_idx]
            first = 0 if has_ended else group.next_stored_chunk_idx * self.config.blocks_per_chunk
            if group.block_ids[first:] == owned[first : len(group.block_ids)]:
                continue
            for at in range(first, len(group.block_ids)):
                own = owned[at] if at < len(owned) else 0
                if group.block_ids[at] not in (0, own):
                    group.block_ids[at] = 0

    def _make_boundary_key(
        self, request: Request, group_idx: int, boundary_tokens: int, req_context: ReqContext
    ) -> OffloadKey:
        key = super()._make_boundary_key(request, group_idx, boundary_tokens, req_context)
        state = self._req_status.get(request.request_id)
        return state.key(key) if isinstance(state, AdaptedRequestState) else key

    def _build_partial_tail_store_jobs(self, scheduler_output: SchedulerOutput) -> dict[int, TransferJob]:
        if not self.stores:
            return {}
        states = scheduler_output.kv_connector_block_state
        if states is not None and (offloads := states.boundary_state_offloads):
            offered = {name: self._within_limit(name, of) for name, of in offloads.items() if name not in self.held}
            scheduler_output = copy(scheduler_output)
            scheduler_output.kv_connector_block_state = replace(states, boundary_state_offloads=offered)
        return super()._build_partial_tail_store_jobs(scheduler_output)

    def _reachable_store_block_mask(self, group_config: GroupOffloadConfig, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's, and where a prompt ends also what a hit that is shorter by a chunk needs of a draft's window: the
        chunk behind a hit has to be there, and a prompt seldom fills it.
        """
        if group_config.is_eagle_group:
            ends, chunk_tokens = kwargs["reachable_boundaries"], group_config.tokens_per_chunk
            kwargs["reachable_boundaries"] = (*ends, *[end - chunk_tokens for end in ends if end > chunk_tokens])
        return super()._reachable_store_block_mask(group_config, *args, **kwargs)

    def _within_limit(self, request_id: str, offloads: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
        """Return the states that lie within a request's ``max_offload_tokens``: vLLM asserts that its tail does."""
        state = self._req_status.get(request_id)
        if state is None:
            return []
        limit = state.max_offload_tokens
        return offloads if limit is None else [offload for offload in offloads if offload[2] <= limit]

    def _build_store_jobs(self, scheduler_output: SchedulerOutput) -> dict[int, TransferJob]:
        if not self.ever_stores:
            self._pass_over_blocks(scheduler_output.num_scheduled_tokens)
        if not self.stores:
            return {}
        configs = self.config.kv_group_configs
        states, held = self._req_status, self.held
        worthwhile: dict[str, int] = {}
        for request_id, tokens in scheduler_output.num_scheduled_tokens.items():
            state = states.get(request_id)
            if state is None or request_id in held:
                continue
            storable = self._calc_num_offloadable_tokens(state, state.req.num_computed_tokens + tokens)
            for config, group in zip(configs, state.group_states, strict=True):
                stored = group.next_stored_chunk_idx
                # The first question is quick; the second knows that a draft's last chunk may still change.
                has_chunk = storable // config.tokens_per_chunk > stored
                if state.req.is_finished() or (has_chunk and state.storable_chunks(config, group, storable) > stored):
                    worthwhile[request_id] = tokens
                    break
        if not worthwhile and not scheduler_output.finished_req_ids:
            return {}
        table = getattr(scheduler_output, "kv_connector_block_state", None)  # vLLM's own tests leave it out
        if table is not None:
            for request_id in worthwhile:
                if (block_ids := table.get_block_ids(request_id)) is not None:
                    self.check_blocks(request_id, block_ids)
        output = copy(scheduler_output)
        output.num_scheduled_tokens = worthwhile
        if held:
            output.finished_req_ids = output.finished_req_ids.difference(held)
        jobs = super()._build_store_jobs(output)
        # A request that has ended may offer blocks that others get in this step. vLLM flushes those of full attention.
        for job_id, job in jobs.items():
            reused = self._current_batch_allocated_block_ids.intersection(self._jobs[job_id].fenced_block_ids or ())
            if reused and states[job.req_id].req.is_finished():
                self._current_batch_jobs_to_flush.add(job_id)
        return jobs

    def _pass_over_blocks(self, request_ids: Iterable[str]) -> None:
        """Have vLLM not look in each step through all blocks of windows that are still to be stored: none will be."""
        for request_id in request_ids:
            state = self._req_status.get(request_id)
            for group in state.group_states if state is not None else ():
                group.next_stored_chunk_idx = len(group.block_ids) // self.config.blocks_per_chunk


def request_state(scheduler: OffloadingConnectorScheduler, request_id: str) -> RequestOffloadState | None:
    """Return what vLLM's half knows of a request; None: nothing."""
    return scheduler._req_status.get(request_id)


def allocated_requests(scheduler: OffloadingConnectorScheduler, block_ids: Set[int]) -> list[RequestOffloadState]:
    """Return the requests that were scheduled on any of these blocks."""
    return [
        status
        for status in scheduler._req_status.values()
        if any(not block_ids.isdisjoint(group.block_ids) for group in status.group_states)
    ]


def first_lookup_group(scheduler: OffloadingConnectorScheduler) -> int:
    """Return the position of the KV cache group that a request is looked up in first."""
    return scheduler._lookup_groups[0]


def is_being_loaded(scheduler: OffloadingConnectorScheduler, key: OffloadKey) -> bool:
    """Whether some request loads a chunk."""
    return key in (scheduler._chunks_being_loaded or ())


def chunk_being_loaded(
    scheduler: OffloadingConnectorScheduler, status: RequestOffloadState, computed_tokens: int
) -> tuple[OffloadKey | None, int]:
    """Return the first chunk of a request behind ``computed_tokens`` that some other request loads, and how many tokens
    lie between; None and 0: there is none.
    """
    begins: dict[int, OffloadKey] = {}
    for config, group in zip(scheduler.config.kv_group_configs, status.group_states, strict=True):
        first = computed_tokens // config.tokens_per_chunk
        for at, key in enumerate(group.offload_keys[first:], first):
            if is_being_loaded(scheduler, key):
                begins.setdefault(max(0, at * config.tokens_per_chunk - computed_tokens), key)
                break
    return (begins[min(begins)], min(begins)) if begins else (None, 0)


def begin_without_hit(status: RequestOffloadState, computed_tokens: int) -> None:
    """Have a request whose stores are still out be computed behind ``computed_tokens``. vLLM has it wait for them, for
    it loads nothing beside them.
    """
    status.update_offload_keys()
    status.num_locally_computed_tokens = computed_tokens
    status.update_num_hit_chunks(computed_tokens)


def hit_keys(
    scheduler: OffloadingConnectorScheduler, status: RequestOffloadState, group: int, end: int
) -> list[OffloadKey]:
    """Return the chunks of a request's KV cache group at position ``group`` before token ``end``, where what it was
    just told ends: maybe within a block, at a boundary with a key of its own.
    """
    config, keys = scheduler.config.kv_group_configs[group], status.group_states[group].offload_keys
    if status.partial_tail_boundary is None:
        return keys[: -(-end // config.tokens_per_chunk)]
    tokens = scheduler._partial_tail_key_tokens(config, end)
    tail = scheduler._make_boundary_key(status.req, config.group_idx, tokens, status.req_context)
    return [*keys[: end // config.tokens_per_chunk], tail]


def keep_where_prompts_part(
    scheduler: OffloadingConnectorScheduler, status: RequestOffloadState, hit_tokens: int
) -> None:
    """Have vLLM keep a state, and windows, where the attention that tiers hold of a request ends, if they are missing.

    Of a prompt vLLM keeps those of its end, and those of the place where its own cache shows that two prompts part. It
    does not see that tiers have another prompt that begins alike.
    """
    ends = [
        (group.lookup_hit_end_chunk_idx - config.is_eagle_group) * config.tokens_per_chunk
        for config, group in zip(scheduler.config.kv_group_configs, status.group_states, strict=True)
        if config.sliding_window_size_in_chunks is None
    ]
    end = min(ends, default=0)
    if end > hit_tokens:
        status.req.shared_prefix_boundary = max(status.req.shared_prefix_boundary, end)


def forget_keys_behind(state: RequestOffloadState, computed_tokens: int) -> None:
    """Have keys behind these tokens made anew: of a session that goes on, vLLM discards the last token."""
    for config, group in zip(state.config.kv_group_configs, state.group_states, strict=True):
        del group.offload_keys[computed_tokens // config.tokens_per_chunk :]


def offer_again(scheduler: OffloadingConnectorScheduler, job_ids: Iterable[int], lost: Set[OffloadKey]) -> None:
    """Have requests store anew, as they recompute them, the chunks that a load did not bring.

    vLLM passes over the chunks of a load when it stores; it does not know that loads fail.
    """
    for job_id in job_ids:
        job = scheduler._jobs.get(job_id)
        request = request_state(scheduler, job.req_id) if job is not None and not job.is_store else None
        if job is None or request is None or not lost & job.keys:
            continue
        for group in request.group_states:
            first = next((number for number, key in enumerate(group.offload_keys) if key in lost), None)
            if first is not None:
                group.next_stored_chunk_idx = min(group.next_stored_chunk_idx, first)


def forget_descriptions(
    scheduler: OffloadingConnectorScheduler, keys: Iterable[OffloadKey], is_known: Callable[[OffloadKey], bool]
) -> None:
    """Forget what chunks were made of that no tier has any more.

    vLLM assumes that stored chunks also rest in host memory until an event removes them from there, which without a
    memory tier it never is.
    """
    described = scheduler._events_tracker._pending_event_metadata
    for key in keys:
        if key in described and not is_known(key):
            del described[key]


def request_without_tokens(request: Request, request_id: str) -> Request:
    """Return a request that vLLM never sees, with nothing yet but what ``request`` mixes into its block hashes: adapter
    and salt. Tokens that are appended to it give the hashes of a prompt that begins with them.
    """
    return Request(
        request_id,
        [],
        SamplingParams(max_tokens=1),
        None,
        lora_request=request.lora_request,
        cache_salt=request.cache_salt,
        block_hasher=request._block_hasher,
    )


# The ranks' half.


def store_on_every_rank(worker: OffloadingConnectorWorker) -> None:
    """Have this rank store also where the KV is replicated (MLA with TP > 1) and vLLM lets rank 0 store for all."""
    worker._is_store_writer = True


def submit_deferred_stores(worker: OffloadingConnectorWorker) -> None:
    """Submit now the stores that vLLM leaves for the beginning of the next step."""
    jobs = list(worker._unsubmitted_store_jobs)
    worker._unsubmitted_store_jobs.clear()
    for job_id, blocks, ticket in jobs:
        assert worker.worker is not None
        worker.worker.submit_store(job_id, blocks, ticket)


def pop_loading_request(worker: OffloadingConnectorWorker, job_id: int) -> str | None:
    """Return the request that a job loads for, once; None: the job is a store."""
    return worker._load_jobs.pop(job_id, None)


def find_worker(vllm_config: VllmConfig) -> WorkerBase | None:
    """Return vLLM's worker in this process, which tells a connector nothing of itself; None: there is none.

    Looks at everything that the garbage collector knows: 0.2 s of a start.
    """
    for each in gc.get_objects():
        if issubclass(type(each), WorkerBase):
            worker: WorkerBase = each
            if worker.model_config is vllm_config.model_config:
                return worker
    return None


def resets_for_pause() -> bool:
    """Whether vLLM resets caches now because it pauses, sleeps or gives KV memory back, and nobody has asked for it.

    It resets the connector's in the same words as for ``reset_external=true``: who has called tells them apart.
    """
    from vllm.v1.engine.core import EngineCore  # not in the ranks' processes

    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not EngineCore._reset_caches.__code__:
        frame = frame.f_back
    return frame is not None


def models_of_worker(worker: WorkerBase) -> list[torch.nn.Module]:
    """Return the models that a worker has loaded: its own, and that of a draft."""
    draft = worker.get_draft_model() if hasattr(worker, "get_draft_model") else None
    return [model for model in (worker.get_model(), draft) if model is not None]


def finish_before_blocks_change(worker: WorkerBase) -> None:
    """Have connectors finish the stores of reused blocks before the second model runner zeroes or copies into them.

    The first one calls ``handle_preemptions`` before anything else of a step. The second calls it only after
    ``update_requests``, which writes to blocks; a store that still waits would read what was written there.
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
    """Have ``loaded`` called with each LoRA adapter that a worker reads, before anything changes it."""
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
    """Return the scales of an attention layer's quantized KV, exactly; None where it has none."""
    scales = (getattr(layer, name, None) for name in ("_k_scale_float", "_v_scale_float"))
    return [None if scale is None else repr(scale) for scale in scales]
