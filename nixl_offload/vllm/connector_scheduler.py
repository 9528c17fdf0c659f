"""The scheduler's half of our connector: sends our messages, and takes the ranks' reports. Its base, vLLM's half, makes
the jobs and asks our manager.

Threading: the scheduler's thread. Storage errors never raise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from functools import cached_property
from itertools import islice
from typing import Any, Final, cast

from vllm.config import VllmConfig
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import RequestOffloadState
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.base import OffloadingSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from nixl_offload.tiers.slot_tier import SlotTier
from nixl_offload.types import Key
from nixl_offload.vllm.adapters import AdapterName, AdapterTable, adapter_of
from nixl_offload.vllm.hints import Hints
from nixl_offload.vllm.identity import has_lasting_keys
from nixl_offload.vllm.lazy_stores import LazyStores
from nixl_offload.vllm.load_decision import Hit, weight_of
from nixl_offload.vllm.manager import NixlOffloadManager
from nixl_offload.vllm.messages import NOTHING, RankGeometry, StepMetadata, WorkerReport
from nixl_offload.vllm.vllm_internals import resets_for_pause
from nixl_offload.vllm.vllm_scheduler import AdaptedRequestState, Answer, MendedScheduler, Question, notes_of
from nixl_offload.vllm.weights_check import Trust, WeightsCheck

ANSWER_S: Final = 0.1
"""How long a waiting request gets the same answer, without another lookup, if other servers change a tier."""
LOOKUPS_PART: Final = 10
"""Lookups of requests that wait take at most this part of the time: a tenth."""
WAIT_ANSWER_S: Final = 0.01
"""The same, for the answer "not yet"."""
ROOM_S: Final = 0.25
"""How long a long hit waits until memory has taken what its blocks hold."""
IDLE_STEP_S: Final = 0.0005
"""The least time of a step that schedules nothing while storage is at work. When all requests wait for loads, vLLM
steps without a pause. A pump in the scheduler's process then waits 5 ms each time it needs the interpreter (decision
0011)."""
STUCK_STEP_S: Final = 0.005
"""The same after ``STUCK_AFTER_S`` without progress: a tier that hangs must not cost a core."""
STUCK_AFTER_S: Final = 0.25
PATIENCE_S: Final = 3.0
"""An engine without requests steps for background work until that makes no progress for this long. The rest goes on
with the next request. vLLM shuts down only once it has stopped stepping, and kills an engine that takes longer than
some seconds."""


class NixlOffloadScheduler(MendedScheduler):
    """vLLM's scheduler half, which handles failures before completions."""

    def __init__(self, spec: OffloadingSpec, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(spec, vllm_config, kv_cache_config)
        self._progress_s = time.monotonic()
        """When storage last made progress: ranks were given work or reported some, or a request asked."""
        self._waiting: dict[str, bool] = {}
        """Requests that have no blocks yet and have not ended -> whether they wait for the GPU, not for storage."""
        self._running = 0
        """How many requests the last step runs."""
        self._hints = Hints(self.offload_manager, self.config)
        self._world_size = vllm_config.parallel_config.world_size
        self._geometries: dict[int, RankGeometry] = {}
        """By rank, until all ranks have sent theirs."""
        self._is_alone = False
        """Whether no other connector loads beside ours."""
        self._loads = True
        """Whether ``kv_role`` lets us load."""
        self._asked_s = 0.0
        """When the lookup that is under way began."""
        self._steps = 0
        """How many steps were scheduled."""
        self._heard_steps = 0
        """How many steps the ranks have reported."""
        self._allocated: dict[str, tuple[RequestOffloadState, bool]] = {}
        """Requests that were given blocks in this step, and whether we load for them. If not, another connector may."""
        self._doubtful_step = 0
        """The last step in which another connector loads."""
        self._adapters = AdapterTable(self._world_size)
        self._weights = WeightsCheck(self._world_size)
        self._prefix_cache: Callable[[], object] = lambda: None
        """Returns vLLM's prefix cache, which each reset replaces."""
        self._windows = {
            group.group_idx: group.sliding_window_size_in_chunks * group.tokens_per_chunk
            for group in self.config.kv_group_configs
            if group.sliding_window_size_in_chunks is not None
        }
        """By KV cache group with a window: how many of its tokens a hit loads."""

    @cached_property
    def offload_manager(self) -> NixlOffloadManager:
        """The manager, with its own type."""
        assert isinstance(self.manager, NixlOffloadManager)
        return self.manager

    def watch_prefix_cache(self, prefix_cache: Callable[[], object]) -> None:
        """Set the function that returns vLLM's prefix cache. Called before anything is computed."""
        self._prefix_cache = prefix_cache
        self._weights.look(prefix_cache())

    def store_lazily(self, pool: BlockPool, step_tokens: int) -> None:
        """Store chunks only when vLLM is about to evict them from ``pool``. ``step_tokens``: the most in a step."""
        step_blocks = sum(-(-step_tokens // group.tokens_per_block) for group in self.config.kv_group_configs)
        self.lazy = LazyStores(pool, step_blocks, self.state_of)
        self.offload_manager.lazy = self.lazy

    def set_role(self, *, loads: bool, stores: bool) -> None:
        """Set what ``kv_role`` allows: a producer stores only, a consumer loads only."""
        self._loads, self.ever_stores = loads, stores

    def take_geometries(self, sent: Mapping[int, RankGeometry], *, is_start: bool) -> None:
        """Open the tiers once every rank has sent its geometry. ``is_start``: sent before the first step, which waits
        for the tiers. Ranks do that only if no other connector is beside ours. vLLM repeats it when it wakes up.
        """
        self._is_alone |= is_start and bool(sent)
        self._geometries.update(sent)
        if self.offload_manager.serving.is_begun or set(self._geometries) != set(range(self._world_size)):
            return
        ranks = [self._geometries[rank] for rank in range(self._world_size)]
        self._weights.start([rank.weights for rank in ranks])
        self._adapters.of_any_size = ranks[0].plan.is_cut
        self.offload_manager.open(ranks, waits=is_start)
        self._record_progress()  # keeps an engine without requests stepping while the ranks open theirs

    def _record_progress(self) -> None:
        self._progress_s = time.monotonic()

    # A request arrives, and is looked up.

    def on_new_request(self, request: Request) -> None:
        """As vLLM's. A request whose keys name no content is neither stored nor loaded."""
        super().on_new_request(request)
        state = self._state(request)
        if request.lora_request is not None:
            self._awaits_adapter(state)  # hints look at its keys
        self._waiting[request.request_id] = True
        self._refuse_worthless_keys(state)
        extra = request.sampling_params.extra_args if request.sampling_params is not None else None
        if extra and extra.get("diffusion_read_only"):  # vLLM ends it without computing what it has generated
            limit, prompt_tokens = state.max_offload_tokens, request.num_prompt_tokens
            state.max_offload_tokens = prompt_tokens if limit is None else min(limit, prompt_tokens)
        if request.kv_transfer_params:
            self._hints.arrived(request, state)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int, max_num_new_tokens: int | None = None
    ) -> tuple[int | None, bool]:
        """As vLLM's, without tokens that are cheaper to compute than to load.

        vLLM asks in every step until there is room for the request. The answer is kept while nothing changes.
        """
        self.offload_manager.is_paused = False
        if self.offload_manager.catalog.moves.awaits_fetch(request.request_id, time.monotonic()):
            return None, False  # without a limit on its time: that was decided as for a load
        state, question = self._state(request), Question(num_computed_tokens, max_num_new_tokens)
        if self.offload_manager.serving.is_begun:
            self._weights.look(self._prefix_cache())
            self._weights.want(time.monotonic())
            if self._weights.trust is Trust.ASKED or self._awaits_ranks(state):
                return None, False  # the ranks report their weights within a step, and open their tiers within seconds
        known = notes_of(state.req_context).answer if request.lora_request is None else None
        if known is not None and known.question == question and self._holds(known, state):
            found = known.found
        else:
            found = self._look_up(state, question)
            if found is not None:
                is_alone = all(isinstance(tier, SlotTier) for tier in self.offload_manager.catalog.tiers)
                self._answer(state, question, found, float("inf") if is_alone else ANSWER_S)
        if found and not self._may_begin(state, num_computed_tokens, found):
            return None, False
        if found is not None:
            self.keep_where_prompts_part(state, num_computed_tokens + found)
        return found, bool(found)

    def _may_begin(self, state: RequestOffloadState, computed_tokens: int, found: int) -> bool:
        """Whether to take a hit's blocks now: memory has what was in them, or it got ``ROOM_S`` to take it."""
        notes, now_s = notes_of(state.req_context), time.monotonic()
        if self.may_take(state.req.num_tokens):
            notes.room_by_s = 0.0
            return True
        if not notes.room_by_s:
            notes.room_by_s = now_s + ROOM_S
            keys = self.hit_keys(state, computed_tokens + found)[computed_tokens // self.chunk_tokens :]
            self.offload_manager.touch(keys, state.req_context)  # memory gives up others
        return now_s >= notes.room_by_s

    def _awaits_ranks(self, state: RequestOffloadState) -> bool:
        """Whether the ranks still have to open a tier that may have chunks which no serving tier has."""
        manager = self.offload_manager
        if not self._loads or manager.serving.is_whole:
            return False
        state.update_offload_keys()
        keys = [key for group in state.group_states for key in cast("list[Key]", group.offload_keys)]
        return manager.serving.awaits_ranks(key for key in keys if manager.catalog.where((key,)) == [None])

    def _holds(self, known: Answer, state: RequestOffloadState) -> bool:
        """Whether a kept answer still holds, as far as is known without a lookup."""
        manager, catalog = self.offload_manager, self.offload_manager.catalog
        if time.monotonic() >= known.until_s or self._weights.trust is not Trust.SETTLED:
            return False
        if known.awaited is not None:
            return self.is_being_loaded(known.awaited)
        new = catalog.version - known.seen
        holds = known.version == manager.version and known.is_looking <= manager.is_looking
        if not holds or new > len(catalog.recent):
            return False
        notes_of(state.req_context).answer = known._replace(seen=catalog.version)
        return not any(self.concerns(state, keys) for keys in islice(reversed(catalog.recent), new))

    def _answer(
        self, state: RequestOffloadState, question: Question, found: int | None, seconds: float, awaited: Any = None
    ) -> None:
        """Keep an answer for ``seconds``, or until something changes; longer while many long prompts wait."""
        manager, now_s = self.offload_manager, time.monotonic()
        self._waiting[state.req.request_id] = found is not None
        until_s = now_s + max(seconds, LOOKUPS_PART * len(self._waiting) * (now_s - self._asked_s))
        is_looking = found is None and manager.is_looking
        notes_of(state.req_context).answer = Answer(
            question, found, until_s, manager.version, manager.catalog.version, is_looking, awaited
        )

    def _look_up(self, state: RequestOffloadState, question: Question) -> int | None:
        """Return how many tokens are to be loaded; None: not yet."""
        request, computed_tokens, notes = state.req, question.computed_tokens, notes_of(state.req_context)
        self._asked_s = time.monotonic()
        self._record_progress()
        self._refuse_worthless_keys(state)  # a session may have been given an image since
        if request.lora_request is not None and self._awaits_adapter(state):
            return None
        if request.streaming_queue is not None:
            self.forget_keys_behind(state, computed_tokens)  # a session has lost its last token
        # Another connector may bring the whole prompt, which our lookup would only delay.
        params = request.kv_transfer_params
        comes_from_elsewhere = params and params.get("do_remote_prefill") and not self._is_alone
        if not self._loads or self._weights.trust is Trust.BLOCKED or comes_from_elsewhere:
            if self._ask_vllm(state, computed_tokens, 0) is None:
                self.begin_without_hit(state, computed_tokens)  # its stores are pending, but nothing is to be loaded
            return 0
        found = self._ask(state, question, question.most)
        if found is None:
            return None
        wanted = self._tokens_to_load(state, computed_tokens, found)
        if wanted is None:
            self._answer(state, question, None, WAIT_ANSWER_S)
            return None
        if not request.skip_reading_prefix_cache:  # set for ``prompt_logprobs``: no lookup then
            whole_tokens = request.num_tokens // self.chunk_tokens * self.chunk_tokens
            notes.looked_up_tokens = max(found, whole_tokens - computed_tokens)
        if wanted and self._fetches(state, computed_tokens, min(wanted, found)):
            return None
        # Ask again with the limit: vLLM remembers its last answer.
        return found if wanted >= found else self._ask(state, question, self._limit(wanted))

    def _tokens_to_load(self, state: RequestOffloadState, computed_tokens: int, found: int) -> int | None:
        """Return how much of a hit of ``found`` tokens to load; None: not decided yet."""
        keys = self.hit_keys(state, computed_tokens + found)[computed_tokens // self.chunk_tokens :] if found else ()
        tiers = self.offload_manager.where(keys, state.req_context)
        return self.offload_manager.decider.tokens_to_load(
            Hit(tiers, computed_tokens, found, self.chunk_tokens, self._windows),
            notes_of(state.req_context).load,
            time.monotonic(),
            weight=self._weight(state),
        )

    def _fetches(self, state: RequestOffloadState, computed_tokens: int, tokens: int) -> bool:
        """Whether a hit is read into memory while its request waits, so that it holds no blocks meanwhile."""
        manager, name, now_s = self.offload_manager, state.req.request_id, time.monotonic()
        moves, load = manager.catalog.moves, notes_of(state.req_context).load
        if name in moves.fetches or not manager.decider.is_long(load, now_s):
            return False
        keys = self.hit_keys(state, computed_tokens + tokens)[computed_tokens // self.chunk_tokens :]
        self._waiting[name] = False
        return moves.fetch(name, cast("list[Key]", keys), now_s, manager.allowed_tiers(state.req_context))

    def _weight(self, state: RequestOffloadState) -> float:
        return weight_of(sum(self._waiting.values()) - self._waiting.get(state.req.request_id, False), self._running)

    def _ask_vllm(self, state: RequestOffloadState, computed_tokens: int, most: int | None) -> int | None:
        return super().get_num_new_matched_tokens(state.req, computed_tokens, most)[0]

    def _ask(self, state: RequestOffloadState, question: Question, limit: int | None) -> int | None:
        """Ask vLLM for a hit of at most ``limit`` tokens; None: not yet. A request that waits for loads of others, or
        for its own stores, waits as long as computing takes. Then it takes the hit that needs no wait, or none.

        Storage may hang, and with a common system prompt all requests wait for the same load.
        """
        found = self._ask_vllm(state, question.computed_tokens, limit)
        if found is not None:
            return found
        manager, notes, now_s = self.offload_manager, notes_of(state.req_context).load, time.monotonic()
        awaited, before_tokens = self.chunk_being_loaded(state, question.computed_tokens)
        first_token = question.computed_tokens + before_tokens
        if awaited is None and not state.transfer_jobs:
            # It waits for a tier's lookup, or for another request's store, which has a limit of its own.
            most = Hit((), first_token, state.req.num_tokens - first_token, self.chunk_tokens, self._windows)
            tiers, weight = manager.catalog.tiers, self._weight(state)
            if notes.waits and not manager.decider.may_wait(most, tiers, notes, now_s, weight=weight):
                return self._ask(state, question, limit)  # for what is known
            self._answer(state, question, None, WAIT_ANSWER_S)
            return None
        left_s = manager.decider.wait_left_s(
            None if awaited is None else manager.where((awaited,))[0],
            state.req.num_tokens - first_token,
            first_token,
            notes,
            now_s,
        )
        if left_s > 0:
            self._answer(state, question, None, WAIT_ANSWER_S if awaited is None else left_s, awaited)
            return None
        if not state.transfer_jobs:
            least = self._limit(before_tokens)
            least = least if question.most is None else min(least, question.most)
            found = self._ask_vllm(state, question.computed_tokens, least)
            if found is not None:
                return found
        self.begin_without_hit(state, question.computed_tokens)
        return 0

    def _limit(self, tokens: int) -> int:
        """Return the limit with which vLLM finds ``tokens``. With windows vLLM subtracts one token, as at the end of a
        prompt. With recurrent state that would cost a whole chunk.
        """
        return tokens + 1 if self._windows else tokens

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """As vLLM's. The request's lookup is counted now that it is scheduled: once, however often it asked."""
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        self._waiting.pop(request.request_id, None)
        self.offload_manager.catalog.moves.end_fetch(request.request_id)
        state = self._state(request)
        notes = notes_of(state.req_context)
        if notes.answer is not None and not self._is_alone:
            self._allocated[request.request_id] = state, num_external_tokens > 0
        if notes.looked_up_tokens:
            self.offload_manager.metrics.looked_up(notes.looked_up_tokens, notes.load.parts, notes.load.loaded_tokens)
        notes.answer, notes.looked_up_tokens, notes.load.waits_since_s = None, 0, None
        notes.load.waits, notes.room_by_s = True, 0.0  # it may wait again

    # A step is scheduled, and its outcome is heard.

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """As vLLM's, with our moves, and once for each tier with its place.

        A step without work sleeps, to leave the CPU to the threads that are waited for.
        """
        manager, tokens = self.offload_manager, scheduler_output.total_num_scheduled_tokens
        if not tokens and (manager.has_pending_work() or manager.is_looking):
            is_stuck = time.monotonic() - self._progress_s >= STUCK_AFTER_S
            time.sleep(STUCK_STEP_S if is_stuck else IDLE_STEP_S)
        self._steps += 1
        if self._hints.has_pending:
            self._hints.step()
            self._record_progress()
        self._weights.look(self._prefix_cache())
        if tokens:
            self._weights.want(time.monotonic())
            manager.is_paused = False
        self.stores = self.ever_stores and self._weights.trust is Trust.SETTLED and not manager.will_store
        self._hold_stores(scheduler_output.num_scheduled_tokens)
        for new in scheduler_output.scheduled_new_reqs:
            state = self.state_of(new.req_id) if new.num_computed_tokens else None
            if state is not None:  # perhaps a session that continues, which vLLM does not look up
                self._refuse_worthless_keys(state)
                self.forget_keys_behind(state, new.num_computed_tokens)
        manager.decider.prefill.scheduled(scheduler_output, time.monotonic())
        self._running = len(scheduler_output.num_scheduled_tokens)
        meta = super().build_connector_meta(scheduler_output)
        moves, manager.moves = manager.moves, []
        places = {} if manager.serving.is_whole else manager.serving.take_places()
        assert isinstance(meta, OffloadingConnectorMetadata)
        if tokens or moves or places or meta.load_jobs or meta.store_jobs:
            self._record_progress()
        question = self._weights.take_question()
        if not moves and not places and not question:
            return meta
        opening = manager.serving.number
        return StepMetadata(**vars(meta), moves=moves, places=places, opening=opening, weights_question=question)

    def _hold_stores(self, computing: Collection[str]) -> None:
        """Hold back the stores of requests whose blocks another connector may have filled wrongly (decision 0023).

        Another connector in a MultiConnector may load within a step. Whether it failed is known only after the step,
        and then the KV computed from it is wrong, too. So all requests that were given blocks in such a step or later
        are held until its outcome is known.
        """
        if not self._allocated and not self.held:
            return
        for request_id, (state, we_load) in self._allocated.items():
            known_tokens = state.num_locally_computed_tokens
            if not we_load and request_id in computing and state.req.num_computed_tokens > known_tokens:
                self._doubtful_step = self._steps
        self.held = {request_id: until for request_id, until in self.held.items() if until > self._heard_steps}
        if self._doubtful_step > self._heard_steps:
            self.held.update(dict.fromkeys(self._allocated, self._doubtful_step))
        self._allocated.clear()

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Settle tickets first, so that a failed chunk is gone before its request is looked up again."""
        manager, meta = self.offload_manager, connector_output.kv_connector_worker_meta
        manager.decider.prefill.ended(time.monotonic())
        self._heard_steps += 1
        if connector_output.invalid_block_ids:
            self._refuse_unloaded(connector_output.invalid_block_ids)
        if meta is NOTHING:
            return  # as in most steps
        if isinstance(meta, WorkerReport):
            if meta.geometries:
                self.take_geometries(meta.geometries, is_start=False)
            if meta.adapters:
                self._take_adapters(meta.adapters)
            if meta.weights and self._weights.hear(meta.weights):
                self._serve_other_weights()
            if meta.tickets or meta.completed_jobs:
                self._record_progress()
            if meta.ranks:
                manager.take_ranks(meta.ranks)
            if meta.tickets or meta.loads:
                lost = manager.settle(meta.tickets, meta.loads)
                if lost:
                    self.offer_again(meta.completed_jobs, lost)
            if meta.work is not None:
                manager.metrics.worked(meta.work)
        super().update_connector_output(connector_output)

    def spoiled_blocks(self, invalid_blocks: Set[int]) -> set[int]:
        """Return ``invalid_blocks``, and all later blocks of the requests that run on one of them."""
        spoiled = set(invalid_blocks)
        for state in self.states_on(invalid_blocks):
            for group in state.group_states:
                at = next((at for at, block in enumerate(group.block_ids) if block in invalid_blocks), None)
                if at is not None:
                    spoiled.update(block for block in group.block_ids[at:] if block)
        return spoiled

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """As vLLM's."""
        self._waiting.pop(request.request_id, None)
        return super().request_finished(request)

    def has_pending_push_work(self) -> bool:
        """Whether an engine without requests must keep stepping. False once storage makes no progress."""
        awaits = self._hints.has_pending or not self.offload_manager.serving.is_begun
        is_patient = time.monotonic() - self._progress_s < PATIENCE_S
        return is_patient and (awaits or super().has_pending_push_work())

    def take_events(self) -> Iterable[KVCacheEvent]:
        """As vLLM's, with a name for each medium. Forgets the descriptions of removed chunks."""
        manager = self.offload_manager
        if not manager.catalog.changes:
            return
        for event in super().take_events():
            if isinstance(event, BlockStored | BlockRemoved) and event.ownership is not None:
                event.medium, event.ownership = event.ownership, None
            yield event
        removed, manager.removed = manager.removed, []
        self.forget_descriptions(removed, manager.is_known)

    # Weights that may have changed since a cache was reset.

    def reset_cache(self) -> None:
        """As vLLM's. The ranks must report their weights before anything is stored or loaded again. If vLLM pauses or
        sleeps, stored chunks stay: their namespace says which weights they belong to.
        """
        if resets_for_pause():
            self.offload_manager.is_paused = True
        else:
            super().reset_cache()
            self._hints.clear()
        self._weights.suspect()

    def _serve_other_weights(self) -> None:
        """Reopen the tiers for the new weights. Running requests mix old and new weights: they store nothing more."""
        for state in self.states():
            if any(group.block_ids for group in state.group_states):
                notes_of(state.req_context).refuse()
        self.offload_manager.reopen(self._weights.generation)
        self._record_progress()

    # Requests that are not stored, or whose keys hold more than vLLM's.

    def _state(self, request: Request) -> RequestOffloadState:
        state = self.state_of(request.request_id)
        assert state is not None
        return state

    def _awaits_adapter(self, state: RequestOffloadState) -> bool:
        """Put the adapter's content into a request's keys. True: the ranks still have to report it, within a step."""
        if not isinstance(state, AdaptedRequestState) or state.transfer_jobs:
            return False
        assert state.req.lora_request is not None
        name = adapter_of(state.req.lora_request)
        state.adapt(self._adapters.find(name, self._prefix_cache()))
        return self._adapters.may_come(name, self._steps + 1, self._heard_steps)

    def _take_adapters(self, sent: Mapping[int, Mapping[AdapterName, tuple[str | None, ...]]]) -> None:
        """Take the ranks' reports of loaded adapters. Requests that run with a replaced adapter mix both contents, and
        are refused. Requests whose adapter's content was not known are stored from now on.
        """
        cache = self._prefix_cache()
        changed = self._adapters.hear(sent, cache)
        for state in self.states():
            if not isinstance(state, AdaptedRequestState) or state.req.lora_request is None:
                continue
            name, notes = adapter_of(state.req.lora_request), notes_of(state.req_context)
            if name in changed:
                notes.refuse()
            elif notes.adapter is None and not state.transfer_jobs:
                state.adapt(self._adapters.find(name, cache))

    def _refuse_unloaded(self, invalid_blocks: Set[int]) -> None:
        """Store nothing more of requests that run on blocks which a load has not filled.

        Only held requests were given their blocks since that load began; other requests had those block ids before.
        Requests that we load for have no blocks here until their load has ended.
        """
        for state in self.states_on(invalid_blocks):
            if state.req.request_id in self.held:
                notes_of(state.req_context).refuse()

    def _refuse_worthless_keys(self, state: RequestOffloadState) -> None:
        if not has_lasting_keys(state.req):
            notes_of(state.req_context).refuse()
