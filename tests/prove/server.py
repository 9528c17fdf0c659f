"""A server without vLLM: the real catalog, tiers, links, movers and engines of all ranks in one process, driven as
vLLM's steps drive them. What a chunk holds follows from its key, so any server can tell what it must be.

Threading: one thread drives it; tiers and engines have threads of their own. ``close`` ends them, a kill as well.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nixl_offload.catalog import Catalog, ChainOptions
from nixl_offload.config import Config, parse_config
from nixl_offload.engine import ChainEngine, ChunkIO, Completion, Engine, TierEngine
from nixl_offload.engine.chain import MoveIO
from nixl_offload.engine.host import HostSlab
from nixl_offload.engine.memory_tier import MemoryEngine
from nixl_offload.engine.opened_mover import open_planned
from nixl_offload.engine.streams import device_of
from nixl_offload.identity.namespace import Namespace
from nixl_offload.index import State
from nixl_offload.movers.base import Mover
from nixl_offload.movers.copy import CopyMover
from nixl_offload.tiers import kinds
from nixl_offload.tiers.base import TierContext
from nixl_offload.tiers.memory.tier import rank_memory_bytes
from nixl_offload.tiers.slab.tier import SlabPlace
from nixl_offload.types import Key, Location, Lookup, LookupContext, Outcome
from tests.unit.engine_rig import CHUNK_BLOCKS, NUM_BLOCKS, SHAPES, kv_cache
from tests.unit.shared_rig import namespace_of

SHAPE = SHAPES["two_groups"]
GROUPS = 2
LANES = NUM_BLOCKS // CHUNK_BLOCKS
"""Chunks that can be stored or loaded at a time: each has KV blocks of its own."""
SLOT_BYTES = (20480, 8192)
"""By group: header page, four blocks, padding."""
STAGING_SLOTS = 4
EMPTY = 0xEE
"""What KV blocks are full of before a load."""
CLOSE_S = 5.0


def key_of(number: int) -> Key:
    """Return the key of a chunk, which names its group, too."""
    return Key(hashlib.sha256(b"chunk %d" % number).digest() + group_of(number).to_bytes(4, "big"))


def group_of(number: int) -> int:
    """Return the KV cache group of a chunk."""
    return number % GROUPS


def content_of(number: int, rank: int) -> npt.NDArray[np.uint8]:
    """Return what a chunk holds on a rank, as rows: shape (CHUNK_BLOCKS, bytes of a block)."""
    block_bytes = sum(run.length for run in SHAPE.groups[group_of(number)].refs)
    rng = np.random.default_rng((number, rank))
    return rng.integers(0, 256, (CHUNK_BLOCKS, block_bytes), dtype=np.uint8)


def namespace(ranks: int, tenant: str = "default") -> Namespace:
    """Return the namespace of these servers."""
    return namespace_of(ranks, tenant, [(size,) * ranks for size in SLOT_BYTES])


def config_of(*tiers: dict[str, Any]) -> Config:
    """Return a config over ``tiers``."""
    staging = f"{max(1 << 20, STAGING_SLOTS * max(SLOT_BYTES))}B"
    return parse_config({"staging": staging, "tiers": list(tiers)})


@dataclass(slots=True, eq=False)
class _Job:
    ticket: int
    numbers: tuple[int, ...]
    lanes: tuple[int, ...]
    is_load: bool
    ranks_left: int
    failed: dict[int, Outcome] = field(default_factory=dict)
    """By position, what any rank could not do."""
    evicted: tuple[int, ...] = ()
    """Chunks that were evicted between lookup and load."""


class Rank:
    """One rank: KV blocks, and an engine for each tier."""

    def __init__(self, config: Config, places: Sequence[Any], rank: int, ranks: int, mover: str) -> None:
        """``mover``: ``copy``, or "" for what the config says."""
        self.tensors, self.kv, self.layout = kv_cache(SHAPE, seed=rank)
        self.number = rank
        memory_bytes = 0
        if config.memory is not None:
            memory_bytes = rank_memory_bytes(config.memory.capacity_bytes, ranks, 1)
        self.host = None
        if memory_bytes or len(config.stored) > 1:
            relay_slots = 0 if len(config.stored) < 2 else 2
            self.host = HostSlab(
                memory_bytes=memory_bytes,
                relay_slots=relay_slots,
                slot_bytes=max(SLOT_BYTES),
                progress=lambda done, total: None,
            )
        self._movers: list[Mover] = []
        engines = [self._open(config, position, places[position], mover) for position in range(len(config.tiers))]
        memory = 0 if config.memory is not None else None
        self.chain = ChainEngine(engines, self.host, memory=memory)

    def fill(self, number: int, lane: int) -> None:
        """Put a chunk's content into the blocks of a lane."""
        self._rows(number, lane, content_of(number, self.number))

    def empty(self, number: int, lane: int) -> None:
        """Have nothing in them."""
        self._rows(number, lane, np.full_like(content_of(number, self.number), EMPTY))

    def found(self, number: int, lane: int) -> npt.NDArray[np.uint8]:
        """Return what is in them."""
        blocks = slice(lane * CHUNK_BLOCKS, (lane + 1) * CHUNK_BLOCKS)
        runs = SHAPE.groups[group_of(number)].refs
        return np.concatenate(
            [self.kv[r.tensor_index][blocks, r.page_offset : r.page_offset + r.length] for r in runs], axis=1
        )

    def close(self) -> None:
        """End threads and movers."""
        self.chain.close(CLOSE_S)
        for mover in self._movers:
            mover.close()
        if self.host is not None:
            self.host.close()

    def _rows(self, number: int, lane: int, rows: npt.NDArray[np.uint8]) -> None:
        blocks, at = slice(lane * CHUNK_BLOCKS, (lane + 1) * CHUNK_BLOCKS), 0
        for run in SHAPE.groups[group_of(number)].refs:
            target = self.kv[run.tensor_index][blocks, run.page_offset : run.page_offset + run.length]
            target[:] = rows[:, at : at + run.length]
            at += run.length

    def _open(self, config: Config, position: int, place: Any, mover: str) -> TierEngine:
        """As ``vllm.rank_engine`` does it."""
        tier, digest = config.tiers[position], place.rank_namespaces[self.number]
        if tier.kind == "memory":
            assert self.host is not None
            return MemoryEngine(
                tensors=self.tensors, layout=self.layout, host=self.host, rank_namespace=digest, tier=position
            )
        assert tier.kind in ("slab", "shared_dir")
        directory = place.directory if isinstance(place, SlabPlace) else tier.path
        device = device_of(self.tensors[0])
        opened = CopyMover() if mover == "copy" else open_planned(tier, directory, device, None).mover
        assert opened is not None
        self._movers.append(opened)
        return Engine(
            tensors=self.tensors,
            layout=self.layout,
            link=kinds.open_link(tier, place, self.number, opened),
            rank_namespace=digest,
            staging_bytes=STAGING_SLOTS * max(SLOT_BYTES),
            tier=position,
            verify=config.verify,
            host=self.host,
        )


class Server:
    """From its start to its end."""

    def __init__(self, config: Config, *, ranks: int = 1, mover: str = "copy", tenant: str = "default") -> None:
        """Open everything, or raise what keeps it from that, with nothing left open."""
        self.tiers: list[kinds.AnyTier] = []
        self.ranks: list[Rank] = []
        self.wrong: list[str] = []
        """What was loaded and is not what was stored."""
        self.counts: Counter[str] = Counter()
        try:
            for position, tier in enumerate(config.tiers):
                context = TierContext(position, namespace(ranks, tenant), ranks)
                self.tiers.append(kinds.open_tier(tier, context))
            places = [tier.place for tier in self.tiers]
            for rank in range(ranks):
                self.ranks.append(Rank(config, places, rank, ranks, mover))
        except BaseException:
            self.close()
            raise
        memory = None if config.memory is None else 0
        self.catalog = Catalog(
            self.tiers,
            world_size=ranks,
            slot_bytes=lambda key: SLOT_BYTES[int.from_bytes(key[-4:], "big")],
            store_backlog_bytes=LANES * max(SLOT_BYTES),
            chain=ChainOptions(memory=memory, write_through_backlog_bytes=LANES * max(SLOT_BYTES)),
        )
        self._free = list(range(LANES))
        self._jobs: dict[int, _Job] = {}
        self._tickets: dict[int, tuple[int, tuple[Key, ...]]] = {}
        """Of promotions and write-throughs: ranks that have not told of it."""
        self._number = 0

    @property
    def lanes(self) -> int:
        """How many chunks a job may have now."""
        return len(self._free)

    def store(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """Begin to store chunks that were computed; return those that are stored, at most ``lanes``."""
        keys = {key_of(number): number for number in numbers[: self.lanes]}
        grant = self.catalog.reserve(keys, time.monotonic())
        if grant is None:
            return ()
        taken = tuple(keys[key] for key in grant.keys)
        lanes = self._take(len(taken))
        job = self._begin(_Job(grant.ticket, taken, lanes, False, len(self.ranks)))
        for rank in self.ranks:
            for number, lane in zip(taken, lanes, strict=True):
                rank.fill(number, lane)
            rank.chain.submit_store(job, self._chunks(taken, grant.locations, lanes, None))
        return taken

    def load(self, numbers: Sequence[int]) -> None:
        """Begin to load chunks that lookups have found."""
        if not numbers:
            return
        lanes = self._take(len(numbers))
        grant = self.catalog.prepare_load([key_of(number) for number in numbers], time.monotonic())
        evicted = tuple(number for number, location in zip(numbers, grant.locations, strict=True) if location.tier < 0)
        job = self._begin(_Job(grant.ticket, tuple(numbers), lanes, True, len(self.ranks), evicted=evicted))
        if grant.promotion_ticket:
            keys = [key for key, slot in zip(grant.keys, grant.promotion_slots, strict=True) if slot is not None]
            self._tickets[grant.promotion_ticket] = len(self.ranks), tuple(keys)
        for rank in self.ranks:
            for number, lane in zip(numbers, lanes, strict=True):
                rank.empty(number, lane)
            chunks = self._chunks(numbers, grant.locations, lanes, grant.promotion_slots)
            rank.chain.submit_load(job, chunks, promotion_ticket=grant.promotion_ticket)

    def look_up(self, numbers: Sequence[int], timeout_s: float = 20.0) -> dict[int, Lookup]:
        """Ask for chunks, each as a request of its own, until all is answered or ``timeout_s`` have passed."""
        answers: dict[int, Lookup] = {}
        until_s, waiting = time.monotonic() + timeout_s, list(numbers)
        while waiting and time.monotonic() < until_s:
            now_s = time.monotonic()
            for number in waiting:
                context = LookupContext(f"request {number}")
                answers[number] = self.catalog.lookup(key_of(number), now_s, context)
            self.step()
            waiting = [number for number in waiting if answers[number] in (Lookup.RETRY, Lookup.PENDING)]
            if waiting:
                time.sleep(0.0005)
        for number in numbers:
            self.catalog.forget_request(f"request {number}")
        return answers

    def step(self) -> None:
        """One step of vLLM's: take what ended, begin what waits."""
        now_s = time.monotonic()
        self.catalog.flush(now_s)
        for grant in self.catalog.begin_write_throughs(now_s):
            self._tickets[grant.ticket] = len(self.ranks), grant.keys
            moves = [
                MoveIO(key, int.from_bytes(key[-4:], "big"), source, target)
                for key, source, target in zip(grant.keys, grant.sources, grant.targets, strict=True)
            ]
            for rank in self.ranks:
                rank.chain.submit_moves(grant.ticket, moves)
        for rank in self.ranks:
            for done in rank.chain.finished():
                self._ended(rank, done)
            for told in rank.chain.settled():
                self._settled(told)

    def until(self, over: Callable[[], bool], timeout_s: float = 30.0) -> bool:
        """Step until ``over`` says so; False when ``timeout_s`` have passed."""
        until_s = time.monotonic() + timeout_s
        while not over():
            if time.monotonic() > until_s:
                return False
            self.step()
            time.sleep(0.0005)
        return True

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way."""
        return not (self._jobs or self._tickets or self.catalog.has_pending_writes)

    def ready(self, position: int, numbers: Sequence[int]) -> set[int]:
        """Return which of these chunks a tier calls READY."""
        return {number for number in numbers if self.tiers[position].state(key_of(number)) is State.READY}

    def check(self, numbers: Sequence[int]) -> tuple[set[int], set[int]]:
        """Look chunks up, load what is found, and compare. Returns what is whole, and what was found but not whole.

        What lookups have not answered within their time counts as neither, and as ``unanswered`` in ``counts``.
        """
        whole: set[int] = set()
        bad: set[int] = set()
        self._outcomes = whole, bad
        for start in range(0, len(numbers), LANES):
            if not self.until(lambda: not self._jobs):
                raise TimeoutError("jobs did not end within 30 s")
            answers = self.look_up(numbers[start : start + LANES])
            self.counts["unanswered"] += sum(answer in (Lookup.RETRY, Lookup.PENDING) for answer in answers.values())
            self.load([number for number, answer in answers.items() if answer is Lookup.HIT])
        if not self.until(lambda: not self._jobs):
            raise TimeoutError("loads did not end within 30 s")
        self._outcomes = set(), set()
        return whole, bad

    _outcomes: tuple[set[int], set[int]] = (set(), set())

    def close(self) -> None:
        """End as a shutdown does."""
        for rank in self.ranks:
            rank.close()
        for tier in self.tiers:
            tier.close()

    # Inside

    def _take(self, count: int) -> tuple[int, ...]:
        return tuple(self._free.pop() for _ in range(count))

    def _begin(self, job: _Job) -> int:
        self._number += 1
        self._jobs[self._number] = job
        return self._number

    def _chunks(
        self,
        numbers: Sequence[int],
        locations: Sequence[Location],
        lanes: Sequence[int],
        slots: Sequence[Location | None] | None,
    ) -> list[ChunkIO]:
        chunks = []
        for at, (number, location, lane) in enumerate(zip(numbers, locations, lanes, strict=True)):
            blocks = np.arange(lane * CHUNK_BLOCKS, (lane + 1) * CHUNK_BLOCKS, dtype=np.int32)
            slot = slots[at] if slots else None
            host_offset = None if slot is None else slot.offset
            chunks.append(ChunkIO(key_of(number), location, group_of(number), blocks, 0, host_offset))
        return chunks

    def _ended(self, rank: Rank, done: Completion) -> None:
        job = self._jobs[done.job_id]
        failures = {at: outcome for at, outcome in enumerate(done.outcomes) if outcome is not Outcome.OK}
        for at, (number, lane) in enumerate(zip(job.numbers, job.lanes, strict=True)):
            if not job.is_load:
                break
            found = rank.found(number, lane)
            if at in failures and (found != EMPTY).any():
                self.wrong.append(f"chunk {number}: rank {rank.number} wrote to blocks of a load that {failures[at]}")
            elif at not in failures and not np.array_equal(found, content_of(number, rank.number)):
                self.wrong.append(f"chunk {number}: rank {rank.number} loaded other bytes than were stored")
        job.failed.update(failures)
        self.catalog.report(job.ticket, 1, failures, time.monotonic())
        job.ranks_left -= 1
        if job.ranks_left:
            return
        del self._jobs[done.job_id]
        self._free += job.lanes
        what = "load" if job.is_load else "store"
        for at, number in enumerate(job.numbers):
            self.counts[f"{what} {job.failed.get(at, Outcome.OK).value}"] += 1
            if job.is_load and number not in job.evicted:
                self._outcomes[at in job.failed].add(number)

    def _settled(self, told: Completion) -> None:
        left, keys = self._tickets[told.job_id]
        failures = {at: outcome for at, outcome in enumerate(told.outcomes) if outcome is not Outcome.OK}
        self.catalog.report(told.job_id, 1, failures, time.monotonic())
        for at in range(len(keys)):
            self.counts[f"moved {failures.get(at, Outcome.OK).value}"] += 1
        if left == 1:
            del self._tickets[told.job_id]
        else:
            self._tickets[told.job_id] = left - 1, keys


def slab(path: Path, capacity: str = "40MiB") -> dict[str, Any]:
    """Return the config of a slab tier: the least capacity, most of which is promised to the index."""
    return {"kind": "slab", "path": str(path), "capacity": capacity}


def tree(path: Path, capacity: str = "64MiB") -> dict[str, Any]:
    """Return the config of a shared directory."""
    lookup = {"timeout": "20s"}
    return {"kind": "shared_dir", "path": str(path), "capacity": capacity, "lookup": lookup}


def memory(capacity: str = "512KiB") -> dict[str, Any]:
    """Return the config of a memory tier."""
    return {"kind": "memory", "capacity": capacity}
