"""Packed through host memory: chunks are copied between KV blocks and staging slots, and moved as they lie there.

Threading and ownership: see ``common``.
"""

from __future__ import annotations

from nixl_offload.chunk.checksum import payload_checksums
from nixl_offload.engine import image
from nixl_offload.engine.batch import Batch, Steps
from nixl_offload.engine.brought import BlockIds, Payload
from nixl_offload.engine.image import GroupPlan
from nixl_offload.engine.records import Chunk
from nixl_offload.engine.states import ChunkState
from nixl_offload.engine.transfer_paths.common import MAC_STEP_BYTES, Context, slot_of
from nixl_offload.types import Outcome


def store(context: Context, batch: Batch, plan: GroupPlan) -> Steps:
    """Gather, sum, write. The KV blocks are free once they are gathered."""
    # Refuses to begin again behind the gather, when the blocks may be somebody else's.
    if not context.advance_or_end(batch, ChunkState.CLAIMED):
        return
    context.take_slots(batch, context.memory.staging)
    if not context.may_go(batch):
        return
    context.turn.pause()
    job, group = batch.chunks[0].job, batch.chunks[0].group
    chunks = batch.alive
    gathered = context.packer.gather_many(group, [_part(chunk, plan) for chunk in chunks], job.fence)
    yield from batch.passes([gathered])
    if gathered.by_device:
        for chunk, sums in zip(chunks, gathered.values(), strict=True):
            chunk.sums = sums
    yield from context.run(batch, plan, _seal)


def _seal(context: Context, batch: Batch, plan: GroupPlan) -> Steps:
    """Add headers and zeros. From here on the KV blocks may change: only the slots are read."""
    if not context.advance_or_end(batch, ChunkState.TRANSFER):
        return
    chunks = batch.alive
    sums = [chunk.sums for chunk in chunks if chunk.sums is not None]
    if not sums:
        rows = [image.rows(slot_of(chunk), plan, chunk) for chunk in chunks]
        sums = payload_checksums(rows, context.turn.pause)
    for chunk, page in zip(chunks, context.encode(batch, plan, sums), strict=True):
        slot = slot_of(chunk)
        context.turn.pause()
        image.header_page(slot)[:] = page
        for part in image.cut(plan, chunk).padding:
            slot.memory[part] = 0
    if context.keys is not None:
        signed_bytes = 0
        for chunk in chunks:
            header, blocks = image.header_page(slot_of(chunk)), image.rows(slot_of(chunk), plan, chunk)
            header[:] = context.keys.signed(header, blocks)
            signed_bytes += blocks.nbytes
            if signed_bytes >= MAC_STEP_BYTES:
                signed_bytes = 0
                yield
    yield from context.run(batch, plan, _write)


def _write(context: Context, batch: Batch, plan: GroupPlan) -> Steps:
    yield from context.write(
        batch, plan, _write, context.link_memory.staging, lambda chunk: image.cut(plan, chunk).store_spans
    )


def load(context: Context, batch: Batch, plan: GroupPlan) -> Steps:
    """Read, verify, scatter. Nothing unverified touches a KV block."""
    context.take_slots(batch, context.memory.staging)
    if context.may_go(batch):
        yield from context.run(batch, plan, _read)


def _read(context: Context, batch: Batch, plan: GroupPlan) -> Steps:
    canary = image.Canary(plan)

    def spans(chunk: Chunk) -> image.Spans:
        return image.cut(plan, chunk).spans

    for chunk in batch.alive:
        canary.place(slot_of(chunk), spans(chunk))

    def use(batch: Batch, arrived: list[Chunk]) -> Steps:
        pages = [image.header_page(slot_of(chunk)) for chunk in arrived]
        checked = context.check(arrived, plan, pages)
        checked.refuse_absent()
        if context.keys is not None:
            yield from context.authenticate(batch, checked, plan)
            yield from context.run(batch, plan, scatter)
            return
        suspects = [
            chunk
            for chunk in batch.alive
            if context.verify_checksum or canary.may_be_short(slot_of(chunk), spans(chunk))
        ]
        rows = [image.rows(slot_of(chunk), plan, chunk) for chunk in suspects]
        yield from context.verify(batch, checked, suspects, [chunk.first_block for chunk in suspects], rows)
        # A phase of its own: a scatter that fails is tried again by itself, without another look at storage.
        yield from context.run(batch, plan, scatter)

    yield from context.read(batch, plan, _read, context.link_memory.staging, spans, use)


def scatter(context: Context, batch: Batch, plan: GroupPlan) -> Steps:
    """Copy verified chunks to their KV blocks: only now, and only those that nobody has given up."""
    if not context.advance_or_end(batch, ChunkState.SCATTER):
        return
    chunks = batch.alive
    yield from context.scatter(batch, plan, chunks)
    for chunk in chunks:
        chunk.end(Outcome.OK)


def _part(chunk: Chunk, plan: GroupPlan) -> tuple[BlockIds, Payload]:
    return chunk.block_ids, image.rows(slot_of(chunk), plan, chunk)
