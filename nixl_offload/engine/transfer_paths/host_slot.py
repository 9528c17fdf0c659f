"""Between slots of the host slab and a tier: always whole images, header and all.

Threading and ownership: see ``common``. The host slots are the catalog's; completions tell what became of them.
"""

from __future__ import annotations

from nixl_offload.engine import image
from nixl_offload.engine.batch import Batch, Steps
from nixl_offload.engine.image import GroupPlan
from nixl_offload.engine.records import Chunk
from nixl_offload.engine.staging import Slot
from nixl_offload.engine.states import ChunkState
from nixl_offload.engine.transfer_paths.common import Context, rows_to_scatter
from nixl_offload.errors import LayoutError
from nixl_offload.types import Outcome

SUM_STEP_BYTES = 8 << 20
"""About a millisecond on one core. Then the pump looks at its other batches: no load of this tier waits for longer."""


def store(context: Context, batch: Batch, plan: GroupPlan) -> Steps:
    """Write images that lie in their host slots. No KV block takes part."""
    _find_slots(context, batch, plan)
    if not context.may_go(batch) or not context.advance_or_end(batch, ChunkState.TRANSFER):
        return
    yield from context.run(batch, plan, _complete)


def _complete(context: Context, batch: Batch, plan: GroupPlan) -> Steps:
    """Check headers, and add the checksums of images that were stored into memory and went nowhere yet; where chunks
    of some tier are authenticated, the MAC as well.
    """
    host, chunks, summed_bytes = context.memory.host, batch.alive, 0
    assert host is not None, "the slots lie there"
    pages = [image.header_page(_slot(chunk)) for chunk in chunks]
    checked = context.check(chunks, plan, pages, host.headers.check)
    for chunk in batch.alive:
        slot = _slot(chunk)
        while not host.headers.claim(slot.offset_bytes):
            yield  # the engine of another tier is at it
        try:
            if host.headers.lacks_something(pages[chunk.row]):
                rows = image.valid_rows(slot, plan, checked.first_valid_block(chunk))
                host.headers.complete(pages[chunk.row], rows)
                summed_bytes += rows.nbytes
        finally:
            host.headers.release(slot.offset_bytes)
        if summed_bytes >= SUM_STEP_BYTES:
            summed_bytes = 0
            yield
    yield from context.run(batch, plan, _write)


def _write(context: Context, batch: Batch, plan: GroupPlan) -> Steps:
    def place(chunk: Chunk) -> tuple[Slot, image.Spans]:
        return _slot(chunk), image.whole(plan)

    yield from context.write(batch, plan, _write, context.link_memory.submit_host, place)


def load(context: Context, batch: Batch, plan: GroupPlan) -> Steps:
    """Read images into their host slots, verify all of them, and serve KV blocks, if any, from there."""
    _find_slots(context, batch, plan)
    if context.may_go(batch):
        yield from context.run(batch, plan, _read)


def _read(context: Context, batch: Batch, plan: GroupPlan) -> Steps:
    canary, spans = image.Canary(plan), image.whole(plan)

    def place(chunk: Chunk) -> tuple[Slot, image.Spans]:
        slot = _slot(chunk)
        image.invalidate(slot)  # what lay here before must not be found in front of what is read
        canary.place(slot, spans)
        return slot, spans

    def use(batch: Batch, arrived: list[Chunk]) -> Steps:
        # Loads that were given up meanwhile have a host slot all the same: what has come is kept.
        checked = context.check(arrived, plan, [image.header_page(_slot(chunk)) for chunk in arrived])
        if context.keys is not None:
            yield from context.authenticate(batch, checked, plan, _slot)
        suspects = [
            chunk
            for chunk in batch.alive
            if context.keys is None and (context.verify_checksum or canary.may_be_short(_slot(chunk), spans))
        ]
        firsts = [checked.first_valid_block(chunk) for chunk in suspects]
        rows = [image.valid_rows(_slot(chunk), plan, first) for chunk, first in zip(suspects, firsts, strict=True)]
        yield from context.verify(batch, checked, suspects, firsts, rows)
        for chunk in batch.alive:
            image.clear_around(_slot(chunk), plan, checked.first_valid_block(chunk))
        checked.refuse_absent()
        for chunk in arrived:
            if chunk.result is not None:
                image.invalidate(_slot(chunk))
        # A phase of its own: a scatter that fails is tried again by itself, without another look at storage.
        yield from context.run(batch, plan, _serve)

    yield from context.read(batch, plan, _read, context.link_memory.submit_host, place, use)


def _serve(context: Context, batch: Batch, plan: GroupPlan) -> Steps:
    """Copy to KV blocks what a load wants of the chunks; all of them are kept."""
    wanted = [chunk for chunk in batch.alive if len(chunk.block_ids)]
    going = context.table.advance(wanted, ChunkState.SCATTER)
    served = [chunk for chunk, goes in zip(wanted, going, strict=True) if goes]
    if served:
        copies = [(chunk.block_ids, rows_to_scatter(chunk, _slot(chunk), plan)) for chunk in served]
        group, fence = served[0].group, served[0].job.fence
        yield from batch.passes([context.packer.scatter_many(group, copies, fence)])
    for chunk in batch.alive:
        chunk.is_kept = True
        chunk.end(Outcome.OK)


def _find_slots(context: Context, batch: Batch, plan: GroupPlan) -> None:
    """Look each chunk's host slot up; a chunk that has none is FAILED."""
    host = context.memory.host
    for chunk in batch.alive:
        offset = chunk.host_offset
        try:
            if host is None or offset is None:
                raise LayoutError("there is no host memory in this engine")
            chunk.host = host.slot(offset, plan.slot_bytes)
        except LayoutError as error:
            context.rate_log.error("LayoutError", "A chunk could not be moved: %s", error)
            chunk.end(Outcome.FAILED, str(error), "layout")


def _slot(chunk: Chunk) -> Slot:
    slot = chunk.host
    assert slot is not None
    return slot
