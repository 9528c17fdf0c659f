"""The scheduler's half of a memory tier: slots of host memory, which nothing outlives.

Threading: called by the scheduler's thread alone. No I/O.
Ownership: what a ``SlotTier`` owns. The memory itself belongs to the ranks, which take it whole at start.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from nixl_offload.config import MemoryConfig
from nixl_offload.errors import ConfigError
from nixl_offload.index import State
from nixl_offload.tiers.base import TierContext
from nixl_offload.tiers.slot_tier import SlotTier
from nixl_offload.tiers.slots import SLOTS_PER_EXTENT_MIN, SlotAllocator, choose_extent_bytes
from nixl_offload.types import PAGE_BYTES, Key, align_up
from nixl_offload.units import format_size

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MemoryPlace:
    """What the ranks need to know of the tier; sent to them once, when the tier opens."""

    rank_namespaces: tuple[bytes, ...]
    """By rank or by shard, the 32 bytes that shard headers carry."""
    rank_bytes: int
    """Every slot lies within ``[0, rank_bytes)`` of a rank's memory; at most what ``rank_memory_bytes`` says."""


def rank_memory_bytes(capacity_bytes: int, world_size: int, dp_size: int) -> int:
    """Return what each rank takes of a memory tier's capacity, in whole pages.

    ``capacity_bytes`` is shared by ``world_size`` ranks of each of ``dp_size`` data-parallel engines. Both halves ask
    here, so that no slot lies outside of what a rank has.
    """
    return capacity_bytes // (world_size * dp_size) // PAGE_BYTES * PAGE_BYTES


class MemoryTier(SlotTier):
    """Slots of host memory, one index for all ranks. A pinned chunk keeps its slot."""

    def __init__(self, position: int, place: MemoryPlace, allocator: SlotAllocator) -> None:
        """Put the parts together; ``open`` is the usual way."""
        super().__init__(position, allocator)
        self.place: MemoryPlace = place

    @classmethod
    def open(cls, config: MemoryConfig, context: TierContext) -> MemoryTier:
        """Deal the capacity out to ranks and return the tier, empty.

        Raises ConfigError when the capacity is too small for this model; it names the least that would do.
        """
        classes, world_size, dp_size = context.slot_classes, context.world_size, len(context.dp_engines)
        available_bytes = rank_memory_bytes(config.capacity_bytes, world_size, dp_size)
        least_rank_bytes = len(classes) * SLOTS_PER_EXTENT_MIN * classes[-1]
        if available_bytes < least_rank_bytes:
            least_bytes = align_up(least_rank_bytes * world_size * dp_size, 1 << 20)
            raise ConfigError(
                f"capacity {format_size(config.capacity_bytes)} of the memory tier is too small for this model: slots "
                f"of {classes[-1]} bytes on {world_size} ranks and {dp_size} data-parallel engines need at least "
                f"{format_size(least_bytes)}"
            )
        allocator = SlotAllocator(available_bytes, classes, _extent_bytes(available_bytes, classes))
        logger.info(
            "Memory tier: room for %.1f GiB per rank (%d ranks of each of %d engines), up to %d chunks",
            allocator.rank_bytes / 2**30,
            world_size,
            dp_size,
            allocator.rank_bytes // classes[0],
        )
        place = MemoryPlace(context.namespace.rank_digests, allocator.rank_bytes)
        return cls(context.position, place, allocator)

    def _gives_way(self, key: Key) -> bool:
        # A pin may be for a chunk that exists nowhere else yet, which a farther tier is still to have.
        return self._index.state(key) is State.READY and not self._index.pins(key)


def _extent_bytes(rank_bytes: int, classes: Sequence[int]) -> int:
    """One extent where there is nothing to share among classes, so that no memory is left over; else as a slab's."""
    if len(classes) == 1:
        return rank_bytes // classes[0] * classes[0]
    return choose_extent_bytes(rank_bytes, classes)
