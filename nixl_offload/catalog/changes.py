"""Which chunks became loadable and which ceased to be, per tier: what vLLM's events are made of.

Threading: the scheduler's thread alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from nixl_offload.types import Key


@dataclass(frozen=True, slots=True)
class Change:
    """Chunks that became loadable from a tier, or ceased to be."""

    tier: int
    keys: tuple[Key, ...]
    removed: bool


class Changes:
    """What became of chunks since it was asked for last, in the order in which it happened."""

    def __init__(self) -> None:
        self.log: list[tuple[int, bool, list[Key]]] = []
        """Tier, whether they were removed, and the chunks. Empty: ``take`` has nothing to return."""

    def tell(self, tier: int, keys: Iterable[Key], *, removed: bool) -> None:
        """Append ``keys``."""
        keys = list(keys)
        if not keys:
            return
        if self.log and self.log[-1][:2] == (tier, removed):
            self.log[-1][2].extend(keys)
        else:
            self.log.append((tier, removed, keys))

    def take(self) -> list[Change]:
        """Return all of it, and begin anew."""
        log, self.log = self.log, []
        return [Change(tier, tuple(keys), removed) for tier, removed, keys in log]
