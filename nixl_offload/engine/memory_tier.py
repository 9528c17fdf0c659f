"""The engine of the memory tier: chunks between KV blocks and slots of the host slab, copied batch by batch.

Threading: see ``tier_engine``; the pump alone drives the packer and touches slots. Nothing waits for a device: fences
are polled. Ownership: slots belong to the catalog, which gives none away before its chunk's outcome is told; KV tensors
and slab belong to the caller, who closes them after the engine.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from nixl_offload.chunk.header import check_headers
from nixl_offload.chunk.layout import KVLayout
from nixl_offload.chunk.shards import Shard
from nixl_offload.engine import image
from nixl_offload.engine.batch import Batch, Steps
from nixl_offload.engine.host import HostSlab
from nixl_offload.engine.image import GroupPlan
from nixl_offload.engine.jobs import JobTable, TierQueue
from nixl_offload.engine.packer import Packer, make_packer, pages_of, require_agreement
from nixl_offload.engine.pump import InFlight, Pauses
from nixl_offload.engine.ratelog import RateLog
from nixl_offload.engine.records import Chunk
from nixl_offload.engine.states import ChunkState, WorkKind
from nixl_offload.engine.streams import Device
from nixl_offload.engine.tier_engine import TierEngine
from nixl_offload.engine.transfer_paths.common import Copies, Phase, TierPaths, slot_of
from nixl_offload.engine.transfer_statistics import TierAccess, TierStatus
from nixl_offload.errors import LayoutError
from nixl_offload.types import Outcome, Verify

logger = logging.getLogger(__name__)

STORE_BATCH_BYTES = 64 << 20
"""Copied by one call: a load that comes meanwhile waits for no more than that."""
LOAD_BATCH_BYTES = 16 << 20
"""Smaller, so that the next batch is verified while a device fetches this one."""
MAX_BATCH_CHUNKS = 16
"""So that no step of a batch holds the interpreter for long: see ``turn``."""
MAX_BATCHES = 8
"""In flight on a device."""
MAX_STORE_BATCHES = 4
"""Of those, stores."""
STORE_QUEUE_BYTES = 1 << 30
"""Stores that may wait; what comes on top is dropped at once."""
PAUSES = Pauses(poll_s=0.0002, crowd_poll_s=0.0002, crowd=0, slow_poll_s=0.002, slow_after_s=0.05)
"""Between looks at fences. A batch takes a device one to three milliseconds; once nothing has ended for longer, the
compute stream is busy with a step, and its fence comes with it."""

_ACCESS = TierAccess("copy", ("host",))


class MemoryEngine(TierEngine):
    """A load becomes OK only after identity and lengths were compared with the header in the slot; on CORRUPT or FAILED
    its KV blocks are untouched. FAILED and DROPPED stores have let go of their slots.

    Blocks are as trustworthy here as in vLLM's own KV cache, so neither a store nor a load sums them; the first
    write-through does (``transfer_paths.host_slot``). With ``verify="always"`` a store does, and a load verifies.

    Write-throughs and fetches are made by the engines of farther tiers, to or from the slots here: submitted here,
    each of their chunks is FAILED.
    """

    def __init__(
        self,
        *,
        table: JobTable,
        tensors: Sequence[torch.Tensor],
        layout: KVLayout,
        host: HostSlab,
        rank_namespace: bytes,
        shards: Sequence[Shard] = (),
        tier: int = 0,
        verify: Verify = "checksum",
        store_queue_bytes: int = STORE_QUEUE_BYTES,
        packer: Packer | None = None,
        device: Device | None = None,
    ) -> None:
        """Start the pump.

        ``table``, ``tensors`` and ``shards`` as for ``engine.Engine``; ``tier``: its position; ``packer``: None takes
        the one for ``device``, and that None asks the tensors. Raises LayoutError when tensors and layout disagree.
        """
        require_agreement(tensors, layout)
        packer = packer if packer is not None else make_packer(tensors, pages_of(layout), device)
        super().__init__(TierQueue(table, tier, layout, store_limit_bytes=store_queue_bytes), packer.fence)
        copies = Copies(
            table=table,
            layout=layout,
            packer=packer,
            host=host,
            namespaces=[shard.digest for shard in shards] or [rank_namespace] * len(layout.groups),
            verify_checksum=verify == "always",
            rate_log=RateLog(logger, table.clock),
        )
        plans = [image.make_plan(layout, group) for group in range(len(layout.groups))]
        self._start(_MemoryPaths(copies, plans, host, tuple(tensors)), name="nixl-offload-memory", pauses=PAUSES)

    def status(self) -> TierStatus:
        """Return what waits here; memory has no trouble."""
        return TierStatus(self.queue.waiting(), "", _ACCESS)


class _MemoryPaths(TierPaths):
    def __init__(
        self, copies: Copies, plans: Sequence[GroupPlan], host: HostSlab, keep_alive: Sequence[object]
    ) -> None:
        super().__init__(copies, plans, keep_alive)
        self._host = host

    def room(self, chunk: Chunk, in_flight: InFlight) -> int:
        """Return how many chunks like ``chunk`` make a batch; 0 while as many batches as allowed are in flight."""
        if in_flight.batches >= MAX_BATCHES or (chunk.kind.writes and in_flight.store_batches >= MAX_STORE_BATCHES):
            return 0
        batch_bytes = STORE_BATCH_BYTES if chunk.kind.writes else LOAD_BATCH_BYTES
        # By whole chunks: the first of a job may be a short tail.
        plan = self._plans[chunk.group]
        return min(MAX_BATCH_CHUNKS, max(1, batch_bytes // max(1, plan.blocks * plan.block_bytes)))

    def _find_slot(self, chunk: Chunk, plan: GroupPlan) -> None:
        location = chunk.location
        if chunk.kind not in {WorkKind.STORE, WorkKind.LOAD} or chunk.host_offset is not None:
            raise LayoutError("the memory tier copies between its own slots and KV blocks only")
        if location.offset + location.slot_bytes > self._host.memory_bytes:
            raise LayoutError(f"{location} lies beyond the {self._host.memory_bytes} bytes of the memory tier")
        chunk.host = self._host.slot(location.offset, location.slot_bytes)

    def _phase(self, chunk: Chunk, plan: GroupPlan) -> Phase:
        return _store if chunk.kind.writes else _load


def _store(copies: Copies, batch: Batch, plan: GroupPlan) -> Steps:
    """Copy, then add the header. Given up from now on, a chunk is FAILED when the copy is over: not before may others
    have the slot.
    """
    if not copies.advance_or_end(batch, ChunkState.BORROWED):
        return
    chunks, parts = batch.alive, []
    for chunk in chunks:
        image.invalidate(slot_of(chunk))
        parts.append((chunk.block_ids, image.rows(slot_of(chunk), plan, chunk)))
    copies.turn.pause()
    gathered = copies.packer.gather_many(chunks[0].group, parts, chunks[0].job.fence)
    copies.turn.begin()  # host memory has been copied by now, without the interpreter
    yield from batch.passes([gathered])
    # All source blocks are free before the first checksum is computed.
    if not copies.advance_or_end(batch, ChunkState.TRANSFER):
        return
    sums = None
    if copies.verify_checksum or gathered.by_device:
        found = zip(chunks, gathered.values(), strict=True)
        sums = [values for chunk, values in found if chunk.result is None]
    pages = copies.encode(batch, plan, sums)
    copies.turn.pause()
    for chunk, page in zip(batch.alive, pages, strict=True):
        copies.turn.pause()
        image.header_page(slot_of(chunk))[:] = page
        image.clear_around(slot_of(chunk), plan, chunk.first_block)
        chunk.end(Outcome.OK)


def _load(copies: Copies, batch: Batch, plan: GroupPlan) -> Steps:
    """Compare headers, verify blocks where that is asked for, then copy."""
    assert copies.host is not None, "the slots lie there"
    pages = [image.header_page(slot_of(chunk)) for chunk in batch.alive]
    check = check_headers if copies.verify_checksum else copies.host.headers.check
    checked = copies.check(batch.alive, plan, pages, check)
    checked.refuse_absent()
    chunks = batch.alive if copies.verify_checksum else []
    rows = [image.rows(slot_of(chunk), plan, chunk) for chunk in chunks]
    yield from copies.verify(batch, checked, chunks, [chunk.first_block for chunk in chunks], rows)
    copies.turn.pause()
    if copies.advance_or_end(batch, ChunkState.SCATTER):
        chunks = batch.alive
        yield from copies.scatter(batch, plan, chunks)
        for chunk in chunks:
            chunk.end(Outcome.OK)
