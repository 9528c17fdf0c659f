"""Engines of several parallel sizes over one directory: each rank with KV tensors of its own heads and layers, and a
chain of tiers that moves shards. What a block holds is decided by layer and head alone, so that all sizes agree on it.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from nixl_offload.catalog.catalog import LoadTicket, MoveTicket, StoreTicket
from nixl_offload.chunk.layout import GroupLayout, KVLayout, RegionSpec
from nixl_offload.chunk.shards import HeadCut, LayerCut, Shard, ShardPlan, cut_layers, make_plan
from nixl_offload.engine import Completion, LinkPaths, MemoryPaths, TierEngine, TierSetup
from nixl_offload.engine.host import HostSlab
from nixl_offload.identity.namespace import Namespace, shard_digest
from nixl_offload.movers.threaded import CopyMover
from nixl_offload.tiers.shared.links import TreeLink
from nixl_offload.tiers.slab.file import SlabFile, SlabLink
from nixl_offload.tiers.slots import SlotAllocator
from nixl_offload.types import Key, Location, Outcome, align_up
from nixl_offload.vllm.chunks import RankChunks
from tests.unit.chain_rig import Chained
from tests.unit.engine_rig import rank_memory
from tests.unit.link_rig import NAMESPACE_NAME
from tests.unit.rank_rig import TestedRank

MEMORY, SLAB, TREE = 0, 1, 2
LAYERS, CHUNK_BLOCKS, NUM_BLOCKS, HEAD_BYTES = 3, 4, 32, 640
SLOTS = 16


def key(number: int) -> Key:
    return Key(hashlib.sha256(number.to_bytes(4, "big")).digest() + bytes(4))


def content(number: int, head: int) -> np.ndarray:
    """The content of one head of chunk ``number``: shape (CHUNK_BLOCKS, LAYERS, HEAD_BYTES)."""
    rng = np.random.default_rng((number, head))
    return rng.integers(0, 256, (CHUNK_BLOCKS, LAYERS, HEAD_BYTES), dtype=np.uint8)


def layers_in(cut: LayerCut, number: int) -> range:
    """The layers of a range."""
    return range(cut.begins[number], (*cut.begins, LAYERS)[number + 1])


class RankRig(Chained):
    """One rank: a memory tier, a slab of its own, and the directory of all."""

    slot_bytes = 0
    """Bytes of all shards that it holds of a chunk."""

    def __init__(
        self,
        root: Path,
        plan: ShardPlan,
        heads: int,
        rank: int,
        *,
        namespace: Namespace | None = None,
        slab: SlabFile | None = None,
        together: int = 1,
    ) -> None:
        """``namespace``: whose names and headers shards have; None: made up ones. ``slab``: None: one for the test.
        ``together``: how many ranks have one copy in their slabs.
        """
        (group,) = plan.groups
        self.offsets: dict[int, int] = {}
        """Offsets of chunks in the slab, if they are not consecutive."""
        each = heads // group.head_ranges
        self.heads = [number * each + head for number in group.held_by(rank % group.ranks) for head in range(each)]
        ranges = [layers_in(plan.layers, number) for number in plan.ranges(rank, 0)]
        self.layers = [layer for each_range in ranges for layer in each_range]
        self.kv = torch.zeros((len(self.layers), len(self.heads), NUM_BLOCKS, HEAD_BYTES), dtype=torch.uint8)
        tensors = [page.view(torch.int8) for layer in self.kv for page in layer]
        specs = [RegionSpec(kv.data_ptr(), NUM_BLOCKS, HEAD_BYTES, HEAD_BYTES) for kv in tensors]
        groups = tuple(
            GroupLayout.of_pages(
                (self.layers.index(layer) * len(self.heads) + number * each + head, HEAD_BYTES)
                for layer in each_range
                for head in range(each)
            )
            for each_range in ranges
            for number in range(group.per_rank)
        )
        self.layout = KVLayout(tuple(specs), groups, CHUNK_BLOCKS)
        sizes = [self.layout.slot_bytes(at) for at in range(len(groups))]
        self.slot_bytes = sum(sizes)
        self.host = HostSlab(memory_bytes=SLOTS * self.slot_bytes, relay_slots=2, slot_bytes=max(sizes))
        digest = bytes(32) if namespace is None else namespace.digest
        shards = [Shard(number, shard_digest(digest, number)) for _, number in plan.shards_of(rank)]
        extent = align_up(4 * self.slot_bytes, 65536)
        self.slab = slab or SlabFile(
            root / f"{plan.ranks}-{len(plan.shards_of(0))}-{rank}.slab", SLOTS // 4 * extent, extent
        )
        self.slab.open()
        allocator = SlotAllocator(
            self.slab.rank_bytes, [self.slot_bytes], extent, {self.slot_bytes: together} if together > 1 else None
        )
        self.places = allocator.places
        if together > 1:
            self.offsets = {n: allocator.allocate(Key(b"%d" % n), self.slot_bytes) or 0 for n in range(SLOTS)}
        self.neighbours = [
            SlabFile(root / f"{plan.ranks}-{len(plan.shards_of(0))}-{each}.slab", self.slab.rank_bytes, extent)
            for each in self.places.neighbours(rank)
        ]
        for neighbour in self.neighbours:
            neighbour.open()
        self.slabs = [self.slab, *self.neighbours]
        self.movers = [CopyMover(), CopyMover()]
        name = NAMESPACE_NAME if namespace is None else namespace.name
        tree = TreeLink(str(root), name, self.movers[1], direct_io=False, clock=time.monotonic)
        slab_link = SlabLink(self.slab, self.movers[0], time.monotonic, neighbours=self.neighbours)
        self.chain = TestedRank(3, relay_offsets=self.host.relay_offsets)
        memory = rank_memory(tensors, self.layout, host=self.host)
        setups = [TierSetup(self.chain, memory, shards, tier) for tier in range(3)]
        self.chain.join(MEMORY, TierEngine(MemoryPaths(setups[MEMORY])))
        for tier, link in ((SLAB, slab_link), (TREE, tree)):
            paths = LinkPaths(setups[tier], link, staging_bytes=8 * self.slot_bytes)
            self.chain.join(tier, TierEngine(paths))
        self.chunks = RankChunks(self.layout, [0], plan, rank, memory=MEMORY, shared=[TREE])
        self.chunks.take_places(SLAB, self.places)
        self.results: dict[int, Completion] = {}
        self.settled: dict[int, Completion] = {}
        self._numbers = iter(range(1, 1 << 20))

    def write(self, number: int) -> None:
        """Have the model compute chunk ``number``: blocks from ``4 * number`` on."""
        blocks = slice(number * CHUNK_BLOCKS, (number + 1) * CHUNK_BLOCKS)
        for local, head in enumerate(self.heads):
            self.kv[:, local, blocks] = torch.from_numpy(self._content(number, head))

    def holds(self, number: int, first: int = 0) -> bool:
        """Whether the blocks of chunk ``number`` from ``first`` on are as computed."""
        blocks = slice(number * CHUNK_BLOCKS + first, (number + 1) * CHUNK_BLOCKS)
        return all(
            np.array_equal(self.kv[:, local, blocks].numpy(), self._content(number, head)[:, first:])
            for local, head in enumerate(self.heads)
        )

    def _content(self, number: int, head: int) -> np.ndarray:
        """The content of this rank's layers, which are the first axis."""
        return content(number, head).transpose(1, 0, 2)[self.layers]

    def wipe(self) -> None:
        self.kv.fill_(0xEE)

    def at(self, tier: int, number: int) -> Location:
        offset = self.offsets.get(number, number * self.slot_bytes) if tier == SLAB else number * self.slot_bytes
        return Location(tier, 0 if tier == TREE else offset, self.slot_bytes)

    def blocks(self, numbers: Iterable[int], first: int = 0) -> Any:
        """The blocks of chunks, without those before ``first`` of the first chunk; in the order of vLLM's job."""
        ids = [block for number in numbers for block in range(number * CHUNK_BLOCKS, (number + 1) * CHUNK_BLOCKS)]
        return SimpleNamespace(block_ids=ids[first:], group_sizes=[len(ids) - first], block_indices=[first])

    def store(self, numbers: Sequence[int], tier: int) -> tuple[Outcome, ...]:
        job = next(self._numbers)
        ticket = StoreTicket(job, tuple(map(key, numbers)), tuple(self.at(tier, number) for number in numbers))
        self.chain.submit_store(job, self.chunks.of_job(ticket, self.blocks(numbers)), len(numbers))
        return self.collect(job).outcomes

    def load(self, numbers: Sequence[int], tier: int, *, first: int = 0, promote: bool = False) -> tuple[Outcome, ...]:
        """``first``: the first wanted block of each chunk."""
        jobs = []
        for each in ([number] for number in numbers) if first else [numbers]:
            job, number = next(self._numbers), next(self._numbers) if promote else 0
            slots = tuple(Location(MEMORY, chunk * self.slot_bytes, self.slot_bytes) for chunk in each)
            places = tuple(self.at(tier, chunk) for chunk in each)
            ticket = LoadTicket(job, tuple(map(key, each)), places, number, slots if promote else ())
            chunks = self.chunks.of_job(ticket, self.blocks(each, first))
            promoted = range(len(each)) if promote else ()
            self.chain.submit_load(job, chunks, len(each), promotion_ticket=number, promoted=promoted)
            if promote:
                assert self.settle(number).outcomes == (Outcome.OK,) * len(each)
            jobs.append(job)
        return tuple(outcome for job in jobs for outcome in self.collect(job).outcomes)

    def move(self, numbers: Sequence[int], source: int, target: int) -> tuple[Outcome, ...]:
        number = next(self._numbers)
        sources, targets = (tuple(self.at(tier, n) for n in numbers) for tier in (source, target))
        ticket = MoveTicket(number, tuple(map(key, numbers)), sources, targets)
        self.chain.submit_moves(number, self.chunks.of_moves(ticket), len(numbers))
        return self.settle(number).outcomes


def bounds(stages: Sequence[int]) -> list[tuple[int, int]]:
    """Begin and end of stages with these numbers of layers."""
    ends = list(accumulate(stages))
    return list(zip([0, *ends], ends, strict=False))


class EngineRig:
    """All ranks of an engine; each call goes to all of them."""

    def __init__(
        self,
        root: Path,
        tp: int,
        *,
        heads: int = 4,
        wanted: HeadCut = 4,
        stages: Sequence[int] = (LAYERS,),
        cut_for: Sequence[int] | None = None,
        together: int = 1,
    ) -> None:
        """``stages``: how many layers each pipeline stage has; ``cut_for``: those for which layers are cut."""
        root.mkdir(exist_ok=True)
        cut = cut_layers(bounds(cut_for or stages), bounds(stages))
        assert cut is not None
        self.plan = plan = make_plan(wanted, [[heads]], [[True] * len(cut.begins)], tp, cut)
        self.ranks = [RankRig(root, plan, heads, rank, together=together) for rank in range(tp * len(stages))]

    def write(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            for rank in self.ranks:
                rank.write(number)

    def wipe(self) -> None:
        for rank in self.ranks:
            rank.wipe()

    def holds(self, numbers: Iterable[int], first: int = 0) -> bool:
        wanted = list(numbers)
        return all(rank.holds(number, first) for rank in self.ranks for number in wanted)

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()


def ok(outcomes: Sequence[tuple[Outcome, ...]]) -> bool:
    """Whether all outcomes are OK on all ranks."""
    return all(outcome is Outcome.OK for rank in outcomes for outcome in rank)
