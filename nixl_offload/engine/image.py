"""A chunk in a staging slot lies exactly as it lies in its file: header page, blocks, padding. Where each part begins.

Threading: pure functions over slots that the caller owns; ``GroupPlan`` is written by the pump alone.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from nixl_offload.chunk.header import HEADER_BYTES, Expected, encode_header, make_header
from nixl_offload.chunk.layout import KVLayout
from nixl_offload.engine.records import ChunkIO
from nixl_offload.engine.staging import DeviceSlot, Slot
from nixl_offload.errors import LayoutError
from nixl_offload.movers.base import Extents
from nixl_offload.types import PAGE_BYTES, align_up, key_group

Way = Literal["direct", "device", "host"]
"""Between KV blocks and a tier: the mover at the blocks themselves, or a chunk packed in device or in host memory."""


@dataclass(slots=True)
class GroupPlan:
    """The sizes of a group's chunks and how they travel by one link."""

    blocks: int
    block_bytes: int
    slot_bytes: int
    num_blocks: int
    """Of the KV cache; block ids lie below."""
    way: Way
    packed: Way
    """What ``way`` becomes, for good, when a load that went direct is quarantined."""
    whole_writes: bool
    """What is stored is written in one extent, padding and all."""
    tells_short_reads: bool
    """See ``movers.base.MoverLimits``."""


def make_plan(
    layout: KVLayout,
    group: int,
    *,
    way: Way = "host",
    packed: Way = "host",
    whole_writes: bool = True,
    tells_short_reads: bool = True,
) -> GroupPlan:
    """Return the plan of a group; as it stands for a tier that holds whole images in memory.

    Of a group without layers it has no bytes, and ``check`` lets no chunk of it pass.
    """
    refs, block_bytes = layout.groups[group].refs, layout.groups[group].block_bytes
    return GroupPlan(
        blocks=layout.blocks_per_chunk,
        block_bytes=block_bytes,
        slot_bytes=layout.slot_bytes(group),
        num_blocks=min((layout.tensors[index].num_blocks for index, _ in refs), default=0),
        way=way,
        packed=packed,
        whole_writes=whole_writes,
        tells_short_reads=tells_short_reads,
    )


def check(plan: GroupPlan, io: ChunkIO) -> None:
    """Raise LayoutError for blocks outside the KV cache or the chunk, for no blocks where no host slot takes part
    either, for a location that is too small, and for a group of which the rank has no layer.
    """
    count = len(io.block_ids)
    if not plan.block_bytes:
        raise LayoutError(f"this rank has no layer of group {io.group}")
    if io.location.slot_bytes < plan.slot_bytes:
        raise LayoutError(f"{io.location} is too small for a chunk of {plan.slot_bytes} bytes")
    least = 0 if io.host_offset is not None else 1
    if io.first_block < 0 or count < least or io.first_block + count > plan.blocks:
        raise LayoutError(f"blocks {io.first_block} to {io.first_block + count} of a chunk of {plan.blocks}")
    if not count:
        return
    lowest, highest = int(io.block_ids.min()), int(io.block_ids.max())
    if lowest < 0 or highest >= plan.num_blocks:
        raise LayoutError(f"block ids {lowest} to {highest} of a KV cache of {plan.num_blocks} blocks")


def expected(namespace: bytes, plan: GroupPlan, io: ChunkIO) -> Expected:
    """Return what the header of a chunk has to say."""
    return Expected(
        namespace=namespace,
        key=io.key,
        group=key_group(io.key),
        blocks=plan.blocks,
        block_bytes=plan.block_bytes,
    )


def rows(slot: Slot, plan: GroupPlan, io: ChunkIO) -> npt.NDArray[np.uint8]:
    """Return the blocks of a staged chunk that ``io`` is about: a view of shape (blocks, block_bytes)."""
    return _blocks(slot, plan, io.first_block, len(io.block_ids))


def device_rows(slot: DeviceSlot, plan: GroupPlan, io: ChunkIO) -> torch.Tensor:
    """``rows`` of a slot in device memory."""
    start, count = HEADER_BYTES + io.first_block * plan.block_bytes, len(io.block_ids)
    return slot.memory[start : start + count * plan.block_bytes].view(count, plan.block_bytes)


def valid_rows(slot: Slot, plan: GroupPlan, first_block: int) -> npt.NDArray[np.uint8]:
    """Return the blocks of an image from ``first_block`` to the last, as ``rows`` does."""
    return _blocks(slot, plan, first_block, plan.blocks - first_block)


def spans(plan: GroupPlan, io: ChunkIO) -> Extents:
    """Return what to read into a slot: header page and the pages that cover the blocks; one extent if they touch."""
    begin = HEADER_BYTES + io.first_block * plan.block_bytes // PAGE_BYTES * PAGE_BYTES
    end = HEADER_BYTES + align_up((io.first_block + len(io.block_ids)) * plan.block_bytes)
    if begin == HEADER_BYTES:
        return extents([0], [end])
    return extents([0, begin], [HEADER_BYTES, end - begin])


def store_spans(plan: GroupPlan, io: ChunkIO) -> Extents:
    """Return what to write of a slot: as much as is read, or the slot as a whole where there are no parts."""
    return whole(plan) if plan.whole_writes else spans(plan, io)


def whole(plan: GroupPlan) -> Extents:
    """Return an image as one extent, padding and all."""
    return extents([0], [plan.slot_bytes])


def write_header(slot: Slot, expect: Expected, checksums: npt.NDArray[np.uint64], first_block: int) -> None:
    """Encode the header of a chunk about to be stored. Raises LayoutError when its blocks do not reach its end."""
    header = make_header(expect, checksums, first_valid_block=first_block, created_s=int(time.time()))
    encode_header(header, slot.memory[:HEADER_BYTES])


def padding(plan: GroupPlan, io: ChunkIO, moved: Extents) -> list[tuple[int, int]]:
    """Return what is written around the blocks, as (begin, end) in the slot: to be zeroed, so that nothing stored holds
    what an earlier chunk left there.
    """
    begin, end = int(moved[-1, 0]), int(moved[-1].sum())
    rows_begin = HEADER_BYTES + io.first_block * plan.block_bytes
    rows_end = rows_begin + len(io.block_ids) * plan.block_bytes
    around = [(max(begin, HEADER_BYTES), rows_begin), (rows_end, end)]
    return [(first, last) for first, last in around if first < last]


def clear_padding(slot: Slot, plan: GroupPlan, io: ChunkIO, moved: Extents) -> None:
    """Zero the ``padding`` of a slot in host memory."""
    for begin, end in padding(plan, io, moved):
        slot.memory[begin:end] = 0


def clear_around(slot: Slot, plan: GroupPlan, first_block: int) -> None:
    """Zero what of an image is neither header nor a block from ``first_block`` on: it goes wherever the image goes."""
    slot.memory[HEADER_BYTES : HEADER_BYTES + first_block * plan.block_bytes] = 0
    slot.memory[HEADER_BYTES + plan.blocks * plan.block_bytes : plan.slot_bytes] = 0


def set_canary(slot: Slot, spans: Extents) -> int:
    """Put one and the same byte at the end of each extent, and return it: a read that is cut short leaves it there."""
    canary = os.urandom(1)[0]
    slot.memory[spans.sum(axis=1) - 1] = canary
    return canary


def may_be_short(slot: Slot, spans: Extents, canary: int) -> bool:
    """Whether some extent still ends in ``canary``. In one of 256 whole reads it does so by chance."""
    return bool((slot.memory[spans.sum(axis=1) - 1] == canary).any())


def _blocks(slot: Slot, plan: GroupPlan, first_block: int, count: int) -> npt.NDArray[np.uint8]:
    start = HEADER_BYTES + first_block * plan.block_bytes
    return slot.memory[start : start + count * plan.block_bytes].reshape(count, plan.block_bytes)


def extents(offsets: npt.ArrayLike, lengths: npt.ArrayLike) -> Extents:
    """Return offsets and lengths as one array of shape (n, 2)."""
    return np.stack([np.asarray(offsets, dtype=np.int64), np.asarray(lengths, dtype=np.int64)], axis=1)
