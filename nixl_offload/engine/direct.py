"""The direct path: the mover reads and writes the KV blocks themselves; only header pages have their own memory.

Threading and ownership: see ``paths``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from nixl_offload.chunk.header import HEADER_BYTES
from nixl_offload.chunk.layout import ChunkBlocks, job_extents
from nixl_offload.engine.image import any_slot
from nixl_offload.engine.packer import Summed
from nixl_offload.engine.paths import Batch, Phase, Steps
from nixl_offload.engine.records import Chunk, ChunkState
from nixl_offload.movers.base import FileId, MemoryId, Transfer
from nixl_offload.types import Outcome

if TYPE_CHECKING:
    from nixl_offload.engine.link_paths import LinkPaths

logger = logging.getLogger(__name__)

LATE_S = 30.0
"""A load that takes longer is late. The next direct loads would wait too, each with its request."""


def _sum(paths: LinkPaths, batch: Batch) -> Steps:
    """Sum the blocks in place, after the job's fence; a mover would not wait for the fence."""
    if not paths.take_slots(batch, "direct"):
        return
    sums = _sums(paths, batch)
    yield from batch.passes([sums])
    for chunk, encoded in zip(batch.alive, paths.encode(batch, sums.values()), strict=True):
        any_slot(chunk).memory[:] = encoded


def _write(paths: LinkPaths, batch: Batch) -> Steps:
    """Write header pages and blocks. vLLM may reuse the blocks once the mover has read them."""

    def claim() -> Steps:
        # The blocks were ours when they were summed. If vLLM reuses them later, the sums do not match.
        batch.touches_blocks = paths.advance_or_end(batch, ChunkState.BORROWED)
        yield from ()

    yield from paths.transfer(batch, partial(_transfers, paths), claim)


def _take_header_pages(paths: LinkPaths, batch: Batch) -> None:
    paths.take_slots(batch, "direct")


def _read(paths: LinkPaths, batch: Batch) -> Steps:
    """Read into the blocks."""

    def claim() -> Steps:
        # Pending writes to the blocks, such as zeroing, must not come after the load.
        while not batch.chunks[0].job.fence.done():
            yield
        batch.touches_blocks = paths.advance_or_end(batch, ChunkState.SCATTER)

    yield from paths.transfer(batch, partial(_transfers, paths), claim, _await_load(paths, batch))


def _verify(paths: LinkPaths, batch: Batch) -> Steps:
    """Verify the blocks in place. The blocks of a chunk that fails are zeroed afterwards."""
    headers = paths.check(batch)
    chunks = batch.alive
    if paths.verify_checksum and chunks:
        sums = _sums(paths, batch)
        yield from batch.passes([sums])
        paths.compare(batch, headers, [chunk.first_block for chunk in chunks], sums.values())
    for chunk in batch.alive:
        chunk.end(Outcome.OK)


def _await_load(paths: LinkPaths, batch: Batch) -> Steps:
    """As ``Batch.ends``. If storage is late, or may still write after a failure, later loads of the group go through
    staging, where they can be given up. This load cannot. Time counts from its submit, also in a split batch.
    """
    plan, group, late_s = batch.plan, batch.chunks[0].group, (batch.submitted_s or 0.0) + LATE_S
    try:
        for _ in batch.ends():
            if paths.table.clock() >= late_s and plan.path == "direct":
                plan.path = plan.packed
                logger.error(
                    "A load into KV blocks has not ended within %.0f s: its request waits until storage answers. Group "
                    "%d goes through staging from now on",
                    LATE_S,
                    group,
                )
            yield
    finally:
        if batch.is_quarantined and plan.path == "direct":
            plan.path = plan.packed
            logger.error("A failed load may still write to KV blocks; group %d goes through staging from now on", group)


def _transfers(paths: LinkPaths, chunks: Sequence[Chunk]) -> Iterator[Transfer]:
    """As ``LinkPaths.submit``: move header pages, then KV blocks, by a transfer for each registered region and file."""
    op = chunks[0].kind.op
    yield from paths.submit_spans(lambda _: ((0, HEADER_BYTES),), chunks)
    blocks = [
        ChunkBlocks(number, chunk.group, chunk.block_ids, chunk.first_block) for number, chunk in enumerate(chunks)
    ]
    starts, extents = job_extents(paths.layout, blocks)
    targets = [chunk.target for chunk in chunks if chunk.target is not None]
    counts = np.diff(starts)
    payload_at = np.repeat([target.offset + HEADER_BYTES for target in targets], counts)
    file_of = np.repeat([int(target.file) for target in targets], counts)
    tensors = [paths.link_memory.tensors[tensor] for tensor in extents.tensor_index.tolist()]
    memory_of = np.array([int(tensor.memory) for tensor in tensors])
    memory_offset = extents.memory_offset + np.array([tensor.offset_bytes for tensor in tensors])
    file_offset = extents.payload_offset + payload_at
    for memory, file in dict.fromkeys(zip(memory_of.tolist(), file_of.tolist(), strict=True)):
        of = (memory_of == memory) & (file_of == file)
        in_memory = np.stack([memory_offset[of], extents.length[of]], axis=1)
        in_file = np.stack([file_offset[of], extents.length[of]], axis=1)
        yield paths.link.mover.submit(op, MemoryId(memory), in_memory, FileId(file), in_file)


def _sums(paths: LinkPaths, batch: Batch) -> Summed:
    chunks = batch.alive
    return paths.packer.sums(chunks[0].group, [chunk.block_ids for chunk in chunks], chunks[0].job.fence)


STORE: Final[Sequence[Phase]] = (_sum, _write)
LOAD: Final[Sequence[Phase]] = (_take_header_pages, _read, _verify)
