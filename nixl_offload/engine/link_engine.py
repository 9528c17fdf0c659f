"""The engine of a tier that a link reaches: a slab, a shared directory, a bucket. ``LinkPaths`` decides which path its
chunks take, and how many may start at once; all else of the engine is in ``pump``.

Threading: see ``pump.TierEngine``. Ownership: the engine owns its link, the link's mover, its staging and the pump.
"""

from __future__ import annotations

import logging
import math
import os
import resource
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from nixl_offload.chunk.authentication import ChunkKeys
from nixl_offload.chunk.layout import KVLayout
from nixl_offload.chunk.shards import Shard
from nixl_offload.engine.batch import InFlight, Phase
from nixl_offload.engine.host import HostSlab
from nixl_offload.engine.jobs import JobTable, TierQueue
from nixl_offload.engine.link_memory import HEADER_PAGES, give_memory
from nixl_offload.engine.packer import make_packer, pages_of, require_agreement
from nixl_offload.engine.pump import Pauses, TierEngine
from nixl_offload.engine.ratelog import RateLog
from nixl_offload.engine.records import Chunk
from nixl_offload.engine.staging import SlotPool, Staging
from nixl_offload.engine.states import WorkKind
from nixl_offload.engine.streams import Device, device_of
from nixl_offload.engine.transfer_paths import direct, packed
from nixl_offload.engine.transfer_paths.common import TierPaths, out_of_use
from nixl_offload.engine.transfer_statistics import TierAccess, TierStatus, Waiting
from nixl_offload.errors import LayoutError
from nixl_offload.movers.base import MemoryKind
from nixl_offload.tiers.base import Link
from nixl_offload.types import Verify

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
        memory = give_memory(
            link,
            layout,
            device,
            staging_bytes=staging_bytes,
            packs_on_device=staging == "device" and device.is_accelerator and keys is None,
            direct_min_extent_bytes=direct_min_extent_bytes,
            host=host,
            authenticated=keys is not None,
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
            table=table,
            layout=layout,
            plans=memory.plans,
            packer=make_packer(tensors, pages_of(layout), device),
            host=host,
            namespaces=[shard.digest for shard in shards] or [rank_namespace] * len(layout.groups),
            verify_checksum=verify != "header",
            rate_log=RateLog(logger, table.clock),
            keep_alive=tuple(tensors),
            link_memory=memory,
            keys=keys,
        )
        limit_bytes = STORE_QUEUE_FACTOR * (staged_bytes or staging_bytes)
        queue = TierQueue(table, tier, layout, store_limit_bytes=limit_bytes)
        super().__init__(queue, paths, name="nixl-offload-pump", pauses=PAUSES)


def _words(pool: SlotPool[Any]) -> str:
    where = "on the device" if pool.region.kind is MemoryKind.VRAM else "in host memory"
    return f"{pool.slots_total} staging slots of {pool.slot_bytes / 2**20:.2f} MiB {where}"


@dataclass(eq=False, kw_only=True)
class LinkPaths(TierPaths):
    """Of chunks that go by the link's mover. Owns link and mover, and closes them."""

    _own_chunks: int = field(default=OWN_CHUNKS, init=False)
    _look_s: float = field(default=-math.inf, init=False)
    """When to count descriptors again."""

    def room(self, chunk: Chunk, in_flight: InFlight) -> int | str:
        """Return how many chunks like ``chunk`` there are slots and I/O for: one batch at most. A load of a suspect
        tier shall not wait: nobody knows when it answers what takes up its room.
        """
        room = self._room(chunk, in_flight)
        link = self.linked.link
        if room < 1 and not chunk.kind.writes and not chunk.kind.in_background and link.suspect:
            return out_of_use(link)
        return room

    def _room(self, chunk: Chunk, in_flight: InFlight) -> int:
        plan = self.plans[chunk.group]
        slot_bytes = max(1, plan.slot_bytes)
        total, most = self._own_chunks, OWN_BATCH_CHUNKS
        if self.linked.link.shares_file:
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
        pool = self.linked.pools.get(plan.path)
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
            self.rate_log.warning(
                "descriptors",
                "%d of %d files that this process may have open are left (RLIMIT_NOFILE, ulimit -n): %d chunks of the "
                "%s travel at once instead of %d",
                left,
                limit,
                self._own_chunks,
                self.linked.link.name,
                OWN_CHUNKS,
            )
        return self._own_chunks

    def find_slot(self, chunk: Chunk) -> None:
        """See ``TierPaths``."""
        if self._by_host_slot(chunk):
            if self.host is None or chunk.host_offset is None:
                raise LayoutError("there is no host memory in this engine")
            chunk.host = self.host.slot(chunk.host_offset, self.plans[chunk.group].slot_bytes)

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
            return self.linked.host is not None or not len(chunk.block_ids)
        return chunk.kind in {WorkKind.WRITE_THROUGH, WorkKind.FETCH}

    def status(self, waiting: Waiting) -> TierStatus:
        """See ``TierPaths``."""
        link = self.linked.link
        paths = tuple(sorted({plan.path for plan in self.plans if plan.block_bytes}))
        return TierStatus(waiting, "" if link.trouble == "none" else link.trouble, TierAccess(link.mover.name, paths))

    def look(self) -> float | None:
        """Look at the transfers of the link's mover."""
        return self.linked.link.mover.look()

    def close(self) -> None:
        """Close the link and its mover."""
        self.linked.link.close()
        self.linked.link.mover.close()
