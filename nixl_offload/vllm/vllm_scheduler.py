"""vLLM's scheduler half, changed where it is slow or wrong for us. Also reads vLLM's private state, and keeps our notes
in vLLM's record of a request.

This file and ``vllm_internals`` alone touch private names of vLLM: look here first when vLLM moves on.
Threading: the scheduler's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import TransferJob
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    GroupOffloadConfig,
    OffloadingConnectorScheduler,
    RequestOffloadState,
)
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_offload.base import (
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    get_offload_block_hash,
    get_offload_group_idx,
    make_offload_key,
)
from vllm.v1.request import Request, RequestStatus

from nixl_offload.vllm.adapters import AdapterUse
from nixl_offload.vllm.lazy_stores import LazyStores, PutOff
from nixl_offload.vllm.load_decision import LoadNotes


class Question(NamedTuple):
    """A question of vLLM about a request."""

    computed_tokens: int
    """Tokens that the GPU's cache has."""
    most: int | None
    """The most tokens that may be loaded; None: no limit."""


class Answer(NamedTuple):
    """The answer to a request that has no blocks yet."""

    question: Question
    found: int | None
    """Tokens to load; None: not known yet."""
    until_s: float
    version: int
    """``NixlOffloadManager.version`` at that time."""
    seen: int
    """``Catalog.version`` when it last held."""
    is_looking: bool
    """Whether some tier was looking. Once none is, the answer no longer holds."""
    awaited: OffloadKey | None
    """The chunk that another request is loading. The answer holds until that load ends."""


@dataclass(slots=True)
class RequestNotes:
    """Our notes on one request, from its arrival until vLLM forgets it."""

    stores: bool = True
    """Whether its chunks may be stored."""
    loads: bool = True
    """Whether chunks may be loaded for it. Both are False if its keys do not name content."""
    adapter: AdapterUse | None = None
    """The LoRA adapter that its keys stand for; None: it has none, or its content is not known."""
    knows_keys: bool = True
    """Whether the keys stand for what was, or will be, computed; False while an adapter's content is not known: the
    request is neither stored nor loaded."""
    load: LoadNotes = field(default_factory=LoadNotes)
    looked_up_tokens: int = 0
    """Tokens asked for in the latest lookup, which is counted once the request is scheduled; 0: it was counted."""
    room_by_s: float = 0.0
    """Until when a hit waits for ``may_take``; 0.0: it does not yet."""
    answer: Answer | None = None
    """The answer to the latest lookup, until the request is given blocks."""

    def refuse(self) -> None:
        """Neither store nor load this request from now on."""
        self.stores = self.loads = False


def notes_of(req_context: ReqContext) -> RequestNotes:
    """Return the notes of a request."""
    notes = req_context.get_state(RequestNotes)
    if notes is None:
        notes = RequestNotes()
        req_context.set_state(notes)
    return notes


class AdaptedRequestState(RequestOffloadState):
    """vLLM's state of a request with a LoRA adapter. Its keys hold the adapter's content once that is known."""

    def adapt(self, use: AdapterUse | None) -> None:
        """Make the keys stand for ``use``, and offer all chunks to the store again. No job may be under way."""
        notes = notes_of(self.req_context)
        if (notes.adapter, notes.knows_keys) == (use, use is not None):
            return
        notes.adapter, notes.knows_keys = use, use is not None
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
        """Return vLLM's ``key`` with the adapter's content in it; unchanged if that is not known."""
        use = notes_of(self.req_context).adapter
        if use is None:
            return key
        own = make_offload_key(use.tag(get_offload_block_hash(key)), get_offload_group_idx(key))
        position = self.req_context.get_offload_key_position(key)
        if position is not None:
            self.req_context.set_offload_key_position(own, position)
        return own


class MendedScheduler(OffloadingConnectorScheduler):
    """vLLM's scheduler half. When it stores, it looks only at requests that have completed a chunk, or ended.

    vLLM looks at every running request in every step. With hundreds of them, this takes a good part of a decoding step.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.stores = True
        """Whether anything is stored in this step."""
        self.ever_stores = True
        """Whether anything is stored in any step."""
        self.held: dict[str, int] = {}
        """Requests that may not store yet -> the step whose outcome they wait for."""
        self.lazy: LazyStores | None = None
        """Chunks that are stored when vLLM is about to evict them; None: all are stored at once."""

    # What vLLM's half knows.

    def state_of(self, request_id: str) -> RequestOffloadState | None:
        """Return vLLM's state of a request; None: there is none."""
        return self._req_status.get(request_id)

    def states(self) -> list[RequestOffloadState]:
        """Return vLLM's states of all requests."""
        return list(self._req_status.values())

    def states_on(self, block_ids: Set[int]) -> list[RequestOffloadState]:
        """Return the requests that were scheduled on any of these blocks."""
        return [
            state
            for state in self._req_status.values()
            if any(not block_ids.isdisjoint(group.block_ids) for group in state.group_states)
        ]

    @property
    def chunk_tokens(self) -> int:
        """Tokens in a chunk of the KV cache group that a request is looked up in first."""
        return self.config.kv_group_configs[self._lookup_groups[0]].tokens_per_chunk

    def hit_keys(self, state: RequestOffloadState, end: int) -> list[OffloadKey]:
        """Return the request's keys before token ``end``, where the hit just found ends, in the group that is looked up
        first. If the hit ends within a block, the last key is that of the boundary.
        """
        config = self.config.kv_group_configs[self._lookup_groups[0]]
        keys = state.group_states[self._lookup_groups[0]].offload_keys
        if state.partial_tail_boundary is None:
            return keys[: -(-end // config.tokens_per_chunk)]
        tokens = self._partial_tail_key_tokens(config, end)
        tail = self._make_boundary_key(state.req, config.group_idx, tokens, state.req_context)
        return [*keys[: end // config.tokens_per_chunk], tail]

    def concerns(self, state: RequestOffloadState, keys: Iterable[bytes]) -> bool:
        """Whether any of ``keys`` is the request's."""
        return not state.req_context._offload_key_positions.keys().isdisjoint(keys)

    def may_take(self, tokens: int) -> bool:
        """Whether vLLM may take blocks for ``tokens`` now without losing what ``lazy`` has put off."""
        blocks = sum(-(-tokens // config.tokens_per_block) for config in self.config.kv_group_configs)
        return self.lazy is None or self.lazy.is_clear(blocks, self._block_id_to_pending_jobs)

    def is_being_loaded(self, key: OffloadKey) -> bool:
        """Whether some request is loading the chunk."""
        return key in (self._chunks_being_loaded or ())

    def chunk_being_loaded(self, state: RequestOffloadState, computed_tokens: int) -> tuple[OffloadKey | None, int]:
        """Return the first chunk after ``computed_tokens`` that another request is loading, and the number of tokens
        in between; (None, 0) if there is none.
        """
        begins: dict[int, OffloadKey] = {}
        for config, group in zip(self.config.kv_group_configs, state.group_states, strict=True):
            first = computed_tokens // config.tokens_per_chunk
            for at, key in enumerate(group.offload_keys[first:], first):
                if self.is_being_loaded(key):
                    begins.setdefault(max(0, at * config.tokens_per_chunk - computed_tokens), key)
                    break
        return (begins[min(begins)], min(begins)) if begins else (None, 0)

    # Our changes to single requests.

    def begin_without_hit(self, state: RequestOffloadState, computed_tokens: int) -> None:
        """Start computing after ``computed_tokens``. vLLM would wait for pending stores of the request."""
        state.update_offload_keys()
        state.num_locally_computed_tokens = computed_tokens
        state.update_num_hit_chunks(computed_tokens)

    def keep_where_prompts_part(self, state: RequestOffloadState, hit_tokens: int) -> None:
        """Keep recurrent state and windows at the end of the full-attention prefix that tiers hold, if they are missing
        there. vLLM keeps them at the end of a prompt, and where its own cache shows that two prompts part. It does not
        know the prompts that only tiers have.
        """
        ends = [
            (group.lookup_hit_end_chunk_idx - config.is_eagle_group) * config.tokens_per_chunk
            for config, group in zip(self.config.kv_group_configs, state.group_states, strict=True)
            if config.sliding_window_size_in_chunks is None
        ]
        end = min(ends, default=0)
        if end > hit_tokens:
            state.req.shared_prefix_boundary = max(state.req.shared_prefix_boundary, end)

    def forget_keys_behind(self, state: RequestOffloadState, computed_tokens: int) -> None:
        """Drop the keys after these tokens. When a session continues, vLLM discards its last token."""
        for config, group in zip(self.config.kv_group_configs, state.group_states, strict=True):
            del group.offload_keys[computed_tokens // config.tokens_per_chunk :]

    def offer_again(self, job_ids: Iterable[int], lost: Set[OffloadKey]) -> None:
        """Let requests store the chunks that a load did not bring, once they have recomputed them.

        When vLLM stores, it skips all chunks that were to be loaded: it does not expect loads to fail.
        """
        for job_id in job_ids:
            job = self._jobs.get(job_id)
            state = self.state_of(job.req_id) if job is not None and not job.is_store else None
            if job is None or state is None or not lost & job.keys:
                continue
            for group in state.group_states:
                first = next((number for number, key in enumerate(group.offload_keys) if key in lost), None)
                if first is not None:
                    group.next_stored_chunk_idx = min(group.next_stored_chunk_idx, first)

    def forget_descriptions(self, keys: Iterable[OffloadKey], is_known: Callable[[OffloadKey], bool]) -> None:
        """Forget vLLM's descriptions of chunks that no tier has any more. vLLM keeps a description until an event says
        that its chunk has left host memory. Without a memory tier no such event comes.
        """
        described = self._events_tracker._pending_event_metadata
        for key in keys:
            if key in described and not is_known(key):
                del described[key]

    def check_blocks(self, request_id: str, block_ids: Sequence[Sequence[int]]) -> None:
        """Zero the ids of blocks that the request no longer owns, so nothing is stored from them. ``block_ids``: vLLM's
        own table, by KV cache group. The table that we inherit only grows. vLLM's own drops blocks that slid out of a
        window. After a reset all chunks are offered again.
        """
        state = self._req_status.get(request_id)
        if state is None:
            return
        has_ended = state.req.is_finished()  # vLLM may then offer again what it has offered before
        for config, group in zip(self.config.kv_group_configs, state.group_states, strict=True):
            owned = block_ids[config.group_idx]
            first = 0 if has_ended else group.next_stored_chunk_idx * self.config.blocks_per_chunk
            if group.block_ids[first:] != owned[first : len(group.block_ids)]:
                for at in range(first, len(group.block_ids)):
                    if at >= len(owned) or group.block_ids[at] != owned[at]:
                        group.block_ids[at] = 0

    # vLLM's own methods.

    def on_new_request(self, request: Request) -> None:
        """As vLLM's. A request with an adapter gets keys with the adapter's content, which is not known yet.

        If an earlier request of the same id still stores, it is kept under another name until that ends. In vLLM the
        report of its stores would end the engine. The new request is neither stored nor loaded: vLLM takes a late token
        of the earlier one for its own.
        """
        before = self._req_status.pop(request.request_id, None)
        super().on_new_request(request)
        state = self._req_status[request.request_id]
        if request.lora_request is not None:
            state = AdaptedRequestState(state.config, state.req, state.req_context, state.offloading_context)
            self._req_status[request.request_id] = state
            state.adapt(None)
        if before is not None:
            notes_of(state.req_context).refuse()
            if before.transfer_jobs:
                before.finished_signaled = True
                name = f"{request.request_id}\0{self._generate_job_id()}"
                self._req_status[name] = before
                for job_id in before.transfer_jobs:
                    self._jobs[job_id].req_id = name

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """As vLLM's. If an id was reused, its finish signal is for the earlier request."""
        ended = scheduler_output.finished_req_ids
        reused = {name for name in ended if (state := self._req_status.get(name)) and not state.req.is_finished()}
        if reused:
            scheduler_output = copy(scheduler_output)
            scheduler_output.finished_req_ids = ended - reused
        return super().build_connector_meta(scheduler_output)

    def reset_cache(self) -> None:
        """As vLLM's, which fails at a second reset without a step in between. Jobs that the first flushes still are."""
        flushed, self._current_batch_jobs_to_flush = self._current_batch_jobs_to_flush, set()
        super().reset_cache()
        self._current_batch_jobs_to_flush |= flushed

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """As vLLM's, which marks the chunk in which a loaded tail ends as stored. We store it once it is full."""
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        state = self._req_status.get(request.request_id)
        if state is not None and num_external_tokens:
            loaded_tokens = state.num_locally_computed_tokens + num_external_tokens
            for at in self._full_attention_groups:
                group, chunk_tokens = state.group_states[at], self.config.kv_group_configs[at].tokens_per_chunk
                first = 0 if self.lazy else loaded_tokens // chunk_tokens  # memory may give up what it served
                group.next_stored_chunk_idx = min(group.next_stored_chunk_idx, first)

    def _maximal_prefix_lookup(self, keys: Iterable[OffloadKey], req_context: ReqContext, *where: Any) -> int | None:
        """As vLLM's, which asks key by key, but with one question for the hits that are sure."""
        keys, (request, config, first) = list(keys), where
        hits: int = cast("Any", self).offload_manager.leading_hits(keys, req_context)
        if self._events_tracker.self_describing_enabled:
            for at, key in enumerate(keys[:hits], first):
                self._events_tracker.record_lookup(request, config, at, key)
        more = super()._maximal_prefix_lookup(keys[hits:], req_context, request, config, first + hits)
        return None if more is None else hits + more

    def _make_boundary_key(
        self, request: Request, group_idx: int, boundary_tokens: int, req_context: ReqContext
    ) -> OffloadKey:
        key = super()._make_boundary_key(request, group_idx, boundary_tokens, req_context)
        state = self._req_status.get(request.request_id)
        return state.key(key) if isinstance(state, AdaptedRequestState) else key

    def _build_partial_tail_store_jobs(self, scheduler_output: SchedulerOutput) -> dict[int, TransferJob]:
        """As vLLM's, but skips held requests, and tails beyond a request's ``max_offload_tokens``: vLLM asserts that
        there are none.
        """
        if not self.stores:
            return {}
        table = scheduler_output.kv_connector_block_state
        if table is not None and table.boundary_state_offloads:
            offered = {}
            for name, tails in table.boundary_state_offloads.items():
                state = self._req_status.get(name)
                if state is not None and name not in self.held:
                    limit = state.max_offload_tokens
                    offered[name] = tails if limit is None else [tail for tail in tails if tail[2] <= limit]
            scheduler_output = copy(scheduler_output)
            scheduler_output.kv_connector_block_state = replace(table, boundary_state_offloads=offered)
        return super()._build_partial_tail_store_jobs(scheduler_output)

    def _reachable_store_block_mask(self, group_config: GroupOffloadConfig, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's. For a draft model's group, also keep the window that a hit one chunk shorter needs: a hit needs
        the chunk after it, and a prompt seldom fills that chunk.
        """
        if group_config.is_eagle_group:
            ends, chunk_tokens = kwargs["reachable_boundaries"], group_config.tokens_per_chunk
            kwargs["reachable_boundaries"] = (*ends, *[end - chunk_tokens for end in ends if end > chunk_tokens])
        return super()._reachable_store_block_mask(group_config, *args, **kwargs)

    def _build_store_jobs(self, scheduler_output: SchedulerOutput) -> dict[int, TransferJob]:
        """As vLLM's, which calls ``prepare_store``: only for requests that may have a new chunk, and what is due."""
        jobs, lazy = self._build_offered_jobs(scheduler_output), self.lazy
        if self.stores and lazy and (due := lazy.due(len(self._current_batch_allocated_block_ids))):
            jobs |= self._build_due_jobs({chunk.key: chunk for chunk in due}, lazy, copy(scheduler_output))
        return jobs

    def _build_due_jobs(
        self, due: Mapping[OffloadKey, PutOff], lazy: LazyStores, output: SchedulerOutput
    ) -> dict[int, TransferJob]:
        """Have vLLM store chunks for a made-up request that has ended: it then fences their blocks."""
        most_tokens = max(config.tokens_per_chunk for config in self.config.kv_group_configs) * len(due)
        name = f"\0due-{self._generate_job_id()}"
        request = Request(name, [0] * most_tokens, SamplingParams(max_tokens=1), None)
        request.status = RequestStatus.FINISHED_STOPPED
        state = RequestOffloadState(self.config, request, ReqContext(name), RequestOffloadingContext())
        for config, group in zip(self.config.kv_group_configs, state.group_states, strict=True):
            chunks = [chunk for key, chunk in due.items() if get_offload_group_idx(key) == config.group_idx]
            group.offload_keys = [chunk.key for chunk in chunks]
            group.block_ids = [block for chunk in chunks for block in chunk.block_ids]
            if config.sliding_window_size_in_chunks is not None:  # a hit needs these chunks as long as the others
                touched = [make_offload_key(get_offload_block_hash(key), config.group_idx) for key in due]
                self.manager.touch(touched, state.req_context)
        state.finished_signaled = True
        self._req_status[name] = state
        output.num_scheduled_tokens, output.finished_req_ids = {}, {name}
        jobs = super()._build_store_jobs(output)
        stored = {key for job_id in jobs for key in self._jobs[job_id].keys}
        for job in (self._jobs[job_id] for job_id in jobs):  # prompts that part within a chunk share its first blocks
            job.deferred_fence_block_ids = list(dict.fromkeys(job.deferred_fence_block_ids or ()))
        for key, chunk in due.items():
            if key not in stored and not cast("Any", self).offload_manager.is_known(key):
                lazy.put_back(chunk)
        if not jobs:
            del self._req_status[name]
        return jobs

    def _build_offered_jobs(self, scheduler_output: SchedulerOutput) -> dict[int, TransferJob]:
        if not self.ever_stores:
            # Mark all as stored. Else vLLM would look through all window blocks in each step.
            for request_id in scheduler_output.num_scheduled_tokens:
                state = self._req_status.get(request_id)
                for group in state.group_states if state is not None else ():
                    group.next_stored_chunk_idx = len(group.block_ids) // self.config.blocks_per_chunk
        if not self.stores:
            return {}
        worthwhile = {
            name: tokens
            for name, tokens in scheduler_output.num_scheduled_tokens.items()
            if name not in self.held and self._may_store(name, tokens)
        }
        if not worthwhile and not scheduler_output.finished_req_ids:
            return {}
        table = getattr(scheduler_output, "kv_connector_block_state", None)  # vLLM's own tests leave it out
        if table is not None:
            for request_id in worthwhile:
                if (block_ids := table.get_block_ids(request_id)) is not None:
                    self.check_blocks(request_id, block_ids)
        output = copy(scheduler_output)
        output.num_scheduled_tokens = worthwhile
        output.finished_req_ids = output.finished_req_ids.difference(self.held)
        jobs = super()._build_store_jobs(output)
        # A finished request may store from blocks reallocated in this step. vLLM flushes only full attention.
        for job_id, job in jobs.items():
            reused = self._current_batch_allocated_block_ids.intersection(self._jobs[job_id].fenced_block_ids or ())
            if reused and self._req_status[job.req_id].req.is_finished():
                self._current_batch_jobs_to_flush.add(job_id)
        return jobs

    def _may_store(self, request_id: str, tokens: int) -> bool:
        """Whether a request that computes ``tokens`` in this step may have something to store."""
        state = self._req_status.get(request_id)
        if state is None:
            return False
        storable = self._calc_num_offloadable_tokens(state, state.req.num_computed_tokens + tokens)
        for config, group in zip(self.config.kv_group_configs, state.group_states, strict=True):
            stored = group.next_stored_chunk_idx
            # The first test is quick. The second leaves out a draft's last chunk, which may still change.
            has_chunk = storable // config.tokens_per_chunk > stored
            if state.req.is_finished():
                return True
            if has_chunk and state.storable_chunks(config, group, storable) > stored:
                tiers = cast("Any", self).offload_manager.catalog.tiers
                return all(tier.answered(request_id) is not None for tier in tiers)
        return False


def state_like(carrier: RequestOffloadState) -> RequestOffloadState:
    """Return the state of a made-up request with the salt and the adapter of ``carrier``. vLLM never sees it. Append a
    prompt's tokens to it to get the prompt's keys.
    """
    request = Request(
        f"hint-of-{carrier.req.request_id}",
        [],
        SamplingParams(max_tokens=1),
        None,
        lora_request=carrier.req.lora_request,
        cache_salt=carrier.req.cache_salt,
        block_hasher=carrier.req._block_hasher,
    )
    state = type(carrier)(carrier.config, request, ReqContext(request.request_id), RequestOffloadingContext())
    if isinstance(state, AdaptedRequestState):
        state.adapt(notes_of(carrier.req_context).adapter)
    return state
