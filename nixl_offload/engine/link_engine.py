"""The engine of a tier that a link reaches: a slab, a shared directory, a bucket. ``LinkPaths`` decides which path its
chunks take and how many may start at once, and makes their transfers.

Threading: see ``pump.TierEngine``. Ownership: the engine owns its link, the link's mover, its staging and the pump.
"""

from __future__ import annotations

import logging
import math
import os
import resource
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from nixl_offload.chunk.authentication import ChunkKeys
from nixl_offload.chunk.layout import KVLayout
from nixl_offload.chunk.shards import Shard
from nixl_offload.engine import direct, image, packed
from nixl_offload.engine.host import HostSlab
from nixl_offload.engine.image import Spans, TransferPath
from nixl_offload.engine.jobs import JobTable, TierQueue
from nixl_offload.engine.link_memory import HEADER_PAGES, LinkMemory
from nixl_offload.engine.packer import require_agreement
from nixl_offload.engine.paths import Batch, InFlight, Phase, Steps, TierPaths
from nixl_offload.engine.pump import Pauses, TierEngine
from nixl_offload.engine.records import Chunk, ChunkState, TierAccess, TierStatus, Waiting, WorkKind
from nixl_offload.engine.staging import SlotPool, Staging
from nixl_offload.engine.streams import Device, device_of
from nixl_offload.errors import LayoutError, MoverError, TierError
from nixl_offload.movers.base import Extents, FileId, MemoryKind, Op, Transfer, TransferState
from nixl_offload.tiers.base import Link, Target
from nixl_offload.types import Outcome, Verify

logger = logging.getLogger(__name__)

DIRECT_MIN_EXTENT_BYTES = 1 << 20
"""Smallest piece that a direct group may consist of. Below it a copy through staging into one large extent is cheaper
than the descriptors (64 KiB pieces: 2.2 GB/s against 2.7 at 2 MiB); to be measured again on real GDS."""
STORE_QUEUE_FACTOR = 4
"""Stores may wait for this many times the staging memory; what comes on top is dropped at once."""
POLL_S = 0.0005
PAUSES = Pauses(poll_s=POLL_S, slow_poll_s=0.005, slow_after_s=0.25)
"""NIXL's POSIX I/O moves only when polled: at 1 ms small extents run at full speed, at 5 ms at a third of it; without a
pause polling burns half a CPU second per GB."""

LOAD_RESERVE = 0.25
"""Share of the staging slots that stores leave to loads."""
MAX_CHUNKS = HEADER_PAGES
"""In flight, however small. Bounds descriptors in the mover."""
MIN_CHUNKS = 32
"""In flight, however large: they keep any NVMe busy."""
IN_FLIGHT_BYTES = 64 << 20
"""Between the two: what is in flight at once."""
OWN_CHUNKS = 64
"""In flight, where each has a file or object of its own, and so requests of its own."""
FILES_PER_CHUNK = 4
"""Descriptors that such a chunk may take: the file's, one to sync it by, and two of KvikIO's. Or sockets."""
FILES_SHARE = 2
"""One in so many descriptors that the process has left is for the tier: the engine ends where it gets none."""
FILES_LOOK_S = 1.0
OWN_BATCH_CHUNKS = 16
"""Of those, a batch takes at most so many: it waits for the last of them."""
STORE_SHARE = 3 / 4
"""Of those, stores and background work; the rest is left for loads, so that no load waits behind a wall of writes."""
MAX_BACKGROUND = 8
"""Of those, background work, which holds no staging: what hangs leaves room for stores."""
MAX_BATCH_CHUNKS = 32
MAX_BATCH_BYTES = 16 << 20
"""A batch is gathered or scattered in one go: a load that comes meanwhile waits for no more than that."""
BATCH_SHARE = 4
"""A batch takes at most one in so many staging slots, so that one is gathered while another is written."""
PART_AFTER_S = 0.1
"""Chunks with transfers of their own wait for the last of their batch: this long, or as long as the first of them took
if that is longer. Then those that have arrived go on without the others."""

T = TypeVar("T")


class LinkEngine(TierEngine):
    """Moves chunks between KV blocks, or host slots, and one tier.

    A load becomes OK only after identity, lengths and checksums were verified; on CORRUPT or FAILED the blocks of a
    packed group are untouched, those of a direct group are zero. A packed load that storage does not answer within
    the table's ``load_timeout_s`` is FAILED; its staging slot stays with the mover until the transfer is final. A store
    has no timeout.
    """

    def __init__(
        self,
        *,
        table: JobTable,
        tensors: Sequence[torch.Tensor],
        layout: KVLayout,
        link: Link,
        rank_namespace: bytes,
        shards: Sequence[Shard] = (),
        staging_bytes: int,
        tier: int = 0,
        verify: Verify = "checksum",
        direct_min_extent_bytes: int = DIRECT_MIN_EXTENT_BYTES,
        host: HostSlab | None = None,
        device: Device | None = None,
        staging: Staging = "host",
        keys: ChunkKeys | None = None,
    ) -> None:
        """Register memory, connect the link, and start the pump.

        ``table``: of the rank. ``tensors``: in the order of ``layout.tensors``, int8 or uint8 of shape (num_blocks,
        page_bytes), all on one device. ``shards``: by group of ``layout``, which shard of a chunk it is on this rank;
        none: it is the rank's own, whose headers carry ``rank_namespace``. ``tier``: its position; one that cannot be
        used yet is no error: storing begins when it can. ``verify="header"`` skips payload checksums, except where a
        read may have been cut short unnoticed. ``host``: the slots that ``Chunk.host_offset`` names; the caller's, who
        closes it after the engine. ``device``: None takes that of the tensors. ``staging="device"``: what does not go
        direct is packed in device memory where the mover takes that, else in host memory; ``staging_bytes`` holds for
        either. ``direct_min_extent_bytes``: 0 lets every group go direct whose pages are aligned, a huge number none.
        ``keys``: what is stored gets a MAC, and nothing is loaded without; then chunks are packed in host memory and
        read whole, and ``verify`` does not matter.
        Raises LayoutError (tensors and layout disagree) and MoverError (staging cannot be registered); link and mover
        are the caller's to close then.
        """
        require_agreement(tensors, layout)
        device = device or device_of(tensors[0])
        memory = LinkMemory(
            link,
            layout,
            device,
            staging_bytes=staging_bytes,
            packs_on_device=staging == "device" and device.is_accelerator and keys is None,
            direct_min_extent_bytes=direct_min_extent_bytes,
            host=host,
            is_authenticated=keys is not None,
        )
        for plan, shard in zip(memory.plans, shards, strict=bool(shards)):
            plan.shard = shard.number
        link.connect()
        pools = [pool for path, pool in memory.pools.items() if path != "direct"]
        staged_bytes = sum(pool.slots_total * pool.slot_bytes for pool in pools)
        logger.info(
            "Engine: %s by %s, %s, %s",
            link.name,
            link.mover.name,
            " and ".join(map(_words, pools)) or "no staging",
            f"verify={verify}" if keys is None else f"authenticated by key {keys.first_id.hex()}",
        )
        paths = LinkPaths(
            link,
            memory,
            table,
            tensors,
            layout,
            memory.plans,
            host=host,
            rank_namespace=rank_namespace,
            shards=shards,
            verify_checksum=verify != "header",
            keys=keys,
            device=device,
        )
        limit_bytes = STORE_QUEUE_FACTOR * (staged_bytes or staging_bytes)
        queue = TierQueue(table, tier, layout, store_limit_bytes=limit_bytes)
        super().__init__(queue, paths, name="nixl-offload-pump", pauses=PAUSES)


class LinkPaths(TierPaths):
    """Of chunks that go by a link's mover. Owns link and mover, and closes them.

    Where files are shared a batch has one transfer. Else each chunk has transfers of its own, and those that failed or
    are late part from the others.
    """

    def __init__(self, link: Link, memory: LinkMemory, *arguments: Any, **options: Any) -> None:
        """``memory``: what the link's mover was given. ``arguments``, ``options``: as for ``TierPaths``."""
        super().__init__(*arguments, **options)
        self.link = link
        self.mover = link.mover
        self.link_memory = memory
        self._own_chunks = OWN_CHUNKS
        self._look_s = -math.inf
        """When to count descriptors again."""

    def phases(self, chunk: Chunk) -> Sequence[Phase]:
        """See ``TierPaths``."""
        if self._by_host_slot(chunk):
            return packed.WRITE_THROUGH if chunk.kind.writes else packed.FETCH
        if self.plans[chunk.group].path == "direct":
            return direct.STORE if chunk.kind.writes else direct.LOAD
        return packed.STORE if chunk.kind.writes else packed.LOAD

    def _by_host_slot(self, chunk: Chunk) -> bool:
        """Whether a chunk goes by its host slot. A promotion whose tier cannot touch that serves its KV blocks all the
        same.
        """
        if chunk.kind is WorkKind.PROMOTION:
            return self.link_memory.host is not None or not len(chunk.block_ids)
        return chunk.kind in {WorkKind.WRITE_THROUGH, WorkKind.FETCH}

    def find_slot(self, chunk: Chunk) -> None:
        """See ``TierPaths``."""
        if self._by_host_slot(chunk):
            if self.host is None or chunk.host_offset is None:
                raise LayoutError("there is no host memory in this engine")
            chunk.host = self.host.slot(chunk.host_offset, self.plans[chunk.group].slot_bytes)

    def status(self, waiting: Waiting) -> TierStatus:
        """See ``TierPaths``."""
        paths = tuple(sorted({plan.path for plan in self.plans if plan.block_bytes}))
        trouble = "" if self.link.trouble == "none" else self.link.trouble
        return TierStatus(waiting, trouble, TierAccess(self.link.mover.name, paths))

    def close(self) -> None:
        """Close the link and its mover."""
        self.link.close()
        self.link.mover.close()

    # -- room -------------------------------------------------------------------------------------------------------

    def room(self, chunk: Chunk, in_flight: InFlight) -> int | str:
        """Return how many chunks like ``chunk`` there are slots and I/O for: one batch at most. A load of a suspect
        tier shall not wait: nobody knows when it answers what takes up its room.
        """
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
            limit = min(limit, MAX_BACKGROUND - in_flight.background, stores - in_flight.chunks)
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
        """Return how many chunks with a file or object of their own may be in flight, now that none is."""
        now_s = self.table.clock()
        if now_s < self._look_s:
            return self._own_chunks
        self._look_s = now_s + FILES_LOOK_S
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        try:
            left = limit - len(os.listdir("/proc/self/fd"))
        except OSError:  # not even one
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
        """Take a slot for each chunk that has none, if ``may_go``. When a phase begins again with single chunks, they
        have theirs. A chunk for which none is left is FAILED. Whether any chunk is left.
        """
        pool = self.link_memory.pools.get(path)
        for chunk in [chunk for chunk in batch.alive if chunk.slot is None]:
            chunk.slot = pool.acquire() if pool is not None else None
            if chunk.slot is not None:
                chunk.pool = pool
                continue
            self.complaints.error(
                "staging", "No staging memory is left (all of it retired): nothing is stored or loaded"
            )
            chunk.end(Outcome.FAILED, "storage: io", "io")
        return self.may_go(batch)

    def may_go(self, batch: Batch) -> bool:
        """Whether the link takes something of this batch now; what it does not take is FAILED.

        Asked for each thing that is opened: the answer may be yes for a single trial.
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

    def open_targets(self, batch: Batch) -> Steps:
        """Begin a read or write of each chunk. A chunk that cannot be moved is FAILED."""
        writes, plan = batch.kind.writes, batch.plan
        begin = self.link.begin_write if writes else self.link.begin_read

        def begun(chunk: Chunk, target: Target) -> None:
            chunk.target = target
            if not writes and chunk.state is ChunkState.DONE:
                self.let_go(chunk, None)  # nobody waits for it any more, and nothing has been read
                chunk.end(Outcome.FAILED, "given up")

        chunks = batch.alive
        calls = [begin(chunk.key, chunk.location, plan.slot_bytes, plan.shard) for chunk in chunks]
        yield from self._call_link(chunks, calls, begun)
        self.stretch.pause()

    def let_go(self, chunk: Chunk, error: str | None) -> None:
        """See ``TierPaths``."""
        target, chunk.target = chunk.target, None
        if target is not None:
            try:
                (self.link.fail_write if chunk.kind.writes else self.link.fail_read)(target, error)
            except Exception as bug:  # noqa: BLE001 - the link has let go of it all the same
                self.complaints.crashed(bug, "undo")

    def _call_link(
        self,
        chunks: Sequence[Chunk],
        calls: Sequence[Generator[None, None, T]],
        answered: Callable[[Chunk, T], None],
    ) -> Steps:
        """Make a call of the link for each chunk, all side by side. A chunk of which the call raises is FAILED."""
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
                except Exception as error:  # noqa: BLE001 - the others' calls are under way, and must be seen through
                    self.complaints.crashed(error, "link")
                    chunk.end(Outcome.FAILED, f"unexpected {type(error).__name__}", "unexpected")
                else:
                    unanswered.append((chunk, call))
            running = unanswered
            if running:
                yield

    # -- transfers: a phase that moves a batch. A part of one has begun it already, and goes on with the waiting ----

    def write(self, batch: Batch, spans_of: Callable[[Chunk], Spans]) -> Steps:
        """Write slots, and end their chunks."""
        if batch.submitted_s is None:
            yield from self.open_targets(batch)
            self.start_transfers(batch, lambda chunks: self.submit(Op.WRITE, chunks, spans_of))
        yield from self.finish_writes(batch)

    def read(self, batch: Batch, spans_of: Callable[[Chunk], Spans]) -> Steps:
        """Read into slots. The chunks that have not arrived are ended, or have parted."""
        if batch.submitted_s is None:
            yield from self.open_targets(batch)
            self.start_transfers(batch, lambda chunks: self.submit(Op.READ, chunks, spans_of))
        yield from self.arrive(batch, self._await_load(batch))
        self.finish_reads(batch)

    def start_transfers(self, batch: Batch, start: Callable[[Sequence[Chunk]], Iterator[Transfer]]) -> None:
        """Move all chunks at once where they lie in one file. Else each has transfers of its own; one that the mover
        refuses is FAILED.
        """
        batch.submitted_s = self.table.clock()
        if self.link.shares_file:
            for transfer in start(batch.alive):
                batch.transfers.append(transfer)  # at once: the next one may raise
                self.stretch.pause()
            return
        for chunk in batch.alive:
            try:
                for transfer in start([chunk]):
                    batch.transfers.append(transfer)
                    chunk.transfers += (transfer,)
            except MoverError as error:
                if chunk.transfers:
                    raise
                self.complaints.error(type(error).__name__, "A chunk could not be moved: %s", error)
                self.let_go(chunk, str(error))
                chunk.end(Outcome.FAILED, str(error), "io")
            self.stretch.pause()

    def submit(self, op: Op, chunks: Sequence[Chunk], spans_of: Callable[[Chunk], Spans]) -> Iterator[Transfer]:
        """Move ``spans_of`` chunks between their slots, which all lie in one memory, and their targets. Yields each
        transfer as soon as it is started. Raises MoverError, also where the mover was not given that memory; what was
        started before is in flight then.
        """
        mover = self.link.mover
        by_file: dict[FileId, tuple[list[tuple[int, int]], list[tuple[int, int]]]] = {}
        memory = self.link_memory.host if chunks and chunks[0].host is not None else None
        for chunk in chunks:
            slot, target = image.any_slot(chunk), chunk.target
            if chunk.host is None and chunk.pool is not None:
                memory = chunk.pool.memory
            assert target is not None, "only chunks that were begun at the link are moved"
            in_memory, in_file = by_file.setdefault(target.file, ([], []))
            for begin, length in spans_of(chunk):
                in_memory.append((slot.offset_bytes + begin, length))
                in_file.append((target.offset + begin, length))
        if chunks and memory is None:
            raise MoverError(f"{mover.name} cannot touch the memory that the chunk is to lie in")
        most = mover.limits.max_extents_per_transfer
        for file, (in_memory, in_file) in by_file.items():
            assert memory is not None
            for rows in (slice(begin, begin + most) for begin in range(0, len(in_memory), most)):
                yield mover.submit(op, memory, _extents(in_memory[rows]), file, _extents(in_file[rows]))

    def arrive(self, batch: Batch, waiting: Steps) -> Steps:
        """Wait for the transfers of a batch by ``waiting``. Where each chunk has its own, those that failed go on
        without the others, and so do those that are late: then no chunk of this batch is alive, and its parts wait.
        """
        chunks = batch.alive
        batch.may_part = len(batch.chunks) > 1 and not self.link.shares_file
        if batch.may_part and 0 < len(chunks) < len(batch.chunks):
            waiting.close()
            batch.split([chunks], self.run)  # what was refused ends now, and gives its slots back
            return
        began_s = self.table.clock()
        for _ in waiting:
            if batch.may_part:
                now_s = self.table.clock()
                if batch.parts_s is None and len(_by_transfer(chunks)) > 1:
                    batch.parts_s = now_s + max(PART_AFTER_S, now_s - began_s)
                elif batch.parts_s is not None and now_s >= batch.parts_s:
                    break
            yield
        waiting.close()
        groups = _by_transfer(chunks) if batch.may_part and batch.failure is not None else []
        if len(groups) > 1:
            batch.split(groups, self.run)

    def _await_load(self, batch: Batch) -> Steps:
        """As ``Batch.ends``; the link hears of each chunk that is given up meanwhile, once."""
        waited_for = [chunk for chunk in batch.alive if not chunk.is_overdue]
        while batch.poll():
            if waited_for and waited_for[0].state is ChunkState.DONE:
                for chunk in waited_for:
                    if chunk.state is ChunkState.DONE:
                        chunk.is_overdue = True
                        self.link.overdue()
                waited_for = [chunk for chunk in waited_for if not chunk.is_overdue]
            yield

    def finish_writes(self, batch: Batch) -> Steps:
        """Wait for the transfers, then make the chunks visible, or end them as FAILED."""
        yield from self.arrive(batch, batch.ends())
        failure = batch.failure
        if failure is not None:
            if self.tries_singly(batch):
                return
            words = failure.error or "write failed"
            self.abandon(batch, words)
            # Late reads of the KV blocks spoil nothing but this location.
            self.table.advance(batch.alive, ChunkState.TRANSFER)
            yield from self.wait_out_quarantine(batch)
            for chunk in batch.alive:
                chunk.end(Outcome.FAILED, words, "io")
            return
        # All is read: what makes a chunk visible needs no KV blocks.
        self.advance_or_end(batch, ChunkState.TRANSFER)
        chunks, calls = batch.alive, []
        for chunk in chunks:
            target, chunk.target = chunk.target, None
            assert target is not None
            calls.append(self.link.end_write(target))
        yield from self._call_link(chunks, calls, lambda chunk, _: chunk.end(Outcome.OK))

    def finish_reads(self, batch: Batch) -> None:
        """All transfers are final: tell the link how its part ended. What has not arrived is FAILED."""
        failure = batch.failure
        if failure is not None and self.tries_singly(batch):
            return
        if failure is None or failure.missing:
            for chunk in batch.chunks:
                target, chunk.target = chunk.target, None
                if target is not None:
                    self.link.end_read(target)
        if failure is not None:
            self.abandon(batch, failure.error or "read failed")
            self.complaints.warning("read", "A chunk could not be read and will be recomputed: %s", failure.error)
            for chunk in batch.alive:
                chunk.end(Outcome.FAILED, failure.error, "missing" if failure.missing else "io")


def _by_transfer(chunks: Sequence[Chunk]) -> list[list[Chunk]]:
    """Part chunks by their own transfers: those that have arrived, those that are under way, and each that failed."""
    by_state: dict[TransferState, list[Chunk]] = {state: [] for state in TransferState}
    for chunk in chunks:
        by_state[chunk.transfer_state].append(chunk)
    together = [by_state[TransferState.DONE], by_state[TransferState.PENDING]]
    return [group for group in together if group] + [[chunk] for chunk in by_state[TransferState.FAILED]]


def _extents(pairs: Sequence[tuple[int, int]]) -> Extents:
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)


def _words(pool: SlotPool[Any]) -> str:
    where = "on the device" if pool.region.kind is MemoryKind.VRAM else "in host memory"
    return f"{pool.slots_total} staging slots of {pool.slot_bytes / 2**20:.2f} MiB {where}"
