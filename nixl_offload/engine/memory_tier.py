"""The engine of the memory tier: chunks between KV blocks and slots of the host slab, copied batch by batch.

Threading: see ``tier_engine``; the pump alone drives the packer and touches slots. Nothing waits for a device: fences
are polled. Ownership: slots belong to the catalog, which gives none away before its chunk's outcome is told; KV tensors
and slab belong to the caller, who closes them after the engine.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from nixl_offload.chunk.header_rows import check_headers, verify_rows
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
from nixl_offload.engine.staging import Slot
from nixl_offload.engine.states import ChunkState, WorkKind
from nixl_offload.engine.streams import Device
from nixl_offload.engine.tier_engine import TierEngine
from nixl_offload.engine.transfer_paths.common import rows_to_scatter
from nixl_offload.engine.transfer_statistics import TierAccess, TierStatus
from nixl_offload.engine.turn import Turn
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
        copies = MemoryPaths(
            table,
            [image.make_plan(layout, group) for group in range(len(layout.groups))],
            host,
            packer,
            [shard.digest for shard in shards] or [rank_namespace] * len(layout.groups),
            sums=verify == "always",
            keep_alive=tuple(tensors),
        )
        self._start(copies, name="nixl-offload-memory", pauses=PAUSES)

    def status(self) -> TierStatus:
        """Return what waits here; memory has no trouble."""
        return TierStatus(self.queue.waiting(), "", _ACCESS)


class MemoryPaths:
    """Implements ``pump.PumpPaths``. ``sums``: a store sums its blocks, a load verifies them."""

    def __init__(
        self,
        table: JobTable,
        plans: Sequence[GroupPlan],
        host: HostSlab,
        packer: Packer,
        namespaces: Sequence[bytes],
        *,
        sums: bool,
        keep_alive: Sequence[object],
    ) -> None:
        self._table = table
        self._plans = plans
        self._host = host
        self._packer = packer
        self._namespaces = namespaces
        self._sums = sums
        self._log = RateLog(logger, table.clock)
        self._keep_alive = keep_alive
        self.turn = Turn()

    def room(self, chunk: Chunk, in_flight: InFlight) -> int:
        """Return how many chunks like ``chunk`` make a batch; 0 while as many batches as allowed are in flight."""
        if in_flight.batches >= MAX_BATCHES or (chunk.kind.writes and in_flight.store_batches >= MAX_STORE_BATCHES):
            return 0
        batch_bytes = STORE_BATCH_BYTES if chunk.kind.writes else LOAD_BATCH_BYTES
        # By whole chunks: the first of a job may be a short tail.
        plan = self._plans[chunk.group]
        return min(MAX_BATCH_CHUNKS, max(1, batch_bytes // max(1, plan.blocks * plan.block_bytes)))

    def why_not(self, chunk: Chunk) -> str | None:
        """Return None: memory always answers."""
        return None

    def begin(self, chunks: list[Chunk]) -> Batch:
        """Make a batch, whose first step looks the slots up."""
        batch = Batch(chunks, chunks[0].kind)
        batch.steps = self._steps(batch)
        return batch

    def look(self) -> float | None:
        """There is no mover."""
        return None

    def abandon(self, batch: Batch, error: str | None) -> None:
        """Do nothing: a copy begins nothing at a tier."""

    def close(self) -> None:
        """Do nothing: nothing is open."""

    def _steps(self, batch: Batch) -> Steps:
        self._admit(batch)
        if not batch.alive:
            return
        self.turn.pause()
        copy = self._store if batch.chunks[0].kind.writes else self._load
        try:
            yield from copy(batch)
        except Exception as error:
            if batch.is_pending or len(batch.alive) < 2:
                raise  # nothing is known of the device any more, or the chunk is the one at fault
            self._log.error("batch", "A chunk failed unexpectedly: %r", error, exc_info=error)
            batch.split([[chunk] for chunk in batch.alive], self._single)

    def _single(self, batch: Batch) -> Steps:
        copy = self._store if batch.chunks[0].kind.writes else self._load
        yield from copy(batch)

    def _store(self, batch: Batch) -> Steps:
        """Copy, then add the header. Given up from now on, a chunk is FAILED when the copy is over: not before may
        others have the slot.
        """
        if not self._advance(batch, ChunkState.BORROWED):
            return
        chunks = batch.alive
        plan, group = self._plans[chunks[0].group], chunks[0].group
        parts = []
        for chunk in chunks:
            image.invalidate(_slot(chunk))
            parts.append((chunk.block_ids, image.rows(_slot(chunk), plan, chunk)))
        self.turn.pause()
        gathered = self._packer.gather_many(group, parts, chunks[0].job.fence)
        self.turn.begin()  # host memory has been copied by now, without the interpreter
        yield from batch.passes([gathered])
        # All source blocks are free before the first checksum is computed.
        if not self._advance(batch, ChunkState.TRANSFER):
            return
        sums = None
        if self._sums or gathered.by_device:
            found = zip(chunks, gathered.values(), strict=True)
            sums = [values for chunk, values in found if chunk.result is None]
        chunks = batch.alive
        pages = image.encode(self._namespaces[group], plan, chunks, sums)
        self.turn.pause()
        for chunk, page in zip(chunks, pages, strict=True):
            slot = _slot(chunk)
            self.turn.pause()
            image.header_page(slot)[:] = page
            image.clear_around(slot, plan, chunk.first_block)
            chunk.end(Outcome.OK)

    def _load(self, batch: Batch) -> Steps:
        """Compare headers, verify blocks where that is asked for, then copy."""
        chunks = batch.alive
        group = chunks[0].group
        plan = self._plans[group]
        check = check_headers if self._sums else self._host.headers.check
        pages = [image.header_page(_slot(chunk)) for chunk in chunks]
        headers = check(pages, image.expected(self._namespaces[group], plan, chunks))
        image.refuse_absent(headers, chunks)
        rows = [row for row in range(len(chunks)) if row not in headers.errors] if self._sums else []
        if rows:
            payloads = [image.rows(_slot(chunks[row]), plan, chunks[row]) for row in rows]
            summed = yield from self._packer.bring(group, payloads)
            yield from batch.passes([summed])
            verify_rows(headers, rows, [chunks[row].first_block for row in rows], summed.values())
            for row, brought in zip(rows, summed.rows(), strict=True):
                chunks[row].brought, chunks[row].brought_from = brought, chunks[row].first_block
        for row, error in headers.errors.items():
            words = f"corrupt: {error.reason}"
            self._log.warning(words, "A chunk in memory was refused and will be recomputed: %s", error)
            chunks[row].end(Outcome.CORRUPT, words, error.reason)
        self.turn.pause()
        if not self._advance(batch, ChunkState.SCATTER):
            return
        chunks = batch.alive
        parts = [(chunk.block_ids, rows_to_scatter(chunk, _slot(chunk), plan)) for chunk in chunks]
        scattered = self._packer.scatter_many(group, parts, chunks[0].job.fence)
        self.turn.begin()
        yield from batch.passes([scattered])
        for chunk in chunks:
            chunk.end(Outcome.OK)

    def _advance(self, batch: Batch, state: ChunkState) -> bool:
        """Move the chunks of a batch on; end those that were given up. Whether any is left."""
        chunks = batch.alive
        going = self._table.advance(chunks, state)
        for chunk, goes in zip(chunks, going, strict=True):
            if not goes:
                chunk.end(Outcome.FAILED, "its blocks were given away while they were copied", "needed_back")
        return any(going)

    def _admit(self, batch: Batch) -> None:
        """Find each chunk's slot; a chunk whose numbers do not fit is FAILED: memory is touched unchecked later."""
        faults = image.faults(self._plans[batch.chunks[0].group], batch.chunks)
        for chunk, fault in zip(batch.chunks, faults, strict=True):
            words = fault or self._find_slot(chunk)
            if words is not None:
                self._log.error("LayoutError", "A chunk could not be moved: %s", words)
                chunk.end(Outcome.FAILED, words, "layout")

    def _find_slot(self, chunk: Chunk) -> str | None:
        """Look a chunk's slot up; say why there is none, or None."""
        location = chunk.location
        if chunk.kind not in {WorkKind.STORE, WorkKind.LOAD} or chunk.host_offset is not None:
            return "the memory tier copies between its own slots and KV blocks only"
        if location.offset + location.slot_bytes > self._host.memory_bytes:
            return f"{location} lies beyond the {self._host.memory_bytes} bytes of the memory tier"
        try:
            chunk.host = self._host.slot(location.offset, location.slot_bytes)
        except LayoutError as error:
            return str(error)
        return None


def _slot(chunk: Chunk) -> Slot:
    slot = chunk.host
    assert slot is not None
    return slot
