"""What an index keeps per slot size.

Threading: none; owned by one index.
"""

from __future__ import annotations

from dataclasses import dataclass

from nixl_offload.index.policy import Policy
from nixl_offload.index.slot_map import SlotMap
from nixl_offload.index.states import Phase


@dataclass(frozen=True, slots=True)
class Occupancy:
    """How many slots of one size class are taken, by what."""

    slot_bytes: int
    writing: int
    ready: int
    """Unpinned: could be evicted now."""
    pinned: int
    """READY and pinned."""
    evicting: int
    """Dropped, but still held by a writer or by readers."""

    @property
    def slots(self) -> int:
        """All slots taken."""
        return self.writing + self.ready + self.pinned + self.evicting

    @property
    def bytes_total(self) -> int:
        """All bytes taken, on each rank."""
        return self.slots * self.slot_bytes


class SizeClass:
    """All that belongs to one slot size."""

    __slots__ = ("counts", "policy", "slots")

    def __init__(self, slot_bytes: int, policy: Policy) -> None:
        self.slots = SlotMap(slot_bytes)
        self.policy = policy
        self.counts = [0] * len(Phase)
        """Keys per phase."""

    def occupancy(self) -> Occupancy:
        """Return what is taken. Costs nothing per key."""
        counts = self.counts
        return Occupancy(
            slot_bytes=self.slots.slot_bytes,
            writing=counts[Phase.WRITING],
            ready=counts[Phase.READY],
            pinned=counts[Phase.PINNED],
            evicting=counts[Phase.DOOMED] + counts[Phase.LEAVING],
        )
