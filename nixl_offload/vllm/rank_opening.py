"""What the scheduler's half knows of the ranks that open their tiers, between the handshake and the first job.

Threading: the scheduler's thread. Reads no clock: time is passed in.
"""

from __future__ import annotations

from collections.abc import Mapping

from nixl_offload.vllm.messages import Place, RankStatus

RANKS_WAIT_S = 5.0
"""Requests wait so long at most, from the first that came, for the ranks to open their tiers."""


class RankOpening:
    """Says once where the tiers are, and waits for the word of every rank."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._has_begun = False
        self._places: tuple[Place, ...] | None = None
        """Until the ranks are told."""
        self._ranks: dict[int, RankStatus] = {}
        self._held_since_s: float | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether the ranks are to open tiers, and some rank has not told how that ended."""
        return self._has_begun and len(self._ranks) < self._world_size

    @property
    def broken_ranks(self) -> list[int]:
        """The ranks that could open none of their tiers."""
        return sorted(rank for rank, status in self._ranks.items() if not status.is_open)

    def begin(self, places: tuple[Place, ...]) -> None:
        """The tiers are open here; the ranks are to open theirs."""
        self._has_begun = True
        self._places = places

    def take_places(self) -> tuple[Place, ...] | None:
        """Return where the tiers are, once; None: not yet, or the ranks were told."""
        places, self._places = self._places, None
        return places

    def update(self, ranks: Mapping[int, RankStatus]) -> None:
        """Take the word of ranks whose status has changed; a rank with nothing to open may be early."""
        self._ranks.update(ranks)

    def holds_requests(self, now_s: float) -> bool:
        """Whether a request had better wait, which takes a moment: else the first one after a start would find nothing
        of what is stored. ``RANKS_WAIT_S`` bounds it.
        """
        if not self.is_under_way or self.broken_ranks:
            return False
        if self._held_since_s is None:
            self._held_since_s = now_s
        return now_s - self._held_since_s < RANKS_WAIT_S
