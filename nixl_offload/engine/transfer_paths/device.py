"""Packed on the device: chunks are copied between KV blocks and slots of device memory, which a mover reads or writes
as they lie there. Of their bytes only header pages and checksums come to the host.

Threading and ownership: see ``common``.
"""

from __future__ import annotations

from collections.abc import Sequence

from nixl_offload.engine import image
from nixl_offload.engine.batch import Batch, Steps
from nixl_offload.engine.device_packer import DevicePacker, DeviceParts
from nixl_offload.engine.image import GroupPlan
from nixl_offload.engine.records import Chunk
from nixl_offload.engine.staging import DeviceSlot
from nixl_offload.engine.states import ChunkState
from nixl_offload.engine.transfer_paths.common import Context, sums_of_each
from nixl_offload.errors import LayoutError
from nixl_offload.types import Outcome


def store(context: Context, batch: Batch, plan: GroupPlan) -> Steps:
    """Gather and sum, add header and zeros, write. The KV blocks are free once they are gathered."""
    packer = _packer(context)
    # Refuses to begin again behind the gather, when the blocks may be somebody else's.
    if not context.advance_or_end(batch, ChunkState.CLAIMED):
        return
    context.take_slots(batch, context.memory.device)
    if not context.may_go(batch):
        return
    chunks = batch.alive
    gathered = packer.gather(chunks[0].group, _parts(chunks, plan), chunks[0].job.fence)
    yield from batch.passes([gathered])
    for chunk, sums in zip(chunks, sums_of_each(chunks, gathered), strict=True):
        chunk.sums = sums
    yield from context.run(batch, plan, _seal)


def _seal(context: Context, batch: Batch, plan: GroupPlan) -> Steps:
    """Add headers and zeros. From here on the KV blocks may change: only the slots are read."""
    if not context.advance_or_end(batch, ChunkState.TRANSFER):
        return
    chunks = batch.alive
    headers = context.encode(batch, plan, [chunk.sums for chunk in chunks if chunk.sums is not None])
    clear = [[(part.start, part.stop) for part in image.cut(plan, chunk).padding] for chunk in chunks]
    finished = _packer(context).finish_images(headers, [_slot(chunk).memory for chunk in chunks], clear)
    yield from batch.passes([finished])
    yield from context.run(batch, plan, _write)


def _write(context: Context, batch: Batch, plan: GroupPlan) -> Steps:
    yield from context.write(
        batch, plan, _write, context.link_memory.device, lambda chunk: image.cut(plan, chunk).store_spans
    )


def load(context: Context, batch: Batch, plan: GroupPlan) -> Steps:
    """Read, verify, scatter. Nothing unverified touches a KV block."""
    context.take_slots(batch, context.memory.device)
    if context.may_go(batch):
        yield from context.run(batch, plan, _read)


def _read(context: Context, batch: Batch, plan: GroupPlan) -> Steps:
    """A read that was cut short leaves in the slot what an earlier chunk left there: where the mover would not tell,
    the checksums do, whatever ``verify`` says.
    """
    packer = _packer(context)

    def use(batch: Batch, arrived: list[Chunk]) -> Steps:
        summed = context.verify_checksum or not plan.tells_short_reads
        rows = [rows for _, rows in _parts(arrived, plan)] if summed else None
        pages, sums = packer.inspect([_slot(chunk).memory for chunk in arrived], rows)
        yield from batch.passes([sums])
        checked = context.check(arrived, plan, list(pages))
        checked.refuse_absent()
        if summed:
            pairs = zip(arrived, sums_of_each(arrived, sums), strict=True)
            known = [(chunk, found) for chunk, found in pairs if chunk.result is None]
            checked.verify(
                [chunk for chunk, _ in known],
                [chunk.first_block for chunk, _ in known],
                [found for _, found in known],
            )
        # A phase of its own: a scatter that fails is tried again by itself, without another look at storage.
        yield from context.run(batch, plan, _scatter)

    yield from context.read(
        batch, plan, _read, context.link_memory.device, lambda chunk: image.cut(plan, chunk).spans, use
    )


def _scatter(context: Context, batch: Batch, plan: GroupPlan) -> Steps:
    """Copy verified chunks to their KV blocks: only now, and only those that nobody has given up."""
    if not context.advance_or_end(batch, ChunkState.SCATTER):
        return
    chunks = batch.alive
    job, group = chunks[0].job, chunks[0].group
    yield from batch.passes([_packer(context).scatter(group, _parts(chunks, plan), job.fence)])
    for chunk in chunks:
        chunk.end(Outcome.OK)


def _parts(chunks: Sequence[Chunk], plan: GroupPlan) -> DeviceParts:
    return [(chunk.block_ids, image.device_rows(_slot(chunk), plan, chunk)) for chunk in chunks]


def _slot(chunk: Chunk) -> DeviceSlot:
    slot = chunk.slot
    assert isinstance(slot, DeviceSlot)
    return slot


def _packer(context: Context) -> DevicePacker:
    if context.device_packer is None:
        raise LayoutError("there is no staging on the device in this engine")
    return context.device_packer
