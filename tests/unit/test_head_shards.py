"""Proves that what one engine stores, shard by shard, another of any size and layout loads, byte for byte, and writes
nothing beside it.

Every eight bytes of KV name their block, layer, head, token and place; KV memory is made by numpy alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, starmap

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nixl_offload.chunk.layout import (
    ChunkBlocks,
    GroupLayout,
    HeadPages,
    KVLayout,
    RegionSpec,
    job_extents,
    shard_groups,
)
from nixl_offload.engine.packer import HostPacker, pages_of
from nixl_offload.engine.streams import READY
from nixl_offload.errors import LayoutError

Words = npt.NDArray[np.uint64]
Bytes = npt.NDArray[np.uint8]
GROUP_BLOCKS = 13
"""Each group has as many of its own; in an engine with packed blocks all lie over the same bytes."""
NUM_BLOCKS = 3 * GROUP_BLOCKS


@dataclass(frozen=True)
class Group:
    """Layers of one KV-cache group. ``heads`` of the model; 1 where KV is not divided."""

    layers: int
    heads: int
    tokens: int
    words: int
    """Words of eight bytes per head and token."""
    shards: int
    ranges: tuple[int, ...] = ()
    """By layer: its range of layers; none: there is one."""

    def layers_in(self, stage: range) -> list[int]:
        return [layer for layer in range(self.layers) if (self.ranges[layer] if self.ranges else 0) in stage]


@dataclass(frozen=True)
class Engine:
    """``packed``: layers side by side in each block (BLHNC), else each by itself (LBHNC); ``padding``: words behind
    each page; ``stages``: the ranges of layers of each pipeline stage.
    """

    tp: int
    packed: bool
    padding: int = 0
    stages: tuple[range, ...] = (range(1),)


def world(groups: Sequence[Group], blocks: int) -> list[Words]:
    """The model's KV of each group: shape (blocks, layers, heads, tokens, words)."""
    made = []
    for number, group in enumerate(groups):
        shape = (blocks, group.layers, group.heads, group.tokens, group.words)
        names = np.full(shape, number + 1, dtype=np.uint64)
        for axis, place in enumerate(np.indices(shape, dtype=np.uint64)):
            names |= place << np.uint64(8 + 8 * axis)
        made.append(names)
    return made


class Rank:
    """KV memory of one rank, by numpy, and the layout that is under test."""

    def __init__(self, engine: Engine, rank: int, groups: Sequence[Group], blocks_per_chunk: int) -> None:
        self._groups = groups
        stage, rank = engine.stages[rank // engine.tp], rank % engine.tp
        self.layers = [group.layers_in(stage) for group in groups]
        self.heads = [heads_of(group, engine.tp, rank) for group in groups]
        pages = [len(heads) * group.tokens * group.words for heads, group in zip(self.heads, groups, strict=True)]
        self.views: list[list[Words]] = []
        """By group and layer, of shape (blocks, heads, tokens, words)."""
        self.shards: list[tuple[int, int, int]] = []
        """Group, range of layers and range of heads of each shard of this rank, in the layout's order."""
        row = max(len(own) * (page + engine.padding) for own, page in zip(self.layers, pages, strict=True)) or 1
        memory = [np.zeros((NUM_BLOCKS, row), np.uint64)] if engine.packed else []
        found: list[GroupLayout] = []
        for number, (group, page) in enumerate(zip(groups, pages, strict=True)):
            views, layers = [], []
            for place in range(len(self.layers[number])):
                at = place * (page + engine.padding) if engine.packed else 0
                if not engine.packed:
                    memory.append(np.zeros((NUM_BLOCKS, page + engine.padding), np.uint64))
                rows = memory[-1][:, at : at + page]
                views.append(rows.reshape(NUM_BLOCKS, -1, group.tokens, group.words, copy=False))
                local = len(self.heads[number])
                layers.append(HeadPages(len(memory) - 1, 8 * at, local, 8 * page // local))
            self.views.append(views)
            held = shards_of(group, engine.tp, rank)
            for part in stage:
                of_part = set(group.layers_in(range(part, part + 1)))
                its = [each for layer, each in zip(self.layers[number], layers, strict=True) if layer in of_part]
                if its:
                    self.shards += [(number, part, shard) for shard in held]
                    found += shard_groups(its, len(held))
        regions = [
            RegionSpec(n, each.ctypes.data, NUM_BLOCKS, each.strides[0], each.strides[0])
            for n, each in enumerate(memory)
        ]
        self.layout = KVLayout(tuple(regions), tuple(found), blocks_per_chunk)
        self.memory: list[Bytes] = [each.view(np.uint8) for each in memory]
        self._packer = HostPacker(self.memory, pages_of(self.layout))

    def write(self, model: Sequence[Words], first: int, ids: Sequence[int]) -> None:
        """The model computes its blocks from ``first`` on into blocks ``ids`` of each group."""
        for number, (views, heads, words) in enumerate(zip(self.views, self.heads, model, strict=True)):
            for layer, view in zip(self.layers[number], views, strict=True):
                view[self._ids(number, ids)] = words[first : first + len(ids), layer, heads]

    def store(self, first: int, ids: Sequence[int]) -> dict[tuple[int, int, int], Bytes]:
        """The payload of each shard; both by the packer and by extents, which must agree."""
        payloads = {}
        for position, shard in enumerate(self.shards):
            payload = np.zeros((self.layout.blocks_per_chunk, self.layout.groups[position].block_bytes), np.uint8)
            by_extents = payload.copy().reshape(-1)
            block_ids = self._ids(shard[0], ids)
            self._packer.gather_many(position, [(block_ids, payload[first : first + len(ids)])], READY)
            for tensor, memory_offset, offset, length in self._extents(position, first, block_ids):
                by_extents[offset : offset + length] = self._flat(tensor)[memory_offset : memory_offset + length]
            assert payload.reshape(-1).tobytes() == by_extents.tobytes()
            payloads[shard] = payload
        return payloads

    def load(
        self, payloads: dict[tuple[int, int, int], Bytes], first: int, ids: Sequence[int], *, by_extents: bool
    ) -> None:
        """Blocks of a chunk from ``first`` on go to blocks ``ids`` of each group."""
        for position, shard in enumerate(self.shards):
            payload, block_ids = payloads[shard], self._ids(shard[0], ids)
            if by_extents:
                flat = payload.reshape(-1)
                for tensor, memory_offset, offset, length in self._extents(position, first, block_ids):
                    self._flat(tensor)[memory_offset : memory_offset + length] = flat[offset : offset + length]
            else:
                self._packer.scatter_many(position, [(block_ids, payload[first : first + len(ids)])], READY)

    def _ids(self, group: int, ids: Sequence[int]) -> npt.NDArray[np.int32]:
        return np.array(ids, np.int32) + np.int32(group * GROUP_BLOCKS)

    def _flat(self, tensor: int) -> Bytes:
        return self.memory[tensor].reshape(-1)

    def _extents(self, position: int, first: int, ids: npt.NDArray[np.int32]) -> list[tuple[int, ...]]:
        _, extents = job_extents(self.layout, [ChunkBlocks(0, position, ids, first)])
        return list(zip(*(column.tolist() for column in extents), strict=True))


def heads_of(group: Group, tp: int, rank: int) -> list[int]:
    """The heads of a rank in vLLM: consecutive ones, or one that several ranks share."""
    if group.heads >= tp:
        each = group.heads // tp
        return list(range(rank * each, (rank + 1) * each))
    return [rank // (tp // group.heads)]


def shards_of(group: Group, tp: int, rank: int) -> list[int]:
    """The shards whose heads a rank has."""
    each = group.heads // group.shards
    return sorted({head // each for head in heads_of(group, tp, rank)})


def differs(
    groups: Sequence[Group],
    storing: Engine,
    loading: Engine,
    *,
    first: int,
    ids: Sequence[int],
    load_from: int,
    targets: Sequence[int],
    by_extents: bool = False,
) -> bool:
    """Store blocks ``first`` onwards of a chunk, which lie at ``ids``; load from block ``load_from`` on into
    ``targets``; say whether any byte of the loading engine's KV memory is another than it must be.
    """
    blocks = first + len(ids)
    model = world(groups, blocks)
    payloads: dict[tuple[int, int, int], Bytes] = {}
    for rank in range(storing.tp * len(storing.stages)):
        one = Rank(storing, rank, groups, blocks)
        one.write(model, first, ids)
        for shard, payload in one.store(first, ids).items():
            replica = payloads.setdefault(shard, payload)
            assert (replica == payload).all(), "replicas store different bytes"
    for rank in range(loading.tp * len(loading.stages)):
        found, wanted = (Rank(loading, rank, groups, blocks) for _ in range(2))
        found.load(payloads, load_from, targets, by_extents=by_extents)
        wanted.write(model, load_from, targets)
        if any((one != other).any() for one, other in zip(found.memory, wanted.memory, strict=True)):
            return True
    return False


@st.composite
def _groups(draw: st.DrawFn) -> tuple[list[Group], list[int]]:
    """Groups, and the sizes of engines that can have them."""
    sizes = [1, 2, 4, 8]
    made = []
    for _ in range(draw(st.integers(1, 3))):
        heads = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
        shards = draw(st.sampled_from([n for n in range(1, heads + 1) if heads % n == 0]))
        # A rank holds whole shards; or one head, which is a shard then.
        sizes = [tp for tp in sizes if shards % tp == 0 or (shards == heads and tp % heads == 0)]
        ranges = sorted(draw(st.lists(st.integers(0, RANGES - 1), min_size=1, max_size=5)))
        content = draw(st.integers(1, 5)), draw(st.integers(1, 3))
        made.append(Group(len(ranges), heads, *content, shards, tuple(ranges)))
    return made, sizes


RANGES = 3
_STAGES = st.lists(st.integers(1, RANGES - 1), unique=True).map(
    lambda begins: tuple(starmap(range, pairwise([0, *sorted(begins), RANGES])))
)
"""Each stage holds some ranges of layers, one after the other."""


_LAYOUTS = st.tuples(st.booleans(), st.sampled_from([0, 0, 1]))


@settings(max_examples=300, deadline=None)
@given(_groups(), _LAYOUTS, _LAYOUTS, st.booleans(), st.data())
def test_every_byte_comes_back_in_an_engine_of_another_size(
    made: tuple[list[Group], list[int]],
    of_storing: tuple[bool, int],
    of_loading: tuple[bool, int],
    by_extents: bool,
    data: st.DataObject,
) -> None:
    """Hybrids, replicas, pipeline stages with layers of some groups only, unaligned heads of chunks and loads of a part
    of one, blocks in runs and scattered.
    """
    groups, sizes = made
    tps = [data.draw(st.sampled_from(sizes)) for _ in range(2)]
    stages = [data.draw(_STAGES) for _ in range(2)]
    first, count = data.draw(st.integers(0, 2)), data.draw(st.integers(1, 4))
    load_from = data.draw(st.integers(first, first + count - 1))
    left = data.draw(st.integers(1, first + count - load_from))

    def blocks(number: int) -> Sequence[int]:
        in_a_run = st.integers(0, GROUP_BLOCKS - number).map(lambda begin: list(range(begin, begin + number)))
        return data.draw(in_a_run | st.permutations(range(GROUP_BLOCKS)).map(lambda order: order[:number]))

    assert not differs(
        groups,
        Engine(tps[0], *of_storing, stages[0]),
        Engine(tps[1], *of_loading, stages[1]),
        first=first,
        ids=blocks(count),
        load_from=load_from,
        targets=blocks(left),
        by_extents=by_extents,
    )


def test_heads_that_cannot_be_dealt_out_are_refused() -> None:
    with pytest.raises(LayoutError, match="3 KV heads"):
        shard_groups([HeadPages(0, 0, 4, 64), HeadPages(1, 0, 3, 64)], 2)


def test_all_heads_of_packed_layers_are_one_run() -> None:
    """One shard on a rank costs what the whole block did; a group without layers is empty, as often as asked for."""
    layers = [HeadPages(0, layer * 4096, 8, 512) for layer in range(32)]
    assert shard_groups(layers, 1) == (GroupLayout.of_pages([(0, 32 * 4096)]),)
    assert [len(group.refs) for group in shard_groups(layers, 4)] == [32] * 4
    assert shard_groups([], 2) == (GroupLayout(()), GroupLayout(()))
