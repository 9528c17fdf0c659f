"""Direct: the mover reads and writes the KV blocks themselves; only header pages have memory of their own.

Threading and ownership: see ``common``.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from nixl_offload.engine.batch import Batch, Phase, Steps
from nixl_offload.engine.copies import Summed
from nixl_offload.engine.image import host_slot
from nixl_offload.engine.states import ChunkState
from nixl_offload.engine.transfer_paths.common import TierPaths
from nixl_offload.movers.base import Op
from nixl_offload.types import Outcome

logger = logging.getLogger(__name__)

LATE_S = 30.0
"""After this a load counts as late: what the next ones would wait for as well, each with its request."""


def _sum(paths: TierPaths, batch: Batch) -> Steps:
    """Sum the blocks where they lie: after the job's fence, for which no mover would wait."""
    if not paths.take_slots(batch, "direct"):
        return
    sums = _sums(paths, batch)
    yield from batch.passes([sums])
    for chunk, encoded in zip(batch.alive, paths.encode(batch, sums.values()), strict=True):
        host_slot(chunk).memory[:] = encoded


def _write(paths: TierPaths, batch: Batch) -> Steps:
    """Write header pages and blocks. The blocks are free once the mover has read them."""
    if batch.submitted_s is None:
        yield from paths.open_targets(batch)
        # The blocks were still ours when they were summed: if they are given away later, the sums tell.
        if not paths.advance_or_end(batch, ChunkState.BORROWED):
            return
        _submit(paths, batch, Op.WRITE)
    yield from paths.finish_writes(batch)


def _take_header_pages(paths: TierPaths, batch: Batch) -> Steps:
    paths.take_slots(batch, "direct")
    yield from ()


def _read(paths: TierPaths, batch: Batch) -> Steps:
    """Read into the blocks."""
    if batch.submitted_s is None:
        yield from paths.open_targets(batch)
        # Pending writes to the blocks, zeroing for one, must not come after the load.
        while not batch.chunks[0].job.fence.done():
            yield
        if not paths.advance_or_end(batch, ChunkState.SCATTER):
            return
        _submit(paths, batch, Op.READ)
    yield from paths.arrive(batch, _await_load(paths, batch))
    plan = batch.plan
    if batch.is_quarantined:
        if plan.path == "direct":
            group = batch.chunks[0].group
            logger.error("A failed load may still write to KV blocks; group %d goes through staging from now on", group)
        plan.path = plan.packed
        plan.late_loads.update(batch.chunks)
    yield from paths.wait_out_quarantine(batch)
    paths.finish_reads(batch)


def _verify(paths: TierPaths, batch: Batch) -> Steps:
    """Verify the blocks where they lie. A chunk that fails is zeroed afterwards."""
    checked = paths.check(batch)
    checked.refuse_absent()
    chunks = batch.alive
    if paths.verify_checksum and chunks:
        sums = _sums(paths, batch)
        yield from batch.passes([sums])
        checked.verify(chunks, [chunk.first_block for chunk in chunks], sums.values())
    for chunk in batch.alive:
        chunk.end(Outcome.OK)


def _await_load(paths: TierPaths, batch: Batch) -> Steps:
    """As ``TierPaths.await_all``. While storage is late, later loads go through staging, where they can be given up.
    This one cannot: its blocks may still be written. Late is counted from its submit, parted from others or not.
    """
    plan, late_s = batch.plan, (batch.submitted_s or 0.0) + LATE_S
    try:
        for _ in paths.await_all(batch):
            if paths.table.clock() >= late_s and not plan.late_loads.issuperset(batch.alive):
                plan.path = plan.packed
                plan.late_loads.update(batch.alive)
                logger.error(
                    "A load into KV blocks has not ended within %.0f s: its request waits until storage answers. Group "
                    "%d goes through staging until then",
                    LATE_S,
                    batch.chunks[0].group,
                )
            yield
    finally:
        # What is still under way goes on in a part, and is late there too.
        if plan.late_loads and not batch.is_pending:
            plan.late_loads.difference_update(batch.chunks)
            if not plan.late_loads:
                plan.path = "direct"


def _submit(paths: TierPaths, batch: Batch, op: Op) -> None:
    batch.touches_blocks = True
    paths.start_transfers(batch, lambda chunks: paths.linked.submit_direct(op, paths.layout, chunks))


def _sums(paths: TierPaths, batch: Batch) -> Summed:
    chunks = batch.alive
    return paths.packer.sums(chunks[0].group, [chunk.block_ids for chunk in chunks], chunks[0].job.fence)


STORE: Final[Sequence[Phase]] = (_sum, _write)
LOAD: Final[Sequence[Phase]] = (_take_header_pages, _read, _verify)
