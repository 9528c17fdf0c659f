"""Between a slot of the host slab and storage: always the whole image, header and all.

Threading and ownership: see ``ways.context``. The host slot is the catalog's; what became of it is told as ``Landed``.
"""

from __future__ import annotations

from collections.abc import Iterator

from nixl_offload.chunk.header import HEADER_BYTES, check_header, verify_blocks
from nixl_offload.engine import image
from nixl_offload.engine.image import GroupPlan
from nixl_offload.engine.ports import Port
from nixl_offload.engine.pump import Flight
from nixl_offload.engine.records import Stage
from nixl_offload.engine.staging import Slot
from nixl_offload.engine.ways.context import Context, require_blocks
from nixl_offload.errors import LayoutError
from nixl_offload.movers.base import Op
from nixl_offload.types import Outcome


def store(context: Context, flight: Flight, port: Port, plan: GroupPlan) -> Iterator[None]:
    """Write an image that lies in its host slot. No KV block takes part."""
    task = flight.task
    slot = _host_slot(context, flight, plan)
    if not context.may_store(task, port.link) or not context.table.advance(task, Stage.IO):
        return
    check_header(slot.memory[:HEADER_BYTES], image.expected(context.namespace, plan, task.io))
    target = yield from context.begin_write(flight, port.link, plan)
    flight.transfers.append(port.submit_host(Op.WRITE, slot, target, image.whole(plan)))
    yield from context.settle(flight)
    yield from context.finish_store(flight, port.link, target)


def load(context: Context, flight: Flight, port: Port, plan: GroupPlan) -> Iterator[None]:
    """Read an image into its host slot, verify all of it, and serve KV blocks, if any, from there."""
    task, io = flight.task, flight.task.io
    slot = _host_slot(context, flight, plan)
    if not context.may_load(task, port.link):
        return
    target = yield from context.begin_read(flight, port.link, plan)
    if task.stage is Stage.DONE:
        flight.abandon(None)
        return
    spans = image.whole(plan)
    canary = image.set_canary(slot, spans)
    flight.transfers.append(port.submit_host(Op.READ, slot, target, spans))
    yield from context.settle(flight, port.link)
    if not context.finish_read(flight, port.link, target):
        return
    # A load that was given up meanwhile has a host slot all the same: what has come is kept.
    suspect = not plan.tells_short_reads and image.may_be_short(slot, spans, canary)
    header = check_header(slot.memory[:HEADER_BYTES], image.expected(context.namespace, plan, io))
    if context.verify_checksum or suspect:
        first = header.first_valid_block
        verify_blocks(header, image.valid_rows(slot, plan, first), first)
    image.clear_around(slot, plan, header.first_valid_block)
    if len(io.block_ids):
        require_blocks(header, io)
        if context.table.advance(task, Stage.SCATTER):
            rows = image.rows(slot, plan, io)
            yield from flight.passes(context.packer.scatter(io.group, io.block_ids, rows, task.job.fence))
    flight.landed = True
    context.table.finish(task, Outcome.OK)


def _host_slot(context: Context, flight: Flight, plan: GroupPlan) -> Slot:
    """Return the chunk's host slot. Raises LayoutError where there is none."""
    host, offset = context.memory.host, flight.task.io.host_offset
    if host is None or offset is None:
        raise LayoutError("there is no host memory in this engine")
    flight.host = host.slot(offset, plan.slot_bytes)
    return flight.host
