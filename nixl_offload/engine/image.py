"""Where header page, blocks and padding of a chunk lie. A staging slot and a file have the same layout.

Threading: pure functions over slots that the caller owns; ``GroupPlan`` is written by the pump alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from nixl_offload.chunk.header import HEADER_BYTES, MAGIC
from nixl_offload.chunk.layout import KVLayout
from nixl_offload.engine.records import Chunk, WorkKind
from nixl_offload.engine.staging import HostSlot, Slot
from nixl_offload.movers.base import MoverLimits
from nixl_offload.types import PAGE_BYTES, align_up

Spans = Sequence[tuple[int, int]]
"""(offset, length) pairs in bytes, relative to the begin of a slot and of its location in the tier."""

MAX_CUTS = 1024
"""Most cuts that a group's plan caches."""

TransferPath = Literal["direct", "device", "host"]
"""How KV blocks reach a tier: the mover touches the blocks, or chunks are packed in device or host memory."""


@dataclass(slots=True)
class GroupPlan:
    """The sizes of a group's chunks, and their transfer path over one link."""

    blocks: int
    block_bytes: int
    slot_bytes: int
    num_blocks: int
    """Blocks of the KV cache; all block ids are below this."""
    limits: MoverLimits
    """The mover's."""
    path: TransferPath = "host"
    packed: TransferPath = "host"
    """Where chunks are packed when they do not go direct. A late or quarantined direct load sets ``path`` to this for
    good."""
    reads_whole: bool = False
    """Loads read whole images, because the MAC covers the image."""
    goes_singly: bool = False
    """Batches have one chunk. Set for good after a quarantine, so that the next one costs only one chunk's slot."""
    cuts: dict[tuple[int, int], Cut] = field(default_factory=dict)
    """By first block and number of blocks: see ``cut``."""


class Cut(NamedTuple):
    """Where wanted blocks lie in a chunk's image, and which spans are moved for them."""

    spans: Spans
    """Spans that a load reads: the header page and the pages that cover the blocks; one span if they touch."""
    store_spans: Spans
    """Spans that a store writes: the same, or the whole slot if the mover has ``whole_writes``."""
    padding: tuple[slice, ...]
    """Parts of ``store_spans`` around the blocks. They are zeroed, so that bytes of an earlier chunk are not stored."""


def make_plan(layout: KVLayout, group: int, limits: MoverLimits) -> GroupPlan:
    """Return the plan of a group. That of a group without layers has no bytes; ``faults`` rejects its chunks."""
    refs, block_bytes = layout.groups[group].refs, layout.groups[group].block_bytes
    return GroupPlan(
        blocks=layout.blocks_per_chunk,
        block_bytes=block_bytes,
        slot_bytes=layout.slot_bytes(group),
        num_blocks=min((layout.tensors[run.tensor_index].num_blocks for run in refs), default=0),
        limits=limits,
    )


def faults(plan: GroupPlan, chunks: Sequence[Chunk]) -> list[str | None]:
    """Return for each chunk why it cannot be moved, or None. Reasons: blocks outside the KV cache or the chunk; neither
    blocks nor a host slot; a location that is too small; a group without layers on this rank; a store that does not
    reach the chunk's end or names a host slot.
    """
    ids = np.concatenate([chunk.block_ids for chunk in chunks]).view(np.uint32)  # negative ids become the largest
    ids_fit = not len(ids) or ids.max() < plan.num_blocks
    return [_fault(plan, chunk, ids_fit=ids_fit) for chunk in chunks]


def _fault(plan: GroupPlan, chunk: Chunk, *, ids_fit: bool) -> str | None:
    """``ids_fit``: all block ids of the batch are known to be right."""
    count = len(chunk.block_ids)
    if not plan.block_bytes:
        return f"this rank has no layer of group {chunk.group}"
    if chunk.location.slot_bytes < plan.slot_bytes:
        return f"{chunk.location} is too small for a chunk of {plan.slot_bytes} bytes"
    least = 0 if chunk.host_offset is not None else 1
    if chunk.first_block < 0 or count < least or chunk.first_block + count > plan.blocks:
        return f"blocks {chunk.first_block} to {chunk.first_block + count} of a chunk of {plan.blocks}"
    if chunk.kind is WorkKind.STORE:
        if chunk.host_offset is not None:
            return "a store takes KV blocks: there is no host memory in it"
        if chunk.first_block + count != plan.blocks:
            return f"a store of blocks up to {chunk.first_block + count} of {plan.blocks}"
    if count and not ids_fit:
        lowest, highest = int(chunk.block_ids.min()), int(chunk.block_ids.max())
        if lowest < 0 or highest >= plan.num_blocks:
            return f"block ids {lowest} to {highest} of a KV cache of {plan.num_blocks} blocks"
    return None


def invalidate(slot: HostSlot) -> None:
    """Make the header invalid before its blocks change, so that loads of the earlier chunk are refused."""
    slot.memory[: len(MAGIC)] = 0


def any_slot(chunk: Chunk) -> Slot[Any]:
    """Return the chunk's slot in the host slab if it has one, else in staging."""
    slot = chunk.host_slot if chunk.host_slot is not None else chunk.staging_slot
    assert slot is not None
    return slot


def is_on_device(chunk: Chunk) -> bool:
    """Whether the chunk has a staging slot in device memory."""
    return not isinstance(any_slot(chunk).region, np.ndarray)


class Stack(NamedTuple):
    """Chunks that are copied, summed and checked in one call."""

    chunks: Sequence[Chunk]
    images: Any
    """Shape (chunks, slot_bytes): an array, or a tensor for slots on the device."""

    def rows(self, plan: GroupPlan, first_block: int | None = None) -> Any:
        """Return the wanted blocks, or all from ``first_block`` on: a view of shape (blocks, block_bytes)."""
        first, end = first_block, plan.blocks
        if first is None:
            first, end = self.chunks[0].first_block, self.chunks[0].first_block + len(self.chunks[0].block_ids)
        begin, end = (HEADER_BYTES + block * plan.block_bytes for block in (first, end))
        return self.images[:, begin:end].reshape(-1, plan.block_bytes)

    def part(self, plan: GroupPlan) -> tuple[npt.NDArray[np.int32], Any]:
        """Return ids and rows of all wanted blocks, as ``Packer`` takes them."""
        return np.concatenate([chunk.block_ids for chunk in self.chunks]), self.rows(plan)

    @property
    def pages(self) -> Any:
        """The header pages."""
        return self.images[:, :HEADER_BYTES]


def stacks(plan: GroupPlan, chunks: Sequence[Chunk]) -> list[Stack]:
    """Return a stack of chunks in neighbouring slots if a chunk is one block; else one for each chunk."""
    found, begin, slots = [], 0, [any_slot(chunk) for chunk in chunks]
    for end, slot in enumerate(slots, start=1):
        if end < len(slots) and plan.blocks == 1:
            after = slots[end]
            is_next = after.region is slot.region and after.slot_bytes == slot.slot_bytes
            if is_next and after.offset_bytes == slot.offset_bytes + slot.slot_bytes:
                continue
        memory = slot.region[slots[begin].offset_bytes : slot.offset_bytes + slot.slot_bytes]
        found.append(Stack(chunks[begin:end], memory.reshape(end - begin, -1)))
        begin = end
    return found


def cut(plan: GroupPlan, chunk: Chunk) -> Cut:
    """Return where the chunk's wanted blocks lie. Cached, since nearly all chunks are whole."""
    first, count = chunk.first_block, len(chunk.block_ids)
    known = plan.cuts.get((first, count))
    if known is not None:
        return known
    if len(plan.cuts) >= MAX_CUTS:
        plan.cuts.clear()
    begin, end = HEADER_BYTES + first * plan.block_bytes, HEADER_BYTES + (first + count) * plan.block_bytes
    page = HEADER_BYTES + first * plan.block_bytes // PAGE_BYTES * PAGE_BYTES
    last = align_up(end)
    parts: Spans = ((0, last),) if page == HEADER_BYTES else ((0, HEADER_BYTES), (page, last - page))
    stored = whole(plan) if plan.limits.whole_writes else parts
    moved = whole(plan) if plan.reads_whole else parts
    written_from, written = stored[-1]
    around = (max(written_from, HEADER_BYTES), begin), (end, written_from + written)
    padding = tuple(slice(a, b) for a, b in around if a < b)
    plan.cuts[first, count] = found = Cut(moved, stored, padding)
    return found


def whole(plan: GroupPlan) -> Spans:
    """Return the whole image as one span, with padding."""
    return ((0, plan.slot_bytes),)


def clear_around(slot: HostSlot, plan: GroupPlan, first_block: int) -> None:
    """Zero the parts of an image that are not header or blocks from ``first_block`` on: they are stored with it."""
    if first_block:
        slot.memory[HEADER_BYTES : HEADER_BYTES + first_block * plan.block_bytes] = 0
    end = HEADER_BYTES + plan.blocks * plan.block_bytes
    if end < plan.slot_bytes:
        slot.memory[end : plan.slot_bytes] = 0
