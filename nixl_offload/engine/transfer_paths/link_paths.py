"""Which path the chunks of a tier take, and how many may start at once.

Threading: the pump's thread; ``room`` and ``why_not`` also under the job table's lock. Ownership: the link and its
mover belong to the paths, which close them; slots belong to batches.
"""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Sequence

from nixl_offload.engine.batch import Batch
from nixl_offload.engine.image import GroupPlan
from nixl_offload.engine.link_memory import HEADER_PAGES
from nixl_offload.engine.pump import InFlight
from nixl_offload.engine.records import Chunk
from nixl_offload.engine.states import WorkKind
from nixl_offload.engine.transfer_paths import direct, packed
from nixl_offload.engine.transfer_paths.common import Context, Phase, TierPaths, out_of_use
from nixl_offload.errors import LayoutError

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


class LinkPaths(TierPaths):
    """A chunk's failure is its own outcome; nothing raises for reasons of storage."""

    def __init__(self, context: Context, plans: Sequence[GroupPlan], keep_alive: Sequence[object] = ()) -> None:
        super().__init__(context, plans, keep_alive)
        self._own_chunks = OWN_CHUNKS
        self._look_s = -math.inf
        """When to count descriptors again."""

    def room(self, chunk: Chunk, in_flight: InFlight) -> int:
        """Return how many chunks like ``chunk`` there are slots and I/O for: one batch at most."""
        plan = self._plans[chunk.group]
        slot_bytes = max(1, plan.slot_bytes)
        total, most = self._own_chunks, OWN_BATCH_CHUNKS
        if self._context.linked.link.shares_file:
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
        pool = self._context.linked.pools.get(plan.path)
        if pool is None or not pool.usable:
            return min(limit, 1)  # it will be rejected
        limit = min(limit, max(1, pool.usable // BATCH_SHARE), pool.free)
        if chunk.kind.writes:
            reserve = max(1, int(pool.usable * LOAD_RESERVE))
            limit = min(limit, max(1, pool.usable - reserve) - in_flight.stores)
        return limit

    def _look_at_descriptors(self) -> int:
        """Return how many chunks with a file or object of their own may be in flight, now that none is."""
        now_s = self._context.clock()
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
            self._context.rate_log.warning(
                "descriptors",
                "%d of %d files that this process may have open are left (RLIMIT_NOFILE, ulimit -n): %d chunks of the "
                "%s travel at once instead of %d",
                left,
                limit,
                self._own_chunks,
                self._context.linked.link.name,
                OWN_CHUNKS,
            )
        return self._own_chunks

    def why_not(self, chunk: Chunk) -> str | None:
        """Say why a load shall not wait: nobody knows when a suspect tier answers what takes up its room."""
        link = self._context.linked.link
        return out_of_use(link) if link.suspect else None

    def look(self) -> float | None:
        """Look at the transfers of the link's mover."""
        return self._context.linked.link.mover.look()

    def abandon(self, batch: Batch, error: str | None) -> None:
        """Have the link undo what was begun for a batch and not ended."""
        self._context.abandon(batch, error)

    def close(self) -> None:
        """Close the link and its mover."""
        link = self._context.linked.link
        link.close()
        link.mover.close()

    def _find_slot(self, chunk: Chunk, plan: GroupPlan) -> None:
        if self._by_host_slot(chunk):
            host, offset = self._context.host, chunk.host_offset
            if host is None or offset is None:
                raise LayoutError("there is no host memory in this engine")
            chunk.host = host.slot(offset, plan.slot_bytes)

    def _phase(self, chunk: Chunk, plan: GroupPlan) -> Phase:
        if self._by_host_slot(chunk):
            return packed.write_through if chunk.kind.writes else packed.fetch
        if plan.path == "direct":
            return direct.store if chunk.kind.writes else direct.load
        return packed.store if chunk.kind.writes else packed.load

    def _by_host_slot(self, chunk: Chunk) -> bool:
        """Whether a chunk goes by its host slot. A promotion whose tier cannot touch that serves its KV blocks all the
        same.
        """
        if chunk.kind is WorkKind.PROMOTION:
            return self._context.linked.host is not None or not len(chunk.block_ids)
        return chunk.kind in {WorkKind.WRITE_THROUGH, WorkKind.FETCH}
