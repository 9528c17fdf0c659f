"""Targets: how KV memory lies. Numbers that vLLM and a job bring, and the extents that are transferred for them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from nixl_offload.chunk.heads import HeadPages, shard_groups
from nixl_offload.chunk.layout import (
    ChunkBlocks,
    GroupLayout,
    KVLayout,
    PageRun,
    RegionSpec,
    job_extents,
    split_job,
)
from nixl_offload.errors import LayoutError
from tests.prove.fuzz.target import One, Reader, Target, expect

_SIZES = (0, 1, 2, 3, 4, 7, 64, 512, 4096, 1 << 31, 1 << 40)


def layout(scratch: Path) -> One:
    """Tensors, groups and a job of any numbers: refused, or every byte of its blocks once, and no other byte."""

    def one(data: bytes) -> None:
        reader = Reader(data)
        tensors = tuple(
            RegionSpec(number, reader.choice(_SIZES), reader.number() % 6, *_sizes(reader))
            for number in range(1 + reader.number() % 3)
        )
        groups = tuple(
            GroupLayout(
                tuple(
                    PageRun(reader.number() % 4 - (not reader.left), reader.choice(_SIZES), reader.choice(_SIZES))
                    for _ in range(reader.number() % 4)
                )
            )
            for _ in range(1 + reader.number() % 2)
        )
        blocks_per_chunk = reader.number() % 5
        try:
            made = KVLayout(tensors, groups, blocks_per_chunk)
        except LayoutError:
            return
        ids = np.array([reader.number() % 8 - 1 for _ in range(reader.number() % 12)], dtype=np.int64)
        keys = [reader.number() % 3 for _ in range(reader.number() % 5)]
        sizes = [reader.number() % 8 for _ in groups]
        first = [reader.number() % 9 - 1 for _ in groups]
        try:
            chunks = split_job(
                keys, ids, sizes, first, range(len(groups)), blocks_per_chunk=blocks_per_chunk,
                require_full_tail=bool(len(data) & 1),
            )  # fmt: skip
        except LayoutError:
            return
        expect([chunk.key_index for chunk in chunks] == list(range(len(keys))), "a chunk for each key, in order")
        for chunk in chunks:
            _check(made, chunk)

    return one


def _sizes(reader: Reader) -> tuple[int, int]:
    page = reader.choice(_SIZES)
    return page + reader.choice((0, 0, 1, 64)), page


def _check(made: KVLayout, chunk: ChunkBlocks) -> None:
    """Compare the extents, joined and not, with the bytes that a block is said to consist of."""
    group = made.groups[chunk.group]
    try:
        plain = job_extents(made, [chunk], coalesce=False).extents
    except LayoutError:
        bounds = [made.tensors[run.tensor_index].num_blocks for run in group.refs]
        outside = not group.refs or chunk.block_ids.min() < 0 or chunk.block_ids.max() >= min(bounds)
        full = chunk.first_block + len(chunk.block_ids) > made.blocks_per_chunk
        expect(outside or full, "blocks that are there have extents")
        return
    wanted = [
        (
            run.tensor_index,
            int(block) * made.tensors[run.tensor_index].stride_bytes + run.page_offset,
            (chunk.first_block + number) * group.block_bytes + sum(before.length for before in group.refs[:position]),
            run.length,
        )
        for number, block in enumerate(chunk.block_ids)
        for position, run in enumerate(group.refs)
    ]
    expect(list(zip(*(column.tolist() for column in plain), strict=True)) == wanted, "extents are the runs of blocks")
    for tensor, offset, _, length in wanted:
        expect(0 <= offset <= offset + length <= made.tensors[tensor].span_bytes, "extents lie within their tensor")
    joined = job_extents(made, [chunk]).extents
    rows = list(zip(*(column.tolist() for column in joined), strict=True))
    expect(sum(row[3] for row in rows) == sum(row[3] for row in wanted), "joined extents have as many bytes")
    for row in wanted:
        expect(
            any(
                tensor == row[0] and row[1] - offset == row[2] - at and 0 <= row[1] - offset <= length - row[3]
                for tensor, offset, at, length in rows
            ),
            "each run lies in a joined extent, at the same distance",
        )


def heads(scratch: Path) -> One:
    """Layers with heads, dealt out to shards: refused, or each byte of each head in one shard."""

    def one(data: bytes) -> None:
        reader = Reader(data)
        layers = [
            HeadPages(reader.number() % 3, reader.number(), 1 + reader.number() % 8, 1 + reader.number())
            for _ in range(reader.number() % 4)
        ]
        shards = 1 + reader.number() % 8
        try:
            groups = shard_groups(layers, shards)
        except LayoutError:
            expect(any(layer.heads % shards for layer in layers), "what can be dealt out is dealt out")
            return
        expect(len(groups) == shards, "a layout for each shard")
        for number, layer in enumerate(layers):
            size = layer.heads // shards * layer.head_bytes
            bytes_of_all = sum(group.block_bytes for group in groups)
            expect(bytes_of_all == sum(each.heads * each.head_bytes for each in layers), "all bytes, each once")
            expect(size * shards == layer.heads * layer.head_bytes, f"heads of layer {number} are whole")

    return one


def pages(scratch: Path) -> One:
    """KV tensors of any shape and strides, as vLLM registers them: not understood, or extents within their storage."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec
    from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor

    from nixl_offload.vllm.kv_caches import canonical_layout
    from nixl_offload.vllm.kv_heads import _head_pages, _why_not

    dtypes = (torch.float16, torch.float32, torch.uint8)

    def one(data: bytes) -> None:
        reader = Reader(data)
        dtype = reader.choice(dtypes)
        blocks, block_size, kv_heads, size = (1 + reader.number() % 5 for _ in range(4))
        divides, outermost = 1 + reader.number() % 3, reader.number() % 2
        kind = MLAAttentionSpec if reader.number() % 3 == 0 else FullAttentionSpec
        spec = kind(block_size=block_size, num_kv_heads=kv_heads, head_size=size, dtype=dtype)
        shape = [blocks * divides, kv_heads, block_size, 2 * size if kind is FullAttentionSpec else size]
        for _ in range(reader.number() % 3):
            shape[reader.number() % 4] = 1 + reader.number() % 5
        order = [0, *sorted(range(1, 4), key=lambda _: reader.number())]
        gap = reader.number() % 4
        strides, step = [0] * 4, 1
        for place in reversed(order):
            strides[place] = step
            step *= shape[place] + gap * (place == order[outermost])
        storage = torch.zeros(step + 16, dtype=dtype)
        tensor = storage.as_strided(shape, strides, reader.number() % 8)
        why = _why_not(spec, tensor, blocks, kv_heads)
        if why is not None:
            expect(isinstance(why, str) and why, "a reason is a clause")
            return
        page = spec.unpadded_page_size_bytes
        whole = storage.view(torch.uint8)
        stride = tensor.stride(0) * tensor.element_size() * (tensor.shape[0] // blocks)
        begin = tensor.storage_offset() * tensor.element_size()
        rows = whole.as_strided((blocks, stride), (stride, 1), min(begin, max(0, len(whole) - blocks * stride)))
        canonical = CanonicalKVCaches(
            [CanonicalKVCacheTensor(rows, stride)], [[CanonicalKVCacheRef(tensor_idx=0, page_size_bytes=page)]]
        )
        try:
            made = canonical_layout(canonical, 2)
            found = _head_pages(spec, tensor, made.tensors)
        except LayoutError:
            return
        expect(found.heads * found.head_bytes == page, "heads fill the page")
        low, high = storage.data_ptr(), storage.data_ptr() + whole.numel()
        for block in range(blocks):
            at = made.tensors[0].base_address + block * made.tensors[0].stride_bytes + found.page_offset
            expect(low <= at and at + page <= high, "pages lie within their storage")
            first = tensor[block * (tensor.shape[0] // blocks)]
            expect(at == first.data_ptr(), "pages are found where they are")

    return one


def targets() -> Iterator[Target]:
    """All of KV memory."""
    yield Target("memory/layout", layout, 80_000, lambda: [bytes(range(1, 60)), b"\1" * 60], max_bytes=128)
    yield Target("memory/heads", heads, 80_000, lambda: [b"\2\0\0\3\7\1\0\3\7\3"], max_bytes=32)
    yield Target("memory/pages", pages, 40_000, lambda: [b"\0" * 24, bytes(range(24))], max_bytes=32)
