"""``MemoryPaths``, of the memory tier: copies chunks between KV blocks and slots of the host slab, in batches.

Threading: see ``pump.TierEngine``; the pump alone drives the packer and touches slots. Nothing waits for a device:
fences are polled. Ownership: the catalog owns the slots and reuses none before its chunk's outcome is reported. The
caller owns KV tensors and slab, and closes them after the engine.
"""

from __future__ import annotations

from collections.abc import Sequence

from nixl_offload.engine import image, packed
from nixl_offload.engine.paths import InFlight, Phase, TierPaths, TierSetup
from nixl_offload.engine.records import Chunk, TierAccess, TierStatus, Waiting, WorkKind
from nixl_offload.errors import LayoutError
from nixl_offload.movers.base import MoverLimits

STORE_BATCH_BYTES = 64 << 20
"""Most bytes that one call copies for a store; a new load waits at most for these."""
LOAD_BATCH_BYTES = 16 << 20
"""Smaller, so that the next batch is verified while a device copies this one."""
MAX_BATCH_CHUNKS = 32
"""So many of one block hold the GIL for some 100 µs in each step: see ``paths.Stretch``."""
MAX_BATCHES = 8
"""Most batches in flight on a device."""
MAX_STORE_BATCHES = 4
"""Most of these that are stores."""
STORE_QUEUE_BYTES = 1 << 30
"""Limit of waiting stores."""
POLL_S = 0.0002
"""Between polls of fences. A batch takes a device one to three milliseconds. If nothing ends for longer, the batches
wait for the fence of a running step."""


class MemoryPaths(TierPaths):
    """The paths of the memory tier.

    A load becomes OK only after identity and lengths were compared with the header in the slot; on CORRUPT or FAILED
    its KV blocks are untouched. Nothing touches the slot of a FAILED or DROPPED store.

    Memory is as trustworthy as vLLM's own KV cache, so stores and loads compute no checksums; the first write-through
    does, unless a device summed the blocks (``packed``). With ``verify="always"`` stores compute them and loads verify.

    Engines of farther tiers do write-throughs and fetches, from and to these slots. Submitted here, such chunks are
    FAILED.
    """

    thread_name = "nixl-offload-memory"
    poll_s = POLL_S
    slow_after_s = 0.05
    store_limit_bytes = STORE_QUEUE_BYTES

    def __init__(self, setup: TierSetup) -> None:
        """Raises LayoutError if tensors and layout disagree."""
        super().__init__(setup, verify_checksum=setup.verify == "always")
        self.plans = [
            image.make_plan(self.layout, group, MoverLimits(whole_writes=True))
            for group in range(len(self.layout.groups))
        ]

    def room(self, chunk: Chunk, in_flight: InFlight) -> int:
        """Return how many chunks like ``chunk`` make a batch; 0 at the limit of batches in flight."""
        if in_flight.batches >= MAX_BATCHES or (chunk.kind.writes and in_flight.store_batches >= MAX_STORE_BATCHES):
            return 0
        batch_bytes = STORE_BATCH_BYTES if chunk.kind.writes else LOAD_BATCH_BYTES
        # Count in whole chunks: the first of a job may be a short tail.
        plan = self.plans[chunk.group]
        return min(MAX_BATCH_CHUNKS, max(1, batch_bytes // max(1, plan.blocks * plan.block_bytes)))

    def route(self, chunk: Chunk) -> Sequence[Phase]:
        """See ``TierPaths``."""
        location, host = chunk.location, self.host
        assert host is not None
        if chunk.kind not in {WorkKind.STORE, WorkKind.LOAD} or chunk.host_offset is not None:
            raise LayoutError("the memory tier copies between its own slots and KV blocks only")
        if location.offset + location.slot_bytes > host.memory_bytes:
            raise LayoutError(f"{location} lies beyond the {host.memory_bytes} bytes of the memory tier")
        chunk.host_slot = host.slot(location.offset, location.slot_bytes)
        return packed.MEMORY_STORE if chunk.kind.writes else packed.MEMORY_LOAD

    def status(self, waiting: Waiting) -> TierStatus:
        """Memory is never unavailable."""
        return TierStatus(waiting, "", TierAccess("copy", ("host",)))
