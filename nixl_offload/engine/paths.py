"""The four ways of a chunk: packed or direct, store or load. Each is a generator that yields while it waits.

Threading: the pump's thread; ``has_room`` also under the job table's lock. Ownership: slots belong to the flight; the
pump gives them back when the generator has ended and every transfer is final.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from nixl_offload.checksum import block_checksums
from nixl_offload.engine import image
from nixl_offload.engine.image import GroupPlan
from nixl_offload.engine.jobs import ChunkIO, JobTable, Stage, Task
from nixl_offload.engine.packer import Packer
from nixl_offload.engine.pump import MAX_FLIGHTS, Flight
from nixl_offload.engine.ratelog import RateLog
from nixl_offload.engine.staging import Slot, StagingPool
from nixl_offload.engine.storage import SlabLink
from nixl_offload.errors import FormatError, LayoutError, MoverError, TierError
from nixl_offload.format import (
    HEADER_BYTES,
    ShardHeader,
    check_header,
    verify_blocks,
    verify_checksums,
)
from nixl_offload.layout import KVLayout, chunk_extents
from nixl_offload.movers.base import Extents, FileId, MemoryId, Mover, Op, Transfer, TransferState
from nixl_offload.types import PAGE_BYTES, Location, Outcome

logger = logging.getLogger(__name__)

QUARANTINE_S = 30.0
"""A transfer that failed with late I/O still possible keeps what it writes to this long before others may have it: a
direct load its KV blocks, a store its location. Siblings of a failed transfer were seen to go on for two seconds;
staging slots can be retired for good, these cannot."""
LOAD_RESERVE = 0.25
"""Share of the staging slots that stores leave to loads."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Registered memory: staging slots, header pages for direct chunks, and the KV tensors (direct groups only)."""

    staging: StagingPool
    staging_id: MemoryId
    pages: StagingPool
    pages_id: MemoryId
    tensors: Mapping[int, MemoryId]


class ChunkPaths:
    """Implements ``pump.Paths``. A chunk's failure is its own outcome; nothing here raises for reasons of storage."""

    def __init__(
        self,
        *,
        table: JobTable,
        layout: KVLayout,
        plans: Sequence[GroupPlan],
        packer: Packer,
        mover: Mover,
        memory: Memory,
        links: Sequence[SlabLink | None],
        rank_namespace: bytes,
        verify_checksum: bool,
        clock: Callable[[], float],
        keep_alive: Sequence[object] = (),
    ) -> None:
        """``keep_alive``: whatever must live as long as I/O may touch its memory."""
        self._table = table
        self._layout = layout
        self._plans = plans
        self._packer = packer
        self._mover = mover
        self._memory = memory
        self._links = links
        self._namespace = rank_namespace
        self._verify_checksum = verify_checksum
        self._clock = clock
        self._keep_alive = keep_alive
        self._log = RateLog(logger, clock)
        self.poll = mover.poll

    # -- what the pump calls ----------------------------------------------------------------------------------------

    def has_room(self, task: Task, stores_in_flight: int) -> bool:
        """See pump.Paths. What can only fail has room: it needs none."""
        if not 0 <= task.io.group < len(self._plans):
            return True
        pool = self._pool(self._plans[task.io.group])
        if not pool.free:
            return pool.usable == 0
        reserve = max(1, int(pool.usable * LOAD_RESERVE))
        return not task.job.is_store or stores_in_flight < max(1, pool.usable - reserve)

    def begin(self, task: Task) -> Flight:
        """See pump.Paths."""
        plan = self._checked_plan(task.io)
        flight = Flight(task, direct=plan.direct)
        if task.job.is_store:
            steps = self._store_direct(flight, plan) if plan.direct else self._store_packed(flight, plan)
        else:
            steps = self._load_direct(flight, plan) if plan.direct else self._load_packed(flight, plan)
        flight.steps = self._guarded(flight, steps)
        return flight

    def close(self) -> None:
        """See pump.Paths."""
        for link in self._links:
            if link is not None:
                link.close()
        self._mover.close()

    # -- packed -----------------------------------------------------------------------------------------------------

    def _store_packed(self, flight: Flight, plan: GroupPlan) -> Iterator[None]:
        task, io = flight.task, flight.task.io
        link = self._link(io.location, plan)
        if not self._may_store(task, link):
            return
        slot = self._acquire(flight, self._memory.staging)
        rows = image.rows(slot, plan, io)
        fence = self._packer.gather(io.group, io.block_ids, rows, task.job.fence)
        while not fence.done():
            yield
        if not self._table.advance(task, Stage.IO):
            return
        # From here on the KV blocks may change: only the slot is read.
        image.write_header(slot, image.expected(self._namespace, plan, io), block_checksums(rows), io.first_block)
        spans = image.spans(plan, io)
        image.clear_padding(slot, plan, io, spans)
        file = link.prepare_write(io.location.offset, plan.slot_bytes)
        self._submit_packed(flight, Op.WRITE, slot, file, spans)
        yield from self._settle(flight)
        yield from self._finish_store(flight, link)

    def _load_packed(self, flight: Flight, plan: GroupPlan) -> Iterator[None]:
        task, io = flight.task, flight.task.io
        file = self._readable(io, plan)
        slot = self._acquire(flight, self._memory.staging)
        spans = image.spans(plan, io)
        self._submit_packed(flight, Op.READ, slot, file, spans)
        yield from self._settle(flight)
        if self._failed(flight):
            return
        rows = image.rows(slot, plan, io)
        header = self._checked_header(slot, plan, io)
        if self._verify_checksum:
            verify_blocks(header, rows, io.first_block)
        # Only now, and only if nobody has given the load up, are the KV blocks touched.
        if not self._table.advance(task, Stage.SCATTER):
            return
        fence = self._packer.scatter(io.group, io.block_ids, rows, task.job.fence)
        while not fence.done():
            yield
        self._table.finish(task, Outcome.OK)

    # -- direct -----------------------------------------------------------------------------------------------------

    def _store_direct(self, flight: Flight, plan: GroupPlan) -> Iterator[None]:
        task, io = flight.task, flight.task.io
        link = self._link(io.location, plan)
        if not self._may_store(task, link):
            return
        slot = self._acquire(flight, self._memory.pages)
        while not task.job.fence.done():
            yield
        checksums = self._packer.checksums(io.group, io.block_ids)
        image.write_header(slot, image.expected(self._namespace, plan, io), checksums, io.first_block)
        file = link.prepare_write(io.location.offset, plan.slot_bytes)
        # The blocks were still ours when they were summed: if they are given away later, the sums tell.
        if not self._table.touch_in_place(task):
            return
        self._submit_direct(flight, Op.WRITE, slot, file)
        yield from self._settle(flight)
        yield from self._finish_store(flight, link)

    def _load_direct(self, flight: Flight, plan: GroupPlan) -> Iterator[None]:
        task, io = flight.task, flight.task.io
        file = self._readable(io, plan)
        slot = self._acquire(flight, self._memory.pages)
        while not task.job.fence.done():
            yield
        if not self._table.touch_in_place(task):
            return
        self._submit_direct(flight, Op.READ, slot, file)
        yield from self._settle(flight)
        if plan.direct and _quarantined(flight):
            plan.direct = False
            logger.error(
                "A failed load may still write to KV blocks; group %d goes through staging from now on", io.group
            )
        yield from self._outlast(flight)
        if self._failed(flight):
            return
        header = self._checked_header(slot, plan, io)
        if self._verify_checksum:
            verify_checksums(header, self._packer.checksums(io.group, io.block_ids), io.first_block)
        self._table.finish(task, Outcome.OK)

    def _submit_direct(self, flight: Flight, op: Op, slot: Slot, file: FileId) -> None:
        """Header page and the extents of each tensor; a transfer per piece of memory is what a mover takes."""
        io = flight.task.io
        extents = chunk_extents(self._layout, io.group, io.block_ids, io.first_block)
        header = image.extents([slot.offset_bytes], [HEADER_BYTES])
        at = image.extents([io.location.offset], [HEADER_BYTES])
        flight.transfers.append(self._mover.submit(op, self._memory.pages_id, header, file, at))
        payload_at = io.location.offset + HEADER_BYTES
        for tensor in np.unique(extents.tensor_index).tolist():
            of = extents.tensor_index == tensor
            memory_extents = image.extents(extents.memory_offset[of], extents.length[of])
            file_extents = image.extents(extents.payload_offset[of] + payload_at, extents.length[of])
            flight.transfers.append(
                self._mover.submit(op, self._memory.tensors[tensor], memory_extents, file, file_extents)
            )

    # -- shared -----------------------------------------------------------------------------------------------------

    def _guarded(self, flight: Flight, steps: Iterator[None]) -> Iterator[None]:
        """Turn what a path may raise into the chunk's outcome, told only when nothing of it is in flight any more."""
        try:
            yield from steps
            return
        except FormatError as error:
            outcome, words = Outcome.CORRUPT, f"corrupt: {error.reason}"
            self._log.warning(words, "A stored chunk was refused and will be recomputed: %s", error)
        except TierError as error:
            outcome, words = Outcome.FAILED, f"storage: {error.cause}"
        except (MoverError, LayoutError) as error:
            outcome, words = Outcome.FAILED, str(error)
            self._log.error(type(error).__name__, "A chunk could not be moved: %s", error)
        yield from self._settle(flight)
        if flight.direct or flight.task.job.is_store:
            yield from self._outlast(flight)
        self._table.finish(flight.task, outcome, words)

    def _settle(self, flight: Flight) -> Iterator[None]:
        """Poll until every transfer of the flight is final."""
        pending = [transfer for transfer in flight.transfers if self.poll(transfer) is TransferState.PENDING]
        while pending:
            yield
            pending = [transfer for transfer in pending if self.poll(transfer) is TransferState.PENDING]

    def _outlast(self, flight: Flight) -> Iterator[None]:
        """Wait until late I/O of a quarantined transfer must be over."""
        if _quarantined(flight):
            release_s = self._clock() + QUARANTINE_S
            while self._clock() < release_s:
                yield

    def _submit_packed(self, flight: Flight, op: Op, slot: Slot, file: FileId, spans: Extents) -> None:
        """Start one transfer of ``spans``, which are relative to the slot, in memory as in the file."""
        in_memory, in_file = spans.copy(), spans.copy()
        in_memory[:, 0] += slot.offset_bytes
        in_file[:, 0] += flight.task.io.location.offset
        flight.transfers.append(self._mover.submit(op, self._memory.staging_id, in_memory, file, in_file))

    def _may_store(self, task: Task, link: SlabLink) -> bool:
        if link.may_store():
            return True
        self._table.finish(task, Outcome.FAILED, f"storage is out of use: {link.trouble}")
        return False

    def _finish_store(self, flight: Flight, link: SlabLink) -> Iterator[None]:
        failure = _failure(flight.transfers)
        if failure is None:
            self._table.finish(flight.task, Outcome.OK)
            return
        link.write_failed(failure.error or "write failed")
        if flight.direct:
            self._table.advance(flight.task, Stage.IO)  # late reads of the KV blocks spoil nothing but this location
        yield from self._outlast(flight)
        self._table.finish(flight.task, Outcome.FAILED, failure.error)

    def _failed(self, flight: Flight) -> bool:
        failure = _failure(flight.transfers)
        if failure is None:
            return False
        self._log.warning("read", "A chunk could not be read and will be recomputed: %s", failure.error)
        self._table.finish(flight.task, Outcome.FAILED, failure.error)
        return True

    def _link(self, location: Location, plan: GroupPlan) -> SlabLink:
        """Raises LayoutError when the location cannot be this group's."""
        link = self._links[location.tier] if 0 <= location.tier < len(self._links) else None
        if link is None:
            raise LayoutError(f"{location} is in a tier that this engine does not have")
        if location.slot_bytes < plan.slot_bytes:
            raise LayoutError(f"{location} is too small for a chunk of {plan.slot_bytes} bytes")
        return link

    def _checked_plan(self, io: ChunkIO) -> GroupPlan:
        """Raises LayoutError for blocks outside the KV cache or the chunk: memory is touched unchecked later."""
        if not 0 <= io.group < len(self._plans):
            raise LayoutError(f"group {io.group} of {len(self._plans)}")
        plan, count = self._plans[io.group], len(io.block_ids)
        if io.first_block < 0 or count < 1 or io.first_block + count > plan.blocks:
            raise LayoutError(f"blocks {io.first_block} to {io.first_block + count} of a chunk of {plan.blocks}")
        lowest, highest = int(io.block_ids.min()), int(io.block_ids.max())
        if lowest < 0 or highest >= plan.num_blocks:
            raise LayoutError(f"block ids {lowest} to {highest} of a KV cache of {plan.num_blocks} blocks")
        return plan

    def _readable(self, io: ChunkIO, plan: GroupPlan) -> FileId:
        file = self._link(io.location, plan).file
        if file is None:
            raise TierError("the slab is not open", cause="missing")
        return file

    def _acquire(self, flight: Flight, pool: StagingPool) -> Slot:
        slot = pool.acquire()
        if slot is None:
            self._log.error("staging", "No staging memory is left (all of it retired): nothing is stored or loaded")
            raise TierError("no staging memory is left", cause="io")
        flight.slots.append((pool, slot))
        return slot

    def _pool(self, plan: GroupPlan) -> StagingPool:
        return self._memory.pages if plan.direct else self._memory.staging

    def _checked_header(self, slot: Slot, plan: GroupPlan, io: ChunkIO) -> ShardHeader:
        """Identity, lengths and presence of the wanted blocks, whatever ``verify`` says. Raises FormatError."""
        header = check_header(slot.memory[:HEADER_BYTES], image.expected(self._namespace, plan, io))
        if header.first_valid_block > io.first_block:
            raise FormatError(
                f"block {io.first_block} was asked for, the shard begins with {header.first_valid_block}",
                reason="blocks",
            )
        return header


def new_page_pool() -> StagingPool:
    """One header page for each chunk that may be in flight."""
    return StagingPool(slot_bytes=PAGE_BYTES, budget_bytes=PAGE_BYTES * MAX_FLIGHTS)


def _quarantined(flight: Flight) -> bool:
    return any(transfer.quarantine for transfer in flight.transfers)


def _failure(transfers: Sequence[Transfer]) -> Transfer | None:
    return next((transfer for transfer in transfers if transfer.state is not TransferState.DONE), None)
