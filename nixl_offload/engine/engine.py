"""The engine of a tier that a link reaches: a slab, a shared directory, a bucket.

Threading: see ``pump.TierEngine``. Ownership: the engine owns its link, the link's mover, its staging and the pump.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from nixl_offload.chunk.authentication import ChunkKeys
from nixl_offload.chunk.layout import KVLayout
from nixl_offload.chunk.shards import Shard
from nixl_offload.engine.host import HostSlab
from nixl_offload.engine.jobs import JobTable, TierQueue
from nixl_offload.engine.link_memory import open_link
from nixl_offload.engine.packer import make_packer, pages_of, require_agreement
from nixl_offload.engine.pump import POLL_S, STUCK_POLL_S, Pauses, TierEngine
from nixl_offload.engine.ratelog import RateLog
from nixl_offload.engine.staging import SlotPool, Staging
from nixl_offload.engine.streams import Device, device_of
from nixl_offload.engine.transfer_paths.common import Context
from nixl_offload.engine.transfer_paths.link_paths import LinkPaths
from nixl_offload.engine.transfer_statistics import TierAccess, TierStatus
from nixl_offload.movers.base import MemoryKind
from nixl_offload.tiers.base import Link
from nixl_offload.types import Verify

logger = logging.getLogger(__name__)

DIRECT_MIN_EXTENT_BYTES = 1 << 20
"""Smallest piece that a direct group may consist of. Below it a copy through staging into one large extent is cheaper
than the descriptors (64 KiB pieces: 2.2 GB/s against 2.7 at 2 MiB); to be measured again on real GDS."""
STORE_QUEUE_FACTOR = 4
"""Stores may wait for this many times the staging memory; what comes on top is dropped at once."""
PAUSES = Pauses(poll_s=POLL_S, crowd_poll_s=0.001, crowd=8, slow_poll_s=STUCK_POLL_S, slow_after_s=0.25)
"""NIXL's POSIX I/O moves only when polled: at 1 ms small extents run at full speed, at 5 ms at a third of it; without a
pause polling burns half a CPU second per GB. A poll costs some 5 µs of Python per batch, and with many in flight none
of them is waited for by the half millisecond."""


class Engine(TierEngine):
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
        self._link_memory = open_link(
            link,
            layout,
            device,
            staging_bytes=staging_bytes,
            packs_on_device=staging == "device" and device.is_accelerator and keys is None,
            direct_min_extent_bytes=direct_min_extent_bytes,
            host=host,
            authenticated=keys is not None,
        )
        for plan, shard in zip(self._link_memory.plans, shards, strict=bool(shards)):
            plan.shard = shard.number
        link.connect()
        pools = [pool for path, pool in self._link_memory.pools.items() if path != "direct"]
        staged_bytes = sum(pool.slots_total * pool.slot_bytes for pool in pools)
        limit_bytes = STORE_QUEUE_FACTOR * (staged_bytes or staging_bytes)
        super().__init__(TierQueue(table, tier, layout, store_limit_bytes=limit_bytes), device.streams.compute_fence)
        context = Context(
            table=table,
            layout=layout,
            packer=make_packer(tensors, pages_of(layout), device),
            host=host,
            link_memory=self._link_memory,
            namespaces=[shard.digest for shard in shards] or [rank_namespace] * len(layout.groups),
            keys=keys,
            verify_checksum=verify != "header",
            rate_log=RateLog(logger, table.clock),
        )
        logger.info(
            "Engine: %s by %s, %s, %s",
            link.name,
            link.mover.name,
            " and ".join(map(_words, pools)) or "no staging",
            f"verify={verify}" if keys is None else f"authenticated by key {keys.first_id.hex()}",
        )
        paths = LinkPaths(context, self._link_memory.plans, tuple(tensors))
        self._start(paths, name="nixl-offload-pump", pauses=PAUSES)

    def status(self) -> TierStatus:
        """Return what waits here, why nothing is stored if that is so, and how the tier is reached."""
        link = self._link_memory.link
        paths = tuple(sorted({plan.path for plan in self._link_memory.plans if plan.block_bytes}))
        trouble = "" if link.trouble == "none" else link.trouble
        return TierStatus(self.queue.waiting(), trouble, TierAccess(link.mover.name, paths))


def _words(pool: SlotPool[Any]) -> str:
    where = "on the device" if pool.region.kind is MemoryKind.VRAM else "in host memory"
    return f"{pool.slots_total} staging slots of {pool.slot_bytes / 2**20:.2f} MiB {where}"
