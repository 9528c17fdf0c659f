"""Between slots of the host slab and a tier: always whole images, header and all.

Threading and ownership: see ``common``. The host slots are the catalog's; completions tell what became of them.
"""

from __future__ import annotations

from nixl_offload.engine import image
from nixl_offload.engine.batch import Batch, Steps
from nixl_offload.engine.image import GroupPlan
from nixl_offload.engine.records import Chunk
from nixl_offload.engine.states import ChunkState
from nixl_offload.engine.transfer_paths.common import Context, slot_of
from nixl_offload.types import Outcome

SUM_STEP_BYTES = 8 << 20
"""About a millisecond on one core. Then the pump looks at its other batches: no load of this tier waits for longer."""


def store(context: Context, batch: Batch, plan: GroupPlan) -> Steps:
    """Write images that lie in their host slots. No KV block takes part."""
    if not context.may_go(batch) or not context.advance_or_end(batch, ChunkState.TRANSFER):
        return
    yield from context.run(batch, plan, _complete)


def _complete(context: Context, batch: Batch, plan: GroupPlan) -> Steps:
    """Check headers, and add the checksums of images that were stored into memory and went nowhere yet; where chunks
    of some tier are authenticated, the MAC as well.
    """
    host, chunks, summed_bytes = context.host, batch.alive, 0
    assert host is not None, "the slots lie there"
    pages = [image.header_page(slot_of(chunk)) for chunk in chunks]
    checked = context.check(chunks, plan, pages, host.headers.check)
    for chunk in batch.alive:
        slot = slot_of(chunk)
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
    yield from context.write(batch, plan, _write, context.link_memory.host, lambda _: image.whole(plan))


def load(context: Context, batch: Batch, plan: GroupPlan) -> Steps:
    """Read images into their host slots, verify all of them, and serve KV blocks, if any, from there."""
    if context.may_go(batch):
        yield from context.run(batch, plan, _read)


def _read(context: Context, batch: Batch, plan: GroupPlan) -> Steps:
    canary, spans = image.Canary(plan), image.whole(plan)
    for chunk in batch.alive:
        image.invalidate(slot_of(chunk))  # what lay here before must not be found in front of what is read
        canary.place(slot_of(chunk), spans)

    def use(batch: Batch, arrived: list[Chunk]) -> Steps:
        # Loads that were given up meanwhile have a host slot all the same: what has come is kept.
        checked = context.check(arrived, plan, [image.header_page(slot_of(chunk)) for chunk in arrived])
        if context.keys is not None:
            yield from context.authenticate(batch, checked, plan)
        suspects = [
            chunk
            for chunk in batch.alive
            if context.keys is None and (context.verify_checksum or canary.may_be_short(slot_of(chunk), spans))
        ]
        firsts = [checked.first_valid_block(chunk) for chunk in suspects]
        rows = [image.valid_rows(slot_of(chunk), plan, first) for chunk, first in zip(suspects, firsts, strict=True)]
        yield from context.verify(batch, checked, suspects, firsts, rows)
        for chunk in batch.alive:
            image.clear_around(slot_of(chunk), plan, checked.first_valid_block(chunk))
        checked.refuse_absent()
        for chunk in arrived:
            if chunk.result is not None:
                image.invalidate(slot_of(chunk))
        # A phase of its own: a scatter that fails is tried again by itself, without another look at storage.
        yield from context.run(batch, plan, _serve)

    yield from context.read(batch, plan, _read, context.link_memory.host, lambda _: spans, use)


def _serve(context: Context, batch: Batch, plan: GroupPlan) -> Steps:
    """Copy to KV blocks what a load wants of the chunks; all of them are kept."""
    wanted = [chunk for chunk in batch.alive if len(chunk.block_ids)]
    going = context.table.advance(wanted, ChunkState.SCATTER)
    served = [chunk for chunk, goes in zip(wanted, going, strict=True) if goes]
    if served:
        yield from context.scatter(batch, plan, served)
    for chunk in batch.alive:
        chunk.is_kept = True
        chunk.end(Outcome.OK)
