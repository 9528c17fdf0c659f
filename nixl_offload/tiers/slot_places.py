"""Where a slot lies, on which of the ranks that hold the same shards: one numbering of slots for all of them.

Replicas on one machine have one copy of a chunk. The slots of an extent are dealt out to them in turn: slot ``s`` lies
on the replica ``s % replicas``, in the place that ``s // replicas`` would have on a rank by itself.

Threading: immutable values and pure functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd


@dataclass(frozen=True, slots=True)
class SlotPlaces:
    """How the offsets that a ``SlotAllocator`` hands out are to be read on a rank."""

    rank_bytes: int
    """What each rank has, in whole extents."""
    extent_bytes: int
    """Of one rank."""
    replicas: Mapping[int, int] = field(default_factory=dict)
    """By slot size: how many ranks in a row have one copy together. None named: every rank has its own. Each number
    divides the largest.
    """

    @property
    def together(self) -> int:
        """How many ranks in a row read each other's slots, at most."""
        return max(self.replicas.values(), default=1)

    @property
    def stride_bytes(self) -> int:
        """How far the offsets of an extent are from those of the next."""
        return self.extent_bytes * self.together

    def slots_per_extent(self, slot_bytes: int) -> int:
        """Return how many slots of a size an extent has, on all ranks that read each other's."""
        return self.extent_bytes // slot_bytes * self.replicas.get(slot_bytes, 1)

    def find(self, rank: int, offset: int, slot_bytes: int) -> tuple[int, int]:
        """Return which rank has the slot at ``offset`` for ``rank``, and the byte offset there."""
        copies = self.replicas.get(slot_bytes, 1)
        extent, inside = divmod(offset, self.stride_bytes)
        row, replica = divmod(inside // slot_bytes, copies)
        return rank // copies * copies + replica, extent * self.extent_bytes + row * slot_bytes

    def seen_from(self, rank: int, offset: int, slot_bytes: int) -> int:
        """Return where ``rank`` finds the slot: an offset below ``rank_bytes`` is its own, and those of ``neighbours``
        follow, ``rank_bytes`` each.
        """
        holder, inside = self.find(rank, offset, slot_bytes)
        return (holder - rank) % self.together * self.rank_bytes + inside

    def neighbours(self, rank: int) -> list[int]:
        """Return the other ranks that may have slots of this one's chunks, in the order of ``seen_from``."""
        together = self.together
        first = rank // together * together
        return [first + (rank - first + step) % together for step in range(1, together)]


def ranks_together(machines: Sequence[str], replicas: int) -> int:
    """Return how many ranks in a row can have one copy: the largest part of ``replicas`` that never crosses a machine.

    ``machines``: by rank, what is equal for ranks that open the same files by the same paths; "": not known.
    """
    for size in range(replicas, 1, -1):
        if replicas % size or len(machines) % size:
            continue
        rows = [machines[first : first + size] for first in range(0, len(machines), size)]
        if all(row[0] and len(set(row)) == 1 for row in rows):
            return size
    return 1


def replicas_of_slots(groups: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Return ``SlotPlaces.replicas`` of groups, each its slot size and how many ranks in a row have one copy.

    Groups with slots of one size share them, so they have what they have in common; and where two sizes do not fit each
    other, the smaller number gives way.
    """
    found: dict[int, int] = {}
    for slot_bytes, replicas in groups:
        found[slot_bytes] = gcd(replicas, found.get(slot_bytes, replicas))
    most = max(found.values(), default=1)
    return {size: gcd(number, most) for size, number in found.items()} if most > 1 else {}
