"""Packed on the device: chunks are copied between KV blocks and slots of device memory, which a mover reads or writes
as they lie there. Of their bytes only header pages and checksums come to the host.

Threading and ownership: see ``common``.
"""

from __future__ import annotations

from nixl_offload.engine import image
from nixl_offload.engine.batch import Batch, BatchChunk, Steps
from nixl_offload.engine.device_packer import DevicePacker
from nixl_offload.engine.image import GroupPlan
from nixl_offload.engine.queued import QueuedSums
from nixl_offload.engine.staging import DeviceSlot, Slot
from nixl_offload.engine.states import ChunkState
from nixl_offload.engine.transfer_paths.common import Context
from nixl_offload.errors import LayoutError
from nixl_offload.types import Outcome


def store(context: Context, batch: Batch, plan: GroupPlan) -> Steps:
    """Gather and sum, add header and zeros, write. The KV blocks are free once they are gathered."""
    packer = _packer(context)
    # Refuses to begin again behind the gather, when the blocks may be somebody else's.
    if not context.advance_or_end(batch, ChunkState.CLAIMED):
        return
    _take_slots(context, batch)
    if not context.may_go(batch):
        return
    sums: list[tuple[BatchChunk, QueuedSums]] = []
    for chunk in batch.alive:
        io = chunk.io
        rows = image.device_rows(_slot(chunk), plan, io)
        sums.append((chunk, packer.gather(io.group, io.block_ids, rows, chunk.task.job.fence)))
        batch.fences.append(sums[-1][1])  # at once: the next call may raise
    yield from batch.passes(())
    for chunk, found in sums:
        chunk.sums = found.values()
    yield from context.run(batch, plan, _seal)


def _seal(context: Context, batch: Batch, plan: GroupPlan) -> Steps:
    """Add headers and zeros. From here on the KV blocks may change: only the slots are read."""
    if not context.advance_or_end(batch, ChunkState.TRANSFER):
        return
    packer, chunks = _packer(context), batch.alive
    sums = [chunk.sums for chunk in chunks if chunk.sums is not None]
    for chunk, encoded in zip(chunks, context.encode(batch, plan, sums), strict=True):
        page = _page(chunk)
        page.memory[:] = encoded
        clear = [(part.start, part.stop) for part in image.padding(plan, chunk.io)]
        batch.fences.append(packer.finish_image(page.memory, _slot(chunk).memory, clear))
    yield from batch.passes(())
    yield from context.run(batch, plan, _write)


def _write(context: Context, batch: Batch, plan: GroupPlan) -> Steps:
    def place(chunk: BatchChunk) -> tuple[DeviceSlot, image.Spans]:
        return _slot(chunk), image.store_spans(plan, chunk.io)

    yield from context.write(batch, plan, _write, context.link_memory.submit_device, place)


def load(context: Context, batch: Batch, plan: GroupPlan) -> Steps:
    """Read, verify, scatter. Nothing unverified touches a KV block."""
    _take_slots(context, batch)
    if context.may_go(batch):
        yield from context.run(batch, plan, _read)


def _read(context: Context, batch: Batch, plan: GroupPlan) -> Steps:
    """A read that was cut short leaves in the slot what an earlier chunk left there: where the mover would not tell,
    the checksums do, whatever ``verify`` says.
    """
    packer = _packer(context)

    def place(chunk: BatchChunk) -> tuple[DeviceSlot, image.Spans]:
        return _slot(chunk), image.spans(plan, chunk.io)

    def use(batch: Batch, arrived: list[BatchChunk]) -> Steps:
        summed = context.verify_checksum or not plan.tells_short_reads
        sums: list[QueuedSums] = []
        for chunk in arrived:
            slot = _slot(chunk)
            rows = image.device_rows(slot, plan, chunk.io) if summed else None
            sums.append(packer.inspect(slot.memory, _page(chunk).memory, rows))
            batch.fences.append(sums[-1])
        yield from batch.passes(())
        pages = [_page(chunk).memory for chunk in arrived]
        checked = context.check(arrived, plan, pages)
        checked.refuse_absent()
        if summed:
            known = [(chunk, found) for chunk, found in zip(arrived, sums, strict=True) if chunk.outcome is None]
            checked.verify(
                [chunk for chunk, _ in known],
                [chunk.io.first_block for chunk, _ in known],
                [found.values() for _, found in known],
            )
        # A phase of its own: a scatter that fails is tried again by itself, without another look at storage.
        yield from context.run(batch, plan, _scatter)

    yield from context.read(batch, plan, _read, context.link_memory.submit_device, place, use)


def _scatter(context: Context, batch: Batch, plan: GroupPlan) -> Steps:
    """Copy verified chunks to their KV blocks: only now, and only those that nobody has given up."""
    packer = _packer(context)
    if not context.advance_or_end(batch, ChunkState.SCATTER):
        return
    for chunk in batch.alive:
        io = chunk.io
        rows = image.device_rows(_slot(chunk), plan, io)
        batch.fences.append(packer.scatter(io.group, io.block_ids, rows, chunk.task.job.fence))
    yield from batch.passes(())
    for chunk in batch.alive:
        chunk.end(Outcome.OK)


def _take_slots(context: Context, batch: Batch) -> None:
    """Take what each chunk has none of. When a phase begins again with single chunks, they have theirs."""
    for chunk, slot in context.acquire([chunk for chunk in batch.alive if chunk.slot is None], context.memory.device):
        chunk.slot = slot
    for chunk, page in context.acquire([chunk for chunk in batch.alive if chunk.page is None], context.memory.pages):
        chunk.page = page


def _slot(chunk: BatchChunk) -> DeviceSlot:
    slot = chunk.slot
    assert isinstance(slot, DeviceSlot)
    return slot


def _page(chunk: BatchChunk) -> Slot:
    page = chunk.page
    assert page is not None
    return page


def _packer(context: Context) -> DevicePacker:
    if context.device_packer is None:
        raise LayoutError("there is no staging on the device in this engine")
    return context.device_packer
