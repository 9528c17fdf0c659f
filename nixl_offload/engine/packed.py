"""The paths of chunks that are packed in slots. Phases are generators, which yield while they wait.

| order | source | slot | target |
|---|---|---|---|
| store | KV blocks | staging, in host or device memory | the tier |
| load | the tier | staging | KV blocks |
| store into memory | KV blocks | host slot | |
| load from memory | | host slot | KV blocks |
| write-through | | host slot | another tier |
| promotion, fetch | a farther tier | host slot, which keeps the image | KV blocks of a promotion |

Threading and ownership: see ``paths``. Host slots lie in the host slab; completions report their outcome.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from nixl_offload.chunk.checksum import payload_checksums
from nixl_offload.chunk.header import check_headers
from nixl_offload.engine import image
from nixl_offload.engine.device_packer import DevicePacker
from nixl_offload.engine.image import GroupPlan, Spans, any_slot
from nixl_offload.engine.packer import BlockIds, Source
from nixl_offload.engine.paths import STEP_BYTES, Batch, Phase, Steps, TierPaths
from nixl_offload.engine.records import Chunk, ChunkState
from nixl_offload.types import Outcome

if TYPE_CHECKING:
    from nixl_offload.engine.link_paths import LinkPaths

# -- to a tier ------------------------------------------------------------------------------------------------------


def _gather(paths: LinkPaths, batch: Batch) -> Steps:
    """Copy KV blocks to staging. Then vLLM may reuse the blocks."""
    # ``TierQueue.take`` has set CLAIMED already; this ends chunks that were given up meanwhile.
    if paths.advance_or_end(batch, ChunkState.CLAIMED) and paths.take_slots(batch, batch.plan.packed):
        yield from _copy_from_blocks(paths, batch)


def _copy_from_blocks(paths: TierPaths, batch: Batch) -> Steps:
    """Copy KV blocks to slots. A device also computes the checksums."""
    chunks, stacks = batch.alive, image.stacks(batch.plan, batch.alive)
    paths.stretch.pause()
    parts = [stack.part(batch.plan) for stack in stacks]
    gathered = paths.packer.gather_many(chunks[0].group, parts, chunks[0].job.fence)
    paths.stretch.begin()  # a host packer has copied by now, with the GIL released
    yield from batch.passes([gathered])
    for stack, sums in zip(stacks, gathered.values() if gathered.has_sums else (), strict=False):
        for chunk, own in zip(stack.chunks, np.split(sums, len(stack.chunks)), strict=True):
            chunk.sums = own


def _seal(paths: TierPaths, batch: Batch) -> Steps:
    """Add headers and zero padding. From here on only slots are read, so the KV blocks may change.

    A store into memory ends here. Its headers have no checksums, unless a device has computed them.
    """
    if not paths.advance_or_end(batch, ChunkState.TRANSFER):
        return
    chunks, plan = batch.alive, batch.plan
    ends_here = chunks[0].host_slot is not None
    stacks, sums = image.stacks(plan, chunks), [chunk.sums for chunk in chunks if chunk.sums is not None]
    if not sums and (paths.verify_checksum or not ends_here):
        sums = payload_checksums([stack.rows(plan) for stack in stacks], paths.stretch.pause)
    pages = paths.encode(batch, sums)
    if image.is_on_device(chunks[0]):
        padding = [image.cut(plan, chunk).padding for chunk in chunks]
        slots = [any_slot(chunk).memory for chunk in chunks]
        yield from batch.passes([_on_device(paths).finish_images(pages, slots, padding)])
        return
    begin = signed_bytes = 0
    for stack in stacks:
        paths.stretch.pause()
        own = pages[begin : begin + len(stack.chunks)]
        begin += len(own)
        stack.pages[:] = own
        for part in image.cut(plan, stack.chunks[0]).padding:
            stack.images[:, part] = 0
        if paths.keys is None:
            continue
        for chunk in stack.chunks:
            (alone,) = image.stacks(plan, [chunk])
            rows = alone.rows(plan)
            alone.pages[0] = paths.keys.signed(alone.pages[0], rows)
            signed_bytes += rows.nbytes
            if signed_bytes >= STEP_BYTES:
                signed_bytes = 0
                yield
    for chunk in chunks if ends_here else ():
        chunk.end(Outcome.OK)


def _may_go(paths: LinkPaths, batch: Batch) -> None:
    """End chunks that the link does not take now. They have their slots already."""
    paths.may_go(batch)


def _add_sums(paths: TierPaths, batch: Batch) -> Steps:
    """Check the headers of images in host slots. Add the checksums that a store into memory left out, and the MAC if
    any tier's chunks are authenticated.
    """
    if not paths.advance_or_end(batch, ChunkState.TRANSFER):
        return
    host, summed_bytes = paths.host, 0
    assert host is not None, "the slots lie there"
    headers = paths.check(batch, check=host.headers.check)
    for chunk in batch.alive:
        first, plan = headers.first_valid_block[chunk.row], batch.plan
        (stack,) = image.stacks(plan, [chunk])
        rows = stack.rows(plan, first)
        if host.headers.complete(stack.pages[0], rows):
            summed_bytes += rows.nbytes
        if summed_bytes >= STEP_BYTES:
            summed_bytes = 0
            yield


def _write(paths: LinkPaths, batch: Batch) -> Steps:
    """Write slots; host slots whole."""

    def spans(chunk: Chunk) -> Spans:
        return image.whole(batch.plan) if chunk.host_slot is not None else image.cut(batch.plan, chunk).store_spans

    yield from paths.transfer(batch, partial(paths.submit_spans, spans))


# -- from a tier ----------------------------------------------------------------------------------------------------


def _take_staging(paths: LinkPaths, batch: Batch) -> None:
    paths.take_slots(batch, batch.plan.packed)


def _read(paths: LinkPaths, batch: Batch) -> Steps:
    """Read into staging."""
    yield from paths.transfer(batch, partial(paths.submit_spans, lambda chunk: image.cut(batch.plan, chunk).spans))


def _verify(paths: TierPaths, batch: Batch) -> Steps:
    """Compare header, MAC and checksums. Nothing unverified touches a KV block."""
    if image.is_on_device(batch.alive[0]):
        yield from _verify_on_device(paths, batch)
        return
    headers = paths.check(batch)
    yield from paths.authenticate(batch, headers)
    if _compares_sums(paths, batch.plan):
        yield from paths.verify(batch, headers)


def _compares_sums(paths: TierPaths, plan: GroupPlan) -> bool:
    """Whether checksums are compared. A MAC replaces them.

    A short read leaves bytes of an earlier chunk in the slot. If the mover does not report short reads, checksums are
    compared with any ``verify``.
    """
    return paths.keys is None and (paths.verify_checksum or not plan.limits.tells_short_reads)


def _verify_on_device(paths: TierPaths, batch: Batch) -> Steps:
    """Bring headers and checksums to the host, and compare them there."""
    arrived, plan = batch.alive, batch.plan
    is_summed = _compares_sums(paths, plan)
    slots = [any_slot(chunk).memory for chunk in arrived]
    rows = [image.Stack([chunk], slot[None]).rows(plan) for chunk, slot in zip(arrived, slots, strict=True)]
    pages, sums = _on_device(paths).inspect(arrived[0].group, slots, rows if is_summed else [])
    yield from batch.passes([sums])
    headers = paths.check(batch, pages)
    if is_summed:
        found = [values for chunk, values in zip(arrived, sums.values(), strict=True) if chunk.result is None]
        paths.compare(batch, headers, [chunk.first_block for chunk in batch.alive], found)


def _scatter(paths: TierPaths, batch: Batch) -> Steps:
    """Copy verified chunks to their KV blocks, except those that were given up."""
    if paths.advance_or_end(batch, ChunkState.SCATTER):
        yield from _copy_to_blocks(paths, batch, batch.alive)
        for chunk in batch.alive:
            chunk.end(Outcome.OK)


def _copy_to_blocks(paths: TierPaths, batch: Batch, chunks: Sequence[Chunk]) -> Steps:
    """Copy wanted blocks to KV blocks, from the slots or from where the device summed them."""
    copies: list[tuple[BlockIds, Source]] = []
    for chunk in chunks:
        if chunk.summed_rows is not None:
            begin = chunk.first_block - chunk.summed_from
            copies.append((chunk.block_ids, chunk.summed_rows[begin : begin + len(chunk.block_ids)]))
    if len(copies) < len(chunks):  # the slots have the bytes of all
        copies = [stack.part(batch.plan) for stack in image.stacks(batch.plan, chunks)]
    scattered = paths.packer.scatter_many(chunks[0].group, copies, chunks[0].job.fence)
    paths.stretch.begin()  # a host packer has copied by now, with the GIL released
    yield from batch.passes([scattered])


def _read_whole(paths: LinkPaths, batch: Batch) -> Steps:
    """Read images into host slots."""
    if batch.submitted_s is None:
        for chunk in batch.alive:
            image.invalidate(any_slot(chunk))  # no old header may precede the bytes that are read
    yield from paths.transfer(batch, partial(paths.submit_spans, lambda _: image.whole(batch.plan)))


def _verify_whole(paths: TierPaths, batch: Batch) -> Steps:
    """Verify whole images. If a load was given up meanwhile, its image is still verified and kept in the host slot."""
    arrived, plan = batch.alive, batch.plan
    headers = paths.check(batch)
    yield from paths.authenticate(batch, headers)
    if _compares_sums(paths, plan):
        yield from paths.verify(batch, headers, whole=True)
    for chunk in batch.alive:
        image.clear_around(any_slot(chunk), plan, headers.first_valid_block[chunk.row])
    for chunk in arrived:
        if chunk.result is not None:
            image.invalidate(any_slot(chunk))


def _serve(paths: TierPaths, batch: Batch) -> Steps:
    """Copy the blocks that loads want to KV blocks. All images are kept."""
    wanted = [chunk for chunk in batch.alive if len(chunk.block_ids)]
    if served := paths.table.advance(wanted, ChunkState.SCATTER):
        yield from _copy_to_blocks(paths, batch, served)
    for chunk in batch.alive:
        chunk.is_kept = True
        chunk.end(Outcome.OK)


# -- in memory ------------------------------------------------------------------------------------------------------


def _gather_in_memory(paths: TierPaths, batch: Batch) -> Steps:
    """Copy to host slots. A chunk that is given up from now on is FAILED only when the copy is over: until then its
    slot must not be reused.
    """
    if paths.advance_or_end(batch, ChunkState.BORROWED):
        for chunk in batch.alive:
            image.invalidate(any_slot(chunk))
        yield from _copy_from_blocks(paths, batch)


def _check_in_memory(paths: TierPaths, batch: Batch) -> Steps:
    """Check headers, and blocks if ``verify_checksum``."""
    assert paths.host is not None, "the slots lie there"
    headers = paths.check(batch, check=check_headers if paths.verify_checksum else paths.host.headers.check)
    if paths.verify_checksum:
        yield from paths.verify(batch, headers)
    paths.stretch.pause()


def _on_device(paths: TierPaths) -> DevicePacker:
    assert isinstance(paths.packer, DevicePacker), "slots lie on the device only beside KV blocks there"
    return paths.packer


STORE: Final[Sequence[Phase]] = (_gather, _seal, _write)
LOAD: Final[Sequence[Phase]] = (_take_staging, _read, _verify, _scatter)
WRITE_THROUGH: Final[Sequence[Phase]] = (_may_go, _add_sums, _write)
FETCH: Final[Sequence[Phase]] = (_may_go, _read_whole, _verify_whole, _serve)
MEMORY_STORE: Final[Sequence[Phase]] = (_gather_in_memory, _seal)
MEMORY_LOAD: Final[Sequence[Phase]] = (_check_in_memory, _scatter)
