"""vLLM's scheduler half, changed where it is slow or wrong for us; what else we read of its private state; and what we
note in its record of a request.

This file and ``vllm_internals`` alone touch private names of vLLM: look here first when vLLM moves on.
Threading: the scheduler's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from copy import copy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    GroupOffloadConfig,
    OffloadingConnectorScheduler,
    RequestOffloadState,
)
from vllm.sampling_params import SamplingParams
from vllm.v1.kv_offload.base import (
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    get_offload_block_hash,
    get_offload_group_idx,
    make_offload_key,
)
from vllm.v1.request import Request

from nixl_offload.vllm.load_decision import LoadNotes, Part

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import TransferJob
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput

    from nixl_offload.vllm.adapters import AdapterUse


@dataclass(slots=True)
class RequestNotes:
    """What we note of one request, from its arrival until vLLM forgets it."""

    stores: bool = True
    """Whether its chunks may be stored."""
    loads: bool = True
    """Whether chunks may be loaded for it. Where its keys do not name content, neither is done."""
    has_adapter: bool = False
    adapter: AdapterUse | None = None
    """The LoRA adapter that its keys stand for. None for a request with one: its content is not known yet, and the
    request is neither stored nor loaded."""
    allowed_tiers: frozenset[int] | None = None
    """By position, where ``kv_load_tiers`` restricts them; None: not worked out yet."""
    load: LoadNotes = field(default_factory=LoadNotes)
    looked_up: tuple[int, Sequence[Part], int] | None = None
    """Of the latest lookup that was not counted yet: tokens that were asked about, parts that were found, tokens that
    are loaded. It is counted once the request is scheduled."""

    def refuse(self) -> None:
        """Neither store nor load this request from now on."""
        self.stores = self.loads = False

    @property
    def knows_keys(self) -> bool:
        """Whether the keys stand for what was, or will be, computed."""
        return not self.has_adapter or self.adapter is not None


def notes_of(req_context: ReqContext) -> RequestNotes:
    """Return the notes of a request."""
    notes = req_context.get_state(RequestNotes)
    if notes is None:
        notes = RequestNotes()
        req_context.set_state(notes)
    return notes


class AdaptedRequestState(RequestOffloadState):
    """vLLM's state of a request with a LoRA adapter, whose keys hold the adapter's content once that is known."""

    def adapt(self, use: AdapterUse | None) -> None:
        """Have keys stand for ``use``, and the request offer all its chunks to the store anew. Nothing of it may be
        under way.
        """
        notes = notes_of(self.req_context)
        if notes.has_adapter and use == notes.adapter:
            return
        notes.has_adapter, notes.adapter = True, use
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

    vLLM looks at every running request in every step: with hundreds of them that is a good part of a decoding step.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.stores = True
        """Whether anything is stored in this step."""
        self.ever_stores = True
        """Whether anything is stored in any step."""
        self.held: dict[str, int] = {}
        """Requests that offer nothing to the store yet -> the last step whose outcome they wait for."""
        self._renamed: set[str] = set()
        """Other names of requests that have ended, which vLLM has not signalled yet."""

    # What vLLM's half knows.

    def state_of(self, request_id: str) -> RequestOffloadState | None:
        """Return what vLLM's half knows of a request; None: nothing."""
        return self._req_status.get(request_id)

    def states(self) -> list[RequestOffloadState]:
        """Return what vLLM's half knows of all requests."""
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
        """Return the chunks of a request, in the group that is looked up first, before token ``end``, where the hit
        just found ends: maybe within a block, at a boundary with a key of its own.
        """
        config = self.config.kv_group_configs[self._lookup_groups[0]]
        keys = state.group_states[self._lookup_groups[0]].offload_keys
        if state.partial_tail_boundary is None:
            return keys[: -(-end // config.tokens_per_chunk)]
        tokens = self._partial_tail_key_tokens(config, end)
        tail = self._make_boundary_key(state.req, config.group_idx, tokens, state.req_context)
        return [*keys[: end // config.tokens_per_chunk], tail]

    def is_being_loaded(self, key: OffloadKey) -> bool:
        """Whether some request loads a chunk."""
        return key in (self._chunks_being_loaded or ())

    def chunk_being_loaded(self, state: RequestOffloadState, computed_tokens: int) -> tuple[OffloadKey | None, int]:
        """Return the first chunk of a request behind ``computed_tokens`` that some other request loads, and how many
        tokens lie between; None and 0: there is none.
        """
        begins: dict[int, OffloadKey] = {}
        for config, group in zip(self.config.kv_group_configs, state.group_states, strict=True):
            first = computed_tokens // config.tokens_per_chunk
            for at, key in enumerate(group.offload_keys[first:], first):
                if self.is_being_loaded(key):
                    begins.setdefault(max(0, at * config.tokens_per_chunk - computed_tokens), key)
                    break
        return (begins[min(begins)], min(begins)) if begins else (None, 0)

    # What we have it do otherwise, request by request.

    def begin_without_hit(self, state: RequestOffloadState, computed_tokens: int) -> None:
        """Have a request whose stores are still out be computed behind ``computed_tokens``. vLLM has it wait for them,
        for it loads nothing beside them.
        """
        state.update_offload_keys()
        state.num_locally_computed_tokens = computed_tokens
        state.update_num_hit_chunks(computed_tokens)

    def keep_where_prompts_part(self, state: RequestOffloadState, hit_tokens: int) -> None:
        """Have vLLM keep a state, and windows, where the attention that tiers hold of a request ends, if they are
        missing.

        Of a prompt vLLM keeps those of its end, and those of the place where its own cache shows that two prompts part.
        It does not see that tiers have another prompt that begins alike.
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
        """Have keys behind these tokens made anew: of a session that goes on, vLLM discards the last token."""
        for config, group in zip(self.config.kv_group_configs, state.group_states, strict=True):
            del group.offload_keys[computed_tokens // config.tokens_per_chunk :]

    def offer_again(self, job_ids: Iterable[int], lost: Set[OffloadKey]) -> None:
        """Have requests store anew, as they recompute them, the chunks that a load did not bring.

        vLLM passes over the chunks of a load when it stores; it does not know that loads fail.
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
        """Forget what chunks were made of that no tier has any more.

        vLLM assumes that stored chunks also rest in host memory until an event removes them from there, which without
        a memory tier it never is.
        """
        described = self._events_tracker._pending_event_metadata
        for key in keys:
            if key in described and not is_known(key):
                del described[key]

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
            if group.block_ids[first:] != owned[first : len(group.block_ids)]:
                for at in range(first, len(group.block_ids)):
                    if at >= len(owned) or group.block_ids[at] != owned[at]:
                        group.block_ids[at] = 0

    # vLLM's own methods.

    def on_new_request(self, request: Request) -> None:
        """As vLLM's. A request of that id that has ended is kept under another name, as long as it stores.

        vLLM keeps requests by id, so the new one would take the place of the old, and the report of the old one's
        stores would end the engine. The keys of a request with an adapter hold its content, which is not known yet.
        """
        before = self._req_status.pop(request.request_id, None)
        if before is not None:
            name = f"{request.request_id}\0{self._generate_job_id()}"
            self._req_status[name] = before
            for job_id in before.transfer_jobs:
                self._jobs[job_id].req_id = name
            if not before.finished_signaled:
                self._renamed.add(name)
            if request.request_id in self.held:
                self.held[name] = self.held.pop(request.request_id)
        super().on_new_request(request)
        if request.lora_request is not None:
            state = self._req_status[request.request_id]
            adapted = AdaptedRequestState(state.config, state.req, state.req_context, state.offloading_context)
            self._req_status[request.request_id] = adapted
            adapted.adapt(None)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """As vLLM's. Of an id that has come again, the end is that of the request before."""
        ended = scheduler_output.finished_req_ids
        come_again = {name for name in ended if (state := self._req_status.get(name)) and not state.req.is_finished()}
        if come_again or self._renamed:
            scheduler_output = copy(scheduler_output)
            scheduler_output.finished_req_ids = (ended - come_again) | self._renamed
            self._renamed = set()
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

    def _make_boundary_key(
        self, request: Request, group_idx: int, boundary_tokens: int, req_context: ReqContext
    ) -> OffloadKey:
        key = super()._make_boundary_key(request, group_idx, boundary_tokens, req_context)
        state = self._req_status.get(request.request_id)
        return state.key(key) if isinstance(state, AdaptedRequestState) else key

    def _build_partial_tail_store_jobs(self, scheduler_output: SchedulerOutput) -> dict[int, TransferJob]:
        """As vLLM's, without requests that are held, and within a request's ``max_offload_tokens``: vLLM asserts that
        its tail ends there.
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
        """As vLLM's, and where a prompt ends also what a hit that is shorter by a chunk needs of a draft's window: the
        chunk behind a hit has to be there, and a prompt seldom fills it.
        """
        if group_config.is_eagle_group:
            ends, chunk_tokens = kwargs["reachable_boundaries"], group_config.tokens_per_chunk
            kwargs["reachable_boundaries"] = (*ends, *[end - chunk_tokens for end in ends if end > chunk_tokens])
        return super()._reachable_store_block_mask(group_config, *args, **kwargs)

    def _build_store_jobs(self, scheduler_output: SchedulerOutput) -> dict[int, TransferJob]:
        """As vLLM's, which calls ``prepare_store``; for requests that may have a new chunk."""
        if not self.ever_stores:
            # vLLM would look in each step through all blocks of windows that are still to be stored: none will be.
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
        # A request that has ended may offer blocks that others get in this step. vLLM flushes those of full attention.
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
            # The first question is quick; the second knows that a draft's last chunk may still change.
            has_chunk = storable // config.tokens_per_chunk > stored
            if state.req.is_finished() or (has_chunk and state.storable_chunks(config, group, storable) > stored):
                return True
        return False


def state_like(carrier: RequestOffloadState) -> RequestOffloadState:
    """Return the state of a request that vLLM never sees, with the salt and the adapter of ``carrier``. Tokens that are
    appended to it give the keys of a prompt that begins with them.
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
