"""Where the blocks of a job lie: arithmetic from vLLM's KV tensors and block lists to extents of memory and payload,
and from a range of KV heads to bytes of a layer's pages.

The payload of a shard is block-major, without gaps: all runs of block 0, then those of block 1, and so on. A run is
consecutive bytes of a page. In shards cut by heads, a block is ordered by layer, then by head. That order depends
neither on tensor parallelism nor on whether layers lie side by side in a block. A job whose numbers do not fit is
refused.
Threading: immutable descriptions and pure functions; safe anywhere. The arrays handed out belong to the caller.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from nixl_offload.chunk.header import MAX_BLOCKS_PER_CHUNK, slot_bytes as format_slot_bytes
from nixl_offload.errors import LayoutError

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RegionSpec:
    """One KV tensor: ``num_blocks`` pages of ``page_bytes``, ``stride_bytes`` apart, the first at ``base_address``."""

    base_address: int
    num_blocks: int
    stride_bytes: int
    page_bytes: int
    """The page with its padding; ``GroupLayout`` says which bytes of it a group stores."""

    @property
    def span_bytes(self) -> int:
        """Bytes from the start of block 0 to the end of the last block."""
        return (self.num_blocks - 1) * self.stride_bytes + self.page_bytes


class PageRun(NamedTuple):
    """Consecutive bytes of the pages of one tensor."""

    tensor_index: int
    page_offset: int
    """Bytes from the start of the page."""
    length: int
    """Bytes."""


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """The parts of one block of a KV-cache group: runs of its layers' pages, without padding."""

    refs: tuple[PageRun, ...]
    """In payload order; runs that touch are joined. Empty if the worker (a pipeline stage) has no layer of the group;
    it then stores no part of the group's chunks."""
    block_bytes: int = field(init=False, compare=False)
    """Bytes of one block in the payload."""

    def __post_init__(self) -> None:
        joined: list[PageRun] = []
        for run in self.refs:
            last = joined[-1] if joined else PageRun(-1, 0, 0)
            if (last.tensor_index, last.page_offset + last.length) == run[:2]:
                joined[-1] = last._replace(length=last.length + run.length)
            else:
                joined.append(run)
        object.__setattr__(self, "refs", tuple(joined))
        object.__setattr__(self, "block_bytes", sum(run.length for run in joined))

    @classmethod
    def of_pages(cls, pages: Iterable[tuple[int, int]]) -> GroupLayout:
        """Return the layout of whole pages. ``pages``: ``(tensor_index, page_bytes)``, padding left out."""
        return cls(tuple(PageRun(tensor_index, 0, page_bytes) for tensor_index, page_bytes in pages))


@dataclass(frozen=True, slots=True)
class HeadPages:
    """One layer's pages on one rank. Within each page its heads follow each other without gaps."""

    tensor_index: int
    page_offset: int
    """Bytes from the start of the tensor's page."""
    heads: int
    """KV heads on this rank; 1 if KV is not divided (MLA)."""
    head_bytes: int
    """Bytes of one head in one block."""


def shard_groups(layers: Sequence[HeadPages], shards: int) -> tuple[GroupLayout, ...]:
    """Return the layout of each of a rank's ``shards`` of a group, in the order of their heads.

    ``layers``: the rank's layers of the group, in the model's order. Raises LayoutError if heads do not divide evenly.
    """
    for layer in layers:
        if layer.heads % shards:
            raise LayoutError(f"{layer.heads} KV heads cannot be dealt out to {shards} shards")
    lengths = [layer.heads // shards * layer.head_bytes for layer in layers]
    return tuple(
        GroupLayout(
            tuple(
                PageRun(layer.tensor_index, layer.page_offset + shard * length, length)
                for layer, length in zip(layers, lengths, strict=True)
            )
        )
        for shard in range(shards)
    )


class ChunkBlocks(NamedTuple):
    """The blocks of a job that belong to one of its keys."""

    key_index: int
    """Position of the key in the job."""
    group: int
    """Position in ``KVLayout.groups``. It differs from the group id in the key if some groups are not offloaded."""
    block_ids: Int32Array
    """Shape ``(n,)``: consecutive blocks of the chunk."""
    first_block: int
    """Position of the first of them in the chunk."""


class ChunkExtents(NamedTuple):
    """Extents, one per row, in payload order: ``length`` bytes at both ``memory_offset`` and ``payload_offset``."""

    tensor_index: Int32Array
    memory_offset: Int64Array
    """From the tensor's ``base_address``."""
    payload_offset: Int64Array
    """From the first byte after the header page."""
    length: Int64Array


@dataclass(frozen=True, slots=True)
class KVLayout:
    """All KV memory of one worker and how its groups are stored.

    Raises LayoutError if a group refers to a missing tensor or past a page's end, or if a chunk has too many blocks.
    """

    tensors: tuple[RegionSpec, ...]
    groups: tuple[GroupLayout, ...]
    blocks_per_chunk: int

    def __post_init__(self) -> None:
        if not 1 <= self.blocks_per_chunk <= MAX_BLOCKS_PER_CHUNK:
            raise LayoutError(f"a chunk of {self.blocks_per_chunk} blocks; 1 to {MAX_BLOCKS_PER_CHUNK} are possible")
        for index, tensor in enumerate(self.tensors):
            if tensor.num_blocks < 1 or not 1 <= tensor.page_bytes <= tensor.stride_bytes:
                raise LayoutError(
                    f"tensor {index}: {tensor.num_blocks} pages of {tensor.page_bytes} bytes, "
                    f"{tensor.stride_bytes} apart"
                )
        runs = [(position, run) for position, group in enumerate(self.groups) for run in group.refs]
        for position, (tensor_index, page_offset, length) in runs:
            if not 0 <= tensor_index < len(self.tensors):
                raise LayoutError(f"group {position} refers to tensor {tensor_index} of {len(self.tensors)}")
            page_bytes = self.tensors[tensor_index].page_bytes
            if page_offset < 0 or length < 1 or page_offset + length > page_bytes:
                raise LayoutError(
                    f"group {position} stores {length} bytes from byte {page_offset} on of the pages of tensor "
                    f"{tensor_index}, which have {page_bytes}"
                )

    def slot_bytes(self, position: int) -> int:
        """Return the bytes of one shard of the group on the medium, header and padding included; 0 if it has none."""
        block_bytes = self.groups[position].block_bytes
        return format_slot_bytes(self.blocks_per_chunk, block_bytes) if block_bytes else 0

    def is_group_direct_capable(self, position: int, alignment_bytes: int) -> bool:
        """Whether every possible extent of this group is aligned to ``alignment_bytes``."""
        return all(
            (self.tensors[tensor].base_address | self.tensors[tensor].stride_bytes | page_offset | length)
            % alignment_bytes
            == 0
            for tensor, page_offset, length in self.groups[position].refs
        )


def split_job(
    key_groups: Sequence[int],
    block_ids: npt.NDArray[np.integer],
    group_sizes: Sequence[int],
    block_indices: Sequence[int],
    group_ids: Sequence[int],
    *,
    blocks_per_chunk: int,
    require_full_tail: bool = False,
) -> list[ChunkBlocks]:
    """Assign a job's blocks to its keys, as vLLM's ``GPULoadStoreSpec`` orders them: an entry per key, in their order.

    Within a group the blocks fill the chunks in order. The first block lies at position ``block_indices %
    blocks_per_chunk`` of the first chunk.

    ``key_groups``: the group id of each key, in the job's order. ``block_ids``: shape ``(n,)``, group after group;
    ``group_sizes``: how many of them belong to each group, zeros included. ``block_indices``: by group, the position of
    its first block in the request. ``group_ids``: by group, the id in its keys. ``require_full_tail``: the last chunk
    of each group must be full, as in a store; a load may end inside it.

    Raises LayoutError if the numbers do not fit each other. A store from a sliding window with holes among its blocks
    is refused whole, because the positions of the holes are unknown.
    """
    if not len(group_sizes) == len(block_indices) == len(group_ids):
        raise LayoutError(
            f"{len(group_sizes)} group sizes, {len(block_indices)} block indices and {len(group_ids)} group ids"
        )
    ids: Int32Array = np.ascontiguousarray(block_ids, dtype=np.int32)
    if ids.ndim != 1 or min(group_sizes, default=0) < 0 or sum(group_sizes) != len(ids):
        raise LayoutError(f"group sizes {list(group_sizes)} for block ids of shape {ids.shape}")
    keys_of: dict[int, list[int]] = {group_id: [] for group_id in group_ids}
    if len(keys_of) != len(group_ids):
        raise LayoutError(f"group ids {list(group_ids)} repeat")
    for key_index, group_id in enumerate(key_groups):
        if group_id not in keys_of:
            raise LayoutError(f"key {key_index} belongs to group {group_id}; the job has {list(group_ids)}")
        keys_of[group_id].append(key_index)

    chunks: list[ChunkBlocks | None] = [None] * len(key_groups)
    begin = 0
    for position, (group_id, size, block_index) in enumerate(zip(group_ids, group_sizes, block_indices, strict=True)):
        keys = keys_of[group_id]
        if size == 0 and not keys:
            continue
        if block_index < 0:
            raise LayoutError(f"group {group_id} begins with block {block_index}")
        skip, room = block_index % blocks_per_chunk, len(keys) * blocks_per_chunk
        said = f"group {group_id}: {size} blocks from block {skip} of the first chunk on do not"
        if require_full_tail and skip + size != room:
            raise LayoutError(f"{said} fill {len(keys)} chunks of {blocks_per_chunk} to the end")
        if not size or not room - blocks_per_chunk < skip + size <= room:
            raise LayoutError(f"{said} end in the last of {len(keys)} chunks of {blocks_per_chunk}")
        at, end = begin, begin + size
        for key_index in keys:
            until = min(at + blocks_per_chunk - skip, end)
            chunks[key_index] = ChunkBlocks(key_index, position, ids[at:until], skip)
            at, skip = until, 0
        begin = end
    return [chunk for chunk in chunks if chunk is not None]


def job_extents(layout: KVLayout, chunks: Sequence[ChunkBlocks]) -> tuple[Int64Array, ChunkExtents]:
    """Return ``starts`` and the extents of the blocks of ``chunks``, which belong to one group.

    Extents are in payload order, chunk by chunk: those of chunk ``i`` are rows ``starts[i]`` to ``starts[i + 1]``.

    Neighbours in one chunk that touch both in memory and in the payload are joined. Raises LayoutError for ids outside
    the tensors or blocks outside the chunk.
    """
    group = layout.groups[chunks[0].group]
    tensors = [layout.tensors[run.tensor_index] for run in group.refs]
    sizes = np.array([len(chunk.block_ids) for chunk in chunks], dtype=np.int64)
    firsts = np.array([chunk.first_block for chunk in chunks], dtype=np.int64)
    bad = np.flatnonzero((sizes < 1) | (firsts < 0) | (firsts + sizes > layout.blocks_per_chunk))
    if bad.size:
        size, first = int(sizes[bad[0]]), int(firsts[bad[0]])
        raise LayoutError(f"blocks {first} to {first + size} of a chunk of {layout.blocks_per_chunk}")
    ids = np.concatenate([chunk.block_ids for chunk in chunks]).astype(np.int64)
    num_blocks = min((tensor.num_blocks for tensor in tensors), default=0)
    if ids.min() < 0 or ids.max() >= num_blocks:
        raise LayoutError(f"block ids {ids.min()} to {ids.max()} of a KV cache of {num_blocks} blocks")

    # One row for each block, one column for each run; flattened, they are in payload order.
    lengths = np.array([run.length for run in group.refs], dtype=np.int64)
    # Position in its chunk: the block's index, minus the index at which its chunk would begin with block 0.
    positions = np.arange(len(ids)) - np.repeat(np.cumsum(sizes) - sizes - firsts, sizes)
    strides = np.array([tensor.stride_bytes for tensor in tensors], dtype=np.int64)
    page_offsets = np.array([run.page_offset for run in group.refs], dtype=np.int64)
    memory = (ids[:, np.newaxis] * strides + page_offsets).ravel()
    payload = ((positions * group.block_bytes)[:, np.newaxis] + np.cumsum(lengths) - lengths).ravel()
    length = np.tile(lengths, len(ids))
    tensor = np.tile(np.array([run.tensor_index for run in group.refs], dtype=np.int32), len(ids))
    owner = np.repeat(np.repeat(np.arange(len(chunks)), sizes), len(lengths))

    joined = (memory[:-1] + length[:-1] == memory[1:]) & (payload[:-1] + length[:-1] == payload[1:])
    joined &= (owner[:-1] == owner[1:]) & (tensor[:-1] == tensor[1:])
    heads = np.flatnonzero(np.concatenate(([True], ~joined)))
    ends = np.append(heads[1:], len(memory)) - 1
    whole = payload[ends] + length[ends] - payload[heads]
    starts = np.searchsorted(owner[heads], np.arange(len(chunks) + 1))
    return starts, ChunkExtents(tensor[heads], memory[heads], payload[heads], whole)
