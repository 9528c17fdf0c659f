"""The scheduler's half without an engine: a real manager over real tiers in directories of the test, asked as vLLM
asks it. Tests report for the ranks, and so decide how each job ends. No bytes are moved.

Threading: one test's thread. Ownership: ``Rig`` owns the manager, whose tiers have threads until ``close``.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import RequestOffloadState, _create_req_context
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock, get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_offload.base import OffloadKey, ReqContext, ScheduleEndContext
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from nixl_offload.catalog.catalog import LoadTicket, MoveTicket, StoreTicket
from nixl_offload.chunk.shards import uncut_plan
from nixl_offload.config import Config, parse_config
from nixl_offload.types import Location, Outcome
from nixl_offload.vllm.connector import NixlOffloadSpec
from nixl_offload.vllm.connector_scheduler import NixlOffloadScheduler
from nixl_offload.vllm.load_decision import LoadNotes
from nixl_offload.vllm.manager import NixlOffloadManager
from nixl_offload.vllm.messages import (
    NOTHING,
    LoadSample,
    RankGeometry,
    RankStatus,
    TicketReport,
    TicketSpec,
    WorkerReport,
)

SLOT = 8192
BLOCK_TOKENS = 64
BLOCKS_PER_CHUNK = 4
CHUNK_TOKENS = BLOCK_TOKENS * BLOCKS_PER_CHUNK


def memory_tier(slots: int = 8, **fields: Any) -> dict[str, Any]:
    return {"kind": "memory", "capacity": slots * SLOT, **fields}


def slab_tier(path: Path, **fields: Any) -> dict[str, Any]:
    return {"kind": "slab", "path": str(path), "capacity": "64MiB", **fields}


def tree_tier(path: Path, **fields: Any) -> dict[str, Any]:
    return {"kind": "shared_dir", "path": str(path), "capacity": "1GiB", **fields}


def config_of(*tiers: Mapping[str, Any], **fields: Any) -> Config:
    """Return a checked config."""
    return parse_config({"staging": "1MiB", "tiers": [dict(tier) for tier in tiers], **fields})


def three_tiers(path: Path, slots: int = 8, **fields: Any) -> Config:
    """Memory, slab and tree: the tree stands where a config file would say a bucket, for it needs no server."""
    chain = config_of(memory_tier(slots), slab_tier(path / "slab"), **fields)
    tree = config_of(tree_tier(path / "tree"))
    return chain.model_copy(update={"tiers": (*chain.tiers, *tree.tiers)})


def kv_cache_config(block_tokens: int = BLOCK_TOKENS) -> Any:
    """Return as much of a KVCacheConfig as our half and vLLM's scheduler half read: one group of full attention."""
    spec = FullAttentionSpec(block_size=block_tokens, num_kv_heads=1, head_size=8, dtype=torch.float32)
    group = SimpleNamespace(kv_cache_spec=spec, layer_names=["layer"], is_eagle_group=False)
    return SimpleNamespace(kv_cache_groups=[group], cache_hit_alignment_tokens=None)


def vllm_config(world_size: int = 1) -> Any:
    """Return as much of a VllmConfig as the namespace and vLLM's scheduler half read."""
    hf_config = SimpleNamespace(to_dict=lambda: {"layers": 1})
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model="org/model",
            hf_config=hf_config,
            dtype="float32",
            quantization=None,
            model_weights="",
            revision=None,
            tokenizer=None,
            tokenizer_revision=None,
            multimodal_config=None,
        ),
        load_config=SimpleNamespace(load_format="auto"),
        cache_config=SimpleNamespace(
            prefix_caching_hash_algo="sha256", prefix_cache_retention_interval=None, enable_prefix_caching=True
        ),
        parallel_config=SimpleNamespace(
            world_size=world_size,
            tensor_parallel_size=world_size,
            pipeline_parallel_size=1,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
            data_parallel_size=1,
            data_parallel_index=0,
            enable_elastic_ep=False,
            elastic_ep_max_dp_size=1,
        ),
        speculative_config=None,
    )


def offloading_config(
    world_size: int = 1, *, events: bool = True, block_tokens: int = BLOCK_TOKENS, chunk_blocks: int = BLOCKS_PER_CHUNK
) -> OffloadingConfig:
    """Return what vLLM would normalise its config to."""
    return OffloadingConfig(
        groups=(OffloadingGroupConfig(tokens_per_block=block_tokens, layer_names=("layer",), group_id=0),),
        worker_kv_bytes_per_block=SLOT // chunk_blocks,
        enable_kv_cache_events=events,
        extra_config={},
        engine_id="engine",
        model=OffloadingModelConfig(name="org/model", dtype="float32"),
        cache=OffloadingCacheConfig(tokens_per_hash=block_tokens, blocks_per_chunk=chunk_blocks),
        parallel=OffloadingParallelConfig(
            rank=0,
            world_size=world_size,
            tp_size=world_size,
            pp_size=1,
            pcp_size=1,
            dcp_size=1,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=False,
        ),
    )


def ranks(count: int = 1, groups: int = 1) -> list[RankGeometry]:
    """Return the geometries of ``count`` equal ranks with ``groups`` KV cache groups."""
    plan, slots = uncut_plan(count, groups), (SLOT,) * groups
    return [RankGeometry(rank, slots, f"{rank:064x}", plan, ("CPU_ATTN",), weights="ab") for rank in range(count)]


def ranks_open(manager: NixlOffloadManager, count: int = 1) -> None:
    """Report for ``count`` ranks that they have opened their tiers."""
    manager.serving.take_places()
    every = frozenset(range(8))
    manager.take_ranks({rank: RankStatus(every) for rank in range(count)})


def wait_for_tiers(manager: NixlOffloadManager) -> None:
    """Take over opened tiers until each is open here or has failed."""
    until_s = time.monotonic() + 30.0
    while not (entries := manager.serving._entries) or any(e.tier is None and e.opening.error is None for e in entries):
        assert time.monotonic() < until_s
        manager.serving.update()
        time.sleep(0.01)


def observe(manager: NixlOffloadManager, load_s: float, *, tier: int = 0, prefill_s: float = 0.01) -> None:
    """Observe some loads of a chunk from ``tier``, and prefills of its tokens, that took this long."""
    for number in range(5):
        manager.decider.begin_load(-1, [Location(tier, 0, SLOT)], LoadNotes(), time.monotonic())
        manager.decider.observe_loads([LoadSample(tier, load_s, False, -1)])
        manager.decider.end_load(-1, time.monotonic())
        manager.decider.prefill.observe(CHUNK_TOKENS, prefill_s, number * CHUNK_TOKENS)


def step_of(tokens: Mapping[str, int] | None = None, **fields: Any) -> SchedulerOutput:
    """Return a step of vLLM. ``tokens``: how many each request computes. ``fields``: of vLLM's ``SchedulerOutput``."""
    output = SchedulerOutput.make_empty()
    output.num_scheduled_tokens = dict(tokens or {})
    output.total_num_scheduled_tokens = sum(output.num_scheduled_tokens.values())
    for field, value in fields.items():
        setattr(output, field, value)
    return output


def all_done(meta: Any) -> dict[str, Any]:
    """Return the report, as fields, that a rank has done all that a step's message asks for."""
    jobs = meta.load_jobs | meta.store_jobs
    specs = [spec for job in jobs.values() for spec in (job.src_spec, job.dst_spec) if isinstance(spec, TicketSpec)]
    tickets = [*(spec.ticket.ticket for spec in specs), *(move.ticket for move in getattr(meta, "moves", ()))]
    return {"completed_jobs": dict.fromkeys(jobs, 1), "tickets": {ticket: TicketReport() for ticket in tickets}}


def allocated(*groups: Sequence[int]) -> KVCacheBlocks:
    """Return allocated blocks as vLLM does, by KV cache group, from their numbers."""
    return KVCacheBlocks(tuple([KVCacheBlock(number) for number in group] for group in groups))


def key(number: int) -> OffloadKey:
    return OffloadKey(number.to_bytes(32, "big") + bytes(4))


def keys(*numbers: int) -> list[OffloadKey]:
    return [key(number) for number in numbers]


def request(name: str = "request", load_tiers: Any = None) -> ReqContext:
    """Return vLLM's context of a request. ``load_tiers``: its ``kv_load_tiers``."""
    params = None if load_tiers is None else {"kv_load_tiers": load_tiers}
    return _create_req_context(SimpleNamespace(request_id=name, kv_transfer_params=params, kv_hints=None))


class Rig:
    """Our scheduler's half in service, asked and stepped as vLLM does, and the ranks' reports. Numbers name chunks that
    no request has.
    """

    def __init__(
        self,
        config: Config | None = None,
        world_size: int = 1,
        *,
        events: bool = True,
        is_begun: bool = True,
        is_open: bool = True,
        offloading: OffloadingConfig | None = None,
        caches: Any = None,
        vllm: Any = None,
    ) -> None:
        """``config``: by default a memory tier. ``is_begun``, ``is_open``: whether the ranks have sent their geometries
        and opened their tiers. The last three are vLLM's configs, instead of the default ones.
        """
        init_none_hash(sha256)
        offloading = offloading or offloading_config(world_size, events=events)
        config, caches = config or config_of(memory_tier(64)), caches or kv_cache_config()
        vllm = vllm or vllm_config(world_size)
        self.spec = NixlOffloadSpec(offloading, config_file=config, vllm_config=vllm, kv_cache_config=caches)
        self.scheduler = NixlOffloadScheduler(self.spec, vllm, caches)
        self.manager = self.scheduler.offload_manager
        if is_begun:
            self.manager.open(ranks(world_size, len(offloading.groups)))
        if is_open:
            ranks_open(self.manager, world_size)
        self._world_size = world_size
        self._hash_tokens = offloading.cache.tokens_per_hash
        self._scheduled: list[Any] = []

    def close(self) -> None:
        """Shut the manager down, as vLLM does after the ranks have ended. Idempotent."""
        self.manager.shutdown()

    # Requests, and steps of the scheduler

    def arrive(self, name: str, tokens: Sequence[int], **fields: Any) -> Request:
        """Add a request with these tokens; ``fields`` are ``request_of``'s."""
        request = request_of(name, tokens, hash_tokens=self._hash_tokens, **fields)
        self.scheduler.on_new_request(request)
        self.state(name).update_offload_keys()
        return request

    def state(self, name: str) -> RequestOffloadState:
        state = self.scheduler.state_of(name)
        assert state is not None
        return state

    def keys(self, name: str) -> list[OffloadKey]:
        """Return the chunks of a request."""
        [group] = self.state(name).group_states
        return group.offload_keys

    def ask(self, name: str, computed: int = 0, most: int | None = None) -> tuple[int | None, bool]:
        return self.scheduler.get_num_new_matched_tokens(self.state(name).req, computed, most)

    def allocate(self, name: str, *block_ids: Sequence[int], loaded_tokens: int = 0) -> None:
        """Give blocks of each KV cache group to a request. Without a load, it is scheduled in the next step."""
        request = self.state(name).req
        self.scheduler.update_state_after_alloc(request, allocated(*block_ids), loaded_tokens)
        if not loaded_tokens:
            self._scheduled.append(
                SimpleNamespace(req_id=name, block_ids=block_ids, num_computed_tokens=request.num_computed_tokens)
            )

    def step(self, tokens: Mapping[str, int] | None = None, **fields: Any) -> Any:
        """Schedule a step. ``tokens`` and ``fields``: as for ``step_of``."""
        output = step_of(tokens, **fields)
        output.scheduled_new_reqs, self._scheduled = self._scheduled, []
        return self.scheduler.build_connector_meta(output)

    def hear(self, *, invalid_blocks: Collection[int] = (), **report: Any) -> None:
        """End the oldest step with this report of the ranks."""
        meta = WorkerReport(**report) if report else NOTHING
        output = KVConnectorOutput(kv_connector_worker_meta=meta, invalid_block_ids=set(invalid_blocks))
        self.scheduler.update_connector_output(output)

    # What vLLM asks of the manager

    def offer(self, *numbers: int) -> StoreTicket:
        """Offer computed chunks; return the ticket of the ones taken."""
        return self.offer_keys(keys(*numbers))

    def offer_keys(self, keys: Sequence[OffloadKey]) -> StoreTicket:
        output = self.manager.prepare_store(keys, request("stores"))
        assert output is not None
        spec = output.store_spec
        assert isinstance(spec, TicketSpec)
        assert isinstance(spec.ticket, StoreTicket)
        assert list(spec.ticket.keys) == output.keys_to_store
        return spec.ticket

    def store(self, *numbers: int) -> None:
        """Store all of ``numbers``."""
        self.store_keys(keys(*numbers))

    def store_keys(self, keys: Sequence[OffloadKey]) -> None:
        ticket = self.offer_keys(keys)
        assert ticket.keys == tuple(keys)
        self.report(ticket.ticket)

    def load(self, *numbers: int, context: ReqContext | None = None) -> LoadTicket:
        """Begin a load."""
        ticket = self.manager.prepare_load(keys(*numbers), context or request()).ticket
        assert isinstance(ticket, LoadTicket)
        return ticket

    def lose(self, keys: Sequence[OffloadKey], outcome: Outcome = Outcome.FAILED, load_tiers: Any = None) -> None:
        """Let a load of these chunks fail. ``load_tiers``: as for ``request``."""
        ticket = self.manager.prepare_load(keys, request("loses", load_tiers)).ticket
        self.report(ticket.ticket, dict.fromkeys(range(len(keys)), outcome))

    def moves(self) -> list[MoveTicket]:
        """End a step of the scheduler; return the moves that go out with it."""
        self.manager.on_schedule_end(ScheduleEndContext([], []))
        moves, self.manager.moves = self.manager.moves, []
        return moves

    def write_through(self) -> None:
        """Step until no move is left; all moves succeed."""
        while moves := self.moves():
            for move in moves:
                self.report(move.ticket)
        assert not self.manager.has_pending_work()

    # What ranks say

    def report(self, ticket: int, failures: Mapping[int, Outcome] | None = None) -> set[OffloadKey]:
        """Report a ticket for all ranks: ``failures`` by position. Returns the chunks that are lost."""
        return self.manager.settle({ticket: TicketReport(self._world_size, dict(failures or {}))})

    # What is asked

    def lookups(self) -> int:
        """How often vLLM's half has looked requests up since the last call."""
        stats = self.scheduler.get_stats()
        if stats is None:
            return 0
        observed: dict[Any, list[float]] = stats.data["data"].get("vllm:kv_offload_lookup_sync_delay_seconds", {})
        return len(observed.get((), []))

    def events(self) -> list[tuple[str, str, bool, list[int]]]:
        """Return the events since the last call: medium, locality, removed, chunks."""
        return [
            (event.medium.value, event.locality.value if event.locality else "", event.removed, numbers(event.keys))
            for event in self.manager.take_events()
        ]


def numbers(found: Sequence[bytes]) -> list[int]:
    return [int.from_bytes(each[:-4], "big") for each in found]


def request_of(
    name: str,
    tokens: Sequence[int],
    *,
    salt: str | None = None,
    adapter: Any = None,
    params: Any = None,
    hash_tokens: int = BLOCK_TOKENS,
) -> Request:
    """Return a request as the engine makes it from one that has come; ``params``: its ``kv_transfer_params``."""
    sampling = SamplingParams(max_tokens=9, extra_args={"kv_transfer_params": params})
    hasher = get_request_block_hasher(hash_tokens, sha256)
    return Request(name, list(tokens), sampling, None, lora_request=adapter, cache_salt=salt, block_hasher=hasher)


class Matching(Rig):
    """Our half over memory and a slab, or the slab alone, with the first ``stored`` chunks of one request's five."""

    def __init__(self, path: Path, stored: int, *, memory: bool = True, is_open: bool = True) -> None:
        nearest = [memory_tier()] if memory else []
        super().__init__(config_of(*nearest, slab_tier(path)), is_open=is_open)
        self.request = self.arrive("request", range(5 * CHUNK_TOKENS + 1))
        self.chunks = self.keys("request")[:]
        if stored:
            self.store_keys(self.chunks[:stored])

    def lose_from_memory(self, first: int) -> None:
        """Leave the chunks from ``first`` on to the slab alone."""
        self.write_through()
        self.lose(self.chunks[first:], load_tiers=[{"medium": "CPU"}])

    def question(self, computed: int = 0, most: int | None = None) -> tuple[int | None, bool]:
        return self.ask("request", computed, most)
