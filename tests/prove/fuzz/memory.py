"""Targets: how KV memory lies: tensors that vLLM registers, and the extents that are transferred for them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from nixl_offload.chunk.layout import (
    ChunkBlocks,
    KVLayout,
    job_extents,
)
from nixl_offload.errors import LayoutError
from tests.prove.fuzz.target import One, Reader, Target, expect


def _check(made: KVLayout, chunk: ChunkBlocks) -> None:
    """Compare the extents with the bytes that a block is said to consist of."""
    group = made.groups[chunk.group]
    try:
        joined = job_extents(made, [chunk]).extents
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
    for tensor, offset, _, length in wanted:
        expect(0 <= offset <= offset + length <= made.tensors[tensor].span_bytes, "extents lie within their tensor")
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
    yield Target("memory/pages", pages, 40_000, lambda: [b"\0" * 24, bytes(range(24))], max_bytes=32)
