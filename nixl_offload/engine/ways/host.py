"""Packed through host memory: a chunk is copied between KV blocks and a staging slot, and moved in one piece.

Threading and ownership: see ``ways.context``.
"""

from __future__ import annotations

from collections.abc import Iterator

from nixl_offload.chunk.checksum import block_checksums
from nixl_offload.chunk.header import HEADER_BYTES, verify_blocks
from nixl_offload.engine import image
from nixl_offload.engine.image import GroupPlan
from nixl_offload.engine.ports import Port
from nixl_offload.engine.pump import Flight
from nixl_offload.engine.records import Stage
from nixl_offload.engine.ways.context import Context
from nixl_offload.movers.base import Op
from nixl_offload.types import Outcome


def store(context: Context, flight: Flight, port: Port, plan: GroupPlan) -> Iterator[None]:
    """Gather, sum, write. The KV blocks are free once they are gathered."""
    task, io = flight.task, flight.task.io
    slot = context.acquire(flight, context.memory.staging)
    if not context.may_store(task, port.link):
        return
    rows = image.rows(slot, plan, io)
    yield from flight.passes(context.packer.gather(io.group, io.block_ids, rows, task.job.fence))
    if not context.table.advance(task, Stage.IO):
        return
    # From here on the KV blocks may change: only the slot is read.
    image.write_header(slot, image.expected(context.namespace, plan, io), block_checksums(rows), io.first_block)
    spans = image.store_spans(plan, io)
    image.clear_padding(slot, plan, io, spans)
    target = yield from context.begin_write(flight, port.link, plan)
    flight.transfers.append(port.submit_packed(Op.WRITE, slot, target, spans))
    yield from context.settle(flight)
    yield from context.finish_store(flight, port.link, target)


def load(context: Context, flight: Flight, port: Port, plan: GroupPlan) -> Iterator[None]:
    """Read, verify, scatter. Nothing unverified touches a KV block."""
    task, io = flight.task, flight.task.io
    slot = context.acquire(flight, context.memory.staging)
    if not context.may_load(task, port.link):
        return
    target = yield from context.begin_read(flight, port.link, plan)
    if task.stage is Stage.DONE:
        flight.abandon(None)
        return
    spans = image.spans(plan, io)
    canary = image.set_canary(slot, spans)
    flight.transfers.append(port.submit_packed(Op.READ, slot, target, spans))
    yield from context.settle(flight, port.link)
    if not context.finish_read(flight, port.link, target):
        return
    rows = image.rows(slot, plan, io)
    suspect = not plan.tells_short_reads and image.may_be_short(slot, spans, canary)
    header = context.checked_header(slot.memory[:HEADER_BYTES], plan, io)
    if context.verify_checksum or suspect:
        verify_blocks(header, rows, io.first_block)
    # Only now, and only if nobody has given the load up, are the KV blocks touched.
    if not context.table.advance(task, Stage.SCATTER):
        return
    yield from flight.passes(context.packer.scatter(io.group, io.block_ids, rows, task.job.fence))
    context.table.finish(task, Outcome.OK)
