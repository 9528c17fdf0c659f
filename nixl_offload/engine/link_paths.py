"""``LinkPaths``: for a tier that a link reaches (a slab, a shared directory, a bucket), decides which path its chunks
take and how many may start at once, and makes their transfers.

Threading: see ``pump.TierEngine``. Ownership: it owns its link, the link's mover and its staging.
"""

from __future__ import annotations

import logging
import math
import os
import resource
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from nixl_offload.engine import direct, image, packed
from nixl_offload.engine.image import Spans, TransferPath
from nixl_offload.engine.link_memory import HEADER_PAGES, LinkMemory
from nixl_offload.engine.paths import Batch, InFlight, Phase, Steps, TierPaths, TierSetup
from nixl_offload.engine.records import Chunk, ChunkState, TierAccess, TierStatus, Waiting, WorkKind
from nixl_offload.engine.staging import SlotPool, Staging
from nixl_offload.errors import LayoutError, MoverError, TierError
from nixl_offload.movers.base import FileId, MemoryKind, Transfer, TransferState
from nixl_offload.tiers.base import Link, Target
from nixl_offload.types import Outcome

logger = logging.getLogger(__name__)

DIRECT_MIN_EXTENT_BYTES = 1 << 20
"""Smallest contiguous piece of a direct group. Smaller pieces are cheaper to copy through staging into one large extent
than to describe one by one (64 KiB: 2.2 GB/s, 2 MiB: 2.7 GB/s). Not yet measured on real GDS."""
STORE_QUEUE_FACTOR = 4
"""Waiting stores may add up to this many times the staging memory; further ones are dropped at once."""
POLL_S = 0.0005
"""NIXL's POSIX plugin moves bytes only when polled. Polled every 1 ms, small extents run at full speed; every 5 ms, at
a third. Polling without a pause takes half a CPU second per GB."""

LOAD_RESERVE = 0.25
"""Share of the staging slots that stores leave to loads."""
MAX_CHUNKS = HEADER_PAGES
"""Most chunks in flight in one file, however small. Bounds descriptors in the mover."""
MIN_CHUNKS = 32
"""Chunks that may be in flight however large they are: enough to keep any NVMe busy."""
IN_FLIGHT_BYTES = 64 << 20
"""Between these two limits, most bytes in flight."""
OWN_CHUNKS = 64
"""Most chunks in flight if each has its own file or object, and so its own requests."""
FILES_PER_CHUNK = 4
"""File descriptors or sockets that such a chunk may take: the file, one to sync it, two of KvikIO."""
FILES_SHARE = 2
"""The tier uses one in this many of the process's free descriptors: vLLM ends if it gets none."""
FILES_LOOK_S = 1.0
OWN_BATCH_CHUNKS = 16
"""Most of these chunks in one batch, which waits for the last of them."""
STORE_SHARE = 3 / 4
"""Share of the chunks in flight that stores and background work may take; the rest is for loads."""
MAX_BACKGROUND = 8
"""Most background chunks in flight, but for those on their way to memory. If they hang, stores still have room."""
MAX_BATCH_CHUNKS = 32
MAX_BATCH_BYTES = 16 << 20
"""A batch is gathered or scattered in one go, so a new load waits for at most this many bytes."""
BATCH_SHARE = 4
"""A batch takes at most one in this many staging slots: one batch is gathered while another is written."""
PART_AFTER_S = 0.1
"""How often late chunks, if each has its own transfers, are split off from a batch whose other chunks have arrived."""

T = TypeVar("T")


class LinkPaths(TierPaths):
    """The paths of chunks that a link's mover moves. Owns link and mover, and closes them.

    A load becomes OK only after identity, lengths and checksums were verified; on CORRUPT or FAILED the blocks of a
    packed group are untouched, those of a direct group are zero. A packed load that storage does not answer within
    the table's ``load_timeout_s`` is FAILED; its staging slot stays with the mover until the transfer is final. A store
    has no timeout.

    If chunks share a file, a batch has common transfers. Else each chunk has its own, and late ones leave the batch.
    """

    thread_name = "nixl-offload-pump"
    poll_s = POLL_S
    slow_after_s = 0.25

    def __init__(
        self,
        setup: TierSetup,
        link: Link,
        *,
        staging_bytes: int,
        staging: Staging = "host",
        direct_min_extent_bytes: int = DIRECT_MIN_EXTENT_BYTES,
    ) -> None:
        """Register memory and connect the link. The tier need not be usable yet; storing begins when it is.

        ``setup.verify="header"`` skips payload checksums, except where a read may have been cut short unnoticed.
        ``staging="device"``: groups that are not direct are packed in device memory if the mover takes it, else in host
        memory; ``staging_bytes`` is the size of either. ``direct_min_extent_bytes``: 0: all groups with aligned pages
        are direct; a huge number: none. Raises LayoutError (tensors and layout disagree) and MoverError (staging cannot
        be registered); the caller then closes link and mover.
        """
        super().__init__(setup, verify_checksum=setup.verify != "header")
        keys, device = setup.keys, setup.memory.device
        self.link = link
        self.mover = link.mover
        self.link_memory = LinkMemory(
            link,
            setup.memory,
            staging_bytes=staging_bytes,
            packs_on_device=staging == "device" and device.is_accelerator and keys is None,
            direct_min_extent_bytes=direct_min_extent_bytes,
            is_authenticated=keys is not None,
        )
        self.moves_blocks = bool(self.link_memory.tensors)
        self.plans = self.link_memory.plans
        link.connect()
        pools = [pool for path, pool in self.link_memory.pools.items() if path != "direct"]
        staged_bytes = sum(pool.slots_total * pool.slot_bytes for pool in pools)
        self.store_limit_bytes = STORE_QUEUE_FACTOR * (staged_bytes or staging_bytes)
        self._own_chunks = OWN_CHUNKS
        self._look_s = -math.inf
        """When to count descriptors again."""
        logger.info(
            "Engine: %s by %s, %s, %s",
            link.name,
            link.mover.name,
            " and ".join(map(_words, pools)) or "no staging",
            f"verify={setup.verify}" if keys is None else f"authenticated by key {keys.first_id.hex()}",
        )

    def _by_host_slot(self, chunk: Chunk) -> bool:
        """Whether a chunk goes through its host slot. If the mover cannot touch it, a promotion is a plain load."""
        if chunk.kind is WorkKind.PROMOTION:
            return self.link_memory.host_slab is not None or not len(chunk.block_ids)
        return chunk.kind in {WorkKind.WRITE_THROUGH, WorkKind.FETCH}

    def route(self, chunk: Chunk) -> Sequence[Phase]:
        """See ``TierPaths``."""
        plan, writes = self.plans[chunk.group], chunk.kind.writes
        if self._by_host_slot(chunk):
            if self.host is None or chunk.host_offset is None:
                raise LayoutError("there is no host memory in this engine")
            chunk.host_slot = self.host.slot(chunk.host_offset, plan.slot_bytes)
            return packed.WRITE_THROUGH if writes else packed.FETCH
        if plan.path == "direct":
            return direct.STORE if writes else direct.LOAD
        return packed.STORE if writes else packed.LOAD

    def status(self, waiting: Waiting) -> TierStatus:
        """See ``TierPaths``."""
        paths = tuple(sorted({plan.path for plan in self.plans if plan.block_bytes}))
        link = self.link
        trouble, access = "" if link.trouble == "none" else link.trouble, TierAccess(link.mover.name, paths)
        if self.link_memory.host_slab is None and not all(pool.usable for pool in self.link_memory.pools.values()):
            return TierStatus(waiting, trouble or "staging", access, loads_fail=True, stores_fail=True)
        return TierStatus(waiting, trouble, access, loads_fail=link.suspect, stores_fail=link.refuses)

    def close(self) -> None:
        """Close the link and its mover."""
        self.link.close()
        self.link.mover.close()

    # -- room -------------------------------------------------------------------------------------------------------

    def room(self, chunk: Chunk, in_flight: InFlight) -> int | str:
        """See ``TierPaths``. Without room, a load from a suspect tier fails: nobody knows when that tier answers."""
        room = self._room(chunk, in_flight)
        if room < 1 and not chunk.kind.writes and not chunk.kind.in_background and self.link.suspect:
            return self._out_of_use()
        return room

    def _room(self, chunk: Chunk, in_flight: InFlight) -> int:
        plan = self.plans[chunk.group]
        slot_bytes = max(1, plan.slot_bytes)
        total, most = self._own_chunks, OWN_BATCH_CHUNKS
        if self.link.shares_file:
            total, most = max(MIN_CHUNKS, min(MAX_CHUNKS, IN_FLIGHT_BYTES // slot_bytes)), MAX_BATCH_CHUNKS
        elif not in_flight.chunks:
            total = self._look_at_descriptors()
        stores = max(1, int(total * STORE_SHARE))
        limit = min(most, max(1, MAX_BATCH_BYTES // slot_bytes), total - in_flight.chunks)
        if plan.goes_singly:
            limit = min(limit, 1)
        if chunk.kind.in_background:
            most = stores if chunk.job.kind is WorkKind.FETCH else MAX_BACKGROUND
            limit = min(limit, most - in_flight.background, stores - in_flight.chunks)
        elif chunk.kind.writes:
            limit = min(limit, stores - in_flight.stores - in_flight.background)
        if self._by_host_slot(chunk):
            return limit
        pool = self.link_memory.pools.get(plan.path)
        if pool is None or not pool.usable:
            return min(limit, 1)  # it will be rejected
        limit = min(limit, max(1, pool.usable // BATCH_SHARE), pool.free)
        if chunk.kind.writes:
            reserve = max(1, int(pool.usable * LOAD_RESERVE))
            limit = min(limit, max(1, pool.usable - reserve) - in_flight.stores)
        return limit

    def _look_at_descriptors(self) -> int:
        """Return how many chunks with their own file or object may be in flight. Called while none is."""
        now_s = self.table.clock()
        if now_s < self._look_s:
            return self._own_chunks
        self._look_s = now_s + FILES_LOOK_S
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        try:
            left = limit - len(os.listdir("/proc/self/fd"))
        except OSError:  # not one is left
            left = 0
        self._own_chunks = max(1, min(OWN_CHUNKS, left // FILES_SHARE // FILES_PER_CHUNK))
        if self._own_chunks < OWN_CHUNKS:
            self.complaints.warning(
                "descriptors",
                "%d of %d files that this process may have open are left (RLIMIT_NOFILE, ulimit -n): %d chunks of the "
                "%s travel at once instead of %d",
                left,
                limit,
                self._own_chunks,
                self.link.name,
                OWN_CHUNKS,
            )
        return self._own_chunks

    # -- slots and the link -----------------------------------------------------------------------------------------

    def take_slots(self, batch: Batch, path: TransferPath) -> bool:
        """Take a slot for each chunk that has none, then apply ``may_go``; chunks that repeat a phase have a slot. A
        chunk for which none is left is FAILED. Returns whether any chunk is left.
        """
        pool = self.link_memory.pools.get(path)
        for chunk in [chunk for chunk in batch.alive if chunk.staging_slot is None]:
            chunk.staging_slot = pool.acquire() if pool is not None else None
            if chunk.staging_slot is not None:
                chunk.pool = pool
                continue
            self.complaints.error(
                "staging", "No staging memory is left (all of it retired): nothing is stored or loaded"
            )
            chunk.end(Outcome.FAILED, "storage: io", "io")
        return self.may_go(batch)

    def may_go(self, batch: Batch) -> bool:
        """End chunks that the link does not take now as FAILED. Returns whether any chunk is left.

        Asks once per file or object, since the link may allow a single trial.
        """
        goes = False
        may_go = self.link.may_store if batch.kind.writes else self.link.may_load
        for number, chunk in enumerate(batch.alive):
            if number == 0 or not self.link.shares_file:
                goes = may_go()
            if not goes:
                chunk.end(Outcome.FAILED, self._out_of_use(), "disabled")
        return bool(batch.alive)

    def _out_of_use(self) -> str:
        return f"storage is out of use: {self.link.trouble}"

    def let_go(self, chunk: Chunk, error: str | None) -> None:
        """See ``TierPaths``."""
        target, chunk.target = chunk.target, None
        if target is not None:
            try:
                (self.link.fail_write if chunk.kind.writes else self.link.fail_read)(target, error)
            except Exception as bug:  # noqa: BLE001 - the link has released the target anyway
                self.complaints.crashed(bug, "undo")

    def _call_link(
        self, chunks: Sequence[Chunk], calls: Sequence[Generator[None, None, T]], answered: Callable[[Chunk, T], None]
    ) -> Steps:
        """Run one link call per chunk, concurrently. A chunk whose call raises is FAILED."""
        running = list(zip(chunks, calls, strict=True))
        while running:
            unanswered = []
            for chunk, call in running:
                self.stretch.pause()
                try:
                    next(call)
                except StopIteration as stop:
                    answered(chunk, stop.value)
                except TierError as error:
                    is_blamed = error.cause != "files"
                    if not is_blamed:
                        self.complaints.warning("files", "A chunk is not moved: %s", error)
                    outcome = Outcome.FAILED if is_blamed else Outcome.DROPPED
                    chunk.end(outcome, f"storage: {error.cause}", error.cause)
                except Exception as error:  # noqa: BLE001 - the other chunks' calls must finish
                    self.complaints.crashed(error, "link")
                    chunk.end(Outcome.FAILED, f"unexpected {type(error).__name__}", "unexpected")
                else:
                    unanswered.append((chunk, call))
            running = unanswered
            if running:
                yield

    # -- transfers --------------------------------------------------------------------------------------------------

    def transfer(
        self,
        batch: Batch,
        submit: Callable[[Sequence[Chunk]], Iterator[Transfer]],
        claim: Callable[[], Steps] | None = None,
        wait: Steps | None = None,
    ) -> Steps:
        """Move live chunks to or from the tier. A chunk that is not moved is FAILED, a stored one OK; one that was read
        goes on.

        ``submit`` starts the transfers of some chunks, as ``submit_spans`` does. ``claim`` comes before it.
        ``wait`` yields until all transfers have ended. If each chunk has its own transfers, late ones are split off, so
        that they do not hold the others. Such a batch comes here with its transfers under way.
        """
        if batch.submitted_s is None:
            yield from self._open_targets(batch)
            if claim is not None:
                yield from claim()
            if not batch.alive:
                return
            self._start(batch, submit)
        yield from self._arrive(batch, wait or self._poll(batch))
        yield from self._end_transfers(batch)

    def _open_targets(self, batch: Batch) -> Steps:
        """Begin a read or write of each chunk. A chunk that cannot be moved is FAILED."""
        writes, plan = batch.kind.writes, batch.plan
        begin = self.link.begin_write if writes else self.link.begin_read

        def begun(chunk: Chunk, target: Target) -> None:
            chunk.target = target
            if not writes and chunk.state is ChunkState.DONE:
                self.let_go(chunk, None)  # given up; nothing has been read
                chunk.end(Outcome.FAILED, "given up")

        chunks = batch.alive
        shard = self.shards[chunks[0].group].number
        calls = [begin(chunk.key, chunk.location, plan.slot_bytes, shard) for chunk in chunks]
        yield from self._call_link(chunks, calls, begun)
        self.stretch.pause()

    def _start(self, batch: Batch, submit: Callable[[Sequence[Chunk]], Iterator[Transfer]]) -> None:
        """Start common transfers if the chunks share a file. Else each chunk has its own; one that the mover refuses is
        FAILED.
        """
        batch.submitted_s, chunks = self.table.clock(), batch.alive
        for group in [chunks] if self.link.shares_file else [[chunk] for chunk in chunks]:
            begun = len(batch.transfers)
            try:
                for transfer in submit(group):
                    batch.transfers.append(transfer)  # at once: the next one may raise
                    self.stretch.pause()
            except MoverError as error:
                if self.link.shares_file or len(batch.transfers) > begun:
                    raise
                self.complaints.error(type(error).__name__, "A chunk could not be moved: %s", error)
                self.let_go(group[0], str(error))
                group[0].end(Outcome.FAILED, str(error), "io")
            for chunk in group:
                chunk.transfers = tuple(batch.transfers[begun:])

    def submit_spans(self, spans_of: Callable[[Chunk], Spans], chunks: Sequence[Chunk]) -> Iterator[Transfer]:
        """Move ``spans_of`` each chunk between slot and target. All slots lie in one memory. Yields each transfer as
        soon as it is started. Raises MoverError, also if the mover does not have that memory; earlier transfers are
        then in flight.
        """
        mover, pool, op = self.link.mover, chunks[0].pool, chunks[0].kind.op
        memory = self.link_memory.host_slab if chunks[0].host_slot is not None or pool is None else pool.memory
        if memory is None:
            raise MoverError(f"{mover.name} cannot touch the memory that the chunk is to lie in")
        by_file: dict[FileId, list[tuple[int, int, int]]] = {}
        for chunk in chunks:
            slot, target = image.any_slot(chunk), chunk.target
            assert target is not None, "only chunks that were begun at the link are moved"
            by_file.setdefault(target.file, []).extend(
                (slot.offset_bytes + begin, target.offset + begin, length) for begin, length in spans_of(chunk)
            )
        most = mover.limits.max_extents_per_transfer
        for file, rows in by_file.items():
            for begin in range(0, len(rows), most):
                extents = np.array(rows[begin : begin + most], dtype=np.int64)
                yield mover.submit(op, memory, extents[:, [0, 2]], file, extents[:, [1, 2]])

    def _poll(self, batch: Batch) -> Steps:
        """As ``Batch.ends``, but tell the link once of each read chunk that is given up meanwhile."""
        waited_for = [] if batch.kind.writes else batch.alive
        while batch.poll():
            if waited_for and waited_for[0].state is ChunkState.DONE:
                for chunk in waited_for:
                    if chunk.state is ChunkState.DONE and not chunk.is_overdue:
                        chunk.is_overdue = True
                        self.link.overdue()
                waited_for = [chunk for chunk in waited_for if not chunk.is_overdue]
            yield

    def _arrive(self, batch: Batch, wait: Steps) -> Steps:
        """Run ``wait`` to its end. Every ``PART_AFTER_S``, chunks that are held by their own transfers are split off,
        and end the waiting.
        """
        part_s = self.table.clock() + PART_AFTER_S
        for _ in wait:
            if self.table.clock() >= part_s:
                part_s = self.table.clock() + PART_AFTER_S
                if self._part(batch):
                    break
            yield
        wait.close()
        self._part(batch)

    def _part(self, batch: Batch) -> bool:
        """Split off the chunks that a transfer holds, unless it holds the whole batch. Returns whether it did."""
        may_part = len(batch.chunks) > 1 and not self.link.shares_file
        held = [chunk for chunk in batch.alive if chunk.is_held] if may_part else []
        if parts := 0 < len(held) < len(batch.chunks):
            batch.split_off(held, self.run)
        return parts

    def _end_transfers(self, batch: Batch) -> Steps:
        """Called when all transfers are final: end reads and writes at the link, and chunks that were not moved. A
        failure of common transfers may be any chunk's, so each is tried alone.
        """
        failed: dict[Chunk, Transfer] = {}
        if any(transfer.state is TransferState.FAILED for transfer in batch.transfers):
            failed = {chunk: failure for chunk in batch.alive if (failure := chunk.failure) is not None}
        if failed and self.link.shares_file and self.tries_singly(batch):
            return
        writes = batch.kind.writes
        for chunk, failure in failed.items():
            if writes or not failure.missing:
                self.let_go(chunk, failure.error or "")
            if not writes:
                self.complaints.warning("read", "A chunk could not be read and will be recomputed: %s", failure.error)
        if writes:
            # The KV blocks are read; making chunks visible does not need them. Late reads can spoil only the location.
            self.advance_or_end(batch, ChunkState.TRANSFER)
        ended, targets = [], []
        for chunk in batch.alive:
            target, chunk.target = chunk.target, None
            if target is not None:
                ended.append(chunk)
                targets.append(target)
        if writes:
            calls = [self.link.end_write(target) for target in targets]
            yield from self._call_link(ended, calls, lambda chunk, _: chunk.end(Outcome.OK))
        else:
            for target in targets:
                self.link.end_read(target)
        if writes or batch.touches_blocks:
            yield from self.wait_out_quarantine(batch)
        for chunk, failure in failed.items():
            chunk.end(Outcome.FAILED, failure.error, "missing" if failure.missing else "io")


def _words(pool: SlotPool[Any]) -> str:
    where = "on the device" if pool.region.kind is MemoryKind.VRAM else "in host memory"
    return f"{pool.slots_total} staging slots of {pool.slot_bytes / 2**20:.2f} MiB {where}"
