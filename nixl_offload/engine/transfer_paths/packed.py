"""The ways of chunks that are packed in slots, each from top to bottom: generators, which yield while they wait.

| order | source | slot | target |
|---|---|---|---|
| store | KV blocks | staging, in host or device memory | the tier |
| load | the tier | staging | KV blocks |
| store into memory | KV blocks | the catalog's | |
| load from memory | | the catalog's | KV blocks |
| write-through | | the catalog's | another tier |
| promotion, fetch | a farther tier | the catalog's, which keeps the image | KV blocks of a promotion |

Each order is a few phases. One starts the next by ``Context.run``: a store is ``store``, ``_seal``, ``_write``; a load
is ``load``, ``_read``, ``_scatter``. A batch that fails begins its phase again, chunk by chunk.

Threading and ownership: see ``common``. Slots of the catalog lie in the host slab; completions say what became of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from nixl_offload.chunk.checksum import payload_checksums
from nixl_offload.chunk.header import check_headers
from nixl_offload.engine import image
from nixl_offload.engine.batch import Batch, Steps
from nixl_offload.engine.copies import Checksums, Source
from nixl_offload.engine.device_packer import DevicePacker
from nixl_offload.engine.image import GroupPlan, Spans, any_slot, device_slot, host_slot
from nixl_offload.engine.records import Chunk
from nixl_offload.engine.staging import DeviceSlot
from nixl_offload.engine.states import ChunkState
from nixl_offload.engine.transfer_paths.common import STEP_BYTES, Context
from nixl_offload.types import Outcome

# -- to a tier ------------------------------------------------------------------------------------------------------


def store(context: Context, batch: Batch, plan: GroupPlan) -> Steps:
    """Gather, sum, write. The KV blocks are free once they are gathered."""
    # Refuses to begin again behind the gather, when the blocks may be somebody else's.
    if not context.advance_or_end(batch, ChunkState.CLAIMED):
        return
    context.take_slots(batch, plan.packed)
    if context.may_go(batch):
        yield from _gather(context, batch, plan)
        yield from context.run(batch, plan, _seal)


def _gather(context: Context, batch: Batch, plan: GroupPlan) -> Steps:
    """Copy KV blocks to slots, with checksums where a device makes them on the way."""
    chunks = batch.alive
    parts = [(chunk.block_ids, image.rows(any_slot(chunk), plan, chunk)) for chunk in chunks]
    context.turn.pause()
    gathered = context.packer.gather_many(chunks[0].group, parts, chunks[0].job.fence)
    context.turn.begin()  # on the host it has been copied by now, without the interpreter
    yield from batch.passes([gathered])
    if gathered.by_device:
        for chunk, sums in zip(chunks, gathered.values(), strict=True):
            chunk.sums = sums


def _sums_of(context: Context, chunks: Sequence[Chunk], plan: GroupPlan) -> list[Checksums]:
    """The checksums of gathered chunks: the device's, or else made now."""
    sums = [chunk.sums for chunk in chunks if chunk.sums is not None]
    if sums:
        return sums
    rows = [image.rows(host_slot(chunk), plan, chunk) for chunk in chunks]
    return payload_checksums(rows, context.turn.pause)


def _seal(context: Context, batch: Batch, plan: GroupPlan) -> Steps:
    """Add headers and zeros. From here on the KV blocks may change: only the slots are read."""
    if not context.advance_or_end(batch, ChunkState.TRANSFER):
        return
    chunks = batch.alive
    pages = context.encode(batch, plan, _sums_of(context, chunks, plan))
    if isinstance(chunks[0].slot, DeviceSlot):
        padding = [image.cut(plan, chunk).padding for chunk in chunks]
        slots = [device_slot(chunk).memory for chunk in chunks]
        yield from batch.passes([_on_device(context).finish_images(pages, slots, padding)])
    else:
        signed_bytes = 0
        for chunk, page in zip(chunks, pages, strict=True):
            slot, rows = host_slot(chunk), image.rows(host_slot(chunk), plan, chunk)
            context.turn.pause()
            image.header_page(slot)[:] = page if context.keys is None else context.keys.signed(page, rows)
            for part in image.cut(plan, chunk).padding:
                slot.memory[part] = 0
            signed_bytes += rows.nbytes if context.keys is not None else 0
            if signed_bytes >= STEP_BYTES:
                signed_bytes = 0
                yield
    yield from context.run(batch, plan, _write)


def write_through(context: Context, batch: Batch, plan: GroupPlan) -> Steps:
    """Write images that lie in slots of the catalog. No KV block takes part."""
    if context.may_go(batch) and context.advance_or_end(batch, ChunkState.TRANSFER):
        yield from context.run(batch, plan, _complete)


def _complete(context: Context, batch: Batch, plan: GroupPlan) -> Steps:
    """Check headers, and add the checksums of images that were stored into memory and went nowhere yet; where chunks
    of some tier are authenticated, the MAC as well.
    """
    host, chunks, summed_bytes = context.host, batch.alive, 0
    assert host is not None, "the slots lie there"
    pages = [image.header_page(host_slot(chunk)) for chunk in chunks]
    checked = context.check(chunks, plan, pages, host.headers.check)
    for chunk in batch.alive:
        if host.headers.lacks_something(pages[chunk.row]):
            rows = image.valid_rows(host_slot(chunk), plan, checked.first_valid_block(chunk))
            host.headers.complete(pages[chunk.row], rows)
            summed_bytes += rows.nbytes
        if summed_bytes >= STEP_BYTES:
            summed_bytes = 0
            yield
    yield from context.run(batch, plan, _write)


def _write(context: Context, batch: Batch, plan: GroupPlan) -> Steps:
    """Write slots: those of the catalog whole."""

    def spans(chunk: Chunk) -> Spans:
        return image.whole(plan) if chunk.host is not None else image.cut(plan, chunk).store_spans

    yield from context.write(batch, plan, _write, spans)


# -- from a tier ----------------------------------------------------------------------------------------------------


def load(context: Context, batch: Batch, plan: GroupPlan) -> Steps:
    """Read, verify, scatter. Nothing unverified touches a KV block."""
    context.take_slots(batch, plan.packed)
    if context.may_go(batch):
        yield from context.run(batch, plan, _read)


def _read(context: Context, batch: Batch, plan: GroupPlan) -> Steps:
    is_on_device = isinstance(batch.alive[0].slot, DeviceSlot)

    def use(batch: Batch, arrived: list[Chunk]) -> Steps:
        if is_on_device:
            yield from _verify_on_device(context, batch, plan, arrived)
        else:
            checked = context.check(arrived, plan, [image.header_page(host_slot(chunk)) for chunk in arrived])
            checked.refuse_absent()
            yield from context.authenticate(batch, checked, plan)
            chunks = batch.alive if _sums(context, plan) else []
            rows = [image.rows(host_slot(chunk), plan, chunk) for chunk in chunks]
            yield from context.verify(batch, checked, chunks, [chunk.first_block for chunk in chunks], rows)
        # A phase of its own: a scatter that fails is tried again by itself, without another look at storage.
        yield from context.run(batch, plan, _scatter)

    yield from context.read(batch, plan, _read, lambda chunk: image.cut(plan, chunk).spans, use)


def _sums(context: Context, plan: GroupPlan) -> bool:
    """Whether the checksums of what was read are compared. A MAC says more than they do.

    A read that was cut short leaves in the slot what an earlier chunk left there: where the mover would not tell, the
    checksums do, with any ``verify``.
    """
    return context.keys is None and (context.verify_checksum or not plan.tells_short_reads)


def _verify_on_device(context: Context, batch: Batch, plan: GroupPlan, arrived: list[Chunk]) -> Steps:
    """Bring headers and checksums to the host, and compare them there."""
    is_summed = _sums(context, plan)
    slots = [device_slot(chunk) for chunk in arrived]
    pairs = zip(arrived, slots, strict=True)
    rows = [image.rows(slot, plan, chunk) for chunk, slot in pairs] if is_summed else []
    pages, sums = _on_device(context).inspect(arrived[0].group, [slot.memory for slot in slots], rows)
    yield from batch.passes([sums])
    checked = context.check(arrived, plan, list(pages))
    checked.refuse_absent()
    if is_summed:
        found = [(chunk, values) for chunk, values in zip(arrived, sums.values(), strict=True) if chunk.result is None]
        chunks = [chunk for chunk, _ in found]
        checked.verify(chunks, [chunk.first_block for chunk in chunks], [values for _, values in found])


def _scatter(context: Context, batch: Batch, plan: GroupPlan) -> Steps:
    """Copy verified chunks to their KV blocks: only now, and only those that nobody has given up."""
    if context.advance_or_end(batch, ChunkState.SCATTER):
        yield from _copy_to_blocks(context, batch, plan, batch.alive)
        for chunk in batch.alive:
            chunk.end(Outcome.OK)


def _copy_to_blocks(context: Context, batch: Batch, plan: GroupPlan, chunks: Sequence[Chunk]) -> Steps:
    copies = [(chunk.block_ids, _rows_of(chunk, plan)) for chunk in chunks]
    scattered = context.packer.scatter_many(chunks[0].group, copies, chunks[0].job.fence)
    context.turn.begin()  # on the host it has been copied by now, without the interpreter
    yield from batch.passes([scattered])


def _rows_of(chunk: Chunk, plan: GroupPlan) -> Source:
    """The blocks that a load wants: of its slot, or where the device has summed them."""
    if chunk.brought is None:
        return image.rows(any_slot(chunk), plan, chunk)
    begin = chunk.first_block - chunk.brought_from
    return chunk.brought[begin : begin + len(chunk.block_ids)]


def fetch(context: Context, batch: Batch, plan: GroupPlan) -> Steps:
    """Read images into slots of the catalog, verify all of them, and serve KV blocks, if any, from there."""
    if context.may_go(batch):
        yield from context.run(batch, plan, _read_whole)


def _read_whole(context: Context, batch: Batch, plan: GroupPlan) -> Steps:
    for chunk in batch.alive:
        image.invalidate(host_slot(chunk))  # what lay here before must not be found in front of what is read

    def use(batch: Batch, arrived: list[Chunk]) -> Steps:
        # Loads that were given up meanwhile have a host slot all the same: what has come is kept.
        checked = context.check(arrived, plan, [image.header_page(host_slot(chunk)) for chunk in arrived])
        yield from context.authenticate(batch, checked, plan)
        chunks = batch.alive if _sums(context, plan) else []
        firsts = [checked.first_valid_block(chunk) for chunk in chunks]
        rows = [image.valid_rows(host_slot(chunk), plan, first) for chunk, first in zip(chunks, firsts, strict=True)]
        yield from context.verify(batch, checked, chunks, firsts, rows)
        for chunk in batch.alive:
            image.clear_around(host_slot(chunk), plan, checked.first_valid_block(chunk))
        checked.refuse_absent()
        for chunk in arrived:
            if chunk.result is not None:
                image.invalidate(host_slot(chunk))
        yield from context.run(batch, plan, _serve)  # a phase of its own, as ``_scatter``

    yield from context.read(batch, plan, _read_whole, lambda _: image.whole(plan), use)


def _serve(context: Context, batch: Batch, plan: GroupPlan) -> Steps:
    """Copy to KV blocks what a load wants of the chunks; all of them are kept."""
    wanted = [chunk for chunk in batch.alive if len(chunk.block_ids)]
    going = context.table.advance(wanted, ChunkState.SCATTER)
    served = [chunk for chunk, goes in zip(wanted, going, strict=True) if goes]
    if served:
        yield from _copy_to_blocks(context, batch, plan, served)
    for chunk in batch.alive:
        chunk.is_kept = True
        chunk.end(Outcome.OK)


# -- in memory ------------------------------------------------------------------------------------------------------


def store_in_memory(context: Context, batch: Batch, plan: GroupPlan) -> Steps:
    """Copy to slots of the catalog, then add the header. Given up from now on, a chunk is FAILED when the copy is over:
    not before may others have the slot.
    """
    if not context.advance_or_end(batch, ChunkState.BORROWED):
        return
    for chunk in batch.alive:
        image.invalidate(host_slot(chunk))
    yield from _gather(context, batch, plan)
    # All source blocks are free before the first checksum is computed.
    if not context.advance_or_end(batch, ChunkState.TRANSFER):
        return
    chunks = batch.alive
    is_summed = context.verify_checksum or chunks[0].sums is not None
    pages = context.encode(batch, plan, _sums_of(context, chunks, plan) if is_summed else None)
    for chunk, page in zip(chunks, pages, strict=True):
        context.turn.pause()
        image.header_page(host_slot(chunk))[:] = page
        image.clear_around(host_slot(chunk), plan, chunk.first_block)
        chunk.end(Outcome.OK)


def load_from_memory(context: Context, batch: Batch, plan: GroupPlan) -> Steps:
    """Compare headers, verify blocks where that is asked for, then copy."""
    assert context.host is not None, "the slots lie there"
    pages = [image.header_page(host_slot(chunk)) for chunk in batch.alive]
    check = check_headers if context.verify_checksum else context.host.headers.check
    checked = context.check(batch.alive, plan, pages, check)
    checked.refuse_absent()
    chunks = batch.alive if context.verify_checksum else []
    rows = [image.rows(host_slot(chunk), plan, chunk) for chunk in chunks]
    yield from context.verify(batch, checked, chunks, [chunk.first_block for chunk in chunks], rows)
    context.turn.pause()
    yield from _scatter(context, batch, plan)


def _on_device(context: Context) -> DevicePacker:
    assert isinstance(context.packer, DevicePacker), "slots lie on the device only beside KV blocks there"
    return context.packer
