"""Which chunks became loadable, or ceased to be, by tier: the source of vLLM's events.

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
    """Changes since the last ``take``, in their order."""

    def __init__(self) -> None:
        self.log: list[tuple[int, bool, list[Key]]] = []
        """Tier, whether the chunks were removed, and the chunks."""

    def add(self, tier: int, keys: Iterable[Key], *, removed: bool) -> None:
        """Record that ``keys`` became loadable from a tier, or ceased to be."""
        keys = list(keys)
        if not keys:
            return
        if self.log and self.log[-1][:2] == (tier, removed):
            self.log[-1][2].extend(keys)
        else:
            self.log.append((tier, removed, keys))

    def take(self) -> list[Change]:
        """Return all changes, and forget them."""
        log, self.log = self.log, []
        return [Change(tier, tuple(keys), removed) for tier, removed, keys in log]
