"""Direct: the mover reads and writes the KV blocks themselves; only the header page has memory of its own.

Threading and ownership: see ``ways.context``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from nixl_offload.chunk.header import verify_checksums
from nixl_offload.engine import image
from nixl_offload.engine.image import GroupPlan
from nixl_offload.engine.ports import Port
from nixl_offload.engine.pump import Flight
from nixl_offload.engine.ways.context import Context, quarantined
from nixl_offload.movers.base import Op
from nixl_offload.types import Outcome

logger = logging.getLogger(__name__)


def store(context: Context, flight: Flight, port: Port, plan: GroupPlan) -> Iterator[None]:
    """Sum the blocks where they lie, then write them. They are free once the mover has read them."""
    task, io = flight.task, flight.task.io
    slot = context.acquire(flight, context.memory.pages)
    if not context.may_store(task, port.link):
        return
    # The sums come after the job's fence, for which no mover would wait.
    sums = context.packer.sums(io.group, io.block_ids, task.job.fence)
    yield from flight.passes(sums)
    image.write_header(slot, image.expected(context.namespace, plan, io), sums.values(), io.first_block)
    target = yield from context.begin_write(flight, port.link, plan)
    # The blocks were still ours when they were summed: if they are given away later, the sums tell.
    if not context.table.touch_in_place(task):
        flight.abandon(None)
        return
    for transfer in port.submit_direct(Op.WRITE, context.layout, io, slot, target):
        flight.transfers.append(transfer)
    yield from context.settle(flight)
    yield from context.finish_store(flight, port.link, target)


def load(context: Context, flight: Flight, port: Port, plan: GroupPlan) -> Iterator[None]:
    """Read into the blocks, then verify them. If that fails they are garbage, and the chunk says so."""
    task, io = flight.task, flight.task.io
    slot = context.acquire(flight, context.memory.pages)
    if not context.may_load(task, port.link):
        return
    target = yield from context.begin_read(flight, port.link, plan)
    # Pending writes to the blocks, zeroing for one, must not come after the load.
    while not task.job.fence.done():
        yield
    if not context.table.touch_in_place(task):
        flight.abandon(None)
        return
    for transfer in port.submit_direct(Op.READ, context.layout, io, slot, target):
        flight.transfers.append(transfer)
    yield from context.settle(flight)
    if plan.way == "direct" and quarantined(flight):
        plan.way = plan.packed
        logger.error("A failed load may still write to KV blocks; group %d goes through staging from now on", io.group)
    yield from context.outlast(flight)
    if not context.finish_read(flight, port.link, target):
        return
    header = context.checked_header(slot.memory, plan, io)
    if context.verify_checksum:
        sums = context.packer.sums(io.group, io.block_ids, task.job.fence)
        yield from flight.passes(sums)
        verify_checksums(header, sums.values(), io.first_block)
    context.table.finish(task, Outcome.OK)
