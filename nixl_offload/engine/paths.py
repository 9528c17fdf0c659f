"""The ways of a chunk: packed or direct, store or load, and between a host slot and storage. Each is a generator that
yields while it waits.

Threading: the pump's thread; ``has_room`` and ``why_not`` also under the job table's lock. Ownership: slots belong to
the flight; the pump gives them back when the generator has ended and every transfer is final. Links and their movers
belong to the paths, which close them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial

from nixl_offload.checksum import block_checksums
from nixl_offload.engine import image
from nixl_offload.engine.image import GroupPlan
from nixl_offload.engine.jobs import ChunkIO, JobTable, Stage, Task
from nixl_offload.engine.links.base import Link, Target
from nixl_offload.engine.packer import Packer
from nixl_offload.engine.ports import Memory, Port
from nixl_offload.engine.pump import MAX_FLIGHTS, Flight
from nixl_offload.engine.ratelog import RateLog
from nixl_offload.engine.staging import Slot, StagingPool
from nixl_offload.errors import FormatError, LayoutError, MoverError, TierError
from nixl_offload.format import (
    HEADER_BYTES,
    ShardHeader,
    check_header,
    verify_blocks,
    verify_checksums,
)
from nixl_offload.layout import KVLayout
from nixl_offload.movers.base import Op, Transfer, TransferState
from nixl_offload.types import PAGE_BYTES, Outcome

logger = logging.getLogger(__name__)

QUARANTINE_S = 30.0
"""A transfer that failed with late I/O still possible keeps what it writes to this long before others may have it: a
direct load its KV blocks, a store its location. Siblings of a failed transfer were seen to go on for two seconds;
staging slots can be retired for good, these cannot."""
LOAD_RESERVE = 0.25
"""Share of the staging slots that stores leave to loads."""


class ChunkPaths:
    """Implements ``pump.Paths``. A chunk's failure is its own outcome; nothing here raises for reasons of storage."""

    def __init__(
        self,
        *,
        table: JobTable,
        layout: KVLayout,
        ports: Sequence[Port | None],
        packer: Packer,
        memory: Memory,
        rank_namespace: bytes,
        verify_checksum: bool,
        clock: Callable[[], float],
        keep_alive: Sequence[object] = (),
    ) -> None:
        """``ports`` is indexed by tier; ``keep_alive``: whatever must live as long as I/O may touch its memory."""
        self._table = table
        self._layout = layout
        self._ports = ports
        self._packer = packer
        self._memory = memory
        self._namespace = rank_namespace
        self._verify_checksum = verify_checksum
        self._clock = clock
        self._keep_alive = keep_alive
        self._log = RateLog(logger, clock)

    # -- what the pump calls ----------------------------------------------------------------------------------------

    def has_room(self, task: Task, stores_in_flight: int) -> bool:
        """See pump.Paths. What can only fail has room: it needs none."""
        way = self._way(task.io)
        if way is None or _by_host(way[0], task):
            return True
        pool = self._memory.pages if way[1].direct else self._memory.staging
        if not pool.free:
            return pool.usable == 0
        reserve = max(1, int(pool.usable * LOAD_RESERVE))
        return not task.job.is_store or stores_in_flight < max(1, pool.usable - reserve)

    def why_not(self, task: Task) -> str | None:
        """See pump.Paths. What takes up the room is not answered by a tier that is in doubt: then nobody knows when."""
        way = self._way(task.io)
        if way is None or not way[0].link.in_doubt:
            return None
        return f"storage is out of use: {way[0].link.trouble}"

    def begin(self, task: Task) -> Flight:
        """See pump.Paths."""
        flight = Flight(task)
        flight.steps = self._guarded(flight)
        return flight

    def close(self) -> None:
        """See pump.Paths."""
        links = [port.link for port in self._ports if port is not None]
        for link in links:
            link.close()
        for mover in {id(link.mover): link.mover for link in links}.values():
            mover.close()

    # -- packed -----------------------------------------------------------------------------------------------------

    def _store_packed(self, flight: Flight, port: Port, plan: GroupPlan) -> Iterator[None]:
        task, io = flight.task, flight.task.io
        slot = self._acquire(flight, self._memory.staging)
        if not self._may_store(task, port.link):
            return
        rows = image.rows(slot, plan, io)
        fence = self._packer.gather(io.group, io.block_ids, rows, task.job.fence)
        while not fence.done():
            yield
        if not self._table.advance(task, Stage.IO):
            return
        # From here on the KV blocks may change: only the slot is read.
        image.write_header(slot, image.expected(self._namespace, plan, io), block_checksums(rows), io.first_block)
        spans = image.store_spans(plan, io)
        image.clear_padding(slot, plan, io, spans)
        target = yield from self._begin_write(flight, port.link, plan)
        flight.transfers.append(port.submit_packed(Op.WRITE, slot, target, spans))
        yield from self._settle(flight)
        yield from self._finish_store(flight, port.link, target)

    def _load_packed(self, flight: Flight, port: Port, plan: GroupPlan) -> Iterator[None]:
        task, io = flight.task, flight.task.io
        slot = self._acquire(flight, self._memory.staging)
        if not self._may_load(task, port.link):
            return
        target = yield from self._begin_read(flight, port.link, plan)
        if task.stage is Stage.DONE:
            flight.abandon(None)
            return
        spans = image.spans(plan, io)
        canary = image.set_canary(slot, spans)
        flight.transfers.append(port.submit_packed(Op.READ, slot, target, spans))
        yield from self._settle(flight, port.link)
        if not self._finish_read(flight, port.link, target):
            return
        rows = image.rows(slot, plan, io)
        suspect = not plan.tells_short_reads and image.may_be_short(slot, spans, canary)
        header = self._checked_header(slot, plan, io)
        if self._verify_checksum or suspect:
            verify_blocks(header, rows, io.first_block)
        # Only now, and only if nobody has given the load up, are the KV blocks touched.
        if not self._table.advance(task, Stage.SCATTER):
            return
        fence = self._packer.scatter(io.group, io.block_ids, rows, task.job.fence)
        while not fence.done():
            yield
        self._table.finish(task, Outcome.OK)

    # -- direct -----------------------------------------------------------------------------------------------------

    def _store_direct(self, flight: Flight, port: Port, plan: GroupPlan) -> Iterator[None]:
        task, io = flight.task, flight.task.io
        slot = self._acquire(flight, self._memory.pages)
        if not self._may_store(task, port.link):
            return
        while not task.job.fence.done():
            yield
        sums = self._packer.sums(io.group, io.block_ids, task.job.fence)
        while not sums.done():
            yield
        image.write_header(slot, image.expected(self._namespace, plan, io), sums.values(), io.first_block)
        target = yield from self._begin_write(flight, port.link, plan)
        # The blocks were still ours when they were summed: if they are given away later, the sums tell.
        if not self._table.touch_in_place(task):
            flight.abandon(None)
            return
        for transfer in port.submit_direct(Op.WRITE, self._layout, io, slot, target):
            flight.transfers.append(transfer)
        yield from self._settle(flight)
        yield from self._finish_store(flight, port.link, target)

    def _load_direct(self, flight: Flight, port: Port, plan: GroupPlan) -> Iterator[None]:
        task, io = flight.task, flight.task.io
        slot = self._acquire(flight, self._memory.pages)
        if not self._may_load(task, port.link):
            return
        target = yield from self._begin_read(flight, port.link, plan)
        while not task.job.fence.done():
            yield
        if not self._table.touch_in_place(task):
            flight.abandon(None)
            return
        for transfer in port.submit_direct(Op.READ, self._layout, io, slot, target):
            flight.transfers.append(transfer)
        yield from self._settle(flight)
        if plan.direct and _quarantined(flight):
            plan.direct = False
            logger.error(
                "A failed load may still write to KV blocks; group %d goes through staging from now on", io.group
            )
        yield from self._outlast(flight)
        if not self._finish_read(flight, port.link, target):
            return
        header = self._checked_header(slot, plan, io)
        if self._verify_checksum:
            sums = self._packer.sums(io.group, io.block_ids, task.job.fence)
            while not sums.done():
                yield
            verify_checksums(header, sums.values(), io.first_block)
        self._table.finish(task, Outcome.OK)

    # -- host slots: always the whole image -------------------------------------------------------------------------

    def _store_host(self, flight: Flight, port: Port, plan: GroupPlan) -> Iterator[None]:
        task = flight.task
        slot = self._host_slot(flight, plan)
        if not self._may_store(task, port.link) or not self._table.advance(task, Stage.IO):
            return
        check_header(slot.memory[:HEADER_BYTES], image.expected(self._namespace, plan, task.io))
        target = yield from self._begin_write(flight, port.link, plan)
        flight.transfers.append(port.submit_host(Op.WRITE, slot, target, image.whole(plan)))
        yield from self._settle(flight)
        yield from self._finish_store(flight, port.link, target)

    def _load_host(self, flight: Flight, port: Port, plan: GroupPlan) -> Iterator[None]:
        task, io = flight.task, flight.task.io
        slot = self._host_slot(flight, plan)
        if not self._may_load(task, port.link):
            return
        target = yield from self._begin_read(flight, port.link, plan)
        if task.stage is Stage.DONE:
            flight.abandon(None)
            return
        spans = image.whole(plan)
        canary = image.set_canary(slot, spans)
        flight.transfers.append(port.submit_host(Op.READ, slot, target, spans))
        yield from self._settle(flight, port.link)
        if not self._finish_read(flight, port.link, target):
            return
        # A load that was given up meanwhile has a host slot all the same: what has come is kept.
        suspect = not plan.tells_short_reads and image.may_be_short(slot, spans, canary)
        header = check_header(slot.memory[:HEADER_BYTES], image.expected(self._namespace, plan, io))
        if self._verify_checksum or suspect:
            first = header.first_valid_block
            verify_blocks(header, image.valid_rows(slot, plan, first), first)
        image.clear_around(slot, plan, header.first_valid_block)
        if len(io.block_ids):
            _require_blocks(header, io)
            if self._table.advance(task, Stage.SCATTER):
                fence = self._packer.scatter(io.group, io.block_ids, image.rows(slot, plan, io), task.job.fence)
                while not fence.done():
                    yield
        flight.landed = True
        self._table.finish(task, Outcome.OK)

    def _host_slot(self, flight: Flight, plan: GroupPlan) -> Slot:
        """Return the chunk's host slot. Raises LayoutError where there is none."""
        host, offset = self._memory.host, flight.task.io.host_offset
        if host is None or offset is None:
            raise LayoutError("there is no host memory in this engine")
        flight.host = host.slot(offset, plan.slot_bytes)
        return flight.host

    # -- shared -----------------------------------------------------------------------------------------------------

    def _guarded(self, flight: Flight) -> Iterator[None]:
        """Turn what a path may raise into the chunk's outcome, told only when nothing of it is in flight any more."""
        fault: str | None = None
        try:
            yield from self._steps(flight)
            return
        except FormatError as error:
            outcome, words = Outcome.CORRUPT, f"corrupt: {error.reason}"
            self._log.warning(words, "A stored chunk was refused and will be recomputed: %s", error)
        except TierError as error:
            outcome, words = Outcome.FAILED, f"storage: {error.cause}"
        except (MoverError, LayoutError) as error:
            outcome, words = Outcome.FAILED, str(error)
            fault = words if isinstance(error, MoverError) else None
            self._log.error(type(error).__name__, "A chunk could not be moved: %s", error)
        yield from self._settle(flight)
        flight.abandon(fault)
        if flight.direct or flight.task.job.is_store:
            yield from self._outlast(flight)
        self._table.finish(flight.task, outcome, words)

    def _steps(self, flight: Flight) -> Iterator[None]:
        """Choose the way. Raises LayoutError for numbers that do not fit: memory is touched unchecked later."""
        io = flight.task.io
        way = self._way(io)
        if way is None:
            raise LayoutError(f"there is no group {io.group}, or no tier for {io.location}, in this engine")
        port, plan = way
        image.check(plan, io)
        flight.mover = port.link.mover
        if _by_host(port, flight.task):
            store = flight.task.job.is_store
            return self._store_host(flight, port, plan) if store else self._load_host(flight, port, plan)
        flight.direct = plan.direct
        if flight.task.job.is_store:
            return self._store_direct(flight, port, plan) if plan.direct else self._store_packed(flight, port, plan)
        return self._load_direct(flight, port, plan) if plan.direct else self._load_packed(flight, port, plan)

    def _begin_write(self, flight: Flight, link: Link, plan: GroupPlan) -> Generator[None, None, Target]:
        io = flight.task.io
        target = yield from link.begin_write(io.key, io.location, plan.slot_bytes)
        flight.undo = partial(link.fail_write, target)
        return target

    def _begin_read(self, flight: Flight, link: Link, plan: GroupPlan) -> Generator[None, None, Target]:
        io = flight.task.io
        target = yield from link.begin_read(io.key, io.location, plan.slot_bytes)
        flight.undo = partial(link.fail_read, target)
        return target

    def _settle(self, flight: Flight, link: Link | None = None) -> Iterator[None]:
        """Poll until every transfer of the flight is final. ``link`` is told when nobody waits for it any more."""
        while flight.poll():
            if link is not None and flight.task.stage is Stage.DONE:
                link.overdue()
                link = None
            yield

    def _outlast(self, flight: Flight) -> Iterator[None]:
        """Wait until late I/O of a quarantined transfer must be over."""
        if _quarantined(flight):
            release_s = self._clock() + QUARANTINE_S
            while self._clock() < release_s:
                yield

    def _may_store(self, task: Task, link: Link) -> bool:
        if link.may_store():
            return True
        self._table.finish(task, Outcome.FAILED, f"storage is out of use: {link.trouble}")
        return False

    def _may_load(self, task: Task, link: Link) -> bool:
        if link.may_load():
            return True
        self._table.finish(task, Outcome.FAILED, f"storage is out of use: {link.trouble}")
        return False

    def _finish_store(self, flight: Flight, link: Link, target: Target) -> Iterator[None]:
        failure = _failure(flight.transfers)
        if failure is None and not flight.task.disowned:
            flight.undo = None
            if flight.direct:
                self._table.advance(flight.task, Stage.IO)  # all is read: what makes it visible needs no KV blocks
            yield from link.end_write(target)
            self._table.finish(flight.task, Outcome.OK)
            return
        words = failure.error or "write failed" if failure is not None else None
        flight.abandon(words)
        if flight.direct:
            self._table.advance(flight.task, Stage.IO)  # late reads of the KV blocks spoil nothing but this location
        yield from self._outlast(flight)
        self._table.finish(flight.task, Outcome.FAILED, words or "its blocks were given away while they were written")

    def _finish_read(self, flight: Flight, link: Link, target: Target) -> bool:
        """Tell the link how its part ended; False, and the chunk is FAILED, when it did not end well."""
        failure = _failure(flight.transfers)
        if failure is None or failure.missing:
            flight.undo = None
            link.end_read(target)
        if failure is None:
            return True
        flight.abandon(failure.error or "read failed")
        self._log.warning("read", "A chunk could not be read and will be recomputed: %s", failure.error)
        self._table.finish(flight.task, Outcome.FAILED, failure.error)
        return False

    def _way(self, io: ChunkIO) -> tuple[Port, GroupPlan] | None:
        """Return the port and plan of a chunk; None when this engine has no such tier or group."""
        port = self._ports[io.location.tier] if 0 <= io.location.tier < len(self._ports) else None
        if port is None or not 0 <= io.group < len(port.plans):
            return None
        return port, port.plans[io.group]

    def _acquire(self, flight: Flight, pool: StagingPool) -> Slot:
        slot = pool.acquire()
        if slot is None:
            self._log.error("staging", "No staging memory is left (all of it retired): nothing is stored or loaded")
            raise TierError("no staging memory is left", cause="io")
        flight.slots.append((pool, slot))
        return slot

    def _checked_header(self, slot: Slot, plan: GroupPlan, io: ChunkIO) -> ShardHeader:
        """Identity, lengths and presence of the wanted blocks, whatever ``verify`` says. Raises FormatError."""
        header = check_header(slot.memory[:HEADER_BYTES], image.expected(self._namespace, plan, io))
        _require_blocks(header, io)
        return header


def _by_host(port: Port, task: Task) -> bool:
    """Whether a chunk goes by its host slot. A load whose tier cannot touch that serves its KV blocks all the same."""
    if task.io.host_offset is None:
        return False
    return port.host is not None or task.job.is_store or not len(task.io.block_ids)


def new_page_pool() -> StagingPool:
    """One header page for each chunk that may be in flight."""
    return StagingPool(slot_bytes=PAGE_BYTES, budget_bytes=PAGE_BYTES * MAX_FLIGHTS)


def _require_blocks(header: ShardHeader, io: ChunkIO) -> None:
    """Raise FormatError when a wanted block was never stored."""
    if header.first_valid_block > io.first_block:
        raise FormatError(
            f"block {io.first_block} was asked for, the shard begins with {header.first_valid_block}",
            reason="blocks",
        )


def _quarantined(flight: Flight) -> bool:
    return any(transfer.quarantine for transfer in flight.transfers)


def _failure(transfers: Sequence[Transfer]) -> Transfer | None:
    return next((transfer for transfer in transfers if transfer.state is not TransferState.DONE), None)
