"""The arithmetic from jobs to extents, against a model in plain loops that moves real bytes."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings, strategies as st

from nixl_offload.chunk.header import MAX_BLOCKS_PER_CHUNK, slot_bytes
from nixl_offload.chunk.layout import (
    ChunkBlocks,
    ChunkExtents,
    GroupLayout,
    HeadPages,
    KVLayout,
    PageRun,
    RegionSpec,
    job_extents,
    shard_groups,
    split_job,
)
from nixl_offload.errors import LayoutError

NUM_BLOCKS = 40


def chunk_extents(layout: KVLayout, group: int, block_ids: npt.NDArray[np.integer], first_block: int) -> ChunkExtents:
    """The extents of one chunk, whose blocks from ``first_block`` on are ``block_ids``."""
    ids = np.asarray(block_ids, dtype=np.int32)
    return job_extents(layout, [ChunkBlocks(0, group, ids, first_block)])[1]


def region(
    page_bytes: int, stride_bytes: int | None = None, base_address: int = 0, num_blocks: int = NUM_BLOCKS
) -> RegionSpec:
    return RegionSpec(base_address, num_blocks, stride_bytes or page_bytes, page_bytes)


pages = GroupLayout.of_pages


def runs(*refs: tuple[int, int, int]) -> GroupLayout:
    return GroupLayout(tuple(PageRun(*ref) for ref in refs))


LAYOUTS = {
    "blocks outermost: one tensor, which every group refers to whole": (
        (region(96),),
        (pages([(0, 96)]), pages([(0, 96)])),
    ),
    "full attention, sliding window and a padded Mamba state share tensors; one has fewer layers": (
        (region(64), region(64)),
        (pages([(0, 64), (1, 64)]), pages([(0, 64)]), pages([(0, 37), (1, 37)])),
    ),
    "padded pages": ((region(64), region(80)), (pages([(0, 50), (1, 80)]),)),
    "layers interleaved per block but registered one by one: the stride exceeds the page": (
        (region(32, 96), region(32, 96)),
        (pages([(0, 32), (1, 32)]),),
    ),
    "MLA: one latent page per layer, and an indexer whose pages have another size": (
        (region(72), region(72), region(24)),
        (pages([(0, 72), (1, 72), (2, 24)]),),
    ),
    "two layers alias one tensor: blocks touch in memory and in the payload, pages do not": (
        (region(16), region(8)),
        (pages([(0, 16), (1, 8), (0, 16)]),),
    ),
    "each half of the heads is a group: in a tensor for each layer, the second one with padding": (
        (region(48), region(60)),
        (runs((0, 0, 24), (1, 0, 24)), runs((0, 24, 24), (1, 24, 24))),
    ),
    "two layers in a block: halves of their heads, all heads, quarters in either order": (
        (region(96),),
        (
            runs((0, 0, 24), (0, 48, 24)),
            runs((0, 24, 24), (0, 72, 24)),
            runs((0, 0, 24), (0, 24, 24), (0, 48, 48)),
            runs((0, 84, 12), (0, 0, 12)),
            runs((0, 0, 12), (0, 72, 24)),
        ),
    ),
}
"""Tensors and groups."""

Row = tuple[int, int, int, int]


def naive_extents(layout: KVLayout, chunk: ChunkBlocks) -> list[Row]:
    """The extents of a chunk in plain loops."""
    rows: list[Row] = []
    for position, block_id in enumerate(chunk.block_ids.tolist()):
        payload = (chunk.first_block + position) * layout.groups[chunk.group].block_bytes
        for tensor, page_offset, length in layout.groups[chunk.group].refs:
            memory = block_id * layout.tensors[tensor].stride_bytes + page_offset
            last_tensor, last_memory, last_payload, last_length = rows[-1] if rows else (-1, 0, 0, 0)
            if (last_tensor, last_memory + last_length, last_payload + last_length) == (tensor, memory, payload):
                rows[-1] = (tensor, last_memory, last_payload, last_length + length)
            else:
                rows.append((tensor, memory, payload, length))
            payload += length
    return rows


def rows_of(extents: ChunkExtents) -> list[Row]:
    assert [column.dtype for column in extents] == [np.int32, np.int64, np.int64, np.int64]
    return list(zip(*(column.tolist() for column in extents), strict=True))


@st.composite
def chunks_of(draw: st.DrawFn, layout: KVLayout, group: int) -> ChunkBlocks:
    """Any part of a chunk, its blocks scattered or in runs."""
    size = draw(st.integers(1, layout.blocks_per_chunk))
    first = draw(st.integers(0, layout.blocks_per_chunk - size))
    ids = draw(
        st.one_of(
            st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=size, max_size=size),
            st.integers(0, NUM_BLOCKS - size).map(lambda start: list(range(start, start + size))),
        )
    )
    return ChunkBlocks(0, group, np.array(ids, dtype=np.int32), first)


@pytest.mark.parametrize(("tensors", "groups"), LAYOUTS.values(), ids=LAYOUTS)
@settings(max_examples=60)
@given(st.integers(1, 9), st.data())
def test_extents_are_those_of_the_model(
    tensors: tuple[RegionSpec, ...], groups: tuple[GroupLayout, ...], blocks: int, data: st.DataObject
) -> None:
    """For every layout, chunks of any number of blocks, unaligned heads and short tails."""
    layout = KVLayout(tensors, groups, blocks)
    group = data.draw(st.integers(0, len(layout.groups) - 1))
    chunks = data.draw(st.lists(chunks_of(layout, group), min_size=1, max_size=6))
    starts, extents = job_extents(layout, chunks)
    rows = rows_of(extents)
    found = [rows[begin:end] for begin, end in pairwise(starts.tolist())]
    assert found == [naive_extents(layout, chunk) for chunk in chunks]


@pytest.mark.parametrize(
    ("block_ids", "first_block", "words"),
    [
        ([0, NUM_BLOCKS], 0, "block ids 0 to 40 of a KV cache of 40 blocks"),
        ([-1, 3], 0, "block ids -1 to 3"),
        ([1, 2], 3, "blocks 3 to 5 of a chunk of 4"),
        ([1, 2], -1, "blocks -1 to 1"),
        ([], 0, "blocks 0 to 0"),
    ],
)
def test_blocks_that_do_not_exist_are_refused(block_ids: list[int], first_block: int, words: str) -> None:
    layout = KVLayout((region(96),), (pages([(0, 96)]),) * 2, 4)
    with pytest.raises(LayoutError, match=words):
        chunk_extents(layout, 0, np.array(block_ids, dtype=np.int32), first_block)


@pytest.mark.parametrize(
    ("tensor", "run", "blocks_per_chunk", "words"),
    [
        (region(8), PageRun(1, 0, 8), 4, "tensor 1 of 1"),
        (region(8, 16), PageRun(0, 4, 5), 4, "5 bytes from byte 4 on"),
        (region(8), PageRun(0, -4, 8), 4, "8 bytes from byte -4 on"),
        (region(9, 8), PageRun(0, 0, 8), 4, "9 bytes, 8 apart"),
        (region(8), PageRun(0, 0, 8), MAX_BLOCKS_PER_CHUNK + 1, "1 to 487"),
    ],
)
def test_a_layout_that_contradicts_itself_is_refused(
    tensor: RegionSpec, run: PageRun, blocks_per_chunk: int, words: str
) -> None:
    with pytest.raises(LayoutError, match=words):
        KVLayout((tensor,), (GroupLayout((run,)),), blocks_per_chunk)


@pytest.mark.parametrize(
    ("stride", "base_address", "run", "is_direct"),
    [
        (8192, 1 << 16, PageRun(0, 4096, 4096), True),
        (8192, (1 << 16) + 512, PageRun(0, 0, 4096), False),
        (8704, 1 << 16, PageRun(0, 0, 4096), False),
        (8192, 1 << 16, PageRun(0, 512, 4096), False),
        (8192, 1 << 16, PageRun(0, 0, 4000), False),
    ],
)
def test_direct_needs_every_address_and_length_aligned(
    stride: int, base_address: int, run: PageRun, is_direct: bool
) -> None:
    layout = KVLayout((region(8192, stride, base_address),), (GroupLayout((run,)),), 4)
    assert layout.is_group_direct_capable(0, 4096) is is_direct


def test_a_group_without_layers_takes_nothing_and_has_no_blocks() -> None:
    """As on a pipeline stage that has no layer of it; another stage may have no KV tensor at all."""
    layout = KVLayout((region(8),), (GroupLayout(()), pages([(0, 8)])), 4)
    assert (layout.groups[0].block_bytes, layout.slot_bytes(0)) == (0, 0)
    assert layout.slot_bytes(1) == slot_bytes(4, 8)
    assert len(chunk_extents(layout, 1, np.array([1, 2], dtype=np.int32), 0).length) == 1
    with pytest.raises(LayoutError, match="a KV cache of 0 blocks"):
        chunk_extents(layout, 0, np.array([0], dtype=np.int32), 0)
    KVLayout((), (GroupLayout(()),), 4)


# From a job's numbers to the blocks of each chunk.


@given(st.integers(1, 6), st.lists(st.integers(0, 4), min_size=1, max_size=4), st.booleans(), st.data())
def test_blocks_are_dealt_out_as_in_the_model(
    blocks_per_chunk: int, chunk_counts: list[int], is_store: bool, data: st.DataObject
) -> None:
    """Fill the chunks block by block, group after group, and compare; keys of the groups in any interleaving."""
    key_groups = data.draw(st.permutations([g + 10 for g, count in enumerate(chunk_counts) for _ in range(count)]))
    expected: dict[int, tuple[int, int, list[int], int]] = {}
    group_sizes, block_indices, next_id = [], [], 100
    for group, count in enumerate(chunk_counts):
        skip = data.draw(st.integers(0, blocks_per_chunk - 1)) if count else 0
        short = data.draw(st.integers(0, blocks_per_chunk - 1 - (skip if count == 1 else 0))) if count else 0
        size = count * blocks_per_chunk - skip - (0 if is_store else short)
        group_sizes.append(size)
        block_indices.append(skip + blocks_per_chunk * data.draw(st.integers(0, 3)))
        keys = [index for index, key_group in enumerate(key_groups) if key_group == group + 10]
        for number in range(skip, skip + size):
            key = keys[number // blocks_per_chunk]
            expected.setdefault(key, (key, group, [], number % blocks_per_chunk))[2].append(next_id)
            next_id += 1
    found = split_job(
        key_groups,
        np.arange(100, next_id),
        group_sizes,
        block_indices,
        [g + 10 for g in range(len(chunk_counts))],
        blocks_per_chunk=blocks_per_chunk,
        require_full_tail=is_store,
    )
    assert all(chunk.block_ids.dtype == np.int32 for chunk in found)
    assert [(*chunk[:2], chunk.block_ids.tolist(), chunk.first_block) for chunk in found] == [
        expected[key] for key in sorted(expected)
    ]


@pytest.mark.parametrize(
    ("key_groups", "ids", "numbers", "is_store", "words"),
    [
        ([0], [1, 2, 3], ([3], [0], [0]), True, "do not fill 1 chunks of 4"),
        ([0, 0], [1, 2, 3, 4, 5, 6, 7], ([7], [0], [0]), True, "do not fill 2 chunks"),
        ([0, 0], [1, 2, 3, 4], ([4], [0], [0]), False, "do not end in the last of 2 chunks"),
        ([0], [1, 2, 3, 4], ([4], [1], [0]), False, "do not end in the last of 1 chunks"),
        ([0], [1], ([1], [-1], [0]), False, "begins with block -1"),
        ([1], [1], ([1], [0], [0]), False, "group 1; the job has"),
        ([0], [1, 2], ([1], [0], [0]), False, "group sizes"),
        ([0], [1], ([1, 0], [0], [0]), False, "2 group sizes, 1 block indices"),
        ([0], [1], ([1, 0], [0, 0], [0, 0]), False, "repeat"),
        ([0], [], ([0], [0], [0]), False, "0 blocks"),
        ([], [1], ([1], [0], [0]), False, "of 0 chunks"),
        ([0], [1], ([2, -1], [0, 0], [0, 1]), False, "group sizes"),
    ],
)
def test_a_job_whose_numbers_do_not_fit_is_refused(
    key_groups: list[int], ids: list[int], numbers: tuple[list[int], list[int], list[int]], is_store: bool, words: str
) -> None:
    """Holes in a sliding window look like this: too few blocks for the keys, at unknown positions."""
    # ``numbers``: group sizes, block indices, group ids.
    block_ids: npt.NDArray[np.int32] = np.array(ids, dtype=np.int32)
    with pytest.raises(LayoutError, match=words):
        split_job(key_groups, block_ids, *numbers, blocks_per_chunk=4, require_full_tail=is_store)


def test_runs_that_touch_are_one() -> None:
    """So a rank that stores all heads of packed blocks coalesces as without head shards."""
    refs = (PageRun(0, 0, 24), PageRun(0, 24, 24), PageRun(0, 48, 48))
    assert GroupLayout(refs) == pages([(0, 96)])
    layout = KVLayout((region(96),), (GroupLayout(refs),), 16)
    assert rows_of(chunk_extents(layout, 0, np.arange(3, 19), 0)) == [(0, 3 * 96, 0, 16 * 96)]
    apart = (PageRun(0, 24, 24), PageRun(0, 0, 24), PageRun(1, 24, 24), PageRun(0, 48, 8), PageRun(0, 57, 8))
    assert GroupLayout(apart).refs == apart


def test_heads_that_cannot_be_dealt_out_are_refused() -> None:
    with pytest.raises(LayoutError, match="3 KV heads"):
        shard_groups([HeadPages(0, 0, 4, 64), HeadPages(1, 0, 3, 64)], 2)
