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
from nixl_offload.engine.staging import Slot
from nixl_offload.engine.states import ChunkState
from nixl_offload.engine.transfer_paths.common import MAC_STEP_BYTES, Context, rows_to_scatter
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
        rows = [image.rows(_slot(chunk), plan, chunk) for chunk in chunks]
        sums = payload_checksums(rows, context.turn.pause)
    for chunk, page in zip(chunks, context.encode(batch, plan, sums), strict=True):
        slot = _slot(chunk)
        context.turn.pause()
        image.header_page(slot)[:] = page
        image.clear_padding(slot, plan, chunk)
    if context.keys is not None:
        signed_bytes = 0
        for chunk in chunks:
            header, blocks = image.header_page(_slot(chunk)), image.rows(_slot(chunk), plan, chunk)
            header[:] = context.keys.signed(header, blocks)
            signed_bytes += blocks.nbytes
            if signed_bytes >= MAC_STEP_BYTES:
                signed_bytes = 0
                yield
    yield from context.run(batch, plan, _write)


def _write(context: Context, batch: Batch, plan: GroupPlan) -> Steps:
    def place(chunk: Chunk) -> tuple[Slot, image.Spans]:
        return _slot(chunk), image.store_spans(plan, chunk)

    yield from context.write(batch, plan, _write, context.link_memory.submit_packed, place)


def load(context: Context, batch: Batch, plan: GroupPlan) -> Steps:
    """Read, verify, scatter. Nothing unverified touches a KV block."""
    context.take_slots(batch, context.memory.staging)
    if context.may_go(batch):
        yield from context.run(batch, plan, _read)


def _read(context: Context, batch: Batch, plan: GroupPlan) -> Steps:
    canary = image.Canary(plan)

    def place(chunk: Chunk) -> tuple[Slot, image.Spans]:
        slot, spans = _slot(chunk), image.spans(plan, chunk)
        canary.place(slot, spans)
        return slot, spans

    def use(batch: Batch, arrived: list[Chunk]) -> Steps:
        pages = [image.header_page(_slot(chunk)) for chunk in arrived]
        checked = context.check(arrived, plan, pages)
        checked.refuse_absent()
        if context.keys is not None:
            yield from context.authenticate(batch, checked, plan, _slot)
            yield from context.run(batch, plan, scatter)
            return
        suspects = [
            chunk
            for chunk in batch.alive
            if context.verify_checksum or canary.may_be_short(_slot(chunk), image.spans(plan, chunk))
        ]
        rows = [image.rows(_slot(chunk), plan, chunk) for chunk in suspects]
        yield from context.verify(batch, checked, suspects, [chunk.first_block for chunk in suspects], rows)
        # A phase of its own: a scatter that fails is tried again by itself, without another look at storage.
        yield from context.run(batch, plan, scatter)

    yield from context.read(batch, plan, _read, context.link_memory.submit_packed, place, use)


def scatter(context: Context, batch: Batch, plan: GroupPlan) -> Steps:
    """Copy verified chunks to their KV blocks: only now, and only those that nobody has given up."""
    if not context.advance_or_end(batch, ChunkState.SCATTER):
        return
    chunks = batch.alive
    job, group = chunks[0].job, chunks[0].group
    parts = [(chunk.block_ids, rows_to_scatter(chunk, _slot(chunk), plan)) for chunk in chunks]
    yield from batch.passes([context.packer.scatter_many(group, parts, job.fence)])
    for chunk in chunks:
        chunk.end(Outcome.OK)


def _slot(chunk: Chunk) -> Slot:
    slot = chunk.slot
    assert isinstance(slot, Slot)
    return slot


def _part(chunk: Chunk, plan: GroupPlan) -> tuple[BlockIds, Payload]:
    return chunk.block_ids, image.rows(_slot(chunk), plan, chunk)
