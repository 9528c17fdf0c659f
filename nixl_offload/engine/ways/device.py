"""Packed on the device: a chunk is copied between KV blocks and a slot of device memory, which a mover reads or writes
in one piece. Of its bytes only the header page and the checksums come to the host.

Threading and ownership: see ``ways.context``.
"""

from __future__ import annotations

from collections.abc import Iterator

from nixl_offload.chunk.header import verify_checksums
from nixl_offload.engine import image
from nixl_offload.engine.device_packer import DevicePacker
from nixl_offload.engine.image import GroupPlan
from nixl_offload.engine.ports import Port
from nixl_offload.engine.pump import Flight
from nixl_offload.engine.records import Stage
from nixl_offload.engine.ways.context import Context
from nixl_offload.errors import LayoutError
from nixl_offload.movers.base import Op
from nixl_offload.types import Outcome


def store(context: Context, flight: Flight, port: Port, plan: GroupPlan) -> Iterator[None]:
    """Gather and sum, add header and zeros, write. The KV blocks are free once they are gathered."""
    task, io, packer = flight.task, flight.task.io, _packer(context)
    slot = context.acquire(flight, context.memory.device)
    page = context.acquire(flight, context.memory.pages)
    if not context.may_store(task, port.link):
        return
    sums = packer.gather(io.group, io.block_ids, image.device_rows(slot, plan, io), task.job.fence)
    yield from flight.passes(sums)
    if not context.table.advance(task, Stage.IO):
        return
    # From here on the KV blocks may change: only the slot is read.
    image.write_header(page, image.expected(context.namespace, plan, io), sums.values(), io.first_block)
    spans = image.store_spans(plan, io)
    yield from flight.passes(packer.finish_image(page.memory, slot.memory, image.padding(plan, io, spans)))
    target = yield from context.begin_write(flight, port.link, plan)
    flight.transfers.append(port.submit_device(Op.WRITE, slot, target, spans))
    yield from context.settle(flight)
    yield from context.finish_store(flight, port.link, target)


def load(context: Context, flight: Flight, port: Port, plan: GroupPlan) -> Iterator[None]:
    """Read, verify, scatter. Nothing unverified touches a KV block.

    A read that was cut short leaves in the slot what an earlier chunk left there: where the mover would not tell, the
    checksums do, whatever ``verify`` says.
    """
    task, io, packer = flight.task, flight.task.io, _packer(context)
    slot = context.acquire(flight, context.memory.device)
    page = context.acquire(flight, context.memory.pages)
    if not context.may_load(task, port.link):
        return
    target = yield from context.begin_read(flight, port.link, plan)
    if task.stage is Stage.DONE:
        flight.abandon(None)
        return
    flight.transfers.append(port.submit_device(Op.READ, slot, target, image.spans(plan, io)))
    yield from context.settle(flight, port.link)
    if not context.finish_read(flight, port.link, target):
        return
    rows = image.device_rows(slot, plan, io)
    summed = context.verify_checksum or not plan.tells_short_reads
    sums = packer.inspect(slot.memory, page.memory, rows if summed else None)
    yield from flight.passes(sums)
    header = context.checked_header(page.memory, plan, io)
    if summed:
        verify_checksums(header, sums.values(), io.first_block)
    # Only now, and only if nobody has given the load up, are the KV blocks touched.
    if not context.table.advance(task, Stage.SCATTER):
        return
    yield from flight.passes(packer.scatter(io.group, io.block_ids, rows, task.job.fence))
    context.table.finish(task, Outcome.OK)


def _packer(context: Context) -> DevicePacker:
    if context.device_packer is None:
        raise LayoutError("there is no staging on the device in this engine")
    return context.device_packer
