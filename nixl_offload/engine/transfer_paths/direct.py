"""Direct: the mover reads and writes the KV blocks themselves; only header pages have memory of their own.

Threading and ownership: see ``common``.
"""

from __future__ import annotations

import logging

from nixl_offload.engine.batch import Batch, Steps
from nixl_offload.engine.copies import Summed
from nixl_offload.engine.image import GroupPlan, host_slot
from nixl_offload.engine.records import Chunk
from nixl_offload.engine.states import ChunkState
from nixl_offload.engine.transfer_paths.common import Context
from nixl_offload.movers.base import Op
from nixl_offload.types import Outcome

logger = logging.getLogger(__name__)

LATE_S = 30.0
"""After this a load counts as late: what the next ones would wait for as well, each with its request."""


def store(context: Context, batch: Batch, plan: GroupPlan) -> Steps:
    """Sum the blocks where they lie, then write them. They are free once the mover has read them."""
    context.take_slots(batch, "direct")
    if not context.may_go(batch):
        return
    chunks = batch.alive
    # The sums come after the job's fence, for which no mover would wait.
    sums = _sums(context, chunks)
    yield from batch.passes([sums])
    for chunk, encoded in zip(chunks, context.encode(batch, plan, sums.values()), strict=True):
        host_slot(chunk).memory[:] = encoded
    yield from context.run(batch, plan, _write)


def _write(context: Context, batch: Batch, plan: GroupPlan) -> Steps:
    yield from context.open_targets(batch, plan)
    # The blocks were still ours when they were summed: if they are given away later, the sums tell.
    if not context.advance_or_end(batch, ChunkState.BORROWED):
        return
    _submit(context, batch, Op.WRITE)
    yield from context.arrive(batch, plan, _write, lambda part: context.finish_writes(part, plan, _write))


def load(context: Context, batch: Batch, plan: GroupPlan) -> Steps:
    """Read into the blocks, then verify them. If that fails they are zeroed, and the chunk says so."""
    context.take_slots(batch, "direct")
    if context.may_go(batch):
        yield from context.run(batch, plan, _read)


def _read(context: Context, batch: Batch, plan: GroupPlan) -> Steps:
    job = batch.chunks[0].job
    yield from context.open_targets(batch, plan)
    # Pending writes to the blocks, zeroing for one, must not come after the load.
    while not job.fence.done():
        yield
    if not context.advance_or_end(batch, ChunkState.SCATTER):
        return
    _submit(context, batch, Op.READ)
    late_s = context.clock() + LATE_S

    def finish(part: Batch) -> Steps:
        return _use(context, part, plan)

    yield from context.arrive(batch, plan, _read, finish, lambda part: _settle_load(context, part, plan, late_s))


def _use(context: Context, batch: Batch, plan: GroupPlan) -> Steps:
    if batch.is_quarantined:
        if plan.path == "direct":
            group = batch.chunks[0].group
            logger.error("A failed load may still write to KV blocks; group %d goes through staging from now on", group)
        plan.path = plan.packed
        plan.late_loads.update(batch.chunks)
    yield from context.wait_out_quarantine(batch)
    arrived = context.finish_reads(batch, plan, _read)
    if not arrived:
        return
    pages = [host_slot(chunk).memory for chunk in arrived]
    checked = context.check(arrived, plan, pages)
    checked.refuse_absent()
    chunks = batch.alive
    if context.verify_checksum and chunks:
        sums = _sums(context, chunks)
        yield from batch.passes([sums])
        checked.verify(chunks, [chunk.first_block for chunk in chunks], sums.values())
    for chunk in batch.alive:
        chunk.end(Outcome.OK)


def _settle_load(context: Context, batch: Batch, plan: GroupPlan, late_s: float) -> Steps:
    """As ``context.settle``. While storage is late, later loads go through staging, where they can be given up. This
    one cannot: its blocks may still be written. ``late_s``: when it is late, parted from others or not.
    """
    try:
        for _ in context.settle(batch):
            if context.clock() >= late_s and not plan.late_loads.issuperset(batch.alive):
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


def _submit(context: Context, batch: Batch, op: Op) -> None:
    batch.touches_blocks = True

    context.start_transfers(batch, lambda chunks: context.linked.submit_direct(op, context.layout, chunks))


def _sums(context: Context, chunks: list[Chunk]) -> Summed:
    return context.packer.sums(chunks[0].group, [chunk.block_ids for chunk in chunks], chunks[0].job.fence)
