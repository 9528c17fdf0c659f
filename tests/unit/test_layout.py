"""The arithmetic from jobs to extents, against a model in plain loops that moves real bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nixl_offload.chunk.header import MAX_BLOCKS_PER_CHUNK, slot_bytes
from nixl_offload.chunk.layout import (
    ChunkBlocks,
    ChunkExtents,
    GroupLayout,
    KVLayout,
    PageRun,
    RegionSpec,
    job_extents,
    split_job,
)
from nixl_offload.errors import LayoutError

NUM_BLOCKS = 40


def chunk_extents(layout: KVLayout, group: int, block_ids: npt.NDArray[np.integer], first_block: int) -> ChunkExtents:
    """Those of one chunk, whose blocks ``first_block`` onwards are ``block_ids``."""
    ids = np.asarray(block_ids, dtype=np.int32)
    return job_extents(layout, [ChunkBlocks(0, group, ids, first_block)]).extents


def are_aligned(extents: ChunkExtents, alignment_bytes: int, bases: npt.NDArray[np.int64]) -> bool:
    """Whether each address, payload offset and length is a multiple of ``alignment_bytes``."""
    addresses = bases[extents.tensor_index] + extents.memory_offset
    return not any((column % alignment_bytes).any() for column in (addresses, extents.payload_offset, extents.length))


def region(
    page_bytes: int, stride_bytes: int | None = None, base_address: int = 0, num_blocks: int = NUM_BLOCKS
) -> RegionSpec:
    return RegionSpec(0, base_address, num_blocks, stride_bytes or page_bytes, page_bytes)


def one_tensor_per_layer(blocks_per_chunk: int) -> KVLayout:
    return KVLayout(
        (region(48), region(48), region(48)), (GroupLayout.of_pages(((0, 48), (1, 48), (2, 48))),), blocks_per_chunk
    )


def packed_blocks(blocks_per_chunk: int) -> KVLayout:
    """Block-outermost: one tensor, which every group refers to whole."""
    return KVLayout(
        (region(96),), (GroupLayout.of_pages(((0, 96),)), GroupLayout.of_pages(((0, 96),))), blocks_per_chunk
    )


def aliased_hybrid(blocks_per_chunk: int) -> KVLayout:
    """Full attention, sliding window and a padded Mamba state share the tensors; one group has fewer layers."""
    groups = (
        GroupLayout.of_pages(((0, 64), (1, 64))),
        GroupLayout.of_pages(((0, 64),)),
        GroupLayout.of_pages(((0, 37), (1, 37))),
    )
    return KVLayout((region(64), region(64)), groups, blocks_per_chunk)


def padded_pages(blocks_per_chunk: int) -> KVLayout:
    return KVLayout((region(64), region(80)), (GroupLayout.of_pages(((0, 50), (1, 80))),), blocks_per_chunk)


def strided_views(blocks_per_chunk: int) -> KVLayout:
    """Layers interleaved per block but registered one by one: the stride exceeds the page."""
    return KVLayout((region(32, 96), region(32, 96)), (GroupLayout.of_pages(((0, 32), (1, 32))),), blocks_per_chunk)


def mla(blocks_per_chunk: int) -> KVLayout:
    """One latent page per layer, and an indexer whose pages have another size."""
    return KVLayout(
        (region(72), region(72), region(24)), (GroupLayout.of_pages(((0, 72), (1, 72), (2, 24))),), blocks_per_chunk
    )


def one_layer_twice(blocks_per_chunk: int) -> KVLayout:
    """Two layers of one group alias the same tensor: blocks touch in memory and in the payload, pages do not."""
    return KVLayout((region(16), region(8)), (GroupLayout.of_pages(((0, 16), (1, 8), (0, 16))),), blocks_per_chunk)


def head_shards(blocks_per_chunk: int) -> KVLayout:
    """Each half of the heads is a group of its own: in a tensor for each layer, the second one with padding."""
    halves = [GroupLayout((PageRun(0, offset, 24), PageRun(1, offset, 24))) for offset in (0, 24)]
    return KVLayout((region(48), region(60)), tuple(halves), blocks_per_chunk)


def packed_head_shards(blocks_per_chunk: int) -> KVLayout:
    """Two layers in a block: halves of their heads, all heads, the last layer's last quarter and the first's first, and
    these in the order in which blocks that follow each other touch.
    """
    halves = [GroupLayout((PageRun(0, offset, 24), PageRun(0, 48 + offset, 24))) for offset in (0, 24)]
    whole = GroupLayout((PageRun(0, 0, 24), PageRun(0, 24, 24), PageRun(0, 48, 48)))
    turned = GroupLayout((PageRun(0, 84, 12), PageRun(0, 0, 12)))
    ends = GroupLayout((PageRun(0, 0, 12), PageRun(0, 72, 24)))
    return KVLayout((region(96),), (*halves, whole, turned, ends), blocks_per_chunk)


def bytes_beside_pages(blocks_per_chunk: int) -> KVLayout:
    return KVLayout((region(48), region(1)), (GroupLayout.of_pages(((0, 48), (1, 1))),), blocks_per_chunk)


LAYOUTS = [
    one_tensor_per_layer,
    packed_blocks,
    aliased_hybrid,
    padded_pages,
    strided_views,
    mla,
    one_layer_twice,
    head_shards,
    packed_head_shards,
    bytes_beside_pages,
]

MakeLayout = Callable[[int], KVLayout]
Row = tuple[int, int, int, int]


def naive_extents(layout: KVLayout, chunk: ChunkBlocks) -> list[Row]:
    """The extents of a chunk in plain loops."""
    rows: list[Row] = []
    for position, block_id in enumerate(chunk.block_ids.tolist()):
        payload = (chunk.first_block + position) * layout.group(chunk.group).block_bytes
        for tensor, page_offset, length in layout.group(chunk.group).refs:
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


@pytest.mark.parametrize("make_layout", LAYOUTS)
@settings(max_examples=60)
@given(st.integers(1, 9), st.data())
def test_extents_are_those_of_the_model(make_layout: MakeLayout, blocks: int, data: st.DataObject) -> None:
    """For every layout, chunks of any number of blocks, unaligned heads and short tails."""
    layout = make_layout(blocks)
    group = data.draw(st.integers(0, len(layout.groups) - 1))
    chunks = data.draw(st.lists(chunks_of(layout, group), min_size=1, max_size=6))
    job = job_extents(layout, chunks)
    rows = rows_of(job.extents)
    found = [rows[begin:end] for begin, end in pairwise(job.chunk_starts.tolist())]
    assert found == [naive_extents(layout, chunk) for chunk in chunks]


@pytest.mark.parametrize(
    ("group", "block_ids", "first_block", "words"),
    [
        (0, [0, NUM_BLOCKS], 0, "block ids 0 to 40 of a KV cache of 40 blocks"),
        (0, [-1, 3], 0, "block ids -1 to 3"),
        (0, [1, 2], 3, "blocks 3 to 5 of a chunk of 4"),
        (0, [1, 2], -1, "blocks -1 to 1"),
        (0, [], 0, "blocks 0 to 0"),
        (2, [1], 0, "group 2 of 2"),
    ],
)
def test_blocks_that_do_not_exist_are_refused(group: int, block_ids: list[int], first_block: int, words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        chunk_extents(packed_blocks(4), group, np.array(block_ids, dtype=np.int32), first_block)


@pytest.mark.parametrize(
    ("tensors", "run", "blocks_per_chunk", "words"),
    [
        ((region(8),), PageRun(1, 0, 8), 4, "tensor 1 of 1"),
        ((region(8),), PageRun(0, 0, 9), 4, "9 bytes from byte 0 on of the pages of tensor 0, which have 8"),
        ((region(8, 16),), PageRun(0, 4, 5), 4, "5 bytes from byte 4 on"),
        ((region(8),), PageRun(0, -4, 8), 4, "8 bytes from byte -4 on"),
        ((region(8),), PageRun(0, 0, 0), 4, "0 bytes"),
        ((region(9, 8),), PageRun(0, 0, 8), 4, "9 bytes, 8 apart"),
        ((region(8, num_blocks=0),), PageRun(0, 0, 8), 4, "0 pages"),
        ((region(8), region(0, 8)), PageRun(0, 0, 8), 4, "pages of 0 bytes"),
        ((region(8),), PageRun(0, 0, 8), 0, "chunk of 0 blocks"),
        ((region(8),), PageRun(0, 0, 8), MAX_BLOCKS_PER_CHUNK + 1, "1 to 487"),
    ],
)
def test_a_layout_that_contradicts_itself_is_refused(
    tensors: tuple[RegionSpec, ...], run: PageRun, blocks_per_chunk: int, words: str
) -> None:
    with pytest.raises(LayoutError, match=words):
        KVLayout(tensors, (GroupLayout((run,)),), blocks_per_chunk)


def test_a_group_without_layers_takes_nothing_and_has_no_blocks() -> None:
    """As on a pipeline stage that has no layer of it; another stage may have no KV tensor at all."""
    layout = KVLayout((region(8),), (GroupLayout(()), GroupLayout.of_pages(((0, 8),))), 4)
    assert layout.empty_groups == {0}
    assert (layout.groups[0].block_bytes, layout.slot_bytes(0)) == (0, 0)
    assert layout.slot_bytes(1) == slot_bytes(4, 8)
    assert len(chunk_extents(layout, 1, np.array([1, 2], dtype=np.int32), 0).length) == 1
    with pytest.raises(LayoutError, match="a KV cache of 0 blocks"):
        chunk_extents(layout, 0, np.array([0], dtype=np.int32), 0)
    assert KVLayout((), (GroupLayout(()),), 4).empty_groups == {0}


def test_direct_needs_every_address_offset_and_length_aligned() -> None:
    group = (GroupLayout.of_pages(((0, 4096), (1, 4096))),)
    for stride, page, second_base, direct in (
        (4096, 4096, 1 << 20, True),
        (8192, 4096, 1 << 20, True),
        (4096, 4096, (1 << 20) + 512, False),
        (4608, 4096, 1 << 20, False),
    ):
        tensors = (region(page, stride, base_address=1 << 16), region(page, stride, base_address=second_base))
        layout = KVLayout(tensors, group, 4)
        bases = np.array([tensor.base_address for tensor in tensors])
        extents = chunk_extents(layout, 0, np.array([5, 6, 11]), 1)
        assert are_aligned(extents, 4096, bases) is direct
        assert layout.is_group_direct_capable(0, 4096) is direct
        assert are_aligned(extents, 1, bases)
    unpadded = KVLayout(tensors, (GroupLayout.of_pages(((0, 4000),)),), 4)
    assert not unpadded.is_group_direct_capable(0, 4096)
    for offset, direct in ((4096, True), (512, False)):
        part = KVLayout((region(8192),), (GroupLayout((PageRun(0, offset, 4096),)),), 4)
        assert part.is_group_direct_capable(0, 4096) is direct
        assert are_aligned(chunk_extents(part, 0, np.array([5]), 0), 4096, np.array([0])) is direct


# From a job's numbers to the blocks of each chunk.


def plain(chunks: Sequence[ChunkBlocks]) -> list[tuple[int, int, list[int], int]]:
    assert all(chunk.block_ids.dtype == np.int32 for chunk in chunks)
    return [(chunk.key_index, chunk.group, chunk.block_ids.tolist(), chunk.first_block) for chunk in chunks]


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
    assert plain(found) == [expected[key] for key in sorted(expected)]


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
    """Holes in a sliding window show up like this: too few blocks for the keys, and no telling where they miss."""
    # ``numbers``: group sizes, block indices, group ids.
    block_ids: npt.NDArray[np.int32] = np.array(ids, dtype=np.int32)
    with pytest.raises(LayoutError, match=words):
        split_job(key_groups, block_ids, *numbers, blocks_per_chunk=4, require_full_tail=is_store)


def test_runs_that_touch_are_one() -> None:
    """So a rank that stores all heads of packed blocks coalesces as if it knew of no heads."""
    refs = (PageRun(0, 0, 24), PageRun(0, 24, 24), PageRun(0, 48, 48))
    assert GroupLayout(refs) == GroupLayout.of_pages([(0, 96)])
    layout = KVLayout((region(96),), (GroupLayout(refs),), 16)
    assert rows_of(chunk_extents(layout, 0, np.arange(3, 19), 0)) == [(0, 3 * 96, 0, 16 * 96)]
    apart = (PageRun(0, 24, 24), PageRun(0, 0, 24), PageRun(1, 24, 24), PageRun(0, 48, 8), PageRun(0, 57, 8))
    assert GroupLayout(apart).refs == apart


def test_the_smallest_cache_and_the_largest_chunk() -> None:
    layout = KVLayout((region(1, num_blocks=1),), (GroupLayout.of_pages(((0, 1),)),), MAX_BLOCKS_PER_CHUNK)
    assert rows_of(chunk_extents(layout, 0, np.array([0]), MAX_BLOCKS_PER_CHUNK - 1)) == [
        (0, 0, MAX_BLOCKS_PER_CHUNK - 1, 1)
    ]
