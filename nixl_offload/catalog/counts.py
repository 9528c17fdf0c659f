"""What a catalog holds and has done, in figures.

Threading: immutable values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Counts:
    """What a catalog holds and has done; for metrics. Bytes are per rank."""

    storing_bytes: tuple[int, ...]
    """Being stored from KV blocks, by tier."""
    write_through_bytes: tuple[int, ...]
    """Being written through, by target."""
    unsaved_bytes: int
    """Pinned in memory for farther tiers."""
    pending_writes: tuple[int, ...]
    """Chunks that wait to be written through, by target."""
    write_throughs: Mapping[tuple[int, str], int]
    """Chunks by target and what became of them: ``ok``, ``failed``, ``corrupt``, ``dropped`` or ``tainted``; ``gone``:
    evicted or reset before their turn; ``refused``: their tier took nothing for too long; ``overflow``: too many
    waited."""
    not_admitted: int
    """Offers of chunks that were not asked for often enough yet."""
    no_room: int
    """Offers of chunks that no tier took: full, disabled, or too slow."""
    unanswered: int
    """The same, for lookups that left out a tier which had not answered and may have the chunks."""
    retained_bytes: tuple[int, ...]
    """Not to be evicted before a time, by tier."""
    prefetches_given_up: Mapping[str, int]
    """By why they ended early: see ``PrefetchQueue.given_up``."""
