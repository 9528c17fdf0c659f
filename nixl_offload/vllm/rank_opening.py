"""What the scheduler's half knows of the ranks that open their halves of the tiers.

Threading: the scheduler's thread. Reads no clock: time is passed in.
"""

from __future__ import annotations

from collections.abc import Mapping

from nixl_offload.tiers.kinds import AnyPlace
from nixl_offload.vllm.closed_tier import RANKS_WAIT_S
from nixl_offload.vllm.messages import RankStatus


class RankOpening:
    """Says once where each tier is, and remembers what every rank has told of it. Tiers are positions in the config."""

    def __init__(self, world_size: int, number: int = 0) -> None:
        """``number``: which opening of the tiers this is."""
        self.number = number
        self._world_size = world_size
        self._untold: dict[int, AnyPlace] = {}
        self._added_s: dict[int, float] = {}
        """Since when the ranks are to open a tier; for those that are not open on all of them."""
        self._ranks: dict[int, RankStatus] = {}
        self.failed: frozenset[int] = frozenset()
        """The tiers that some rank could not open, as far as it has tried; also anew, after it has slept."""

    def add(self, position: int, place: AnyPlace, now_s: float) -> None:
        """A tier is open here; the ranks are to open theirs."""
        self._untold[position] = place
        self._added_s[position] = now_s

    def take_places(self) -> dict[int, AnyPlace]:
        """Return where the tiers are that were added since the last call."""
        places, self._untold = self._untold, {}
        return places

    def update(self, ranks: Mapping[int, RankStatus]) -> None:
        """Take the word of ranks whose status has changed."""
        self._ranks.update({rank: status for rank, status in ranks.items() if status.opening == self.number})
        self.failed = frozenset(at for status in self._ranks.values() for at in status.failed)

    def take_open(self) -> list[int]:
        """Return the tiers that every rank has opened, each once."""
        if len(self._ranks) < self._world_size:
            return []
        is_open = [at for at in self._added_s if all(at in status.open for status in self._ranks.values())]
        for position in is_open:
            del self._added_s[position]
        return is_open

    def awaited(self, now_s: float, longer_than_s: float = 0.0) -> set[int]:
        """Return the tiers that not all ranks have opened, as of now, since longer than that."""
        return {at for at, added_s in self._added_s.items() if now_s - added_s >= longer_than_s}

    def is_under_way(self, now_s: float) -> bool:
        """Whether some rank is just opening a tier. Nobody waits for one that has taken ``RANKS_WAIT_S``: it hangs."""
        return any(at not in self.failed and now_s - added_s < RANKS_WAIT_S for at, added_s in self._added_s.items())
