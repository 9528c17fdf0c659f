"""The worker's half: jobs in, one outcome per chunk out. Everything slow happens on one pump thread.

Threading: one caller thread (vLLM's worker) plus the pump. The caller's methods enqueue and read; none does I/O.
Ownership: the engine owns the links, their movers, its staging memory and the pump; tensors belong to the caller, who
keeps them alive and the blocks of a job untouched until ``wait`` or ``finished`` says otherwise.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from typing import Literal

import torch

from nixl_offload.chunk.layout import KVLayout
from nixl_offload.engine.device_packer import DevicePacker
from nixl_offload.engine.jobs import JobTable
from nixl_offload.engine.packer import make_packer, pages_of, require_agreement
from nixl_offload.engine.paths import ChunkPaths
from nixl_offload.engine.pools import Host, Memory, Staging
from nixl_offload.engine.ports import open_ports
from nixl_offload.engine.pump import Pump
from nixl_offload.engine.ratelog import RateLog
from nixl_offload.engine.records import ChunkIO, Job, JobResult, Landed, Lane
from nixl_offload.engine.staging import DeviceStagingPool, StagingPool
from nixl_offload.engine.streams import READY, Device, device_of
from nixl_offload.engine.tally import Equipment, Standing, Waiting
from nixl_offload.engine.ways.context import Context
from nixl_offload.tiers.link import Link

logger = logging.getLogger(__name__)

DIRECT_MIN_EXTENT_BYTES = 256 << 10
"""Smallest piece that a direct group may consist of. Below it a copy through staging into one large extent is cheaper
than the descriptors (64 KiB pieces: 2.2 GB/s against 2.7 at 2 MiB); to be measured again on real GDS."""
STORE_GRACE_S = 0.020
"""How long ``wait`` gives queued stores to be gathered before it drops them."""
WAIT_LIMIT_S = 2.0
"""How long ``wait`` lets a store read its blocks, or a load finish. Only hung storage takes longer, and it shall not
hang the engine."""
STORE_QUEUE_FACTOR = 4
"""Stores may wait for this many times the staging memory; what comes on top is dropped at once."""


class Engine:
    """Moves chunks between KV blocks and tiers. Each submitted job yields exactly one ``JobResult``, and a load with
    host slots to fill exactly one ``Landed``, whatever fails.

    Loads overtake stores. A load becomes OK only after identity, lengths and checksums were verified; on CORRUPT or
    FAILED the blocks of a packed group are untouched, those of a direct group are garbage.
    A packed load that storage does not answer within ``load_timeout_s`` is FAILED; its staging slot stays with the
    mover until the transfer is final. A store has no timeout: FAILED is told only when nothing can write to its
    location any more, so that the location may be given away.
    """

    def __init__(
        self,
        *,
        tensors: Sequence[torch.Tensor],
        layout: KVLayout,
        links: Sequence[Link | None],
        rank_namespace: bytes,
        staging_bytes: int,
        verify: Literal["checksum", "header"] = "checksum",
        clock: Callable[[], float] = time.monotonic,
        load_timeout_s: float = 30.0,
        direct_min_extent_bytes: int = DIRECT_MIN_EXTENT_BYTES,
        host: Host | None = None,
        device: Device | None = None,
        staging: Staging = "host",
    ) -> None:
        """Register memory, connect the links, and start the pump.

        ``tensors``: in the order of ``layout.tensors``, int8 or uint8 of shape (num_blocks, page_bytes), all on one
        device. ``links``: indexed by ``Location.tier``; a tier that cannot be used yet is no error: storing begins when
        it can. ``verify="header"`` skips payload checksums, except where a read may have been cut short unnoticed.
        ``host``: the slots that ``ChunkIO.host_offset`` names; the caller's, who closes it after the engine.
        ``device``: None takes that of the tensors. ``staging="device"``: what does not go direct is packed in device
        memory where the mover takes that, else in host memory; ``staging_bytes`` holds for either.
        ``direct_min_extent_bytes``: 0 lets every group go direct whose pages are aligned, a huge number none.
        Raises LayoutError (tensors and layout disagree) and MoverError (staging cannot be registered); links and
        movers are the caller's to close then.
        """
        require_agreement(tensors, layout)
        self._layout = layout
        self._clock = clock
        self._load_timeout_s = load_timeout_s
        self._closed = False
        device = device or device_of(tensors[0])
        self._streams = device.streams

        largest = max(layout.slot_bytes(group) for group in range(len(layout.groups)))
        memory = Memory(
            slot_bytes=largest,
            budget_bytes=staging_bytes,
            device=device,
            packs_on_device=staging == "device" and device.is_accelerator,
            host=host,
        )
        ports = open_ports(links, memory, layout, device, direct_min_extent_bytes=direct_min_extent_bytes)
        for link in links:
            if link is not None:
                link.connect()
        staged_bytes = sum(pool.slots_total * pool.slot_bytes for pool in memory.packed)
        self._table = JobTable(
            store_queue_limit_bytes=STORE_QUEUE_FACTOR * (staged_bytes or staging_bytes), clock=clock
        )
        pages = pages_of(layout)
        context = Context(
            table=self._table,
            layout=layout,
            packer=make_packer(tensors, pages, device),
            device_packer=None if memory.device is None else DevicePacker(tensors, pages, device),
            memory=memory,
            namespace=rank_namespace,
            verify_checksum=verify == "checksum",
            clock=clock,
            complaints=RateLog(logger, clock),
        )
        self._ports = [port for port in ports if port is not None]
        paths = ChunkPaths(context, ports, keep_alive=tuple(tensors))
        self._pump = Pump(self._table, paths, load_timeout_s=load_timeout_s, clock=clock, name="nixl-offload-pump")
        logger.info(
            "Engine: %s, %s, verify=%s",
            ", ".join(f"{link.name} by {link.mover.name}" for link in links if link is not None) or "no tier",
            " and ".join(_words(pool) for pool in memory.packed) or "no staging",
            verify,
        )
        self._pump.start()

    def submit_store(self, job_id: int, chunks: Sequence[ChunkIO]) -> None:
        """Queue a store of blocks that the compute stream has written, or will have when it gets here.

        Never blocks on I/O and never raises for storage reasons. Under pressure chunks become DROPPED at once.
        The blocks of each chunk must reach to the chunk's end.
        """
        self._submit(job_id, chunks, is_store=True, lane=Lane.STORE)

    def submit_load(self, job_id: int, chunks: Sequence[ChunkIO], *, expedited: bool = False) -> None:
        """Queue a load. ``expedited`` puts it before the loads that wait already."""
        self._submit(job_id, chunks, is_store=False, lane=Lane.EXPEDITED_LOAD if expedited else Lane.LOAD)

    def submit_move(self, job_id: int, chunks: Sequence[ChunkIO], *, is_store: bool) -> None:
        """Queue whole images, from their host slots to storage or back, behind all loads and stores.

        The caller bounds how many there are. One that has not begun after ``MOVE_QUEUE_LIMIT_S`` is DROPPED.
        """
        self._submit(job_id, chunks, is_store=is_store, lane=Lane.MOVE)

    def finished(self) -> list[JobResult]:
        """Return the jobs that ended since the last call, each exactly once over all calls."""
        self._table.expire_loads(self._load_timeout_s)
        results = self._table.drain()
        for result in results:
            logger.debug(
                "job %d (%s): %d chunks, %d bytes, %.1f ms %s",
                result.job_id,
                "store" if result.is_store else "load",
                len(result.outcomes),
                result.bytes_moved,
                result.seconds * 1e3,
                "; ".join(result.errors),
            )
        return results

    def landed(self) -> list[Landed]:
        """Return what became of host slots that loads or moves were to fill, each job's exactly once over all calls.

        Told when nothing moves in any of the job's slots any more: before its result, or long after it.
        """
        return self._table.drain_landed()

    def wait(self, job_ids: Collection[int], limit_s: float | None = None) -> None:
        """Stores: return as soon as their source blocks may be reused. Loads: return when they are finished.

        Chunks not yet gathered get ``STORE_GRACE_S``, then they are DROPPED; chunks already on their way from staging
        do not hold this up, however slow the storage. After ``limit_s`` (``WAIT_LIMIT_S``) the rest is given up too: a
        direct store in flight can then only end as FAILED. Only a load that is writing to its blocks is waited for
        without limit. Unknown ids are done.
        """
        self._table.wait_source_free(job_ids, STORE_GRACE_S, WAIT_LIMIT_S if limit_s is None else limit_s)

    def idle(self) -> bool:
        """True if no job is live, no host slot is being filled, and there is nothing to tell."""
        return self._table.idle()

    def standing(self) -> Standing:
        """Return what waits here, whether storage is in use and by what way it is reached, for metrics.

        Where there are several links the word on trouble is the first one's that has some. It may be a moment old.
        """
        if not self._ports:
            return Standing(Waiting(*self._table.waiting_bytes()))
        trouble = next((word for port in self._ports if (word := port.link.trouble) != "none"), "")
        ways = tuple(sorted({plan.way for port in self._ports for plan in port.plans if plan.block_bytes}))
        equipment = Equipment(self._ports[0].link.mover.name, ways)
        return Standing(Waiting(*self._table.waiting_bytes()), trouble, equipment)

    def close(self, deadline_s: float = 5.0) -> None:
        """Finish what ``deadline_s`` allows; queued stores and moves become DROPPED then, all else FAILED. Idempotent.

        Afterwards the pump is gone, ``finished`` and ``landed`` still give the last results, and new jobs fail at once.
        Memory that a hung transfer may still touch is kept for the life of the process; host slots that one may still
        fill are TAINTED.
        """
        if self._closed:
            return
        self._closed = True
        if not self._pump.stop(deadline_s):
            logger.error("The pump hangs in a system call; it is left behind with its memory")
            self._table.give_up("the engine was closed while storage hung")

    def _submit(self, job_id: int, chunks: Sequence[ChunkIO], *, is_store: bool, lane: Lane) -> None:
        move = lane is Lane.MOVE
        fence = READY if move else self._streams.compute_fence()
        sized = [(io, self._payload_bytes(io)) for io in chunks]
        self._table.add(Job(job_id, is_store, fence, self._clock(), is_move=move), sized, lane)

    def _payload_bytes(self, io: ChunkIO) -> int:
        if not 0 <= io.group < len(self._layout.groups):
            return 0
        blocks = len(io.block_ids)
        if not blocks and io.host_offset is not None:
            blocks = self._layout.blocks_per_chunk
        return blocks * self._layout.groups[io.group].block_bytes


def _words(pool: StagingPool | DeviceStagingPool) -> str:
    where = "on the device" if isinstance(pool, DeviceStagingPool) else "in host memory"
    return f"{pool.slots_total} staging slots of {pool.slot_bytes / 2**20:.2f} MiB {where}"
